"""The idea on one screen: after a layer's attention over a chunk, score the alive slots, give every head its number,
select, and move the survivors of [stored | new] together. `call` is a `kvevict.engine.read.layer.LayerCall`."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ...ops import _ops
from ...policy.heads import HEADS, HeadBudget, above
from ...policy.heads.equal import Equal, shares
from ...policy.inputs import as_needs
from ...policy.parts import returned
from ...policy.scores import Score
from ...policy.seen.rows import Observation, Observers
from ...policy.seen.slots import Slots
from ...policy.selections import Selection
from ..measure.inputs import given
from ..measure.quantities import quantity
from ..memory import archive
from ..memory.carried import join, of_layer
from . import unseen
from .layer import LayerCall, protected


class Numbers(NamedTuple):
    """Numbers of a layer's slots."""

    carried: torch.Tensor | None  # numbers stored with the slots until the next eviction; None: nothing
    score: torch.Tensor  # [B, Hkv, C], [B, 1, C] of a score shared by all heads, [B, H, C] of one per query head


def numbers(call: LayerCall) -> Numbers:
    """The policy's score of the alive slots, joined with the stored slots' carried numbers (METHODS section 9)."""
    policy, chunk = call.policy, call.step.chunk
    with call.step.meter.clock("score"):
        score = policy.score.score(call.slots, *measured(call, policy.score.needs))
        heads = call.rows.q.shape[1] if policy.score.per_query_head else 1
        score = returned("score", policy.score, score, call.slots.shape, (heads,))
        if chunk is not None and chunk.again is not None:
            parts, index = call.step.read.numbers, call.index  # the largest over the parts so far; NaN: none yet
            score = parts[index] = torch.fmax(parts[index], score) if index in parts else score
            if not chunk.last:
                return Numbers(call.layer.carry, score)
            del parts[index]
        if policy.carry != "none":  # of each head, even where the score is one for all
            score = score.expand(-1, call.slots.n.shape[1], -1)
        carried = join(policy.carry, score, call.layer.carry)
        factors = measured(call, policy.score.factors)
    score = score if carried is None else carried
    for factor in factors:
        score = score * factor
    return Numbers(carried, score)


def measured(call: LayerCall, needs: Any) -> list:
    """The quantities that a part of the policy needs, each measured once."""
    named, known = as_needs(needs), call.known
    for need in named:
        if need not in known:
            wanted = quantity(need)
            if wanted.observes and "observation" not in known:
                known["observation"] = _observation(call)
            inputs = given(call, wanted.needs) if wanted.needs else ()
            known[need] = wanted.measure(call.slots, known.get("observation"), *inputs)
    return [known[need] for need in named]


def _observation(call: LayerCall) -> Observation:
    """The policy's rows, with their outputs if those are wanted."""
    if call.step.decoding:
        seen = _decoded(call)
    else:
        seen = call.step.rows.observe(call.rows, call.step.read.memory.get(call.index))
    if call.columns < call.rows.columns:  # the rows' own slots are stored already
        seen = Observation(tuple(replace(part, stop=part.stop.clamp_max(call.columns)) for part in seen.parts))
    return Observation(tuple(_complete(call, part) for part in seen.parts))


def _decoded(call: LayerCall) -> Observation:
    """While decoding: the newest row, or the remembered ones, with their outputs if those are wanted."""
    rows, none = call.rows, 0 * call.rows.first
    if call.policy.rows.newest or call.policy.carry == "sum":
        return Observation((Observers(rows.q, none, rows.end, True, rows.lse, rows.out, call.probs),))
    q: Any = call.layer.decode_queries
    out = None
    if q.shape[3] > rows.q.shape[3]:
        q, out = q.split(rows.q.shape[3], 3)
        out = out.transpose(1, 2)
    gone = int(call.slots.protected[1].min()) < q.shape[2] > 1  # some rows' slots may be gone
    until = call.step.positions[:, -1:] if gone else None
    return Observation((Observers(q, none, rows.end, True, None, out, until=until),))


def _complete(call: LayerCall, part: Observers) -> Observers:
    """Observers with their outputs, if those are wanted, and lse over the slots that they see here."""
    kv = call.slots.kv
    if part.unseen is not None:
        out, lse = unseen.observe(part, call.slots)
    elif part.own is not None:
        k, v = (torch.cat(pair, 2) for pair in zip((kv.k, kv.v), part.own, strict=True))
        out, lse = _ops.attend(part.q, kv.stored, k, v, kv.first, **kv.options)
    elif part.out is not None or not call.step.plan.wants_outputs:
        return part
    else:
        out, lse = _ops.attend(part.q, kv.stored, kv.k, kv.v, kv.first, stop=part.stop.to(torch.int32), **kv.options)
    return replace(part, out=out, lse=lse)


