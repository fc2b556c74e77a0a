"""The loop around the text decoder, which reads the tokens of one call span by span. A prompt's spans are its chunks,
each read as [chunk | appended rows], and slots are evicted after each chunk. Tokens after a prompt are one span."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ... import cautions
from ...context import context
from ...policy.reach import reach
from ..memory.meter import Meter
from ..memory.storage import ROOM
from ..methods import propagate
from ..methods.draft import Drafting
from ..methods.residual import Errors
from ..record import recordings
from . import budgets, schedule
from .answering import Answered, Asking, Recalling
from .choosers import Chooser, Deciding
from .decisions import while_decoding
from .plan import Plan
from .step import OF_EVERY_TOKEN, Read, Step, span


class Spans:
    """Reads the tokens of one call with a `Step` for each span, which is a chunk, a decoded token, or candidates of
    assisted decoding, which crop() may remove again.

    arguments  the call's `kvevict.engine.hook.arguments.Arguments`
    run        the decoder's original forward
    output     the decoder's output after the last step, with the last hidden states that the caller wants
    """

    output: Any = None

    def __init__(self, arguments: Any, run: Callable) -> None:
        self.arguments, self.run, self.plan, self.policy = arguments, run, arguments.plan, arguments.policy
        self.cache, self.layers = arguments.cache, arguments.layers

    def steps(self) -> Iterator[Step]:
        """Run the steps of the call; yields each step after it has run."""
        arguments, hidden, wanted = self.arguments, [], self.arguments.wanted
        candidates = arguments.rolls_back and wanted == arguments.tokens  # whether the tokens may be removed again
        follows = arguments.columns > 0 and (arguments.tokens == 1 or candidates)
        for step in self._following() if follows else self._prompt():
            output = self._through(step)
            hidden.append(output.last_hidden_state)
            while wanted and sum(h.shape[1] for h in hidden[1:]) >= wanted:  # wanted 0: the caller wants all rows
                hidden.pop(0)
            yield step
        output.last_hidden_state = hidden[0] if len(hidden) == 1 else torch.cat(hidden, 1)
        self.output = output

    def settle(self) -> None:
        """End the model's call, and note the next position of each batch row."""
        arguments, sequence = self.arguments, self.cache.sequence
        packed, before = arguments.packing.place is not None, sequence.next_position
        if packed:
            sequence.fix()  # crop() cannot remove the last columns, which are not the last slots of every batch row
            sequence.packed += ((arguments.columns, arguments.columns + arguments.tokens),)
        if packed or before is not None:
            after = (arguments.positions()[:, -1] + 1).masked_fill(arguments.first == arguments.tokens, 0)
            sequence.next_position = after if before is None else torch.maximum(before, after)
        sequence.settle()

    def _through(self, step: Step) -> Any:
        """Run the decoder for a step, and let its chooser end the step. Returns the decoder's output."""
        records = step.decoding and self.plan.records(step.positions.device)
        output = step.through(partial(recordings.decoded, step, self.run) if records else self.run)
        if step.chooser is not None:
            step.chooser.end(step, output.last_hidden_state[:, -1:])
        if step.read is None:  # after a prompt
            step.meter.stored = [layer.counts for layer in self.layers]
        if self.policy.decode or not step.decoding:
            self.cache.tiers.wait()
        return output

    def _following(self) -> Iterator[Step]:
        """Yield the one step of a call after a prompt: a decoded token, or candidates, whose slots are all stored."""
        arguments, plan, policy, layers = self.arguments, self.plan, self.policy, self.layers
        sequence, tiers, decodes = self.cache.sequence, self.cache.tiers, arguments.tokens == 1
        chooser: Chooser | None = Chooser()
        if decodes and arguments.padding.any():
            raise ValueError("attention_mask hides the newly decoded token; its last column must be 1")
        sequence.begin()
        answers = decodes and tiers.awaits and not arguments.rolls_back
        answers = answers and sequence.policy == policy  # sequence.policy has read the prompt
        if not answers:
            tiers.settle()
        if not decodes or (policy.decode and sequence.policy is not policy):  # the step may evict slots
            tiers.begin(policy.recall, plan.run)
        if decodes:
            budgets.renew(policy, self.cache, layers, plan.kv_heads, plan.ranks)
        note_prompts(plan, layers)
        if decodes and (policy.decode or policy.carry == "sum"):
            kind = Recalling if policy.recall and policy.decode else Deciding
            chooser = kind(while_decoding(policy, len(layers), plan.kv_heads, self._most))
        elif decodes:
            chooser = Answered() if answers else None
        yield span(self.arguments, 0, arguments.tokens, self.cache.meter or Meter(), chooser)

    def _most(self, order: int) -> np.ndarray:
        """Return the number of slots [B], over all kv heads, to which decoding cuts a layer."""
        layer = self.layers[order]
        return layer.budget + (layer.prompt.sum(1) if self.policy.keep_prompt else 0)

    def _prompt(self) -> Iterator[Step]:
        """Yield the steps of a prompt's chunks, and then the step of the candidates after the prompt, if any."""
        meter = Meter((index, self.cache.tiers.kept(index).live_bytes()) for index in self.plan.order)
        with meter.clock("read"):
            prompt = Prefill(self.arguments, self.run, meter)
            self.cache.sequence.begin()
            prompt.begin()
            for chunk, ahead, chooser in prompt.chunks():
                yield span(self.arguments, chunk.start, chunk.end, meter, chooser, prompt.read, chunk, ahead)
        with meter.clock("read"):  # the report waits until a GPU has done the rest of the reading
            prompt.report()
        if prompt.candidates:  # they are read after the report, which is of the prompt alone
            yield span(self.arguments, prompt.columns, self.arguments.tokens, meter, Chooser())
        prompt.end(chooser)


