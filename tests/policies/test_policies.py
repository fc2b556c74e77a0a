"""Patched models against the float64 oracle: after every call the same slots in every head, and the same logits.

A conversation is a list of calls: a prompt, tokens decoded one by one, another turn. Seeds whose oracle comes within
NEAR of a tie are skipped before the implementation runs, so positions are compared exactly.
"""

import functools
import itertools

import oracle
import pytest
import tiny
import torch

import kvevict

NEAR = 1e-5  # float32 scores are off by about 1e-6
VOCAB = 400
BUDGET, CHUNK = 16, 12
LENGTHS = [1, CHUNK, CHUNK + 1, BUDGET, BUDGET + 1, 2 * CHUNK, 40, 61]

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
GEOMETRIES = {
    "chunks": dict(budget=BUDGET, chunk_size=CHUNK),
    "budget above two chunks": dict(budget=27, chunk_size=13),
    "big chunks": dict(budget=13, chunk_size=24),
    "fraction": dict(budget=0.4, chunk_size=14),
    "chunks, evict at the end": dict(budget=BUDGET, chunk_size=CHUNK + 1, schedule="prompt"),
    "own schedule": dict(budget=BUDGET),
}
any_policy = pytest.mark.parametrize("name", POLICIES)


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


def truth(made, policy, rows, /, **options):
    """The first seed without a near-tie, and the oracle's (logits [T, V], positions) as [call][row]."""
    for seed in range(60):
        try:
            results = []
            for calls in tokens(rows, seed):
                row = oracle.Row(made, policy, near=NEAR, **options)
                answers = ((row.step(t.item()) if len(t) == 1 and row.seen else row.read(t.tolist())) for t in calls)
                results.append([(logits.view(-1, VOCAB), row.positions) for logits in answers])
            return seed, list(zip(*results, strict=True))
        except oracle.NearTie:
            continue
    raise AssertionError("60 seeds and every one has a near-tie")


def ours(made, policy, rows, text, watch=None, /, **options):
    """The same from kvevict: rows of a batch, their first calls padded at the left to the longest."""
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
            out = made(**inputs, use_cache=True)
            cache = out.past_key_values
            assert cache.get_seq_length() == at
            stored = kept(cache)
            if length > 1 or call == 0:
                report = kvevict.report(made, positions=True)
                assert report["positions"] == stored
                check_report(report, cache, [sum(row[: call + 1]) for row in rows])
            if watch:
                watch(call, cache)
            results.append([
                (out.logits[b, p * (call == 0) :], [layer and layer[b] for layer in stored]) for b, p in enumerate(pad)
            ])  # fmt: skip
    return results


def kept(cache):
    """[layer][row][kv head] -> positions; None for layers with a sliding window."""
    layers = []
    for layer in cache.layers:
        own = hasattr(layer, "segments")
        layers.append([[[] for _ in row] for row in layer.len] if own else None)
        for b, h, rows in layer.segments() if own else ():
            layers[-1][b][h] = layer.pos[rows].tolist()
    return layers


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
    assert cache.layers[report["positions"].index(layers[0])].seen.tolist() == seen


def compare(made, policy, rows, watch=None, /, **options):
    """Oracle and kvevict over conversations `rows` [row][call]; returns the oracle's results [call][row]."""
    seed, want = truth(made, policy, rows, **options)
    got = ours(made, policy, rows, seed, watch, **options)
    for call, (theirs, mine) in enumerate(zip(want, got, strict=True)):
        for b, ((logits, positions), (our_logits, our_positions)) in enumerate(zip(theirs, mine, strict=True)):
            where = f"call {call}, row {b}, lengths {rows[b][: call + 1]}, seed {seed}"
            assert our_positions == positions, where
            scale = logits.abs().max().item()
            torch.testing.assert_close(our_logits.double(), logits, rtol=0, atol=1e-5 * scale, msg=lambda m: where + m)  # noqa: B023
    return want


def compare_in_chunks(policy, /, **options):
    """`compare` prompts of two and of several chunks, with five decoded tokens after each."""
    for n in (17, 61):
        compare(model(), policy, [[n, *[1] * 5]], **options)


# -- the oracle itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma2", "gemma3", "gpt_oss"])
def test_the_oracle_that_keeps_everything_is_the_unpatched_model(family):
    made, ids = model(family), tokens([[40]], 0)[0][0]
    row = oracle.Row(made, "take", 1000, chunk_size=12, probe=5)
    logits = torch.cat([row.read(ids[:30].tolist()), *(row.step(t)[None] for t in ids[30:].tolist())])
    with torch.no_grad():
        torch.testing.assert_close(made(ids[None], use_cache=False).logits[0].double(), logits, rtol=0, atol=1e-5)