def ranked(call: LayerCall, score: torch.Tensor) -> torch.Tensor:
    """Rank values [B, Hkv, C]: scores that are pooled, refined and, if the policy selects runs, of runs. Slots in
    `bounds.kept` are +inf, slots beyond `bounds.limited` -inf."""
    slots, ranks = call.slots, _ranked(call, score)
    if slots.bounds.limited is not None:
        ranks = ranks.masked_fill(slots.beyond(ranks), -torch.inf)
    return ranks if slots.bounds.kept is None else ranks.masked_fill(slots.between, torch.inf)


def _ranked(call: LayerCall, score: torch.Tensor) -> torch.Tensor:
    policy, slots, select = call.policy, call.slots, call.select
    pooled = returned("score", policy.score, policy.score.pooled(slots, score), slots.shape, (1,))
    if policy.refine.refines:  # protected slots take part, by their plain scores
        pooled = torch.where(slots.competing, pooled, policy.score.plain(slots, score))
    with call.step.meter.clock("score"):
        score = returned("refine", policy.refine, policy.refine.refine(slots, pooled), slots.shape, (1,))
    score = score.expand(-1, slots.n.shape[1], -1)
    with call.step.meter.clock("select"):
        if not select.shared:
            return returned("select", select, select.rank(slots, score), slots.shape).contiguous()
        ranks, every = slots.heads.ranks, slots.all_ranks(policy.shared)
        return ranks.mine(returned("select", select, select.rank(every, ranks.gather(score)), every.shape)).contiguous()


class Choice(NamedTuple):
    """The surviving slots of a layer."""

    index: torch.Tensor  # type: ignore[assignment]  # [B, Hkv, K] ascending; a tuple has a method of that name
    keep: np.ndarray  # [B, Hkv] slot count of each head, on the host
    all_ranks: np.ndarray  # the same of all ranks' heads


def choose(
    call: LayerCall, score: torch.Tensor, slots: np.ndarray, final: bool = True, bar: np.ndarray | None = None
) -> Choice:
    """Choose the surviving slots: the best slots[b] by `ranked` score, dropping any below bar[b]. With final=False keep
    a few spare, so that a later, smaller choice equals one made from all slots."""
    heads, select, ranks = call.policy.heads, call.select, call.slots.heads.ranks
    wanted = _ops.upload(slots, call.slots.device)
    with call.step.meter.clock("select"):
        counts = _equal(call, slots) if bar is None else None
        if counts is not None:
            return take(call, score, _ops.upload(counts, call.slots.device, torch.int32), counts)
        whole = call.slots.all_ranks(call.policy.shared)
        every = ranks.gather(score, whole.columns) if heads.ragged or select.spares else score
        if final:
            keep = heads.keep(whole, every, wanted, select.run)
            keep = returned("heads", heads, keep, whole.n.shape, dtype=torch.int32)
            keep = within(select.trim_to_runs(whole, every, keep), whole, every, bar)
        else:
            keep = heads.reserve(whole, every, wanted, select.run)
        counts, least = np.array(torch.stack([keep, whole.least]).tolist())  # the host waits for the device once
        _check(heads, counts, least, whole, slots if final else whole.alive)
        return take(call, score, keep, counts)


def _check(heads: HeadBudget, counts: np.ndarray, least: np.ndarray, slots: Slots, most: np.ndarray) -> None:
    """Raise ValueError unless a head budget keeps counts [B, Hkv] slots, the `least` protected ones or more, and of a
    row the `most` [B] or fewer, unless more are protected."""
    bad = ((counts < least) | (counts > slots.all_counts)).any(1) | (counts.sum(1) > np.maximum(most, least.sum(1)))
    if bad.any():
        b = int(bad.argmax())
        raise ValueError(
            f"head budget {HEADS.name_or_class(heads)} keeps {counts[b].tolist()} slots of a layer's heads: return at "
            f"least {least[b].tolist()}, at most {slots.all_counts[b].tolist()}, and a sum of {most[b]}"
        )


def _equal(call: LayerCall, slots: np.ndarray) -> Any:
    """Number of slots per head, found on the host, if all heads can keep equally many; None: the device has to say."""
    policy, counts = call.policy, call.slots.all_counts
    equal = _inherits(policy.heads, Equal.keep, Equal.reserve) and _inherits(call.select, Selection.trim_to_runs)
    if not equal or call.slots.prompt is not None:
        return None
    keep = shares(slots, np.arange(counts.shape[1]))
    return keep if ((np.minimum(counts, policy.protected) <= keep) & (keep <= counts)).all() else None


