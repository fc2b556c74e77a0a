"""Compares the slots that a policy kept of one prompt with the full cache, for the full cache's response."""

import dataclasses
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ...compat import cache_of
from ...context import within
from ...engine.watch.watcher import Watcher
from ...lookahead.validation import recall, tau
from ...patch import evicting
from ...policy.policy import Policy
from . import diagnose

CHUNK = 4096  # tokens read at once for the full cache, to bound activations
NAMES = ("joint_error", "output_error", "recall", "top16", "attention_cosine", "kv_l1_loss")
RANKED = ("eighth", "tau")
FULL_NAMES = ("sparsity", "fastcaote_spearman")


class _Queries(Watcher):
    """Keeps every layer's last `rows` queries: layer -> ([H, R, D], attention's options)."""

    def __init__(self, rows):
        self.rows, self.found = rows, {}

    def read(self, call, score):
        self.found[call.slots.index] = call.rows.q[0, :, -self.rows :].clone(), call.slots.kv.options


class _Scores(Watcher):
    """Keeps every layer's scores: layer -> (score, mask of the slots that compete)."""

    def __init__(self):
        self.found = {}

    def read(self, call, score):
        if score is not None:
            self.found[call.slots.index] = call.policy.score.plain(call.slots, score), call.slots.competing


@dataclass
class Truth:
    """The full cache of a prompt of `tokens` tokens and of its response's first R <= 64: per evicting layer the
    response's queries [H, R, D], keys and values [Hkv, tokens + R, D], and attention's options. `indices` are the
    numbers of those layers in the model."""

    response: list
    tokens: int
    layers: list
    indices: list


@torch.no_grad()
def truth(model: Any, ids: torch.Tensor, max_new_tokens: int, stopping_criteria: Any = None) -> Truth:
    """The unpatched model's greedy response to ids [1, N], with the data to compute its attention."""
    how = dict(max_new_tokens=max_new_tokens, do_sample=False, stopping_criteria=stopping_criteria)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    read = out[:, : ids.shape[1] + diagnose.ROWS]
    rows = read.shape[1] - ids.shape[1]
    queries = _Queries(rows)
    everything = Policy(score="random", budget=read.shape[1], chunk_size=CHUNK, schedule="prompt")
    with evicting(model, everything), within(watchers=(queries,)):
        cache = cache_of(model(read, use_cache=True, logits_to_keep=1))
    layers = [
        (q, cache.layers[index].keys[0], cache.layers[index].values[0], options)
        for index, (q, options) in sorted(queries.found.items())
    ]
    return Truth(out[0, ids.shape[1] :].tolist(), ids.shape[1], layers, sorted(queries.found))


@torch.no_grad()
def left(model: Any, ids: torch.Tensor, policy: Policy) -> list[list[tuple[torch.Tensor, ...]]]:
    """The slots stored after a read of ids [1, N] under the policy: [evicting layer][kv head] (positions [n], k and v
    [n, D])."""
    with evicting(model, policy, tokenizer=False):
        cache = cache_of(model(ids, use_cache=True, logits_to_keep=1))
    own = [layer for layer in cache.layers if hasattr(layer, "segments")]
    return [
        [(layer.pos[at].long(), *(layer.storage.numbers(x, b, h, at) for x in "kv")) for b, h, at in layer.segments()]
        for layer in own
    ]


def informed(policy: Policy, response: list[int]) -> Policy:
    """The policy. An oracle policy without a response gets this response."""
    rows = policy.rows.with_response(response)
    return policy if rows is policy.rows else dataclasses.replace(policy, rows=rows)


@torch.no_grad()
def compare(full: Truth, kept: list) -> list:
    """Per evicting layer a dict of `NAMES`, means over the response's rows; `kept` as `left` gives it.

    joint_error       CAOTE eq. 24 of all evicted slots, by the full cache's attention, keys and values
    output_error      || o - o' || / || o ||, o' over the keys and values that the policy stored (they differ from the
                      full cache's if a chunk was read after an earlier eviction)
    recall            share of the response's attention to the prompt that lies on kept slots, by the full cache
    top16             kept share of the 16 prompt slots with the most attention, averaged over the group and the
                      response's rows (EDIE figure 3)
    attention_cosine  of the response's attention to the prompt: with the full cache against with the stored slots
    kv_l1_loss        L1 distance of the prompt's keys and values, evicted ones taken as 0, relative to their L1 norm

    The last two are ChunkKV's; its text has no formula for them, so these are our reading.
    """
    pairs = zip(full.layers, kept, strict=True)
    return [_layer(full.tokens, *layer, heads) for layer, heads in pairs]  # type: ignore[call-arg]


