"""Writes answers that continue a cache, token by token, either greedy or drawn. Beam search, penalties and the cache
settings of the model's generation_config are ignored."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..asking.prompts import Tokenizer, line_ended
from ..context import context
from ..engine.hook.ahead import checking
from ..engine.hook.installed import plan_of
from ..engine.memory.joining import obstacle
from ..engine.memory.meter import Meter
from ..models.families import find_decoder
from ..policy.checks import PLENTY, at_least_0, count, fraction
from ..policy.rows.drafted import end_tokens
from .batch import Batch


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing each token. Raises ValueError or TypeError for numbers out of range.

    temperature  None: the likeliest token is taken; else a token is drawn from softmax(logits / temperature)
    top_p        only the fewest likeliest tokens with this total probability are drawn (nucleus sampling, Holtzman et
                 al. 2020)
    seed         seed of the draws
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
        """Return a function for `Answer.choose`. The draws depend only on the seed and on the ids of the question that
        is answered."""
        if self.temperature is None:
            return torch.argmax
        digest = hashlib.sha256(repr((self.seed, *question)).encode()).digest()
        noise = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return Draw(noise, self.temperature, self.top_p)


@dataclass(frozen=True)
class Draw:
    """A function for `Answer.choose` that draws tokens, as `drawn` does."""

    noise: torch.Generator
    temperature: float
    top_p: float

    def __call__(self, row: torch.Tensor) -> torch.Tensor:
        return drawn(row, self.noise, self.temperature, self.top_p)

    @contextlib.contextmanager
    def drafting(self) -> Iterator[None]:
        """A context whose draws are repeated after it."""
        state = self.noise.get_state()
        try:
            yield
        finally:
            self.noise.set_state(state)


def drawn(row: torch.Tensor, noise: torch.Generator, temperature: float, top_p: float = 1.0) -> torch.Tensor:
    """Draw a token from the distribution of logits [vocabulary], on the logits' device. The Gumbel noise comes from a
    generator on the CPU, so that all devices draw alike, up to rounding."""
    row = row.float() / temperature
    if top_p < 1:
        chances, order = row.softmax(0).sort(descending=True)
        beyond = chances.cumsum(0) - chances >= top_p
        row = row.scatter(0, order, row[order].masked_fill(beyond, float("-inf")))
    return (row - sent(torch.rand(row.shape, generator=noise).log().neg().log(), row.device)).argmax()


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to a device, without waiting for the copy to end."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def ends_of(model: torch.nn.Module, tokenizer: Tokenizer) -> set[int]:
    """Return the tokens that end an answer."""
    return {token for token in (tokenizer.eos_token_id, *end_tokens(model)) if token is not None}


@dataclass(eq=False)
class Answer:
    """An answer that is being written: a row of a `Batch`."""

    choose: Callable[[torch.Tensor], torch.Tensor]  # maps logits [vocabulary] to the next token, on the logits' device
    ends: Callable[[list[int]], bool]  # maps the answer's ids so far to whether the last of them ends the answer
    most: int | None = None  # largest number of ids of the answer; None: unknown
    ids: list[int] = field(default_factory=list)
    ended: bool = False

    def pick(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose the next token by logits [vocabulary], and return it as a tensor on their device, without a copy to
        the host."""
        return self.choose(logits)

    def see(self, token: int) -> None:
        """Append a token that `pick` chose, and check whether it ends the answer."""
        self.ids.append(token)
        self.ended = self.ends(self.ids)

    def take(self, logits: torch.Tensor) -> None:
        """Choose the next token by logits [vocabulary], and append it to the answer."""
        self.see(int(self.pick(logits)))

    def ends_with(self, ids: list[int]) -> bool:
        """Return whether the answer would end with the last of `ids`, if they came next."""
        return self.ends([*self.ids, *ids])


