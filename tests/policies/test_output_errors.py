"""Scores and refinements that are errors of the attention's output: heads that compete, options, other models and TADA
against the float64 oracle; identities against brute-force removal; refusals."""

import copy
import itertools
from dataclasses import replace
from functools import partial

import oracle
import pytest
import ref
import torch
from choices import CHUNKED, ERRORS, options
from helpers import FP32
from policy_cases import BUDGET, CHUNK, compare, model, ours, tokens, truth

import kvevict
from kvevict import ROWS, SCORES
from kvevict.engine.measure.quantities import quantity
from kvevict.engine.read.choosers import Deciding, measured
from kvevict.engine.read.layer import LayerCall
from kvevict.policy.building import build
from kvevict.policy.inputs import need
from kvevict.policy.refinements import REFINEMENTS
from kvevict.policy.seen.rows import Observation

GIVEN = dict(rows="given", ids=(7, 11, 13, 5))
EACH = (need("output_error", kind="l2", group="mean"),)  # of every observing row and query head
UNPROTECTED = {
    "snapkv": dict(refine="caote", **GIVEN),
    "snapkv, mean": dict(reduce="mean", pool="avg", **GIVEN),
    "snapkv, largest": dict(reduce="max", pool="none", **GIVEN),
    "snapkv, cake": dict(score="cake", refine="caote", **GIVEN),
    "paasvn": GIVEN,
    "edie": dict(refine="caote", **GIVEN),
    "edie, many rows": dict(rows="given", ids=tuple(range(3, 15))),
    "edie, not the first": dict(weight="i>w", refine="fastcaote", **GIVEN),
    "edie-exact": dict(weight="all", **GIVEN),
}  # decoded rows stand in for given ones, and their slots can be lost before they observe for the last time


@pytest.mark.parametrize("name", UNPROTECTED)
def test_rows_whose_slots_may_be_gone(name):
    """A remembered row sees slots up to its position, also if its slot was evicted."""
    policy, chosen = options(UNPROTECTED, name, **CHUNKED, decode=True, interval=1)
    rows = [[29, *[1] * 12, 14, *[1] * 3], [9, *[1] * 12, 14, *[1] * 3]]
    want = compare(model(), policy, rows, **chosen)
    newest = {29 + 12 - 1 - i for i in range(4)}
    heads = [head for layer in want[12][0][1] for head in layer]
    assert any(not newest <= set(head) for head in heads)
    compare(model(), policy, [[29, *[1] * 5]], **chosen | dict(heads="flat"))


@pytest.mark.parametrize(
    "policy", ["edie", "edie-exact", "vatp", "paasvn", "snapkv+caote", "h2o+fastcaote", "take+caote"]
)
def test_as_it_comes(policy):
    """With the default window, sinks and blocks: prompts too short for c_j's range, just long enough, and longer."""
    for n in (85, 97, 150, 290):
        compare(model(), policy, [[n, 1, 1]], budget=48)


def test_defaults_are_the_papers():
    """The sources' windows and kernels, and CAOTE's blocks."""
    policies = {name: build(name, budget=64) for name in ("edie", "cake", "vatp", "paasvn")}
    edie, cake, vatp, paasvn = (policy.score for policy in policies.values())
    assert (edie.kernel, edie.pool, edie.alpha, edie.weight) == (7, "max", 0.1, "middle")
    assert (cake.kernel, cake.pool) == (5, "avg")
    assert (vatp.sink, vatp.recent, policies["vatp"].rows) == (20, None, ROWS["all"]())
    assert (paasvn.kernel, paasvn.pool) == (7, "max")
    assert all(policies[name].rows == ROWS["window"](32) for name in ("edie", "cake", "paasvn"))
    for base, error in itertools.product(("h2o", "tova", "snapkv"), ("caote", "fastcaote")):
        policy = build(f"{base}+{error}", budget=64)
        assert (policy.chunk_size, policy.schedule, policy.decode, policy.interval) == (128, "chunk", True, 1)
        assert policy.refine == REFINEMENTS[error]()
        assert policy.score == SCORES[base](**dict(per_head=True) if base == "tova" else {})
    for name in ("edie", "edie-exact", "vatp", "paasvn"):
        policy = build(name, budget=64)
        assert (policy.chunk_size, policy.schedule, policy.decode) == (None, "prompt", False)
        assert type(policy.heads).__name__ == dict(vatp="Equal", paasvn="Ada").get(name, "Flat")


