"""Choices by hand, their common properties, and their combinations."""

import contextlib
import itertools
import json
import random
from dataclasses import dataclass
from fractions import Fraction

import oracle
import pytest
import tiny
import torch
from caches import kept
from choices import CHUNKED
from fuzzing import one_in
from policy_cases import VOCAB, Slots, model, ours, pyramid, read, tokens, truth
from tiny import snapshot
from transformers import DynamicCache

import kvevict
from kvevict.cli import main
from kvevict.policy.apportion import apportion
from kvevict.policy.building import build
from kvevict.policy.layers import layer_slots
from kvevict.policy.parts import PARTS, as_part
from kvevict.policy.policy import Policy


def keep(budget, score, slots, window=0):
    """The slots that each head of one row keeps."""
    return budget.keep(Slots(*score.shape, window), score[None], torch.tensor([slots]))[0].tolist()


def test_apportion_by_hand():
    def one(share, total, least=0, most=99, weight=None):
        parts = len(share)
        weight = None if weight is None else torch.tensor(weight)
        bounds = (torch.as_tensor(bound).expand(1, parts) for bound in (least, most))
        return apportion(torch.tensor([share]), torch.tensor([total]), *bounds, weight)[0].tolist()

    assert one([1, 1, 1], 7) == [3, 2, 2]  # the remainder goes to lower ones
    assert one([1, 2, 4], 10) == [1, 3, 6]  # 1.43, 2.86, 5.71
    assert one([8, 1, 1], 20, most=10) == [10, 5, 5]  # slots that one cannot use go to the others
    assert one([8, 1, 0], 20, most=10) == [10, 10, 0]
    assert one([8, 1, 0], 24, most=10) == [10, 10, 4]
    assert one([8, 1, 1], 20, least=4) == [12, 4, 4]
    assert one([0, 0], 5) == [3, 2] == one([float("nan"), -1.0], 5)
    assert one([1, 1], 99, most=3) == [3, 3] and one([1, 1], 1, least=2) == [2, 2]
    assert one([3, 1], 9, weight=[2, 1]) == [4, 1] and one([3, 1], 9, weight=[1, 2]) == [5, 2]
    assert one([9, 1], 30, weight=[3, 1]) == [9, 3]  # where no three fit any more, ones do


@pytest.mark.parametrize("seed", range(40))
def test_apportion_is_exact(seed):
    """As fractions have it."""
    rng = random.Random(seed)
    for _ in range(20):
        parts = rng.choice([1, 2, 3, 5, 8])
        share = [rng.choice([0, 1, 2, 3, 0.5, 0.25, 7, rng.random()]) for _ in range(parts)]
        bounds = [(low, low + rng.randrange(12)) for low in (rng.randrange(3) for _ in range(parts))]
        sizes = rng.choice([None, [2] * (parts - 1) + [1]])
        total = rng.randrange(parts * 12)
        want = oracle._apportion([Fraction(x) for x in share], total, bounds, sizes)
        least, most = torch.tensor(bounds).T
        weight = None if sizes is None else torch.tensor(sizes)
        got = apportion(torch.tensor([share]), torch.tensor([total]), least[None], most[None], weight)[0].tolist()
        assert got == want


def test_ada_by_hand():
    score = torch.tensor([[9.0, 8, 7, 6, 5], [4, 3, 0, 0, 0]])
    ada, flat = kvevict.HEADS["ada"], kvevict.HEADS["flat"]
    assert keep(flat(), score, 6) == [5, 1]
    assert keep(ada(f=0.5), score, 6) == [4, 2]  # half of 5 and 1, half of 3
    assert keep(ada(f=1.0), score, 6) == [3, 3]
    assert keep(ada(f=0.7, floor="max"), score, 6) == [4, 2]  # at least its best two
    assert keep(ada(f=0.3, floor="max"), score, 6) == [5, 1]
    assert [keep(ada(f=f, floor="all"), score, 6, window=1) for f in (0.4, 0.7, 1.0)] == [[5, 1], [4, 2], [3, 3]]
    window = torch.tensor([[9.0, 8, 7, 50, 60], [4, 3, 0, 50, 60]])  # the window does not compete
    assert keep(flat(), window, 7, window=2) == [5, 2]
    assert keep(ada(f=1.0), window, 7, window=2) == [4, 3]
    alike = torch.rand(1, 9).expand(4, -1).contiguous()
    for slots, floor in itertools.product((0, 19, 20, 22, 36), ("mix", "max", "all")):
        assert keep(ada(floor=floor), alike, slots) == keep(kvevict.HEADS["equal"](), alike, slots)