class Prefill:
    """The reading of a prompt, which is the call's first `columns` columns. The last `candidates` tokens of the call
    may be removed again, and are not part of the prompt. Raises ValueError if the prompt cannot be read."""

    def __init__(self, arguments: Any, run: Callable, meter: Meter) -> None:
        self.arguments, self.run, self.meter, self.policy = arguments, run, meter, arguments.plan.policy
        self.plan, self.cache, self.layers = plan, cache, layers = arguments.plan, arguments.cache, arguments.layers
        policy, wanted = plan.policy, arguments.wanted
        self.candidates = wanted - 1 if arguments.rolls_back and wanted > 1 else 0
        self.columns = prompt = arguments.tokens - self.candidates
        tokens = np.maximum(prompt - arguments.padding, 0)
        seen = (tokens + arguments.seen).tolist()
        evicts = schedule.evicts(policy, seen)
        self.narrow, rows = schedule.narrow(plan.order, plan.tsp), policy.rows
        if question := context().question or plan.question:
            rows, meter.question = question.rows(arguments, prompt)
        self.parts = list(schedule.chunks(policy, prompt, tokens.tolist() if evicts else (), rows))
        self._check(len(self.parts) + bool(self.candidates) + (self.parts[-1].appended > 0))
        budgets.check_groups(policy, cache, layers, plan.ranks)
        # Whether the caller wants the logits of a text
        scores = arguments.top is not None and wanted != 1 and arguments.tokens > 1
        if scores and arguments.own_cache and evicts and (policy.schedule == "prompt" or len(self.parts) == 1):
            cautions.of_scores(prompt)
        cautions.of_prompt(policy, cache, arguments.decoder.config, seen)
        near = plan.run.is_near(arguments.device.type)
        self.reaches = [reach(policy, near, n, plan.sizes) for n in seen] if policy.recall else []
        loses = evicts and not (len(self.parts) == 1 and policy.recall and all(each.every for each in self.reaches))
        cautions.of_question(meter.question if loses and context().asks and context().question is None else ())
        planned = budgets.Budgets(policy, self.narrow, plan.kv_heads, seen)
        self.read = Read(prompt, tokens, rows, planned, watchers=arguments.watchers)
        with meter.clock("draft") if rows.n_d else contextlib.nullcontext():
            self.read = replace(self.read, prepared=rows.prepare(arguments, self.read))

    def begin(self) -> None:
        """Prepare the cache, which changes from now on."""
        policy, read = self.policy, self.read
        self.cache.tiers.begin(policy.recall, self.plan.run)
        self.cache.sequence.policy = policy
        most = schedule.read(policy, self.narrow, np.array([part.rows for part in self.parts])).sum(1).tolist()
        for order, layer in enumerate(self.layers):
            layer.decode_queries = None  # the slots of the remembered tokens are no longer the last ones
            if policy.schedule == "prompt" and len(self.parts) > 1 and not (policy.recall and read.evicts):
                layer.expected = (layer.longest() if layer.is_initialized else 0) + most[order] + ROOM
        note_prompts(self.plan, self.layers)
        self.prompts = [layer.prompt for layer in self.layers]

    def chunks(self) -> Iterator[tuple[schedule.Chunk, int, Chooser]]:
        """Yield (a chunk, the number of rows to read after the chunk, the chunk's chooser). The caller has to read a
        chunk before it asks for the next one."""
        plan, policy, read = self.plan, self.policy, self.read
        ahead = sum(each.rows + each.appended for each in self.parts)
        going_on = (read.tokens == 0) | self._decoded(self._stored().sum(0))
        every = np.array([reach.every for reach in self.reaches], bool)
        # Whether the layers' slots are to be views of the archive, so that they are not stored twice. Slots in a pool
        # that nothing is evicted from stay there, so that caches join without a copy.
        near = plan.run.is_near(self.arguments.device.type) and plan.run.archive_kv is None
        whole = bool(every.all()) if read.evicts else all(layer.pool is None for layer in self.layers)
        forks = policy.recall and near and whole
        asks = policy.answered and context().asks and not self.arguments.rolls_back  # whether the answer is to choose
        for chunk in cautions.bar(self.parts, "reading", "chunk", plan.run.progress):
            if (chunk.last or policy.schedule == "prompt") and not going_on.any():
                self._recall(read.evicts and (forks or policy.schedule == "prompt"))
                if policy.recall:
                    read.budgets.recall(every)
            chooser, ahead = self._chooser(chunk), ahead - chunk.rows - chunk.appended
            if asks and chunk.last and not going_on.any() and read.budgets.cuts.any():
                chooser = Asking(chooser)
            yield chunk, ahead, chooser
            self._set_budgets()
            if chooser.errors is not None:
                read.budgets.note(chooser.errors.layers(plan, self.arguments.device).cpu().numpy())
            for watcher in read.watchers:
                watcher.chunk(self.cache)
        if forks and not going_on.any():
            self.cache.tiers.share()
        for layer, before in zip(self.layers, self.prompts, strict=True):
            layer.prompt, held = None, plan.ranks.counts(layer).copy()
            if policy.keep_prompt:
                layer.prompt = held if before is None else np.where(going_on[:, None], before, held)

    def _recall(self, always: bool) -> None:
        """Let the layers attend to the slots of all tokens, and choose among them at the next chunk's end, if slots
        were lost, or if `always`."""
        tiers, lost = self.cache.tiers, self.cache.tiers.lost
        if lost or (tiers.every and always):
            before = [layer.positions() for layer in self.layers] if lost else []
            with self.meter.clock("recall"):
                tiers.turn()
            if lost:
                after = [layer.positions() for layer in self.layers]
                self.meter.recalls = [*zip(before, after, strict=True)]

    def report(self) -> None:
        """Write the meter's report."""
        own = [index in self.plan.order for index in range(len(self.cache.layers))]
        layers = [layer if ours else None for layer, ours in zip(self.cache.layers, own)]
        self.meter.write(layers, self.plan.run.kv, [*self.cache.tiers.every.values()])
        assert self.meter.report is not None
        self.meter.report["reach"] = [reach.why for reach in self.reaches] or None
        for watcher in self.read.watchers:
            self.meter.report |= watcher.report(len(self.read.seen), own)

    def end(self, chooser: Chooser) -> None:
        """End the reading of the prompt, after the call's last step. chooser: the chooser of the last chunk."""
        self.cache.meter = self.meter
        self.plan.keep(self.meter)
        if isinstance(chooser, Asking):
            self.cache.tiers.ask(chooser.asked(self.plan))
        if context().learns:
            self.read.budgets.learn()

    def _check(self, calls: int) -> None:
        """Raise ValueError if the prompt cannot be read in `calls` calls of the decoder: an argument cannot be split,
        or the caller wants outputs of every token, or rows that layers after `tsp` do not read."""
        arguments, prompt = self.arguments, self.columns
        flags = [flag for flag in OF_EVERY_TOKEN if arguments.asks(flag)]
        if flags and arguments.packing.place is not None:
            raise ValueError(f"{flags[0]}=True needs a batch padded at the left: set tokenizer.padding_side='left'")
        longest = min(self.policy.chunk_size or prompt, prompt - int(arguments.padding.min()))
        propagate.check(self.plan, longest, arguments.wanted - self.candidates, flags)
        name = arguments.given.unsplittable() if calls > 1 else None
        if name is not None:
            raise ValueError(f"{name} cannot be split into chunks; read the prompt in one pass with chunk_size=None")
        if calls > 1 and flags:
            raise ValueError(f"{flags[0]}=True needs the prompt in one pass: schedule='prompt' and no chunk_size")

    def _chooser(self, chunk: schedule.Chunk) -> Chooser:
        """Decide how many slots each layer keeps after a chunk, and make the chooser that carries the decisions out."""
        policy, planned, stored = self.policy, self.read.budgets, self._stored()
        tokens = chunk.end - np.clip(self.arguments.padding, chunk.start, chunk.end)
        observed = (tokens if chunk.again is None else self.read.tokens) > 0
        observed &= ~self._decoded(stored.sum(0))
        decisions = planned.decide(chunk, tokens, stored, observed)
        self._set_budgets()
        cuts = planned.cuts.any()
        chooser = Deciding(decisions, Errors(policy.layers.residual) if cuts and policy.layers.measures else None)
        drafts = chunk.last and cuts and policy.rows.needs_full_prompt
        return Drafting(chooser, self.arguments, self.run) if drafts else chooser

    def _stored(self) -> np.ndarray:
        """Return the number of stored slots over all kv heads: int [layers, B]."""
        none, counts = 0 * self.read.tokens, self.plan.ranks.counts
        return np.stack([none if layer.counts is None else counts(layer).sum(1) for layer in self.layers])

    def _decoded(self, stored: np.ndarray) -> np.ndarray:
        """Return bool [B]: batch rows that decode one token while other batch rows read prompts, and whose stored [B]
        slots, over all layers and kv heads, are within the budget."""
        policy, read = self.policy, self.read
        seen, each = np.array(read.seen), self.plan.kv_heads * len(self.layers)
        budget = np.array([policy.slots(n) for n in read.seen]) * each
        if policy.keep_prompt:
            budget = budget + sum(0 if prompt is None else prompt.sum(1) for prompt in self.prompts)
        due = schedule.overfull(policy, stored + each, budget, each)
        return (read.tokens == 1) & (seen > 1) & (policy.carry == "none") & ~due

    def _set_budgets(self) -> None:
        """Set the budget of each layer to what `Budgets` has decided."""
        if self.read.budgets.budgets is not None:
            for layer, slots in zip(self.layers, self.read.budgets.budgets, strict=True):
                layer.budget = slots


def note_prompts(plan: Plan, layers: list) -> None:
    """If the policy has `keep_prompt`, count all slots so far as slots of the prompt, in layers without such a
    count."""
    for layer in layers if plan.policy.keep_prompt else ():
        if layer.prompt is None and layer.counts is not None:
            layer.prompt = plan.ranks.counts(layer).copy()
