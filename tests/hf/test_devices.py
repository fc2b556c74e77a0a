"""Models that are not on one device: with weights that accelerate fetches, or with a part of their heads."""

import dataclasses

import pytest
import tiny
import torch
from offload import both, cpu, disk

import kvevict
from kvevict.engine.read.step import Step
from kvevict.models.adapter import Adapter

OPTIONS = dict(
    take=dict(budget=16, chunk_size=16, probe=4), snapkv=dict(budget=16, window=4), fastkv=dict(budget=16, window=4),
    cake=dict(budget=16, window=4, chunk_size=16), laq=dict(budget=16, window=4),
)  # fmt: skip
OPTIONS["edie+tada"] = dict(budget=16, window=4, chunk_size=16)


@pytest.mark.parametrize("offload", [cpu, disk, both])
def test_offloaded_weights(offload, tmp_path):
    """Kept slots, generated tokens and a saved cache equal those of the model in memory."""
    model, away, inputs = tiny.model(), tiny.model(), tiny.prompt(2, 50, pad=(0, 9))
    offload(away, tmp_path / "weights")
    for policy, options in OPTIONS.items():
        kvevict.history().reset()
        with kvevict.evicting(model, policy, **options):
            want, kept = tiny.generate(model, inputs), kvevict.report(model, positions=True)["positions"]
        kvevict.history().reset()
        with kvevict.evicting(away, policy, **options):
            assert torch.equal(tiny.generate(away, inputs), want), policy
            assert kvevict.report(away, positions=True)["positions"] == kept, policy
    with kvevict.evicting(away, "snapkv", budget=16, window=4), torch.no_grad():
        cache = away(**inputs).past_key_values
        kvevict.save_cache(cache, tmp_path / "cache")
        loaded = kvevict.load_cache(tmp_path / "cache", away)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
        step = dict(input_ids=torch.tensor([[5], [6]]), attention_mask=mask)
        assert torch.equal(away(**step, past_key_values=loaded).logits, away(**step, past_key_values=cache).logits)


@pytest.mark.parametrize("offload", [cpu, both])
def test_offloaded_weights_answer(offload, tmp_path):
    """Answers, lookahead rows and drafts are those of the model in memory."""
    sizes = dict(vocab_size=259, bos_token_id=None, pad_token_id=None)
    model, away, third = tiny.model(**sizes), tiny.model(**sizes), tiny.model(seed=1, **sizes)
    adapter = Adapter(model, tokens=4, rank=2)
    offload(away, tmp_path / "weights")
    cases = [(model, away, "snapkv", {}, {}), (model, away, "lookahead", *[dict(adapter=adapter)] * 2),
             (third, third, "speckv", dict(draft_model=model), dict(draft_model=away))]  # fmt: skip
    for here, there, policy, *options in cases:
        want, got = (
            kvevict.answer(each, tiny.byte_tokenizer(), "The harbour opens at seven. " * 3, ["When?", "?"], policy,
                           budget=40, max_new_tokens=6, **more)
            for each, more in zip((here, there), options, strict=True)
        )  # fmt: skip
        assert got == want, policy


def test_step_of_another_device():
    """A layer's device has the step's tensors, copied once for all layers, and again if the rows have changed."""
    zeros = torch.zeros(1, dtype=torch.int32)
    step = Step(
        plan=None, decoder=None, cache=None, meter=None, inputs={}, positions=torch.arange(6, dtype=torch.int32)[None],
        first=zeros, padding=zeros.numpy(),
    )  # fmt: skip
    there = torch.device("meta")
    assert step.on(zeros.device) is step
    moved = step.on(there)
    assert (moved.positions.device, moved.first.device) == (there, there) and moved is step.on(there)
    narrow = dataclasses.replace(step, positions=step.positions[:, :3])
    assert narrow.on(there).positions.shape == (1, 3)


def test_a_part_of_the_heads_is_no_model():
    """However a model was split, so that its config does not say so."""
    model, inputs = tiny.model(), tiny.prompt(1, 50)
    for layer in model.model.layers:
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            linear = getattr(attention, name)
            linear.weight = torch.nn.Parameter(linear.weight[: len(linear.weight) // 2])
        attention.o_proj.weight = torch.nn.Parameter(
            attention.o_proj.weight[:, : attention.o_proj.weight.shape[1] // 2]
        )
    kvevict.patch(model, "snapkv", budget=16, window=4)
    with pytest.raises(ValueError, match="layer 0 has 2 and 1 heads of queries and of keys"):
        model(**inputs)
