"""Decoded tokens that are recorded once and replayed. On a GPU: tests/cuda/test_gpu.py."""

import contextlib
import functools
import gc
import itertools
import os
import pickle
import re
import warnings
import weakref
from pathlib import Path
from unittest import mock

import pytest
import tiny
import torch
import zoo
from tiny import byte_tokenizer, generate, prompt
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kvevict
from kvevict import cautions
from kvevict.answering.answer import rows_of
from kvevict.answering.batch import Batch
from kvevict.context import within
from kvevict.engine.memory.storage import Storage
from kvevict.engine.record import obstacles, recordings, replay
from kvevict.engine.record.replay import Replay
from kvevict.models.compat import CACHE
from kvevict.models.families import find_decoder
from kvevict.policy import run
from kvevict.policy.presets import PRESETS

pytestmark = pytest.mark.usefixtures("no_grad")
LENGTH, PATIENCE = 120, replay.PATIENCE["cpu"]


@functools.cache
def own(family="llama"):
    """A model that no other test has left hooks on."""
    return tiny.model(family)


def decoded(model, cache, tokens, first=0):
    """Logits [tokens, B, V] of fixed tokens after a cache."""
    rows = len(cache.sequence.seen)
    each = []
    for token in range(first, first + tokens):
        ids = torch.tensor([[5 + (token + 7 * row) % 80] for row in range(rows)])
        each.append(model(ids, past_key_values=cache).logits[:, -1])
    return torch.stack(each)


def both(name, work, **options):
    """The result of work(model, cache) without and with compiled=True, and how many tokens were replayed."""
    model, results = own(), []
    for compiled in (False, True):
        with kvevict.evicting(model, name, budget=48, compiled=compiled, **options):
            cache = model(prompt(1, LENGTH)["input_ids"], logits_to_keep=1).past_key_values
            results.append(work(model, cache))
            replayed = kvevict.report(cache)["replayed"]
    return *results, replayed


def slots(cache):
    """The kept slots' positions and numbers, and the queries that are remembered."""
    kept = [[each.tolist() for each in row] for layer in cache.layers for row in layer.positions()]
    others = [x for layer in cache.layers for x in (layer.carry, layer.decode_queries) if x is not None]
    others = [x.nan_to_num(-1).tolist() for x in others]
    return kept, others, cache.sequence.columns, cache.sequence.removable


EVICT = {  # while decoding: name -> options
    "h2o": {}, "h2o every 16": dict(interval=16), "h2o ragged": dict(heads="flat"), "streaming": {},
    "streaming every 16": dict(interval=16), "tova": {}, "snapkv": dict(decode=True, window=16),
    "adakv": dict(decode=True, window=16), "take": dict(decode=True, probe=16), "tri": dict(interval=16),
    "rkv": dict(interval=8), "h2o+caote": {}, "snapkv+caote": dict(window=16), "vatp": {}, "kvzip": dict(chunk_size=60),
    "snapkv recalls": dict(decode=True, window=16, recall=True), "expected": dict(decode=True, keep_prompt=True),
}  # fmt: skip


@pytest.mark.parametrize("kv", ["model", "int8"])
@pytest.mark.parametrize("name", EVICT)
@pytest.mark.drawn(12)
def test_policies_that_evict_while_decoding(name, kv):
    """The same logits and slots after tokens, after a turn, and in a fork's rows."""

    def work(model, cache):
        states = [(decoded(model, cache, 70), slots(cache))]
        turn(model, cache)
        states.append((decoded(model, cache, 30, 70), slots(cache)))
        fork = rows_of(cache, 2)
        for each in (fork, cache):
            states.append((decoded(model, each, 25, 100), slots(each)))
        return states

    want, got, replayed = both(name.split()[0], work, kv=kv, **EVICT[name])
    assert all(torch.equal(x, y) and kept == others for (x, kept), (y, others) in zip(want, got, strict=True))
    assert replayed > 0


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kv", ["model", "int4"])
@pytest.mark.parametrize("name", ["h2o", "streaming", "tova", "h2o+caote", "tova+fastcaote"])
@pytest.mark.drawn(6)
def test_equal_cuts_are_recorded(name, kv, rows):
    """One slot in, one out, until budgets change; then again."""

    def work(model, cache):
        fork, states = rows_of(cache, rows), []
        for budget in (96, 80):
            for layer in fork.layers:
                layer.budget = 0 * layer.budget + budget
            states.append((decoded(model, fork, 60), slots(fork)))
            cuts.append("replay" in fork.__dict__ and fork.replay.cuts.replay is not None)
        turn(model, fork, rows)
        return [*states, (decoded(model, fork, 30), slots(fork))]

    cuts = []
    want, got, _ = both(name, work, kv=kv)
    assert all(torch.equal(x, y) and kept == others for (x, kept), (y, others) in zip(want, got, strict=True))
    assert cuts == [False, False, True, True]


