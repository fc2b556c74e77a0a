"""The reading of a prompt: its chunks, the choice after each, and the report."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import cautions
from ...cautions import bar
from ...context import context
from ..memory import archive
from ..memory.meter import Meter
from ..memory.storage import ROOM
from ..methods import propagate
from ..methods.draft import Drafting
from ..methods.residual import Errors
from . import budgets, schedule
from .answering import Asking
from .choosers import Chooser, Deciding
from .step import Read, Step

if TYPE_CHECKING:
    from .spans import Spans

OF_EVERY_TOKEN = ("output_hidden_states", "output_router_logits")  # outputs of every token: a chunk has only a part


class Prompt:
    """A call's prompt of `columns` columns. The `drafted` tokens after it are candidates, which may be taken back."""

    read: Read

    def __init__(self, spans: Spans) -> None:
        self.spans, self.arguments, self.plan, self.policy = spans, spans.arguments, spans.plan, spans.policy
        self.cache, self.layers, wanted = spans.cache, spans.layers, spans.arguments.wanted
        self.drafted = wanted - 1 if self.arguments.rolls_back and wanted > 1 else 0
        self.columns = self.arguments.tokens - self.drafted
        self.meter = Meter(
            (i, layer.chosen.live_bytes()) for i, layer in zip(self.plan.order, self.layers, strict=True)
        )

    def steps(self) -> Iterator[Step]:
        """The steps of the chunks, and of the tokens after them."""
        arguments, plan, policy, meter = self.arguments, self.plan, self.policy, self.meter
        with meter.clock("read"):
            chunks, read = self._begin()
        self.spans.note_prompts()
        self.read, self.prompts = read, [layer.prompt for layer in self.layers]
        held = self._stored().sum(0)
        going_on = (read.tokens == 0) | self._decoded(held)
        asks = policy.answered and context().asks and not arguments.rolls_back  # an answer's first tokens choose, too
        with meter.clock("read"):
            rows = [each.rows + each.appended for each in chunks]
            for at, chunk in enumerate(bar(chunks, "reading", "chunk", plan.run.progress)):
                if (chunk.last or policy.schedule == "prompt") and not going_on.any():
                    archive.recall_all(self.layers, meter, policy.schedule == "prompt" and read.evicts)
                    read.budgets.recall()
                chooser = self._chooser(chunk)
                if asks and chunk.last and not going_on.any() and read.budgets.cuts.any():
                    chooser = Asking(chooser)
                yield self.spans.span(chunk.start, chunk.end, meter, chooser, read, chunk, sum(rows[at + 1 :]))
                self._set_budgets()
                if chooser.errors is not None:
                    read.budgets.note(chooser.errors.layers(plan, arguments.device).cpu().numpy())
                for watcher in read.watchers:
                    watcher.chunk(self.cache)
            for layer, before in zip(self.layers, self.prompts, strict=True):
                layer.prompt, held = None, plan.ranks.counts(layer).copy()
                if policy.keep_prompt:
                    layer.prompt = held if before is None else np.where(going_on[:, None], before, held)
        with meter.clock("read"):  # the report waits for a GPU to have done the rest
            own = [index in plan.order for index in range(len(self.cache.layers))]
            meter.write([layer if ours else None for layer, ours in zip(self.cache.layers, own)], plan.run.kv)
            for watcher in read.watchers:
                meter.report |= watcher.report(len(read.seen), own)
        if self.drafted:  # not of the prompt, nor of its report
            yield self.spans.span(self.columns, arguments.tokens, meter, Chooser())
        self.cache.meter = meter
        plan.keep(meter)
        if isinstance(chooser, Asking):
            chooser.put_aside(plan)
            self.cache.sequence.since = 0 * read.tokens
        if context().learns:
            read.budgets.learn()

    def _begin(self) -> tuple:
        """The prompt's chunks and their `Read`. Raises ValueError if the prompt cannot be read."""
        arguments, plan, policy, layers, prompt = self.arguments, self.plan, self.policy, self.layers, self.columns
        tokens = np.maximum(prompt - arguments.padding, 0)
        seen = (tokens if self.cache.sequence.seen is None else tokens + self.cache.sequence.seen).tolist()
        evicts = schedule.evicts(policy, seen)
        narrow, rows = schedule.narrow(plan.order, plan.tsp), policy.rows
        if question := context().question or plan.question:
            rows = question.rows(arguments, prompt)
        chunks = list(schedule.chunks(policy, prompt, tokens.tolist() if evicts else (), rows))
        self._check(len(chunks) + bool(self.drafted) + (chunks[-1].appended > 0))
        budgets.check_groups(policy, self.cache, layers, plan.ranks)
        scores = arguments.top is not None and arguments.wanted != 1 and arguments.tokens > 1  # a text, not a prompt
        if scores and arguments.own_cache and evicts and (policy.schedule == "prompt" or len(chunks) == 1):
            warnings.warn(
                f"these are logits of {prompt} tokens that were read before anything was evicted from them: to score a "
                "text under eviction read its first part into a cache and pass the rest, or evict after each chunk "
                "(schedule='chunk') with a chunk_size below its length; logits_to_keep=1 is enough to read",
                stacklevel=2,
            )
        cautions.of_prompt(policy, self.cache, arguments.decoder.config, seen)
        planned = budgets.Budgets(policy, narrow, plan.kv_heads, seen)
        read = Read(prompt, tokens, rows, planned, watchers=arguments.watchers)
        with self.meter.clock("draft") if rows.n_d else contextlib.nullcontext():
            read = replace(read, prepared=rows.prepare(arguments, read))
        self.spans.begin()
        archive.begin(self.cache.sequence, self.layers, policy.recall, plan.run)
        self.cache.sequence.policy = policy
        most = schedule.read(policy, narrow, np.array([chunk.rows for chunk in chunks])).sum(1).tolist()
        for order, layer in enumerate(layers):
            layer.decode_queries = None  # the queries' slots are no longer the last ones
            if policy.schedule == "prompt" and len(chunks) > 1 and not (policy.recall and evicts):
                layer.expected = (layer.longest() if layer.is_initialized else 0) + most[order] + ROOM
        return chunks, read

    def _check(self, calls: int) -> None:
        """Raise ValueError if the prompt cannot be read in `calls` calls: an argument cannot be split, outputs of every
        token are asked for, or rows that layers after `tsp` do not read."""
        arguments, prompt = self.arguments, self.columns
        flags = [flag for flag in OF_EVERY_TOKEN if arguments.asks(flag)]
        if flags and arguments.packing.place is not None:
            raise ValueError(f"{flags[0]}=True needs a batch padded at the left: set tokenizer.padding_side='left'")
        longest = min(self.policy.chunk_size or prompt, prompt - int(arguments.padding.min()))
        propagate.check(self.plan, longest, arguments.wanted - self.drafted, flags)
        name = arguments.given.unsplittable() if calls > 1 else None
        if name is not None:
            raise ValueError(f"{name} cannot be split into chunks; read the prompt in one pass with chunk_size=None")
        if calls > 1 and flags:
            raise ValueError(f"{flags[0]}=True needs the prompt in one pass: schedule='prompt' and no chunk_size")

    def _chooser(self, chunk: Any) -> Any:
        """The chooser of a chunk. The layers get the decided budgets."""
        policy, planned, stored = self.policy, self.read.budgets, self._stored()
        tokens = chunk.end - np.clip(self.arguments.padding, chunk.start, chunk.end)
        observed = (tokens if chunk.again is None else self.read.tokens) > 0
        observed &= ~self._decoded(stored.sum(0))
        decisions = planned.decide(chunk, tokens, stored, observed)
        self._set_budgets()
        cuts = planned.cuts.any()
        chooser = Deciding(decisions, Errors(policy.layers.residual) if cuts and policy.layers.measures else None)
        return Drafting(chooser) if chunk.last and cuts and policy.rows.needs_full_prompt else chooser

    def _stored(self) -> np.ndarray:
        """[layers, B] slots over all heads."""
        none, counts = 0 * self.read.tokens, self.plan.ranks.counts
        return np.stack([none if layer.counts is None else counts(layer).sum(1) for layer in self.layers])

    def _decoded(self, stored: np.ndarray) -> np.ndarray:
        """bool [B] rows with one new token after stored [B] slots that decoding would not evict from. Such a row is
        decoded beside a row with more tokens."""
        policy, read = self.policy, self.read
        seen, each = np.array(read.seen), self.plan.kv_heads * len(self.layers)
        budget = np.array([policy.slots(n) for n in read.seen]) * each
        if policy.keep_prompt:
            budget = budget + sum(0 if prompt is None else prompt.sum(1) for prompt in self.prompts)
        due = schedule.overfull(policy, stored + each, budget, each)
        return (read.tokens == 1) & (seen > 1) & (policy.carry == "none") & ~due

    def _set_budgets(self) -> None:
        if self.read.budgets.budgets is not None:
            for layer, slots in zip(self.layers, self.read.budgets.budgets, strict=True):
                layer.budget = slots
