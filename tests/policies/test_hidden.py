"""Rows that repeat the chunk, KVzip's score and one ranking of all layers: against the oracle and by hand."""

import pytest
import torch
from test_choices import Slots
from test_policies import BUDGET, CHUNK, compare, compare_in_chunks, kept, model, tokens

import kvevict
from kvevict.engine.evict import join
from kvevict.policy import build

CHUNKED = dict(budget=BUDGET, chunk_size=CHUNK)
CHOICES = {
    "kvzip": {},
    "kvzip, all": dict(support="all"),
    "kvzip, told": dict(instruction=(5, 9), sink=2),
    "kvzip, anew": dict(carry="none"),
    "kvzip, largest": dict(carry="max", support="all"),
    "kvzip, least": dict(least=9),
    "kvzip, no least": dict(least=0, sink=0),
    "kvzip, per layer": dict(layers="uniform"),
    "kvzip, per head": dict(layers="uniform", heads="equal"),
    "kvzip, pyramid": dict(layers="pyramid", beta=3),
    "kvzip, reuse": dict(layers="uniform", n_reuse=2),
    "kvzip, wait": dict(layers="uniform", warmup_layers=3, warmup_budget=22),
    "kvzip+": {},
    "kvzip+, all": dict(support="all"),
    "kvzip+, per head": dict(layers="uniform", heads="equal", instruction=(5, 9), carry="max"),
}  # "preset, remark": options
any_choice = pytest.mark.parametrize("name", CHOICES)


def options(name, **more):
    return name.split(",")[0], more | CHOICES[name]


# -- against the oracle ---------------------------------------------------------------------------------------------


@any_choice
def test_chunks(name):
    policy, chosen = options(name, **CHUNKED)
    compare_in_chunks(policy, **chosen)


@any_choice
def test_whole_prompt(name):
    """Read twice, then cut once."""
    policy, chosen = options(name, budget=BUDGET, chunk_size=80)
    compare(model(), policy, [[53]], **chosen)


@pytest.mark.parametrize("name", ["kvzip", "kvzip, all", "kvzip, per head", "kvzip+"])
@pytest.mark.parametrize("heads", [1, 4])
def test_groups_of(name, heads):
    policy, chosen = options(name, **CHUNKED)
    compare(model(num_key_value_heads=heads), policy, [[39]], **chosen)


@any_choice
def test_fractions_and_turns(name):
    """Slots that were decoded have no number until the next chunk is repeated."""
    policy, chosen = options(name, budget=0.4, chunk_size=14)
    compare(model(), policy, [[47, 1, 1, 1, 21, 1]], **chosen)


@any_choice
def test_padded_rows(name):
    policy, chosen = options(name, **CHUNKED)
    compare(model(), policy, [[41, 1, 14], [26, 1, 14], [10, 1, 14]], **chosen)


@pytest.mark.parametrize("name", ["kvzip", "kvzip+"])
@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma2", "gemma3", "gpt_oss"])
def test_other_families(family, name):
    policy, chosen = options(name, **CHUNKED)
    compare(model(family), policy, [[40, 1, 1]], **chosen)


# -- by hand --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_the_best_of_survivors_and_new_ones_are_the_best_of_all(seed):
    """Kept numbers, whatever old slots would be scored: chunk by chunk ends with what one cut of all keeps."""
    generator = torch.Generator().manual_seed(seed)
    budget, size, number = 7, 5, torch.rand(1, 1, 60, generator=generator)
    alive, carried = torch.empty(0, dtype=torch.long), None
    for start in range(0, 60, size):
        alive = torch.cat([alive, torch.arange(start, start + size)])
        new = torch.rand(1, 1, len(alive), generator=generator)
        new[..., -size:] = number[..., start : start + size]
        numbers = join("keep", new, carried)
        best = numbers[0, 0].topk(min(budget, len(alive))).indices.sort().values
        alive, carried = alive[best], numbers[..., best]
    assert alive.tolist() == number[0, 0].topk(budget).indices.sort().values.tolist()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("least", [0, 3])