@pytest.mark.parametrize("kv", ["model", "int8", "k8v4", "int4"])
@pytest.mark.parametrize("name", ["snapkv", "take+edie", "chunkkv"])
def test_200_tokens_bit_by_bit(name, kv):
    want, got, replayed = both(name, lambda model, cache: decoded(model, cache, 200), kv=kv)
    assert torch.equal(got, want)
    assert replayed == 200 - 2 - 2 * (PATIENCE + 1)  # the first two are watched; slots move once


def turn(model, cache, rows=1):
    model(prompt(rows, 30, seed=3)["input_ids"], past_key_values=cache, logits_to_keep=1)


def turns(model, cache):
    """Tokens, a turn, tokens taken back, and tokens again."""
    first = decoded(model, cache, 20)
    turn(model, cache)
    second = decoded(model, cache, 20)
    cache.crop(-6)
    return torch.cat([first, second, decoded(model, cache, 20)])


def forked(model, cache):
    """Two questions in rows of a fork; then the cache that they share."""
    fork = rows_of(cache, 2)
    model(prompt(2, 9, seed=4)["input_ids"], past_key_values=fork)
    return torch.cat([decoded(model, fork, 90).flatten(0, 1), decoded(model, cache, 30).flatten(0, 1)])


def joined(model, cache):
    """Caches of two lengths in a batch; one leaves."""
    batch = Batch(model, ["a"], cache)
    batch.add("b", model(prompt(1, 70, seed=5)["input_ids"], logits_to_keep=1).past_key_values)
    together = [batch.step([5 + token, 9 + token]) for token in range(20)]
    batch.keep(["b"])
    return torch.cat([*together, *(batch.step([5 + token]) for token in range(20))])


@pytest.mark.parametrize("kv", ["model", "int8"])
@pytest.mark.parametrize("name, work", [("snapkv", turns), ("snapkv", forked), ("snapkv", joined), ("h2o", joined)])
def test_what_moves_slots_is_seen(name, work, kv, replayed):
    want, got, _ = both(name, work, kv=kv)
    assert torch.equal(got, want)
    assert len(replayed) > 10


@pytest.mark.parametrize(
    "options", [{}, dict(do_sample=True, top_k=20), dict(num_beams=3)], ids=["", "sampled", "beams"]
)
def test_generate(options):
    model, inputs = own(), prompt(2, LENGTH, pad=(0, 30))
    texts = []
    for compiled in (False, True):
        with kvevict.evicting(model, "take+edie", budget=48, compiled=compiled):
            torch.manual_seed(0)
            texts.append(generate(model, inputs, 30, **options))
    assert torch.equal(*texts)


def test_answers(replayed):
    """A text is read with compiled=True: its answers are replayed, too."""
    tokenizer, results = byte_tokenizer(), []
    for compiled in (False, True):
        model = tiny.model(vocab_size=256)
        cache = kvevict.read(model, tokenizer, "The river is long. " * 9, "snapkv", budget=48, compiled=compiled)
        results.append(kvevict.answer(model, tokenizer, cache, ["How long?", "Which?"], max_new_tokens=20))
    assert results[0] == results[1]
    assert replayed


def told(name="snapkv", family="llama", work=lambda model, cache: decoded(model, cache, 6), **options):
    """The texts of the warnings about compiled=True; the tokens stay as they were."""
    model, results = own(family), []
    cautions._given.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for compiled in (False, True):
            with kvevict.evicting(model, name, budget=48, compiled=compiled, **options):
                cache = model(prompt(1, LENGTH)["input_ids"], logits_to_keep=1).past_key_values
                results.append(work(model, cache))
                assert kvevict.report(cache)["replayed"] == 0
    assert torch.equal(*results)
    return [str(each.message) for each in caught if "compiled" in str(each.message)]


