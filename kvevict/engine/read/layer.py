"""One layer in a step: its attention over [stored | new], and then the input of its cut."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ... import _ops
from ...policy.inputs import Policy
from ...policy.rows import Rows
from ...policy.seen.rows import LayerRows, Observation, Observers, rolled
from ...policy.seen.slots import KV, Heads, Slots
from ...policy.selections import Selection
from ..measure.inputs import given, rope_of
from ..measure.quantities import measured
from ..slots import archive
from ..slots.carried import carry_newest
from . import unseen
from .schedule import observes


class Attended(NamedTuple):
    """A layer that has attended with a step's T rows. A chunk's rows are stored once the slots are chosen; a decoded
    token's row is stored by the op that attends."""

    step: Any  # the kvevict.engine.read.step.Step
    module: Any  # the layer's attention module
    q: torch.Tensor  # [B, H, T, D]
    k: torch.Tensor  # [B, heads, T, D]
    v: torch.Tensor
    new: Any  # k, v [B, Hkv, T, W] as they are stored
    options: dict  # scale, softcap, sinks of attention
    out: Any = None  # [B, T, H, D]
    lse: Any = None  # [B, H, T]
    probs: Any = None  # [B, Hkv, C] attention weights of a decoded row, mean over the group; None: nothing needs them
    hidden: Any = None  # [B, T, E] the attention block's input; None: no quantity needs it
    held: Any = None  # the result of `EvictionLayer.slots`, if attention has read it

    @property
    def layer(self) -> Any:
        """The kvevict.engine.slots.cache.EvictionLayer."""
        return self.step.cache.layers[self.module.layer_idx]

    @property
    def rows_to_store(self) -> int:
        """How many of the rows the cut is to store."""
        return 0 if self.step.decoding else max(self.k.shape[2] - self.step.appended, 0)


def attend(seen: Attended) -> Attended:
    """The layer with its attention's results."""
    step, module, q, k, v, new, options = seen[:7]
    plan, layer = step.plan, seen.layer
    if step.decoding:
        columns = 0
        if plan.wants_probs:  # a recorded token's columns are those of the next ones, too
            columns = layer.longest() if step.attended is None else int(layer.storage.capacity.max())
        with step.meter.clock("decode"):
            out, lse, probs = layer.decode(q, *new, step.positions, module, columns=columns, **options)
        return seen._replace(out=out, lse=lse, probs=probs if plan.wants_probs else None)
    if layer.storage.prefix is not None and layer.storage.counts.any():  # the cut and the ops want one place
        layer.storage = layer.storage.whole()
    held = layer.slots(module)
    with step.meter.clock("attend"):
        out, lse = unseen.attend(step, q, k, v, held, layer.longest(), options)
    if step.seen[0] != seen.rows_to_store:
        layer.sequence.fix()  # slots are fewer than columns
    return seen._replace(out=out, lse=lse, held=held)


