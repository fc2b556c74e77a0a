"""Compares the slots that a policy kept of one prompt with the full cache, by the attention of the full cache's
response to the prompt, and a policy's scores with the exact errors of removing single slots."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...context import within
from ...engine.read.layer import LayerCall
from ...engine.watch import diagnostics
from ...engine.watch.watcher import Watcher
from ...models.compat import cache_of
from ...patch import evicting
from ...policy.building import Chosen
from ...policy.policy import Policy
from ...policy.rows import ROWS
from ...policy.scores import SCORES

CHUNK = 4096  # tokens read at once into the full cache, which bounds the memory of activations
NAMES = ("joint_error", "output_error", "recall", "top16")
FOUND = "found16"  # name of the numbers of `found`
BEST = 16  # number of slots in EDIE's figure 3
WINDOW = 32  # rows whose outputs move in EDIE's figure 3, at most half of the prompt


class _Queries(Watcher):
    """Keeps the queries of the last `rows` rows: `found` maps a layer's index to (queries [H, R, D], the attention's
    options)."""

    def __init__(self, rows: int) -> None:
        self.rows, self.found = rows, {}

    def read(self, call: LayerCall, score: Tensor | None) -> None:
        self.found[call.slots.index] = call.rows.q[0, :, -self.rows :].clone(), call.slots.kv.options


@dataclass
class FullCache:
    """The full cache of a prompt and of the first R <= 64 tokens of the model's response."""

    response: list[int]  # the response's ids
    tokens: int  # number of the prompt's tokens
    layers: list[tuple]  # per evicting layer: (queries [H, R, D], k and v [Hkv, tokens + R, D], attention's options)


@torch.no_grad()
def full_cache(
    model: Any,
    ids: Tensor,
    max_new_tokens: int,
    stopping_criteria: list | None = None,
    temperature: float | None = None,
    writer: Any = None,
) -> FullCache:
    """Generate the response of the unpatched model, or of another model `writer`, to a prompt, ids [1, N], greedily or
    sampled at a temperature, and read prompt and response into a full cache of `model`."""
    sampling = dict(do_sample=False) if temperature is None else dict(do_sample=True, temperature=temperature)
    how = dict(max_new_tokens=max_new_tokens, stopping_criteria=stopping_criteria)
    out = (writer or model).generate(ids, attention_mask=torch.ones_like(ids), **how, **sampling)
    read = out[:, : ids.shape[1] + diagnostics.ROWS]
    queries = _Queries(read.shape[1] - ids.shape[1])
    everything = Policy(score="random", budget=read.shape[1], chunk_size=CHUNK, schedule="prompt")
    with evicting(model, everything), within(watchers=(queries,)):
        cache = cache_of(model(read, use_cache=True, logits_to_keep=1))
    layers = [
        (q, cache.layers[index].keys[0], cache.layers[index].values[0], options)
        for index, (q, options) in sorted(queries.found.items())
    ]
    return FullCache(out[0, ids.shape[1] :].tolist(), ids.shape[1], layers)


@torch.no_grad()
def left(model: torch.nn.Module, ids: Tensor, policy: Policy | Chosen) -> list[list[tuple[Tensor, ...]]]:
    """Read a prompt, ids [1, N], under the policy. Returns the slots that it stored, as [evicting layer][kv head]
    (positions [n], k and v [n, D])."""
    with evicting(model, policy, tokenizer=False):
        cache = cache_of(model(ids, use_cache=True, logits_to_keep=1))
    return [
        [(layer.pos[at].long(), *(layer.storage.numbers(x, b, h, at) for x in "kv")) for b, h, at in layer.segments()]
        for layer in cache.layers
        if hasattr(layer, "segments")
    ]


def informed(policy: Policy, response: list[int]) -> Policy:
    """Return the policy; rows that need the response's ids (the oracle's) get them."""
    rows = policy.rows.with_response(response)
    return policy if rows is policy.rows else dataclasses.replace(policy, rows=rows)


@torch.no_grad()
def compare(full: FullCache, kept: list) -> list:
    """Compute a dict of `NAMES` for each evicting layer; `kept` is the result of `left`. The numbers are means over the
    rows of the response:

    joint_error    CAOTE's equation 24 for all evicted slots together, with the full cache's attention, keys and values
    output_error   || o - o' || / || o ||, where o is the full cache's attention output, and o' the output over the keys
                   and values that the policy stored (they differ from the full cache's if a chunk was read after an
                   earlier eviction)
    recall         share of the response's attention to the prompt that falls on kept slots, with the full cache's
                   attention
    top16          share that is kept of the 16 prompt slots whose single removal moves the attention output most: EDIE
                   eq. 7, summed over the GQA group and the response's rows
    """
    return [_layer(full.tokens, *layer, heads) for layer, heads in zip(full.layers, kept, strict=True)]  # type: ignore[call-arg]