def test_by_default_tokens_are_recorded_where_that_is_faster():
    """compiled="auto" records on a GPU alone; a report says what could not be recorded, and no warning does."""
    for devices, counts in (((), (0, 0, 0)), (("cpu",), (20, 0, 0))):
        for family, name, count in zip(("llama", "gemma3", "llama"), ("snapkv", "snapkv", "h2o"), counts, strict=True):
            model = own(family)
            with mock.patch.object(run, "AUTO", devices), kvevict.evicting(model, name, budget=48):
                cache = model(prompt(1, LENGTH)["input_ids"], logits_to_keep=1).past_key_values
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message="compiled")
                    decoded(model, cache, tokens=40)
                report = kvevict.report(cache)
            assert (report["replayed"] > count) == (count > 0)
            assert ("a window" in str(report["not_recorded"])) == (bool(devices) and family == "gemma3")
    assert run.AUTO == ("cuda",)
    with pytest.raises(TypeError, match="compiled"):
        kvevict.patch(tiny.model(), "snapkv", budget=48, compiled="always")


def test_on_other_devices_tokens_are_decoded_as_before():
    with mock.patch.dict(replay.RECORDERS, clear=True):
        (text,) = told()
    assert "on a CPU" in text


@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_what_cannot_be_recorded_is_told_once(name):
    (text,) = told(name, "gemma3")
    assert "a window" in text


def test_slots_that_move_with_every_token(replayed):
    """A policy that evicts while decoding is then watched for `WATCHES` tokens."""
    watched = []

    def keep(storage, index, keep, *new, computed):
        return storage.moved(keep + 64, index, keep, *new)

    def watch(replay, step, run):
        watched.append(1)
        return run(replay.inputs)

    with mock.patch.object(Storage, "keep", keep), mock.patch.object(Replay, "_watch", watch):
        (text,) = told("h2o", work=lambda model, cache: decoded(model, cache, 40))
    assert "moves slots" in text and len(watched) == recordings.WATCHES and not replayed


def test_a_number_that_differs_from_token_to_token():
    """A step that computes with a number of Python's: replayed it would repeat the first one's."""

    def work(model, cache):
        layer, numbers = find_decoder(model).layers[1].mlp, iter(range(1, 100))
        with mock.patch.object(layer, "forward", lambda x, own=layer.forward: own(x) * next(numbers)):
            return decoded(model, cache, 6)

    (text,) = told(work=work)
    assert "aten.mul" in text


def test_own_hooks_do_not_matter():
    """Those that measure residuals do nothing for a decoded token."""
    with within(learns=False):  # TADA would read the second prompt with other budgets
        want, got, replayed = both(
            "take+edie", lambda model, cache: decoded(model, cache, 30), layers="tada", chunk_size=60
        )
    assert torch.equal(got, want)
    assert replayed > 10


def test_hooks_are_called_for_every_token():
    seen = []

    def work(model, cache):
        hook = find_decoder(model).layers[0].register_forward_hook(lambda *_: seen.append(1))
        try:
            return decoded(model, cache, 6)
        finally:
            hook.remove()

    (text,) = told(work=work)
    assert "hooks" in text and len(seen) == 12


class Counted(TorchDispatchMode):
    """Counts the operators that it sees."""

    calls = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        Counted.calls += 1
        return operator(*args, **(kwargs or {}))


