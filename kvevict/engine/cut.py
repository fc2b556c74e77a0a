"""The cut of a layer: score the alive slots, pool and refine the scores, select the best slots. The functions here
depend on their arguments only, not on a running model call. The engine runs the stages of `cut` one by one
(read/choosers.py), as a layer may have to wait for other layers between two stages."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ..ops import _ops
from ..policy.heads import HEADS, Equal, above, shares
from ..policy.inputs import LayerRows, Need, Observation, Observers, Slots
from ..policy.parts import returned
from ..policy.policy import Policy
from ..policy.rows import Rows
from ..policy.scores import Score
from ..policy.selections import Selection
from .measure import unseen
from .measure.quantities import measured, of_policy
from .memory.carried import join, kept


class Choice(NamedTuple):
    """The slots of a layer that stay after a cut."""

    # [B, Hkv, K] indices of the slots that stay, ascending, -1 after a head's last one
    index: torch.Tensor  # type: ignore[assignment]  # a tuple has a method `index`
    keep: np.ndarray  # [B, Hkv] number of slots that stay in each of this rank's heads, on the host
    all_ranks: np.ndarray  # [B, heads] number of slots that stay in each head of all ranks (tensor parallel)
    carried: torch.Tensor | None = None  # [B, Hkv, K] numbers that these slots carry to the next cut; set by `cut`


def cut(
    policy: Policy,
    slots: Slots,
    observation: Observation | None,
    keep: np.ndarray,
    *,
    order: int = 0,
    carried: torch.Tensor | None = None,
    given: Mapping[Need, Any] | None = None,
    bar: np.ndarray | None = None,
) -> Choice:
    """Choose the slots of a layer that stay: keep[b] slots over all heads of batch row b, or all if the row has fewer.

    observation   the rows that observe; None: the policy needs no rows (streaming, knorm)
    order         the layer's number among the layers that evict, on which the policy's selection may depend
    carried       fp32 [B, Hkv, *] numbers that stored slots carry (`Choice.carried` of the cut before); NaN: a slot
                  without a number
    given         inputs that quantities need besides slots and rows, by `Need` (measure/inputs.py)
    bar           [B] the lowest score with which a slot may stay; None: the policy has no threshold
    """
    outputs = any(each.outputs for each in of_policy(policy))
    seen = None if observation is None else completed(observation, slots, outputs)
    measure = partial(measured, slots=slots, observation=seen, given=given or {}, known={})
    query_heads = 1 if seen is None else seen.parts[0].q.shape[1]
    score = scored(policy, slots, measure(policy.score.needs), query_heads)
    carried, score = joined(policy, slots, score, carried, measure(policy.score.factors))
    ranks = ranked(policy, slots, score, order)
    choice = chosen(policy, slots, ranks, keep, measure(policy.refine.picks_by), order=order, bar=bar)
    return choice if carried is None else choice._replace(carried=kept(carried, choice.index, torch.nan))


def completed(observation: Observation, slots: Slots, outputs: bool) -> Observation:
    """Return the observers with the attention output and the log-sum-exp (lse) of each row over the slots that the row
    sees. Both are computed for rows that also see their own keys, and for rows to which some slots are hidden; for all
    other rows only with `outputs`, if they have no outputs yet."""
    return Observation(tuple(_completed(part, slots, outputs) for part in observation.parts))


def _completed(part: Observers, slots: Slots, outputs: bool) -> Observers:
    kv = slots.kv
    if part.unseen is not None:
        out, lse = unseen.observe(part, slots)
    elif part.own is not None:
        k, v = (torch.cat(pair, 2) for pair in zip((kv.k, kv.v), part.own, strict=True))
        out, lse = _ops.attend(part.q, kv.stored, k, v, kv.first, **kv.options)
    elif part.out is not None or not outputs:
        return part
    else:
        out, lse = _ops.attend(part.q, kv.stored, kv.k, kv.v, kv.first, stop=part.stop.to(torch.int32), **kv.options)
    return replace(part, out=out, lse=lse)


def scored(policy: Policy, slots: Slots, quantities: list, query_heads: int) -> torch.Tensor:
    """The policy's score of the alive slots: [B, Hkv, C] per kv head, [B, 1, C] if all heads share it, or
    [B, query_heads, C] per query head."""
    heads = query_heads if policy.score.per_query_head else 1
    return returned("score", policy.score, policy.score.score(slots, *quantities), slots.shape, (heads,))


def joined(
    policy: Policy, slots: Slots, score: torch.Tensor, carried: torch.Tensor | None, factors: list
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Join the score with the numbers that stored slots carry (METHODS section 9). Returns the joined numbers, which
    slots carry from now on (None if the policy's slots carry none), and the score that ranks the slots: the joined
    numbers, or without them the given score, times each of the `factors`."""
    if policy.carry != "none":  # each head's slots carry their own numbers, even if all heads share one score
        score = score.expand(-1, slots.n.shape[1], -1)
    carried = join(policy.carry, score, carried)  # type: ignore[arg-type]  # a built policy's `carry` is not None
    score = score if carried is None else carried
    for factor in factors:
        score = score * factor
    return carried, score


