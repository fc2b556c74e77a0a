"""Presets keep the slots that the methods' published implementations keep.

Here those are written once more, in plain fp32 torch over the dense attention matrices of the unpatched model. METHODS
differs from them on purpose in the points below. These functions follow METHODS there, or the cases avoid the
difference:
- equal scores (max pooling makes many): `torch.topk` may take any of them, we take the earlier slot;
- grouped queries: sources repeat keys and values, so that each query head has separate slots; we take the mean of the
  group's scores before pooling (KVCache-Factory's kv_head mode does too). With a group of one nothing differs;
- layer and head budgets: sources round each number, ours sum to the budget exactly;
- the window: kvpress gives it the largest score instead of protecting it.
Names: a [H, T, n] attention of T rows over n slots, w the window, b slots besides it, G query heads per kv head.
"""

import pytest
import torch
import torch.nn.functional as F
from oracle import NearTie
from policy_cases import NEAR, model, ours, pyramid, tokens
from transformers import DynamicCache

import kvevict

SEEDS = range(3)


def best(score, count):
    """The `count` largest of a row, ascending; equal ones from the left. Raises NearTie where rounding may decide."""
    values, index = score.sort(descending=True, stable=True)
    if 0 < count < len(score):
        edge = values[count - 1 : count + 1, None]
        if (((score - edge).abs() < NEAR * edge.abs()) & (score != edge)).any():
            raise NearTie
    return sorted(index[:count].tolist())


def with_window(rows, n, w):
    return [[*row, *range(n - w, n)] for row in rows]


def dense(made, ids):
    """(attention, keys, values) of every layer of the unpatched model: [H, N, N], [Hkv, N, d] twice."""
    with torch.no_grad():
        out = made(ids[None], output_attentions=True, use_cache=True)
    return [(a[0], layer.keys[0], layer.values[0]) for a, layer in zip(out.attentions, out.past_key_values.layers)]


def eager(heads):
    """Its attention matrices can be had."""
    return model(num_key_value_heads=heads, attn_implementation="eager")


def compare(seed, heads, length, source, policy, **options):
    """(positions that the source keeps, positions that we keep), each [layer][kv head], of the first prompt from `seed`
    on where `source(layer number, a, k, v)` meets no near-tie."""
    made = eager(heads)
    for text in range(100 * seed, 100 * seed + 60):
        try:
            layers = dense(made, tokens([[length]], text)[0][0])
            want = [source(index, *layer) for index, layer in enumerate(layers)]
        except NearTie:
            continue
        ((_, got),) = ours(made, policy, [[length]], text, **options)[0]
        return want, got
    raise AssertionError("60 prompts and every one has a near-tie")


def check(seed, heads, length, source, policy, **options):
    want, got = compare(seed, heads, length, lambda index, *layer: source(*layer), policy, **options)
    assert got == want


any_seed = pytest.mark.parametrize("seed", SEEDS)


