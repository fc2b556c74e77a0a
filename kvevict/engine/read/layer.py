"""One layer in a step: the layer attends to [stored | new] slots, and then a cut chooses among these slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from ...ops import _ops
from ...policy.inputs import Need, as_needs
from ...policy.seen.rows import LayerRows, Observation, Observers, rolled
from ...policy.seen.slots import KV, Bounds, Heads, Slots
from ..cut import completed, protected
from ..measure import unseen
from ..measure.inputs import given, rope_of
from ..measure.quantities import quantity
from ..memory.carried import carry_newest
from ..memory.stored import Later
from .schedule import observes
from .step import Step


@dataclass(eq=False)
class LayerCall:
    """One layer in a step: the layer attends with the step's T rows, and then slots may be evicted from it. The rows of
    a chunk are stored when slots have been chosen; the row of a decoded token is stored by the op that attends."""

    step: Step
    module: Any  # the layer's attention module
    q: Any  # [B, H, T, D] queries; in a call that waits for another layer's choice, only the rows that watchers need
    k: torch.Tensor  # [B, Hkv, T, D] new keys; of all H heads if the layer stores latents
    v: torch.Tensor  # new values, shaped as `k`
    new: Sequence[torch.Tensor]  # k, v [B, Hkv, T, W] as they are stored
    options: dict[str, Any]  # scale, softcap and sinks of the attention
    hidden: torch.Tensor | None = None  # [B, T, E] the attention block's input; None: no quantity needs it
    out: Any = None  # [B, T, H, D] attention's output
    lse: Any = None  # [B, H, T] log-sum-exp of the logits
    probs: Any = None  # [B, Hkv, C] attention weights of a decoded token, mean over a GQA group; None: not needed
    held: Any = None  # result of `EvictionLayer.held`; None before attention
    known: dict[Need, Any] = field(default_factory=dict)  # quantities measured so far

    index = property(lambda self: self.module.layer_idx)  # the decoder layer's number
    layer = property(lambda self: self.step.cache.layers[self.module.layer_idx])  # the EvictionLayer
    policy = property(lambda self: self.step.plan.policy)
    order = property(lambda self: self.step.plan.order[self.module.layer_idx])  # the layer's number among evicting ones
    # int [B] on the host: number of padding columns among the S = `columns` rows that the cut stores
    padding = property(lambda self: np.minimum(self.step.padding, self.columns))
    tokens = property(lambda self: self.columns - self.padding)  # int [B] number of these S rows that are tokens
    to_store = property(lambda self: [x[:, :, : self.columns] for x in self.new])  # k, v [B, Hkv, S, W] of the S rows

    @cached_property
    def columns(self) -> int:
        """The number S of rows that the cut stores."""
        return min(self.step.columns, self.k.shape[2])

    @cached_property
    def rows(self) -> LayerRows:
        """The step's rows in this layer, as the policy sees them."""
        step, budget = self.step, self.layer.budget
        each = 0 * step.padding if budget is None else budget // step.plan.kv_heads
        return LayerRows(step, each, rope_of(step, self.module), self.q, self.out, self.lse)

    @cached_property
    def slots(self) -> Slots:
        """The layer's slots, the new ones included, as the policy sees them."""
        observers, counts = self.step.rows, self.step.plan.ranks.counts(self.layer) + self.tokens[:, None]
        ends = protected(self.policy, observers, self.order, self.rows, counts.max(1))
        return self.slots_of(counts, ends, observers.bounds(self.rows))

    def slots_of(self, counts: np.ndarray, ends: tuple[torch.Tensor, torch.Tensor], bounds: Bounds) -> Slots:
        """Make the `Slots` of this layer. counts: slots [B, heads of all ranks], new ones included; ends: number of
        first and of last slots that stay; bounds: positions that scores alone do not decide about."""
        step, layer, columns = self.step, self.layer, self.columns
        held = layer.held(self.module) if self.held is None else self.held
        k, v, first = self.k[:, :, :columns], self.v[:, :, :columns], step.first.clamp_max(columns)
        heads, pos = Heads(step.plan.ranks, layer.counts.shape[1]), step.positions[:, :columns].contiguous()
        prompt = layer.prompt if step.decoding and self.policy.keep_prompt else None
        kv, stored = KV(held, k, v, first, self.options), layer.storage.gathered()
        return Slots(self.index, heads, counts, ends, pos, stored, kv, prompt, bounds)

    @cached_property
    def observation(self) -> Observation:
        """The query rows that observe the layer's slots, with their attention outputs if the policy needs outputs."""
        step = self.step
        seen = self._decoded() if step.decoding else step.rows.observe(self.rows, step.read.memory.get(self.index))
        if self.columns < self.rows.columns:  # the observing rows' own slots have been stored already
            seen = Observation(tuple(replace(part, stop=part.stop.clamp_max(self.columns)) for part in seen.parts))
        return completed(seen, self.slots, step.plan.wants_outputs)

    def _decoded(self) -> Observation:
        """Return the query rows that observe after a decoded token: this token's row, or the rows of the last decoded
        tokens, which the layer remembers."""
        rows, none = self.rows, 0 * self.rows.first
        if self.policy.rows.newest or self.policy.carry == "sum":
            return Observation((Observers(rows.q, none, rows.end, True, rows.lse, rows.out, self.probs),))
        q: Any = self.layer.decode_queries
        out = None
        if q.shape[3] > rows.q.shape[3]:
            q, out = q.split(rows.q.shape[3], 3)
            out = out.transpose(1, 2)
        gone = int(self.slots.protected[1].min()) < q.shape[2] > 1  # whether a remembered row's slot may be gone
        until = self.step.positions[:, -1:] if gone else None
        return Observation((Observers(q, none, rows.end, True, None, out, until=until),))

    def waiting(self) -> LayerCall:
        """Return a smaller copy of this call for a layer that waits for another layer's choice. The only query rows in
        the copy are those that watchers need."""
        watched = max((watcher.rows for watcher in self.step.watchers), default=0)
        q = self.watched(watched).clone() if watched and not self.step.decoding else None
        return self._reduced(q, replace(self.rows, q=None, out=None, lse=None, drafted=None))

    def drafting(self, rows: int) -> LayerCall:
        """Return a smaller copy of this call for a layer that waits until a draft is written. The copy has the queries,
        outputs and log-sum-exps of the last `rows` rows only."""
        return self._reduced(None, self.rows.stored_rows(rows, self.step.plan.wants_outputs))

    def _reduced(self, q: torch.Tensor | None, rows: LayerRows) -> LayerCall:
        """Copy this call with other `q` and `rows`. If slots are latents, the copy expands them anew instead of keeping
        the keys and values of every head."""
        call = replace(self, q=q, hidden=None, out=None, lse=None, probs=None, held=None, known={})
        layer, module, stored = self.layer, self.module, self.slots.stored
        if layer.storage.far:
            held: Any = Later(lambda: layer.held(module))
            stored = Later(lambda: layer.storage.gathered(), len=stored.len, counts=stored.counts)
            layer.storage.coming = None
        else:
            held = layer.held(module)
        kv: Any = replace(self.slots.kv, stored=held)
        call.rows, call.slots = rows, replace(self.slots, stored=stored, kv=kv)
        return call

    def stored(self) -> LayerCall:
        """Return this call as it is after the surviving slots were stored: the same slots are protected, and no slot is
        new."""
        k, v, *new = (x[:, :, :0] for x in (self.k, self.v, *self.new))
        call = LayerCall(self.step, self.module, None, k, v, new, self.options)
        counts = self.step.plan.ranks.counts(self.layer)
        call.slots = call.slots_of(counts, self.slots.protected, self.slots.bounds)
        return call

    def watched(self, count: int) -> torch.Tensor:
        """Return the queries [B, H, count, D] of the call's last `count` rows. In a chunk that repeats tokens, batch
        rows with fewer tokens end with padding: there the rows are those of the last repeated tokens."""
        rows, policy, q = self.rows, self.policy.rows, self.rows.q
        if q is None:
            return self.q[:, :, -count:]
        if policy.repeats and rows.appended:
            last = rows.upload(rows.appended - policy.observing(self.step))
            q = rolled(q[:, :, -rows.appended :], last)
        return q[:, :, -count:]