def test_ties_go_to_the_earlier_position_then_to_the_lower_head():
    flat = kvevict.HEADS["flat"]()
    assert keep(flat, torch.zeros(3, 5), 4) == [2, 1, 1]
    assert keep(flat, torch.tensor([[0.0, -1, -1], [-0.0, float("nan"), float("nan")]]), 4) == [3, 1]
    assert keep(flat, torch.tensor([[float("nan"), 1.0], [-torch.inf, float("nan")]]), 2) == [1, 1]


@pytest.mark.parametrize("layers, capacity, window, tokens", [
    (32, 128, 8, 8000), (32, 2048, 8, 8000), (5, 68, 8, 1000), (5, 68, 8, 122), (4, 48, 8, 60), (31, 308, 8, 4000),
])  # fmt: skip
def test_pyramidkv_slots_are_the_source_s(layers, capacity, window, tokens):
    policy = build("pyramidkv", budget=capacity, window=window)
    theirs = [slots + window for slots in pyramid(layers, capacity - window, window, tokens)]
    mine = layer_slots(policy, layers, 8, [tokens])[:, 0]
    assert int(mine.sum()) == capacity * layers * 8
    if sum(theirs) == capacity * layers:
        assert mine.tolist() == [8 * x for x in theirs]
    assert all(x <= 8 * y for x, y in zip(mine.tolist(), theirs, strict=True))
    assert mine[0] == 8 * theirs[0]


def test_pyramidkv_by_hand():
    """b = 60: from 117 slots down to 3 over five layers, the window of 8 on top."""
    mine = layer_slots(build("pyramidkv", budget=68, window=8), 5, 2, [1000])[:, 0]
    assert mine.tolist() == [2 * (x + 8) for x in (117, 88.5, 60, 31.5, 3)]


def chosen(score, slots, window, **options):
    """The slots that each head of one row keeps by chunked selection under equal budgets."""
    heads = score.shape[0]
    row = Slots(*score.shape, window, "chunk", **options)
    ranked = row.select.rank(row, score[None])
    keep = kvevict.HEADS["equal"]().keep(row, ranked, torch.tensor([slots * heads]), row.select.run)
    counts = row.select.trim_to_runs(row, ranked, keep)
    protected = torch.zeros(1, dtype=torch.int32), torch.full((1,), window, dtype=torch.int32)
    index = kvevict.ops._ops.select(ranked.contiguous(), row.n, counts, *protected, int(counts.max()))[0]
    return [[i for i in head if i >= 0] for head in index.tolist()]


def test_chunks_by_hand():
    score = torch.tensor([[1.0, 1, 9, 0, 5, 5, 0, 7], [0, 0, 0, 0, 0, 9, 9, 0]])
    assert chosen(score, 4, 0, c=3) == [[3, 4, 6, 7]] * 2  # means 11/6, 19/6, and 8/2: the last run has two members
    assert chosen(score, 5, 0, c=3) == [[3, 4, 5, 6, 7]] * 2
    assert chosen(score, 4, 0, c=3, exact=False) == [[6, 7]] * 2
    assert chosen(score, 4, 0, c=2, per_head=True) == [[2, 3, 4, 5], [4, 5, 6, 7]]
    assert chosen(score, 3, 0, c=1, per_head=True) == [[2, 4, 7], [0, 5, 6]]
    assert chosen(score, 5, 2, c=4, per_head=True, exact=False) == [[4, 5, 6, 7]] * 2  # means 11/4 and 5; 0 and 9/2


