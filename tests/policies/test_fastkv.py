"""FastKV against its float64 oracle: after every call the same slots in every head, and the same next-token logits."""

import dataclasses
import itertools

import policy_cases
import pytest
import tiny
import torch
from caches import kept
from oracle_fastkv import FastRow
from policy_cases import VOCAB, model, tokens, truth
from tiny import snapshot
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface

import kvevict
from kvevict.lab.analysis.cost import plan
from kvevict.lab.analysis.shape import shape_of
from kvevict.policy.building import build

W = 4  # window
pytestmark = pytest.mark.usefixtures("no_grad")


def compare(made, rows, /, policy="fastkv", **options):
    """Oracle and kvevict over conversations `rows` [row][call]; returns the oracle's positions [call][row]."""
    options = dict(window=W) | options if policy == "fastkv" else options
    want = policy_cases.compare(made, policy, rows, kind=FastRow, **options)
    return [[positions for _, positions in call] for call in want]


def entering(made):
    """Rows that enter each layer in calls to come: [layer] -> list."""
    rows = [[] for _ in made.model.layers]
    hooks = [
        # After `patch`, so that it runs after the package's hooks.
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, n=n: rows[n].append(kwargs["hidden_states"].shape[1]), with_kwargs=True
        )
        for n, layer in enumerate(made.model.layers)
    ]
    return rows, hooks


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "mixtral"])
def test_the_oracle_that_drops_nothing_is_the_unpatched_model(family):
    made, ids = model(family), tokens([[40]], 0)[0][0]
    row = FastRow(made, "fastkv", 1000, chunk_size=12)
    logits = torch.cat([row.read(ids[:30].tolist()), *(row.step(t)[None] for t in ids[30:].tolist())])
    torch.testing.assert_close(made(ids[None], use_cache=False).logits[0].double(), logits, rtol=0, atol=1e-5)


GEOMETRIES = {
    "whole": dict(budget=16, tsp_len=24), "whole, budget above what goes on": dict(budget=24, tsp_len=16),
    "whole, one token beside the window": dict(budget=12, tsp_len=W + 1), "fraction": dict(budget=0.4, tsp_len=20),
    "chunks": dict(budget=16, chunk_size=12, tsp_len=8),
    "small budget, big chunks": dict(budget=6, chunk_size=24, tsp_len=9),
    "budget above two chunks": dict(budget=27, chunk_size=13, tsp_len=10),
    "chunks, evict at the end": dict(budget=16, chunk_size=13, tsp_len=8, schedule="prompt"),
    "share of a chunk": dict(budget=16, chunk_size=13, tsp_len=0.6), "first layer": dict(budget=12, tsp_len=15, tsp=0),
    "last but one": dict(budget=12, tsp_len=15, tsp=2, chunk_size=20),
    "not pooled": dict(budget=12, tsp_len=15, pool="none"),
    "average": dict(budget=12, tsp_len=15, pool="avg", kernel=5),
    "default window": dict(budget=12, tsp_len=15, window=8),
}  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 8, 15, 16, 24, 25, 37, 61])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.drawn(30)
def test_read(geometry, n):
    compare(model(), [[n]], **GEOMETRIES[geometry])


HALVES = {
    "share": dict(tsp_len=0.5), "as few as can be": dict(tsp_len=0.1), "number": dict(tsp_len=14, keep_first=2),
    "long probe": dict(probe=6, tsp_len=0.7, chunk_size=19), "in one pass": dict(chunk_size=None, tsp_len=0.4),
}  # fmt: skip


@pytest.mark.parametrize("calls", [[31], [67], [50, 1, 1, 40, 1]], ids=str)
@pytest.mark.parametrize("given", HALVES)
def test_appended_rows_go_through_all_layers(given, calls):
    """TAKE's probe with propagation: the preset take+edie/half."""
    small = dict(budget=12, probe=3, kernel=5, chunk_size=20)
    compare(model(num_hidden_layers=6), [calls], policy="take+edie/half", **small | HALVES[given])


