"""One ranking of all slots of all layers and heads (METHODS section 9) in float64: the part of `oracle.Row` for it."""

import oracle_scores
import oracle_values


def cut(row):
    """The end of a chunk's last layer: what is protected stays, then the best `least` of each head, then the best of
    all; ties go to the earlier position, then to the lower layer and head."""
    items, ends, heads = {}, {}, len(row.later[0].layer.alive)
    for number, seen in enumerate(row.later):
        own = [row._protected(len(slots), seen.order) for slots in seen.layer.alive]
        scores = oracle_scores.refined(row, seen, row._scores(seen, own))
        for g, ((first, last), score) in enumerate(zip(own, scores)):
            slots, head = seen.layer.alive[g], number * heads + g
            items[head] = [(-score[i], slots[i], head, slots[i], i) for i in range(first, len(slots) - last)]
            ends[head] = [*range(first), *range(len(slots) - last, len(slots))]
    wanted = sum(row.targets) - sum(map(len, ends.values()))
    least = min(row.o["least"], wanted // len(items))
    kept = [x for head in items.values() for x in row.best(head, least)[0]]
    rest = [x for head in items.values() for x in head if x not in kept]
    kept += row.best(rest, wanted - len(kept))[0]
    for head, end in ends.items():
        seen = row.later[head // heads]
        count = min(sum(x[2] == head for x in kept), row.above(items[head]))
        mine, _ = oracle_values.taken(row, seen, head % heads, items[head], count, len(end))
        seen.layer.keep(head % heads, sorted([*end, *(x[-1] for x in mine)]))
