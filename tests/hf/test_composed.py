"""Together with the tools around a model: each works, or raises one error or warning at its place."""

import copy
import io
import multiprocessing
import pickle
import warnings

import pytest
import tiny
import torch
import transformers

import kvevict
from kvevict.models.compat import CACHE
from kvevict.policy.building import build

POLICIES = [
    ("take", dict(budget=18, probe=6, chunk_size=16)), ("snapkv", dict(budget=12, window=4)),
    ("fastkv", dict(budget=12, tsp_len=20)), ("laq", dict(budget=12, n_d=3)), ("adakv", dict(budget=12, window=4)),
]  # fmt: skip
SNAPKV = dict(budget=12, window=4)


def _saved(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("sent", [lambda net: pickle.loads(pickle.dumps(net)), _saved, copy.deepcopy])
@pytest.mark.parametrize("policy, options", POLICIES)
@pytest.mark.drawn(3)
def test_sent(policy, options, sent):
    """A patched model is patched when it arrives, and independent of the one that was sent."""
    net, inputs = tiny.model("llama" if policy == "fastkv" else "gemma2"), tiny.prompt(2, 50, pad=(0, 9))
    plain = tiny.generate(net, inputs)
    kvevict.patch(net, policy, **options)
    there = sent(net)
    want, kept = tiny.generate(net, inputs), kvevict.report(net)["kept"]
    assert torch.equal(tiny.generate(there, inputs), want) and kvevict.report(there)["kept"] == kept
    kvevict.unpatch(net)
    assert torch.equal(tiny.generate(there, inputs), want)
    assert torch.equal(tiny.generate(kvevict.unpatch(there), inputs), plain)
    assert torch.equal(tiny.generate(net, inputs), plain)


def _elsewhere(net, inputs, queue):
    queue.put((tiny.generate(net, inputs).tolist(), kvevict.report(net)["kept"]))


@pytest.mark.slow
def test_in_another_process():
    net, inputs = kvevict.patch(tiny.model(), "take", budget=18, probe=6, chunk_size=16), tiny.prompt(1, 50)
    want = tiny.generate(net, inputs).tolist()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_elsewhere, args=(net, inputs, queue))
    process.start()
    assert queue.get(timeout=120) == (want, kvevict.report(net)["kept"])
    process.join()


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, lambda net: torch.compile(net, backend="eager")])
def test_wrapped(wrap):
    net, inputs = tiny.model(), tiny.prompt(1, 50)
    with kvevict.evicting(net, "snapkv", **SNAPKV):
        want = tiny.generate(net, inputs)
    wrapped = wrap(net)
    assert kvevict.patch(wrapped, "snapkv", **SNAPKV) is wrapped
    assert torch.equal(tiny.generate(net, inputs), want)
    assert wrapped(**inputs, logits_to_keep=1).logits.shape[1] == 1
    assert kvevict.report(wrapped)["kept"][0] == [[12, 12]]
    assert kvevict.unpatch(wrapped) is wrapped and "forward" not in net.__dict__


def test_pipeline():
    net = tiny.model(vocab_size=256, bos_token_id=None, pad_token_id=None)
    pipe = transformers.pipeline("text-generation", model=net, tokenizer=tiny.byte_tokenizer())
    assert kvevict.patch(pipe, "snapkv", **SNAPKV) is pipe
    pipe("hello there, " * 5, max_new_tokens=3, do_sample=False)
    assert kvevict.report(pipe)["kept"][0] == [[12, 12]]
    assert kvevict.unpatch(pipe) is pipe and "forward" not in net.__dict__


def test_unpatched_under_a_wrapper_of_forward():
    """Autocast of `accelerate` and others wrap forward; the wrapper stays after `unpatch`."""
    net, inputs = tiny.model(), tiny.prompt(1, 50)
    plain = net(**inputs).logits
    kvevict.patch(net, "snapkv", **SNAPKV)
    ours = net.forward
    net.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    kvevict.unpatch(net)
    assert torch.equal(net(**inputs).logits, plain)
    kvevict.patch(net, "snapkv", **SNAPKV)
    net(**inputs, logits_to_keep=1)
    assert kvevict.report(net)["kept"][0] == [[12, 12]]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["layers", pytest.param("model", marks=pytest.mark.nightly)])
def test_compiled(part):
    """The whole model takes a minute to compile."""
    net, inputs = kvevict.patch(tiny.model(), "take", budget=18, probe=6, chunk_size=16), tiny.prompt(1, 50)
    want = tiny.generate(net, inputs)
    for module in net.model.layers[:1] if part == "layers" else [net]:
        module.compile(backend="eager")
    assert torch.equal(tiny.generate(net, inputs, new=2), want[:, :2])
    torch.compiler.reset()


def kept(net, inputs):
    """Positions of every layer's, row's and head's slots, after a prompt and some tokens."""
    net.generate(**inputs, max_new_tokens=8, do_sample=False)
    cache = net(**inputs, logits_to_keep=1).past_key_values
    own = [layer for layer in cache.layers if hasattr(layer, "positions")]
    return [[[head.tolist() for head in row] for row in layer.positions()] for layer in own]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_keep_first_is_a_sink(family):
    """For a score with sinks, `keep_first` of as many tokens is the same."""
    net, inputs, options = tiny.model(family), tiny.prompt(2, 50, pad=(0, 9)), dict(budget=14, chunk_size=16)
    kvevict.patch(net, "streaming", sink=5, **options)
    want = kept(net, inputs)
    kvevict.patch(net, "streaming", sink=0, keep_first=5, **options)
    assert kept(net, inputs) == want


NEED_MORE = {"oracle", "speckv", "lookahead", "gate"}  # than a model


