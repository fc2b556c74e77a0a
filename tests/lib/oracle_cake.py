"""CAKE's layer budget (METHODS section 4) in float64, without a cascade: all layers of a chunk are read, then each is
cut once, to its share by the preferences of all. The part of `oracle.Row` for it."""

import math
from fractions import Fraction

import oracle

SURE = 3e-4  # relative error of a preference that float32 may make, and that must not change a budget


def preference(row, attention, ends):
    """H^(1/tau1) * V^(1/tau2) of a layer: attention per kv head [G, R, n], ends per kv head the protected slots."""
    entropy = variance = 0.0
    for a, (first, last) in zip(attention, ends):
        a = a[:, -row.o["window"] :, first : a.shape[2] - last]
        entropy -= (a * a.clamp(min=1e-300).log()).sum().item()
        if a.shape[1] > 1:
            variance += a.var(1, correction=1).sum().item()
    return entropy ** (1 / row.o["tau1"]) * variance ** (1 / row.o["tau2"])


def cut(row):
    """The end of a chunk's last layer."""
    found = []
    for order, layer, _, attention, *_ in row.later:
        found.append(preference(row, attention, [row._protected(len(slots), order) for slots in layer.alive]))
    alive = [sum(map(len, layer.alive)) for _, layer, *_ in row.later]

    def slots(shares):
        row.shares = [Fraction(x) for x in shares]
        return row._whole_slots(alive)

    row.targets = row.limits = slots(found)
    for i, factor in [(i, factor) for i in range(len(found)) for factor in (1 - SURE, 1 + SURE) if row.near]:
        if slots([x * factor if i == j else x for j, x in enumerate(found)]) != row.targets:
            raise oracle.NearTie(math.nan)
    for order, layer, q, attention, out, logit in row.later:
        row.out, row.logit = out, logit
        row.layer_budget = row.limits[order]
        if alive[order] > row.layer_budget:
            row._evict([layer], layer, row.layer_budget, order, q, attention)
