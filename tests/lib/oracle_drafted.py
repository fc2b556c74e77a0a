"""Drafts for the float64 oracle, from METHODS sections 1 and 1a alone.

Another model's draft is appended to chunks as a given response is. A draft by the model itself is made after the prompt
was read, by a second `oracle.Row` with the slots that SnapKV would keep; only then slots are evicted.
"""

import copy
import functools

import oracle
import torch
from oracle_scores import pool

FIRST_WINDOW = 32


def best_token(row, logits):
    best, second = logits.topk(2).values.tolist()
    if best - second < row.near * logits.abs().max():
        raise oracle.NearTie
    return logits.argmax().item()


def follow(row, ids):
    """The other model's tokens after `ids`."""
    model, ids = _double(row.o["draft_model"]), list(ids)
    for _ in range(row.o["n_d"]):
        with torch.no_grad():
            ids.append(best_token(row, model(torch.tensor([ids]), use_cache=False).logits[0, -1]))
    return ids[-row.o["n_d"] :]


def write(row, logits):
    """The model's draft after a prompt, from its last token's logits on: per evicting layer the drafted rows' queries
    [H, n_d, d], keys and values [Hkv, n_d, d], and each layer's rotations of their residual stream."""
    writer, token, n_d, turns = _writer(row), best_token(row, logits), row.o["n_d"], []
    for _ in range(n_d):
        token = best_token(row, writer.step(token))
        turns.append(writer.turns)
    drafted = {}
    for index in row.own:
        layer = writer.layers[index]
        drafted[index] = torch.stack([x for _, x, _ in layer.asked], 1), layer.k[:, -n_d:], layer.v[:, -n_d:]
    return drafted, {index: torch.cat([turn[index] for turn in turns]) for index in turns[0]}


def _writer(row):
    """A row with the slots that SnapKV keeps of each layer."""
    writer = copy.copy(row)
    writer.o = row.o | dict(decode=False, n_reuse=1)
    writer.calls = {}
    writer.layers = [oracle.Layer(x.k, x.v, [list(head) for head in x.alive], x.carry) for x in row.layers]
    for seen in row.calls.values():
        layer, slots = writer.layers[seen.index], row.targets[seen.order]
        heads = len(layer.alive)
        window = min(FIRST_WINDOW, max(1, slots // heads // 2))
        for g, alive in enumerate(layer.alive):
            keep, last = slots // heads + (g < slots % heads), min(window, len(alive))
            if keep >= len(alive):
                continue
            score = pool(seen.attention[g][:, -window:].sum(1).mean(0).tolist(), "max", 7, 0, last)
            items = [(-score[i], i, g, t, i) for i, t in enumerate(alive[: len(alive) - last])]
            kept = sorted(x[-1] for x in row.best(items, keep - last)[0])
            layer.alive[g] = [alive[i] for i in kept] + alive[len(alive) - last :]
    return writer


@functools.cache
def _double(model):
    return copy.deepcopy(model).double()
