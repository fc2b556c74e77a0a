"""Cheap controls that look at keys or positions only."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from ..checks import count, flag
from . import SCORES, Score


@SCORES.add("knorm")
@dataclass(frozen=True)
class KNorm(Score):
    """K-norm (Devoto et al. 2024): `-||k_i||_2`, small keys first."""

    ordinal: ClassVar[bool] = True

    def scans(self):
        return 1

    def score(self, view):
        return -view.norm("k", 2)


@SCORES.add("keydiff")
@dataclass(frozen=True)
class KeyDiff(Score):
    """KeyDiff (Park et al. 2025): `-cos(k_i, mean k)`, with the mean over the head's alive keys.

    unit   scale keys to length 1 before the mean
    """

    unit: bool = False
    ordinal: ClassVar[bool] = True

    def check(self, policy):
        flag("unit", self.unit)

    def scans(self):
        return 2  # the mean key, and distances from it

    def score(self, view):
        def one(keys):
            keys = keys.float()
            mean = (F.normalize(keys, dim=-1) if self.unit else keys).mean(0, keepdim=True)
            return -torch.cosine_similarity(keys, mean, dim=-1)

        return view.per_head(one)


@SCORES.add("random")
@dataclass(frozen=True)
class Random(Score):
    """Random: a hash of (seed, layer, kv head, position), so that a row keeps the same slots in any batch."""

    seed: int = 0
    ordinal: ClassVar[bool] = True

    def check(self, policy):
        count("seed", self.seed, 0)

    def score(self, view):
        heads = view.heads[:, None]
        x = view.positions().long() * 0x9E3779B1 + heads * 0x85EBCA77 + view.index * 0xC2B2AE3D + self.seed * 0x27D4EB2F
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # a 32-bit finaliser; int64 keeps the products exact
            x = x & 0xFFFFFFFF
            x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
        return ((x ^ (x >> 16)) >> 8).float()
