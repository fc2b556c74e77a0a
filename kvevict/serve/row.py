"""One answer, while the model writes it: how each of its tokens is chosen, and where its parts go."""

from collections.abc import Callable

import torch

from .call import Call, Cancelled
from .sampling import Probabilities
from .written import Written


class Row:
    """processors  Transformers' `LogitsProcessorList`
    drawn       whether tokens are drawn; else the likeliest is taken
    seed        of the draws; None: any
    give        is called with the parts of each token, and with None at the end
    fails       is called with the error that ends the call
    """

    def __init__(
        self, call: Call, answer: Written, processors, drawn: bool, seed: int | None, give: Callable, fails: Callable
    ):
        self.call, self.answer, self.processors, self.give, self.fails = call, answer, processors, give, fails
        self.ended, self.token = False, 0
        prompt = call.whole.ids
        self._length, self._ids = len(prompt), torch.tensor([prompt + [0] * answer.most])
        self._probabilities = next((each for each in processors if isinstance(each, Probabilities)), None)
        self._noise = torch.Generator() if drawn else None
        if self._noise is not None:
            self._noise.seed() if seed is None else self._noise.manual_seed(seed)

    def take(self, logits) -> None:
        """Choose the next token by logits [vocabulary]."""
        try:
            self.token = self._chosen(logits[None].float())
            self.call.token()
            known = None if self._probabilities is None else self._probabilities.of(self.token)
            parts = self.answer.put(self.token, known)
            self._ids[0, self._length] = self.token
            self._length += 1
            self.give(parts)
            if self.answer.over:
                self.give(self.answer.close())
                self.give(None)
                self.ended = True
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the call with an error."""
        self.ended = True
        if not isinstance(error, Cancelled):
            self.fails(error)
        self.call.cancel()

    def _chosen(self, scores) -> int:
        """Of scores [1, vocabulary]."""
        if self.processors:
            scores = self.processors(self._ids[:, : self._length].to(scores.device), scores)
        if self._noise is None:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1).cpu(), 1, generator=self._noise))
