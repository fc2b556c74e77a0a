"""Bad input: one clear error or the right result, and the model answers right afterwards."""

import numpy as np
import pytest
import tiny
import torch
from tiny import generate, prompt, relative, shared
from transformers import DynamicCache, StaticCache, cache_utils

import kvevict
from kvevict.policy.building import build

TAKE = dict(budget=16, probe=6, chunk_size=16)


@pytest.fixture
def model():
    """A shared model that must answer as before after the test, patched and not."""
    model, inputs = shared(), prompt(2, 50, pad=(0, 9))
    plain = model(**inputs).logits
    with kvevict.evicting(model, "take", **TAKE):
        want = generate(model, inputs)
    kvevict.patch(model, "take", **TAKE)
    yield model
    assert torch.equal(generate(model, inputs), want)
    kvevict.unpatch(model)
    assert torch.equal(model(**inputs).logits, plain)


WRONG = [  # of `patch`, beside budget=64
    (dict(policy="snapvk"), "unknown policy 'snapvk'.*did you mean 'snapkv'"),
    (dict(policy="streamingllm"), "did you mean 'streaming'"), (dict(policy="xxxxxxxx"), "known: .*h2o.*tova"),
    (dict(policy="snapkv", windw=16), "unknown option 'windw'.*did you mean 'window'"),
    (dict(policy="snapkv", pool="mean"), "unknown pool 'mean'"),
    (dict(policy="snapkv", schedule="chunks"), "unknown schedule 'chunks'.*did you mean 'chunk'"),
    (dict(policy="snapkv", score="tovaa"), "did you mean 'tova'"),
    (dict(policy="snapkv", select="tokens"), "did you mean 'token'"),
    (dict(policy=512), "got int; write budget=512"),
    (dict(policy="snapkv", budget=32), "budget=32 is too small.*budget >= 33"),
    (dict(policy="streaming", budget=4), "budget >= 5"), (dict(policy="take", budget=6, probe=(10, 16)), "budget >= 7"),
    (dict(policy="h2o", budget=8, recent=8), "budget >= 9"),
    (dict(policy="take:probe"), "policy option 'probe': write NAME"),
    (dict(policy="SnapKV"), "unknown policy 'SnapKV'; did you mean 'snapkv'"),
    (dict(policy="tova", budget=0), "budget must be at least 1, got 0"),
    (dict(policy="random", budget=-5), "budget must be at least 1, got -5"),
    (dict(policy="h2o", budget=0.0), r"fraction in \(0, 1\]"),
    (dict(policy="h2o", budget=1.01), r"fraction in \(0, 1\]"),
    (dict(policy="h2o", budget=float("nan")), r"fraction in \(0, 1\]"),
    (dict(policy="h2o", budget=True), "budget must be"),
    (dict(policy="h2o", budget="512"), "is not a number of bytes; write it as in 64MiB"),
    (dict(policy="h2o", budget=[64]), "budget must be"),
    (dict(policy="h2o", chunk_size=0), "chunk_size must be at least 1"),
    (dict(policy="h2o", chunk_size=16.0), "chunk_size must be a whole number"),
    (dict(policy="h2o", chunk_size=True), "chunk_size must be a whole number"),
    (dict(policy="take", chunk_size=32), "chunk_size=32 must be greater than the probe's 32"),
    (dict(policy="take", chunk_size=5, probe=(10, 20)), "chunk_size=5 must be greater than the probe's 10"),
    (dict(policy="take", probe=0), "probe must be at least 1"), (dict(policy="take", probe=True), "probe must be"),
    (dict(policy="take", probe=(8, 8)), "is not a span"), (dict(policy="take", probe=(-8, 8)), "is not a span"),
    (dict(policy="take", probe=(1, 2, 3)), "span"), (dict(policy="take", ema_alpha=1.5), "alpha must be"),
    (dict(policy="take", ema_alpha="a"), "alpha must be"),
    (dict(policy="take", ema_alpha=float("nan")), "alpha must be"), (dict(policy="take", kernel=4), "odd"),
    (dict(policy="take", warmup_layers=0), "warmup_layers"),
    (dict(policy="take", warmup_layers=5), "warmup_layers=5 is more than the model's 4"),
    (dict(policy="take", warmup_layers="hlf"), "warmup_layers"),
    (dict(policy="take", warmup_budget=-1), "warmup_budget must be"),
    (dict(policy="snapkv", window=0), "window must be at least 1"),
    (dict(policy="snapkv", window=4.5), "window must be a whole number"),
    (dict(policy="snapkv", window=True), "window must be a whole number"),
    (dict(policy="snapkv", kernel=0), "kernel must be at least 1"),
    (dict(policy="snapkv", kernel=3.0), "kernel must be a whole number"),
    (dict(policy="streaming", sink=-1), "sink must be at least 0"),
    (dict(policy="streaming", sink=1.5), "sink must be a whole number"),
    (dict(policy="h2o", recent=-1), "recent must be at least 0"),
    (dict(policy="h2o", recent="8"), "recent must be a whole number"),
    (dict(policy="h2o", interval=0), "interval must be at least 1"), (dict(policy="random", seed="a"), "seed"),
    (dict(policy="snapkv", schedule="chunk"), "needs a chunk_size"), (dict(policy="snapkv", decode="yes"), "decode"),
    (dict(policy=None), "policy must be"), (dict(policy=7), "policy must be"),
    (dict(policy=kvevict.SCORES["snapkv"]()), "policy must be"), (dict(policy="snapkv", score=7), "score must be"),
    (dict(policy="snapkv", select_by_layer=3), "select_by_layer must be a tuple of .start, stop, select."),
    (dict(policy="snapkv", select_by_layer="chunk"), "select_by_layer must be a tuple"),
    (dict(policy="keydiff", unit=1), "unit must be True or False"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, text", WRONG, ids=lambda x: x if isinstance(x, str) else str([*x.values()]))
def test_bad_arguments(arguments, text):
    model, arguments = shared(), dict(budget=64) | arguments
    before = dict(model.get_decoder().__dict__)
    try:
        for function in (kvevict.patch, lambda *args, **options: kvevict.evicting(*args, **options).__enter__()):
            with pytest.raises((ValueError, TypeError), match=f"(?s){text}"):
                function(model, **arguments)
            assert model.get_decoder().__dict__ == before
    finally:
        kvevict.unpatch(model)


ODD_JSON = [
    ('{"score": 7}', "score must be a name"), ('{"score": [{"name": "h2o"}]}', "score must be a name"),
    ('{"heads": {}}', "heads of a policy in JSON: an object must have a name"),
    ('{"score": {"name": ["h2o"]}}', "score of a policy in JSON: an object must have a name"),
    ('{"score": {"name": "snapkv", "window": {"name": "token"}}}', "window of a policy in JSON: cannot be an object"),
    ('{"rows": {"name": "window", "window": [3]}}', "window must be a whole number"),
    ('{"budget": {"name": "token"}}', "budget of a policy in JSON: cannot be an object"),
    ('{"budget": [64]}', "budget must be an int"),
    ('{"schedule": {}}', "schedule of a policy in JSON: cannot be an object"),
    ('{"select_by_layer": 3}', "select_by_layer must be a tuple"),
    ('{"select_by_layer": {"name": "token"}}', "select_by_layer must be a tuple"),
    ('{"select_by_layer": [[0, 2, {"c": 7}]]}', "select of a policy in JSON: an object must have a name"),
    ("7", "an object of its fields"), (7, "is not a policy in JSON"),
]  # fmt: skip


@pytest.mark.parametrize("text, error", ODD_JSON, ids=lambda x: str(x)[:40])
def test_odd_json(text, error):
    with pytest.raises((ValueError, TypeError), match=error):
        kvevict.Policy.from_json(text)


@pytest.mark.parametrize("budget, kind", [(np.int64(64), int), (np.int8(64), int), (np.float32(0.25), float)])
def test_numbers_of_numpy(budget, kind):
    policy = build("snapkv", budget=budget, window=np.int16(8), chunk_size=np.int64(99))
    assert type(policy.budget) is kind
    assert kvevict.Policy.from_json(policy.to_json()) == policy


@pytest.mark.parametrize("what", ["a name", None, torch.nn.Linear(2, 2), torch.nn.Linear, 7])
def test_not_a_model(what):
    for function in (kvevict.unpatch, kvevict.report, lambda m: kvevict.patch(m, "take", budget=64)):
        with pytest.raises((TypeError, ValueError), match="model"):
            function(what)


def test_wrong_dtype():
    model = tiny.model(dtype=torch.float64)
    with pytest.raises((ValueError, TypeError, RuntimeError), match="float64"):
        kvevict.patch(model, "snapkv", budget=64)
        model(prompt(1, 20)["input_ids"])
    kvevict.unpatch(model)


def test_shapes_alone():
    """On the meta device, as unpatched."""
    model = tiny.model().to("meta")
    kvevict.patch(model, "snapkv", budget=8, window=4)
    logits = model(prompt(1, 20)["input_ids"].to("meta")).logits
    assert logits.shape == (1, 20, 97) and logits.is_meta
    model = tiny.model()  # moved after patching
    kvevict.patch(model, "snapkv", budget=64).double()
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"float64|double"):
        model(prompt(1, 20)["input_ids"])
    assert model.float()(prompt(1, 20)["input_ids"]).logits.isfinite().all()


@pytest.mark.parametrize("policy, options", [("snapkv", dict(budget=16, window=4)), ("h2o", dict(budget=16))])
@pytest.mark.parametrize("new", [1, 3])
def test_cast_after_a_read(policy, options, new, tmp_path):
    """The old cache is refused, live and loaded, and goes on once the model is cast back."""
    model, inputs = kvevict.patch(tiny.model().bfloat16().float(), policy, **options), prompt(1, 40)
    ids = inputs["input_ids"][:, :new]
    cache = model(**inputs, logits_to_keep=1).past_key_values
    kvevict.save_cache(cache, tmp_path / "cache")
    for held in (cache, kvevict.load_cache(tmp_path / "cache", model)):
        want = model(ids, past_key_values=held.fork()).logits
        model.bfloat16()
        with pytest.raises(ValueError, match=r"in float32 on cpu, this model's are in bfloat16 on cpu: "):
            model(ids, past_key_values=held)
        model.float()
        assert torch.equal(model(ids, past_key_values=held.fork()).logits, want)


@pytest.mark.parametrize("implementation", ["flex_attention", "paged|sdpa", "paged|eager"])
def test_attention_implementations(implementation):
    model = tiny.model()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = implementation
    with pytest.raises(ValueError, match=r"attention implementation.*sdpa"):
        kvevict.patch(model, "snapkv", budget=64)


def test_head_dim():
    model = tiny.model(head_dim=36)
    with pytest.raises(ValueError, match="head_dim 36"):
        kvevict.patch(model, "snapkv", budget=64)


def test_empty_prompt(model):
    """Transformers itself refuses it in generate; a direct call must not crash either."""
    for call in (model, model.model):
        with pytest.raises(ValueError, match="empty"):
            call(torch.zeros(1, 0, dtype=torch.long))
        with pytest.raises(ValueError, match="empty"):
            call(inputs_embeds=torch.zeros(1, 0, 64))
    with pytest.raises((ValueError, RuntimeError)):
        model.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=2)
    with pytest.raises(ValueError, match="exactly one"):
        model.model()