def test_the_preset_is_take_edie_with_propagation():
    half = dict(tsp="half", tsp_len=0.25, chunk_size=512)
    assert build("take+edie/half", budget=64) == build("take+edie", budget=64, **half)


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_half_of_the_layers_read_everything(layers):
    """floor(L/2) - 1 is the last; a single layer has none after it."""
    made = model(num_hidden_layers=layers)
    compare(made, [[41]], budget=14, tsp_len=20)
    ids = tokens([[41]], 0)[0][0][None]
    with kvevict.evicting(made, "fastkv", budget=14, tsp_len=20):
        rows, hooks = entering(made)
        made(ids, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    whole = max(layers // 2, 1)
    assert rows == [[41]] * whole + [[20]] * (layers - whole)


@pytest.mark.parametrize("heads", [1, 4])
def test_groups_of(heads):
    compare(model(num_key_value_heads=heads), [[50, 1, 1]], budget=16, tsp_len=24)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3", "mixtral", "gpt_oss"])
def test_families(family):
    whole = dict(layer_types=["full_attention"] * 4) if family == "gpt_oss" else {}  # with its sinks
    compare(tiny.model(family, vocab_size=VOCAB, **whole), [[50, 1, 1, 20]], budget=16, tsp_len=24)


@pytest.mark.parametrize("given", [
    dict(heads="ada"), dict(heads="flat"), dict(layers="pyramid"), dict(layers="pyramid", heads="flat", chunk_size=20),
    dict(heads="flat", chunk_size=20), dict(select="chunk", c=5), dict(select="chunk", c=7, chunk_size=20),
    dict(select="chunk", c=3, per_head=True, heads="flat", chunk_size=20), dict(refine="caote"),
    dict(refine="fastcaote", chunk_size=20),
    dict(warmup_layers="half", chunk_size=20, warmup_budget=30), dict(warmup_layers=1, chunk_size=20),
], ids=lambda given: "-".join(map(str, itertools.chain(*given.items()))))  # fmt: skip
def test_other_choices(given):
    compare(model(num_hidden_layers=6), [[61, 1, 30]], budget=16, tsp_len=14, **given)


def test_tada_measures_what_the_layers_read():
    made, history = model(), kvevict.history("fastkv")
    history.reset()
    seed, _ = truth(made, "fastkv", [[61]], kind=FastRow, budget=16, tsp_len=20, window=W, heads="flat")
    (ids,) = tokens([[61]], seed)[0]
    row = FastRow(made, "fastkv", 16, tsp_len=20, window=W, heads="flat", measure=True)
    row.read(ids.tolist())
    given = dict(budget=16, tsp_len=20, window=W, heads="flat", layers="tada", cd="layer", task="fastkv")
    with kvevict.evicting(made, "fastkv", **given):
        made(ids[None], logits_to_keep=1)
        assert history.errors == pytest.approx([e for (e,) in row.errors], rel=1e-4)
        made(ids[None], logits_to_keep=1)  # by the history of that read, layers have other shares
        kept = [sum(layer[0]) for layer in kvevict.report(made)["kept"]]
    assert sum(kept) == 16 * 8 and len(set(kept)) > 1 and max(kept[2:]) <= 2 * 20
    history.reset()


def source(q, k, capacity, window, kernel, tsp_len):
    """The source's choice from one layer's fp32 queries [H, N, d] and keys [Hkv, N, d]: slots per kv head, and the
    tokens that go on. The window's columns are dropped after the softmax; ties (pooling makes them) go to the earlier
    slot.
    """
    (H, n, d), Hkv = q.shape, k.shape[0]
    x = q[:, -window:] @ k.repeat_interleave(H // Hkv, 0).mT / d**0.5
    x[..., -window:] = x[..., -window:].masked_fill(torch.ones(window, window).triu(1).bool(), -torch.inf)
    past = x.softmax(-1)[..., :-window].sum(1)
    score = torch.max_pool1d(past, kernel, 1, kernel // 2).view(Hkv, -1, n - window).sum(1)

    def best(score, slots):
        order = score.sort(descending=True, stable=True).indices
        return sorted(order[: slots - window].tolist()) + list(range(n - window, n))

    return [best(head, capacity) for head in score], best(score.sum(0), tsp_len)


def test_what_is_kept_and_what_goes_on_are_the_source_s():
    made, given = tiny.model(vocab_size=VOCAB), {}
    ids = tokens([[90]], 3)[0][0][None]
    with kvevict.evicting(made, "fastkv", budget=24, tsp_len=40):
        attend = kvevict.engine.hook.attention.attention

        def note(module, q, k, v, *args, **kwargs):
            given[module.layer_idx] = q[0], k[0]
            return attend(module, q, k, v, *args, **kwargs)

        AttentionInterface.register(kvevict.engine.hook.attention.NAME, note)
        try:
            made(ids, logits_to_keep=1)
        finally:
            kvevict.engine.hook.attention.register()
        positions = [layer[0] for layer in kvevict.report(made, positions=True)["positions"]]
    kept = [source(*given[layer], 24, 8, 7, 40) for layer in range(4)]
    on = kept[1][1]
    assert [positions[0], positions[1]] == [kept[0][0], kept[1][0]]
    assert given[2][0].shape[1] == 40 == len(on) and on != list(range(50, 90))
    assert positions[2:] == [[[on[i] for i in head] for head in kept[layer][0]] for layer in (2, 3)]


@pytest.mark.parametrize("pad", [0, 7])
@pytest.mark.parametrize("policy, first", [("take+edie", 4), ("edie", 4), ("knorm", 0)])
def test_first_tokens_that_are_always_kept_go_on(policy, first, pad):
    """Whatever they score, also where columns are padding; of a score that keeps none they may be lost."""
    made, inputs = tiny.model(num_hidden_layers=6), tiny.prompt(1, 61, pad=(pad,))
    given = dict(knorm={}, edie=dict(window=8, keep_first=4)).get(policy, dict(probe=8))
    with kvevict.evicting(made, policy, budget=24, chunk_size=20, tsp_len=18, tsp=2, **given):
        made(**inputs, logits_to_keep=1)
        positions = kvevict.report(made, positions=True)["positions"]
    assert all(head[:first] == [*range(pad, pad + first)] for layer in positions for head in layer[0])
    if not first:
        assert any(head[0] > pad for layer in positions[3:] for head in layer[0])


@pytest.mark.parametrize("interval", [1, 5])
@pytest.mark.parametrize("chunk_size", [None, 20])
def test_decode_with_eviction(interval, chunk_size):
    """Positions are those of tokens seen, and the cache stays within budget + interval - 1."""
    given = dict(budget=16, tsp_len=18, chunk_size=chunk_size, decode=True, interval=interval)
    kept = compare(model(), [[41, *[1] * 20]], **given)
    assert max(len(head) for call in kept for row in call for layer in row for head in layer) == 16 + interval - 1
    assert all(head[-1] == 40 + n for n, call in enumerate(kept) for layer in call[0] for head in layer)


@pytest.mark.parametrize("given", [dict(budget=16), dict(budget=0.4), dict(budget=16, chunk_size=14), dict(budget=100),
                                   dict(budget=16, tsp_len=0.3)],
                         ids=str)  # fmt: skip
def test_turns(given):
    """Every read passes its best tokens on, a short one all of its tokens."""
    compare(model(), [[41, 1, 1, 30, 1, 5, 12, 13, 1]], **dict(tsp_len=12) | given)


@pytest.mark.parametrize("given", [
    dict(tsp_len=12), dict(tsp_len=30), dict(tsp_len=10, chunk_size=14), dict(tsp_len=10, chunk_size=14, heads="flat"),
    dict(tsp_len=10, chunk_size=14, schedule="prompt"), dict(tsp_len=10, decode=True, interval=2),
    dict(tsp_len=0.5, chunk_size=14), dict(tsp_len=0.25),
], ids=str)  # fmt: skip
def test_left_padded_rows_are_read_as_if_alone(given):
    """Rows let different tokens through, and different numbers of them."""
    later = [1, 1, 1, 21, 1]
    kept = compare(model(), [[41, *later], [26, *later], [11, *later], [3, *later]], budget=16, **given)
    assert kept[0][0] != kept[0][1]


@pytest.mark.parametrize("chunk_size", [None, 30])
def test_as_many_tokens_as_the_prompt_is_no_propagation(chunk_size):
    made, inputs = tiny.model(), tiny.prompt(2, 60, pad=(0, 25))
    results = []
    for given in (dict(tsp=None), dict(tsp_len=60), dict(tsp_len=chunk_size or 60)):
        with kvevict.evicting(made, "fastkv", budget=20, chunk_size=chunk_size, **given):
            logits = made(**inputs).logits  # all rows exist
            results.append((logits, kvevict.report(made, positions=True)["positions"]))
    assert all(torch.equal(logits, results[0][0]) and kept == results[0][1] for logits, kept in results)


def test_rows_that_enter_each_layer():
    made = tiny.model(num_hidden_layers=6)
    with kvevict.evicting(made, "fastkv", budget=20, tsp_len=15, tsp=3, chunk_size=40):
        rows, hooks = entering(made)
        tiny.generate(made, tiny.prompt(2, 90, pad=(0, 25)), 3)
    for hook in hooks:
        hook.remove()
    assert rows == [[10, 40, 40, 1, 1]] * 4 + [[10, 15, 15, 1, 1]] * 2


def test_room_is_made_for_what_a_layer_reads():
    """Chunks of 10, 40 and 40 tokens, evicted at the end: 10 + 15 + 15 rows, and 64 free ones, of two heads."""
    made, ids = tiny.model(), tiny.prompt(1, 90)["input_ids"]
    with kvevict.evicting(made, "fastkv", budget=100, tsp_len=15, chunk_size=40, schedule="prompt"):
        cache = made(ids, logits_to_keep=1).past_key_values
    assert [layer.k.shape[0] for layer in cache.layers] == [2 * (90 + 64)] * 2 + [2 * (40 + 64)] * 2


@pytest.mark.parametrize("given, n", [
    (dict(budget=20, tsp_len=15), 90), (dict(budget=20, tsp_len=15, chunk_size=40), 95),
    (dict(budget=20, tsp_len=0.25), 90), (dict(budget=16, tsp_len=0.4, chunk_size=40), 95),
    (dict(budget=20, tsp_len=15, chunk_size=40, schedule="prompt"), 95), (dict(budget=0.5, tsp_len=15, tsp=0), 90),
    (dict(budget=60, tsp_len=30), 90), (dict(budget=80, tsp_len=30), 90), (dict(budget=20, tsp_len=90), 90),
    (dict(budget=20, tsp_len=15, chunk_size=40, warmup_layers="half", warmup_budget=30), 130),
], ids=str)  # fmt: skip
def test_plan(given, n, monkeypatch):
    """Slots to the byte, and FLOPs of linear layers and attention as counted."""
    made, policy, counted = tiny.shared(), build("fastkv", **given), {"attend": 0}
    attend = kvevict.ops._ops.attend

    def attend_counted(q, held, k, *more, **options):
        counted["attend"] += 2 * int((q.shape[2] * (q.shape[2] + 1) // 2 + q.shape[2] * held.len).sum())
        return attend(q, held, k, *more, **options)

    monkeypatch.setattr(kvevict.ops._ops, "attend", attend_counted)
    with kvevict.evicting(made, policy), FlopCounterMode(display=False) as counter:
        made(tiny.prompt(2, n)["input_ids"], logits_to_keep=1)
        report = kvevict.report(made)
    want = plan(shape_of(made.config, "float32"), policy, n, batch=2)
    assert (want["cache_bytes"], want["peak_cache_bytes"]) == (report["cache_bytes"], report["peak_cache_bytes"])
    products = {str(op).removeprefix("aten."): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert want["flops"]["linear"] == products["mm"]
    assert want["flops"]["attention"] == 4 * 32 * counted["attend"]


def test_plan_of_a_large_model():
    """At 128k tokens half of the layers read 2048 of them: half of the linear FLOPs, half of attention's."""
    shape = dataclasses.replace(shape_of(tiny.shared().config, "bfloat16"), head_weights=0)
    full, fast = (plan(shape, policy, 131072)["flops"] for policy in (None, build("fastkv", budget=512)))
    assert fast["linear"] / full["linear"] == (131072 + 2048) / (2 * 131072)
    assert fast["attention"] / full["attention"] == pytest.approx(0.5, rel=1e-3)


GIVEN = dict(budget=20, tsp_len=30)


def test_generate_is_the_calls_one_by_one():
    made, inputs = tiny.model(seed=3), tiny.prompt(1, 70)
    with kvevict.evicting(made, "fastkv", **GIVEN):
        got = tiny.generate(made, inputs, 10)
        out = made(inputs["input_ids"], logits_to_keep=1)
        answer = [out.logits[:, -1:].argmax(-1)]
        for _ in range(9):
            out = made(answer[-1], past_key_values=out.past_key_values)
            answer.append(out.logits[:, -1:].argmax(-1))
    assert torch.equal(torch.cat(answer, 1), got)
    assert out.past_key_values.get_seq_length() == 79


@pytest.mark.parametrize("more", [
    dict(num_beams=3), dict(prompt_lookup_num_tokens=3, eos_token_id=0), dict(assistant_model=tiny.shared(seed=7)),
], ids=lambda more: next(iter(more)))  # fmt: skip
def test_beams_and_assistants(more):
    """Candidates are appended after the propagated tokens of the prompt, and taken back."""
    made, inputs = tiny.model(seed=3), dict(input_ids=tiny.prompt(1, 40)["input_ids"].repeat(1, 2))
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with kvevict.evicting(made, "fastkv", **GIVEN):
        got = tiny.generate(made, inputs, 12, **more)
        if "num_beams" in more:
            twice = {name: x.repeat(2, 1) for name, x in inputs.items()}
            assert torch.equal(tiny.generate(made, twice, 12, **more), got.repeat(2, 1))
        else:
            assert torch.equal(tiny.generate(made, inputs, 12), got)


def test_a_saved_cache_goes_on(tmp_path):
    made, ids, new = tiny.model(), tiny.prompt(2, 70)["input_ids"], tiny.prompt(2, 50, seed=2)["input_ids"]
    with kvevict.evicting(made, "fastkv", **GIVEN):
        cache = made(ids, logits_to_keep=1).past_key_values
        kvevict.save_cache(cache, tmp_path / "cache.safetensors")
        again = kvevict.load_cache(tmp_path / "cache.safetensors", made)
        one, other = (made(new, past_key_values=c, logits_to_keep=1).logits for c in (cache, again))
        assert torch.equal(one, other) and kept(cache) == kept(again)


def test_crop_takes_back_only_what_was_decoded():
    made, ids = tiny.model(), tiny.prompt(1, 70)["input_ids"]
    with kvevict.evicting(made, "fastkv", budget=200, tsp_len=30):
        cache = made(ids, logits_to_keep=1).past_key_values
        before = kept(cache)
        for token in (5, 6):
            made(torch.tensor([[token]]), past_key_values=cache)
        cache.crop(-2)
        assert kept(cache) == before
        with pytest.raises(ValueError, match="only the last 0"):
            cache.crop(-1)


@pytest.mark.parametrize("family, given, text", [
    ("llama", dict(tsp=3), "not below the model's last layer, 3"),
    ("llama", dict(warmup_layers=3), "give warmup_layers <= 2"),
    ("gemma3", {}, "layers with a sliding window"), ("gpt_oss", dict(tsp=0), "layers with a sliding window"),
])  # fmt: skip
def test_refused_models(family, given, text):
    made, policy = tiny.model(family), build("fastkv", budget=64, chunk_size=100, **given)
    before = snapshot(made)
    with pytest.raises(ValueError, match=text):
        kvevict.patch(made, policy)
    assert snapshot(made) == before
    with pytest.raises(ValueError, match=text):
        plan(shape_of(made.config, "float32"), policy, 100)
    kvevict.patch(made, policy, tsp=None, warmup_layers=None)
    assert made(**tiny.prompt(1, 150), logits_to_keep=1).logits.isfinite().all()


def test_refused_rows():
    """Rows of tokens that were left out do not exist; the cache is not touched."""
    made, ids, new = tiny.model(), tiny.prompt(1, 40)["input_ids"], tiny.prompt(1, 31, seed=2)["input_ids"]
    with kvevict.evicting(made, "fastkv", **GIVEN):
        cache = made(ids, logits_to_keep=8).past_key_values
        before = kept(cache)
        for given, text in (
            (dict(), "all rows were asked for, .* read 30 of 31 tokens"), (dict(labels=new), "all rows"),
            (dict(logits_to_keep=9), "the last 9 rows"),
            (dict(logits_to_keep=1, output_hidden_states=True), "output_hidden_states=True"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=text):
                made(new, past_key_values=cache, **given)
        with pytest.raises(ValueError, match="all rows"):
            made.model(new, past_key_values=cache)
        assert kept(cache) == before and cache.get_seq_length() == 40
        assert made(new[:, 1:], past_key_values=cache).logits.shape[1] == 30  # all of a shorter turn go on


def test_the_last_rows_are_those_of_the_last_tokens():
    """The window's rows all come out: the same, whether one or eight of them are asked for."""
    made, ids = tiny.model(), tiny.prompt(1, 70)["input_ids"]
    with kvevict.evicting(made, "fastkv", **GIVEN):
        one, eight = (made(ids, logits_to_keep=n).logits for n in (1, 8))
        assert tiny.relative(one, eight[:, -1:]) < 1e-5 and eight.shape[1] == 8
    with kvevict.evicting(made, "fastkv", budget=20, tsp_len=9, window=8, chunk_size=35):
        for n in range(1, 9):
            assert made(ids, logits_to_keep=n).logits.shape[1] == n


def test_a_score_that_all_heads_share():
    """TOVA ranks a layer's tokens once; so those that go on are ranked, too."""
    made = kvevict.patch(tiny.model(), "tova", budget=12, tsp=1, tsp_len=20, chunk_size=40)
    tiny.generate(made, tiny.prompt(2, 90, pad=(0, 9)), new=2)
    assert kvevict.report(made)["kept"][3] == [[12, 12]] * 2
