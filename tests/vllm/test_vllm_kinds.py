"""Packed slots inside vLLM: logprobs near the engine's of the same kind, and the bytes of a request."""

import pytest
import tiny
import torch
from in_vllm import by_engine, needed, prompts, vllm

from kvevict.vllm.options import VllmOptions, policy_of
from kvevict.vllm.shape import StateShape

pytestmark = needed
PERIOD, CHOSEN = 16, dict(budget=32, policy="snapkv", window=4)


@pytest.mark.parametrize(("kind", "mean"), [("int8", 0.01), ("k8v4", 0.03), ("int4", 0.04)])
def test_packed_slots_score_a_text_as_the_engines(tmp_path, kind, mean):
    """In steps of 8 and of 100 tokens, three requests at once. The engine's chunks attend to their own rows before
    these are packed, and centre keys at a mean: so the logprobs' mean difference is that of two roundings."""
    folder, model = tiny.save(tmp_path / "model", max_position_embeddings=256)
    texts = prompts([5 * PERIOD + 3, 7 * PERIOD, 9])
    runs = [dict(do="scored", prompts=texts)]
    small, large = (
        vllm(tmp_path, [folder], runs, CHOSEN | dict(period=PERIOD, kv=kind), max_num_batched_tokens=n)[0][0]
        for n in (8, 100)
    )
    config = model.config
    options = VllmOptions(policy_of(CHOSEN, PERIOD), PERIOD, 2, kind)
    shape = StateShape(config.num_key_value_heads, config.head_dim, torch.float32, options)
    assert small["graphs"] == ("NEVER" if kind == "k8v4" else "UNIFORM_SINGLE_TOKEN_DECODE")
    assert small["bytes"] == large["bytes"] == 2 * shape.plane_bytes * config.num_hidden_layers
    for ids, one, other in zip(texts, small["logprobs"], large["logprobs"], strict=True):
        mine, target = torch.tensor([one, other]), torch.tensor(ids[1:])[:, None]
        torch.testing.assert_close(mine[0], mine[1], rtol=0, atol=0.01)  # a number may round otherwise
        logits, _ = by_engine(model, ids, len(ids), PERIOD, kv=kind, **CHOSEN)
        engine = logits[:-1].log_softmax(-1).gather(1, target)[:, 0]
        assert (mine - engine).abs().mean() < mean
