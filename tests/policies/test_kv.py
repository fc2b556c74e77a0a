"""Slots in 8 and 4 bits: the numbers of METHODS 11's float64 twin, true bytes, and everything that moves slots."""

import copy
import dataclasses
import json
import math
import warnings

import numpy as np
import pytest
import ref
import tiny
import torch
from tiny import prompt

import kvevict
from kvevict import cautions, cli
from kvevict.answering.batch import Batch, Pools
from kvevict.engine.memory.joining import join, part
from kvevict.engine.memory.layer import EvictionLayer
from kvevict.engine.memory.storage import Storage
from kvevict.lab.analysis.cost import plan
from kvevict.lab.analysis.shape import shape_of
from kvevict.policy import kv
from kvevict.policy.building import build, choose
from kvevict.policy.policy import Policy, from_json
from kvevict.policy.run import Run
from kvevict.serve.options import Options
from kvevict.serve.policies import Policies
from kvevict.store import sealed

PACKED = {kind: kinds for kind, kinds in kv.KINDS.items() if kind != "model"}
KINDS = tuple(PACKED)


@pytest.fixture(scope="module")
def model():
    return tiny.model()


def read(model, kind, inputs, policy="snapkv", **options):
    """(cache, report) of a read."""
    if policy == "snapkv":
        options = dict(budget=64, chunk_size=96, tokenizer=False, window=8) | options
    with kvevict.evicting(model, policy, kv=kind, **options), torch.no_grad():
        cache = model(**inputs, logits_to_keep=1).past_key_values
    return cache, kvevict.report(cache)


@pytest.fixture
def asked(monkeypatch):
    """The arguments of each `EvictionLayer.represent`: (query, key, first, options)."""
    calls, own = [], EvictionLayer.represent

    def represent(layer, kind, query, key, value, first, options, ranks):
        calls.append((query.clone(), key.clone(), first.clone(), options))
        return own(layer, kind, query, key, value, first, options, ranks)

    monkeypatch.setattr(EvictionLayer, "represent", represent)
    return calls


def centre_of(query, keys, scale):
    """METHODS 11 in float64: query [H, R, D] of the last of the keys [Hkv, S, D]."""
    rows = query[:, -kv.ROWS :].double().unflatten(0, (len(keys), -1))
    logits = rows @ keys.double().mT[:, None] * scale
    n, late = logits.shape[3], logits.shape[3] - logits.shape[2]
    weights = logits.masked_fill(torch.ones(n, n).tril()[late:] == 0, -math.inf).softmax(-1).sum((1, 2))
    return (weights[..., None] * keys.double()).sum(1) / weights.sum(1)[:, None]


def stored(layer):
    """(positions, keys, values) of every head, as numbers."""
    slots = layer.storage.gathered()
    for b, h, rows in slots.segments():
        yield slots.pos[rows].tolist(), *(slots.numbers(name, b, h, rows) for name in "kv")


@pytest.mark.quick
@pytest.mark.parametrize("kind", range(1, len(kv.ROW_KINDS)))
@pytest.mark.parametrize("dim", [8, 24, 64])
def test_numbers_of_packed_rows(kind, dim):
    x = torch.randn(50, dim, generator=torch.Generator().manual_seed(kind + dim)).double() * 3
    x[7] = 0
    rows = ref.packed(x, kind)
    assert rows.shape[1] == kv.row_bytes(kind, dim, 2)
    numbers = kv.numbers(rows, kind, dim).double()
    torch.testing.assert_close(numbers, ref.unpacked(rows, dim, kind), atol=1e-5, rtol=1e-5)
    error = (numbers - x).norm(dim=1)
    assert (error <= 0.51 * kv.ROW_KINDS[kind].steps(x) * dim**0.5 + 1e-6).all()  # half a step, and fp16 ends of 4 bits


def test_sizes_of_methods():
    sizes = {dim: [kv.slot_bytes(kind, dim, 2) for kind in ("model", "int8", "k8v4", "int4")] for dim in (64, 128)}
    assert sizes == {64: [256, 136, 104, 72], 128: [512, 264, 200, 136]}


