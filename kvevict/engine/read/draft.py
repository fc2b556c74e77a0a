"""Drafting by the model itself: a fork of the cache writes a few tokens, and the rows of these tokens then observe. LAQ
drafts over a cut of a prompt that was read with nothing evicted (`Drafting`), recall over all tokens (`Redrafting`)."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ... import products, rotary
from ...compat import CACHE
from ...context import within
from ...policy.policy import Policy
from ...policy.rows.drafted import end_tokens, head
from ...policy.rows.window import FirstWindow
from ...policy.seen.rows import rolled
from ...policy.seen.slots import Bounds
from ..slots import archive
from ..slots.adopt import EvictionCache
from ..slots.meter import Meter
from ..slots.storage import Storage
from . import evict
from .choosers import Chooser
from .layer import LayerCall
from .plan import Plan
from .residual import Errors
from .step import Step

if TYPE_CHECKING:
    from .spans import Spans

FIRST_CUT = Policy(score="snapkv", rows=FirstWindow(), budget=2**30)


class _Noting(Chooser):
    """The chooser of a draft's steps keeps all slots, and notes the rows."""

    looks = False

    def __init__(self, errors: Errors | None) -> None:
        self.errors = errors  # TADA measures the drafted rows too
        self.rows = defaultdict(list)  # layer -> (q [B, H, 1, D], k, v [B, heads, 1, D]) of each row

    def takes(self, call: LayerCall) -> bool:
        self.rows[call.index].append((call.q, call.k, call.v))
        return False

    def drafted(self, index: int) -> list[torch.Tensor]:
        """q, k, v of all rows of a layer, which are forgotten here."""
        return [torch.cat(part, 2) for part in zip(*self.rows.pop(index), strict=True)]


class Drafting(Chooser):
    """Layers wait until tokens were drafted; then `chooser` sees them in order."""

    def __init__(self, chooser: Chooser) -> None:
        self.chooser, self.errors, self.calls = chooser, chooser.errors, []

    held = property(lambda self: len(self.calls))

    def layer(self, call: LayerCall) -> None:
        """Wait, holding only the rows that observe the prompt."""
        self.calls.append(call.drafting(max(FIRST_CUT.rows.window, call.policy.rows.window)))

    def end(self, spans: Spans, step: Step, hidden: torch.Tensor) -> None:
        calls, self.calls = self.calls, []
        noting = self._drafted(spans, step, hidden, calls)
        while calls:
            call = calls.pop(0)
            call.rows = replace(call.rows, drafted=(*noting.drafted(call.index), torch.zeros_like(step.first)))
            with call.step.meter.clock("evict"), call.layer.storage.here():
                self.chooser.layer(call)

    def _drafted(self, spans: Spans, step: Step, hidden: torch.Tensor, calls: list) -> _Noting:
        """What noted the rows of tokens that are drafted over an evicted fork of the cache."""
        meter, n_d, noting = step.meter, step.plan.policy.rows.n_d, _Noting(self.errors)
        with meter.clock("draft"):
            policy = replace(FIRST_CUT, keep_first=step.plan.policy.keep_first)
            plan = Plan(policy, step.decoder, step.plan.ranks)
            cuts = {}
            for call in calls:
                with call.layer.storage.here():
                    cuts[call.index] = _cut(call, plan, n_d)
            cache = step.cache.with_storages(cuts)
            _write(spans, step, hidden, plan, cache, noting, n_d)
            meter.live["draft"] = sum(cache.layers[call.index].live_bytes() for call in calls)
            meter.watch(calls[0].new[0], calls[0].tokens, len(calls))
            del meter.live["draft"]
        return noting


