"""A threshold in place of a budget, or within one: slots with a high enough score stay."""

import pytest
import tiny
import torch
from caches import kept
from policy_cases import BUDGET, CHUNK, Slots, compare, model, tokens

import kvevict
from kvevict.commands import add_budget
from kvevict.engine.hook import installed
from kvevict.lab.analysis.slots import Layers
from kvevict.policy.building import build, choose
from kvevict.policy.checks import SLOTS
from kvevict.policy.heads import above
from kvevict.policy.policy import Policy
from kvevict.serve.options import Options

CHOICES = {  # "preset, remark": options in chunks, the threshold of a whole prompt
    "kvzip": (dict(threshold=0.1), 0.04),
    "kvzip, per layer": (dict(threshold=0.13, layers="uniform", sink=0, keep_last=0), 0.04),
    "kvzip, ada": (dict(threshold=0.04, layers="uniform", heads="ada", carry="none"), 0.03),
    "kvzip, and a budget": (dict(threshold=0.1, budget=BUDGET), 0.03),
    "kvzip, ada and a budget": (dict(threshold=0.1, budget=0.4, layers="uniform", heads="ada", floor="max"), 0.03),
    "kvzip, no least": (dict(threshold=0.13, least=0, sink=0, keep_last=0), 0.04),
    "kvzip+": (dict(threshold=0.02), 0.01),
    "expected": (dict(threshold=0.15), 0.1),
}
any_choice = pytest.mark.parametrize("name", CHOICES)


def options(name, **more):
    return name.split(",")[0], dict(budget=None, keep_last=3) | CHOICES[name][0] | more


def says_something(results):
    """Heads keep different numbers of slots, some not all."""
    counts = {len(head) for layer in results[-1][0][1] for head in layer}
    assert len(counts) > 1


@any_choice
@pytest.mark.drawn(5)
def test_chunks(name):
    policy, chosen = options(name, chunk_size=CHUNK)
    for n in (1, 17):
        compare(model(), policy, [[n]], **chosen)
    says_something(compare(model(), policy, [[61, 1, 1]], **chosen))


@any_choice
def test_whole_prompt(name):
    policy, chosen = options(name, schedule="prompt", chunk_size=25, threshold=CHOICES[name][1])
    says_something(compare(model(), policy, [[61]], **chosen))


@pytest.mark.parametrize("heads", [1, 4])
def test_groups_of(heads):
    policy, chosen = options("kvzip", chunk_size=CHUNK)
    compare(model(num_key_value_heads=heads), policy, [[39]], **chosen)


@any_choice
@pytest.mark.drawn(4)
def test_padded_rows_and_turns(name):
    """A row keeps the same slots as alone: a row without tokens in a chunk loses none by the others' cut."""
    policy, chosen = options(name, chunk_size=CHUNK)
    compare(model(), policy, [[41, 1, 1, 14], [26, 1, 1, 14], [10, 1, 1, 14]], **chosen)


def test_above_by_hand():
    nan, inf = torch.nan, torch.inf
    score = torch.tensor([[[9, 1, nan, -inf, 9], [2, 2.5, 3, 9, 9]]]).expand(3, -1, -1)
    slots = Slots(2, 5, window=1)
    assert above(slots, score, torch.tensor([2.5, -inf, 9.5])).tolist() == [[2, 4], [5, 5], [1, 1]]


def read(budget, ids, **more):
    made = model()
    with kvevict.evicting(made, "kvzip", budget=budget, **dict(chunk_size=CHUNK, keep_last=3) | more), torch.no_grad():
        out = made(ids)
        return kept(out.past_key_values), kvevict.report(made), out


def test_a_threshold_below_all_scores_is_no_eviction():
    ids = tokens([[61]], 0)[0][0][None]
    held, report, _ = read(None, ids, threshold=-1)
    assert all(head == [*range(61)] for layer in held for head in layer[0])
    assert report["cache_bytes"] == 61 * 8 * 2 * 4 * 32
    assert read(BUDGET, ids, threshold=-1, keep_last=0)[0] == read(BUDGET, ids, keep_last=0)[0]


@pytest.mark.parametrize("layers", ["pool", "uniform"])
def test_a_threshold_above_all_scores_leaves_what_is_protected(layers):
    """Of every head, or nothing; and the model goes on."""
    made, ids = model(), tokens([[61]], 0)[0][0][None]
    held, report, _ = read(None, ids, threshold=2, layers=layers)
    assert all(head == [0, 1, 2, 3, 58, 59, 60] for layer in held for head in layer[0])
    assert report["kept"] == [[[7, 7]]] * 4
    bare = dict(sink=0, keep_last=0, threshold=2, layers=layers, chunk_size=CHUNK)
    with kvevict.evicting(made, "kvzip", **bare), torch.no_grad():
        cache = made(ids).past_key_values
        assert all(head == [] for layer in kept(cache) for head in layer[0])
        assert made(ids[:, :1], past_key_values=cache).logits.isfinite().all()
        assert made(ids, past_key_values=cache).logits.isfinite().all()


def test_the_last_128_tokens_are_spared():
    assert Policy(score="kvzip", heads="flat", layers="pool", threshold=0.5).keep_last == 128
    held, _, _ = read(None, tokens([[150]], 0)[0][0][None], threshold=2, keep_last=128)
    assert all(head == [0, 1, 2, 3, *range(22, 150)] for layer in held for head in layer[0])


def test_a_budget_is_optional_beside_a_threshold():
    policy = build("kvzip", threshold=0.25)
    assert policy.budget is None and Policy.from_json(policy.to_json()) == policy
    assert build("kvzip", threshold=0.25, budget=300).budget == 300 == build(policy, budget=300).budget
    assert build("kvzip", threshold=0.25, budget=None).budget is None


def test_the_budget_that_nobody_named():
    """4,096 slots, in a policy, in a preset, in `patch` and in a command alike; a policy keeps its own."""
    plan = installed.plan_of(kvevict.patch(tiny.model()).get_decoder())
    assert {Policy().budget, build("kvzip").budget, choose("snapkv").policy.budget, plan.policy.budget, SLOTS} == {4096}
    assert {add_budget.__defaults__[0], Options.budget} == {SLOTS}
    assert build(build("snapkv", budget=64)).budget == build("snapkv:budget=64", budget=None).budget == 64
    with pytest.raises(ValueError, match="budget=4096 is too small: the policy always keeps 5000 slots"):
        build("snapkv", window=5000)


def test_the_plan_has_the_most_that_may_stay():
    """Nothing is known of the text: all of it, or the budget."""
    for budget, most in ((None, 60), (BUDGET, BUDGET)):
        policy = build("kvzip", budget=budget, chunk_size=CHUNK, threshold=0.1, keep_last=2)
        taken = list(Layers(policy, 60, 4, 2).chunks())
        assert sum(taken[-1].kept) == 4 * most
        assert [each.chunk.appended for each in taken] == [CHUNK] * 5