@pytest.mark.parametrize("name", ["snapkv", "h2o", "keydiff", "take"])
@pytest.mark.parametrize("heads", ["equal", "flat", "ada"])
def test_runs_of_one_token_are_tokens(name, heads):
    own = {"snapkv": dict(window=4), "take": dict(probe=4)}.get(name, {})
    given, rows = dict(budget=16, chunk_size=12, heads=heads, **own), [[41, 1, 14], [30, 1, 14]]
    one = ours(model(), name, rows, 3, **given)
    other = ours(model(), name, rows, 3, select="chunk", c=1, per_head=True, **given)
    assert [[row[1] for row in call] for call in one] == [[row[1] for row in call] for call in other]


def test_reuse_shares_positions_and_only_first_layers_score(monkeypatch):
    scored = []
    snapkv = kvevict.SCORES["snapkv"]
    score = snapkv.score
    monkeypatch.setattr(
        snapkv, "score", lambda self, slots, *given: scored.append(slots.index) or score(self, slots, *given)
    )
    for reuse, groups in ((1, [[0], [1], [2], [3]]), (2, [[0, 1], [2, 3]]), (3, [[0, 1, 2], [3]]), (9, [[0, 1, 2, 3]])):
        scored.clear()
        ((_, positions),) = ours(model(), "snapkv", [[40]], 0, budget=16, window=4, n_reuse=reuse)[0]
        assert scored == [group[0] for group in groups]
        for group in groups:
            assert all(positions[layer] == positions[group[0]] for layer in group)
        assert len({str(layer) for layer in positions}) == len(groups)


@pytest.mark.parametrize("seen", [12, 24, 36])
def test_a_run_cut_by_a_chunk_is_kept_until_it_is_whole(seen):
    """Every chunk but the last ends within a run of 7; all tokens of that run are kept until the next chunk ends it."""
    made, ids = model(), tokens([[48]], 0)[0][0][None]
    with kvevict.evicting(made, "knorm", budget=10, chunk_size=12, select="chunk", c=7), torch.no_grad():
        cache = _after_chunks(made, ids, seen)
    assert cache.sequence.seen.tolist() == [seen]
    assert all({*range(seen - seen % 7, seen)} <= {*layer[0][0]} for layer in kept(cache))


def _after_chunks(made, ids, seen):
    """The cache of a read of `ids` that stopped after `seen` tokens."""
    cache, count = DynamicCache(config=made.config), itertools.count()

    def stop(module, args):
        if next(count) == seen // 12:
            raise KeyboardInterrupt

    hook = made.model.layers[0].register_forward_pre_hook(stop)
    with contextlib.suppress(KeyboardInterrupt):
        made(ids, past_key_values=cache)
    hook.remove()
    return cache


def test_live_bytes_are_the_ragged_sum(task):
    made, past = model(), kvevict.history(task)
    past.contexts, past.errors, past.frozen = 1, [3.0, 0.2, 2.0, 1.0], True
    tada = dict(layers="tada", task=task)
    for given in (dict(heads="flat"), dict(heads="ada"), dict(layers="pyramid"), tada, tada | dict(heads="flat")):
        with kvevict.evicting(made, "snapkv", budget=16, window=4, **given), torch.no_grad():
            cache = made(tokens([[61]], 1)[0][0][None]).past_key_values
            report = kvevict.report(made)
        lengths = [layer.len for layer in cache.layers]
        assert len({int(n) for each in lengths for n in each.flatten()}) > 1
        assert report["cache_bytes"] == sum(int(n.sum()) for n in lengths) * 2 * 4 * 32 == 16 * 8 * 256
        assert report["padded_bytes"] == sum(n.numel() * int(n.max()) for n in lengths) * 2 * 4 * 32
        if "heads" in given:
            assert report["padded_bytes"] > report["cache_bytes"]
        for layer in cache.layers:
            assert layer.k.shape[0] <= int(layer.len.sum()) + 64 * layer.len.numel()


