"""Counts the requests that fit a memory inside vLLM, with and without kvevict (docs/vllm.md), from a config."""

from argparse import Namespace

import torch

from ...commands import number
from ...policy.checks import byte_count
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


def in_vllm(args: Namespace, shape: Shape) -> dict[str, object]:
    """Say, for the arguments of `kvevict plan`, how many requests of a prompt and its answer fit a memory in vLLM."""
    memory, longest = byte_count("--vllm", args.vllm), args.tokens + args.new_tokens
    found = served(shape, dict(policy=args.policy, budget=number(args.budget)), args.kv, memory, longest)
    print(sentence(found, args.vllm, longest))
    return {"memory": memory, "longest": longest} | found


def sentence(found: dict, memory: str, longest: int) -> str:
    """Say the result of `served` in a sentence."""
    plain, own = (found[name] for name in ("plain", "kvevict"))
    return (
        f"In vLLM {memory} for KV hold {plain['requests']} requests of {longest} tokens "
        f"({plain['request_bytes'] / 1e6:.4g} MB each); with kvevict {own['requests']} of any length up to that "
        f"({own['request_bytes'] / 1e6:.4g} MB each)."
    )
