"""The loop around the text decoder. A prompt goes through it chunk by chunk, each as [chunk | appended rows]. Tokens
after a prompt are one span."""

import contextlib
import warnings
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ... import families
from ...context import context, enter
from ...weights import Owner
from ..slots.storage import ROOM
from ..watch.diagnostics import Diagnostics
from ..watch.meter import Meter
from . import budgets, schedule
from .choosers import Chooser, Deciding
from .decisions import while_decoding
from .draft import Drafting
from .residual import Errors
from .step import Read, Step


class Span(NamedTuple):
    """Columns start .. end-1 of a call: a chunk, a decoded token, or tokens that crop() may take back."""

    start: int
    end: int
    meter: Meter
    chooser: Chooser | None  # of the survivors; None: all slots stay
    read: Read | None = None  # None for tokens after a prompt
    chunk: Any = None  # the kvevict.engine.read.schedule.Chunk of the read


@dataclass
class SpanEnd:
    """A span that has been through all layers, for its chooser."""

    step: Step
    request: object
    run: object  # the decoder's original forward
    hidden: torch.Tensor  # [B, 1, E] of the span's last row


class Sequence:
    """The tokens of one `Request` on their way through the decoder. run: the decoder's original forward."""

    def __init__(self, request, run):
        self.request, self.run, self.patch, self.policy = request, run, request.patch, request.policy

    def read(self):
        """The decoder's output for all tokens, with the last hidden states that the caller wants."""
        hidden, request = [], self.request
        for span in self._following() if request.follows else self._prompt():
            output = self.step(span)
            hidden = _last_rows([*hidden, output.last_hidden_state], request.wanted)
        output.last_hidden_state = hidden[0] if len(hidden) == 1 else torch.cat(hidden, 1)
        return output

    def step(self, span):
        """The decoder's output for a span, without the appended rows."""
        request, chunk = self.request, span.chunk
        rows = span.read.rows.rows_for(chunk, request, span.read) if chunk is not None and chunk.appended else None
        step = self._step(span, rows)
        enter(step=step)
        with contextlib.nullcontext() if rows is None else rows.adapted(request.decoder):
            positions = request.position_ids_of(span.start, span.end, step.positions.long())
            output = self.run(**request.inputs(span.start, span.end, rows), position_ids=positions)
        if rows is not None:
            output.last_hidden_state = output.last_hidden_state[:, : -chunk.appended]
        if span.chooser is not None:
            span.chooser.end(SpanEnd(step, request, self.run, output.last_hidden_state[:, -1:]))
        return output

    def _following(self):
        """The one span of tokens after a prompt: a decoded token, or tokens that are all stored."""
        request, patch, policy, layers = self.request, self.patch, self.policy, self.request.layers
        decodes, chooser = request.tokens == 1, Chooser()
        if decodes and request.padding.any():
            raise ValueError("attention_mask hides the newly decoded token; its last column must be 1")
        request.begin()
        if decodes:
            budgets.renew(policy, request.cache, layers, patch.kv_heads, patch.ranks)
        self._note_prompts()
        if decodes and (policy.decode or policy.carry == "sum"):
            most = lambda order: self._most(layers[order])  # noqa: E731
            chooser = Deciding(while_decoding(policy, len(layers), patch.kv_heads, most))
        elif decodes:
            chooser = None
        yield Span(0, request.tokens, request.cache.meter or Meter(), chooser)

    def _note_prompts(self):
        """If only decoded slots may be cut: a layer without a known prompt counts all its slots so far as prompt."""
        for layer in self.request.layers if self.policy.keep_prompt else ():
            if layer.prompt is None and layer.counts is not None:
                layer.prompt = self.patch.ranks.counts(layer)

    def _most(self, layer):
        """[B] slots over all heads that a layer is cut to while decoding."""
        return layer.budget + (layer.prompt.sum(1) if self.policy.keep_prompt else 0)

    def _prompt(self):
        """The spans of a prompt: its chunks, and the tokens after it that may be taken back."""
        request, patch, policy = self.request, self.patch, self.policy
        wanted = request.wanted
        drafted = wanted - 1 if request.rolls_back and wanted > 1 else 0  # candidates after the prompt's end
        prompt = request.tokens - drafted
        meter = Meter((index, layer.live_bytes()) for index, layer in zip(patch.order, request.layers, strict=True))
        with meter.clock("read"):
            chunks, read = self._begin(prompt, meter, wanted - drafted, bool(drafted))
        self._note_prompts()
        self.prompts = [layer.prompt for layer in request.layers]
        going_on = (read.tokens == 0) | self._decoded(read, self._stored(read).sum(0))
        with meter.clock("read"):
            for at, chunk in enumerate(_progress(chunks, policy.progress)):
                if at:
                    rows = [each.rows + len(each.again or ()) for each in chunks[at - 1 :]]
                    for watcher in read.watchers:
                        watcher.chunk(rows[0], sum(rows[1:]))
                chooser = self._chooser(read, chunk)
                yield Span(chunk.start, chunk.end, meter, chooser, read, chunk)
                self._set_budgets(read)
                if chooser.errors is not None:
                    read.budgets.note(chooser.errors.layers(patch, request.device).cpu().numpy())
            for layer, before in zip(request.layers, self.prompts, strict=True):
                layer.prompt, held = None, patch.ranks.counts(layer)
                if policy.keep_prompt:
                    layer.prompt = held if before is None else np.where(going_on[:, None], before, held)
            if drafted:
                yield Span(prompt, request.tokens, meter, Chooser())
        with meter.clock("read"):  # the report waits for a GPU to have done the rest
            meter.write(read, patch, request.cache)
        request.cache.meter = meter
        patch.keep(meter)
        read.budgets.learn()

    def _begin(self, prompt, meter, wanted, drafted) -> tuple:
        """The prompt's chunks and their `Read`. Raises ValueError if the prompt cannot be read."""
        request, patch, policy, layers = self.request, self.patch, self.policy, self.request.layers
        tokens = np.maximum(prompt - request.padding, 0)
        seen = (tokens if layers[0].seen is None else tokens + layers[0].seen.tolist()).tolist()
        evicts = schedule.evicts(policy, seen)
        narrow, rows = schedule.narrow(patch.order, patch.tsp), policy.rows
        if question := context().question or patch.question:
            rows = question.rows(request, prompt)
        chunks = list(schedule.chunks(policy, prompt, narrow, tokens.tolist() if evicts else (), rows))
        request.check_read(prompt, wanted, len(chunks) + drafted + (chunks[-1].appended > 0))
        budgets.check_groups(policy, request.cache, layers, patch.ranks)
        if request.scores(evicts):
            warnings.warn(
                f"these are logits of {prompt} tokens that were read before anything was evicted from them: to score a "
                "text under eviction read its first part into a cache and pass the rest, or take a policy with a "
                "chunk_size; logits_to_keep=1 is enough to read",
                stacklevel=2,
            )
        watchers = context().watchers + ((Diagnostics(),) if policy.diagnose else ())
        read = Read(
            prompt, tokens, seen, evicts, meter, rows, budgets.Budgets(policy, len(layers), patch.kv_heads, seen),
            watchers=watchers,
        )  # fmt: skip
        read = replace(read, prepared=rows.prepare(request, read))
        request.begin()
        request.cache.policy = policy
        if not request.columns or request.cache.owner.model() is not request.decoder:
            request.cache.owner = Owner(request.decoder)
        most = schedule.read(policy, narrow, np.array([chunk.rows for chunk in chunks])).sum(1).tolist()
        for order, layer in enumerate(layers):
            layer.decode_queries = None  # the queries' slots are no longer the last ones
            if policy.schedule == "prompt" and len(chunks) > 1:
                layer.expected = (layer.longest() if layer.is_initialized else 0) + most[order] + ROOM
        return chunks, read

    def _chooser(self, read, chunk):
        """The chooser of a chunk. The layers get the decided budgets."""
        policy, planned, stored = self.policy, read.budgets, self._stored(read)
        tokens = chunk.end - np.clip(self.request.padding, chunk.start, chunk.end)
        observed = (tokens if chunk.again is None else read.tokens) > 0
        observed &= ~self._decoded(read, stored.sum(0))
        decisions = planned.decide(chunk, tokens, stored, observed)
        self._set_budgets(read)
        cuts = chunk.evicts and planned.cuts.any()
        chooser = Deciding(decisions, Errors(policy.layers.residual) if cuts and policy.layers.measures else None)
        return Drafting(chooser) if chunk.last and cuts and policy.rows.needs_full_prompt else chooser

    def _stored(self, read):
        """[layers, B] slots over all heads."""
        none, counts = 0 * read.tokens, self.patch.ranks.counts
        return np.stack([none if layer.counts is None else counts(layer).sum(1) for layer in self.request.layers])

    def _decoded(self, read, stored):
        """bool [B] rows with one new token after stored [B] slots that decoding would not evict from. Such a row is
        decoded beside a row with more tokens."""
        policy, seen, each = self.policy, np.array(read.seen), self.patch.kv_heads * len(self.request.layers)
        budget = np.array([policy.slots(n) for n in read.seen]) * each
        if policy.keep_prompt:
            budget = budget + sum(0 if prompt is None else prompt.sum(1) for prompt in self.prompts)
        due = schedule.overfull(policy, stored + each, budget, each)
        return (read.tokens == 1) & (seen > 1) & (policy.carry == "none") & ~due

    def _set_budgets(self, read):
        if read.budgets.budgets is not None:
            for layer, slots in zip(self.request.layers, read.budgets.budgets, strict=True):
                layer.budget = slots

    def _step(self, span, rows):
        """The `Step` of a span and its appended rows."""
        request, start, end = self.request, span.start, span.end
        positions, appended = request.positions()[:, start:end], 0
        if rows is not None:
            after, appended = rows.positions, span.chunk.appended
            if after is None:
                after = positions[:, -1:] + 1 + torch.arange(appended, device=request.device)
            positions = torch.cat([positions, after], 1)
        most = end - start + appended
        final = int(request.positions().max()) if families.rope_depends_on_length(request.decoder) else None
        return Step(
            self.patch, request.decoder, request.cache, span.meter, positions.to(torch.int32).contiguous(),
            (request.first - start).clamp(0, most).to(torch.int32), np.clip(request.padding - start, 0, most),
            span.chooser, span.read, span.chunk, appended, None if rows is None else rows.unseen, final,
        )  # fmt: skip


def _last_rows(hidden, wanted):
    """The chunks that hold the last `wanted` rows; all of them for 0."""
    if wanted:
        while sum(h.shape[1] for h in hidden[1:]) >= wanted:
            hidden = hidden[1:]
    return hidden


def _progress(chunks, show):
    if not show or len(chunks) < 2:
        return chunks
    from tqdm import tqdm

    return tqdm(chunks, desc="reading", unit="chunk")