@pytest.mark.parametrize("policy, options", [
    ("take", TAKE), ("snapkv", dict(budget=16, window=8)), ("h2o", dict(budget=16, decode=False)),
    ("streaming", dict(budget=16, decode=False)), ("tova", dict(budget=16, decode=False)), ("knorm", dict(budget=16)),
])  # fmt: skip
@pytest.mark.parametrize("length", [1, 2, 3, 6, 7, 15, 16])
@pytest.mark.drawn(20)
def test_prompt_within_the_budget(policy, options, length):
    """Of length 1, around the probe's and the window's, and exactly the budget: as if unpatched."""
    plain, inputs = shared(), prompt(2, length)
    want = generate(plain, inputs)
    with kvevict.evicting(plain, policy, **options):
        assert torch.equal(generate(plain, inputs), want)
        assert kvevict.report(plain)["kept"] == [[[length] * 2] * 2] * 4


@pytest.mark.parametrize("policy", [
    "take", "take:append=false", "take:append=false,warmup_layers=none", "snapkv", "h2o", "streaming", "tova",
    "keydiff",
])  # fmt: skip
@pytest.mark.parametrize("length", [17, 18, 31, 32, 33])
@pytest.mark.drawn(20)
def test_prompt_just_over_the_budget(policy, length):
    """One slot is lost; chunks of 1, of all but one, ..."""
    model, inputs = shared(), prompt(2, length, pad=(0, 1))
    options = dict(probe=6, chunk_size=16) if "take" in policy else dict(window=8) if policy == "snapkv" else {}
    with kvevict.evicting(model, policy, budget=16, **options):
        out = model.generate(**inputs, max_new_tokens=3, output_logits=True, return_dict_in_generate=True)
        assert all(logits.isfinite().all() for logits in out.logits)
        assert kvevict.report(model)["kept"] == [[[16] * 2, [min(16, length - 1)] * 2]] * 4