class Doubled(TorchFunctionMode):
    """Doubles what a linear layer computes."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is torch.nn.functional.linear else result


@contextlib.contextmanager
def hooked(register, hook):
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def configured(config):
    with mock.patch.object(config, "output_hidden_states", True):
        yield


def halved(module, inputs, output):
    return output / 2 if isinstance(output, torch.Tensor) else None


SWITCHED_OFF = {  # what comes and goes: its context for a model
    "hooks": lambda model: hooked(model.model.layers[1].mlp.register_forward_hook, halved),
    "a built-in's hook": lambda model: hooked(model.model.layers[1].mlp.register_forward_pre_hook, {}.__setitem__),
    "a built-in hook": lambda model: hooked(model.model.layers[1].mlp.register_forward_pre_hook, {}.pop),
    "hooks of all modules": lambda model: hooked(register_module_forward_hook, halved),
    "pre-hooks of all modules": lambda model: hooked(register_module_forward_pre_hook, lambda module, inputs: None),
    "a function mode": lambda model: Doubled(),
    "a dispatch mode": lambda model: Counted(),
    "autocast": lambda model: torch.autocast("cpu", dtype=torch.bfloat16),
    "the config": lambda model: configured(model.config),
}


@pytest.mark.parametrize("what", SWITCHED_OFF)
@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_what_comes_and_goes_switches_recording_off(name, what, monkeypatch):
    """Before the first token, and later: recorded tokens are not replayed meanwhile, and go on after it."""
    monkeypatch.setitem(replay.PATIENCE, "cpu", 1)
    counts = []

    def work(model, cache):
        parts, before = [], [Counted.calls]
        for first, tokens in ((0, 3), (3, 12), (15, 4), (19, 25)):
            with SWITCHED_OFF[what](model) if tokens < 5 else contextlib.nullcontext():
                parts.append(decoded(model, cache, tokens, first))
            counts.append(kvevict.report(cache)["replayed"])
            before.append(Counted.calls)
        counts.append([after - one for one, after in itertools.pairwise(before)])
        return torch.cat(parts)

    cautions._given.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        want, got, _ = both(name, work)
    assert torch.equal(got, want)
    *plain, (seen, _, again, _), start, recorded, off, after, (others, _, more, _) = counts
    assert plain == [0] * 4 and start == 0 < recorded == off < after
    assert (seen, again) == (others, more)
    assert len([each for each in caught if "compiled=True" in str(each.message)]) == 1


@pytest.mark.parametrize("family, asked", [("llama", "output_hidden_states"), ("mixtral", "output_router_logits")])
def test_other_outputs(family, asked):
    """A call that wants more is decoded unrecorded; what Transformers leaves on the modules then does not matter."""
    model, results, key = tiny.model(family), [], asked.removeprefix("output_")
    for compiled in (False, True):
        with kvevict.evicting(model, "snapkv", budget=48, compiled=compiled):
            cache = model(prompt(1, LENGTH)["input_ids"], logits_to_keep=1).past_key_values
            logits, asking = [decoded(model, cache, 20)], {CACHE: cache, asked: True}
            out = [model(torch.tensor([[5 + token]]), **asking) for token in range(3)]
            replayed = kvevict.report(cache)["replayed"]
            logits += [torch.stack([each.logits[:, -1] for each in out]), decoded(model, cache, 12)]
            results.append((torch.cat(logits), [each for one in out for each in one[key] or ()]))
    assert torch.equal(results[0][0], results[1][0])
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert one is other is None or torch.equal(one, other)
    assert 0 < replayed < kvevict.report(cache)["replayed"]


def test_generate_with_hidden_states_later():
    model, asked = tiny.model(), dict(max_new_tokens=30, min_new_tokens=30, return_dict_in_generate=True)
    kvevict.patch(model, "take+edie", budget=48, compiled=True)
    for more in ({}, dict(output_hidden_states=True), dict(output_scores=True)):
        model.generate(**prompt(1, LENGTH), **asked, **more)
        replayed = kvevict.report(model)["replayed"]
        assert (replayed > 10) == ("output_hidden_states" not in more)
    kvevict.unpatch(model)


def test_a_hook_in_another_process():
    """The number of hooks that were ever made, by which modules are looked at again, is a process' own."""
    model = kvevict.patch(tiny.model(), "snapkv", budget=48, compiled=True)
    model.generate(**prompt(1, LENGTH), max_new_tokens=20, min_new_tokens=20)
    assert find_decoder(model)._kvevict.own.unhooked is not None
    there = pickle.loads(pickle.dumps(model))
    assert find_decoder(there)._kvevict.own.unhooked is None


def test_numbers_that_python_reads():
    """Experts that a token goes to are chosen by a number: another token's calls are others."""
    for read in (lambda x: x.sum().item(), lambda x: x.flatten().tolist()[0], lambda x: float((x > 0).nonzero().sum())):

        def work(model, cache, read=read):
            layer = find_decoder(model).layers[1].mlp
            with mock.patch.object(layer, "forward", lambda x, own=layer.forward: own(x) if read(x) < 0 else -own(x)):
                return decoded(model, cache, 30)

        (text,) = told(work=work)
        assert "reads a number" in text


def test_a_recording_that_fails():
    def fails(run, device):
        run()
        raise RuntimeError("operation not permitted when stream is capturing")

    with mock.patch.dict(replay.RECORDERS, cpu=fails):
        (text,) = told(work=lambda model, cache: decoded(model, cache, 20))
    assert "not permitted" in text