def attend(call: LayerCall) -> None:
    """Compute the attention of a layer in a step, and store the row of a decoded token."""
    step, module, plan, layer = call.step, call.module, call.step.plan, call.layer
    if step.decoding:
        columns = 0
        if plan.wants_probs:  # a recorded call is replayed for later tokens, which attend to more slots
            columns = layer.longest() if step.attended is None else int(layer.storage.capacity.max())
        with step.meter.clock("decode"):
            call.out, call.lse, probs = layer.decode(
                call.q, *call.new, step.positions, module, columns=columns, **call.options
            )
        call.probs = probs if plan.wants_probs else None
        return
    step.bring(call.order)
    call.held = layer.held(module)
    with step.meter.clock("attend"):
        if not _measured(call):
            call.out, call.lse = unseen.attend(step, call.q, call.k, call.v, call.held, layer.longest(), call.options)
    if layer.sequence.coming[0] != call.columns:
        layer.sequence.fix()  # not every column gets a slot here, so crop() cannot tell which slots to remove
    step.meter.watch(call.new[0], call.tokens, 1 + step.chooser.held)


def _measured(call: LayerCall) -> bool:
    """Let the rows of a prompt's chunk attend and measure a quantity of the policy by one op (`Quantity.attend`), if
    every cut measures it. Returns False, with nothing done, if no op does both."""
    step, chunk, policy = call.step, call.step.chunk, call.policy
    measures = chunk is not None and chunk.observed and chunk.again is None and step.chooser.measures
    always = policy.carry != "none" and observes(policy, call.order, len(step.plan.order))
    every = call.k.shape[2] == step.positions.shape[1] and call.held.len.shape[1] == call.layer.counts.shape[1]
    if not (measures and always and every and step.unseen is None):
        return False  # `every`: the layer reads all tokens of the chunk, and its heads have slots of their own
    columns = int(step.plan.ranks.mine(step.plan.ranks.counts(call.layer) + call.tokens[:, None]).max())
    op = partial(_ops.attend_score, call.q, call.held, call.k, call.v, step.first, columns=columns, **call.options)
    for need in as_needs(policy.score.needs):
        found = quantity(need).attend(step.rows, step, op)
        if found is not None:
            call.out, call.lse, call.known[need] = found
            return True
    return False