def test_short_row_beside_a_long_one():
    """A row of one token in a batch with a long one gives the same as alone."""
    model, inputs = shared(), prompt(2, 50, pad=(0, 49))
    for policy, options in (("snapkv", dict(budget=16, window=8)), ("h2o", dict(budget=16, chunk_size=8)),
                            ("take", dict(budget=16, probe=6, chunk_size=16)), ("tova", dict(budget=1))):  # fmt: skip
        with kvevict.evicting(model, policy, **options):
            batch = generate(model, inputs)
            assert kvevict.report(model)["seen"] == [50, 1]
            assert torch.equal(batch[1:], generate(model, dict(input_ids=inputs["input_ids"][1:, 49:])))


def test_smallest_budget():
    model, inputs = shared(), prompt(1, 40)
    for policy, options in (("tova", dict(budget=1)), ("h2o", dict(budget=1)), ("knorm", dict(budget=1)),
                            ("streaming", dict(budget=1, sink=0)), ("snapkv", dict(budget=2, window=1)),
                            ("take", dict(budget=2, probe=1, chunk_size=2)), ("random", dict(budget=1, chunk_size=1)),
                            ("h2o", dict(budget=0.001))):  # fmt: skip
        with kvevict.evicting(model, policy, **options):
            out = model.generate(**inputs, max_new_tokens=4, output_logits=True, return_dict_in_generate=True)
            assert all(logits.isfinite().all() for logits in out.logits), policy
            assert kvevict.report(model)["kept"][3] == [[options["budget"] if options["budget"] >= 1 else 1] * 2]


