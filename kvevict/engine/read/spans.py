"""The loop around the text decoder. A prompt goes through it chunk by chunk, each as [chunk | appended rows]. Tokens
after a prompt are one span."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ... import cautions, rotary
from ...context import context
from ...policy.rows.drafted import has_head
from ...weights import Owner
from ..slots import archive, host
from ..slots.meter import Meter
from ..slots.storage import ROOM
from . import budgets, propagate, replay, schedule
from .choosers import Chooser, Deciding
from .decisions import while_decoding
from .draft import Drafting, Redrafting
from .residual import Errors
from .step import Read, Step

OF_EVERY_TOKEN = ("output_hidden_states", "output_router_logits")  # outputs of every token: a chunk has only a part


class Spans:
    """The tokens of one call on their way through the decoder, a `Step` for each span of them: a chunk, a decoded
    token, or tokens that crop() may take back.

    arguments  the call's `kvevict.engine.hook.arguments.Arguments`
    run        the decoder's original forward
    output     the decoder's output for all tokens, once all are read, with the last hidden states that the caller wants
    """

    output: Any = None

    def __init__(self, arguments: Any, run: Any) -> None:
        self.arguments, self.run, self.plan, self.policy = arguments, run, arguments.plan, arguments.policy
        self.cache, self.layers = arguments.cache, arguments.layers

    def steps(self) -> Iterator[Step]:
        """Step through the call; yields each step once it is done."""
        hidden = []
        for step in self.spans():
            output = self.step(step)
            hidden = _last_rows([*hidden, output.last_hidden_state], self.arguments.wanted)
            yield step
        output.last_hidden_state = hidden[0] if len(hidden) == 1 else torch.cat(hidden, 1)
        self.output = output

    def read(self) -> Any:
        """The output after all `steps`."""
        for _ in self.steps():
            pass
        return self.output

    def spans(self) -> Iterator[Step]:
        """The steps of the call, one after the other: each is to be done before the next is asked for."""
        arguments = self.arguments
        candidates = arguments.rolls_back and arguments.wanted == arguments.tokens  # that crop() may take back
        follows = arguments.columns > 0 and (arguments.tokens == 1 or candidates)
        return self._following() if follows else self._prompt()

    def begin(self) -> None:
        """Mark the cache as half read: from here on it changes, until `settle`."""
        self.cache.sequence.half_read, self.cache.sequence.thread = True, threading.get_ident()
        self.arguments.outer.spans = self

    def settle(self) -> None:
        """End the model's call: note the rows' next positions; the cache is whole again."""
        arguments, sequence = self.arguments, self.cache.sequence
        packed, before = arguments.packing.place is not None, sequence.next_position
        if packed:
            sequence.fix()  # the last columns are not the last slots of every row
            sequence.packed += ((arguments.columns, arguments.columns + arguments.tokens),)
        if packed or before is not None:
            after = (arguments.positions()[:, -1] + 1).masked_fill(arguments.first == arguments.tokens, 0)
            sequence.next_position = after if before is None else torch.maximum(before, after)
        sequence.half_read = False
        arguments.outer.spans = None  # no cycle keeps the cache's memory

    def step(self, step: Step) -> Any:
        """The decoder's output for a step."""
        compiled = step.decoding and self.policy.compiled
        output = step.through(partial(replay.decoded, step, self.run) if compiled else self.run)
        if self.policy.decode or not step.decoding:
            self.cache.sequence.archived = self.cache.sequence.columns
        if step.chooser is not None:
            step.chooser.end(self, step, output.last_hidden_state[:, -1:])
        if self.policy.decode or not step.decoding:
            host.wait()  # between steps the host may read and move what was archived
        return output

    def _following(self) -> Iterator[Step]:
        """The one step of tokens after a prompt: a decoded token, or tokens that are all stored."""
        arguments, plan, policy, layers = self.arguments, self.plan, self.policy, self.layers
        decodes = arguments.tokens == 1
        chooser: Chooser | None = Chooser()
        if decodes and arguments.padding.any():
            raise ValueError("attention_mask hides the newly decoded token; its last column must be 1")
        self.begin()
        if not decodes or (policy.decode and self.cache.sequence.policy is not policy):  # slots may be evicted
            archive.begin(self.cache.sequence, self.layers, self.policy.recall)
        if decodes:
            budgets.renew(policy, self.cache, layers, plan.kv_heads, plan.ranks)
        self._note_prompts()
        if decodes and (policy.decode or policy.carry == "sum"):
            most = lambda order: self._most(layers[order])  # noqa: E731
            chooser = Deciding(while_decoding(policy, len(layers), plan.kv_heads, most))
        elif decodes:
            chooser = None
        yield self._span(0, arguments.tokens, self.cache.meter or Meter(), chooser)

    def _note_prompts(self) -> None:
        """If only decoded slots may be cut: a layer without a known prompt counts all its slots so far as prompt."""
        for layer in self.layers if self.policy.keep_prompt else ():
            if layer.prompt is None and layer.counts is not None:
                layer.prompt = self.plan.ranks.counts(layer).copy()

    def _most(self, layer: Any) -> np.ndarray:
        """[B] slots over all heads that a layer is cut to while decoding."""
        return layer.budget + (layer.prompt.sum(1) if self.policy.keep_prompt else 0)

    def _prompt(self) -> Iterator[Step]:
        """The steps of a prompt: its chunks, and the tokens after it that may be taken back."""
        arguments, plan, policy = self.arguments, self.plan, self.policy
        wanted = arguments.wanted
        drafted = wanted - 1 if arguments.rolls_back and wanted > 1 else 0  # candidates after the prompt's end
        prompt = arguments.tokens - drafted
        meter = Meter((index, layer.live_bytes()) for index, layer in zip(plan.order, self.layers, strict=True))
        with meter.clock("read"):
            chunks, read = self._begin(prompt, meter, wanted - drafted, bool(drafted))
        self._note_prompts()
        self.prompts = [layer.prompt for layer in self.layers]
        held = self._stored(read).sum(0)
        going_on = (read.tokens == 0) | self._decoded(read, held)
        before = np.array([policy.slots(n) for n in read.seen - read.tokens]) * plan.kv_heads * len(self.layers)
        recalled, over = False, (held > before).any()  # as right after `load_cache`, whose layers have all slots
        with meter.clock("read"):
            rows = [each.rows + each.appended for each in chunks]
            for at, chunk in enumerate(_progress(chunks, policy.progress)):
                if (chunk.last or policy.schedule == "prompt") and not going_on.any():
                    recalled = archive.recall_all(self.layers, meter) or recalled or over
                    if recalled or policy.recalling.slots(max(read.seen)) > policy.slots(max(read.seen)):
                        read.budgets.policy = policy.recalling
                chooser = self._chooser(read, chunk)
                drafts = policy.redrafting and chunk.last and recalled and read.budgets.cuts.any()
                if drafts and context().asks and has_head(arguments.top):
                    chooser = Redrafting(chooser)
                yield self._span(chunk.start, chunk.end, meter, chooser, read, chunk, sum(rows[at + 1 :]))
                self._set_budgets(read)
                if chooser.errors is not None:
                    read.budgets.note(chooser.errors.layers(plan, arguments.device).cpu().numpy())
            for layer, before in zip(self.layers, self.prompts, strict=True):
                layer.prompt, held = None, plan.ranks.counts(layer).copy()
                if policy.keep_prompt:
                    layer.prompt = held if before is None else np.where(going_on[:, None], before, held)
            if drafted:
                yield self._span(prompt, arguments.tokens, meter, Chooser())
        with meter.clock("read"):  # the report waits for a GPU to have done the rest
            own = [index in plan.order for index in range(len(self.cache.layers))]
            meter.write([layer if ours else None for layer, ours in zip(self.cache.layers, own)], policy.kv)
            for watcher in read.watchers:
                meter.report |= watcher.report(len(read.seen), own)
        self.cache.meter = meter
        plan.keep(meter)
        if context().learns:
            read.budgets.learn()

    def _begin(self, prompt: int, meter: Meter, wanted: int, drafted: bool) -> tuple:
        """The prompt's chunks and their `Read`. Raises ValueError if the prompt cannot be read."""
        arguments, plan, policy, layers = self.arguments, self.plan, self.policy, self.layers
        tokens = np.maximum(prompt - arguments.padding, 0)
        seen = (tokens if self.cache.sequence.seen is None else tokens + self.cache.sequence.seen).tolist()
        evicts = schedule.evicts(policy, seen)
        narrow, rows = schedule.narrow(plan.order, plan.tsp), policy.rows
        if question := context().question or plan.question:
            rows = question.rows(arguments, prompt)
        chunks = list(schedule.chunks(policy, prompt, tokens.tolist() if evicts else (), rows))
        self._check(prompt, wanted, len(chunks) + drafted + (chunks[-1].appended > 0))
        budgets.check_groups(policy, self.cache, layers, plan.ranks)
        if self._scores(evicts):
            warnings.warn(
                f"these are logits of {prompt} tokens that were read before anything was evicted from them: to score a "
                "text under eviction read its first part into a cache and pass the rest, or take a policy with a "
                "chunk_size; logits_to_keep=1 is enough to read",
                stacklevel=2,
            )
        cautions.of_prompt(policy, self.cache, arguments.decoder.config, seen)
        planned = budgets.Budgets(policy, narrow, plan.kv_heads, seen)
        read = Read(prompt, tokens, rows, planned, watchers=arguments.watchers)
        with meter.clock("draft") if rows.n_d else contextlib.nullcontext():
            read = replace(read, prepared=rows.prepare(arguments, read))
        self.begin()
        archive.begin(self.cache.sequence, self.layers, self.policy.recall)
        self.cache.sequence.policy = policy
        if not arguments.columns or self.cache.owner.model() is not arguments.decoder:
            self.cache.owner = Owner(arguments.decoder)
        most = schedule.read(policy, narrow, np.array([chunk.rows for chunk in chunks])).sum(1).tolist()
        for order, layer in enumerate(layers):
            layer.decode_queries = None  # the queries' slots are no longer the last ones
            layer.archive_expected = max(seen) if policy.recall else 0
            if policy.schedule == "prompt" and len(chunks) > 1:
                layer.expected = (layer.longest() if layer.is_initialized else 0) + most[order] + ROOM
        return chunks, read

    def _check(self, prompt: int, wanted: int, calls: int) -> None:
        """Raise ValueError if `prompt` columns cannot be read in `calls` calls: an argument cannot be split, outputs of
        every token are asked for, or rows that layers after `tsp` do not read."""
        arguments = self.arguments
        flags = [flag for flag in OF_EVERY_TOKEN if arguments.asks(flag)]
        if flags and arguments.packing.place is not None:
            raise ValueError(f"{flags[0]}=True needs a batch padded at the left: set tokenizer.padding_side='left'")
        longest = min(self.policy.chunk_size or prompt, prompt - int(arguments.padding.min()))
        propagate.check(self.plan, longest, wanted, flags)
        name = arguments.unsplittable() if calls > 1 else None
        if name is not None:
            raise ValueError(f"{name} cannot be split into chunks; read the prompt in one pass with chunk_size=None")
        if calls > 1 and flags:
            raise ValueError(f"{flags[0]}=True needs the prompt in one pass: schedule='prompt' and no chunk_size")

    def _scores(self, evicts: bool) -> bool:
        """True if the call scores a text without a cache of the caller's: it then evicts only at its end."""
        arguments, evicts = self.arguments, evicts and self.policy.schedule == "prompt"
        scores = arguments.top is not None and arguments.wanted != 1 and arguments.tokens > 1
        return evicts and arguments.own_cache and scores

    def _chooser(self, read: Read, chunk: Any) -> Any:
        """The chooser of a chunk. The layers get the decided budgets."""
        policy, planned, stored = self.policy, read.budgets, self._stored(read)
        tokens = chunk.end - np.clip(self.arguments.padding, chunk.start, chunk.end)
        observed = (tokens if chunk.again is None else read.tokens) > 0
        observed &= ~self._decoded(read, stored.sum(0))
        decisions = planned.decide(chunk, tokens, stored, observed)
        self._set_budgets(read)
        cuts = planned.cuts.any()
        chooser = Deciding(decisions, Errors(policy.layers.residual) if cuts and policy.layers.measures else None)
        return Drafting(chooser) if chunk.last and cuts and policy.rows.needs_full_prompt else chooser

    def _stored(self, read: Read) -> np.ndarray:
        """[layers, B] slots over all heads."""
        none, counts = 0 * read.tokens, self.plan.ranks.counts
        return np.stack([none if layer.counts is None else counts(layer).sum(1) for layer in self.layers])

    def _decoded(self, read: Read, stored: np.ndarray) -> np.ndarray:
        """bool [B] rows with one new token after stored [B] slots that decoding would not evict from. Such a row is
        decoded beside a row with more tokens."""
        policy, seen, each = self.policy, np.array(read.seen), self.plan.kv_heads * len(self.layers)
        budget = np.array([policy.slots(n) for n in read.seen]) * each
        if policy.keep_prompt:
            budget = budget + sum(0 if prompt is None else prompt.sum(1) for prompt in self.prompts)
        due = schedule.overfull(policy, stored + each, budget, each)
        return (read.tokens == 1) & (seen > 1) & (policy.carry == "none") & ~due

    def _set_budgets(self, read: Read) -> None:
        if read.budgets.budgets is not None:
            for layer, slots in zip(self.layers, read.budgets.budgets, strict=True):
                layer.budget = slots

    def _span(
        self, start: int, end: int, meter: Meter, chooser: Any, read: Read | None = None, chunk: Any = None,
        ahead: int = 0,
    ) -> Step:  # fmt: skip
        """The `Step` of columns start .. end-1, with the rows that are appended to a chunk."""
        arguments, extra = self.arguments, None
        if chunk is not None and chunk.appended:
            extra = read.rows.rows_for(chunk, arguments, read)
        positions = arguments.positions()[:, start:end]
        if extra is not None:
            after = extra.positions
            if after is None:
                after = positions[:, -1:] + 1 + torch.arange(chunk.appended, device=arguments.device)
            positions = torch.cat([positions, after], 1)
        rows, positions = positions.shape[1], positions.to(torch.int32).contiguous()
        inputs = arguments.inputs(start, end, extra)
        inputs["position_ids"] = arguments.position_ids_of(start, end, positions.long())
        final = int(arguments.positions().max()) if rotary.rope_depends_on_length(arguments.decoder) else None
        return Step(
            plan=self.plan, decoder=arguments.decoder, cache=self.cache, meter=meter, positions=positions,
            padding=np.clip(arguments.padding - start, 0, rows), inputs=inputs, read=read, chunk=chunk,
            first=(arguments.first - start).clamp(0, rows).to(torch.int32), chooser=chooser, extra=extra, ahead=ahead,
            final_position=final,
        )  # fmt: skip


def _last_rows(hidden: list, wanted: int) -> list:
    """The chunks that hold the last `wanted` rows; all of them for 0."""
    if wanted:
        while sum(h.shape[1] for h in hidden[1:]) >= wanted:
            hidden = hidden[1:]
    return hidden


def _progress(chunks: list, show: bool) -> list:
    if not show or len(chunks) < 2:
        return chunks
    from tqdm import tqdm

    return tqdm(chunks, desc="reading", unit="chunk")