def ranked(policy: Policy, slots: Slots, score: torch.Tensor, order: int = 0) -> torch.Tensor:
    """The values [B, Hkv, C] that rank the slots: pooled and refined scores; if the policy selects runs of slots, one
    value for all slots of a run. Slots within `bounds.kept` get +inf, slots beyond the limit of `bounds.limited`
    -inf."""
    refine, select = policy.refine, policy.selection(order)
    pooled = returned("score", policy.score, policy.score.pooled(slots, score), slots.shape, (1,))
    if refine.refines:  # a refinement gets the protected slots' scores without pooling
        pooled = torch.where(slots.competing, pooled, policy.score.plain(slots, score))
    score = returned("refine", refine, refine.refine(slots, pooled), slots.shape, (1,))
    score = score.expand(-1, slots.n.shape[1], -1)
    if select.shared:
        heads, every = slots.heads.ranks, slots.all_ranks(policy.shared)
        ranks = returned("select", select, select.rank(every, heads.gather(score)), every.shape)
        ranks = heads.mine(ranks).contiguous()
    else:
        ranks = returned("select", select, select.rank(slots, score), slots.shape).contiguous()
    if slots.bounds.limited is not None:
        ranks = ranks.masked_fill(slots.beyond(ranks), -torch.inf)
    return ranks if slots.bounds.kept is None else ranks.masked_fill(slots.between, torch.inf)


def chosen(
    policy: Policy,
    slots: Slots,
    ranks: torch.Tensor,
    keep: np.ndarray,
    picks: list,
    *,
    order: int = 0,
    bar: np.ndarray | None = None,
    final: bool = True,
) -> Choice:
    """Choose the best keep[b] slots of batch row b by the values `ranks` (result of `ranked`), except slots below
    bar[b]. With final=False keep a few more slots, so that a later, smaller choice among them equals the choice among
    all slots. picks: quantities for `Refinement.pick`."""
    heads, select, keep = policy.heads, policy.selection(order), np.minimum(keep, slots.alive)
    counts = _equal(policy, slots, select, keep) if bar is None else None
    if counts is not None:
        return taken(policy, slots, ranks, _ops.upload(counts, slots.device, torch.int32), picks, counts)
    whole, wanted = slots.all_ranks(policy.shared), _ops.upload(keep, slots.device)
    every = slots.heads.gather(ranks, whole.columns) if heads.ragged or select.spares else ranks
    if final:
        each = heads.keep(whole, every, wanted, select.run)
        each = returned("heads", heads, each, whole.n.shape, dtype=torch.int32)
        each = _within(select.trim_to_runs(whole, every, each), whole, every, bar)
    else:
        each = heads.reserve(whole, every, wanted, select.run)
    counts, least = np.array(torch.stack([each, whole.least]).tolist())  # the host waits for the device here only
    _check(policy, counts, least, whole, keep if final else whole.alive)
    return taken(policy, slots, ranks, each, picks, counts)


def taken(
    policy: Policy, slots: Slots, ranks: torch.Tensor, keep: torch.Tensor, picks: list, counts: np.ndarray | None = None
) -> Choice:
    """Choose the best slots of each head by the values `ranks` (result of `ranked`). keep: the number of slots that
    each head keeps, [B, heads of all ranks]; counts: `keep` on the host."""
    heads = slots.heads.ranks
    counts = np.array(keep.tolist()) if counts is None else counts
    keep, mine = heads.mine(keep).contiguous(), heads.mine(counts)
    if policy.refine.picks:
        ranks = policy.refine.pick(slots, ranks, keep, *picks).contiguous()
    (first, last), n, shape = slots.protected, slots.n, slots.n.shape
    # `select` takes one number of protected slots per batch row: if these numbers differ by head, heads become rows
    if slots.prompt is not None:
        ranks, n, keep = (x.flatten(0, 1).unsqueeze(1) for x in (ranks, n, keep))
        first, last = slots.first.flatten(), last.repeat_interleave(shape[1])
    index = _ops.select(ranks, n, keep, first, last, int(mine.max()))
    return Choice(index.view(*shape, -1), mine, counts)


