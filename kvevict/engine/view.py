"""What a score sees of one layer, and what eviction does to it."""

from functools import cached_property

import numpy as np
import torch

from .. import _ops, compat
from ..analysis import diagnose
from . import apart, host, rerotate


class View:
    """One layer as a score sees it: n[b,h] alive slots of head (b, h), stored first, then new, no padding. `counts` is
    n, and `padding` is first, on the host."""

    def __init__(self, step, layer, index, module, q, k, v, out, lse, options, probs=None):
        self.step, self.layer, self.index, self.module = step, layer, index, module
        self.q, self.out, self.lse, self.probs, self.options = q, out, lse, probs, options
        stored = max(k.shape[2] - step.transient, 0)  # none of what was stored before
        self.k, self.v, self.pos = k[:, :, :stored], v[:, :, :stored], step.positions[:, :stored].contiguous()
        self.first = step.first.clamp_max(stored)
        self.padding = np.minimum(step.padding, stored)
        self.n = layer.len + (stored - self.first)[:, None]
        self.counts = layer.counts + (stored - self.padding)[:, None]
        self.columns = int(self.counts.max()) if self.counts.size else 0
        self.device = k.device
        self.order = step.patch.order[index]
        self.select = step.patch.policy.selection(self.order)
        self.carry = self.heads = None  # heads: scores per query head [B, Hkv, G, C], where they are pooled first

    waits = property(lambda self: self.order < self.step.patch.waiting_layers - 1)
    follows = property(lambda self: self.order % self.policy.n_reuse > 0)
    decoding = property(lambda self: self.step.decoding)
    state = property(lambda self: self.step.read.state.setdefault(self.index, {}))
    ends_with_probe = property(lambda self: self.step.ends_with_probe)
    has_tokens = property(lambda self: self.first < self.k.shape[2])

    @property
    def budget(self):
        """[B] int32 slots per kv head on average."""
        return host.upload(self.layer.budget // self.n.shape[1], self.device, torch.int32)

    @cached_property
    def probe_length(self):
        """[B] int32 probe rows of each batch row."""
        return host.upload(self.step.read.probe_length, self.device, torch.int32)

    @cached_property
    def protected(self):
        """(first, last) [B] int32: always kept slots at either end, at most what the budget leaves."""
        sizes = self.n.amax(1)
        kept = self.policy.score.protect(self) if self.policy.error.protect else (0, 0)
        first, last, tail = (
            end.to(self.device, torch.int32) if isinstance(end, torch.Tensor) else torch.full_like(sizes, end)
            for end in (*kept, self.select.tail(self))
        )
        first, last = torch.minimum(first, sizes), torch.maximum(last, tail)
        return first.contiguous(), torch.minimum(last, sizes - first).contiguous()

    @property
    def policy(self):
        return self.step.patch.policy

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

    def observers(self, rows=None, rows_of_row=None):
        """The newest `rows` rows (None: all of this chunk) or, while decoding, the remembered last decoded ones:
        queries [B, H, R, D], the rows to skip [B] (rows_of_row [B]: how many count), their lse [B, H, R] or None, and
        their attention outputs [B, R, H, D], None where they were not remembered."""
        if self.decoding and self.policy.score.rows:
            q, lse, out = self.layer.recent, None, None
            if q.shape[3] > self.q.shape[3]:
                q, out = q.split(self.q.shape[3], 3)
                out = out.transpose(1, 2)
        else:  # without the rows that read along behind them
            stop = self.q.shape[2] - self.step.transient
            q, lse, out = self.q[:, :, :stop], self.lse[:, :, :stop], None if self.out is None else self.out[:, :stop]
        rows = q.shape[2] if rows is None else min(rows, q.shape[2])
        skip = 0 * self.first if self.decoding else torch.clamp_min(self.first - (self.k.shape[2] - rows), 0)
        if rows_of_row is not None:
            skip = torch.maximum(skip, rows - rows_of_row)
        start = q.shape[2] - rows
        return (
            q[:, :, start:],
            skip,
            None if lse is None else lse[:, :, start:],
            None if out is None else out[:, start:],
        )

    def attention(self, rows=None, reduce="sum", rows_of_row=None, **options):
        """Attention a_ij of the `observers`, reduced over rows, mean over the group: [B, Hkv, C]. options: `term`
        and `group` as in `kvevict._ops.score`."""
        if self.probs is not None and rows in (None, 1) and not options:
            return self.probs
        q, skip, lse, _ = self.observers(rows, rows_of_row)
        return self._score(q, skip, self._all, lse, causal=True, reduce=reduce, **options)

    @cached_property
    def moments(self):
        """Mean and sample variance (0 of one row) over the rows of the score's window of what they pay to every alive
        slot, per query head: [B, H, C] each."""
        q, skip, *_ = self.observers(self.policy.score.rows)
        rows = (q.shape[2] - skip).float()[:, None, None]
        mean, square = (self.attention(q.shape[2], "mean", term=x, group="none") for x in ("a", "square"))
        variance = (square - mean**2).clamp_min(0) * rows / (rows - 1)
        return mean, variance.masked_fill(rows <= 1, 0)

    def peak(self, rows, lo, hi):
        """The largest attention of each of the last `rows` rows over slots lo <= i < hi [B, Hkv]: [B, H, R]."""
        q, skip, lse, _ = self.observers(rows)
        return self._observe(_ops.peak, q, skip, self._all, (lo, hi), lse=lse, causal=True)

    def output_error(self, rows, kind, weight=None, alpha=0.0, group="sum"):
        """How far the outputs of the last `rows` rows move without a slot, as in `kvevict._ops.error`: [B, Hkv, C]."""
        q, skip, lse, out = self.observers(rows)
        options = dict(kind=kind, alpha=alpha, group=group, columns=self.columns, weight=weight)
        return self._observe(_ops.error, q, skip, self._all, (out,), lse=lse, causal=True, **options)

    def norm(self, of, p):
        """The p-norm of every alive slot's key ("k") or value ("v"): [B, Hkv, C]."""
        layer, x, slots = self.layer, getattr(self, of), getattr(self.layer, of)
        return _ops.norm(slots, layer.offset, layer.len, x, self.first, self._all, p=p, columns=self.columns)

    def refine(self, score, fast, squared):
        """CAOTE of a score [B, Hkv, C], as in `kvevict._ops.refine`."""
        layer = self.layer
        with self.step.patch.clock("score"):
            return _ops.refine(
                layer.v, layer.offset, layer.len, self.v, self.first, self._all, score, fast=fast, squared=squared
            )

    def probe_queries(self):
        """Queries of the probe's rows [B, H, p, D], where they read along or where they end the prompt."""
        return self.q[:, :, self.q.shape[2] - self.step.read.probe_rows :]

    @property
    def probe_position(self):
        """[B] position of the probe's first row."""
        return self.step.positions[:, -1] - (self.step.read.probe_rows - 1)

    def rotate(self, queries, position_from, position_to):
        return compat.rotate(self.step.decoder, self.module, queries, position_from, position_to)

    def probe_attention(self, queries):
        """Mean attention of the accumulated probe [B, H, p, D] over the alive slots but the probe's own (TAKE eq. 10),
        which come last and stay 0: [B, Hkv, C]."""
        stop = self.k.shape[2] - (self.probe_length if self.ends_with_probe else 0 * self.first)
        stop = torch.maximum(stop, self.first)
        skip = (queries.shape[2] - self.probe_length).to(torch.int32)
        return self._score(queries.to(self.q.dtype), skip, stop, None, causal=False, reduce="mean")

    def appended_attention(self, reduce, own=True, **options):
        """Attention of the rows that read along behind the chunk over the alive slots, their softmax spanning `own`
        slots, those of the rows before them, too; reduced over rows, mean over the group: [B, Hkv, C]."""
        rows = self.step.transient
        q, lse = self.q[:, :, -rows:], self.lse[:, :, -rows:] if own else None
        return self._score(q, 0 * self.first, self._all, lse, causal=False, reduce=reduce, **options)

    @property
    def _all(self):
        """[B] the new columns' end, where all of them count."""
        return self.k.shape[2] + 0 * self.first

    def _score(self, q, skip, stop, lse, causal, reduce, **options):
        options |= dict(lse=lse, causal=causal, reduce=reduce, columns=self.columns)
        return self._observe(_ops.score, q, skip, stop, (), **options)

    def _observe(self, op, q, skip, stop, more, **options):
        """An op of observing rows over the alive slots; `error` reads values too."""
        layer, values = self.layer, op is _ops.error
        slots = (layer.k, layer.v) if values else (layer.k,)
        fresh = (self.k, self.v) if values else (self.k,)
        with self.step.patch.clock("score"):
            if self.decoding and int(self.protected[1].min()) < q.shape[2] > 1:  # some rows' slots may be gone
                return apart.observe(self, op, q, slots, fresh, more, **options, **self.options)
            return op(
                q, skip.to(torch.int32), *slots, layer.offset, layer.len, *fresh, self.first, stop.to(torch.int32),
                *more, **options, **self.options,
            )  # fmt: skip

    def per_head(self, function):
        """function(keys [n, D]) -> [n], for every head's alive keys: [B, Hkv, C]."""
        out = torch.zeros(*self.n.shape, self.columns, device=self.device)
        for b, h, rows in self.layer.segments():
            keys = torch.cat([self.layer.k[rows], self.k[b, h, self.padding[b] :]])
            out[b, h, : len(keys)] = function(keys)
        return out

    def positions(self):
        """Positions of the alive slots [B, Hkv, C] int32, -1 past a head's end."""
        layer, column = self.layer, torch.arange(self.columns, device=self.device)
        table = torch.cat([layer.pos, self.pos.flatten(), layer.pos.new_full((1,), -1)])
        row = torch.arange(self.n.shape[0], device=self.device)[:, None, None]
        new = len(layer.pos) + row * self.pos.shape[1] + self.first[:, None, None] + column - layer.len[..., None]
        place = torch.where(column < layer.len[..., None], layer.offset[..., None] + column, new)
        return table[place.masked_fill(column >= self.n[..., None], -1)]

    def grow_carry(self, increment):
        """The layer's carried scores and the increment of this call's rows: [B, Hkv, C]."""
        if self.layer.carry is not None:
            increment[..., : self.layer.carry.shape[-1]] += self.layer.carry
        self.carry = increment

    def hold(self, rows):
        """Wait for what will be drafted, with no more than the last `rows` rows."""
        self.q, self.lse, self.out = self.q[:, :, -rows:].clone(), self.lse[:, :, -rows:].clone(), None
        self.step.held.append(self)

    def store(self, choice=None):
        """Put the survivors into the layer: those of `choice` (index, keep), or all."""
        if choice is not None and self.policy.diagnose and self.step.read is not None:
            with rerotate.in_cache(self.step, self.module, self.layer):
                diagnose.note(self, *choice)
        with self.step.patch.clock("compact"):
            if choice is None:
                if self.k.shape[2]:
                    self.layer.append(self.k, self.v, self.pos, self.first, self.padding)
                self.layer.carry = self.carry
            else:
                index, keep = choice
                self.layer.keep(index, keep, self.k, self.v, self.pos, self.first)
                kept = None if self.carry is None else self.carry.gather(2, index.clamp_min(0).long())
                self.layer.carry = None if kept is None else kept.masked_fill(index < 0, 0)
        self.step.patch.live[self.index] = self.layer.live_bytes()
