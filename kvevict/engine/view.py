"""What a score, its rows, a budget and a selection see of one layer."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from .. import _ops, families
from . import apart, host, ranks, rerotate


@dataclass
class Observers:
    """R queries of a layer that observe its alive slots."""

    q: torch.Tensor  # [B, H, R, D]
    skip: torch.Tensor  # [B] rows before this one do not count
    stop: torch.Tensor  # [B] new columns from this one on are not seen
    causal: bool  # they are the last R alive slots' own rows, and see what was before; else all see all
    lse: torch.Tensor | None = None  # [B, H, R] over what they saw; None: over the slots that are seen here
    out: torch.Tensor | None = None  # [B, R, H, D] their attention outputs; None: over the slots that are seen here
    probs: torch.Tensor | None = None  # [B, Hkv, C] what a single row pays, mean over the group, where it is known


class View:
    """One layer after its attention over a chunk or a decoded token: n[b,h] alive slots of head (b, h), those stored
    before first, then the new ones, none of them padding. C is the largest n.

    For scores: `attention`, `moments`, `peak` and `output_error` of the observing rows, `row_count`, `norm`,
    `per_head`, `positions`, `carry`, and `state`, a dict of the layer's own that lasts while a prompt is read.
    For rows, besides: `chunk_rows`, `along_rows`, `later_rows`, `drafted_rows`, the tensors q [B, H, T, D] of a call's
    rows (those that read along come last), k, v [B, Hkv, S, D] and pos [B, S] of its S new columns, first [B] of which
    are padding, and `rotate`.
    For budgets and selections: `n`, `columns`, `competing`, `least`, `protected`, `budget`, `positions`.
    Where a model is split over ranks (tensor parallel) a view has the heads of this rank, whose numbers are `heads`;
    what compares heads takes `gather`. Budgets and selections that do see the view `whole`.
    """

    def __init__(self, step, layer, index, module, q, k, v, out, lse, options, probs=None, new=None):
        self.step, self.layer, self.index, self.module = step, layer, index, module
        self.q, self.out, self.lse, self.probs, self.options = q, out, lse, probs, options
        stored = max(k.shape[2] - step.transient, 0)  # none of what was stored before
        self.k, self.v, self.pos = k[:, :, :stored], v[:, :, :stored], step.positions[:, :stored].contiguous()
        self.new = [x[:, :, :stored] for x in new or (k, v)]  # as they are stored: [B, Hkv, S, W]
        self.first = step.first.clamp_max(stored)
        self.padding = np.minimum(step.padding, stored)  # first, on the host
        self.n = layer.len + (stored - self.first)[:, None]
        self.counts = layer.counts + (stored - self.padding)[:, None]  # n, on the host
        self.columns = int(self.counts.max()) if self.counts.size else 0  # C
        self.ranks = step.patch.ranks
        self.every = self.counts  # of all ranks' heads
        if self.ranks.size > 1:
            self.every = self.ranks.counts(layer) + (stored - self.padding)[:, None]
        self.device = k.device
        self.order = step.patch.order[index]  # among the layers that evict
        self.select = step.patch.policy.selection(self.order)
        self.carry, self._memo = None, {}

    # -- the call ---------------------------------------------------------------------------------------------------

    policy = property(lambda self: self.step.patch.policy)
    decoding = property(lambda self: self.step.decoding)
    last = property(lambda self: self.step.chunk is not None and self.step.chunk.last)  # the chunk ends the prompt
    state = property(lambda self: self.step.read.state.setdefault(self.index, {}))
    prompt_tokens = property(lambda self: self.step.read.tokens)  # int [B] valid tokens of the prompt, on the host
    reads_along = property(lambda self: self.step.read.along is not None)  # something does in this read
    call_positions = property(lambda self: self.step.positions)  # [B, T], those that read along included

    def upload(self, numbers):
        """The host's numbers [B] as an int32 tensor on the layer's device."""
        return host.upload(numbers, self.device, torch.int32)

    @cached_property
    def slots(self):
        """What the ops read of the layer's stored slots: `k`, `v` [N, D], `pos` [N], `offset`, `len`."""
        return self.layer.slots(self.module)

    @property
    def budget(self):
        """[B] int32 slots per kv head on average."""
        return self.upload(self.layer.budget // self.every.shape[1])

    def rotate(self, queries, position_from, position_to):
        """Queries [B, H, p, D] turned by the model's own rotary angle between two positions [B]. Of rows that say that
        they do so: `turns`."""
        turns = self.step.patch.turns
        if self.index not in turns:
            raise ValueError("rows that turn queries say so, for models where that is not possible: turns = True")
        if not turns[self.index]:
            return queries
        return families.rotate(self.step.decoder, self.module, queries, position_from, position_to)

    # -- slots ------------------------------------------------------------------------------------------------------

    @cached_property
    def protected(self):
        """(first, last) [B] int32: always kept slots at either end, at most what the budget leaves."""
        sizes, kept = self.upload(self.every.max(1)), (0, 0, 0)
        if self.policy.refine.protect:
            kept = *self.policy.score.protect(self), self.policy.rows.protect(self)
        first, *lasts = (
            end.to(self.device, torch.int32) if isinstance(end, torch.Tensor) else torch.full_like(sizes, end)
            for end in (*kept, self.select.tail(self))
        )
        first, last = torch.minimum(first.clamp_min(self.policy.keep_first), sizes), torch.stack(lasts).amax(0)
        return first.contiguous(), torch.minimum(last, sizes - first).contiguous()

    @cached_property
    def least(self):
        """int32 [B, Hkv] protected slots that each head has."""
        first, last = self.protected
        return torch.minimum(self.n, (first + last)[:, None])

    @cached_property
    def competing(self):
        """Whether a slot exists and is not protected: [B, Hkv, C]."""
        first, last = self.protected
        column = torch.arange(self.columns, device=self.device)
        return (column >= first[:, None, None]) & (column < (self.n - last[:, None])[..., None])

    @property
    def whole(self):
        """This view with the heads of all ranks, as budgets and selections see it."""
        return self if self.ranks.size == 1 else self._whole

    @cached_property
    def _whole(self):
        return ranks.whole(self)

    @property
    def heads(self):
        """int64 [Hkv] the numbers of these heads among the layer's."""
        own = self.n.shape[1]
        return self.ranks.rank * own + torch.arange(own, device=self.device)

    def gather(self, x, columns=None):
        """x [B, Hkv, ..] of all ranks' heads; columns: of x [B, Hkv, C], filled up with 0: `whole.columns`."""
        return self.ranks.gather(x, columns)

    def positions(self):
        """Positions of the alive slots [B, Hkv, C] int32, -1 past a head's end."""
        layer, column = self.layer, torch.arange(self.columns, device=self.device)
        table = torch.cat([layer.pos, self.pos.flatten(), layer.pos.new_full((1,), -1)])
        row = torch.arange(self.n.shape[0], device=self.device)[:, None, None]
        new = len(layer.pos) + row * self.pos.shape[1] + self.first[:, None, None] + column - layer.len[..., None]
        place = torch.where(column < layer.len[..., None], layer.offset[..., None] + column, new)
        return table[place.masked_fill(column >= self.n[..., None], -1)]

    def norm(self, of, p):
        """The p-norm of every alive slot's key ("k") or value ("v"): [B, Hkv, C]."""
        slots, x = self.slots, getattr(self, of)
        rows = getattr(slots, of), slots.offset, slots.len, x, self.first, self._all
        return self._one_choice(_ops.norm(*rows, p=p, columns=self.columns))

    def per_head(self, function):
        """function(keys [n, D]) -> [n], for every head's alive keys: [B, Hkv, C]."""
        out = torch.zeros(*self.slots.len.shape, self.columns, device=self.device)
        for b, h, rows in self.slots.segments():
            keys = torch.cat([self.slots.k[rows], self.k[b, h, self.padding[b] :]])
            out[b, h, : len(keys)] = function(keys)
        return self._one_choice(out)

    def refine(self, score, fast, squared):
        """CAOTE of a score [B, Hkv, C], as in `kvevict._ops.refine`."""
        slots, options = self.slots, dict(fast=fast, squared=squared)
        rows = slots.v, slots.offset, slots.len, self.v, self.first, self._all
        with self.step.meter.clock("score"):
            return self._one_choice(_ops.refine(*rows, self._of_heads(score), **options))

    def _of_heads(self, x):
        """What is one kv head's, for all heads where latents are stored."""
        return x if x.shape[1] == self.slots.len.shape[1] else x.expand(-1, self.slots.len.shape[1], -1).contiguous()

    def _one_choice(self, x):
        """Numbers of heads [B, Hkv, C]; of latents, which all heads share, their mean."""
        return x if x.shape[1] == self.n.shape[1] else x.mean(1, keepdim=True)

    # -- rows that observe ------------------------------------------------------------------------------------------

    def chunk_rows(self, count=None, at_most=None) -> Observers:
        """The last `count` rows (None: all) of this chunk, at_most [B] of each batch row."""
        stop = self.q.shape[2] - self.step.transient
        start = stop - (stop if count is None else min(count, stop))
        skip = torch.clamp_min(self.first - (self.k.shape[2] - (stop - start)), 0)
        if at_most is not None:
            skip = torch.maximum(skip, stop - start - at_most)
        out = None if self.out is None else self.out[:, start:stop]
        return Observers(self.q[:, :, start:stop], skip, self._all, True, self.lse[:, :, start:stop], out)

    def along_rows(self, own=True, count=None) -> Observers:
        """The last `count` rows (None: all) that read along behind the chunk; own: their softmax spans the slots of the
        rows before them too."""
        rows, none = count or self.step.transient, 0 * self.first
        q = self.q[:, :, -rows:]
        if not own:
            return Observers(q, none, self._all, False)
        return Observers(q, none, self._all, False, self.lse[:, :, -rows:], self.out[:, -rows:])

    def later_rows(self, queries, skip, unseen) -> Observers:
        """Queries [B, H, R, D] later than all slots, of which they do not see the last `unseen` (a number or [B])."""
        stop = torch.maximum(self.k.shape[2] - unseen + 0 * self.first, self.first)
        return Observers(queries, skip, stop, False)

    def drafted_rows(self, keys: bool) -> Observers:
        """The rows drafted behind the prompt, in `state`; with `keys` their softmax spans each other's slots too."""
        q, k, v = self.state["drafted"]
        if not keys:
            return self.later_rows(q, 0 * self.first, 0)
        slots, k, v = self.slots, torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        out, lse = _ops.attend(q, slots.k, slots.v, slots.offset, slots.len, k, v, self.first, **self.options)
        return Observers(q, 0 * self.first, self._all, False, lse, out)

    def _decoded_rows(self) -> Observers:
        """While decoding: the newest row, or the remembered ones, with their outputs if those are wanted."""
        none = 0 * self.first
        if self.policy.rows.newest:
            return Observers(self.q, none, self._all, True, self.lse, self.out, self.probs)
        q, out = self.layer.recent, None
        if q.shape[3] > self.q.shape[3]:
            q, out = q.split(self.q.shape[3], 3)
            out = out.transpose(1, 2)
        return Observers(q, none, self._all, True, None, out)

    @cached_property
    def observers(self) -> list:
        """The `Observers` of the policy's rows, with their outputs if those are wanted."""
        parts = [self._decoded_rows()] if self.decoding else self.policy.rows.observers(self)
        for part in parts:
            if part.out is None and self.policy.wants_outputs:
                part.out, part.lse = self._attended(part)
        return parts

    def _attended(self, part):
        """(out [B, R, H, D], lse [B, H, R]) of observers that are not causal, over the slots that they see here."""
        slots = self.slots
        rows = slots.k, slots.v, slots.offset, slots.len
        with self.step.meter.clock("score"), rerotate.in_cache(self.step, self.module, slots):
            return _ops.attend(
                part.q, *rows, self.k, self.v, self.first, stop=part.stop.to(torch.int32), **self.options
            )

    @property
    def row_count(self):
        """int64 [B] how many rows observe."""
        return sum(part.q.shape[2] - part.skip for part in self.observers).long()

    # -- what they pay ----------------------------------------------------------------------------------------------

    def attention(self, reduce="sum", group="mean", term="a"):
        """Attention a_ij of the observers ("square": its square, "entropy": -a ln a), reduced ("sum", "mean", "max")
        over rows, then ("mean", "sum", "max") over the heads of a group: [B, Hkv, C]; group "none": [B, H, C]."""
        key = reduce, group, term
        if key not in self._memo:
            self._memo[key] = self._attention(*key)
        return self._memo[key]

    def _attention(self, reduce, group, term):
        parts = self.observers
        if len(parts) == 1:
            if parts[0].probs is not None and (group, term) == ("mean", "a"):
                return parts[0].probs
            return self._score(parts[0], reduce, group, term)
        if reduce == "max":  # over all rows before it is over heads
            each = [self._score(part, "max", "max" if group == "max" else "none", term) for part in parts]
            return self._grouped(torch.stack(each).amax(0), "none" if group == "max" else group)
        # Only sums over rows may be taken part by part.
        inner = group if group != "max" else "none"
        total = sum(self._score(part, "sum", inner, term) for part in parts)
        total = total / self.row_count[:, None, None] if reduce == "mean" else total
        return total if inner == group else self._grouped(total, group)

    def _score(self, part, reduce, group, term):
        options = dict(reduce=reduce, group=group, term=term, columns=self.columns)
        return self._observe(_ops.score, part, (), **options)

    def _grouped(self, x, group):
        return x if group == "none" else apart.REDUCE[group](x.unflatten(1, (self.n.shape[1], -1)), 2)

    @cached_property
    def moments(self):
        """Mean and sample variance (0 of one row) over the observers of what they pay to every alive slot, per query
        head: [B, H, C] each."""
        rows = self.row_count.float()[:, None, None]
        mean, square = (self.attention("mean", "none", term) for term in ("a", "square"))
        variance = (square - mean**2).clamp_min(0) * rows / (rows - 1)
        return mean, variance.masked_fill(rows <= 1, 0)

    def peak(self, lo, hi):
        """The largest attention of each observer over slots lo <= i < hi [B, Hkv]: [B, H, R], part by part."""
        peaks = []
        for part in self.observers:  # slots from `stop` on are not seen: they get nothing
            end = torch.minimum(hi, self.n - (self.k.shape[2] - part.stop.to(torch.int32))[:, None])
            ends = [self._of_heads(x[..., None])[..., 0] for x in (torch.minimum(lo, end), end)]
            peaks.append(self._observe(_ops.peak, part, ends))
        return torch.cat(peaks, 2)

    def output_error(self, kind, weight=None, alpha=0.0, group="sum"):
        """How far the observers' outputs move without a slot, as in `kvevict._ops.error`; weight [B, H, R] as `peak`
        has it: [B, Hkv, C]."""
        total, start = None, 0
        for part in self.observers:
            rows = part.q.shape[2]
            own = None if weight is None else weight[:, :, start : start + rows].contiguous()
            options = dict(kind=kind, alpha=alpha, group=group, columns=self.columns, weight=own)
            each = self._observe(_ops.error, part, (part.out,), **options)
            total, start = each if total is None else total + each, start + rows
        return total

    @property
    def _all(self):
        """[B] the new columns' end, where all of them count."""
        return self.k.shape[2] + 0 * self.first

    def _observe(self, op, part, more, **options):
        """An op of observers over the alive slots; `error` reads values too."""
        slots, values, group = self.slots, op is _ops.error, options.get("group")
        held = (slots.k, slots.v) if values else (slots.k,)
        new = (self.k, self.v) if values else (self.k,)
        latent = slots.len.shape[1] != self.n.shape[1]  # then all query heads are one group, each with its own keys
        if latent and group is not None:
            options["group"] = "none"
        with self.step.meter.clock("score"), rerotate.in_cache(self.step, self.module, slots):
            if self.decoding and int(self.protected[1].min()) < part.q.shape[2] > 1:  # some rows' slots may be gone
                found = apart.observe(self, op, part.q, held, new, more, **options, **self.options)
            else:
                found = op(
                    part.q, part.skip.to(torch.int32), *held, slots.offset, slots.len, *new, self.first,
                    part.stop.to(torch.int32), *more, lse=part.lse, causal=part.causal, **options, **self.options,
                )  # fmt: skip
        return self._grouped(found, group) if latent and group is not None else found