class Redrafting(Chooser):
    """After a recall: once `chooser` has cut the layers, tokens are drafted over the slots of all tokens, or the kept
    ones where the archive lies on the host. Their rows, up to an end of sequence, and the prompt's last ones choose
    anew, layer by layer, as many slots as the layer had kept (METHODS section 13)."""

    def __init__(self, chooser: Chooser) -> None:
        self.chooser, self.errors = chooser, chooser.errors
        self.asked: list = []  # of each layer the call, without new slots, and its slots that are kept at any score

    held = property(lambda self: self.chooser.held)

    def layer(self, call: LayerCall) -> None:
        last = call.rows.stored_rows(call.policy.redrafting.rows.window, call.step.plan.wants_outputs)
        k, v, *new = (x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (call.k, call.v, *call.new))
        later: dict[str, Any] = dict(hidden=None, probs=None, held=None, known={})
        asked = replace(call, q=last.q, k=k, v=v, new=new, out=last.out, lse=last.lse, **later)
        self.asked.append((asked, call.slots.protected, call.slots.bounds))
        self.chooser.layer(call)

    def end(self, spans: Spans, step: Step, hidden: torch.Tensor) -> None:
        self.chooser.end(spans, step, hidden)
        policy, plan, noting = step.plan.policy.redrafting, copy.copy(step.plan), _Noting(None)
        assert policy is not None
        plan.policy = policy
        on_host = any(call.layer.archive.on_host for call, *_ in self.asked)
        with step.meter.clock("draft"):
            over = {call.index: _to_draft_over(call.layer, policy.rows.n_d) for call, *_ in self.asked}
            cache = step.cache.with_storages(over)
            first, ends = Plan(FIRST_CUT, step.decoder, plan.ranks), end_tokens(spans.arguments.top)
            after = _write(spans, step, hidden, first, cache, noting, policy.rows.n_d, ends)
        read = replace(step.read, rows=policy.rows, watchers=())
        of_chunk: Any = step.chunk
        stored, chunk = step.positions[:, : step.columns], replace(of_chunk, appended=0)
        again = replace(step, plan=plan, read=read, chunk=chunk, positions=stored, extra=None)
        kept: dict[int, np.ndarray] = {}
        while self.asked:
            for call, *_ in self.asked[: 1 + on_host]:  # the next layer's come while this one chooses
                if call.index not in kept:
                    kept[call.index] = plan.ranks.counts(call.layer).sum(1)
                    archive.recall(call.layer, kept[call.index] >= 0)
            asked, *always = self.asked.pop(0)
            q, k, v = noting.drafted(asked.index)
            with asked.layer.storage.here():
                self._choose(replace(asked, step=again), (rolled(q, after), k, v, after), kept[asked.index], *always)

    def _choose(self, call: LayerCall, drafted: tuple, slots: np.ndarray, protected: tuple, bounds: Bounds) -> None:
        """A layer's second cut to slots [B], among those of all tokens."""
        call.rows = replace(call.rows, drafted=drafted)
        call.slots = call.slots_of(call.step.plan.ranks.counts(call.layer), protected, bounds)
        if (slots < call.slots.alive).any():
            with call.step.meter.clock("evict"):
                choice = evict.choose(call, evict.ranked(call, evict.numbers(call).score), slots)
                evict.store(call, choice)


def _to_draft_over(layer: Any, room: int) -> Storage:
    """The slots of all tokens, for a fork; the kept ones, with room for more, if the layer's device would have to hold
    all layers' archives."""
    if layer.archive.on_host:
        return layer.storage.gathered().moved(layer.counts + room)
    return archive.whole(layer)


def _write(
    spans: Spans,
    step: Step,
    hidden: torch.Tensor,
    plan: Plan,
    cache: EvictionCache,
    noting: _Noting,
    n_d: int,
    ends: Sequence[int] = (),
) -> torch.Tensor:
    """Draft up to n_d tokens greedily over `cache`, fewer where all rows come to one of the tokens `ends`. Returns [B]
    the number of a row's drafts from its first end on; the first draft is none of them."""
    arguments, unseen = spans.arguments, Meter()
    logits, at, none = head(arguments.top), step.positions[:, : step.columns][:, -1:], torch.zeros_like(step.first)
    ended, after = none > 0, none
    for number in range(1, n_d + 1):
        ids, at = logits(hidden).argmax(-1), at + 1
        for end in ends:
            ended = ended | (ids[:, 0] == end)
        if number > 1:
            if ends and ended.all():
                break
            after = after + ended
        final = int(at.max()) if rotary.rope_depends_on_length(step.decoder) else None
        mask = arguments.mask_for(step.chunk.end, number)  # over all tokens drafted so far
        inputs = dict(input_ids=ids, attention_mask=mask, position_ids=at.long(), use_cache=True, return_dict=True)
        one = Step(
            plan=plan, decoder=step.decoder, cache=cache, meter=unseen, positions=at, padding=0 * step.padding,
            first=none, inputs=inputs | {CACHE: cache}, chooser=noting, final_position=final,
        )  # fmt: skip
        with within(pause=None), products.of_call(step.decoder, ids, None):
            hidden = one.through(spans.run).last_hidden_state
    return after


def _cut(call: LayerCall, plan: Plan, room: int) -> Storage:
    """A copy of the slots, with room for more, that SnapKV keeps: as many as the layer may keep, equally many in each
    head."""
    kv, rows = call.slots.kv, call.rows
    read = replace(call.step.read, rows=plan.policy.rows)
    step = replace(call.step, plan=plan, read=read, meter=Meter())  # a draft is not in the report
    first = LayerCall(step, call.module, rows.q, kv.k, kv.v, call.to_store, kv.options, out=rows.out, lse=rows.lse)
    alive = first.slots.alive
    slots = np.minimum(call.step.read.budgets.targets[call.order], alive)
    slots = np.where(call.tokens > 0, slots, alive)  # a row with only padding in this chunk keeps all
    choice = evict.choose(first, evict.ranked(first, evict.numbers(first).score), slots)
    storage = call.layer.storage.gathered()
    return storage.moved(choice.keep + room, choice.index, choice.keep, *call.to_store, call.slots.pos, kv.first)