MEASURED = [
    "edie", "edie, all slots", "edie-exact", "edie, caote", "vatp, flat", "paasvn, equal", "snapkv, cake",
    "snapkv, caote", "h2o+caote, flat", "h2o+caote",
    "tova+fastcaote", "take, fastcaote", "oracle, caote",
]  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("chunk", [80, CHUNK])
@pytest.mark.drawn(8)
def test_tada_sums_what_is_ranked_unpooled(name, chunk, task):
    """One context's errors, the mean over its chunks; slots follow a history that is there already."""
    policy, chosen = options(ERRORS, name, budget=BUDGET, chunk_size=chunk)
    past, shares = kvevict.history(task), [3.0, 1.0, 2.0, 2.5]
    seed, (((_, positions),),) = truth(model(), policy, [[53]], **chosen, errors=shares)
    row = oracle.Row(model(), policy, **chosen, errors=shares, measure=True)
    row.read(tokens([[53]], seed)[0][0].tolist())
    want = [sum(x) / len(x) for x in row.errors]
    assert {len(x) for x in row.errors} == {1 if chunk == 80 else 4}
    past.contexts, past.errors = 1, shares
    (((_, kept),),) = ours(model(), policy, [[53]], seed, layers="tada", cd="off", task=task, **chosen)
    assert kept == positions == row.positions
    assert past.contexts == 2
    assert [2 * x - y for x, y in zip(past.errors, shares)] == pytest.approx(want, rel=1e-4)


def test_how_far_a_layer_turns_the_stream_is_no_matter_of_the_score(task):
    turns = []
    for chosen in (dict(policy="snapkv"), dict(policy="edie"), dict(policy="snapkv", refine="caote")):
        errors = []
        for cd in ("off", "attention"):
            kvevict.history(task).reset()
            with kvevict.evicting(model(), budget=BUDGET, window=4, layers="tada", task=task, cd=cd, **chosen):
                model()(tokens([[45]], 2)[0][0][None])
            errors.append(kvevict.history(task).errors)
        turns.append([x / y for x, y in zip(*reversed(errors))])
    assert turns[1] == pytest.approx(turns[0], rel=1e-4) and turns[2] == pytest.approx(turns[0], rel=1e-4)
    assert all(0 < x < 2 for x in turns[0])


def cuts(monkeypatch, made, check, rows=5):
    """Calls check(call, a [H, R, n + 1], v [Hkv, n + 1, d], n) for every layer of a read, just before it evicts: the
    last rows' attention and the values, in float64; the last column is a sink's share, with a value of 0."""
    choose, seen = Deciding._chosen, []

    def watch(self, call, *more):
        layer, kv, q, attention, values = call.layer, call.slots.kv, call.rows.q, [], []
        scale, softcap, sinks = (kv.options[x] for x in ("scale", "softcap", "sinks"))
        group = q.shape[1] // call.slots.n.shape[1]
        for _, g, slot in layer.segments():
            keys, value = (torch.cat([x[slot], y[0, g]]).double() for x, y in ((layer.k, kv.k), (layer.v, kv.v)))
            n = len(keys)
            for h in range(g * group, (g + 1) * group):
                sees, sink = torch.ones(rows, n).tril(n - rows) > 0, None if sinks is None else sinks[h]
                a, _ = ref.attention(q[0, h, -rows:], keys, sees, scale, softcap, sink)
                attention.append(torch.cat([a, 1 - a.sum(1, keepdim=True)], 1))
            values.append(torch.cat([value, torch.zeros_like(value[:1])]))
        check(call, torch.stack(attention), torch.stack(values), n)
        seen.append(int(layer.len.max()))
        return choose(self, call, *more)

    monkeypatch.setattr(Deciding, "_chosen", watch)
    with kvevict.evicting(made, "snapkv", budget=9, window=rows, chunk_size=14), torch.no_grad():
        made(tokens([[40]], 1)[0][0][None], use_cache=True)
    assert max(seen) == 9 and min(seen) == 0  # with slots from before, and without


def measured_by(call, rows):
    """needs -> the layer's quantities, by the last `rows` rows of its chunk."""
    own = replace(call, known={})
    own.observation = call.rows.chunk(rows)
    return partial(measured, own)


def scored(score, call, measure):
    return score.score(call.slots, *measure(score.needs))


