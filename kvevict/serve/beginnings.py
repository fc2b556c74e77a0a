"""What identifies the beginnings of a prompt that prompts may have in common, in memory and in files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import numpy as np

from ..policy.policy import Policy
from ..policy.run import Run
from ..store.form import FORMAT


def mark_of(owner: str, text: str) -> str:
    return hashlib.sha256(f"{owner}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def mark_in(key: str) -> str:
    """Return the mark at the end of a key, which identifies a stored text; "" if the key has none."""
    return key.partition("-")[2]


def facts_of(owner: str, weights: str, policy: Policy, run: Run) -> str:
    """Return the owner and everything, except the tokens, that a cache depends on."""
    return "\0".join((FORMAT, owner, weights, policy.to_json(), run.kv, run.archive_kv or run.kv)) + "\0"


class Beginnings:
    """The beginnings of a prompt that other prompts may have in common with it.

    In memory a beginning is found by its `path`: a hash of `facts_of`, then the token ids, with the stored text's mark
    before the text's first token. In files it is found by its key, a hash of the same facts and tokens. A beginning
    with tokens of the stored text has a key that ends with the text's mark, by which `forget` finds it.

    facts  `facts_of` the prompt
    ids    the prompt's token ids
    ends   numbers of first tokens that files may have, ascending
    free   numbers of first tokens that caches in memory may have beside `ends`; none if no cache can be cut
    mark   mark of the stored text, which begins at token `start`; "": there is none
    """

    def __init__(
        self, facts: str, ids: list[int], ends: Iterable[int], free: range = range(0), mark: str = "", start: int = 0
    ) -> None:
        self.free, self.start = free, start
        self.most = len(ids) - 1  # tokens that a prompt may use: the last one is read, for the logits after it
        digest, tokens = hashlib.sha256(facts.encode()), np.array(ids, np.int64)
        place, text = np.frombuffer(digest.digest(), np.int64), np.frombuffer(bytes.fromhex(mark), np.int64)
        self.path = np.concatenate([place, tokens[:start], text, tokens[start:]])
        self._facts, self._text = len(place), len(text)
        self.keys: dict[int, str] = {}  # number of first tokens -> key of their file
        before = 0
        for end in ends:
            digest.update(tokens[before:end].tobytes())
            self.keys[end] = digest.hexdigest() + (f"-{mark}" if mark and end > start else "")
            before = end

    def until(self, end: int) -> np.ndarray:
        """Return the path of the first `end` tokens."""
        return self.path[: self._facts + end + (self._text if end > self.start else 0)]

    def tokens(self, length: int) -> int:
        """Return the number of tokens of the longest usable beginning whose path has at most `length` numbers; 0 if
        there is none."""
        count = length - self._facts
        if count > self.start:
            count = max(self.start, count - self._text)
        free = min(count, self.free.stop - 1)
        return max(free if free in self.free else 0, self.filed(count))

    def filed(self, count: int) -> int:
        """Return the number of tokens of the longest beginning of at most `count` tokens that a file may have; 0 if
        there is none."""
        return next(self.ends(count), 0)

    def ends(self, most: int) -> Iterator[int]:
        """Yield the numbers of tokens that a file may have, up to `most`, the largest first."""
        return (end for end in reversed(self.keys) if end <= most)
