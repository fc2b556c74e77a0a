"""Every row of the tables of choices over prompts, turns, padded rows and decoded tokens: against the oracle."""

import pytest
import torch
from choices import CHUNKED, TABLES, decodes, options
from policy_cases import BUDGET, CHUNK, compare, compare_in_chunks, model, ours, tokens

CASES = [(table, name) for table, rows in TABLES.items() for name in rows]
every = pytest.mark.parametrize("table, name", CASES)


@every
@pytest.mark.drawn(64)
def test_chunks(table, name):
    policy, chosen = options(TABLES[table], name, **CHUNKED)
    compare_in_chunks(policy, **chosen)


@every
@pytest.mark.drawn(64)
def test_whole_prompt(table, name):
    """Also with one query head a group, and with one group."""
    policy, chosen = options(TABLES[table], name, budget=BUDGET, chunk_size=80)
    for heads in (2, 4, 1):
        compare(model(num_key_value_heads=heads), policy, [[53]], **chosen)


@every
@pytest.mark.drawn(30)
def test_a_budget_above_all_tokens_changes_nothing(table, name):
    policy, chosen = options(TABLES[table], name, budget=64, chunk_size=CHUNK)
    chosen["decode"] = decodes(TABLES[table], name)
    with torch.no_grad():
        want = model()(tokens([[61]], 0)[0][0][None], use_cache=False).logits[0]
    got = [row for (row,) in ours(model(), policy, [[41, *[1] * 20]], 0, **chosen)]
    torch.testing.assert_close(torch.cat([logits for logits, _ in got]), want, rtol=0, atol=1e-5)
    assert all(head == [*range(61)] for layer in got[-1][1] for head in layer)


@pytest.mark.parametrize("budget", [BUDGET, 0.4])
@every
@pytest.mark.drawn(58)
def test_turns(table, name, budget):
    """Tokens that were decoded, one by one and as a turn's beginning, and further prompts, which evict to the same
    budget, a fraction to its share of all tokens seen."""
    policy, chosen = options(TABLES[table], name, budget=budget, chunk_size=14)
    compare(model(), policy, [[47, 1, 1, 1, 21, 1, 10, 1]], **chosen)


@every
@pytest.mark.drawn(52)
def test_padded_rows(table, name):
    """Some rows of a chunk are cut, others have room, or nothing but padding. No chunk has one or two keys that
    Compactor's sinks leave: centred, they are all alike."""
    policy, chosen = options(TABLES[table], name, **CHUNKED)
    lengths = ([39, 24], [36, 24], [27, 24]) if table == "values" else ([41, 14], [26, 14], [10, 14])
    compare(model(), policy, [[first, 1, 1, second, 1] for first, second in lengths], **chosen)


@pytest.mark.parametrize("table, name", [case for case in CASES if decodes(TABLES[case[0]], case[1])])
@pytest.mark.parametrize("interval", [1, 3, 16])
@pytest.mark.drawn(42)
def test_decoding(table, name, interval):
    """However long, a row never exceeds its budget by more than interval - 1 slots per head, and a preset reaches them.
    One prompt is below the budget."""
    policy, chosen = options(TABLES[table], name, **CHUNKED, decode=True, interval=interval)
    most, answer, bound = [], [1] * max(14, interval + 8), (BUDGET + interval - 1) * 8

    def watch(call, cache):
        most.append(max(sum(int(layer.len[row].sum()) for layer in cache.layers) for row in range(2)))

    compare(model(), policy, [[29, *answer], [9, *answer]], watch, **chosen)
    assert max(most) == bound if table == "presets" else max(most) <= bound


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("table, name", [
    ("budgets", "adakv"), ("budgets", "pyramidkv"), ("budgets", "chunkkv, reuse"), ("budgets", "snapkv, pyramid, flat"),
    ("cake", "cake"), ("errors", "edie"), ("errors", "edie-exact"), ("errors", "tova+caote, ada"),
    ("errors", "h2o+caote, flat"), ("errors", "snapkv, cake"), ("repeated", "kvzip"), ("repeated", "kvzip+"),
    ("expected", "expected"), ("values", "lagkv"), ("values", "compactor"), ("values", "defensive"),
    ("values", "snapkv, critical"),
])  # fmt: skip
@pytest.mark.drawn(40)
def test_other_families(table, name, family):
    """Query norms, fused projections, partial and scaled rotation, softcaps, sink logits, sliding windows between."""
    decoding = dict(decode=True, interval=2) if decodes(TABLES[table], name) else {}
    policy, chosen = options(TABLES[table], name, **CHUNKED, **decoding)
    compare(model(family), policy, [[40, *[1] * 4]], **chosen)