# -- reading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", GEOMETRIES)
@any_policy
@pytest.mark.drawn(40)
def test_read(name, geometry):
    lengths = LENGTHS if geometry == "chunks" else [17, 61]
    policy, chosen = options(name, **GEOMETRIES[geometry])
    for n in lengths:
        ((_, positions),) = compare(model(), policy, [[n]], **chosen)[0]
        if isinstance(chosen["budget"], int):
            assert {len(head) for layer in positions for head in layer} == {min(n, chosen["budget"])}


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("name", ["h2o", "tova", "tova, per head", "snapkv", "keydiff", "take", "take, chunk only"])
def test_read_and_decode_with_groups_of(heads, name):
    policy, chosen = options(name, decode=True, budget=BUDGET, chunk_size=CHUNK, interval=2)
    calls = [40] if name.startswith("take") else [40, *[1] * 6]
    compare(model(num_key_value_heads=heads), policy, [calls], **chosen)


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("name", ["h2o", "snapkv", "take", "take, span", "vatp", "take+caote"])
@pytest.mark.drawn(12)
def test_read_and_decode_of_other_families(family, name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK)
    compare(model(family), policy, [[40, 1, 1, 1]], **chosen)


@pytest.mark.parametrize("name", ["streaming", "h2o", "tova", "snapkv", "knorm", "keydiff"])
def test_any_score_with_waiting_layers(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK, warmup_layers=3, warmup_budget=22)
    calls = [41, 20]
    compare(model(), policy, [calls], **chosen)


@pytest.mark.parametrize("n", [13, 14, 15, 24, 25, 30])
@pytest.mark.parametrize("chunk", [13, 40])
def test_take_cuts_the_probe_to_half_of_a_short_prompt(n, chunk):
    compare(model(), "take", [[n]], budget=13, chunk_size=chunk, probe=12, kernel=3)


def test_take_relaxes_by_the_formula():
    """B_warmup = ceil(5 N / 64) above 12.8 B."""
    for n in (64, 200):
        compare(model(), "take", [[n]], budget=6, chunk_size=24, probe=4)


@pytest.mark.parametrize("span", [(7, 12), (0, 3), (-9, -4), (-5, 0)])
@pytest.mark.parametrize("n", [17, 41])
def test_take_probe_from_a_span(span, n):
    """It is appended to every chunk, the last too, and protects nothing."""
    chosen = dict(budget=BUDGET, chunk_size=CHUNK, probe=span)
    compare(model(), "take", [[n]], **chosen)
    compare(model(), "take", [[n]], **chosen | dict(chunk_size=n))


@pytest.mark.parametrize("name", ["take", "take, relaxed", "take, all wait", "take, span", "take, no probe"])
def test_waiting_layers_hold_what_the_first_scoring_layer_chose(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK)
    W = chosen.get("warmup_layers", 2)

    def shared(call, cache):
        layers = kept(cache)
        assert all(layer == layers[W - 1] for layer in layers[:W])
        assert all(layer != layers[W - 1] for layer in layers[W:])

    compare(model(), policy, [[61]], shared, **chosen)


# -- decoding -------------------------------------------------------------------------------------------------------


# Evict while decoding unless told not to.
ONLINE = [name for name in POLICIES if name.startswith(("streaming", "h2o", "tova", "snapkv+"))]


@any_policy
@pytest.mark.drawn(12)
def test_decode_as_the_preset_does(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK)

    def grows(call, cache):
        most = BUDGET + (0 if name in ONLINE else call)
        assert all((layer.len == most).all() for layer in cache.layers)

    compare(model(), policy, [[29, *[1] * 20]], grows, **chosen)


@pytest.mark.parametrize("name", ["streaming", "h2o", "tova"])
def test_decode_without_eviction(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK, decode=False)
    compare(model(), policy, [[29, *[1] * 4, 9, 1]], **chosen)


@pytest.mark.parametrize("interval", [1, 5, 16])
@pytest.mark.parametrize(
    "name", [name for name in POLICIES if not name.startswith(("take, ", "h2o, 8", "snapkv, max", "oracle"))]
)
@pytest.mark.drawn(10)
def test_decode_with_eviction(name, interval):
    """However long, the cache never grows past budget + interval - 1, and reaches it."""
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK, decode=True, interval=interval)
    longest = []

    def bounded(call, cache):
        longest.append(max(int(layer.len.max()) for layer in cache.layers))

    compare(model(), policy, [[29, *[1] * 24]], bounded, **chosen)
    assert max(longest) == BUDGET + interval - 1


@pytest.mark.parametrize(
    "name", ["streaming", "h2o", "tova", "snapkv", "snapkv, window as long as the chunk", "keydiff"]
)
def test_decode_past_the_budget_after_a_prompt_of_one_token(name):
    policy, chosen = options(name, budget=BUDGET, decode=True, interval=3)
    compare(model(), policy, [[1, *[1] * 26]], **chosen)


# -- turns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [BUDGET, 0.4])
@any_policy
@pytest.mark.drawn(10)
def test_follow_up_turns(name, budget):
    """Further reads evict to the same budget, a fraction to its share of all tokens seen."""
    policy, chosen = options(name, budget=budget, chunk_size=CHUNK)
    compare(model(), policy, [[30, 1, 1, 1, 25, 1, 10, 1]], **chosen)


