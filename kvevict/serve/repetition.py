"""Notices an answer that repeats itself: a greedy one does so until it has all tokens that it may have."""

import numpy as np

TIMES, LEAST, LONGEST = 4, 64, 256  # copies at the answer's end, tokens of all of them, tokens of one


class Repetition:
    """The repetitions at the end of a sequence that grows by `put`."""

    def __init__(self) -> None:
        periods = np.arange(1, LONGEST + 1)
        self._last = np.full(LONGEST, -1)  # tokens, newest first
        self._equal = np.zeros(LONGEST, int)  # newest tokens that equal the one a period before, by period
        self._enough = np.maximum(TIMES * periods, LEAST) - periods

    def put(self, token: int) -> bool:
        """Append a token, and tell whether the tokens now end with `TIMES` copies of one piece."""
        self._equal = (self._equal + 1) * (self._last == token)
        self._last = np.concatenate(([token], self._last[:-1]))
        return bool((self._equal >= self._enough).any())