def within(keep: torch.Tensor, slots: Slots, score: torch.Tensor, bar: np.ndarray | None) -> torch.Tensor:
    """Limit keep [B, Hkv] to the slots that reach the bar [B] of a threshold; bar None: no threshold."""
    if bar is None:
        return keep
    return torch.minimum(keep, above(slots, score, _ops.upload(bar, slots.device, torch.float32)).to(keep.device))


def take(call: LayerCall, score: torch.Tensor, keep: torch.Tensor, counts: np.ndarray | None = None) -> Choice:
    """The best slots of each head by `ranked` scores, keep [B, heads of all ranks] of them; counts: keep on the host,
    if known there."""
    ranks, refine = call.slots.heads.ranks, call.policy.refine
    counts = np.array(keep.tolist()) if counts is None else counts
    keep, mine, slots = ranks.mine(keep).contiguous(), ranks.mine(counts), call.slots
    if refine.picks:
        score = refine.pick(slots, score, keep, *measured(call, refine.picks_by)).contiguous()
    (first, last), n, shape = slots.protected, slots.n, slots.n.shape
    if slots.prompt is not None:  # heads differ in their first slots: each becomes a batch row
        score, n, keep = (x.flatten(0, 1).unsqueeze(1) for x in (score, n, keep))
        first, last = slots.first.flatten(), last.repeat_interleave(shape[1])
    index = _ops.select(score, n, keep, first, last, int(mine.max()))
    return Choice(index.view(*shape, -1), mine, counts)


def store(call: LayerCall, choice: Choice | None = None, carried: torch.Tensor | None = None) -> None:
    """Put the surviving slots into the layer: those of a `Choice`, or all."""
    layer, slots = call.layer, call.slots
    if choice is not None:
        for watcher in call.step.watchers:
            watcher.cut(call, choice)
    with call.step.meter.clock("compact"):
        if choice is not None:
            index = choice.index.to(slots.device)  # another layer may have chosen, on its device
            layer.keep(index, choice.keep, *call.to_store, slots.pos, slots.kv.first)
            layer.prompt = slots.prompt  # the prompt was kept
            slots.heads.ranks.note(layer, choice.all_ranks)
            carried = None if carried is None else kept(carried, index, torch.nan)
        elif call.columns:
            layer.append(*call.to_store, slots.pos, slots.kv.first, call.padding)
        layer.carry = of_layer(carried, layer)
        if call.policy.recall and call.columns:
            read = call.step.read
            expected = 0 if read is None else np.array(read.seen)[:, None]
            archive.append(layer, *call.to_store, slots.pos, slots.kv.first, call.padding, expected=expected)
    if not call.step.decoding:
        call.step.meter.live[call.index] = layer.live_bytes()


def kept(x: torch.Tensor, index: torch.Tensor, fill: float = 0) -> torch.Tensor:
    """Take x [B, Hkv, C] at the slots index [B, Hkv, K]; `fill` where the index is -1."""
    return x.expand(-1, index.shape[1], -1).gather(2, index.clamp_min(0).long()).masked_fill(index < 0, fill)


def drop(call: LayerCall, slots: np.ndarray, sums: torch.Tensor) -> bool:
    """Cut a layer after a decoded token to slots [B] by sums [B, Hkv, C] of its slots, with the result of a chooser's
    way but sooner. False, and nothing is done, unless each head drops its smallest sums regardless of other heads."""
    step, layer, policy = call.step, call.layer, call.policy
    counts = layer.counts
    if not _drops_smallest(policy) or step.plan.ranks.size > 1:
        return False
    keep = shares(slots, np.arange(counts.shape[1]))
    if (keep > counts).any():
        return False
    with step.meter.clock("evict"):
        first, last = protected(policy, step.rows, policy.select, call.rows, counts.max(1))
        wanted = _ops.upload(keep, sums.device, torch.int32)
        index = _ops.select(sums.contiguous(), layer.len, wanted, first, last, int(keep.max()))
        layer.keep(index, keep)
        level = keep.min() == keep.max()  # the index has no -1
        layer.carry = sums.gather(2, index.long()) if level else kept(sums, index, torch.nan)
    return True


def _drops_smallest(policy: Any) -> bool:
    apart = policy.n_reuse == 1 and policy.warmup_layers in (None, 1) and not policy.keep_prompt
    equal = _inherits(policy.heads, Equal.keep) and _inherits(policy.select, Selection.rank, Selection.trim_to_runs)
    plain = _inherits(policy.score, Score.pooled) and not policy.score.factors and not policy.refine.refines
    return apart and equal and plain and not policy.select.shared and not policy.select_by_layer


def _inherits(part: Any, *methods: Any) -> bool:
    """True if a part of a policy has these methods of a base class, whose results are known without a call."""
    return all(getattr(type(part), method.__name__, None) is method for method in methods)