class Drafted:
    """The `kvevict.engine.hook.ahead.Drafts` of a batch's answers: the tokens that `choose` will choose, if it has the
    context manager `drafting`, in which it can be called for tokens that it chooses again later; else the likeliest
    tokens."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def begin(self, tokens: torch.Tensor) -> int:
        return max(PLENTY if each.most is None else each.most - len(each.ids) for each in self.batch.rows)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        with contextlib.ExitStack() as drafting:
            for each in self.batch.rows:
                if hasattr(each.choose, "drafting"):
                    drafting.enter_context(each.choose.drafting())
            yield

    def choose(self, drafted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        rows = zip(self.batch.rows, logits, strict=True)
        return torch.stack([
            each.choose(row) if hasattr(each.choose, "drafting") else row.argmax() for each, row in rows
        ])  # fmt: skip

    def ended(self, drafted: torch.Tensor) -> bool:
        rows = zip(self.batch.rows, drafted[:, 1:].tolist(), strict=True)
        return all(answer.ends_with(ids) for answer, ids in rows)


class Unseen:
    """The next tokens [B] of answers. They were chosen on a device and are being copied to the host, which has not read
    them."""

    def __init__(self, answers: list[Answer], tokens: torch.Tensor) -> None:
        self.answers, self.tokens, self.copy, self.arrived = [*answers], tokens, tokens, None
        if tokens.is_cuda:
            self.copy = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self.copy.copy_(tokens, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def of(self, answers: list[Answer]) -> torch.Tensor:
        """Return the last token of each of `answers`, on the device: the token held here, or else, for an answer that
        joined the batch later, the last of its ids."""
        if answers == self.answers:
            return self.tokens
        chosen = dict(zip(self.answers, self.tokens, strict=True))
        for answer in answers:
            if answer not in chosen:
                chosen[answer] = self.tokens.new_tensor(answer.ids[-1])
        return torch.stack([chosen[answer] for answer in answers])

    def see(self, answers: list[Answer]) -> None:
        """Wait for the copy, and append each token to its answer, if that answer is one of `answers`."""
        if self.arrived is not None:
            self.arrived.synchronize()
        for answer, token in zip(self.answers, self.copy.tolist(), strict=True):
            if answer in answers:
                answer.see(token)


LATE = {"cuda"}  # device types on which the host launches a step before it reads the previous step's tokens


def step(batch: Batch, logits: torch.Tensor | None = None) -> None:
    """Append the next token to each `Answer` of a batch, chosen by the logits [B, vocabulary] of the last tokens. With
    logits=None the model reads the last tokens first. Answers that have ended leave the batch."""
    if _is_late(batch):
        _step_late(batch, logits)
        return
    if logits is None:
        logits = batch.step([answer.ids[-1] for answer in batch.rows])
    for answer, row in zip(batch.rows, logits, strict=True):
        answer.take(row)
    _leave(batch)


def _is_late(batch: Batch) -> bool:
    """Return whether the host may launch a step before it knows the tokens that the step reads: the step must be
    recorded, and it must be possible to undo it."""
    plan = plan_of(find_decoder(batch.model))
    if batch.device.type not in LATE or plan is None or plan.run.compiled is not True or batch.cache.tiers.awaits:
        return False
    if context().ahead is not None:
        return False
    return not plan.policy.decode and plan.policy.carry != "sum" and obstacle(batch.cache) is None


def _step_late(batch: Batch, logits: Iterable[torch.Tensor] | None) -> None:
    """Choose the next tokens as `step` does, but leave them on the device. The next call launches the step that reads
    them, and only then waits for the copy of the tokens on the host. If one of them ends an answer, that step is
    undone, and repeated for the other answers."""
    if logits is None:
        unseen = batch.unseen
        if unseen is not None and any(answer.most == len(answer.ids) + 1 for answer in unseen.answers):
            _look(batch)  # the token completes an answer, which must not take part in the next step
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
    """Read the answers' last tokens with the model, and return the logits on the device; () if the batch is empty."""
    if not batch.rows:
        return ()
    return batch.step([each.ids[-1] for each in batch.rows] if batch.unseen is None else batch.unseen.of(batch.rows))


def _look(batch: Batch) -> None:
    """Wait for the tokens that the host has not read, and append them to their answers."""
    unseen, batch.unseen = batch.unseen, None
    unseen.see(batch.rows)


def _leave(batch: Batch) -> None:
    batch.keep([answer for answer in batch.rows if not answer.ended])


@torch.no_grad()
def written(
    model: torch.nn.Module, tokenizer: Tokenizer, logits: torch.Tensor, cache: Any, most: list[int],
    choosers: Sequence[Callable[[torch.Tensor], torch.Tensor]], one_line: bool = False, meter: Meter | None = None,
) -> list[list[int]]:  # fmt: skip
    """Write an answer after each row of a cache. Returns for each row the list of ids, including the one that ends the
    answer.

    logits    [B, T, vocabulary] logits of the cache's last T tokens
    most      largest number of ids of each row's answer
    choosers  `Answer.choose` of each row's answer
    one_line  whether an answer ends with its first line that is not empty
    meter     the `Meter` that counts checked tokens (`Policy.recall_check`); None: that of the cache
    """
    eos = ends_of(model, tokenizer)

    def ends(most: int, ids: list) -> bool:
        return len(ids) >= most or ids[-1] in eos or (one_line and line_ended(tokenizer, ids))

    answers = [Answer(choose, partial(ends, number), number) for choose, number in zip(choosers, most, strict=True)]
    batch = Batch(model, answers, cache)
    with checking(plan_of(find_decoder(model)), Drafted(batch), meter):
        step(batch, logits[:, -1])
        while batch.rows:
            step(batch)
    return [answer.ids for answer in answers]