def removals(a, v, n, norm):
    """(how far each row's output moves without slot i [H, R, n], by how much fp32 may miss it)."""
    group = a.shape[0] // v.shape[0]
    moved, allowed = torch.zeros(2, *a.shape[:2], n, dtype=torch.double)
    for h, r in itertools.product(*map(range, a.shape[:2])):
        value, weights = v[h // group], a[h, r]
        moved[h, r] = ref.removal(weights, value, norm)[:n]
        size = value.norm(p=norm, dim=1) + (weights @ value).norm(p=norm)
        allowed[h, r] = (3 * FP32 * weights * size / (1 - weights).clamp(min=1e-6) ** 2)[:n]
    return moved, allowed + 1e-9


def near(got, want, allowed):
    assert (got[0, :, : want.shape[-1]].double() - want).abs().le(allowed).all()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_caote_of_the_last_row_is_its_removal_error(family, monkeypatch):
    """At G=1 (theorem A.2), pooled or by row; a window of one row is the same."""

    def check(call, a, v, n):
        moved, allowed = removals(a[:, -1:], v, n, 2)
        last = measured_by(call, 1)
        for score in (SCORES["tova"](per_head=True), SCORES["snapkv"](pool="none")):
            near(REFINEMENTS["caote"]().refine(call.slots, scored(score, call, last)), moved[:, 0], allowed[:, 0])
            near(last(EACH)[0], moved[:, 0], allowed[:, 0])

    cuts(monkeypatch, model(family, num_key_value_heads=4), check)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
@pytest.mark.drawn(4)
def test_errors_of_a_window_are_sums_of_removals(family, heads, monkeypatch):
    """EDIE eq. 7 in the 1-norm, summed over the group; CAOTE by row in the 2-norm, the mean. Eq. 8 bounds eq. 7."""

    def check(call, a, v, n):
        five = measured_by(call, 5)
        for norm, total in ((1, True), (2, False)):
            moved, allowed = (x.sum(1).unflatten(0, (heads, -1)) for x in removals(a, v, n, norm))
            exact = scored(SCORES["edie-exact"](weight="none"), call, five)
            (rows,) = five(EACH)
            near(exact, moved.sum(1), allowed.sum(1)) if total else near(rows, moved.mean(1), allowed.mean(1))
        bound = scored(SCORES["edie"](weight="none", alpha=0.0), call, five)
        assert (bound >= exact * (1 - FP32)).all() and (bound > exact).any()

    cuts(monkeypatch, model(family, num_key_value_heads=heads), check)


def test_weight_is_1_where_every_slot_observes(monkeypatch):
    """The first chunk's rows, fewer than a window, are all there is."""

    def check(call, a, v, n):
        (need,) = SCORES["edie"]().needs
        rows = quantity(need).row_weights(call.slots, call.rows.chunk(14))
        assert bool((rows == 1).all()) == (int(call.layer.len.max()) == 0)

    cuts(monkeypatch, model(), check)


def test_one_row_at_a_time_is_what_all_rows_are_together(monkeypatch):
    """Rows in the form for observers without a slot, in a case where all have one."""
    policy, chosen = "snapkv", dict(window=4, reduce="max", pool="none", decode=True, interval=1, **CHUNKED)
    rows = [[29, *[1] * 9], [20, *[1] * 9]]
    want = ours(model(), policy, rows, 3, **chosen)
    decoded = LayerCall._decoded

    def one_by_one(call):
        (part,) = decoded(call).parts
        return Observation((replace(part, until=call.step.positions[:, -1:]),))

    monkeypatch.setattr(LayerCall, "_decoded", one_by_one)
    got = ours(model(), policy, rows, 3, **chosen)
    assert [[x[1] for x in call] for call in got] == [[x[1] for x in call] for call in want]


@pytest.mark.parametrize("name", ["edie", "snapkv", "vatp, flat"])
def test_a_saved_cache_decodes_on(name, tmp_path):
    """Remembered queries, their outputs and carried sums with it."""
    policy, chosen = options(ERRORS | {"snapkv": dict(window=4)}, name, **CHUNKED, decode=True, interval=2)
    made, ids = model(), tokens([[45]], 1)[0][0][None]
    with kvevict.evicting(made, policy, **chosen), torch.no_grad():
        cache = made(ids[:, :29], use_cache=True).past_key_values
        step(made, cache, ids[:, 29:32])
        kvevict.save_cache(cache, tmp_path / "cache")
        alive = step(made, copy.deepcopy(cache), ids[:, 32:])
        loaded = kvevict.load_cache(tmp_path / "cache", made)
        assert step(made, loaded, ids[:, 32:]) == alive


def step(made, cache, ids):
    for token in ids.T:
        made(token[None], past_key_values=cache, use_cache=True)
    return [layer.pos[rows].tolist() for layer in cache.layers for _, _, rows in layer.segments()]
