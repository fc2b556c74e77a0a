"""Expected Attention (METHODS section 9) in float64: the part of `oracle.Row` for it. Every query ever read stays,
as it was before rotation."""

import torch

SPAN = 512  # positions that the mean rotation is over


def note(row, seen):
    """The rows of a chunk, but those at the first positions."""
    for j in range(seen.new):
        if row.seen + j >= row.o["sink"]:
            seen.layer.queries.append(row.turn(seen.q[:, j], -(row.seen + j)))


def scores(row, seen, g, end):
    """(mean_g zn_i + 0.01) ||v_i||_2 of kv head g, zn summing to 1 over the slots after the sinks."""
    o, slots, layer, scale = row.o, seen.layer.alive[g], seen.layer, seen.logit[0]
    k, v = layer.k[g, slots], layer.v[g, slots]
    units = torch.eye(k.shape[1], dtype=torch.double)
    R = _mean_turn(row, units)
    queries = torch.stack(layer.queries) if layer.queries else torch.zeros(1, len(seen.q), k.shape[1]).double()
    total = torch.zeros(len(slots), dtype=torch.double)
    for h in range(g * row.group, (g + 1) * row.group):
        mean = queries[:, h].mean(0)
        away = queries[:, h] - mean
        covariance = R @ (away.T @ away / len(away)) @ R.T
        power = k @ (R @ mean) * scale + torch.einsum("id,de,ie->i", k, covariance, k) * scale**2 / 2
        total[o["sink"] :] += power[o["sink"] :].softmax(0)
    return ((total / row.group + 0.01) * v.norm(dim=1)).tolist()


def _mean_turn(row, units):
    """The mean rotation to the next SPAN positions, as a matrix; one for all heads and layers of a chunk."""
    known = row.__dict__.setdefault("mean_turns", {})
    if row.chunk_end not in known:
        known[row.chunk_end] = sum(row.turn(units, row.chunk_end + t) for t in range(SPAN)).T / SPAN  # it turns rows
    return known[row.chunk_end]