def test_masks(model):
    ids = prompt(2, 20)["input_ids"]
    ones = torch.ones_like(ids)
    for mask, text in (
        (ones[:, :-1], r"\(2, 19\), expected \(2, 20\)"),
        (torch.cat([ones, ones], 1), r"\(2, 40\), expected \(2, 20\)"), (ones[:1], r"\(1, 20\), expected \(2, 20\)"),
        (torch.zeros(2, 1, 20, 20), "4D"), (torch.ones(2, 1, 20, 20, dtype=torch.bool).tril(), "4D"),
        (dict(full_attention=None), "dictionar"), (ones[0], "2D"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            model(ids, attention_mask=mask)
    want = model(ids).logits
    for mask in (ones, ones.bool(), ones.float(), ones.int()):
        assert relative(model(ids, attention_mask=mask).logits, want) < 1e-5


def test_row_without_tokens(model):
    """A row of padding alone is finite or NaN as unpatched, without a crash, and the other row is right."""
    ids = prompt(2, 20)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1] = 0
    want = model(ids[:1]).logits
    try:
        got = model(ids, attention_mask=mask).logits
    except ValueError as error:
        assert "padding" in str(error)
    else:
        assert relative(got[:1], want) < 1e-4


def test_masks_of_later_calls(model):
    ids, cache = prompt(1, 30)["input_ids"], DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    for tokens, mask in ((1, 1), (1, 30), (5, 5), (5, 36)):
        with pytest.raises(ValueError, match=f"\\(1, {mask}\\), expected \\(1, {30 + tokens}\\)"):
            model(ids[:, :tokens], attention_mask=torch.ones(1, mask), past_key_values=cache)
    hidden = torch.ones(1, 31)
    hidden[0, -1] = 0
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids[:, :1], attention_mask=hidden, past_key_values=cache)
    assert cache.get_seq_length() == 30
    with pytest.raises(ValueError, match="batch of 1 rows, the input has 2"):
        model(ids[:, :1].repeat(2, 1), past_key_values=cache)
    assert cache.get_seq_length() == 30
    assert model(ids[:, :5], attention_mask=torch.ones(1, 35), past_key_values=cache).logits.isfinite().all()