def decide(call: LayerCall) -> None:
    """Let the step's chooser evict slots of a layer that has attended, or, if other layers read its slots, do so after
    the last of these layers has attended. The layers of a token that is being recorded are only noted."""
    step = call.step
    if step.attended is not None:
        step.attended.append(replace(call, step=None))  # type: ignore[arg-type]  # `decide_later` sets it
    elif call.index in step.plan.last_reader:
        step.unread[call.index] = call
    else:
        evict(call)


def decide_later(step: Step, attended: list[LayerCall]) -> None:
    """Let the step's chooser evict slots of all layers after a recorded token. attended: the token's call in each
    layer; the next token overwrites its tensors."""
    for call in attended:
        layer, q, probs = step.cache.layers[call.index], call.q, call.probs
        if probs is not None:
            probs = probs[..., : layer.longest()]
            probs = probs.clone() if layer.carry is None else probs  # else adding them to `carry` copies
        q = q.clone() if layer.decode_queries is None else q
        call = replace(call, step=step, q=q, probs=probs, known={})
        evict(call)


def evict(call: LayerCall) -> None:
    """Let the step's chooser evict slots of a layer that has attended. Before that, a decoded token's slot gets its
    score to carry, if the policy needs this."""
    step, plan = call.step, call.step.plan
    if not step.decoding:
        with step.meter.clock("evict"):
            step.chooser.layer(call)
        return
    if plan.of_tokens is not None and observes(plan.policy, call.order, len(plan.order)):
        carry_newest(call.layer, plan.of_tokens.tokens(*given(call, [plan.of_tokens]).values()))
    if step.chooser is not None:
        step.chooser.token(call)
