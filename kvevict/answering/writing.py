"""Writes answers after a cache, token by token, greedy or drawn. Beams, penalties and caches of the model's
generation_config are ignored."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..asking.prompts import Tokenizer, line_ended
from ..engine.hook.installed import plan_of
from ..engine.memory.joining import obstacle
from ..models.families import find_decoder
from ..policy.checks import at_least_0, count, fraction
from ..policy.rows.drafted import end_tokens
from .batch import Batch


@dataclass(frozen=True)
class Sampling:
    """Settings of how each token is chosen. Raises ValueError or TypeError for impossible numbers.

    temperature  None: the likeliest token is taken; else a token is drawn from softmax(logits / temperature)
    top_p        only the fewest likeliest tokens with this total probability are drawn (nucleus sampling, Holtzman et
                 al. 2020)
    seed         the draws' seed
    """

    temperature: float | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature is not None:
            at_least_0("temperature", self.temperature, positive=True)
        fraction("top_p", self.top_p)
        if self.top_p == 0 or (self.temperature is None and self.top_p != 1):
            raise ValueError(f"top_p={self.top_p}: give one above 0, and a temperature, without which text is greedy")
        count("sampling_seed", self.seed, 0)

    def chooser(self, question: Iterable[int] = ()) -> Callable[[torch.Tensor], torch.Tensor]:
        """Make an `Answer.choose` for the answer to a question's ids. Seed and question determine the draws."""
        temperature = self.temperature
        if temperature is None:
            return torch.argmax
        digest = hashlib.sha256(repr((self.seed, *question)).encode()).digest()
        noise = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return lambda row: drawn(row, noise, temperature, self.top_p)


def drawn(row: torch.Tensor, noise: torch.Generator, temperature: float, top_p: float = 1.0) -> torch.Tensor:
    """Draw a token by logits [vocabulary], on their device. The Gumbel noise comes from a generator on the CPU, so that
    all devices draw alike, up to rounding."""
    row = row.float() / temperature
    if top_p < 1:
        chances, order = row.softmax(0).sort(descending=True)
        beyond = chances.cumsum(0) - chances >= top_p
        row = row.scatter(0, order, row[order].masked_fill(beyond, float("-inf")))
    return (row - sent(torch.rand(row.shape, generator=noise).log().neg().log(), row.device)).argmax()


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers of the CPU to a device, without waiting for it."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def ends_of(model: torch.nn.Module, tokenizer: Tokenizer) -> set[int]:
    """Return the tokens that end an answer."""
    return {token for token in (tokenizer.eos_token_id, *end_tokens(model)) if token is not None}