def _layer(tokens: int, q: Tensor, k: Tensor, v: Tensor, options: dict, heads: list) -> dict:
    kept = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    kept[:, :tokens] = False
    stored_k, stored_v = k.clone(), v.clone()
    for h, (positions, keys, values) in enumerate(heads):
        kept[h, positions], stored_k[h, positions], stored_v[h, positions] = True, keys, values
    groups = diagnostics.by_group(q, len(k), **options)
    rows = [_head(tokens, *one) for one in zip(groups, k, v, stored_k, stored_v, kept)]
    before, chosen, after, mass, recalled = map(torch.cat, zip(*(row[:5] for row in rows)))
    return dict(
        joint_error=float(diagnostics.joint_error(before, chosen).mean()),
        output_error=float(diagnostics.output_error(before, after).mean()),
        recall=float(recalled.sum() / mass.sum()),
        top16=float(torch.stack([row[5] for row in rows]).mean()),
    )


def _head(tokens: int, group: tuple, k: Tensor, v: Tensor, stored_k: Tensor, stored_v: Tensor, kept: Tensor) -> tuple:
    """Compute the numbers of one kv head, with G query heads. Returns three attention outputs [G, R, D], over the full
    cache, over its kept slots and over the stored slots; the full cache's attention [G, R] to the prompt and to its
    kept slots; and the kept share of the 16 slots of the largest removal error."""
    q, options = group
    column = torch.arange(len(k), device=k.device)
    sees = column <= column[tokens:, None]
    a, before = diagnostics.attention(q, k, v, sees, **options)
    _, chosen = diagnostics.attention(q, k, v, sees & kept, **options)
    _, after = diagnostics.attention(q, stored_k, stored_v, sees & kept, **options)
    a = a[..., :tokens]
    moved = a / (1 - a).clamp_min(diagnostics.LEAST) * torch.cdist(before, v[:tokens].float().expand(len(a), -1, -1), 1)
    best = kept[moved.sum((0, 1)).topk(min(BEST, tokens)).indices].float().mean()
    return before, chosen, after, a.sum(2), (a * kept[:tokens]).sum(2), best


class _Scores(Watcher):
    """Keeps each layer's last scores of its slots: layer's index -> [Hkv, tokens], neither pooled nor refined."""

    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}

    def read(self, call: LayerCall, score: Tensor | None) -> None:
        if score is not None:
            plain = call.policy.score.plain(call.slots, score)
            self.found[call.slots.index] = plain[0].expand(call.slots.n.shape[1], -1).clone()


@torch.no_grad()
def scores(model: torch.nn.Module, ids: Tensor, policy: Policy) -> list[Tensor]:
    """Read a prompt, ids [1, N], in one pass. Returns the score that the policy's rows and score give each slot before
    any is evicted, neither pooled nor refined: [Hkv, N] for each evicting layer. Raises ValueError for a prompt that
    the policy's smallest budget holds, since it is not scored."""
    alone = Policy(rows=policy.rows, score=policy.score, carry=policy.carry)
    alone = dataclasses.replace(alone, budget=alone.smallest_budget(), decode=False)
    if ids.shape[1] <= alone.smallest_budget():
        raise ValueError(f"a prompt of {ids.shape[1]} tokens is too short to be scored: give a longer one")
    watcher = _Scores()
    with evicting(model, alone, tokenizer=False), within(watchers=(watcher,)):
        model(ids, use_cache=True, logits_to_keep=1)
    return [found for _, found in sorted(watcher.found.items())]


def errors(model: torch.nn.Module, ids: Tensor) -> list[Tensor]:
    """Return what `scores` does for the exact error of removing each slot alone, the 1-norm of how far the outputs of
    the prompt's last `WINDOW` rows move (EDIE eq. 7), summed over these rows and the GQA group."""
    window = ROWS.find("window")(min(WINDOW, ids.shape[1] // 2))
    return scores(model, ids, Policy(rows=window, score=SCORES.find("edie-exact")(weight="none")))


def found(exact: list[Tensor], estimate: list[Tensor], count: int = BEST, window: int = WINDOW) -> list[float]:
    """Return, for each layer, the share of the `count` slots of the largest exact numbers that are among as many slots
    of the largest estimates: the mean over kv heads. The prompt's last `window` slots, at most half, take no part.

    exact, estimate   results of `errors` (EDIE figure 3) or of `scores`
    """
    shares = []
    for both in zip(exact, estimate, strict=True):
        before = both[0].shape[1] - min(window, both[0].shape[1] // 2)
        orders = [x[:, :before].sort(dim=1, descending=True, stable=True).indices[:, :count] for x in both]
        best = [torch.zeros_like(x, dtype=torch.bool).scatter(1, order, True) for x, order in zip(both, orders)]
        shares.append(float((best[0] & best[1]).sum() / best[0].sum()))
    return shares


def positions(kept: list) -> list:
    """Return the set of kept positions of each [layer][kv head] in the result of `left`."""
    return [[set(at.tolist()) for at, *_ in heads] for heads in kept]


def overlap(a: list, b: list) -> float:
    """Compute the mean Jaccard index, over all heads, of the `positions` that two policies kept: 1 if they keep equal
    slots."""
    pairs = [pair for layers in zip(a, b, strict=True) for pair in zip(*layers, strict=True)]
    return sum(len(x & y) / len(x | y) if x | y else 1.0 for x, y in pairs) / len(pairs)
