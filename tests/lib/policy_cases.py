"""Patched models against the float64 oracle: after every call the same slots in every head, and the same logits.

A conversation is a list of calls: a prompt, tokens decoded one by one, another turn. Seeds whose oracle comes within
NEAR of a tie are skipped before the implementation runs, so positions are compared exactly.
"""

import functools
import itertools

import oracle
import tiny
import torch
from caches import kept

import kvevict
from kvevict.policy.parts import PARTS

NEAR = 1e-5  # float32 scores are off by about 1e-6
VOCAB = 400
BUDGET, CHUNK = 16, 12
POLICIES = {
    "streaming": {},
    "h2o": {},
    "h2o, 8 recent": dict(recent=8),
    "h2o, none recent": dict(recent=0),
    "tova": {},
    "tova, per head": dict(per_head=True),
    "snapkv": dict(window=4),
    "snapkv, window as long as the chunk": dict(window=12, kernel=3),
    "snapkv, max kernel 1": dict(window=5, kernel=1),
    "snapkv, window 1": dict(window=1, pool="none"),
    "snapkv, mean": dict(window=6, kernel=5, pool="avg", reduce="mean"),
    "knorm": {},
    "keydiff": {},
    "keydiff, unit": dict(unit=True),
    "oracle": dict(ids=(7, 11, 13)),
    "oracle, one token": dict(ids=(5,), pool="avg", kernel=3),
    "take": dict(probe=5),
    "take, alone": dict(probe=5, ema_alpha=0.0),
    "take, relaxed": dict(probe=5, kernel=3, warmup_layers=3, warmup_budget=24),
    "take, all wait": dict(probe=3, warmup_layers=4, warmup_budget=20),
    "take, W=1": dict(probe=1, warmup_layers=1, warmup_budget=20),
    "take, span": dict(probe=(0, 1)),
    "take, span from the end": dict(probe=(-1, 0), ema_alpha=0.3),
    "take, no probe": dict(probe=5, append=False),
    "take, no delay": dict(probe=5, warmup_layers=None),
    "take, chunk only": dict(probe=5, append=False, warmup_layers=None),
    "edie": dict(window=4, heads="equal"),
    "edie, window as long as the chunk": dict(window=12, kernel=3, heads="equal"),
    "edie-exact": dict(window=5, heads="equal"),
    "vatp": dict(sink=2),
    "vatp, few recent": dict(sink=3, recent=2),
    "paasvn": dict(window=4, heads="equal"),
    "paasvn, not pooled": dict(window=4, heads="equal", pool="none"),
    "snapkv, cake's score": dict(score="cake", window=5, kernel=5, pool="avg"),
    "h2o+caote": {},
    "h2o+fastcaote": dict(recent=2),
    "tova+caote": {},
    "snapkv+caote": dict(window=4),
    "snapkv+fastcaote": dict(window=4),
    "take+caote": dict(probe=5),
    "take+edie": dict(probe=5, kernel=5),
    "take+edie, as it is": dict(probe=4),
}  # "preset, remark": options


def options(name, **more):
    """(preset, options) of a row of POLICIES."""
    return name.split(",")[0], POLICIES[name] | more


@functools.cache
def model(family="llama", **changes):
    return tiny.model(family, vocab_size=VOCAB, **changes)


def tokens(rows, seed):
    """Token ids of every row and call, no token twice in a row: equal keys would tie. rows: [row][call] lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randperm(VOCAB - 3, generator=generator) + 3)[: sum(row)].split(row) for row in rows]


def truth(made, policy, rows, /, kind=oracle.Row, **options):
    """The first seed without a near-tie, and the oracle's (logits [T, V], positions) as [call][row]. kind: a `Row`."""
    for seed in range(60):
        try:
            results = []
            for calls in tokens(rows, seed):
                row = kind(made, policy, near=NEAR, **options)
                answers = ((row.step(t.item()) if len(t) == 1 and row.seen else row.read(t.tolist())) for t in calls)
                results.append([(logits.view(-1, VOCAB), row.positions) for logits in answers])
            return seed, list(zip(*results, strict=True))
        except oracle.NearTie:
            continue
    raise AssertionError("60 seeds and every one has a near-tie")