def test_errors_give_shares(task):
    """Slots in proportion to a history; a layer without errors keeps its window alone."""
    chosen, past = dict(**CHUNKED, window=4, heads="flat"), kvevict.history(task)
    for errors in ([1.0, 3.0, 0.5, 2.0], [1.0, 0.0, 0.0, 50.0], [0.0] * 4):
        past.frozen, past.contexts, past.errors = True, 1, errors
        seed, (((_, want),),) = truth(model(), "snapkv", [[61]], **chosen, errors=errors)
        (((_, got),),) = ours(model(), "snapkv", [[61]], seed, layers="tada", task=task, **chosen)
        assert got == want


def errors_in_float64(made, ids, window, until="attention"):
    """sum of the last `window` rows' attention to earlier slots, mean over the group, times the mean of
    1 - cos(R, R + O) over those rows, per full-attention layer."""
    config = made.config
    double = oracle._doubled(made)
    rows, streams = {}, {}
    hooks = []
    for index, layer in enumerate(double.model.layers):
        added = layer.self_attn
        if config.model_type in ("gemma2", "gemma3_text", "olmo2"):
            added = layer.post_attention_layernorm
        scale = getattr(config, "residual_multiplier", 1.0)
        hooks.append(layer.register_forward_pre_hook(
            lambda m, args, kwargs, i=index: streams.update({i: [args[0] if args else kwargs["hidden_states"]]}),
            with_kwargs=True))  # fmt: skip
        hooks.append(added.register_forward_hook(
            lambda m, args, out, i=index, s=scale: streams[i].append(streams[i][0] + s * (out[0] if isinstance(out, tuple) else out))))  # noqa: E501  # fmt: skip
        hooks.append(layer.register_forward_hook(
            lambda m, args, out, i=index: streams[i].append(out[0] if isinstance(out, tuple) else out)))  # fmt: skip

    class Attention:
        def attend(self, module, q, k, v, scale, softcap, sinks):
            group, index = q.shape[0] // k.shape[0], module.layer_idx
            kinds = getattr(config, "layer_types", None) or ["full_attention"] * 99
            x = q @ k.repeat_interleave(group, 0).mT * scale
            x = softcap * torch.tanh(x / softcap) if softcap else x
            n = x.shape[-1]
            sees = torch.ones(n, n).tril()
            if kinds[index] == "sliding_attention":
                sees = sees - torch.ones(n, n).tril(-config.sliding_window)
            else:
                rows[index] = None
            a = x.masked_fill(sees == 0, -torch.inf).softmax(-1)
            if index in rows:
                rows[index] = a[:, -window:, : n - window].sum().item() / group
            return (a @ v.repeat_interleave(group, 0)).transpose(0, 1)

    oracle._running.append(Attention())
    try:
        with torch.no_grad():
            double(ids[None], use_cache=False)
    finally:
        oracle._running.pop()
        for hook in hooks:
            hook.remove()
    result = []
    for index, score in rows.items():
        before, attended, after = (x[0, -window:] for x in streams[index])
        turn = 1 - torch.cosine_similarity(before, attended if until == "attention" else after, dim=-1)
        result.append(score * (1.0 if until == "off" else turn.clamp_min(0).mean().item()))
    return result


@pytest.mark.parametrize("cd", ["attention", "layer", "off"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "olmo2", "granite"])
def test_tada_measures_every_layer_s_error(family, cd, task):
    made, ids = model(family), tokens([[45]], 2)[0][0]
    with kvevict.evicting(made, "snapkv", budget=16, window=4, layers="tada", task=task, cd=cd), torch.no_grad():
        made(ids[None])
    want = errors_in_float64(made, ids, 4, cd)
    assert kvevict.history(task).errors == pytest.approx(want, rel=1e-4)  # 1 - cos cancels
    assert kvevict.history(task).contexts == 1