@dataclass(eq=False)
class Answer:
    """An answer while it is written: a row of a `Batch`."""

    choose: Callable[[torch.Tensor], torch.Tensor]  # maps logits [vocabulary] to the next token, on the logits' device
    ends: Callable[[list[int]], bool]  # whether the last of the ids so far ends the answer; called after each id
    most: int | None = None  # most ids of the answer; None: unknown
    ids: list[int] = field(default_factory=list)
    ended: bool = False

    def pick(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose the next token by logits [vocabulary], on their device: the host does not know it yet."""
        return self.choose(logits)

    def see(self, token: int) -> None:
        """Append a token that `pick` chose."""
        self.ids.append(token)
        self.ended = self.ends(self.ids)

    def take(self, logits: torch.Tensor) -> None:
        """Choose the next token by logits [vocabulary], and append it."""
        self.see(int(self.pick(logits)))


class Unseen:
    """The next tokens [B] of answers, chosen on a device and not yet on the host, to which they are being copied."""

    def __init__(self, answers: list[Answer], tokens: torch.Tensor) -> None:
        self.answers, self.tokens, self.copy, self.arrived = [*answers], tokens, tokens, None
        if tokens.is_cuda:
            self.copy = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self.copy.copy_(tokens, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def of(self, answers: list[Answer]) -> torch.Tensor:
        """Return the last token of each of these answers, on the device: the one chosen here, or else, of an answer
        that has joined since, the one that the host knows."""
        if answers == self.answers:
            return self.tokens
        chosen = dict(zip(self.answers, self.tokens, strict=True))
        for answer in answers:
            if answer not in chosen:
                chosen[answer] = self.tokens.new_tensor(answer.ids[-1])
        return torch.stack([chosen[answer] for answer in answers])

    def see(self, answers: list[Answer]) -> None:
        """Wait for the tokens, and append each to its answer if that is among these."""
        if self.arrived is not None:
            self.arrived.synchronize()
        for answer, token in zip(self.answers, self.copy.tolist(), strict=True):
            if answer in answers:
                answer.see(token)


LATE = {"cuda"}  # kinds of devices on which the host launches a step before it looks at the tokens of the one before


def step(batch: Batch, logits: torch.Tensor | None = None) -> None:
    """Write the next token of each `Answer` in a batch, by the logits [B, vocabulary] of the last tokens; with None the
    model reads the last tokens first. Answers that have ended leave the batch."""
    if _is_late(batch):
        _step_late(batch, logits)
        return
    if logits is None:
        logits = batch.step([answer.ids[-1] for answer in batch.rows])
    for answer, row in zip(batch.rows, logits, strict=True):
        answer.take(row)
    _leave(batch)


def _is_late(batch: Batch) -> bool:
    """Whether the host may launch a step before it knows the tokens, as the step is recorded and can be taken back."""
    plan = plan_of(find_decoder(batch.model))
    if batch.device.type not in LATE or plan is None or plan.run.compiled is not True or batch.cache.sequence.awaits:
        return False
    return not plan.policy.decode and plan.policy.carry != "sum" and obstacle(batch.cache) is None


def _step_late(batch: Batch, logits: Iterable[torch.Tensor] | None) -> None:
    """Write the next tokens as `step` does, but leave it to the next call to look at them, after it has launched the
    step that reads them. If a token ends an answer, that step is taken back, and made again for the other answers."""
    if logits is None:
        unseen = batch.unseen
        if unseen is not None and any(answer.most == len(answer.ids) + 1 for answer in unseen.answers):
            _look(batch)  # an answer ends with this token, so no step follows it
            _leave(batch)
            unseen = None
        logits = _logits(batch)
        if unseen is not None:
            _look(batch)
            if any(answer.ended for answer in batch.rows):
                batch.cache.crop(-1)
                _leave(batch)
                logits = _logits(batch)
    picked = [answer.pick(row) for answer, row in zip(batch.rows, logits, strict=True)]
    batch.unseen = Unseen(batch.rows, torch.stack(picked)) if picked else None


def _logits(batch: Batch) -> Iterable[torch.Tensor]:
    """Return the logits of the answers' last tokens, on their device; () without an answer."""
    if not batch.rows:
        return ()
    return batch.step([each.ids[-1] for each in batch.rows] if batch.unseen is None else batch.unseen.of(batch.rows))


def _look(batch: Batch) -> None:
    """Wait for the tokens that the host does not know, and append them."""
    unseen, batch.unseen = batch.unseen, None
    unseen.see(batch.rows)


def _leave(batch: Batch) -> None:
    batch.keep([answer for answer in batch.rows if not answer.ended])


@torch.no_grad()
def written(
    model: torch.nn.Module, tokenizer: Tokenizer, logits: torch.Tensor, cache: Any, most: list[int],
    choosers: Sequence[Callable[[torch.Tensor], torch.Tensor]], one_line: bool = False,
) -> list[list[int]]:  # fmt: skip
    """Write an answer after each row of a cache. Returns a list of ids per row, with the id that ends the answer.

    logits    [B, T, vocabulary] of the cache's last tokens
    most      largest number of ids of each row
    choosers  `Answer.choose` of each row
    one_line  an answer ends with its first line that is not empty
    """
    eos = ends_of(model, tokenizer)

    def ends(most: int, ids: list) -> bool:
        return len(ids) >= most or ids[-1] in eos or (one_line and line_ended(tokenizer, ids))

    answers = [Answer(choose, partial(ends, number), number) for choose, number in zip(choosers, most, strict=True)]
    batch = Batch(model, answers, cache)
    step(batch, logits[:, -1])
    while batch.rows:
        step(batch)
    return [answer.ids for answer in answers]
