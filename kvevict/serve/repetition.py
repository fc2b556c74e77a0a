"""Whether an answer repeats itself. A greedy answer that does goes on so, for as many tokens as it may have."""

import numpy as np

TIMES, LEAST, LONGEST = 4, 64, 256  # copies at the answer's end, tokens of all of them, tokens of one


class Repetition:
    """Tokens one after the other."""

    def __init__(self):
        periods = np.arange(1, LONGEST + 1)
        self._last = np.full(LONGEST, -1)  # tokens, newest first
        self._equal = np.zeros(LONGEST, int)  # newest tokens that equal the one a period before, by period
        self._enough = np.maximum(TIMES * periods, LEAST) - periods

    def put(self, token: int) -> bool:
        """Whether the tokens now end with as many copies of one piece."""
        self._equal = (self._equal + 1) * (self._last == token)
        self._last = np.concatenate(([token], self._last[:-1]))
        return bool((self._equal >= self._enough).any())
