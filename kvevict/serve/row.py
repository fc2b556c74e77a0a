"""Defines the batch row that writes one answer of a call."""

from collections.abc import Callable

import torch

from ..answering.writing import Answer
from .call import Call, Cancelled
from .sampling import TokenChooser
from .written import Written


class Row(Answer):
    """An `Answer` that passes its new parts to the task of its call. An error in one answer ends the whole call.

    number  index of this answer among the call's answers
    give    called with (number, parts) for each token, with (number, None) at the answer's end, or with an exception
    """

    def __init__(self, call: Call, number: int, answer: Written, choose: TokenChooser, give: Callable) -> None:
        def ends(ids: list) -> bool:
            call.token()
            give((number, answer.put(ids[-1], choose.likely(ids[-1]))))
            if answer.over:
                give((number, answer.close()))
                give((number, None))
            return answer.over

        super().__init__(choose, ends, answer.most)
        self.call, self.written, self.give = call, answer, give

    def pick(self, logits: torch.Tensor) -> torch.Tensor:
        try:
            return super().pick(logits)
        except Exception as error:
            self.fail(error)
            return logits.new_zeros((), dtype=torch.int64)

    def see(self, token: int) -> None:
        if self.ended:  # `fail` has ended the answer already
            return
        try:
            super().see(token)
        except Exception as error:
            self.fail(error)

    def ends_with(self, ids: list[int]) -> bool:
        return ids[-1] in self.written.ends

    def fail(self, error: Exception) -> None:
        """End the answer and its call with an error, which the client gets unless it is `Cancelled`."""
        self.ended = True
        if not isinstance(error, Cancelled):
            self.give(error)
        self.call.cancel()
