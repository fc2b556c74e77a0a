import numbers
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..checks import count, flag, fraction, one_of
from ..inputs import CallRows, LayerRows, Observation, OwnPolicy, PromptCall, PromptRead
from ..seen.slots import FREE, Bounds
from . import ROWS, AppendedRows, Question, Rows

ENDING = 8  # number of a prompt's last slots that are always kept if a span elsewhere observes
UNLIMITED = 2**30  # no limit: more slots than any head has


@ROWS.add("probe")
@dataclass(frozen=True)
class Probe(Rows):
    """TAKE's probe (eq. 7-10): the prompt's last tokens are appended to every chunk, and their queries are averaged.

    probe      number of the prompt's last tokens, at most half of the prompt; or a span (start, stop) of the prompt's
               tokens, as in a Python slice
    ema_alpha  weight of earlier chunks' probe queries in the average (eq. 9); the paper: 0.2, for retrieval 0.32. 0.0:
               the current chunk's probe queries alone
    ema        where earlier chunks' probe queries stand when they are averaged: "moved", rotated by the distance that
               the probe has moved since, or "before", at the positions that they had, as eq. 9 is printed
    append     False: nothing is appended; the chunk's last `probe` rows observe (ablation, table 2)

    The probe attends to all alive slots except its own. The prompt's last slots are always kept, because the answer
    continues from there: the probe's own or, with a span, min(8, probe rows) slots; at most half of the prompt. If the
    prompt's question is known, the slots of its request are kept too, up to half of the budget (METHODS section 3).
    """

    probe: int | tuple[int, int] = 32
    ema_alpha: float = 0.2
    append: bool = True
    ema: str = "moved"

    @property
    def span(self) -> tuple[Any, ...] | None:
        """The span (start, stop), or the questions, whose tokens observe; None: the prompt's last tokens do."""
        return self.probe if isinstance(self.probe, tuple) else None

    @property
    def most(self) -> int:
        return self.probe[1] - self.probe[0] if isinstance(self.probe, tuple) else self.probe

    protected = decoded = most

    @property
    def at_the_end(self) -> bool:
        return self.append and not self.span

    @property
    def rotates(self) -> bool:
        return self.append and self.ema_alpha > 0 and self.ema == "moved"

    def check(self, policy: OwnPolicy) -> None:
        if isinstance(self.probe, tuple):
            start, stop = (*self.probe, None, None)[:2]
            if len(self.probe) != 2 or not all(isinstance(end, numbers.Integral) for end in (start, stop)):
                raise TypeError(f"probe must be a number of tokens or a span (start, stop), got {self.probe!r}")
            count("probe's tokens", max(map(abs, self.probe)), 1)
            if start >= stop or (start < 0) != (stop <= 0):
                raise ValueError(
                    f"probe={self.probe!r} is not a span: give start < stop, both counted from the start (>= 0) or "
                    "both from the end (start < 0, stop <= 0)"
                )
        else:
            count("probe", self.probe, 1)
        fraction("ema_alpha", self.ema_alpha)
        flag("append", self.append)
        one_of("ema", self.ema, ("moved", "before"))
        if isinstance(policy.chunk_size, int) and 0 < policy.chunk_size <= self.most:
            raise ValueError(
                f"chunk_size={policy.chunk_size} must be greater than the probe's {self.most} tokens; "
                "give a larger chunk_size or a smaller probe"
            )

    def asked(self, questions: Sequence[Question]) -> Rows:
        if not self.append:
            return super().asked(questions)
        requests = tuple(each.request for each in questions)
        return Questions(**self._options(), requests=requests, questions=tuple(questions))

    def keeping(self, requests: tuple[tuple[int, ...], ...]) -> Rows:
        return Requested(**self._options(), requests=tuple(requests))

    def _options(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(Probe)}

    def lengths(self, tokens: np.ndarray) -> np.ndarray:
        """Return the number of probe rows of each prompt, int [B]. tokens: int [B] lengths of the prompts."""
        return np.full_like(tokens, self.most) if self.span else np.minimum(tokens // 2, self.most)

    def appended(self, tokens: int, rows: int, last: bool) -> int:
        ends = last and not self.span  # the last chunk ends with the probe's tokens
        return int(self.lengths(np.array(tokens)).max()) if self.append and not ends else 0

    def prepare(self, arguments: PromptCall, read: PromptRead) -> AppendedRows | None:
        lengths, size = self.lengths(read.tokens), arguments.policy.chunk_size
        longest = int(lengths.max())
        if self.span:
            shortest = min((n for n in read.tokens if n), default=0)
            if max(self.span[1], -self.span[0]) > shortest:
                raise ValueError(f"probe={self.span} reaches outside a prompt of {shortest} tokens")
        elif size is not None and ((read.tokens > size) & (lengths < longest)).any():
            raise ValueError(
                f"chunk_size={size} is too small for a batch with prompts shorter than {2 * self.most} tokens, whose "
                f"probes are shorter; give chunk_size >= {2 * self.most}"
            )
        if not (self.append and read.evicts):
            return None
        start: Any = read.prompt - longest
        if self.span:
            start = arguments.first + self.span[0] if self.span[0] >= 0 else read.prompt + self.span[0]
        start = torch.as_tensor(start, device=arguments.device).expand(arguments.batch)
        columns = start.long()[:, None] + torch.arange(longest, device=arguments.device)
        columns = columns.clamp_max(read.prompt - 1)  # for a row of padding alone, which has no tokens
        return AppendedRows(arguments.tokens_at(columns), None, columns)

    def accumulate(self, call: LayerRows, past: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Average the probe's queries Q_i over chunks i by eq. 9: Qa_i = alpha * Qa_{i-1} + (1 - alpha) * Q_i, where
        chunk 0 is the first chunk with tokens of the batch row, and Qa_0 = Q_0. Returns (queries Qa_i, fp32
        [B, H, p, D]; position of the first probe row [B]; whether any chunk so far had tokens of the row, bool [B])."""
        count = int(self.lengths(call.read.tokens).max())
        if call.read.prepared is None or not count:
            return None
        queries, position = self._queries(call, count)
        started = call.has_tokens
        if past is None or not self.ema_alpha:
            return queries.float().contiguous(), position, started
        before, was_at, had_started = past
        moved = (was_at, position) if self.rotates else None
        average = call.averaged(before, queries, self.ema_alpha * had_started.float(), moved)
        return average, position, started | had_started

    def _queries(self, call: LayerRows, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (queries of the call's `count` probe rows [B, H, count, D], position of the first probe row [B])."""
        return call.q[:, :, call.q.shape[2] - count :], call.last_position - (count - 1)

    def observe(self, call: LayerRows, past: Any) -> Observation:
        lengths = call.upload(self.lengths(call.read.tokens))
        if not self.append:
            return call.chunk(self.most, lengths)
        queries = past[0].to(call.q.dtype)
        unseen = lengths if call.ends_prompt and not self.span else 0  # the last chunk's last slots are the probe's
        return call.later(queries, skip=queries.shape[2] - lengths, unseen=unseen)

    def observing(self, rows: CallRows) -> np.ndarray:
        return np.minimum(self.lengths(rows.read.tokens), rows.tokens)

    def protect(self, call: LayerRows) -> Any:
        if call.decoding:  # the last decoded rows observe, as a window
            return self.most
        return call.upload(np.minimum(call.read.tokens // 2, self._ending)) if call.ends_prompt else 0

    @property
    def _ending(self) -> int | np.ndarray:
        """The number of the prompt's last slots that are always kept, int or [B]."""
        return min(self.most, ENDING) if self.span else self.most


@dataclass(frozen=True, eq=False)
class Requested(Probe):
    """A probe for one prompt that always keeps the slots of each batch row's request (`Rows.keeping`).

    A request ends with the prompt and may begin at several places. The earliest place whose request fits in half of a
    layer's budget is taken, and all slots of that request are kept. If no request fits, the one from the earliest place
    gets half of the budget: an eighth for the prompt's last tokens, three eighths for the best of its other tokens.
    """

    requests: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def longest(self) -> int:
        """The largest number of tokens in a request of the batch, from its earliest beginning to the prompt's end."""
        return max((n for each in self.requests for n in each), default=0)

    def protect(self, call: LayerRows) -> Any:
        own = super().protect(call)
        if call.read is None or call.left >= self.longest:
            return own
        return torch.maximum(self.kept(call), call.upload(np.zeros(len(self.requests))) + own)

    def kept(self, call: LayerRows) -> torch.Tensor:
        """Return how many last slots of the chunk are kept because they belong to the request: int32 [B]."""
        most, whole, fitting = self._lengths(call)
        kept = np.where(fitting > 0, fitting, np.minimum(np.minimum(most, whole), call.host_budget // 8))
        return call.upload((kept - call.left).clip(0))

    def bounds(self, call: LayerRows) -> Bounds:
        if call.read is None or call.left >= self.longest:
            return FREE
        most, whole, fitting = self._lengths(call)
        limited = (call.left < whole) & (fitting == 0)  # rows whose request has begun and does not fit
        if not limited.any():
            return FREE
        start = call.next_position + call.left - call.upload(whole)
        limit = np.where(limited, np.minimum(most, 3 * call.host_budget // 8), UNLIMITED)
        return Bounds(limited=torch.stack([start.to(torch.int32), call.upload(limit)], 1))

    def _lengths(self, call: LayerRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return three numbers for each batch row, int [B] each: the largest number of a head's slots for a request;
        the number of tokens in the request from its earliest beginning; the number of tokens in the longest request
        that these slots hold, or 0 if they hold none."""
        policy, budget = call.read.policy, call.host_budget
        most = np.minimum(budget // 2, budget - policy.first - 1).clip(0)
        if policy.layers.cascades:  # later layers may still lower this layer's budget
            most = np.minimum(most, self.most)
        if policy.tsp is not None:  # half of the tokens that layers after tsp read
            most = np.minimum(most, int(policy.propagated(policy.chunk_size or call.read.prompt)) // 2)
        whole = np.array([max(each, default=0) for each in self.requests])
        fitting = [max((n for n in each if n <= m), default=0) for each, m in zip(self.requests, most, strict=True)]
        return most, whole, np.array(fitting)


@dataclass(frozen=True, eq=False)
class Questions(Requested):
    """A probe for one prompt that consists of the tokens of each batch row's question (`Rows.asked`). Questions with
    fewer tokens than the batch's longest are padded on the right, and the padding is masked.

    If a question is near the prompt's end, its own rows observe in the last chunk, since an appended copy would attend
    to the question. These rows see all slots before the question, and the unprotected slots from the question on.

    A question before the text is hidden from the appended rows, which would otherwise repeat it, and from the observing
    queries. Its slots are kept if a quarter of the budget holds them, unless the prompt's end repeats the question.
    """

    questions: tuple[Question, ...] = ()

    @property
    def span(self) -> tuple[Any, ...]:
        return self.questions

    def lengths(self, tokens: np.ndarray | None) -> np.ndarray:
        return np.array([sum(stop - start for start, stop in each.spans) for each in self.questions])

    def ends(self, call: LayerRows) -> torch.Tensor:
        """Return the number of tokens from the start of each row's question to the prompt's end: int32 [B]."""
        return call.upload(call.read.tokens - np.array([each.spans[0][0] for each in self.questions]))

    def appended(self, tokens: int, rows: int, last: bool) -> int:
        return 0 if last and all(each.near for each in self.questions) else super().appended(tokens, rows, last)

    def prepare(self, arguments: PromptCall, read: PromptRead) -> AppendedRows | None:
        if not read.evicts:
            return None
        longest = self.appended(0, 0, False)
        asked = [[at for span in each.spans for at in range(*span)] for each in self.questions]
        padded = [each + [each[-1] + 1] * (longest - len(each)) for each in asked]
        tokens = torch.tensor(padded, device=arguments.device) + arguments.first[:, None]
        columns = tokens.clamp_max(read.prompt - 1)
        return AppendedRows(arguments.tokens_at(columns), None, columns, unseen=self._unseen(arguments))

    def _unseen(self, arguments: PromptCall) -> torch.Tensor | None:
        """Return int32 [B, 2] positions (start, stop) of each row's question before the text; None: no row has one."""
        if not any(each.before for each in self.questions):
            return None
        spans = torch.tensor([(each.before or (0, 0))[:2] for each in self.questions], device=arguments.device)
        positions = arguments.positions()
        first = positions.gather(1, arguments.first[:, None].long().clamp_max(positions.shape[1] - 1))
        return (first + spans).to(torch.int32)

    def bounds(self, call: LayerRows) -> Bounds:
        before = self._before(call)
        if before is None:
            return super().bounds(call)
        found = [each.before or (0, 0, False) for each in self.questions]
        fits = np.array([stop - start if once else UNLIMITED for start, stop, once in found]) <= call.host_budget // 4
        if not fits.any():
            return super().bounds(call)
        return super().bounds(call)._replace(kept=before * call.upload(fits)[:, None])

    @property
    def _ending(self) -> int | np.ndarray:
        return np.where([each.last for each in self.questions], self.most, min(self.most, ENDING))

    def _which(self, name: str, call: LayerRows) -> torch.Tensor:
        """Return the bool field `name` of each row's question, on the layer's device: bool [B]."""
        return call.upload(np.array([getattr(each, name) for each in self.questions], np.int64)).bool()

    def _before(self, call: LayerRows) -> torch.Tensor | None:
        """Return the result of `_unseen` (positions of questions) for this read, on the layer's device, or None."""
        prepared = call.read.prepared
        return None if prepared is None or prepared.unseen is None else prepared.unseen.to(call.first.device)

    def _queries(self, call: LayerRows, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        appended = super()._queries(call, count)[0], call.positions[:, -count]  # positions of padding may jump
        if not call.ends_prompt:
            return appended
        near, inside = self._which("near", call), call.stored_from(call.columns - self.ends(call), count)
        return torch.where(near[:, None, None, None], inside[0], appended[0]), torch.where(near, inside[1], appended[1])

    def observe(self, call: LayerRows, past: Any) -> Observation:
        unseen: Any = 0
        if call.ends_prompt:
            ends, last = self.ends(call), self._which("last", call)
            unseen = torch.where(last, ends, torch.minimum(ends, self.kept(call)) * self._which("near", call))
        queries, before = past[0].to(call.q.dtype), self._before(call)
        return call.later(queries, unseen=unseen, counts=self.lengths(None), unseen_at=before)
