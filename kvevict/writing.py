"""Generation of text after a cache, token by token, greedy or drawn. Beams, penalties and caches of the model's
generation_config are ignored."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .batch import Batch
from .policy.checks import at_least_0, count, fraction
from .prompts import line_ended


@dataclass(frozen=True)
class Sampling:
    """How each token is chosen.

    temperature  None: the likeliest token; else it is drawn from softmax(logits / temperature)
    top_p        only the fewest likeliest tokens with this total probability are drawn (nucleus sampling, Holtzman et
                 al. 2020)
    seed         of the draws

    Raises ValueError or TypeError for impossible numbers.
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

    def chooser(self, question: Iterable[int] = ()) -> Callable[[torch.Tensor], int]:
        """Make an `Answer.choose` for the answer to a question's ids. Seed and question determine its noise."""
        temperature = self.temperature
        if temperature is None:
            return lambda row: int(row.argmax())
        digest = hashlib.sha256(repr((self.seed, *question)).encode()).digest()
        noise = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return lambda row: drawn(row, noise, temperature, self.top_p)


def drawn(row: torch.Tensor, noise: torch.Generator, temperature: float, top_p: float = 1.0) -> int:
    """Draw a token by logits [vocabulary] with Gumbel noise of a generator on the CPU, so on all devices alike."""
    row = row.float().cpu() / temperature
    if top_p < 1:
        chances, order = row.softmax(0).sort(descending=True)
        row[order[chances.cumsum(0) - chances >= top_p]] = float("-inf")
    return int((row - torch.rand(row.shape, generator=noise).log().neg().log()).argmax())


def ends_of(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}


@dataclass(eq=False)
class Answer:
    """One answer while the model writes it: a row of a `Batch`."""

    choose: Callable[[torch.Tensor], int]  # from logits [vocabulary] to the next token
    ends: Callable[[list[int]], bool]  # True if the last of the ids so far ends the answer; called after each
    ids: list[int] = field(default_factory=list)
    ended: bool = False

    def take(self, logits: torch.Tensor) -> None:
        """Choose the next token by logits [vocabulary]."""
        self.ids.append(self.choose(logits))
        self.ended = self.ends(self.ids)


def step(batch: Batch, logits: torch.Tensor | None = None) -> None:
    """Write the next token of each `Answer` in a batch; answers that have ended leave it. logits: [B, vocabulary] of
    their last tokens; None: the model reads these."""
    if logits is None:
        logits = batch.step([answer.ids[-1] for answer in batch.rows])
    for answer, row in zip(batch.rows, logits, strict=True):
        answer.take(row)
    batch.keep([answer for answer in batch.rows if not answer.ended])


@torch.no_grad()
def written(
    model: Any,
    tokenizer: Any,
    logits: torch.Tensor,
    cache: Any,
    most: list[int],
    choosers: Sequence[Callable[[torch.Tensor], int]],
    one_line: bool = False,
) -> list[list[int]]:
    """Write an answer after each row of a cache. Returns a list of ids per row, with the one that ends it.

    logits    [B, T, vocabulary] of the cache's last tokens
    most      the number of ids per row at most
    choosers  `Answer.choose` per row
    one_line  stop at the end of a line that is not empty
    """
    eos = ends_of(model, tokenizer)

    def ends(most: int, ids: list) -> bool:
        return len(ids) >= most or ids[-1] in eos or (one_line and line_ended(tokenizer, ids))

    answers = [Answer(choose, partial(ends, number)) for choose, number in zip(choosers, most, strict=True)]
    batch = Batch(model, answers, cache)
    step(batch, logits[:, -1])
    while batch.rows:
        step(batch)
    return [answer.ids for answer in answers]