def test_other_caches(model):
    ids = prompt(1, 20)["input_ids"]
    for kind in ("static", "offloaded", "offloaded_static"):
        with pytest.raises(ValueError, match=r"DynamicCache|offload"):
            model.generate(ids, max_new_tokens=2, cache_implementation=kind)
    for cache, advice in (
        (StaticCache(config=model.config, max_cache_len=40), "drop cache_implementation"),
        (DynamicCache(config=model.config, offloading=True), "drop cache_implementation"),
        (((torch.zeros(1, 2, 3, 32),) * 2,) * 4, "give one, or none"),
        ("a cache", "give one, or none"),
    ):
        with pytest.raises((ValueError, TypeError), match=rf"past_key_values.*DynamicCache: {advice}"):
            model(ids, past_key_values=cache)


def test_queries_that_are_not_finite():
    """As of a model whose numbers are too large for fp16."""
    model = tiny.model()
    model.model.layers[1].self_attn.q_proj.weight.data.fill_(torch.inf)
    with pytest.raises(ValueError, match="not finite: load the model in bfloat16"):
        kvevict.patch(model, "expected", budget=40)


def test_quantized_cache(model):
    class Quantized(cache_utils.QuantizedLayer):
        def _quantize(self, tensor, axis):
            return tensor

        _dequantize = _quantize

    cache = DynamicCache(config=model.config)
    try:
        cache.layers = [Quantized() for _ in range(4)]
    except TypeError:
        pytest.skip("this QuantizedLayer cannot be made without its library")
    with pytest.raises(ValueError, match="plain DynamicCache"):
        model(prompt(1, 20)["input_ids"], past_key_values=cache)


def test_paged_cache():
    """It comes by another way than `past_key_values`."""
    model, prompts = tiny.model(), prompt(2, 20)["input_ids"].tolist()
    kvevict.patch(model, "snapkv", budget=64)
    with pytest.raises(ValueError, match=r"paged cache .* model.generate, or kvevict.unpatch"):
        model.generate_batch(prompts)
    assert "init_continuous_batching" not in kvevict.unpatch(model).__dict__


def test_cache_of_another_model(model):
    """Of another depth, or filled by a patched model of another shape."""
    ids, other = prompt(1, 20)["input_ids"], tiny.model(num_hidden_layers=6)
    for _ in range(2):
        long = DynamicCache(config=other.config)
        other(ids, past_key_values=long)
        with pytest.raises(ValueError, match="layers"):
            model(ids, past_key_values=long)
        kvevict.patch(other, "snapkv", budget=64)
    wide = tiny.model(head_dim=64)
    kvevict.patch(wide, "snapkv", budget=64)
    cache = DynamicCache(config=wide.config)
    wide(ids, past_key_values=cache)
    with pytest.raises((ValueError, RuntimeError)):
        model(ids, past_key_values=cache)


