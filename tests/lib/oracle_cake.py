"""CAKE's layer budget (METHODS section 4) in float64, without a cascade: all layers of a chunk are read, then each is
cut once, to its share by the preferences of all. The part of `oracle.Row` for it."""

import math
from fractions import Fraction

import oracle
from oracle_rows import observers

SURE = 3e-4  # relative error of a preference that float32 may make, and that must not change a budget


def preference(row, seen):
    """H * V of a layer, over its slots that are not protected."""
    entropy = variance = 0.0
    for g, slots in enumerate(seen.layer.alive):
        first, last = row._protected(len(slots), seen.order)
        a = observers(row, seen, g)[0][:, :, first : len(slots) - last]
        entropy -= (a * a.clamp(min=1e-300).log()).sum().item()
        if a.shape[1] > 1:
            variance += a.var(1, correction=1).sum().item()
    return entropy * variance


def cut(row):
    """The end of a chunk's last layer."""
    found = [preference(row, seen) for seen in row.later]
    alive = [sum(map(len, seen.layer.alive)) for seen in row.later]

    def slots(shares):
        row.shares = [Fraction(x) for x in shares]
        return row._whole_slots(alive)

    row.targets = row.limits = slots(found)
    for i, factor in [(i, factor) for i in range(len(found)) for factor in (1 - SURE, 1 + SURE) if row.near]:
        if slots([x * factor if i == j else x for j, x in enumerate(found)]) != row.targets:
            raise oracle.NearTie(math.nan)
    for seen in row.later:
        row.layer_budget = row.limits[seen.order]
        if alive[seen.order] > row.layer_budget:
            row.evict([seen.layer], seen, row.layer_budget)