@torch.no_grad()
def ranking(model: Any, ids: torch.Tensor, policy: Policy, full: Truth) -> dict[str, float] | None:
    """How the policy's score ranks the slots of a prompt read in one pass, against the response's attention with the
    full cache: means over kv heads and over the layers that score every slot; None if no layer does (nothing is
    evicted). Protected slots are not ranked, so they are left out; nothing is pooled or refined. Needs scipy.

    eighth  of the eighth of the slots with the most attention, the share in the score's best eighth (LookaheadKV table
            8, its recall@k)
    tau     Kendall's rank correlation, tau-b (table 8)
    """
    scores = _Scores()
    one_pass = None if policy.chunk_size is None else 2**30
    with within(watchers=(scores,)):
        left(model, ids, dataclasses.replace(policy, chunk_size=one_pass))
    found = scores.found
    each = []
    for index, layer in zip(full.indices, full.layers, strict=True):
        if index not in found or found[index][0].shape[2] != full.tokens:
            continue  # another layer chooses for it, or it reads a part of the prompt
        score, competing = found[index]
        attn = _to_prompt(full.tokens, *layer)
        for a, scores, at in zip(attn, score.expand(-1, len(attn), -1)[0], competing[0], strict=True):
            got, want = scores[at], a.mean((0, 1))[at]
            each.append((recall(got, want, max(1, len(got) // 8)), tau(got, want)))
    if not each:
        return None
    return {name: float(torch.stack(values).mean()) for name, values in zip(RANKED, zip(*each))}


def _to_prompt(tokens, q, k, v, options) -> list:
    """Per kv head the attention weights [G, R, tokens] of the response's rows on the prompt, with the full cache."""
    column = torch.arange(k.shape[1], device=k.device)
    sees, groups = column <= column[tokens:, None], diagnose.by_group(q, len(k), **options)
    heads = zip(groups, k, v)
    return [diagnose.attention(own, key, value, sees, **its)[0][..., :tokens] for (own, its), key, value in heads]


def _layer(tokens, q, k, v, options, heads):
    kept = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    kept[:, :tokens] = False
    stored_k, stored_v = k.clone(), v.clone()
    stored_k[:, :tokens] = stored_v[:, :tokens] = 0
    for h, (positions, keys, values) in enumerate(heads):
        kept[h, positions], stored_k[h, positions], stored_v[h, positions] = True, keys, values
    groups = diagnose.by_group(q, len(k), **options)
    rows = [_head(tokens, *one) for one in zip(groups, k, v, stored_k, stored_v, kept)]
    before, chosen, after, mass, recalled, cosine = map(torch.cat, zip(*(row[:6] for row in rows)))
    return dict(
        joint_error=float(diagnose.joint_error(before, chosen).mean()),
        output_error=float(diagnose.output_error(before, after).mean()),
        recall=float(recalled.sum() / mass.sum()),
        top16=float(torch.stack([row[6] for row in rows]).mean()),
        attention_cosine=float(cosine.mean()),
        kv_l1_loss=diagnose.l1_loss(*(torch.cat(x)[:, :tokens].float() for x in ((k, v), (stored_k, stored_v)))),
    )


def _head(tokens, group, k, v, stored_k, stored_v, kept):
    """Outputs [G, R, D] from the full cache, from its kept slots, and from the stored slots; the full cache's attention
    [G, R] to the prompt and to its kept slots; the cosine [G, R]; the kept share of the best 16 slots."""
    q, options = group
    column = torch.arange(len(k), device=k.device)
    sees = column <= column[tokens:, None]
    a, before = diagnose.attention(q, k, v, sees, **options)
    _, chosen = diagnose.attention(q, k, v, sees & kept, **options)
    left, after = diagnose.attention(q, stored_k, stored_v, sees & kept, **options)
    a, left = a[..., :tokens], left[..., :tokens]
    best = kept[a.mean((0, 1)).topk(min(16, tokens)).indices].float().mean()
    return before, chosen, after, a.sum(2), (a * kept[:tokens]).sum(2), diagnose.cosine(a, left), best


@torch.no_grad()
def full_cache(full: Truth) -> list:
    """Per evicting layer a dict of means over kv heads, about the response's attention to the prompt. Needs scipy.

    sparsity            share of the slots that hold 90 % of that attention, the mean over rows and the group (TAKE
                        figure 4)
    fastcaote_spearman  Spearman's correlation of FastCAOTE's with CAOTE's scores by it (CAOTE table 7)
    """
    from scipy.stats import spearmanr

    layers = []
    for layer in full.layers:
        found = []
        for a, values in zip(_to_prompt(full.tokens, *layer), layer[2]):
            a = a / a.sum(-1, keepdim=True)
            mean, values = a.mean((0, 1)), values[: full.tokens].float()
            pair = (diagnose.caote(mean, values, fast).cpu().numpy() for fast in (False, True))
            found.append((float(diagnose.sparsity(a).mean()), float(spearmanr(*pair).statistic)))
        layers.append({name: sum(x) / len(x) for name, x in zip(FULL_NAMES, zip(*found))})
    return layers


def positions(kept: list) -> list:
    """[layer][kv head] the set of kept positions, from the result of `left`."""
    return [[set(at.tolist()) for at, *_ in heads] for heads in kept]


def adjacent(kept: list) -> float | None:
    """Mean overlap of neighbouring evicting layers, from a policy's `positions`; None for a single layer."""
    pairs = [diagnose.overlap(*layers) for layers in pairwise(kept)]
    return sum(pairs) / len(pairs) if pairs else None


def layers_alike(kept: list) -> list:
    """[layer][layer] overlap of evicting layers, from a policy's `positions`."""
    return [[diagnose.overlap(a, b) for b in kept] for a in kept]


def between(a: list, b: list) -> float:
    """Mean overlap, layer by layer, of two policies' `positions`."""
    return sum(map(diagnose.overlap, a, b)) / len(a)
