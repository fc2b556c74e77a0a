"""Computes KVzip's scores of a text by reading it twice: what gates and lookahead rows learn to predict."""

from collections.abc import Callable
from typing import Any

import torch

from ..context import within
from ..engine.watch.watcher import Watcher
from ..models import families
from ..patch import evicting
from ..policy.building import build
from ..policy.checks import PLENTY

LABELS = ("kvzip", "kvzip+")
Take = Callable[[int, torch.Tensor], None]  # take(layer, numbers fp32 [kv heads, N])


class _Numbers(Watcher):
    """Passes each layer's numbers to `take` as soon as they are known."""

    def __init__(self, take: Take) -> None:
        self.take = take

    def read(self, call: Any, score: Any) -> None:
        self.take(call.slots.index, score[0])


def numbers(model: torch.nn.Module, label: str, ids: torch.Tensor, take: Take) -> None:
    """Read the ids [N] of a text, and then once more after themselves, without an autograd graph. Calls `take` for
    every layer that evicts, in order, with the scores by which the policy `label` ranks slots."""
    decoder = families.find_decoder(model)
    policy = build(label, budget=PLENTY, chunk_size=len(ids), layers="uniform")
    with evicting(model, policy), torch.no_grad(), within(watchers=(_Numbers(take),)):
        decoder(input_ids=ids[None].to(families.device_of(decoder)), use_cache=True)