@pytest.mark.parametrize("compiled", [False, True])
def test_memory_is_free_once_a_cache_is_dropped(compiled):
    """Not only once cycles are collected."""
    model = own()
    gc.disable()
    try:
        with kvevict.evicting(model, "snapkv", budget=48, compiled=compiled):
            cache = model(prompt(1, LENGTH)["input_ids"], logits_to_keep=1).past_key_values
            fork = cache.fork()
            for each in (cache, fork):
                decoded(model, each, 20)
            slots = [weakref.ref(cache.layers[0].storage.k), weakref.ref(fork.layers[0].storage.k)]
            del cache, fork, each
            assert [each() for each in slots] == [None, None]
    finally:
        gc.enable()


DOCUMENTED = {  # models that docs/usage.md names
    "Llama": ("llama", {}), "Mistral without a window": ("mistral", {}), "Mixtral": ("mixtral", {}),
    "SmolLM2": ("llama", dict(hidden_size=288, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)),
    "Qwen2": ("qwen2", {}), "Qwen3": ("qwen3", {}), "Qwen3-MoE": ("qwen3_moe", {}), "Phi-3": ("phi3", {}),
    "OLMo 2": ("olmo2", {}), "Granite": ("granite", {}), "Gemma 2": ("gemma2", {}), "Gemma 3": ("gemma3", {}),
    "gpt-oss": ("gpt_oss", {}),
}  # fmt: skip
PAGE = (Path(__file__).parents[2] / "docs/usage.md").read_text("utf-8").partition("## Recorded tokens")[2]
PAGE = " ".join(PAGE.partition("\n## ")[0].split())


def recorded(model, name, **options):
    """Whether tokens are recorded; their logits are those without compiled=True."""
    results = []
    with mock.patch.dict(replay.PATIENCE, cpu=1):
        for compiled in (False, True):
            with kvevict.evicting(model, name, compiled=compiled, **options):
                cache = model(prompt(1, 300)["input_ids"], use_cache=True, logits_to_keep=1).past_key_values
                results.append(decoded(model, cache, 7))
    assert torch.equal(*results)
    return kvevict.report(cache)["replayed"] == 3


@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
@pytest.mark.parametrize("name", DOCUMENTED)
@pytest.mark.drawn(8)
def test_documented_models(name, policy):
    family, changes = DOCUMENTED[name]
    yes = next(sentence for sentence in PAGE.split(". ") if "are recorded" in sentence)
    found = re.search(rf"\b{name}(,| and\b| are\b)", yes)
    assert recorded(tiny.model(family, **changes), policy, budget=64) == bool(found)


def test_the_page_has_each_reason():
    for reason in (*obstacles.LASTING, *obstacles.PASSING):
        assert reason.format(device="...") in PAGE, reason


@pytest.mark.parametrize("name", sorted({*PRESETS} - {"gate", "lookahead", "oracle", "speckv"}))  # these need files
@pytest.mark.drawn(8)
def test_presets(name):
    with within(learns=False):
        assert recorded(own(), name, budget=264)


ALL = os.environ.get("KVEVICT_TYPES", "sample") != "sample"
TYPES = [
    (n, kind) for n, kind in zoo.types() if ALL or n in ("mistral", "mixtral", "qwen3_moe", "gpt2", "glm4", "dbrx")
]


@pytest.mark.parametrize("name, kind", TYPES, ids=[name for name, _ in TYPES])
@pytest.mark.drawn(3)
def test_types(name, kind, replayed):
    """A type's tokens are the same, whether its step can be recorded or not; KVEVICT_TYPES=all tries all types."""
    model, results = zoo.make(name, kind), []
    try:
        kvevict.patch(model, "snapkv", budget=40, window=16, tokenizer=False)
    except ValueError:
        pytest.skip("cannot be patched")
    with mock.patch.dict(replay.PATIENCE, cpu=1):
        for compiled in (False, True):
            kvevict.patch(model, "snapkv", budget=40, window=16, tokenizer=False, compiled=compiled)
            cache = model(prompt(1, 90)["input_ids"] % zoo.VOCAB, use_cache=True).past_key_values
            results.append(decoded(model, cache, 12))
    assert torch.equal(*results)
    assert len(replayed) in (0, 8)
