"""The loop around the text decoder. A prompt goes through it chunk by chunk, each as [chunk | appended rows]. Tokens
after a prompt are one span."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from ...models import rotary
from ..memory import archive, host
from ..memory.meter import Meter
from ..record import replay
from . import budgets
from .answering import Answered
from .choosers import Chooser, Deciding
from .decisions import while_decoding
from .prompt import Prompt
from .step import Read, Step


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
        hidden, wanted = [], self.arguments.wanted
        for step in self.spans():
            output = self.step(step)
            hidden.append(output.last_hidden_state)
            while wanted and sum(h.shape[1] for h in hidden[1:]) >= wanted:  # 0: all rows are wanted
                hidden.pop(0)
            yield step
        output.last_hidden_state = hidden[0] if len(hidden) == 1 else torch.cat(hidden, 1)
        self.output = output

    def spans(self) -> Iterator[Step]:
        """The steps of the call, one after the other: each is to be done before the next is asked for."""
        arguments = self.arguments
        candidates = arguments.rolls_back and arguments.wanted == arguments.tokens  # that crop() may take back
        follows = arguments.columns > 0 and (arguments.tokens == 1 or candidates)
        return self._following() if follows else Prompt(self).steps()

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
        compiled = step.decoding and self.plan.run.compiled
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
        answers = decodes and self.cache.sequence.awaits and not arguments.rolls_back
        answers = answers and self.cache.sequence.policy == policy  # the prompt's
        if not answers:
            archive.settle(self.cache.sequence, self.layers)
        if not decodes or (policy.decode and self.cache.sequence.policy is not policy):  # slots may be evicted
            archive.begin(self.cache.sequence, self.layers, policy.recall, plan.run)
        if decodes:
            budgets.renew(policy, self.cache, layers, plan.kv_heads, plan.ranks)
        self.note_prompts()
        if decodes and (policy.decode or policy.carry == "sum"):
            chooser = Deciding(while_decoding(policy, len(layers), plan.kv_heads, self._most))
        elif decodes:
            chooser = Answered() if answers else None
        yield self.span(0, arguments.tokens, self.cache.meter or Meter(), chooser)

    def note_prompts(self) -> None:
        """If only decoded slots may be cut: a layer without a known prompt counts all its slots so far as prompt."""
        for layer in self.layers if self.policy.keep_prompt else ():
            if layer.prompt is None and layer.counts is not None:
                layer.prompt = self.plan.ranks.counts(layer).copy()

    def _most(self, order: int) -> np.ndarray:
        """[B] slots over all heads that a layer is cut to while decoding."""
        layer = self.layers[order]
        return layer.budget + (layer.prompt.sum(1) if self.policy.keep_prompt else 0)

    def span(
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
        inputs["position_ids"] = arguments.places.chunk(start, end, positions.long())
        final = int(arguments.positions().max()) if rotary.rope_depends_on_length(arguments.decoder) else None
        return Step(
            plan=self.plan, decoder=arguments.decoder, cache=self.cache, meter=meter, positions=positions,
            padding=np.clip(arguments.padding - start, 0, rows), inputs=inputs, read=read, chunk=chunk,
            first=(arguments.first - start).clamp(0, rows).to(torch.int32), chooser=chooser, extra=extra, ahead=ahead,
            final_position=final,
        )  # fmt: skip