def test_tada_splits_by_its_history(task):
    """The first context is split uniformly, the second by its errors, batch rows by those before the batch."""
    made, given = model(), dict(budget=16, window=4, layers="tada", heads="flat", task=task)
    (first,), (second,) = tokens([[45]], 2)[0], tokens([[50]], 3)[0]
    with kvevict.evicting(made, "snapkv", **given), torch.no_grad():
        made(first[None])
        assert [sum(layer[0]) for layer in kvevict.report(made)["kept"]] == [32] * 4
        errors = kvevict.history(task).errors
        made(torch.stack([second, second.flip(0)]))
        policy = build("snapkv", **given | dict(task="by hand"))
        slots = layer_slots(policy, 4, 2, [50], measured=[errors])[:, 0].tolist()
        for row in range(2):
            assert [sum(layer[row]) for layer in kvevict.report(made)["kept"]] == slots != [32] * 4
    past = kvevict.history(task)
    assert past.contexts == 3
    alone = [errors_in_float64(made, ids, 4) for ids in (first, second, second.flip(0))]
    assert past.errors == pytest.approx([sum(x) / 3 for x in zip(*alone, strict=True)], rel=1e-3)


def test_tada_learns_from_a_prompt_s_earlier_chunks(task):
    """A prompt without its last chunk measures the errors that split the full prompt's last chunk."""
    made, (ids,) = model(), tokens([[53]], 4)[0]
    given = dict(budget=16, window=4, layers="tada", chunk_size=12)
    with kvevict.evicting(made, "snapkv", task=task, **given), torch.no_grad():
        made(ids[None, :41])
    errors = kvevict.history(task).errors
    kvevict.history(task).reset()
    with kvevict.evicting(made, "snapkv", task=task, **given), torch.no_grad():
        made(ids[None])
        got = [sum(layer[0]) for layer in kvevict.report(made)["kept"]]
    policy = build("snapkv", **given, task="by hand")
    assert got == layer_slots(policy, 4, 2, [53], measured=[errors])[:, 0].tolist() != [32] * 4


def test_tada_history_is_kept_frozen_and_reset(task, tmp_path):
    made, (ids,) = model(), tokens([[45]], 2)[0]
    past = kvevict.history(task)
    with kvevict.evicting(made, "snapkv", budget=16, window=4, layers="tada", task=task), torch.no_grad():
        made(torch.stack([ids[:16], ids[16:32]]))
        assert past.contexts == 0  # nothing was evicted
        made(ids[None])
        assert past.contexts == 1
        past.save(tmp_path / "history.json")
        past.frozen, before = True, list(past.errors)
        made(ids[None].flip(1))
        assert past.contexts == 1 and past.errors == before
        past.frozen = False
        made(ids[None].flip(1))
        assert past.contexts == 2
        past.load(tmp_path / "history.json")
        assert past.contexts == 1 and past.errors == before
        past.reset()
        assert past.contexts == 0
        (tmp_path / "other").write_text("[1]")
        with pytest.raises(ValueError, match="is not a history"):
            past.load(tmp_path / "other")
        past.contexts, past.errors = 1, [1.0, 2.0]
        with pytest.raises(ValueError, match="2 layers, not 4"):
            made(ids[None])


@pytest.mark.parametrize("cd", ["attention", "layer"])
def test_unpatching_takes_the_hooks_out(cd, task):
    made = tiny.model()
    before = snapshot(made)
    kvevict.patch(made, "snapkv", budget=40, layers="tada", cd=cd, task=task)
    tiny.generate(made, tiny.prompt(1, 60))
    assert kvevict.history(task).contexts == 1
    kvevict.unpatch(made)
    assert snapshot(made) == before