def of_layers(
    policy: Policy, layers: list[Slots], ranks: list[torch.Tensor], keep: np.ndarray, bar: np.ndarray | None = None
) -> list[torch.Tensor]:
    """Split keep[b] slots of batch row b over the heads of all layers by one ranking. Returns, for each layer, the
    number of slots that each head keeps: [B, heads of all ranks]."""
    whole = [slots.all_ranks(policy.shared) for slots in layers]
    every = [slots.heads.gather(each, one.columns) for slots, each, one in zip(layers, ranks, whole, strict=True)]
    split = policy.layers.keep(whole, every, _ops.upload(keep, layers[0].device))
    return [_within(*each, bar) for each in zip(split, whole, every, strict=True)]


def by_sums(policy: Policy, counts: np.ndarray, keep: np.ndarray) -> np.ndarray | None:
    """The number of slots [B, Hkv] that each head keeps, if a cut only drops the slots with each head's smallest
    carried numbers. None: the policy does more than that, so all stages of `cut` are needed.

    counts   [B, Hkv] alive slots of each head
    keep     [B] slots that all heads of a batch row keep together
    """
    apart = policy.n_reuse == 1 and policy.warmup_layers in (None, 1) and not policy.keep_prompt
    equal = _inherits(policy.heads, Equal.keep) and _inherits(policy.select, Selection.rank, Selection.trim_to_runs)
    refines = policy.refine.refines or policy.refine.picks
    plain = _inherits(policy.score, Score.pooled) and not policy.score.factors and not refines
    if not (apart and equal and plain) or policy.select.shared or policy.select_by_layer:
        return None
    each = shares(keep, np.arange(counts.shape[1]))
    return None if (each > counts).any() else each


def protected(
    policy: Policy, observers: Rows, order: int, rows: LayerRows, sizes: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """(number of first slots, number of last slots) that always stay: int32 [B] each, together at most sizes [B], which
    are on the host."""
    first, *lasts = *policy.score.protect(rows), observers.protect(rows), policy.selection(order).unfinished(rows)
    least, spared = policy.keep_first, policy.spared
    if {type(first), *map(type, lasts)} == {int}:
        before = np.minimum(max(first, least), sizes)
        return rows.upload(before), rows.upload(np.minimum(max(*lasts, spared), sizes - before))
    most = rows.upload(sizes)
    first, *lasts = (
        end.to(most.device, torch.int32) if isinstance(end, torch.Tensor) else torch.full_like(most, end)
        for end in (first, *lasts)
    )
    first = torch.minimum(first.clamp_min(least), most)
    last = torch.stack(lasts).amax(0).clamp_min(spared)
    return first.contiguous(), torch.minimum(last, most - first).contiguous()


def _check(policy: Policy, counts: np.ndarray, least: np.ndarray, slots: Slots, most: np.ndarray) -> None:
    """Raise ValueError unless a head budget's counts [B, Hkv] are valid: for each head at least its protected slots
    `least` and at most its alive slots, and for each batch row a sum of at most most[b], or of at most the row's
    protected slots where these exceed most[b]."""
    bad = ((counts < least) | (counts > slots.all_counts)).any(1) | (counts.sum(1) > np.maximum(most, least.sum(1)))
    if bad.any():
        b = int(bad.argmax())
        raise ValueError(
            f"head budget {HEADS.name_or_class(policy.heads)} keeps {counts[b].tolist()} slots of a layer's heads: "
            f"return at least {least[b].tolist()}, at most {slots.all_counts[b].tolist()}, and a sum of {most[b]}"
        )


def _equal(policy: Policy, slots: Slots, select: Selection, keep: np.ndarray) -> np.ndarray | None:
    """The number of slots [B, heads] that each head keeps, on the host, if the policy gives all heads equally many;
    None: the number depends on scores, which are on the device."""
    if not is_equal(policy, select) or slots.prompt is not None:
        return None
    counts = slots.all_counts
    each = shares(keep, np.arange(counts.shape[1]))
    return each if ((np.minimum(counts, policy.protected) <= each) & (each <= counts)).all() else None


def is_equal(policy: Policy, select: Selection) -> bool:
    """Whether the policy gives all heads equally many slots whatever the scores. select: `policy.selection` of the
    layer, which may drop slots that are not whole runs."""
    return _inherits(policy.heads, Equal.keep, Equal.reserve) and _inherits(select, Selection.trim_to_runs)


def _within(keep: torch.Tensor, slots: Slots, ranks: torch.Tensor, bar: np.ndarray | None) -> torch.Tensor:
    """Limit each head's number of slots keep [B, Hkv] to its slots whose `ranks` reach bar [B]; bar None: no limit."""
    if bar is None:
        return keep
    return torch.minimum(keep, above(slots, ranks, _ops.upload(bar, slots.device, torch.float32)).to(keep.device))


def _inherits(part: object, *methods: Callable) -> bool:
    """Whether a part of a policy (its score, its selection, ..) inherits these methods of its base class unchanged, so
    that their results are known without a call."""
    return all(getattr(type(part), method.__name__, None) is method for method in methods)
