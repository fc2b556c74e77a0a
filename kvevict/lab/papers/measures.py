"""Fills the cells of tables that are not of scores: slots that are kept, and attention to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

from ...asking.tokens import find
from ...context import within
from ...engine.read.layer import LayerCall
from ...engine.watch import diagnostics
from ...engine.watch.watcher import Watcher
from ...policy.building import choose
from ...policy.refinements import REFINEMENTS
from ...policy.rows import drafted
from ...train.lookahead.validation import recall, tau
from ..analysis import compare
from ..evaluate.intervals import student
from ..evaluate.runs import policy_for
from . import Found, Place, Table, Value, measured
from .session import Session, kept

NEW = 16  # tokens of the full cache's response
Numbers = defaultdict[Place, list[float]]  # of each cell, one per text


def average(values: list[float], scale: float = 1.0) -> Value:
    """Average numbers, one per text."""
    mean, half = scale * sum(values) / len(values), scale * student(values)
    return measured(mean, mean - half, mean + half, len(values))


def averages(numbers: Numbers, scale: float = 1.0, notes: Iterable[str] = ()) -> Found:
    return Found({place: average(values, scale) for place, values in numbers.items()}, notes=[*notes])


def _left(session: Session, table: Table, ids: Tensor, row: str, column: str) -> list | None:
    """Return the slots that a cell's policy keeps of a prompt; None if the model refuses the policy."""
    run = session.run_of(table.cells()[row, column])
    if not session.usable(run):
        return None
    chosen = policy_for(run, ids.shape[1], (0,), model=session.model)
    return compare.left(session.model, ids, chosen.with_tokenizer(session.tokenizer))


def jaccard(a: set[int], b: set[int]) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0


@kept
def similarity(session: Session, table: Table) -> Found:
    """Jaccard index of the slots that the first kv head of neighbouring layers keeps, in per cent: a mean over pairs of
    layers and texts. The maps have every pair of layers, mean over texts."""
    found, rows = Found({}), list(table.rows)
    for column in table.columns:
        each: list[float] = []
        sums: dict[Place, float] = {}
        for ids in session.prompts():
            left = _left(session, table, ids, rows[0], column)
            if left is None:
                break
            slots = [heads[0] for heads in compare.positions(left)]
            pairs = [jaccard(*pair) for pair in pairwise(slots)]
            each.append(sum(pairs) / len(pairs))
            for y, a in enumerate(slots):
                for x, b in enumerate(slots):
                    sums[str(y), str(x)] = sums.get((str(y), str(x)), 0.0) + 100 * jaccard(a, b)
        if each:
            value = found.cells[rows[0], column] = average(each, 100)
            title = f"{column}: {value.mean:.0f} %"
            found.maps[title] = {place: total / len(each) for place, total in sums.items()}
    return found


@kept
def losses(session: Session, table: Table) -> Found:
    """ChunkKV's L1 loss of the cache and cosine of attention, of every layer (rows "layer 0", ...) and over all: the L1
    norm of evicted keys and values as a share of that of all, and the cosine of the response's attention to the prompt
    with the full cache and with the kept slots. The paper gives no formula; these are our reading."""
    numbers: Numbers = defaultdict(list)
    (row,) = table.rows
    for ids in session.prompts():
        full = compare.full_cache(session.model, ids, NEW)
        for column in table.columns:
            left = _left(session, table, ids, row, column)
            if left is None:
                continue
            layers = [_loss(full.tokens, layer, heads) for layer, heads in zip(full.layers, left, strict=True)]
            layers.append((sum(x for x, _ in layers) / len(layers), sum(y for _, y in layers) / len(layers)))
            for index, pair in enumerate(layers):
                label = "all layers" if index == len(full.layers) else f"layer {index}"
                for what, number in zip(("L1 loss", "cosine"), pair, strict=True):
                    numbers[label, f"{column}, {what}"].append(number)
    return averages(numbers)


def _loss(tokens: int, layer: tuple, heads: list) -> tuple[float, float]:
    """Return (L1 loss, cosine) of a layer of `FullCache.layers`, of which each head keeps some slots."""
    _, k, v, _ = layer
    kept = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    kept[:, :tokens] = False
    for head, (positions, *_) in enumerate(heads):
        kept[head, positions] = True
    norm = torch.cat([k, v], 2)[:, :tokens].float().abs().sum(2)
    loss = norm[~kept[:, :tokens]].sum() / norm.sum()
    pairs = zip(_attention(tokens, layer), _attention(tokens, layer, kept), strict=True)
    cosines = [torch.cosine_similarity(a[..., :tokens], b[..., :tokens], dim=2) for a, b in pairs]
    return float(loss), float(torch.cat(cosines).mean())


def _attention(tokens: int, layer: tuple, kept: Tensor | None = None) -> list[Tensor]:
    """Return, for each kv head of a layer of `FullCache.layers`, the attention [G, R, n] of its group's rows to all n
    slots or to those that are kept, bool [Hkv, n]."""
    q, k, v, options = layer
    sees = torch.arange(k.shape[1], device=k.device) <= torch.arange(tokens, k.shape[1], device=k.device)[:, None]
    masks = [sees] * len(k) if kept is None else sees & kept[:, None]
    groups = diagnostics.by_group(q, len(k), **options)
    return [
        diagnostics.attention(own, key, value, mask, **its)[0]
        for (own, its), key, value, mask in zip(groups, k, v, masks, strict=True)
    ]


