"""Generation of text after a cache, token by token, greedy or drawn. Beams, penalties and caches of the model's
generation_config are ignored."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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

    def __post_init__(self):
        if self.temperature is not None:
            at_least_0("temperature", self.temperature, positive=True)
        fraction("top_p", self.top_p)
        if self.top_p == 0 or (self.temperature is None and self.top_p != 1):
            raise ValueError(f"top_p={self.top_p}: give one above 0, and a temperature, without which text is greedy")
        count("sampling_seed", self.seed, 0)

    def chooser(self, question: Iterable[int] = ()) -> Callable[[torch.Tensor], int]:
        """A function from logits [vocabulary] to the next token of the answer to a question's ids. Its noise is of the
        seed and the question."""
        temperature = self.temperature
        if temperature is None:
            return lambda row: int(row.argmax())
        digest = hashlib.sha256(repr((self.seed, *question)).encode()).digest()
        noise = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return lambda row: drawn(row, noise, temperature, self.top_p)


def drawn(row: torch.Tensor, noise: torch.Generator, temperature: float, top_p: float = 1.0) -> int:
    """A token drawn of logits [vocabulary] by Gumbel noise of a generator on the CPU; of equal logits, the same one."""
    row = row.float().cpu() / temperature
    if top_p < 1:
        chances, order = row.softmax(0).sort(descending=True)
        row[order[chances.cumsum(0) - chances >= top_p]] = float("-inf")
    return int((row - torch.rand(row.shape, generator=noise).log().neg().log()).argmax())


def ends_of(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}


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
    """The ids after the tokens of each row of a cache, up to and with the first that ends them: a list of ids per row.
    A row that has ended leaves the cache.

    logits    [B, T, vocabulary] of the cache's last tokens
    most      the number of ids per row at most
    choosers  a function per row, from logits [vocabulary] to the next token
    one_line  stop at the end of a line that is not empty
    """
    ends, batch = ends_of(model, tokenizer), Batch(model, range(len(choosers)), cache)
    texts: list = [[] for _ in choosers]

    def goes_on(row):
        tokens = texts[row]
        return len(tokens) < most[row] and tokens[-1] not in ends and not (one_line and line_ended(tokenizer, tokens))

    last = logits[:, -1]
    while True:
        for row, each in zip(batch.rows, last, strict=True):
            texts[row].append(choosers[row](each))
        batch.keep([row for row in batch.rows if goes_on(row)])
        if not batch.rows:
            return texts
        last = batch.step([texts[row][-1] for row in batch.rows])
