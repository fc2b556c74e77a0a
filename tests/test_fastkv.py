"""FastKV against its float64 oracle: after every call the same slots in every head, and the same next-token logits."""

import itertools

import oracle
import pytest
import tiny
import torch
from oracle_fastkv import FastRow
from test_policies import NEAR, VOCAB, check_report, kept, model, tokens

import kvevict

W = 4  # window


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def truth(made, rows, **options):
    """The first seed without a near-tie, and the oracle's (next token's logits, positions) as [call][row]."""
    for seed in range(60):
        try:
            results = []
            for calls in tokens(rows, seed):
                row = FastRow(made, near=NEAR, **options)
                answers = ((row.step(t.item()) if len(t) == 1 and row.seen else row.read(t.tolist())) for t in calls)
                results.append([(logits.view(-1, VOCAB)[-1], row.positions) for logits in answers])
            return seed, list(zip(*results, strict=True))
        except oracle.NearTie:
            continue
    raise AssertionError("60 seeds and every one has a near-tie")


def ours(made, rows, seed, **options):
    """The same from kvevict: rows of a batch, their first calls padded at the left to the longest."""
    data, longest = tokens(rows, seed), max(row[0] for row in rows)
    pad = [longest - row[0] for row in rows]
    ids = torch.stack([torch.cat([torch.zeros(p, dtype=torch.long), *row]) for p, row in zip(pad, data)])
    mask = (torch.arange(ids.shape[1]) >= torch.tensor(pad)[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    results, cache, at = [], None, 0
    with kvevict.evicting(made, "fastkv", **options):
        for call, length in enumerate([longest, *rows[0][1:]]):
            part = slice(at, at + length)
            at += length
            out = made(
                ids[:, part], attention_mask=mask[:, :at], position_ids=positions[:, part], past_key_values=cache,
                logits_to_keep=1,
            )  # fmt: skip
            cache = out.past_key_values
            assert [layer.get_seq_length() for layer in cache.layers] == [at] * len(cache.layers)
            stored = kept(cache)
            if length > 1 or call == 0:
                report = kvevict.report(made, positions=True)
                assert report["positions"] == stored
                check_report(report, cache, [sum(row[: call + 1]) for row in rows])
            results.append([(out.logits[b, -1], [layer[b] for layer in stored]) for b in range(len(rows))])
    return results


def compare(made, rows, **options):
    """Oracle and kvevict over conversations `rows` [row][call]; returns the oracle's positions [call][row]."""
    options = dict(window=W) | options
    seed, want = truth(made, rows, **options)
    got = ours(made, rows, seed, **options)
    for call, (theirs, mine) in enumerate(zip(want, got, strict=True)):
        for b, ((logits, positions), (our_logits, our_positions)) in enumerate(zip(theirs, mine, strict=True)):
            where = f"call {call}, row {b}, lengths {rows[b][: call + 1]}, seed {seed}"
            assert our_positions == positions, where
            error = (our_logits.double() - logits).abs().max() / logits.abs().max()
            assert error < 1e-5, where
    return [[positions for _, positions in call] for call in want]


def entering(made):
    """Rows that enter each layer in calls to come: [layer] -> list."""
    rows = [[] for _ in made.model.layers]
    hooks = [
        # Behind the package's own hooks, so after `patch`.
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, n=n: rows[n].append(kwargs["hidden_states"].shape[1]), with_kwargs=True
        )
        for n, layer in enumerate(made.model.layers)
    ]
    return rows, hooks


# -- the oracle itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "mixtral"])
def test_the_oracle_that_drops_nothing_is_the_unpatched_model(family):
    made, ids = model(family), tokens([[40]], 0)[0][0]
    row = FastRow(made, 1000, chunk_size=12)
    logits = torch.cat([row.read(ids[:30].tolist()), *(row.step(t)[None] for t in ids[30:].tolist())])
    torch.testing.assert_close(made(ids[None], use_cache=False).logits[0].double(), logits, rtol=0, atol=1e-5)


# -- reading --------------------------------------------------------------------------------------------------------

GEOMETRIES = {
    "whole": dict(budget=16, tsp_len=24),
    "whole, budget above what goes on": dict(budget=24, tsp_len=16),
    "whole, one token beside the window": dict(budget=12, tsp_len=W + 1),
    "fraction": dict(budget=0.4, tsp_len=20),
    "chunks": dict(budget=16, chunk_size=12, tsp_len=8),
    "small budget, big chunks": dict(budget=6, chunk_size=24, tsp_len=9),
    "budget above two chunks": dict(budget=27, chunk_size=13, tsp_len=10),
    "chunks, evict at the end": dict(budget=16, chunk_size=13, tsp_len=8, schedule="prompt"),
    "first layer": dict(budget=12, tsp_len=15, tsp=0),
    "last but one": dict(budget=12, tsp_len=15, tsp=2, chunk_size=20),
    "not pooled": dict(budget=12, tsp_len=15, pool="none"),
    "average": dict(budget=12, tsp_len=15, pool="avg", kernel=5),
    "default window": dict(budget=12, tsp_len=15, window=8),
}


@pytest.mark.parametrize("n", [1, 2, 8, 15, 16, 24, 25, 37, 61])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_read(geometry, n):
    compare(model(), [[n]], **GEOMETRIES[geometry])


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_half_of_the_layers_read_everything(layers):
    """floor(L/2) - 1 is the last; of one layer there is none behind it."""
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
    dict(select="chunk", c=3, per_head=True, heads="flat", chunk_size=20), dict(error="caote"),
    dict(error="fastcaote", chunk_size=20), dict(error="caote", each="row"), dict(error="caote", protect=False),
    dict(warmup_layers="half", chunk_size=20, warmup_budget=30), dict(warmup_layers=1, chunk_size=20),
], ids=lambda given: "-".join(map(str, itertools.chain(*given.items()))))  # fmt: skip
def test_other_choices(given):
    compare(model(num_hidden_layers=6), [[61, 1, 30]], budget=16, tsp_len=14, **given)