@pytest.mark.parametrize("policy", sorted(set(kvevict.policies()) - NEED_MORE))
@pytest.mark.drawn(8)
def test_keep_first(policy):
    """The first tokens of every row and layer are kept by every policy, in its chunks, and the budget holds them."""
    net, inputs = tiny.model(), tiny.prompt(2, 120, pad=(0, 9))
    chunked = build(policy, budget=300).schedule == "chunk"
    own = dict(score=tiny.short_parts(8)) if policy == "lagkv" else {}
    kvevict.patch(net, policy, budget=76, keep_first=7, **own, **dict(chunk_size=40) if chunked else {})
    layers = kept(net, inputs)
    for row, start in ((0, 0), (1, 9)):
        assert sum(len(head) for layer in layers for head in layer[row]) <= 76 * 2 * 4
        assert all(head[:7] == list(range(start, start + 7)) for layer in layers for head in layer[row])


@pytest.mark.parametrize("options, text", [
    (dict(keep_first=-1), "keep_first must be at least 0"), (dict(keep_first=2.5), "keep_first must be a whole number"),
    (dict(keep_first=12), "budget >= 17"), (dict(keep_first=4, tsp=1, tsp_len=6), "tsp_len must be at least"),
])  # fmt: skip
def test_keep_first_is_checked(options, text):
    with pytest.raises((ValueError, TypeError), match=text):
        kvevict.patch(tiny.shared(), "snapkv", **SNAPKV | options)


def test_learned_tokens():
    """PEFT's prompt tuning: a warning, and with keep_first each row is read as alone."""
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6)
    net = peft.get_peft_model(tiny.model(), config).eval()
    with pytest.warns(UserWarning, match="6 learned tokens.*keep_first=6"):
        kvevict.patch(net, "snapkv", budget=16, window=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvevict.patch(net, "snapkv", budget=4096)  # as many as the model has positions
        kvevict.patch(net, "snapkv", budget=16, window=4, keep_first=6)
    inputs = tiny.prompt(2, 50, pad=(0, 9))  # PEFT's mask of it is 1..1 0..0 1..1
    out = net(**inputs, logits_to_keep=1)
    for layer in out.past_key_values.layers:
        assert all(head.tolist()[:6] == list(range(6)) for row in layer.positions() for head in row)
    got = out.logits
    alone = net(input_ids=inputs["input_ids"][:1], logits_to_keep=1).logits
    assert tiny.relative(got[:1], alone) < 1e-5


def test_use_cache_left_false():
    net, ids = kvevict.patch(tiny.model(), "snapkv", **SNAPKV), tiny.prompt(1, 50)["input_ids"]
    net.config.use_cache = False
    with pytest.warns(UserWarning, match="config.use_cache is False"):
        assert net(ids).past_key_values is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(ids, use_cache=False)
        net.train()(ids)


def test_scoring_before_anything_is_evicted():
    net, ids = kvevict.patch(tiny.model(), "snapkv", **SNAPKV), tiny.prompt(1, 50)["input_ids"]
    for more in (dict(), dict(chunk_size=64)):  # one chunk
        kvevict.patch(net, "snapkv", **more, **SNAPKV)
        with pytest.warns(UserWarning, match="logits of 50 tokens that were read before anything was evicted"):
            net(ids)
    kvevict.patch(net, "snapkv", chunk_size=16, **SNAPKV)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(ids)
        kvevict.patch(net, "snapkv", **SNAPKV)
        net(ids, logits_to_keep=1)
        net(ids[:, :9])
        net(ids, **{CACHE: transformers.DynamicCache(config=net.config)})
        tiny.generate(net, dict(input_ids=ids))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("record", [
    lambda net, ids: torch.jit.trace(net, ids, strict=False), lambda net, ids: torch.export.export(net, (ids,)),
    pytest.param(lambda net, ids: torch.export.export(torch.nn.Sequential(net), (ids,)), marks=pytest.mark.nightly),
    pytest.param(lambda net, ids: torch.export.export(net, (ids,), strict=True), marks=pytest.mark.nightly),
], ids=["trace", "export", "export around", "export strict"])  # fmt: skip
def test_recorded(record):
    """A record of one call would keep that call's slots; the unpatched model is recorded as ever."""
    net, inputs = kvevict.patch(tiny.model(), "snapkv", **SNAPKV), tiny.prompt(1, 50)
    want = tiny.generate(net, inputs)
    with pytest.raises(Exception, match=r"kvevict\.unpatch\(model\)"):
        record(net, inputs["input_ids"])
    assert torch.equal(tiny.generate(net, inputs), want)
    torch.compiler.reset()
    kvevict.unpatch(net).config.use_cache = False
    recorded = record(net, inputs["input_ids"])
    got = (recorded.module() if hasattr(recorded, "module") else recorded)(inputs["input_ids"])
    assert tiny.relative(got["logits"], net(**inputs).logits) < 1e-5
    torch.compiler.reset()


def test_refused():
    """And the model answers right afterwards."""
    net, inputs = kvevict.patch(tiny.model(), "snapkv", **SNAPKV), tiny.prompt(1, 50)
    want = tiny.generate(net, inputs)
    draft = kvevict.patch(tiny.model(seed=1), "snapkv", **SNAPKV)
    for call, text in (
        (lambda: net.generate_batch([[5, 6, 7]]), "continuous batching"),
        (lambda: tiny.generate(net, inputs, assistant_model=draft), "assistant_model is patched"),
        (lambda: tiny.generate(net, inputs, assistant_early_exit=2), "assistant_early_exit"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
        assert torch.equal(tiny.generate(net, inputs), want)
    assert torch.equal(tiny.generate(net, inputs, assistant_model=kvevict.unpatch(draft)), want)
