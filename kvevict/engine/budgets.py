"""How many slots every layer may keep, chunk by chunk (METHODS section 4)."""

import numpy as np
import torch

from ..policy.checks import PLENTY
from ..policy.layers import layer_slots
from . import host
from .schedule import overfull, relaxed


class Budgets:
    """Of the layers of one read."""

    def __init__(self, patch, layers, heads, seen):
        self.policy, self.layers, self.heads, self.seen = patch.policy, layers, heads, seen
        self.ranks = patch.ranks
        self.warmup = np.array([patch.policy.warmup_slots(n) for n in seen]) * heads  # [B], over a layer's kv heads
        self.alive = None  # int64 [layers, B] slots of each layer with this chunk's, before it is cut
        self.cuts = None  # [B] whether a row loses slots after this chunk
        self.targets = None  # [layers, B] slots of each layer, over its kv heads, after this chunk
        self.errors = None  # fp64 [layers, B] sums over chunks of the layers' errors
        self.measurements = np.zeros(len(seen), np.int64)  # [B] how many chunks those are

    def split(self, chunk, padding) -> None:
        """What every layer may keep after a chunk, by what it will hold then and what earlier chunks measured.
        padding [B]: left padding of the prompt."""
        tokens = chunk.end - np.clip(padding, chunk.start, chunk.end)
        alive = np.stack([
            self.heads * np.minimum(tokens, most) + (0 if layer.counts is None else self.ranks.counts(layer).sum(1))
            for layer, most in zip(self.layers, chunk.limits, strict=True)
        ])  # fmt: skip
        self.alive = torch.from_numpy(alive)
        total = np.array([self.policy.slots(n) for n in self.seen]) * self.heads * len(self.layers)
        self.cuts = (alive.sum(0) > total) & (tokens > 0)
        common = self.policy, len(self.layers), self.heads, self.seen
        measured = self.mean_errors()
        self.targets = layer_slots(*common, self.alive, measured).numpy()
        free = self.targets if self.cuts.all() else layer_slots(*common, None, measured).numpy()
        for layer, mine, most in zip(self.layers, self.targets, free, strict=True):
            layer.budget = np.minimum(np.where(self.cuts, mine, most), PLENTY)

    def limit(self, chunk):
        """view -> the slots [B] that its layer may keep after the chunk; None: all."""

        def of(view):
            if not chunk.evicts:
                return None
            return (
                self.warmup if relaxed(self.policy, view.order, len(self.layers), chunk) else self.targets[view.order]
            )

        return of

    def note(self, errors) -> None:
        """Take in what a chunk measured: fp64 [layers, B]."""
        if self.errors is None:
            self.errors = torch.zeros_like(errors)
        self.errors += errors * host.upload(self.cuts, errors.device, torch.bool)
        self.measurements += self.cuts

    def mean_errors(self) -> list:
        """Per row the layers' mean errors over the chunks so far; None where nothing was measured."""
        if self.errors is None:
            return [None] * len(self.seen)
        means = (self.errors.cpu() / torch.from_numpy(self.measurements.clip(1))).T.tolist()
        return [row if n else None for row, n in zip(means, self.measurements, strict=True)]

    def learn(self) -> None:
        """The read's end: every row that was evicted from is a context of its task."""
        if self.errors is not None:
            self.policy.layers.learn([row for row in self.mean_errors() if row is not None])


def full(policy):
    """view -> while decoding, the slots [B] of a layer where it holds more than its budget and slack; None: nowhere."""

    def of(view):
        n = view.every.sum(1)
        over = overfull(policy, n, view.layer.budget, view.every.shape[1])
        return np.where(over, view.layer.budget, n) if over.any() else None

    return of


def check_groups(policy, cache, layers, ranks) -> None:
    """Layers, or a layer's heads, that share a choice must hold the same slots, as they do if they always did."""
    if layers[0].len is None or cache.policy is policy:
        return
    for group in policy.groups(len(layers)):
        held = [layers[order].places(shared=policy.shared) for order in group if len(group) > 1 or policy.shared]
        every = ranks.objects(held)
        alike = all(None not in each and each == each[:1] * len(each) for each in every)
        if not alike or (policy.shared and any(each != held for each in every)):
            raise ValueError(
                "past_key_values was read under another policy, and layers or heads that are to share their choice "
                "hold different slots; read the prompt again under this policy"
            )


def renew(policy, cache, layers, heads, ranks) -> None:
    """Budgets of a cache that was read under another policy, or without one."""
    if cache.policy is policy:
        return
    check_groups(policy, cache, layers, ranks)
    slots = layer_slots(policy, len(layers), heads, layers[0].seen.tolist())
    least = policy.smallest_budget() * heads
    for layer, budget in zip(layers, slots, strict=True):
        loaded = cache.policy is None and layer.budget is not None
        if not (loaded or cache.policy == policy) or layer.budget.min() < least:
            layer.budget = np.minimum(budget.numpy(), PLENTY)
        if not loaded and cache.policy != policy:
            layer.recent = None  # another policy's rows, or rows with a gap behind them
            if not policy.score.carries:
                layer.carry = None
    cache.read_under(policy)
