"""Drafting by the model itself (Lookahead Q-Cache, LAQ, Wang et al. 2025). Once a prompt is read, and before slots
are evicted, the model writes a few draft tokens over an evicted fork of the cache. The query rows of these tokens then
observe the prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...context import within
from ...models import rotary
from ...models.compat import CACHE
from ...ops import few_rows
from ...policy.policy import Policy
from ...policy.rows.drafted import head
from ...policy.rows.window import FirstWindow
from ...policy.run import Run
from ..memory.cache import EvictionCache
from ..memory.meter import Meter
from ..memory.storage import Storage
from ..read.choosers import Chooser, choose
from ..read.layer import LayerCall
from ..read.plan import Plan
from ..read.step import Step
from .residual import Errors

FIRST_CUT = Policy(score="snapkv", rows=FirstWindow(), budget=2**30)


class _Noting(Chooser):
    """The chooser of the steps that write a draft: it keeps all slots, and notes the draft tokens' rows."""

    looks = False

    def __init__(self, errors: Errors | None) -> None:
        self.errors = errors  # the layers' errors (residual.py), which draft tokens contribute to
        self.rows = defaultdict(list)  # layer -> (q [B, H, 1, D]; k, v [B, heads, 1, D]) of each draft token

    def token(self, call: LayerCall) -> None:
        self.rows[call.index].append((call.q, call.k, call.v))


class Drafting(Chooser):
    """The chooser of a prompt whose layers wait until a draft is written; then `chooser` evicts from them in order.

    arguments   the model call's `kvevict.engine.hook.arguments.Arguments`
    run         the decoder's original forward
    """

    def __init__(self, chooser: Chooser, arguments: Any, run: Callable[..., Any]) -> None:
        self.chooser, self.errors, self.arguments, self.run = chooser, chooser.errors, arguments, run
        self.calls: list[LayerCall] = []

    held = property(lambda self: len(self.calls))

    def layer(self, call: LayerCall) -> None:
        """Let a layer wait, and keep only those of its rows that observe the prompt."""
        self.calls.append(call.drafting(max(FIRST_CUT.rows.window, call.policy.rows.window)))

    def end(self, step: Step, hidden: torch.Tensor) -> None:
        calls, self.calls = self.calls, []
        noting = self._drafted(step, hidden, calls)
        while calls:
            call = calls.pop(0)
            rows = zip(*noting.rows.pop(call.index), strict=True)
            call.rows = replace(call.rows, drafted=tuple(torch.cat(part, 2) for part in rows))
            with call.step.meter.clock("evict"), call.layer.storage.here():
                self.chooser.layer(call)

    def _drafted(self, step: Step, hidden: torch.Tensor, calls: list[LayerCall]) -> _Noting:
        """Write draft tokens over an evicted fork of the cache. Returns the chooser that has noted their rows."""
        meter, n_d, noting = step.meter, step.plan.policy.rows.n_d, _Noting(self.errors)
        with meter.clock("draft"):
            policy = replace(FIRST_CUT, keep_first=step.plan.policy.keep_first)
            plan = Plan(policy, Run(), step.decoder, step.plan.ranks)
            cuts = {call.index: _cut(call, plan, n_d) for call in calls}
            cache = step.cache.with_storages(cuts)
            self._write(step, hidden, plan, cache, noting)
            meter.live["draft"] = sum(cache.layers[call.index].live_bytes() for call in calls)
            meter.watch(calls[0].new[0], calls[0].tokens, len(calls))
            del meter.live["draft"]
        return noting

    def _write(self, step: Step, hidden: torch.Tensor, plan: Plan, cache: EvictionCache, noting: _Noting) -> None:
        """Write draft tokens over `cache` by greedy decoding. hidden: [B, 1, E] last hidden state of the prompt's last
        token."""
        arguments, unseen = self.arguments, Meter()
        logits, at = head(arguments.top), step.positions[:, : step.columns][:, -1:]
        for number in range(1, step.plan.policy.rows.n_d + 1):
            ids, at = logits(hidden).argmax(-1), at + 1
            final = int(at.max()) if rotary.rope_depends_on_length(step.decoder) else None
            mask = arguments.mask_for(step.chunk.end, number)  # for the prompt and all draft tokens so far
            inputs = dict(input_ids=ids, attention_mask=mask, position_ids=at.long(), use_cache=True, return_dict=True)
            one = Step(
                plan=plan, decoder=step.decoder, cache=cache, meter=unseen, positions=at, padding=0 * step.padding,
                first=0 * step.first, inputs=inputs | {CACHE: cache}, chooser=noting, final_position=final,
            )  # fmt: skip
            with within(pause=None, few_rows=few_rows.has_few(step.decoder, ids, None)):
                hidden = one.through(self.run).last_hidden_state


def _cut(call: LayerCall, plan: Plan, room: int) -> Storage:
    """Copy the slots that the SnapKV policy keeps within the layer's budget, with `room` free rows per head."""
    kv, rows = call.slots.kv, call.rows
    read = replace(call.step.read, rows=plan.policy.rows)
    step = replace(call.step, plan=plan, read=read, meter=Meter())  # a separate meter: the report leaves the draft out
    with call.layer.storage.here():
        first = LayerCall(step, call.module, rows.q, kv.k, kv.v, call.to_store, kv.options, out=rows.out, lse=rows.lse)
        alive = first.slots.alive
        slots = np.minimum(call.step.read.budgets.targets[call.order], alive)
        slots = np.where(call.tokens > 0, slots, alive)  # a batch row with only padding in this chunk keeps all slots
        choice = choose(first, slots)
        storage = call.layer.storage.gathered()
        return storage.moved(choice.keep + room, choice.index, choice.keep, *call.to_store, call.slots.pos, kv.first)