@kept
def sparsity(session: Session, table: Table) -> Found:
    """TAKE figure 4, by layer: the share of the prompt's slots that hold 90 % of the attention of the response's first
    row, a mean over heads, and the share that the needle gets in the head that gives it most; both in per cent."""
    numbers: Numbers = defaultdict(list)
    few, needle = table.columns
    for ids, case in session.asked("needle", session.texts, session.lengths[-1]):
        full = compare.full_cache(session.model, ids, NEW)
        place = slice(*(find(session.tokenizer, ids[0].tolist(), case.answers[0]) or (0, 0)))
        for index, layer in enumerate(full.layers):
            a = torch.cat([rows[:, :1, : full.tokens] for rows in _attention(full.tokens, layer)])
            a = a / a.sum(-1, keepdim=True)
            most = a.sort(-1, descending=True).values.cumsum(-1)
            share = ((most < 0.9).sum(-1) + 1) / full.tokens
            numbers[f"layer {index}", few].append(float(share.mean()))
            numbers[f"layer {index}", needle].append(float(a[..., place].sum(-1).max()))
    return averages(numbers, 100)


class _Refined(Watcher):
    """Keeps Spearman's correlation of CAOTE's and FastCAOTE's numbers for a layer's slots: `found` maps a layer's index
    to one number per kv head."""

    def __init__(self) -> None:
        self.found: dict[int, list[float]] = {}

    def read(self, call: LayerCall, score: Tensor | None) -> None:
        from scipy.stats import spearmanr

        if score is None:
            return
        slots = call.slots
        plain = call.policy.score.plain(slots, score)
        pair = [REFINEMENTS[name]().refine(slots, plain)[0] for name in ("caote", "fastcaote")]
        some = slots.competing[0].expand(pair[0].shape)
        heads = zip(*pair, some, strict=True)
        self.found[slots.index] = [float(spearmanr(a[at].cpu(), b[at].cpu()).statistic) for a, b, at in heads]


@kept
def spearman(session: Session, table: Table) -> Found:
    """CAOTE table 7: Spearman's correlation of CAOTE's and FastCAOTE's numbers of a prompt's slots, over snapkv's
    scores, by layer: means over kv heads and texts."""
    numbers: Numbers = defaultdict(list)
    (row,) = table.rows
    for ids in session.prompts():
        watcher = _Refined()
        with within(watchers=(watcher,)):
            compare.left(session.model, ids, choose("snapkv", budget=0.5, chunk_size=ids.shape[1]))
        for index, heads in sorted(watcher.found.items()):
            numbers[row, str(index + 1)].append(sum(heads) / len(heads))
    return averages(numbers)


@kept
def responses(session: Session, table: Table) -> Found:
    """LookaheadKV table 8: how alike a prompt's slots are by the model's greedy response and by a sampled one or, in
    columns without a temperature, the smaller model's: recall of the best k = min(512, an eighth of the slots), and
    Kendall's tau-b; in per cent, means over layers and kv heads."""
    numbers: Numbers = defaultdict(list)
    which, order = table.rows
    drafting = None if session.draft is None else drafted.load(session.draft)
    for at, ids in enumerate(session.prompts()):
        true = _importance(compare.full_cache(session.model, ids, NEW))
        for column, cell in table.columns.items():
            temperature = cell.get("temperature")
            writer = drafting if temperature is None else session.model
            if writer is None:
                continue
            torch.manual_seed(at)
            got = compare.full_cache(session.model, ids, NEW, temperature=temperature, writer=writer)
            k, other = max(1, min(512, ids.shape[1] // 8)), _importance(got)
            numbers[which, column].append(float(recall(other, true, k)))
            numbers[order, column].append(float(tau(other, true)))
    notes = ["The smaller model is left out: give one by --draft."] if drafting is None else []
    return averages(numbers, 100, notes)


def _importance(full: compare.FullCache) -> Tensor:
    """Return the mean attention of a response's rows to the prompt's slots, [layers, Hkv, tokens]."""
    layers = [_attention(full.tokens, layer) for layer in full.layers]
    return torch.stack([torch.stack([rows[..., : full.tokens].mean((0, 1)) for rows in layer]) for layer in layers])


@kept
def estimates(session: Session, table: Table) -> Found:
    """EDIE figure 3: of the 16 slots outside the window whose removal moves the attention output most (eq. 7), the
    share that is among the 16 best of each column's scores; in per cent, means over layers, kv heads and texts."""
    numbers: Numbers = defaultdict(list)
    for ids in session.prompts():
        exact = compare.errors(session.model, ids)
        for (row, column), cell in table.cells().items():
            chosen = choose(cell["policy"], budget=0.5).with_tokenizer(session.tokenizer)
            shares = compare.found(exact, compare.scores(session.model, ids, chosen.policy))
            numbers[row, column].append(sum(shares) / len(shares))
    return averages(numbers, 100)
