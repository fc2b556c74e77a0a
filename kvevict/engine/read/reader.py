"""The loop around the text decoder: a prompt goes through it chunk by chunk, each as [chunk | appended rows]."""

import contextlib
import warnings
from dataclasses import dataclass, replace

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


@dataclass
class ChunkEnd:
    """A chunk that has been through all layers, for its chooser."""

    step: Step
    request: object
    run: object  # the decoder's original forward
    hidden: torch.Tensor  # [B, 1, E] of the chunk's last row


class Reader:
    """Runs one `Request` through the decoder. run: the decoder's original forward."""

    def __init__(self, request, run):
        self.request, self.run, self.patch, self.policy = request, run, request.patch, request.policy

    def decode(self):
        """Decode one token."""
        request, patch, policy = self.request, self.patch, self.policy
        if request.padding.any():
            raise ValueError("attention_mask hides the newly decoded token; its last column must be 1")
        request.begin()
        layers = request.layers
        budgets.renew(policy, request.cache, layers, patch.kv_heads, patch.ranks)
        self._note_prompts()
        chooser = None
        if policy.decode or policy.carry == "sum":
            decisions = while_decoding(policy, len(layers), patch.kv_heads, lambda order: self._most(layers[order]))
            chooser = Deciding(decisions)
        return self._call(0, request.tokens, request.cache.meter or Meter(), chooser)

    def append(self):
        """Append tokens that crop() may take back: all are stored."""
        self.request.begin()
        self._note_prompts()
        return self._call(0, self.request.tokens, self.request.cache.meter or Meter(), Chooser())

    def _note_prompts(self):
        """If only decoded slots may be cut: a layer without a known prompt counts all its slots so far as prompt."""
        for layer in self.request.layers if self.policy.keep_prompt else ():
            if layer.prompt is None and layer.counts is not None:
                layer.prompt = self.patch.ranks.counts(layer)

    def _most(self, layer):
        """[B] slots over all heads that a layer is cut to while decoding."""
        return layer.budget + (layer.prompt.sum(1) if self.policy.keep_prompt else 0)

    def read(self):
        """Read a prompt."""
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
        hidden = []
        with meter.clock("read"):
            for at, chunk in enumerate(_progress(chunks, policy.progress)):
                if at:
                    left = sum(each.rows + len(each.again or ()) for each in chunks[at:])
                    for watcher in read.watchers:
                        watcher.chunk(left)
                output = self._read_chunk(read, chunk)
                hidden = _last_rows([*hidden, output.last_hidden_state], wanted)
            for layer, before in zip(request.layers, self.prompts, strict=True):
                layer.prompt, held = None, patch.ranks.counts(layer)
                if policy.keep_prompt:
                    layer.prompt = held if before is None else np.where(going_on[:, None], before, held)
            if drafted:
                output = self._call(prompt, request.tokens, meter, Chooser())
                hidden = _last_rows([*hidden, output.last_hidden_state], wanted)
        output.last_hidden_state = hidden[0] if len(hidden) == 1 else torch.cat(hidden, 1)
        with meter.clock("read"):  # the report waits for a GPU to have done the rest
            meter.write(read, patch, request.cache)
        request.cache.meter = meter
        patch.keep(meter)
        read.budgets.learn()
        return output

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

    def _read_chunk(self, read, chunk):
        request = self.request
        chooser = self._chooser(read, chunk)
        appended = read.rows.rows_for(chunk, request, read) if chunk.appended else None
        step = self._step(chunk.start, chunk.end, read.meter, chooser, read, chunk, appended)
        enter(step=step)
        with contextlib.nullcontext() if appended is None else appended.adapted(request.decoder):
            output = self._run(step, chunk.start, chunk.end, appended)
        if chunk.appended:
            output.last_hidden_state = output.last_hidden_state[:, : -chunk.appended]
        chooser.end(ChunkEnd(step, request, self.run, output.last_hidden_state[:, -1:]))
        self._set_budgets(read)
        if chooser.errors is not None:
            read.budgets.note(chooser.errors.layers(self.patch, request.device).cpu().numpy())
        return output

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

    def _call(self, start, end, meter, chooser):
        step = self._step(start, end, meter, chooser)
        enter(step=step)
        return self._run(step, start, end)

    def _run(self, step, start, end, appended=None):
        """The decoder over columns start..end-1 and the appended rows."""
        positions = self.request.position_ids_of(start, end, step.positions.long())
        return self.run(**self.request.inputs(start, end, appended), position_ids=positions)

    def _step(self, start, end, meter, chooser, read=None, chunk=None, appended=None):
        request = self.request
        positions = request.positions()[:, start:end]
        rows = 0 if appended is None else chunk.appended
        if rows:
            after = appended.positions
            if after is None:
                after = positions[:, -1:] + 1 + torch.arange(rows, device=request.device)
            positions = torch.cat([positions, after], 1)
        most = end - start + rows
        final = int(request.positions().max()) if families.rope_depends_on_length(request.decoder) else None
        return Step(
            self.patch, request.decoder, request.cache, meter, positions.to(torch.int32).contiguous(),
            (request.first - start).clamp(0, most).to(torch.int32), np.clip(request.padding - start, 0, most),
            chooser, read, chunk, rows, final,
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
