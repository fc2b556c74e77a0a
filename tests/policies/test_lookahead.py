"""Learned rows (METHODS section 6): what the adapter touches, what its rows choose, and how it is saved."""

import pytest
import torch
import transformers
from tiny import FAMILIES, prompt, shared
from transformers.cache_utils import DynamicCache

import kvevict
from kvevict.lookahead import Adapter

families = pytest.mark.parametrize("family", FAMILIES)
ALL = 4096


def adapter(model, tokens=6, seed=0, **options):
    """One that is not zero."""
    torch.manual_seed(seed)
    made = Adapter(model, tokens=tokens, rank=2, **options)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    return made


def zero(model, like):
    """The same rows with the adapter off."""
    made = Adapter(model, like.tokens, like.rank, like.alpha, like.targets)
    with torch.no_grad():
        made.embeddings.copy_(like.embeddings)
    return made


def read(model, inputs, policy="lookahead", **options):
    """(logits, cache) of a prompt."""
    cache = DynamicCache(config=model.config)
    with kvevict.evicting(model, policy, **options), torch.no_grad():
        return model(**inputs, past_key_values=cache).logits, cache


def stored(cache):
    """Keys, values and positions of every slot of the layers that are evicted from."""
    for layer in cache.layers:
        if hasattr(layer, "counts"):
            for _, _, rows in layer.segments():
                yield from (layer.k[rows], layer.v[rows], layer.pos[rows])


def positions(cache):
    return [layer.pos[rows].tolist() for layer in cache.layers for _, _, rows in layer.segments()]


# -- sizes ----------------------------------------------------------------------------------------------------------

LLAMA = dict(vocab_size=128256, num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True)
QWEN = dict(vocab_size=151936, num_key_value_heads=8, head_dim=128)
TABLE_1 = {
    "LLaMA3.2-1B": (5.4, "Llama", LLAMA | dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16)),
    "LLaMA3.2-3B": (11.9, "Llama", LLAMA | dict(hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
                                               num_attention_heads=24, head_dim=128)),
    "LLaMA3.1-8B": (20.6, "Llama", LLAMA | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)),
    "Qwen3-1.7B": (8.5, "Qwen3", QWEN | dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
                                             num_attention_heads=16)),
    "Qwen3-4B": (16.2, "Qwen3", QWEN | dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
                                            num_attention_heads=32)),
    "Qwen3-8B": (21.5, "Qwen3", QWEN | dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
                                            num_attention_heads=32)),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE_1)
def test_as_many_parameters_as_table_1(name):
    millions, kind, sizes = TABLE_1[name]
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    made = Adapter(model)
    assert all(weight.device.type == "meta" and weight.requires_grad for weight in made.parameters())
    assert round(sum(weight.numel() for weight in made.parameters()) / 1e6, 1) == millions


def test_fused_projections_carry_as_many():
    """Phi-3's qkv_proj and gate_up_proj, against Qwen2's of the same sizes."""
    counts = [sum(w.numel() for w in Adapter(shared(name), 4, 2).parameters()) for name in ("phi3", "qwen2")]
    assert counts[0] == counts[1]


# -- what it touches ------------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("chunk_size", [None, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_rows_keep_every_bit(family, chunk_size, dtype):
    """Logits and caches of the prompt's own tokens are the same with the adapter on and off."""
    model, inputs = shared(family, dtype), prompt(3, 50, pad=(0, 5, 17))
    made, tokens = adapter(model), inputs["attention_mask"].bool()
    options = dict(budget=ALL, probe=4, chunk_size=chunk_size, score="h2o", rows="lookahead")  # h2o always observes
    on, off = (read(model, inputs, "snapkv", adapter=each, **options) for each in (made, zero(model, made)))
    assert torch.equal(on[0][tokens], off[0][tokens])
    assert all(torch.equal(x, y) for x, y in zip(stored(on[1]), stored(off[1]), strict=True))
    carried = [torch.equal(x.carry, y.carry) for x, y in zip(on[1].layers, off[1].layers) if hasattr(x, "carry")]
    assert not all(carried)  # so it was on
