"""Computes KVzip's scores of a text by reading it twice. Gates and lookahead rows learn to predict these scores."""

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
Take = Callable[[int, torch.Tensor], None]  # function take(layer, scores fp32 [kv heads, N tokens])


class _Numbers(Watcher):
    """Calls `take` with each layer's scores as soon as they are computed."""

    def __init__(self, take: Take) -> None:
        self.take = take

    def read(self, call: Any, score: Any) -> None:
        self.take(call.slots.index, score[0])


def numbers(model: torch.nn.Module, label: str, ids: torch.Tensor, take: Take) -> None:
    """Read a text's ids [N], and then the same ids again after it, without an autograd graph. Calls
    take(layer, scores [kv heads, N]) for every evicting layer, in order, with the scores by which the policy `label`
    ranks slots."""
    decoder = families.find_decoder(model)
    policy = build(label, budget=PLENTY, chunk_size=len(ids), layers="uniform")
    with evicting(model, policy), torch.no_grad(), within(watchers=(_Numbers(take),)):
        decoder(input_ids=ids[None].to(families.device_of(decoder)), use_cache=True)