@pytest.mark.parametrize("name", ["h2o", "tova", "snapkv", "keydiff", "take"])
def test_follow_up_turns_of_two_tokens(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK)
    compare(model(), policy, [[30, 2, 2, 1, 2]], **chosen)


@pytest.mark.parametrize("name", ["streaming", "h2o", "tova", "knorm", "keydiff"])
def test_follow_up_turns_with_eviction_while_decoding(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK, decode=True, interval=4)
    compare(model(), policy, [[30, *[1] * 6, 25, *[1] * 6]], **chosen)


def test_a_turn_forgets_the_queries_decoded_before_it():
    """Their slots are no longer the last ones, and may be gone."""
    chosen = dict(budget=BUDGET, chunk_size=CHUNK, window=4, decode=True, interval=2)
    compare(model(), "snapkv", [[30, 1, 1, 1, 25, 1, 1, 1, 1, 1]], **chosen)


# -- batches --------------------------------------------------------------------------------------------------------


@any_policy
@pytest.mark.drawn(12)
def test_left_padded_rows_are_read_as_if_alone(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK)
    later = [1, 1, 1, 14, 1]
    compare(model(), policy, [[41, *later], [26, *later], [10, *later]], **chosen)


@pytest.mark.parametrize("name", ["h2o", "snapkv", "take", "take, span from the end", "keydiff"])
@pytest.mark.parametrize("geometry", ["own schedule", "fraction", "chunks, evict at the end"])
def test_left_padded_rows_in_other_geometries(name, geometry):
    policy, chosen = options(name, **GEOMETRIES[geometry])
    compare(model(), policy, [[17], [52], [11]], **chosen)


@pytest.mark.parametrize("name", ["h2o", "tova", "snapkv", "take", "take, alone", "take, chunk only"])
def test_left_padded_rows_keep_what_they_keep_alone(name):
    """The same without the oracle."""
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK)
    alone_and_batched(policy, **chosen)


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


@pytest.mark.parametrize("name", ["h2o", "tova", "snapkv", "keydiff"])
def test_padded_rows_decode_as_if_alone(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK, decode=True, interval=1)
    later = [1] * 12
    compare(model(), policy, [[30, *later], [9, *later], [14, *later]], **chosen)


@pytest.mark.parametrize("name", ["streaming", "h2o", "tova", "snapkv", "keydiff"])
def test_a_row_is_cut_while_decoding_only_when_it_is_full_itself(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=CHUNK, decode=True, interval=6)
    later = [1] * 20
    compare(model(), policy, [[30, *later], [13, *later]], **chosen)


# -- METHODS section 8 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["streaming", "h2o", "tova", "snapkv", "keydiff", "take", "take, no probe", "random"])
def test_two_runs_are_bitwise_equal(name):
    policy, chosen = (name, {}) if name == "random" else options(name)
    chosen |= dict(budget=BUDGET, chunk_size=CHUNK, decode=True, interval=1)
    rows = [[41, 1, 1, 1, 20, 1], [22, 1, 1, 1, 20, 1]]
    one, two = (ours(model(), policy, rows, 0, **chosen) for _ in range(2))
    for (logits, positions), (again, same) in zip(itertools.chain(*one), itertools.chain(*two)):
        assert positions == same and torch.equal(logits, again)


@pytest.mark.parametrize(
    "name", ["streaming", "h2o", "tova", "snapkv", "keydiff", "take", "take, span", "take, no probe"]
)
def test_budget_above_all_tokens_changes_nothing(name):
    policy, chosen = options(name, budget=64, chunk_size=CHUNK, decode=True)
    ids = tokens([[61]], 0)[0][0]
    with torch.no_grad():
        want = model()(ids[None], use_cache=False).logits[0]
    got = torch.cat([logits for ((logits, _),) in ours(model(), policy, [[41, *[1] * 20]], 0, **chosen)])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_random_depends_on_the_seed_and_on_nothing_else():
    chosen = dict(budget=BUDGET, chunk_size=CHUNK)
    alone_and_batched("random", **chosen)
    one, same_seed, other_seed, other_text = (
        ours(model(), "random", [[41]], text, seed=seed, **chosen)[0][0][1]
        for text, seed in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert one == same_seed == other_text != other_seed
    heads = [tuple(head) for layer in one for head in layer]
    assert len(set(heads)) == len(heads), "layers and heads draw their own"


def test_random_evicts_the_same_after_every_chunk_or_at_the_end():
    """A slot's number depends on its position alone: the best of the best are the best."""
    often, once = (
        ours(model(), "random", [[61]], 0, budget=BUDGET, chunk_size=CHUNK, schedule=s)[0][0][1]
        for s in ("chunk", "prompt")
    )
    assert often == once


# -- small disagreements --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["take:append=false", "take:append=false,warmup_layers=none"])
def test_take_without_a_probe_observes_with_half_of_a_short_prompt(policy):
    """p, cut to half of a shorter prompt, is the number of observing rows too."""
    compare(model(), policy, [[17]], budget=13, chunk_size=40, probe=12, kernel=3)