def window_score(a, w, kernel, pool, heads, reduce="sum"):
    """The score of past slots in SnapKV's family: [Hkv, n - w]."""
    rows = a[:, -w:, :-w]
    score = (rows.sum(1) if reduce == "sum" else rows.mean(1)).unflatten(0, (heads, -1)).mean(1)
    pooled = F.max_pool1d if pool == "max" else F.avg_pool1d
    return pooled(score, kernel, 1, kernel // 2)


@any_seed
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("name, w, kernel, pool, options", [
    ("snapkv", 32, 7, "max", {}),  # the LongBench configurations
    ("snapkv", 32, 5, "avg", dict(kernel=5, pool="avg")),  # the code's defaults
    ("snapkv", 8, 7, "max", dict(window=8)),
])  # fmt: skip
def test_snapkv(seed, heads, name, w, kernel, pool, options):
    """FasterDecoding/SnapKV, and KVCache-Factory's runner: the best C - w past slots of each head, and the window."""

    def source(a, k, v):
        score = window_score(a, w, kernel, pool, heads)
        return with_window([best(row, 64 - w) for row in score], a.shape[2], w)

    check(seed, heads, 150, source, name, budget=64, **options)


@any_seed
@pytest.mark.parametrize("b, length", [(60, 200), (60, 140), (60, 110), (62, 210)])
def test_pyramidkv(seed, b, length):
    """Where its steps are whole numbers, the same slots; where it cuts them and so keeps more, all of ours."""
    counts = pyramid(4, b, 32, length)

    def source(index, a, k, v):
        score = window_score(a, 32, 7, "max", 2)
        return with_window([best(row, counts[index]) for row in score], length, 32)

    want, got = compare(seed, 2, length, source, "pyramidkv", budget=b + 32)
    if sum(counts) == 4 * b:
        assert got == want
    else:
        assert 2 * sum(counts) > 8 * b == sum(len(head) - 32 for layer in got for head in layer)
        assert all(set(x) <= set(y) for mine, theirs in zip(got, want) for x, y in zip(mine, theirs))


@any_seed
@pytest.mark.parametrize("heads", [4, 2])
def test_adakv(seed, heads):
    """FFY0/AdaKV: a head's best n_h' = round((1 - alpha) n_h + int(alpha b)), n_h being its share of the H b best over
    all heads. Our numbers sum to H b, so a head may have one slot more or less."""
    b, w, alpha = 60, 32, 0.2

    def source(index, a, k, v):
        score = window_score(a, w, 7, "max", heads, reduce="mean")
        winners = torch.tensor(best(score.flatten(), heads * b)) // score.shape[1]
        counts = torch.round(torch.bincount(winners, minlength=heads) * (1 - alpha) + int(alpha * b)).int()
        return with_window([best(row, count) for row, count in zip(score, counts.tolist())], 200, w)

    want, got = compare(seed, heads, 200, source, "adakv", budget=b + w)
    for mine, theirs in zip(got, want, strict=True):
        assert sum(map(len, mine)) == heads * (b + w)
        for x, y in zip(mine, theirs, strict=True):
            assert abs(len(x) - len(y)) <= 1 and (set(x) <= set(y) or set(y) <= set(x))
    assert len({len(head) for layer in got for head in layer}) > 2


@any_seed
@pytest.mark.parametrize("heads", [4, 2])
def test_cake_score(seed, heads):
    """antgroup/cakekv's eviction score; its layer budgets are another matter."""
    b, w = 40, 32

    def source(a, k, v):
        rows = a[:, -w:]
        score = F.avg_pool1d((rows.mean(1) + 200 * rows.var(1))[:, :-w], 5, 1, 2)
        score = score.unflatten(0, (heads, -1)).mean(1)
        return with_window([best(row, b) for row in score], a.shape[2], w)

    check(seed, heads, 150, source, kvevict.Policy(score="cake", budget=b + w))


def stepwise(made, calls, source):
    """Kept positions [call][layer][kv head]. `source(layer number, a)` chooses after every forward the columns [Hkv, C]
    that remain, and later tokens attend to those alone."""
    cache, seen, results = DynamicCache(config=made.config), 0, []
    positions = [torch.empty(made.config.num_key_value_heads, 0, dtype=torch.long) for _ in made.model.layers]
    for ids in calls:
        here = torch.arange(seen, seen + len(ids))
        with torch.no_grad():
            out = made(ids[None], past_key_values=cache, position_ids=here[None], output_attentions=True)
        for index, (layer, a) in enumerate(zip(cache.layers, out.attentions)):
            columns = source(index, a[0])
            positions[index] = torch.cat([positions[index], here.expand(len(columns), -1)], 1).gather(1, columns)
            wide = columns[None, ..., None].expand(-1, -1, -1, layer.keys.shape[3])
            layer.keys, layer.values = layer.keys.gather(2, wide), layer.values.gather(2, wide)
        seen += len(ids)
        results.append([x.tolist() for x in positions])
    return results


def check_steps(seed, heads, length, new, source, policy, **options):
    """`source()` makes the function that `stepwise` asks."""
    made, rows = eager(heads), [[length, *[1] * new]]
    for text in range(100 * seed, 100 * seed + 60):
        try:
            want = stepwise(made, tokens(rows, text)[0], source())
        except NearTie:
            continue
        assert [call[0][1] for call in ours(made, policy, rows, text, **options)] == want
        return
    raise AssertionError("60 prompts and every one has a near-tie")


class HeavyHitters:
    """FMInference/H2O, utils_real_drop: column sums of all rows so far; after every forward the `heavy` largest before
    the recent slots, and the `recent` last."""

    def __init__(self, heavy, recent):
        self.heavy, self.recent, self.sums = heavy, recent, {}

    def __call__(self, index, a):
        score, rows, n = a.sum(1), a.shape[1], a.shape[2]
        if index in self.sums:
            score[:, : n - rows] += self.sums[index]
        columns = torch.arange(n).expand(len(score), -1)
        if n > self.heavy + self.recent:
            past = [best(row[: n - self.recent], self.heavy) for row in score]
            columns = torch.tensor(with_window(past, n, self.recent))
        self.sums[index] = score.gather(1, columns)
        return columns


@any_seed
@pytest.mark.parametrize("budget, recent, options", [(24, 12, {}), (24, 4, dict(recent=4)), (25, 12, {})])
@pytest.mark.drawn(4)
def test_h2o(seed, budget, recent, options):
    """With a group of one: it has no other. Prompts above the budget, and below it."""
    for length in (50, 20):
        check_steps(seed, 4, length, 8, lambda: HeavyHitters(budget - recent, recent), "h2o", budget=budget, **options)


@any_seed
@pytest.mark.parametrize("heads", [4, 2])
def test_h2o_of_kvcache_factory(seed, heads):
    """At the prompt's end, among the slots before the last 8."""

    def source(a, k, v):
        score = a[:, :, :-8].sum(1).unflatten(0, (heads, -1)).mean(1)
        return with_window([best(row, 24) for row in score], a.shape[2], 8)

    check(seed, heads, 90, source, "h2o", budget=32, recent=8, decode=False)


@any_seed
@pytest.mark.parametrize("heads", [4, 2, 1])
@pytest.mark.drawn(4)
def test_tova(seed, heads):
    """schwartz-lab-NLP/TOVA: the last row's attention, with its column, mean over all query heads; one choice for the
    layer, after every forward; the newest slot may go."""

    def choose(index, a):
        kept = best(a[:, -1].mean(0), 16) if a.shape[2] > 16 else range(a.shape[2])
        return torch.tensor([list(kept)] * heads)

    for length in (50, 12):
        check_steps(seed, heads, length, 8, lambda: choose, "tova", budget=16)


KVPRESS = "window=64,kernel=5,pool=avg,reduce=mean"


def kvpress_score(a):
    """Its SnapKV: mean over 64 rows, average pooling, mean over the group; the window above all others."""
    score = window_score(a, 64, 5, "avg", 2, reduce="mean")
    return F.pad(score, (0, 64), value=score.max().item() + 1)


@any_seed
def test_kvpress_snapkv(seed):
    def source(a, k, v):
        return [best(row, 100) for row in kvpress_score(a)]

    check(seed, 2, 180, source, f"snapkv:{KVPRESS}", budget=100)


@any_seed
@pytest.mark.parametrize("length, runs", [(164, 6), (164, 5), (224, 7)])
def test_kvpress_chunkkv(seed, length, runs):
    """Runs of 20 from position 0 by their mean over heads and members, whole ones only. The window begins with a run:
    where it does not, kvpress ranks the run that it cuts by a mean with some of the window's scores in it."""

    def source(a, k, v):
        means = torch.stack([run.mean() for run in kvpress_score(a).sum(0).split(20)])
        kept = [i for run in best(means, runs) for i in range(20 * run, min(20 * run + 20, length))]
        return [kept] * 2

    check(seed, 2, length, source, f"chunkkv:{KVPRESS},c=20,exact=false", budget=20 * runs - 16)


@any_seed
@pytest.mark.parametrize("safe", [0.2, 0.9])
def test_kvpress_adakv(seed, safe):
    """Every head's best int(safe * b), window included, then the best of all heads. A fifth is less than the window."""
    b, n = 100, 220

    def source(index, a, k, v):
        score = kvpress_score(a)
        for row in score:
            row[best(row, int(safe * b))] = torch.inf
        kept = best(score.flatten(), 2 * b)
        return [[i - head * n for i in kept if i // n == head] for head in range(2)]

    want, got = compare(seed, 2, n, source, f"adakv:{KVPRESS},floor=all", budget=b, f=safe)
    assert got == want and any(len(x) != len(y) for x, y in got)
    assert safe < 0.9 or any(90 in map(len, layer) for layer in got)


@any_seed
@pytest.mark.parametrize("name", ["knorm", "keydiff", "keydiff:unit=true"])
def test_kvpress_controls(seed, name):
    """Its KeyDiff takes the mean of keys scaled to length 1: METHODS' of the keys as they are."""

    def source(a, k, v):
        mean = (F.normalize(k, dim=-1) if name == "keydiff:unit=true" else k).mean(1, keepdim=True)
        score = -k.norm(dim=-1) if name == "knorm" else -F.cosine_similarity(k, mean, dim=-1)
        return [best(row, 30) for row in score]

    check(seed, 2, 90, source, name, budget=30)