@dataclass(frozen=True, eq=False)
class LayerCall:
    """Input of an eviction from a layer: the values that the policy's parts see, and the survivors' destination."""

    step: Any  # the kvevict.engine.read.step.Step
    module: Any  # the layer's attention module
    slots: Slots
    rows: LayerRows
    new: list  # k, v [B, Hkv, S, W] of the call, as they are stored
    hidden: torch.Tensor | None = None  # [B, T, E] the attention block's input, all rows; None: no quantity needs it
    known: dict = field(default_factory=dict)  # measured quantities

    policy = property(lambda self: self.step.plan.policy)
    layer = property(lambda self: self.step.cache.layers[self.slots.index])  # the EvictionLayer
    order = property(lambda self: self.step.plan.order[self.slots.index])  # its number among the layers that evict
    select = property(lambda self: self.policy.selection(self.order))  # how it selects
    k = property(lambda self: self.slots.kv.k)  # new keys [B, heads, S, D]

    @property
    def longest(self) -> int:
        """Number of stored tokens of the call's longest row."""
        kv = self.slots.kv
        return kv.k.shape[2] - int(kv.padding.min())

    def measured(self, needs: Any) -> list:
        """The quantities that a part of the policy needs, each measured once."""
        return measured(needs, self.slots, self._observe, self.known, partial(given, self))

    def memory(self) -> Any:
        """The layer's rows' memory of the chunks before this one; None at first."""
        return self.step.read.memory.get(self.slots.index)

    def _observe(self) -> Observation:
        """The policy's rows, with their outputs if those are wanted."""
        seen = self._decoded() if self.step.decoding else self.step.rows.observe(self.rows, self.memory())
        return Observation(tuple(map(self._complete, seen.parts)))

    def _decoded(self) -> Observation:
        """While decoding: the newest row, or the remembered ones, with their outputs if those are wanted."""
        rows, none = self.rows, 0 * self.rows.first
        if self.policy.rows.newest or self.policy.carry == "sum":
            return Observation((Observers(rows.q, none, rows.end, True, rows.lse, rows.out, rows.probs),))
        q, out = self.layer.decode_queries, None
        if q.shape[3] > rows.q.shape[3]:
            q, out = q.split(rows.q.shape[3], 3)
            out = out.transpose(1, 2)
        gone = int(self.slots.protected[1].min()) < q.shape[2] > 1  # some rows' slots may be gone
        until = self.step.positions[:, -1:] if gone else None
        return Observation((Observers(q, none, rows.end, True, None, out, until=until),))

    def _complete(self, part: Observers) -> Observers:
        """Observers with their outputs, if those are wanted, and lse over the slots that they see here."""
        kv = self.slots.kv
        if part.unseen is not None:
            out, lse = unseen.observe(part, self.slots)
            return replace(part, out=out, lse=lse)
        if part.own is None and (part.out is not None or not self.step.plan.wants_outputs):
            return part
        if part.own is not None:
            k, v = (torch.cat(pair, 2) for pair in zip((kv.k, kv.v), part.own, strict=True))
            out, lse = _ops.attend(part.q, kv.stored, k, v, kv.first, **kv.options)
            return replace(part, out=out, lse=lse)
        stop = part.stop.to(torch.int32)
        out, lse = _ops.attend(part.q, kv.stored, kv.k, kv.v, kv.first, stop=stop, **kv.options)
        return replace(part, out=out, lse=lse)

    def waiting(self) -> "LayerCall":
        """A smaller copy of this call, to wait for another layer's choice: keys, values and the watched rows."""
        watched = max((watcher.rows for watcher in self.step.watchers), default=0)
        return replace(self, slots=self._unread(), rows=self._waiting(watched), known={}, hidden=None)

    def _waiting(self, watched: int) -> LayerRows:
        """The last `watched` rows alone, for watchers."""
        q = self.watched(watched).clone() if watched and not self.step.decoding else None
        return replace(self.rows, q=q, out=None, lse=None, probs=None, drafted=None, aligned=True)

    def watched(self, count: int) -> torch.Tensor:
        """[B, H, R, D] the call's last `count` rows. If a batch row's repetition ends earlier, the last rows of that
        repetition."""
        rows, policy, q = self.rows, self.policy.rows, self.rows.q
        if policy.repeats and rows.appended and not rows.aligned:
            last = rows.upload(rows.appended - policy.observing(self.step))
            q = rolled(q[:, :, -rows.appended :], last)
        return q[:, :, -count:]

    def drafting(self, rows: int) -> "LayerCall":
        """A smaller copy of this call, to wait while tokens are drafted: keys, values and the last rows."""
        last = self.rows.last(rows, self.step.plan.wants_outputs)
        return replace(self, slots=self._unread(), rows=last, known={}, hidden=None)

    def _unread(self) -> Slots:
        """The slots, without the keys and values that this call has expanded from latents."""
        kv: Any = self.slots.kv
        return replace(self.slots, kv=replace(kv, stored=self.layer.slots(self.module)))

    def stored(self) -> "LayerCall":
        """This call once its survivors are in the layer: the same slots are protected, and there are no new slots."""
        kv, rows, layer = self.slots.kv, self.rows, self.layer
        first, none = 0 * kv.first, 0 * kv.padding
        kv = replace(kv, stored=layer.slots(self.module), k=kv.k[:, :, :0], v=kv.v[:, :, :0], first=first, padding=none)
        counts, every = _counts(self.step.plan.ranks, layer, kv)
        at, none_new, ends = self.slots.index, self.slots.pos[:, :0], self.slots.protected
        slots = _slots(self.step, layer, kv, at, none_new, counts, every, ends, self.slots.bounds)
        rows = replace(rows, q=None, out=None, lse=None, columns=0, first=0 * rows.first)
        return replace(self, slots=slots, rows=rows, new=[x[:, :, :0] for x in self.new], known={}, hidden=None)


def _counts(ranks: Any, layer: Any, kv: KV) -> tuple:
    """Slots of the heads of this rank [B, Hkv] and of all ranks, the new ones included, on the host."""
    tokens = (kv.k.shape[2] - kv.padding)[:, None]
    counts = layer.counts + tokens
    return counts, counts if ranks.size == 1 else ranks.counts(layer) + tokens