SCORES = {
    "streaming": dict(sink=2), "h2o": {}, "tova": {}, "tova, per head": dict(per_head=True), "snapkv": dict(kernel=3),
    "edie": {}, "edie-exact": dict(weight="all"), "vatp": dict(sink=2), "paasvn": dict(pool="none"),
    "cake": {}, "fastkv": {}, "knorm": {}, "keydiff": {}, "random": {}, "take": {}, "oracle": {},
    "laq": {}, "speckv": {}, "kvzip": {}, "kvzip+": {}, "expected": {}, "defensive": {},
    "tri": dict(sink=1), "rkv": dict(kernel=3),
    "lagkv": dict(sink=1), "compactor": dict(sink=2, recent=1),
}  # fmt: skip
ROWS = {
    "none": {}, "last": {}, "window": dict(window=4), "all": {}, "probe": dict(probe=4), "given": dict(ids=(5, 9)),
    "repeat": {},
    "drafted": dict(n_d=2, window=3),
    "drafted, by another": dict(n_d=2, window=0, draft_model=tiny.model("llama", vocab_size=VOCAB)),
}  # fmt: skip
AXES = dict(
    refine=[dict(refine=name) for name in ("none", "caote", "fastcaote", "critical")],
    layers=[dict(layers=name) for name in ("uniform", "pyramid", "tada", "cake", "pool")],
    heads=[dict(heads="equal"), dict(heads="flat"), dict(heads="ada"), dict(heads="ada", floor="max")],
    select=[dict(select="token"), *(dict(select=kvevict.SELECTIONS["chunk"](3, per_head, exact))
                                    for per_head, exact in ((False, True), (True, True), (True, False)))],
    when=[dict(chunk_size=20, n_reuse=1), dict(chunk_size=20, n_reuse=2), dict(schedule="prompt", n_reuse=1),
          dict(chunk_size=20, n_reuse=1, warmup_layers=2), dict(chunk_size=20, n_reuse=1, decode=True, interval=2)],
)  # fmt: skip
REASONS = (
    "needs|measures|only rank|one for the layer|layers after tsp|after tsp=0|has no queries|every chunk|"
    "after all layers|one ranking|repeat|not read again|slots one by one|in blocks|make a block"
)
RANKS = ("streaming", "knorm", "keydiff", "random", "lagkv", "defensive", "compactor", "tri", "rkv")
REPEATED = ("kvzip", "kvzip+")
OBSERVED = ("defensive", "compactor", "rkv")  # of RANKS
SAMPLED = 241  # one in so many of the combinations with rows that are not a score's default
DRAWN = 48  # one in so many is run


def in_matrix(kind):
    """The registered names of a kind of part that `test_every_combination` combines."""
    if kind in ("rows", "score"):
        return {name.split(",")[0] for name in (ROWS if kind == "rows" else SCORES)}
    return {PARTS[kind][0].name_of(type(as_part(kind, given[kind]))) for given in AXES[kind]}


def own_rows(name):
    if name == "speckv":
        return "drafted, by another"
    return kvevict.ROWS.name_of(type(kvevict.SCORES[name.split(",")[0]].rows))


def combinations(name):
    """(rows, choices) of a score: all choices with its default rows, some with the others."""
    axes = [{k: v for part in parts for k, v in part.items()} for parts in itertools.product(*AXES.values())]
    for number, rows in enumerate(ROWS):
        own = rows == own_rows(name)
        some = axes if own else axes[(number * 29 + len(name) * 7) % SAMPLED :: SAMPLED]
        yield from ((rows, choices) for choices in some)


def legal(name, rows, given):
    """METHODS: heads that compete, and output errors, need scores and runs per head; TADA and output errors take scores
    as weights; TADA needs every layer's score, CAKE every layer's attention of several rows; layers after FastKV's tsp
    have other slots than those before; a draft by the model comes after all chunks. One ranking of all layers takes
    single slots by scores that compare; rows that repeat a chunk are not its last ones. CriticalKV takes single slots,
    Compactor a chunk's rows."""
    reuse, weighs = given["n_reuse"] > 1, given["layers"] == "tada" or given["refine"] != "none"
    shared = name == "tova" or (given["select"] != "token" and not given["select"].per_head)
    carries = name in ("h2o", "vatp")
    compares = name in (*REPEATED, "expected", "defensive")
    pools = compares and (given["heads"], given["select"]) == ("flat", "token")
    pools = pools and given["refine"] in ("none", "critical")
    waits = "warmup_layers" in given
    return not (
        (shared and given["heads"] != "equal")
        or (name == "tova" and given["refine"] != "none") or (name in RANKS and weighs)
        or ((name not in (*RANKS, "expected") or name in OBSERVED) and rows == "none")
        or (given["refine"] == "critical" and given["select"] != "token")
        or (name == "compactor" and (rows != "all" or "decode" in given))
        or (given["layers"] in ("tada", "cake") and "warmup_layers" in given)
        or (given["layers"] == "tada" and reuse)
        or (given["layers"] == "cake" and (reuse or name in RANKS or carries or rows in ("none", "last")))
        or (name == "fastkv" and (reuse or "warmup_layers" in given or rows == "drafted"))
        or ((carries or name in ("expected", "lagkv", "tri")) and rows == "drafted")
        or (given["layers"] == "pool" and (not pools or reuse or waits or "decode" in given))
        or (rows == "repeat" and (name == "fastkv" or given["layers"] == "tada"))
        or (name in REPEATED and (rows != "repeat" or given["layers"] == "cake" or "decode" in given))
    )  # fmt: skip


