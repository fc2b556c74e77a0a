"""KVzip's numbers of a text, which is read twice: what gates and lookahead rows are trained towards."""

import torch

from . import families
from .context import within
from .engine.watch.watcher import Watcher
from .patch import evicting
from .policy.checks import PLENTY
from .policy.policy import build

LABELS = ("kvzip", "kvzip+")


class _Told(Watcher):
    """Hands each layer's numbers on, as soon as they are known."""

    def __init__(self, take):
        self.take = take

    def read(self, call, score):
        self.take(call.slots.index, score[0])


def numbers(model, label: str, ids, take) -> None:
    """take(layer, fp32 [kv heads, N]) of every layer that evicts, in order: the numbers by which the policy `label`
    ranks slots, of the tokens ids [N] of one text, which is read, and once more after itself, without a graph."""
    decoder = families.find_decoder(model)
    policy = build(label, budget=PLENTY, chunk_size=len(ids), layers="uniform")
    with evicting(model, policy), torch.no_grad(), within(watchers=(_Told(take),)):
        decoder(input_ids=ids[None].to(families.device_of(decoder)), use_cache=True)
