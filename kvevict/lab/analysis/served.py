"""Counts the requests that fit a memory inside vLLM, with and without kvevict (docs/vllm.md), from a config."""

import torch

from ...vllm.options import VllmOptions, policy_of
from ...vllm.shape import StateShape
from .shape import Shape

BLOCK = 16  # tokens of a block of vLLM's own cache
DTYPES = {2: torch.bfloat16, 4: torch.float32}


def served(shape: Shape, given: dict[str, object], kv: str, memory: int, longest: int, period: int = 512) -> dict:
    """Count the requests of up to `longest` tokens whose KV cache fits `memory` bytes, and the bytes of one. given:
    kvevict's options inside vLLM, its policy and budget; kv: how slots are stored. vLLM keeps one block of its cache
    free, which with kvevict is a whole state. Raises ValueError for a model or policy that cannot work there."""
    if set(shape.windows) != {None}:
        raise ValueError("kvevict in vLLM: the model has layers with a sliding window: serve it without kvevict")
    policy = policy_of(given, period)
    options = VllmOptions(policy, period, shape.heads // shape.kv_heads, kv)
    layers, state = len(shape.windows), StateShape(shape.kv_heads, shape.head_dim, DTYPES[shape.element], options)
    plain, own = layers * shape.new_bytes * -(-longest // BLOCK) * BLOCK, layers * 2 * state.plane_bytes
    return {
        "plain": {"request_bytes": plain, "requests": memory // plain},
        "kvevict": {"request_bytes": own, "requests": max(memory // own - 1, 0)},
    }


def sentence(found: dict, memory: int, longest: int) -> str:
    """Say the result of `served` in a sentence."""
    plain, own = (found[name] for name in ("plain", "kvevict"))
    return (
        f"In vLLM {memory / 2**30:.4g} GiB for KV hold {plain['requests']} requests of {longest} tokens "
        f"({plain['request_bytes'] / 1e6:.4g} MB each); with kvevict {own['requests']} of any length up to that "
        f"({own['request_bytes'] / 1e6:.4g} MB each)."
    )