@pytest.mark.parametrize("kind", PARTS)
def test_every_part_is_in_the_matrix(kind):
    registry, _ = PARTS[kind]
    elsewhere = {"lookahead", "gate"}  # test_lookahead.py and test_gates.py have these
    elsewhere |= {"products", "pooled"}  # test_every_choice.py has these, in the table `printed`
    assert in_matrix(kind) == {*registry} - elsewhere


@pytest.mark.parametrize("name", SCORES)
def test_every_combination(name, task, monkeypatch):
    """It runs with the same result twice, keeps the budget exactly, and a padded row keeps the same slots as alone; or
    it is refused. One in `DRAWN` of the legal ones is drawn."""
    monkeypatch.setattr(kvevict.SCORES["lagkv"], "lag", 2)
    made, past = model(num_hidden_layers=3), kvevict.history(task)
    past.contexts, past.errors, past.frozen = 1, [3.0, 0.2, 2.0], True
    data = tokens([[38], [31]], 5)
    batch = torch.stack([data[0][0], torch.cat([torch.zeros(7, dtype=torch.long), data[1][0]])])
    mask = (torch.arange(38) >= torch.tensor([[0], [7]])).long()
    score = kvevict.SCORES[name.split(",")[0]](**SCORES[name])
    common = dict(policy="snapkv", score=score, budget=9) | (dict(tsp="half", tsp_len=16) if name == "fastkv" else {})
    given, refused = [], 0
    for rows, choices in combinations(name):
        options = common | choices | dict(rows=kvevict.ROWS[rows.split(",")[0]](**ROWS[rows]))
        if choices["layers"] == "tada":
            options["task"] = task
        if legal(name, rows, choices):
            given.append(options)
            continue
        refused += 1
        with pytest.raises(ValueError, match=REASONS):
            kvevict.patch(made, **options)
    assert refused
    for options in one_in(DRAWN, given, name):
        kvevict.patch(made, **options)
        try:
            with torch.no_grad():
                got = read(made, batch, mask)
                assert read(made, batch, mask) == got, options
                alone = read(made, data[1][0][None])
                if "decode" in options:
                    check_decoding(made, batch, mask, 6 * (9 + 1))
        finally:
            kvevict.unpatch(made)
        assert [layer[1] for layer in got] == [layer[0] for layer in alone], options
        for row in range(2):
            total = sum(len(head) for layer in got for head in layer[row])
            exact = options["select"] == "token" or options["select"].exact
            assert total == 9 * 6 if exact else 0 < total <= 9 * 6, options


def check_decoding(made, batch, mask, most):
    """Every decoded token leaves no row more than `most` slots, and comes again the second time."""
    answers = []
    for _ in range(2):
        options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        out = made.generate(batch, attention_mask=mask, **options)
        answers.append(out.sequences)
        assert all(sum(int(layer.len[row].sum()) for layer in out.past_key_values.layers) <= most for row in range(2))
    assert torch.equal(*answers)


def test_sums_over_a_probe():
    """Sums include every chunk's probe, in layers that wait too; of one chunk they rank slots as the mean does."""
    made, ids = tiny.shared(), tiny.prompt(1, 150)["input_ids"]
    kept = []
    for policy in (dict(policy="take:warmup_layers=none", pool="none"), dict(policy="h2o", rows="probe", recent=0)):
        with kvevict.evicting(made, budget=48, **policy), torch.no_grad():
            kept.append(read(made, ids))
    assert kept[0] == kept[1]
    with kvevict.evicting(made, "h2o", rows="probe", budget=48, chunk_size=64, warmup_layers=3), torch.no_grad():
        assert {len(head) for layer in read(made, ids) for head in layer[0]} == {48}