def ours(made, policy, rows, text, watch=None, /, last=False, **options):
    """The same from kvevict: rows of a batch, their first calls padded at the left to the longest. last: the logits of
    each call's last row alone."""
    data, longest = tokens(rows, text), max(row[0] for row in rows)
    pad = [longest - row[0] for row in rows]
    ids = torch.stack([torch.cat([torch.zeros(p, dtype=torch.long), *row]) for p, row in zip(pad, data)])
    mask = (torch.arange(ids.shape[1]) >= torch.tensor(pad)[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    results, cache, at = [], None, 0
    with kvevict.evicting(made, policy, **options), torch.no_grad():
        for call, length in enumerate([longest, *rows[0][1:]]):
            inputs = dict(input_ids=ids[:, at : at + length], past_key_values=cache)
            if any(pad):
                inputs |= dict(attention_mask=mask[:, : at + length], position_ids=positions[:, at : at + length])
            at += length
            out = made(**inputs, use_cache=True, logits_to_keep=int(last))
            cache = out.past_key_values
            assert cache.get_seq_length() == at
            stored = kept(cache)
            if length > 1 or call == 0:
                report = kvevict.report(made, positions=True)
                assert report["positions"] == stored
                check_report(report, cache, [sum(row[: call + 1]) for row in rows])
            if watch:
                watch(call, cache)
            padding = [0] * len(pad) if last or call else pad
            results.append([
                (out.logits[b, p:], [layer and layer[b] for layer in stored]) for b, p in enumerate(padding)
            ])  # fmt: skip
    return results


def check_report(report, cache, seen):
    layers = [layer for layer in report["positions"] if layer]
    heads = [head for layer in layers for row in layer for head in row]
    assert all(a < b for head in heads for a, b in itertools.pairwise(head)), "positions ascend"
    assert report["kept"] == [p and [[len(head) for head in row] for row in p] for p in report["positions"]]
    assert report["cache_bytes"] == 2 * 4 * 32 * sum(map(len, heads)) <= report["peak_cache_bytes"]  # fp32, d=32
    assert report["seen"] == seen
    rows = [sum(len(head) for layer in layers for head in layer[b]) for b in range(len(seen))]
    heads = sum(len(layer[0]) for layer in layers)
    assert report["kept_share"] == [n / (heads * tokens) for n, tokens in zip(rows, seen, strict=True)]
    assert cache.sequence.seen.tolist() == seen


def compare(made, policy, rows, watch=None, /, kind=oracle.Row, **options):
    """Oracle and kvevict over conversations `rows` [row][call]; returns the oracle's results [call][row]. Another kind
    of oracle than `Row` may lack rows but the last."""
    seed, want = truth(made, policy, rows, kind=kind, **options)
    got = ours(made, policy, rows, seed, watch, last=kind is not oracle.Row, **options)
    for call, (theirs, mine) in enumerate(zip(want, got, strict=True)):
        for b, ((logits, positions), (our_logits, our_positions)) in enumerate(zip(theirs, mine, strict=True)):
            where = f"call {call}, row {b}, lengths {rows[b][: call + 1]}, seed {seed}"
            assert our_positions == positions, where
            scale = logits.abs().max().item()
            logits = logits[len(logits) - len(our_logits) :]
            torch.testing.assert_close(our_logits.double(), logits, rtol=0, atol=1e-5 * scale, msg=lambda m: where + m)  # noqa: B023
    return want


def compare_in_chunks(policy, /, **options):
    """`compare` prompts of two and of several chunks, with five decoded tokens after each."""
    for n in (17, 61):
        compare(model(), policy, [[n, *[1] * 5]], **options)


def alone_and_batched(policy, **chosen):
    rows = [[41], [26], [10]]
    seed, _ = truth(model(), policy, rows, **chosen) if policy != "random" else (0, None)
    batched = ours(model(), policy, rows, seed, **chosen)[0]
    ids = tokens(rows, seed)
    for (logits, positions), (row,) in zip(batched, ids):
        with kvevict.evicting(model(), policy, **chosen), torch.no_grad():
            own = model()(row[None], use_cache=True).logits[0]
            assert positions == [layer[0] for layer in kvevict.report(model(), positions=True)["positions"]]
        torch.testing.assert_close(logits, own, rtol=0, atol=1e-5)


class Slots:
    """A layer of one row, as head budgets see it: every head has all slots, the last `window` are protected."""

    decoding, device = False, torch.device("cpu")

    def __init__(self, heads, columns, window=0, select="token", **options):
        self.n = torch.full((1, heads), columns, dtype=torch.int32)
        self.least, self.past = torch.full_like(self.n, window), torch.zeros_like(self.n)
        self.columns, self.select = columns, PARTS["select"][0][select](**options)
        self.competing = (torch.arange(columns) < columns - window).expand(1, heads, -1)
        self.positions = torch.arange(columns, dtype=torch.int32).expand(1, heads, -1)


def read(made, ids, mask=None):
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)
    made(ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, use_cache=True)
    return kvevict.report(made, positions=True)["positions"]


def pyramid(layers, b, w, n, beta=20):
    """KVCache-Factory's slots besides the window, per layer."""
    if n < 2 * b:
        return [b] * layers
    low = b // beta
    high = 2 * b - low
    if high >= n - w:
        low, high = 2 * b - (n - w), n - w
    return [high - layer * ((high - low) // (layers - 1)) for layer in range(layers)]