def _slots(
    step: Any,
    layer: Any,
    kv: KV,
    index: int,
    pos: torch.Tensor,
    counts: np.ndarray,
    every: np.ndarray,
    protected: tuple,
    bounds: Any,
) -> Slots:
    """The slots of a layer with its new ones. counts, every: as `_counts`; protected, bounds: as in `Slots`."""
    plan, storage = step.plan, layer.storage.gathered()
    n = layer.len + (kv.k.shape[2] - kv.first)[:, None]
    prompt = layer.prompt if step.decoding and plan.policy.keep_prompt else None
    heads = Heads(plan.ranks, counts.shape[1])
    return Slots(index, heads, n, counts, every, protected, pos, storage, kv, prompt, bounds)


def decide(seen: Attended) -> None:
    """Let the step's chooser evict slots of a layer that has attended. If other layers read its slots, the choice waits
    for the last of them."""
    step, index = seen.step, seen.module.layer_idx
    if step.attended is not None:
        step.attended.append(seen._replace(step=None))
        return
    call = _due(seen)
    if call is not None and index in step.plan.last_reader:
        step.unread[index] = call
    elif call is not None:
        _choose(call)


def decide_later(step: Any, attended: list) -> None:
    """The same after all layers have attended with a decoded token's row. The next token overwrites `attended`."""
    for seen in attended:
        layer = step.cache.layers[seen.module.layer_idx]
        q, probs = seen.q, None if seen.probs is None else seen.probs[..., : layer.longest()]
        if layer.decode_queries is None:  # else they are joined in new memory
            q = q.clone()
        if layer.carry is None and probs is not None:
            probs = probs.clone()
        call = _due(seen._replace(step=step, q=q, probs=probs))
        if call is not None:
            _choose(call)


def _due(seen: Attended) -> LayerCall | None:
    """The input of the cut of a layer that has attended; None: a decoded token does not cut it. It is then noted."""
    step, layer, plan = seen.step, seen.layer, seen.step.plan
    if step.decoding:
        if plan.policy.recall and plan.policy.decode and layer.archive is not None:
            archive.append(layer, *seen.new, step.positions, step.first, step.padding)
        if plan.of_tokens is not None and observes(plan.policy, plan.order[seen.module.layer_idx], len(plan.order)):
            carry_newest(layer, plan.of_tokens.tokens(*given(seen, plan.of_tokens.needs)))
        if step.chooser is None or not step.chooser.takes(seen):
            return None
    call = layer_call(seen)
    step.meter.watch(call.new[0], call.slots.kv.padding, 1 + step.chooser.held)
    return call


def _choose(call: LayerCall) -> None:
    with call.step.meter.clock("evict"):
        call.step.chooser.layer(call)


def layer_call(seen: Attended) -> LayerCall:
    """The input of a layer's cut, once it has attended."""
    step, layer, module = seen.step, seen.layer, seen.module
    index, rows = module.layer_idx, seen.rows_to_store
    order = step.plan.order[index]
    first, padding = step.first.clamp_max(rows), np.minimum(step.padding, rows)
    k, v, *new = (x[:, :, :rows] for x in (seen.k, seen.v, *seen.new))
    appended = () if step.decoding else (seen.k[:, :, rows:], seen.v[:, :, rows:])
    held = layer.slots(module) if seen.held is None else seen.held
    kv = KV(held, k, v, first, padding, seen.options, appended)
    now = seen.q, seen.out, seen.lse, rows, first, seen.probs
    called = LayerRows(step, layer.budget, step.plan.kv_heads, rope_of(step, module), *now)
    pos, select = step.positions[:, :rows].contiguous(), step.plan.policy.selection(order)
    counts, every = _counts(step.plan.ranks, layer, kv)
    ends = protected(step.plan.policy, step.rows, select, called, every.max(1))
    slots = _slots(step, layer, kv, index, pos, counts, every, ends, step.rows.bounds(called))
    return LayerCall(step, module, slots, called, new, None if step.decoding else seen.hidden)


def protected(
    policy: Policy, observers: Rows, select: Selection, rows: LayerRows, sizes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(first, last) [B] int32: number of always kept slots at either end, together at most sizes [B], which is on the
    host. observers: the `Rows` that observe."""
    first, *lasts = *policy.score.protect(rows), observers.protect(rows), select.unfinished(rows)
    least, spared = policy.keep_first, policy.spared
    if {type(first), *map(type, lasts)} == {int}:
        before = np.minimum(max(first, least), sizes)
        return rows.upload(before), rows.upload(np.minimum(max(*lasts, spared), sizes - before))
    sizes = rows.upload(sizes)
    first, *lasts = (
        end.to(sizes.device, torch.int32) if isinstance(end, torch.Tensor) else torch.full_like(sizes, end)
        for end in (first, *lasts)
    )
    first = torch.minimum(first.clamp_min(least), sizes)
    last = torch.stack(lasts).amax(0).clamp_min(spared)
    return first.contiguous(), torch.minimum(last, sizes - first).contiguous()
