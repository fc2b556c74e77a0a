"""One answer, while the model writes it: how each of its tokens is chosen, and where its parts go."""

from collections.abc import Callable

import torch

from .call import Call, Cancelled
from .sampling import Probabilities
from .written import Written


class Row:
    """number      of the answer among the call's
    processors  Transformers' `LogitsProcessorList`
    drawn       whether tokens are drawn; else the likeliest is taken
    seed        of the draws; None: any
    give        is called with (number, parts) for each token, with (number, None) at the end, and with an error that
                ends the call
    """

    def __init__(
        self, call: Call, number: int, answer: Written, processors, drawn: bool, seed: int | None, give: Callable
    ):
        self.call, self.number, self.answer, self.processors, self.give = call, number, answer, processors, give
        self.ended, self.token = False, 0
        prompt = call.whole.ids
        self._length, self._ids = len(prompt), torch.tensor([prompt + [0] * answer.most])
        self._probabilities = next((each for each in processors if isinstance(each, Probabilities)), None)
        self._noise = torch.Generator() if drawn else None
        if self._noise is not None:
            self._noise.seed() if seed is None else self._noise.manual_seed(seed)

    def take(self, logits: torch.Tensor) -> None:
        """Choose the next token by logits [vocabulary]."""
        try:
            self.token = self._chosen(logits[None].float())
            self.call.token()
            known = None if self._probabilities is None else self._probabilities.of(self.token)
            parts = self.answer.put(self.token, known)
            self._ids[0, self._length] = self.token
            self._length += 1
            self.give((self.number, parts))
            if self.answer.over:
                self.give((self.number, self.answer.close()))
                self.give((self.number, None))
                self.ended = True
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """End the call with an error."""
        self.ended = True
        if not isinstance(error, Cancelled):
            self.give(error)
        self.call.cancel()

    def _chosen(self, scores) -> int:
        """Of scores [1, vocabulary]."""
        if self.processors:
            self._ids = self._ids.to(scores.device)  # with the first scores
            scores = self.processors(self._ids[:, : self._length], scores)
        if self._noise is None:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1).cpu(), 1, generator=self._noise))