@pytest.mark.parametrize("ranges", [((9, 12, "chunk"),), ((2, 5, "chunk"),), ((4, None, "chunk"),)])
def test_ranges_of_layers_that_are_not_there(ranges):
    made = tiny.model(num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"select_by_layer has a range .* 4 evicting layers"):
        kvevict.patch(made, "snapkv", budget=64, select_by_layer=ranges)
    with pytest.raises(ValueError, match="not patched"):
        kvevict.report(made)


def test_a_prompt_s_own_chunks(task):
    """TADA by earlier contexts, or by the same prompt's earlier chunks as soon as there are any."""
    past, policy = kvevict.history(task), kvevict.LAYERS["tada"]
    assert policy(task).shares(None, 2, 9) == [1.0, 1.0] and policy(task).shares(None, 2, 9, [3.0, 1.0]) == [3.0, 1.0]
    past.add([[1.0, 2.0]])
    assert policy(task).shares(None, 2, 9, [3.0, 1.0]) == [1.0, 2.0] == policy(task, own=True).shares(None, 2, 9)
    assert policy(task, own=True).shares(None, 2, 9, [3.0, 1.0]) == [3.0, 1.0]


@pytest.mark.parametrize("name", kvevict.policies())
def test_json_is_the_whole_policy(name):
    policy = build(name, budget=0.5, chunk_size=100)
    assert Policy.from_json(policy.to_json()) == policy
    other = build(name, budget=277, chunk_size=100, keep_first=3)
    assert Policy.from_json(other.to_json()) == other != policy


def test_json_of_options():
    policy = build(
        "snapkv", budget=64, window=8, layers="tada", task="qa", heads="flat", select="chunk", c=3, per_head=True,
        select_by_layer=((0, 2, "token"), (3, None, kvevict.SELECTIONS["chunk"](c=7, per_head=True))),
    )  # fmt: skip
    again = Policy.from_json(policy.to_json())
    assert again == policy and again.selection(3).c == 7 and again.selection(2).c == 3
    take = build("take", budget=64, probe=(-9, -1))
    assert Policy.from_json(take.to_json()).rows.probe == (-9, -1)
    assert Policy.from_json('{"score": "h2o", "budget": 5}') == Policy(score="h2o", budget=5)
    for text, error in (
        ("[", "is not a policy in JSON"), ("[]", "object of its fields"), ('{"scor": "h2o"}', "did you mean 'score'"),
        ('{"score": {"name": "h3o"}}', "did you mean 'h2o'"), ('{"score": {"name": "h2o", "recnt": 1}}', "'recent'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=error):
            Policy.from_json(text)


def test_a_score_of_one_s_own():
    @kvevict.register_score("oldest")
    @dataclass(frozen=True)
    class Oldest(kvevict.Score):
        """The oldest slots."""

        bonus: float = 0.0

        def score(self, slots):
            return -slots.positions.float() + self.bonus

    try:
        policy = build("snapkv", score="oldest", budget=5, bonus=2.0, chunk_size=9)
        assert Policy.from_json(policy.to_json()) == policy
        ((_, positions),) = ours(model(), policy, [[30]], 0)[0]
        assert positions == [[[0, 1, 2, 3, 4]] * 2] * 4
        with pytest.raises(ValueError, match="registered already"):
            kvevict.register_score("oldest")(Oldest)
    finally:
        del kvevict.SCORES["oldest"]


def test_the_command_lists_every_choice(capsys):
    assert main(["policies"]) == 0
    shown = capsys.readouterr().out.splitlines()
    for registry, _ in PARTS.values():
        assert all(any(name in line for line in shown) for name in registry)
    assert main(["policies", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    table = json.loads(line)["policies"]
    assert set(table) == set(kvevict.policies())
    assert "PyramidKV" in table["pyramidkv"]["about"]
    assert Policy.from_json(json.dumps(table["pyramidkv"]["policy"])) == build("pyramidkv", budget=0.5)
    assert len({entry["about"] for entry in table.values()}) == len(table)