@pytest.mark.parametrize("where", ["k_proj", "v_proj", "q_proj"])
@pytest.mark.parametrize("policy", ["take", "snapkv", "h2o", "tova", "streaming", "random", "knorm", "keydiff"])
@pytest.mark.drawn(5)
def test_nan_weights(where, policy):
    """The NaN of the unpatched model, no hang, and right again when the weights are."""
    model, inputs = tiny.model(), prompt(2, 50, pad=(0, 9))
    weight = getattr(model.get_decoder().layers[1].self_attn, where).weight
    options = dict(budget=16, chunk_size=16) | (dict(probe=6) if policy == "take" else {}) | (
        dict(window=6) if policy == "snapkv" else {})  # fmt: skip
    kvevict.patch(model, policy, **options)
    want = generate(model, inputs)
    row = weight[5].clone()
    with torch.no_grad():
        weight[5] = float("nan")
        assert model(**inputs).logits[inputs["attention_mask"].bool()].isnan().all()
        assert generate(model, inputs, 20).shape == (2, 20)
        assert kvevict.report(model)["kept"] == [[[16, 16]] * 2] * 4
        weight[5] = row
    assert torch.equal(generate(model, inputs), want)


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "tova"])
def test_nan_of_one_token(policy):
    """A NaN embedding: earlier rows are unchanged (torch would multiply by zero), its row and later ones are NaN."""
    model, ids = tiny.model(), prompt(2, 50)["input_ids"].clone()
    ids[:, 20] = 2
    want = model(ids).logits
    with torch.no_grad():
        model.get_input_embeddings().weight[2] = float("nan")
        assert model(ids).logits[:, 20:].isnan().all()
        kvevict.patch(model, policy, budget=4096, chunk_size=16)
        got = model(ids).logits
    assert got[:, 20:].isnan().all()
    assert relative(got[:, :20], want[:, :20]) < 1e-4


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), 1e30])
def test_huge_weights(value):
    """No crash and no hang either."""
    model, inputs = tiny.model(), prompt(1, 50)
    with torch.no_grad():
        model.get_decoder().layers[0].self_attn.k_proj.weight[3] = value
        for policy in ("h2o", "snapkv"):
            kvevict.patch(model, policy, budget=16, chunk_size=25, **(dict(window=8) if policy == "snapkv" else {}))
            assert generate(model, inputs).shape == (1, 8)


def test_refused_outputs(model):
    ids = prompt(1, 50)["input_ids"]
    for name in ("output_attentions", "output_hidden_states"):
        with pytest.raises(ValueError, match=name):
            model(ids, **{name: True})
        with pytest.raises(ValueError, match=name):
            model.generate(ids, max_new_tokens=2, return_dict_in_generate=True, **{name: True})


def test_probe_outside_the_prompt(model):
    kvevict.patch(model, "take", budget=16, probe=(30, 36), chunk_size=16)
    try:
        with pytest.raises(ValueError, match=r"probe=\(30, 36\).*20 tokens"):
            model(prompt(1, 20)["input_ids"])
        assert model(prompt(1, 50)["input_ids"]).logits.isfinite().all()
    finally:
        kvevict.patch(model, "take", **TAKE)


def test_response_outside_the_vocabulary(model):
    """Before anything is read."""
    cache = DynamicCache(config=model.config)
    kvevict.patch(model, "oracle", budget=16, ids=(3, 97, 5))
    try:
        with pytest.raises(ValueError, match="ids hold token id 97, and the model knows ids below 97"):
            model(prompt(1, 50)["input_ids"], past_key_values=cache)
        assert cache.get_seq_length() == 0
        kvevict.patch(model, "oracle", budget=16, ids=(3, 96, 5))
        model(prompt(1, 50)["input_ids"], past_key_values=cache)
        assert cache.get_seq_length() == 50
    finally:
        kvevict.patch(model, "take", **TAKE)


class Elsewhere(torch.nn.Parameter):
    """A weight that says it is where there are no kernels."""

    device = torch.device("xpu:1")


def test_layer_where_there_are_no_kernels():
    model = tiny.model()
    attention = model.model.layers[2].self_attn
    attention.q_proj.weight = Elsewhere(attention.q_proj.weight.detach())
    with pytest.raises(ValueError, match=r"on xpu:1, and this build has .* kernels only"):
        kvevict.patch(model, "knorm", budget=8)