@pytest.mark.parametrize("kind", KINDS)
def test_survivors_are_what_the_model_s_kind_stores(model, asked, kind):
    """In one pass nothing packed is attended to: both caches hold the same slots, packed around the mean of the keys by
    the attention that they get."""
    inputs = prompt(2, 150, pad=(0, 40))
    plain = read(model, "model", inputs, chunk_size=None)[0]
    asked.clear()
    packed = read(model, kind, inputs, chunk_size=None)[0]
    keys, values = PACKED[kind]
    for index, (a, b) in enumerate(zip(plain.layers, packed.layers, strict=True)):
        assert b.storage.kinds == b.kinds == (keys, values) and b.storage.centre.shape == (2, 2, 32)
        for at, ((pos, k, v), (same, k_, v_)) in enumerate(zip(stored(a), stored(b), strict=True)):
            row, head = divmod(at, 2)
            assert pos == same
            query, new, first, options = asked[index]
            assert first.tolist() == [0, 40]
            centre = centre_of(query[row, :, first[row] :], new[row, :, first[row] :], options["scale"])[head]
            torch.testing.assert_close(b.storage.centre[row, head].double(), centre, atol=1e-4, rtol=1e-4)
            centre = b.storage.centre[row, head].double()
            want = ref.unpacked(ref.packed(k, keys, centre), 32, keys, centre)
            bound = (k.double() - centre).norm(dim=1).max() * {kv.INT8: 0.02}.get(keys, 0.2)  # a number on an edge
            assert (k_.double() - want).norm(dim=1).max() < bound
            assert (k_.double() - want).abs().median() < 1e-5
            assert (v_.double() - ref.unpacked(ref.packed(v, values), 32, values)).abs().median() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_reports_count_true_bytes(model, kind):
    cache, report = read(model, kind, prompt(2, 200, pad=(0, 30)), heads="ada")
    slots = sum(int(layer.counts.sum()) for layer in cache.layers)
    bits = [kv.ROW_KINDS[each].bits for each in PACKED[kind]]
    size = sum(32 * each // 8 + 4 for each in bits)
    assert report["cache_bytes"] == slots * size == sum(layer.live_bytes() for layer in cache.layers)
    buffers = [x for layer in cache.layers for x in (layer.k, layer.v)]
    assert all(x.dtype == torch.uint8 for x in buffers)
    rows = sum(len(layer.k) for layer in cache.layers)
    assert sum(x.numel() for x in buffers) == rows * size
    assert report["full_cache_bytes"] == sum(report["seen"]) * 4 * 2 * 2 * 32 * 4
    assert report["bits"] == [bits] * 4 and report["wider_keys"] == []
    centres = 4 * 2 * 2 * 32 * 4
    assert report["overhead_bytes"] >= centres


@pytest.mark.parametrize("kind", ("model", *KINDS))
@pytest.mark.parametrize("options", [dict(), dict(chunk_size=70), dict(policy="take", probe=4, chunk_size=70)])
def test_plan_says_what_the_report_says(model, kind, options):
    options = dict(policy="snapkv", budget=40) | options
    policy = build(options.pop("policy"), **options)
    planned = plan(shape_of(model.config, "float32"), policy, 200, run=Run(kv=kind))
    report = read(model, kind, prompt(1, 200), policy, tokenizer=False)[1]
    for name in ("cache_bytes", "peak_cache_bytes"):
        assert planned[name] == report[name]


def test_budgets_in_bytes_hold_more_packed_slots(model):
    kept = {}
    for kind in ("model", *KINDS):
        _, report = read(model, kind, prompt(1, 300), "streaming", budget="32KiB")
        kept[kind] = report["kept"][0][0][0]
        assert report["cache_bytes"] <= 1 << 15 < report["cache_bytes"] * (kept[kind] + 1) / kept[kind]
    sizes = {kind: kv.slot_bytes(kind, 32, 4) * 8 for kind in kept}
    assert kept == {kind: (1 << 15) // size for kind, size in sizes.items()}


def test_expected_errors_by_hand():
    q, k = torch.full((1, 2, 3, 4), 2.0), torch.tensor([3.0, -3.0, 3.0, 1.0]).expand(1, 1, 16, 4)
    every = torch.ones(1, 1, 3).bool(), torch.ones(1, 1, 16).bool()
    for kind, step in ((kv.INT8, 3 / 127), (kv.INT4, (4 - -2) / 15)):  # rotated: 2, 4, -2, 2
        centre = torch.tensor([7.0, 1, -2, 0]).expand(1, 1, 4)
        got = kv.expected_errors(q, every[0], k + centre, every[1], centre, 0.5, kind)
        torch.testing.assert_close(got, torch.full((2,), 4 * 0.5 * step / 12**0.5))


def test_few_keys_say_nothing_about_their_centre():
    """A first call of one token: its key is the centre, so its own error would be 0."""
    model = tiny.model("qwen2")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias.view(2, 2, 16)[..., 14:] = 100  # rotation hardly turns these
    for tokens, wider in ((1, [1]), (kv.FEW - 1, [1]), (150, [])):
        assert read(model, "int4", prompt(1, tokens))[1]["wider_keys"] == wider


@pytest.mark.parametrize("kind", range(1, len(kv.ROW_KINDS)))
@pytest.mark.parametrize("dim", [24, 64, 128])
def test_expected_errors_are_those_of_logits(kind, dim):
    """The root mean square of q . (k - k^). The median step is up to 9% below that of the steps' squares."""
    g = torch.Generator().manual_seed(dim)
    q, k = (torch.randn(400, dim, generator=g).double() * 5 for _ in range(2))
    error = q @ (ref.unpacked(ref.packed(k, kind), dim, kind) - k).T * 0.1
    every = torch.ones(1, 1, 400).bool()
    rows = q.float()[None, None], every, k.float()[None, None], every
    expected = kv.expected_errors(*rows, torch.zeros(1, 1, dim), 0.1, kind)
    assert error.square().mean().sqrt().item() == pytest.approx(expected.item(), rel=0.12)


@pytest.mark.parametrize("kind, errors, bits", [
    ("int8", {8: 1.0}, (8, 8)), ("int8", {8: 1.1}, (None, 8)), ("int4", {4: 0.9}, (4, 4)),
    ("int4", {4: 1.1, 8: 0.1}, (8, 4)), ("k8v4", {8: 1.1}, (None, 4)), ("int4", {4: math.nan, 8: math.nan}, (None, 4)),
])  # fmt: skip
def test_keys_take_more_bits_while_their_error_is_too_large(kind, errors, bits):
    kinds = kv.chosen(kind, lambda keys: errors[kv.ROW_KINDS[keys].bits], (1.0, 1.0))
    assert tuple(kv.ROW_KINDS[each].bits for each in kinds) == bits


@pytest.mark.parametrize("kind, norm, bits", [
    ("int4", (65504, 65504), (4, 4)), ("int4", (65505, 1), (8, 4)), ("k8v4", (1, 65505), (8, 8)),
    ("int8", (1e38, 1e38), (8, 8)), ("int4", (1, math.nan), (4, None)),
])  # fmt: skip
def test_rows_that_fp16_cannot_hold_take_8_bits(kind, norm, bits):
    kinds = kv.chosen(kind, lambda keys: 0.0, norm)
    assert tuple(kv.ROW_KINDS[each].bits for each in kinds) == bits


@pytest.mark.parametrize("where", ["kv", "recall_kv", "a prefix", "a file"])
@pytest.mark.parametrize("least", [-1e5, 1e6])
def test_values_beyond_fp16(where, least, tmp_path):
    """Every number below -65504, or far above: 8 bits hold it, and the logits are near the unpatched model's."""
    model, ids = tiny.model("qwen2"), prompt(1, 150)["input_ids"]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.bias.normal_(0, 2000).add_(least)
            layer.self_attn.o_proj.weight.div_(abs(least))
        want = model(ids).logits[:, -1:]
        cache = model(ids[:, :60]).past_key_values if where == "a prefix" else None
        kinds = dict(kv="model", recall=True, recall_kv="int4") if where == "recall_kv" else dict(kv="int4")
        with kvevict.evicting(model, "snapkv", budget=1000, chunk_size=50, tokenizer=False, **kinds):
            start, stop = 60 if cache else 0, 149 if where != "recall_kv" else 100
            cache = model(ids[:, start:stop], past_key_values=cache, use_cache=True).past_key_values
            if where == "a file":
                kvevict.save_cache(cache, tmp_path / "cache")
                cache = kvevict.load_cache(tmp_path / "cache", model)
            packed = [cache.tiers.every.get(at, layer.storage) for at, layer in enumerate(cache.layers)]
            assert {each.kinds for each in packed} == {(kv.INT4, kv.INT8)}
            assert all(each.gathered().dense("v").isfinite().all() for each in packed)
            got = model(ids[:, stop:], past_key_values=cache).logits[:, -1:]
    assert tiny.relative(got, want) < 0.2


def test_a_later_value_that_fp16_cannot_hold(monkeypatch):
    """The kind is chosen by then: a warning, once."""
    monkeypatch.setattr(cautions, "_given", set())
    model, ids = tiny.model("qwen2"), prompt(1, 150)["input_ids"] % 40 + 50
    ids[0, 120] = 7
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 0
        model.model.embed_tokens.weight[7] = torch.eye(model.config.hidden_size)[0]
        model.model.layers[0].self_attn.v_proj.weight[:, 0] = 1e5
    for kind, said in (("int8", 0), ("int4", 1), ("int4", 0)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            cache, _ = read(model, kind, dict(input_ids=ids))
        found = [str(each.message) for each in found if "65504" in str(each.message)]
        assert len(found) == said and all("layers 0" in each for each in found), found
        assert cache.layers[0].kinds == PACKED[kind]


@pytest.mark.parametrize("loudest", [0, 1])
def test_one_head_with_large_keys_is_enough(loudest):
    model = tiny.model("qwen2")
    with torch.no_grad():
        weight = model.model.layers[1].self_attn.k_proj.weight
        weight.view(2, -1, weight.shape[1])[loudest].mul_(100)
    assert read(model, "int4", prompt(1, 200))[1]["wider_keys"] == [1]


def test_layers_with_large_keys_keep_wider_ones():
    model, loud = tiny.model("qwen2"), (0, 2)
    with torch.no_grad():
        for index in loud:
            model.model.layers[index].self_attn.k_proj.weight.mul_(300)
            model.model.layers[index].self_attn.q_proj.weight.mul_(30)
    cache, report = read(model, "int4", prompt(1, 200))
    assert report["wider_keys"] == list(loud)
    for index, layer in enumerate(cache.layers):
        assert (layer.kinds[0] == kv.INT4) == (index not in report["wider_keys"])
    assert cache.layers[0].k.dtype == torch.float32  # 8 bits are too few, too
    sizes = [kv.row_bytes(layer.kinds[0], 32, 4) + kv.row_bytes(kv.INT4, 32, 4) for layer in cache.layers]
    assert report["cache_bytes"] == sum(int(layer.counts.sum()) * n for layer, n in zip(cache.layers, sizes))


def test_a_large_bias_of_keys_is_the_centre_s():
    """Rotation by position moves most of a bias about; the dimensions that it hardly turns keep it."""
    model = tiny.model("qwen2")
    with torch.no_grad():
        bias = model.model.layers[1].self_attn.k_proj.bias.view(2, -1)
        bias[:, 12:16] = 2000
        bias[:, 28:] = -2000
    assert read(model, "int8", prompt(1, 200))[1]["bits"][1][1] == 8


POLICIES = {
    "take+edie": {}, "h2o": dict(decode=True), "tova": {}, "kvzip": {}, "knorm": {}, "keydiff": {},
    "lagkv": dict(score=tiny.short_parts(16)), "expected": {}, "compactor": {}, "tri": {},
    "rkv": dict(decode=True, interval=2), "laq": {}, "cake": {},
    "snapkv+caote": {}, "fastkv": dict(tsp_len=40), "edie+tada": dict(own=True), "defensive": {},
    "snapkv": dict(diagnose=True),
}  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", ["int8", "k8v4"])
def test_every_score(model, name, kind):
    """8 bits change few choices: most slots are those that the model's kind keeps."""
    inputs, options = prompt(2, 160, pad=(0, 30)), dict(budget=48, chunk_size=64, tokenizer=False) | POLICIES[name]
    found = {}
    for each in ("model", kind):
        with kvevict.evicting(model, name, kv=each, **options):
            out = model.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        rows = [row for layer in out.past_key_values.layers for row in layer.positions()]
        found[each] = [head.tolist() for row in rows for head in row]
    same = [len(set(a) & set(b)) / max(len(a), 1) for a, b in zip(*found.values(), strict=True)]
    assert np.mean(same) > 0.85


def digest(cache, row=0):
    """Bytes of a row's slots, by layer, head and position."""
    layers = [layer.storage.gathered() for layer in cache.layers]
    return [{int(p): (str(k.tolist()), str(v.tolist())) for p, k, v in zip(x.pos[at], x.k[at], x.v[at])}
            for x in layers for b, _, at in x.segments() if b == row]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_moving_a_slot_moves_its_bytes(model, kind):
    ids = prompt(1, 120)["input_ids"]
    options = dict(budget=40, chunk_size=60, window=8, kv=kind, tokenizer=False)
    with kvevict.evicting(model, "snapkv", **options), torch.no_grad():
        cache = model(ids, logits_to_keep=1).past_key_values
        before = digest(cache)
        model(prompt(1, 70, seed=3)["input_ids"], past_key_values=cache, logits_to_keep=1)
    after = digest(cache)
    kept = sum(len(a.keys() & b.keys()) for a, b in zip(before, after, strict=True))
    assert kept > 40
    assert all(a[p] == b[p] for a, b in zip(before, after, strict=True) for p in a.keys() & b.keys())


@pytest.mark.parametrize("kind", KINDS)
def test_forks_beams_crop_and_copies(model, kind):
    cache, _ = read(model, kind, prompt(2, 150, pad=(0, 20)))
    ids = torch.tensor([[5, 6, 7, 8]] * 2)
    with kvevict.evicting(model, "streaming", budget=10**6, decode=False), torch.no_grad():
        mask = torch.cat([prompt(2, 150, pad=(0, 20))["attention_mask"], torch.ones(2, 4, dtype=torch.long)], 1)
        forks = [cache.fork(), copy.deepcopy(cache), cache.fork().fork()]
        outs = [model(ids, past_key_values=each, attention_mask=mask).logits for each in forks]
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0], atol=2e-4, rtol=2e-4)
        assert digest(forks[0], 1) == digest(forks[1], 1)
        assert all(set(a) < set(b) for a, b in zip(digest(cache), digest(forks[0]), strict=True))
        fork = forks[0]
        fork.crop(-4)
        assert digest(fork) == digest(cache)
        fork.reorder_cache(torch.tensor([1, 0]))
        assert digest(fork) == digest(cache, 1) and digest(fork, 1) == digest(cache)
        torch.testing.assert_close(fork.layers[0].centre, cache.layers[0].centre[[1, 0]])
        again = model(ids, past_key_values=fork, attention_mask=mask[[1, 0]]).logits
        torch.testing.assert_close(again, outs[0][[1, 0]], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_that_decode_together(model, kind):
    caches = [read(model, kind, prompt(1, n, seed=n))[0] for n in (120, 190)]
    options = dict(budget=64, chunk_size=96, window=8, kv=kind, tokenizer=False)
    with kvevict.evicting(model, "snapkv", **options), torch.no_grad():
        for cache in caches:
            cache.sequence.policy = caches[0].sequence.policy
        alone = [model(torch.tensor([[n]]), past_key_values=c.fork()).logits for n, c in zip((7, 9), caches)]
        whole = join(caches)
        together = Batch(model, "ab", whole).step([7, 9])
    torch.testing.assert_close(together, torch.cat(alone)[:, -1], atol=2e-4, rtol=2e-4)
    parted = part(whole, [1])
    assert parted.layers[0].centre.shape[0] == 1 and digest(parted) == digest(whole, 1)


def test_slots_of_a_pool(model):
    pools = Pools(model.model, 3000)
    options = dict(budget=64, chunk_size=96, window=8, kv="k8v4", tokenizer=False)
    with kvevict.evicting(model, "snapkv", **options), torch.no_grad():
        caches = [pools.cache() for _ in range(2)]
        for cache, n in zip(caches, (120, 190), strict=True):
            model(**prompt(1, n, seed=n), past_key_values=cache, logits_to_keep=1)
        alone = [read(model, "k8v4", prompt(1, n, seed=n))[0] for n in (120, 190)]
        assert all(digest(a) == digest(b) for a, b in zip(caches, alone, strict=True))
        for cache in caches:
            cache.sequence.policy = caches[0].sequence.policy
        whole = join(caches)
        buffers = pools.of[0].buffers
        assert whole.layers[0].k is buffers[0] and [x.shape[1] for x in buffers[:2]] == [36, 20]


def test_kinds_do_not_decode_together(model):
    one, other = (read(model, kind, prompt(1, 120))[0] for kind in ("int8", "int4"))
    other.sequence.policy = one.sequence.policy
    with pytest.raises(ValueError, match="kind of stored slots"):
        join([one, other])


@pytest.mark.parametrize("policy", ["snapkv", "take"])
def test_a_row_s_centre_is_of_its_first_chunk(model, policy):
    """Row 1 is padding in the first chunk, to which a probe is appended."""
    inputs, options = prompt(2, 180, pad=(0, 120)), dict(budget=64, chunk_size=60, tokenizer=False)
    cache, _ = read(model, "int8", inputs, policy, **options)
    row = dict(input_ids=inputs["input_ids"][1:, 120:], position_ids=torch.arange(120, 180)[None])
    alone, _ = read(model, "int8", row, policy, **options)
    for a, b in zip(cache.layers, alone.layers, strict=True):
        torch.testing.assert_close(a.centre[1:], b.centre, atol=1e-3, rtol=1e-3)
        assert a.centre[1].abs().sum() > 0


def test_keys_that_are_not_finite_do_not_spoil_the_centre():
    keys = torch.ones(1, 1, 4, 8)
    keys[0, 0, 2, 3] = math.inf
    centre = kv.centre(keys, torch.full((1, 1, 4), 0.25))
    assert centre[0, 0].tolist() == [1, 1, 1, 0, 1, 1, 1, 1]
    assert torch.equal(kv.centre(keys, torch.full((1, 1, 4), math.nan)), 0 * centre)
    storage = Storage.empty(keys[:, :, :0], kinds=kv.KINDS["int8"]).centred_at(centre, np.ones(1, bool))
    first = torch.zeros(1, dtype=torch.int32)
    storage = storage.append(keys, keys, torch.arange(4)[None].int(), first, np.zeros(1, int))
    rows = storage.dense("k")[0, 0]
    assert rows[2].isnan().all() and torch.equal(rows[[0, 1, 3]], torch.ones(3, 8))


@pytest.mark.parametrize("before, after", [("int8", "model"), ("model", "int4"), ("int4", "int8")])
def test_a_cache_keeps_its_kind(model, before, after):
    cache, _ = read(model, before, prompt(1, 150))
    kinds = cache.layers[0].kinds
    options = dict(budget=64, chunk_size=96, window=8, kv=after, tokenizer=False)
    with kvevict.evicting(model, "snapkv", **options), torch.no_grad():
        model(prompt(1, 100, seed=5)["input_ids"], past_key_values=cache, logits_to_keep=1)
    assert all(layer.kinds == kinds and layer.storage.gathered().kinds == kinds for layer in cache.layers)
    assert kvevict.report(cache)["wider_keys"] == ([0, 1, 2, 3] if after == "int4" else [])


@pytest.mark.parametrize("kind", KINDS)
def test_slots_of_a_prefix_from_before_are_packed(model, asked, kind):
    ids = prompt(1, 150)["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :60]).past_key_values
        keys = cache.layers[0].keys.clone()
        options = dict(budget=10**4, kv=kind, tokenizer=False)
        with kvevict.evicting(model, "streaming", **options):
            model(ids[:, 60:], past_key_values=cache, logits_to_keep=1)
    layer = cache.layers[0]
    assert layer.k.dtype == torch.uint8 and layer.kinds == PACKED[kind]
    query, new, _, options = asked[0]
    rows = query[0].double().unflatten(0, (2, -1))
    weights = rows @ torch.cat([keys, new], 2)[0].double().mT[:, None] * options["scale"]
    later = torch.ones(90, 150).triu(61).bool()
    weights = weights.masked_fill(later, -math.inf).softmax(-1)[..., :60].sum((1, 2))
    centre = (weights[..., None] * keys[0].double()).sum(1) / weights.sum(1)[:, None]
    torch.testing.assert_close(layer.centre[0].double(), centre, atol=1e-4, rtol=1e-4)
    error = (layer.keys[:, :, :60] - keys).norm(dim=-1)
    assert (error <= 0.52 * kv.ROW_KINDS[PACKED[kind][0]].steps(keys - layer.centre[:, :, None]) * 32**0.5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_its_kind(model, tmp_path, kind):
    path = tmp_path / "cache"
    cache, report = read(model, kind, prompt(2, 150, pad=(0, 20)), heads="ada")
    kvevict.save_cache(cache, path)
    loaded = kvevict.load_cache(path, model)
    assert digest(loaded) == digest(cache) and digest(loaded, 1) == digest(cache, 1)
    for a, b in zip(loaded.layers, cache.layers, strict=True):
        assert a.kinds == b.kinds and torch.equal(a.centre, b.centre)
    packed = sum(x.numel() for layer in loaded.layers for x in (layer.k, layer.v))
    assert packed == report["cache_bytes"]
    with kvevict.evicting(model, "snapkv", budget=64, window=8, tokenizer=False), torch.no_grad():
        mask = torch.cat([prompt(2, 150, pad=(0, 20))["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
        outs = [model(torch.tensor([[5], [5]]), past_key_values=c, attention_mask=mask).logits for c in (cache, loaded)]
    assert torch.equal(*outs)


def test_a_file_of_layers_with_wider_keys(tmp_path):
    model = tiny.model()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(1e4)
    cache, report = read(model, "k8v4", prompt(1, 150))
    assert report["wider_keys"] == [1]
    kvevict.save_cache(cache, tmp_path / "cache")
    loaded = kvevict.load_cache(tmp_path / "cache", model)
    k8v4 = kv.KINDS["k8v4"]
    assert [layer.kinds for layer in loaded.layers] == [k8v4, (kv.MODEL, kv.INT4), k8v4, k8v4]
    assert digest(loaded)[0] == digest(cache)[0]


@pytest.mark.parametrize("change, said", [
    (lambda fact: fact.update(bits=[3, 3]), "slots of .3, 3. bits, which this version of kvevict does not know"),
    (lambda fact: fact.update(bits="int2"), "which this version of kvevict does not know"),
    (lambda fact: fact.update(bits=[4, 4]), "damaged"), (lambda fact: fact.pop("bits"), "damaged"),
])  # fmt: skip
def test_files_that_are_refused(model, tmp_path, change, said):
    path = tmp_path / "cache"
    kvevict.save_cache(read(model, "int8", prompt(1, 150))[0], path)
    texts, tensors = sealed.texts(path), sealed.tensors(path, True)
    facts = json.loads(texts["layers"])
    change(facts[2])
    texts = {k: v for k, v in texts.items() if k in ("format", "cache", "name")} | dict(layers=json.dumps(facts))
    sealed.write(path, tensors, texts)
    with pytest.raises(ValueError, match=said):
        kvevict.load_cache(path, model)


def test_a_run_has_its_kind(model):
    """A policy has none, and says where an older one's goes."""
    assert choose("snapkv", budget=64) == (build("snapkv", budget=64), Run(kv="model"))
    assert choose("snapkv:kv=int4", budget=64) == choose("snapkv", budget=64, kv="int4")
    with pytest.raises(ValueError, match="unknown kv 'int3'"):
        choose("snapkv", budget=64, kv="int3")
    policy = build("snapkv", budget=64)
    with pytest.raises(TypeError, match=r"kv is not part of a Policy.*kvevict.patch\(model, policy, kv=...\)"):
        dataclasses.replace(policy, kv="int4")
    old = json.dumps(json.loads(policy.to_json()) | dict(kv="int4", recall_kv=None, compiled=False, recall=False))
    with pytest.warns(UserWarning, match="does not hold kv='int4': give that beside it"):
        assert Policy.from_json(old) == policy
    assert from_json(old) == (policy, Run(kv="int4"))


def test_read_and_answer(model):
    tokenizer, text = tiny.byte_tokenizer(), "The code of Naislet is 364735. " * 6
    model = tiny.model(vocab_size=256)
    cache = kvevict.read(model, tokenizer, text, "snapkv", budget=64, kv="int4")
    assert cache.layers[0].kinds == kv.KINDS["int4"]
    assert len(kvevict.answer(model, tokenizer, cache, ["Which code?", "Where?"], max_new_tokens=4)) == 2


def test_commands(tmp_path, capsys):
    tiny.shared().config.save_pretrained(tmp_path)
    argv = ["plan", "--model", str(tmp_path), "--dtype", "bfloat16", "--tokens", "400", "--policy", "snapkv:window=8"]
    assert cli.main([*argv, "--budget", "64", "--kv", "k8v4"]) == 0
    run = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]["snapkv:window=8"]
    assert run["cache_bytes"] == 64 * 8 * (36 + 20)


def test_a_server_s_slots():
    policies = Policies(Options(policy="snapkv", kv="int8"))
    assert policies.built().run.kv == policies.built("streaming").run.kv == "int8"
    assert Options().kv == "model"
