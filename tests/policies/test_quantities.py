"""Quantities of user code: their inputs are values, and so is the memory that they return."""

from dataclasses import dataclass

import pytest
import tiny
import torch

import kvevict
from kvevict.models import families


@pytest.fixture(autouse=True)
def registries():
    both = kvevict.SCORES, kvevict.QUANTITIES
    before = [dict(registry) for registry in both]
    yield
    for registry, old in zip(both, before, strict=True):
        registry.clear()
        registry.update(old)


def score(name, *needs):
    """Register a score that is the first of its quantities."""

    @kvevict.register_score(name)
    @dataclass(frozen=True)
    class Plain(kvevict.Score):
        def score(self, slots, first, *more):
            return first

    Plain.needs = needs


def test_inputs_are_values():
    """Each layer's weights and rotation arrive as arguments, in the order in which they are named."""
    model, seen = tiny.model(), {}

    @kvevict.register_quantity("with_weights")
    @dataclass(frozen=True)
    class WithWeights(kvevict.Quantity):
        observes = False
        needs = ("output_weight", "rope", "last_position")

        def measure(self, slots, observation, weight, rope, last):
            seen[slots.index] = weight, rope.rotates, last.tolist()
            return slots.positions.float()

    score("by_weights", "with_weights")
    kvevict.patch(model, "snapkv", score="by_weights", budget=20)
    model(**tiny.prompt(1, 40))
    for index, (weight, rotates, last) in seen.items():
        whole = families.layers_of(model.model)[index].self_attn.o_proj.weight
        assert torch.equal(weight.flatten(0, 1), whole.T)
        assert rotates and last == [39]
    assert len(seen) == len(families.layers_of(model.model))


def counted(name="counted"):
    @kvevict.register_quantity(name)
    @dataclass(frozen=True)
    class Counted(kvevict.Quantity):
        observes = False
        needs = (kvevict.need("memory", of="tokens"),)
        remembers = "tokens"

        def accumulate(self, rows, past):
            return (0 if past is None else past) + (rows.columns - rows.first)

        def measure(self, slots, observation, total):
            assert total.tolist() == [int(slots.positions.max()) + 1]
            return slots.positions.float()

    return Counted


def test_memory_goes_from_chunk_to_chunk_and_into_forks(tmp_path):
    model = tiny.model()
    counted()
    score("by_count", "counted")
    kvevict.patch(model, "snapkv", score="by_count", budget=20, chunk_size=16)
    cache = model(**tiny.prompt(1, 40)).past_key_values
    fork = cache.fork()
    model(torch.tensor([[3] * 30]), past_key_values=fork)
    assert [layer.memory["tokens"].tolist() for layer in cache.layers] == [[40]] * len(cache.layers)
    assert [layer.memory["tokens"].tolist() for layer in fork.layers] == [[70]] * len(cache.layers)
    fork.batch_repeat_interleave(2)
    assert fork.layers[0].memory["tokens"].tolist() == [70, 70]
    with pytest.raises(ValueError, match="remembers tokens for a quantity, which save_cache cannot write"):
        kvevict.save_cache(cache, tmp_path / "cache")


def test_what_accumulates_names_what_it_keeps():
    with pytest.raises(TypeError, match="`remembers` names nothing to keep"):
        type("Nameless", (kvevict.Quantity,), dict(accumulate=lambda self, rows, past: past))


def test_an_unknown_input_is_refused_when_a_model_is_patched():
    @kvevict.register_quantity("unfed")
    @dataclass(frozen=True)
    class Unfed(kvevict.Quantity):
        needs = ("ropes",)

    score("hungry", "unfed")
    with pytest.raises(ValueError, match="unknown input of a quantity 'ropes'; did you mean 'rope'"):
        kvevict.patch(tiny.model(), "snapkv", score="hungry", budget=20)
