"""The loop around the text decoder: a prompt goes through it chunk by chunk, each as [chunk | rows that read along]."""

import contextlib
import warnings
from dataclasses import dataclass

import numpy as np
import torch

from .. import families
from . import budgets, schedule
from .cascade import Cascade
from .choosers import Append, Group
from .draft import Drafting
from .meter import Meter
from .residual import Errors
from .step import Read, Step, enter
from .storage import ROOM


@dataclass
class ChunkEnd:
    """What a chooser may need when a chunk has been through all layers."""

    step: Step
    request: object
    run: object  # the decoder's own forward
    hidden: torch.Tensor  # [B, 1, E] of the chunk's last row


class Reader:
    """Runs one `Request` through the decoder whose own forward is `run`."""

    def __init__(self, request, run):
        self.request, self.run, self.patch, self.policy = request, run, request.patch, request.policy

    def decode(self):
        """One token."""
        request = self.request
        if request.padding.any():
            raise ValueError("attention_mask hides the newly decoded token; its last column must be 1")
        request.begin()
        budgets.renew(self.policy, request.cache, request.layers, request.heads, self.patch.ranks)
        watches = self.policy.decode or self.policy.score.carries
        return self._call(
            0, request.tokens, self.patch.own_meter(), Group(budgets.full(self.policy)) if watches else None
        )

    def append(self):
        """Tokens that may be taken back by crop(): stored as they are."""
        self.request.begin()
        return self._call(0, self.request.tokens, self.patch.own_meter(), Append())

    def read(self):
        """A prompt."""
        request, patch, policy = self.request, self.patch, self.policy
        wanted = request.wanted
        drafted = wanted - 1 if request.rolls_back and wanted > 1 else 0  # candidates behind the prompt's end
        prompt = request.tokens - drafted
        meter = Meter((index, layer.live_bytes()) for index, layer in zip(patch.order, request.layers, strict=True))
        with meter.clock("read"):
            chunks, read = self._begin(prompt, meter, wanted - drafted, bool(drafted))
        hidden = []
        with meter.clock("read"):
            for chunk in _progress(chunks, policy.progress):
                output = self._read_chunk(read, chunk)
                hidden = _tail([*hidden, output.last_hidden_state], wanted)
            if drafted:
                output = self._call(prompt, request.tokens, meter, Append())
                hidden = _tail([*hidden, output.last_hidden_state], wanted)
        output.last_hidden_state = hidden[0] if len(hidden) == 1 else torch.cat(hidden, 1)
        with meter.clock("read"):  # the report waits for a GPU to have done the rest
            meter.write(read, patch, request.cache)
        patch.keep(meter)
        read.budgets.learn()
        return output

    def _begin(self, prompt, meter, wanted, drafted) -> tuple:
        """The chunks of the prompt, and the read that they are of; raises ValueError for what cannot be read."""
        request, policy, layers = self.request, self.policy, self.request.layers
        tokens = np.maximum(prompt - request.padding, 0)
        seen = (tokens if layers[0].seen is None else tokens + layers[0].seen.tolist()).tolist()
        evicts = schedule.evicts(policy, seen)
        read = Read(prompt, tokens, seen, evicts, meter)
        along = max(map(policy.rows.along, tokens.tolist())) if evicts else 0
        limits = schedule.limits(policy, self.patch.order, self.patch.tsp)
        chunks = list(schedule.chunks(policy, prompt, limits, along))
        request.check_read(prompt, wanted, len(chunks) + drafted + (chunks[-1].along > 0))
        budgets.check_groups(policy, request.cache, layers, self.patch.ranks)
        if request.scores(evicts):
            warnings.warn(
                f"these are logits of {prompt} tokens that were read before anything was evicted from them: to score a "
                "text under eviction read its first part into a cache and pass the rest, or take a policy with a "
                "chunk_size; logits_to_keep=1 is enough to read",
                stacklevel=2,
            )
        read.along = policy.rows.prepare(request, read)
        read.budgets = budgets.Budgets(self.patch, layers, request.heads, seen)
        request.begin()
        request.cache.read_under(policy)
        for order, layer in enumerate(layers):
            layer.recent = None  # their slots are no longer the last ones
            if policy.schedule == "prompt" and len(chunks) > 1:
                most = sum(min(chunk.end - chunk.start, limits[order]) for chunk in chunks)
                layer.expect((layer.longest() if layer.is_initialized else 0) + most + ROOM)
        return chunks, read

    def _read_chunk(self, read, chunk):
        request = self.request
        if chunk.evicts:
            read.budgets.split(chunk, request.padding)
        chooser = self._chooser(read, chunk)
        step = self._step(chunk.start, chunk.end, read.meter, chooser, read, chunk)
        along = read.along.last(chunk.along) if chunk.along else None
        enter(step)
        with contextlib.nullcontext() if along is None else along.adapted(request.decoder):
            output = self._run(step, chunk.start, chunk.end, along)
        if chunk.along:
            output.last_hidden_state = output.last_hidden_state[:, : -chunk.along]
        chooser.end(ChunkEnd(step, request, self.run, output.last_hidden_state[:, -1:]))
        if chooser.errors is not None:
            read.budgets.note(chooser.errors.layers(self.patch, request.device))
        return output

    def _chooser(self, read, chunk):
        policy = self.policy
        cuts = chunk.evicts and read.budgets.cuts.any()
        if cuts and policy.layers.cascades:
            chooser = Cascade(read.budgets)
        else:
            chooser = Group(read.budgets.limit(chunk), Errors() if cuts and policy.layers.measures else None)
        return Drafting(chooser) if chunk.last and cuts and policy.rows.whole else chooser

    def _call(self, start, end, meter, chooser):
        step = self._step(start, end, meter, chooser)
        enter(step)
        return self._run(step, start, end)

    def _run(self, step, start, end, along=None):
        """The decoder over columns start..end-1 and, behind them, the rows `along`."""
        positions = self.request.position_ids_of(start, end, step.positions.long())
        return self.run(**self.request.inputs(start, end, along), position_ids=positions)

    def _step(self, start, end, meter, chooser, read=None, chunk=None):
        request = self.request
        positions = request.positions()[:, start:end]
        rows = 0 if chunk is None else chunk.along
        if rows:
            behind = read.along.positions
            if behind is None:
                behind = positions[:, -1:] + 1 + torch.arange(rows, device=request.device)
            positions = torch.cat([positions, behind], 1)
        most = end - start + rows
        final = int(request.positions().max()) if families.rope_depends_on_length(request.decoder) else None
        return Step(
            self.patch, request.decoder, request.cache, meter, positions.to(torch.int32).contiguous(),
            (request.first - start).clamp(0, most).to(torch.int32), np.clip(request.padding - start, 0, most),
            chooser, read, chunk, rows, final,
        )  # fmt: skip


def _tail(hidden, wanted):
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