def test_pool_by_hand(seed, least):
    """What stays are the best of all after each head's own best; ties go to the earlier position, layer and head."""
    generator = torch.Generator().manual_seed(seed)
    layers = [Slots(2, 12 + 3 * number, window=2) for number in range(3)]
    scores = [torch.randint(6, (1, 2, slots.columns), generator=generator).float() for slots in layers]
    keep = kvevict.LAYERS["pool"](least=least).keep(layers, scores, torch.tensor([48]))
    items = [(-scores[a][0, h, i].item(), i, a, h) for a, slots in enumerate(layers)
             for h in range(2) for i in range(slots.columns - 2)]  # fmt: skip
    heads = [(a, h) for a in range(3) for h in range(2)]
    own = [item for head in heads for item in sorted(x for x in items if x[2:] == head)[:least]]
    won = own + sorted(set(items) - set(own))[: 48 - 12 - len(own)]
    want = [[2 + sum(item[2:] == (a, h) for item in won) for h in range(2)] for a in range(3)]
    assert [x[0].tolist() for x in keep] == want and sum(map(sum, want)) == 48


def test_a_head_without_the_longest_one_s_slots_takes_in_numbers_of_new_ones():
    """Heads of different lengths: past a shorter one's end nothing is carried, so what comes there is scored."""
    carried = torch.tensor([[[4.0, 3, 2], [5, torch.nan, torch.nan]]])
    assert join("keep", torch.ones(1, 2, 4), carried)[0].tolist() == [[4, 3, 2, 1], [5, 1, 1, 1]]


def test_slots_add_up_and_their_bytes_are_the_cache_s():
    made, ids = model(), tokens([[61]], 0)[0][0][None]
    with kvevict.evicting(made, "kvzip", **CHUNKED), torch.no_grad():
        made(ids)
        report = kvevict.report(made)
    layers = [sum(row[0]) for row in report["kept"]]
    assert sum(layers) == BUDGET * 8 and len(set(layers)) > 1
    assert min(min(row[0]) for row in report["kept"]) >= 4 + 4  # sinks, and `least`
    assert report["cache_bytes"] == BUDGET * 8 * 2 * 4 * 32  # K and V, fp32, d=32


@pytest.mark.parametrize("chunk", [CHUNK, None])
def test_a_budget_above_all_tokens_changes_nothing(chunk):
    made, ids = model(), tokens([[61]], 0)[0][0][None]
    with torch.no_grad():
        want = made(ids, use_cache=False).logits
        with kvevict.evicting(made, "kvzip", budget=64, chunk_size=chunk):
            out = made(ids)
    torch.testing.assert_close(out.logits, want, rtol=0, atol=1e-5)
    assert out.past_key_values.get_seq_length() == 61
    assert all(head == [*range(61)] for layer in kept(out.past_key_values) for head in layer[0])


def test_the_plan_counts_one_ranking():
    """All layers hold the chunk until the last one was read."""
    from kvevict.analysis.slots import Layers

    taken = list(Layers(build("kvzip", budget=BUDGET, chunk_size=CHUNK), 60, 4, 2).chunks())
    assert [each.peak for each in taken[2:]] == [4 * (BUDGET + CHUNK)] * 3
    assert {sum(each.kept) for each in taken[1:]} == {4 * BUDGET}
    assert all(part.rows == CHUNK for each in taken for layer in each.parts for part in layer)


@pytest.mark.parametrize("chosen, text", [
    (dict(schedule="prompt", chunk_size=12), "leave out schedule='prompt'"),
    (dict(decode=True), "decode=False"),
    (dict(heads="equal"), "heads='flat'"),
    (dict(select="chunk", per_head=True), "select='token'"),
    (dict(refine="caote"), "refine='none'"),
    (dict(n_reuse=2), "n_reuse=1"),
    (dict(warmup_layers=2), "warmup_layers=None"),
    (dict(score="snapkv", rows="repeat"), "scores that compare"),
    (dict(rows="window"), "rows='repeat', or support='all'"),
    (dict(support="some"), "unknown support 'some'"),
    (dict(least=-1), "least must be at least 0"),
    (dict(instruction=[5]), "tuple of token ids"),
    (dict(instruction=(-5,)), "tuple of token ids"),
    (dict(tsp=1), "tsp=None"),
    (dict(layers="tada"), "another layer budget"),
], ids=str)  # fmt: skip
def test_refused(chosen, text):
    with pytest.raises((ValueError, TypeError), match=text):
        build("kvzip", **dict(budget=64) | chosen)


def test_an_instruction_of_unknown_tokens_is_refused_before_anything_is_read():
    made = model()
    refused = pytest.raises(ValueError, match="token id 400, and the model knows ids below 400")
    with kvevict.evicting(made, "kvzip", budget=16, instruction=(400,)), torch.no_grad(), refused:
        made(torch.arange(3, 60)[None])
