"""The beginnings of prompts that are read once for many requests, and how much of them is kept."""

import hashlib
import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ..cautions import little
from ..policy.checks import PLENTY
from ..policy.policy import Policy, build
from .call import Call
from .prompt import Prompt

BLOCK = 64  # tokens between the places where prompts are compared
CHAT = 256  # tokens of a chat's shortest beginning that is shared
COMPLETION = 1024  # the same of a plain prompt's
FURTHER = 512  # tokens that a plain prompt's beginning gets longer by, at least
CAME = 0.75  # of a chat's beginning must have come before
HASHES = 1 << 14  # of beginnings, remembered for each owner
PIECE = 2048  # tokens of a shared beginning that are read before their slots are stored, about


@dataclass(frozen=True)
class Reader:
    """Reads beginnings that requests share.

    policy  whose budget does not count
    budget  slots of a beginning, or the share of its tokens that is kept; None: a threshold says how many
    least   slots of a beginning at least, where the budget is a share
    most    slots that memory holds
    longest tokens of a beginning after which the model has positions left that the policy needs
    """

    policy: Policy
    budget: int | float | None
    least: int = 1
    most: int = PLENTY
    longest: int = PLENTY

    def slots(self, tokens: int) -> int:
        """Return the slots of a beginning of so many tokens, at most."""
        if self.budget is None:
            return self.most
        asked = self.budget if isinstance(self.budget, int) else max(self.least, math.ceil(self.budget * tokens))
        return max(1, min(asked, self.most))

    def kept(self, tokens: int) -> float:
        """Return the share of a beginning's tokens that is kept."""
        return min(1.0, self.slots(tokens) / max(tokens, 1))

    def of(self, tokens: int) -> Policy:
        """Make the policy of a prompt of so many tokens. Its budget is a number of slots, so that a text keeps as many
        when it is read in pieces."""
        return build(self.policy, budget=max(self.slots(tokens), self.policy.smallest_budget()))

    def whole(self, tokens: int) -> bool:
        """Tell whether all of a beginning is kept."""
        return self.policy.threshold is None and self.slots(tokens) >= tokens

    def worth(self, tokens: int) -> bool:
        """Tell whether a beginning of so many tokens can be shared: memory holds a quarter of its tokens, and the model
        has the positions to read it."""
        return tokens <= 4 * self.most and (tokens <= self.longest or self.whole(tokens))

    def policies(self, ends: Sequence[int]) -> list[Policy]:
        """Make the policy of a beginning for each of its ends. A beginning that fits is kept whole: nothing needs a
        score."""
        if self.whole(ends[-1]):
            whole = Policy(score="streaming", budget=PLENTY, decode=False, chunk_size=self.policy.chunk_size)
            return [whole] * len(ends)
        return [self.of(end) for end in ends]


def followed(policy: Policy, reader: Reader, prompt: Prompt) -> Prompt:
    """Drop a prompt's ends if more tokens follow them than are kept in full: the call's policy then reads all of it
    with the question. Many a policy cannot continue a cache that another one has read."""
    tokens, end = len(prompt.ids), max(prompt.ends, default=0)
    kept = max(policy.slots(tokens), reader.slots(end))
    return prompt if tokens - end <= kept else replace(prompt, ends=())


def pieces(policy: Policy, start: int, end: int) -> list[int]:
    """List the stops while tokens start .. end - 1 are read, `end` last. Stops are ends of chunks, so they change no
    kept slots."""
    size = policy.chunk_size
    if size is None or policy.schedule != "chunk":
        return [end]
    first, step = start + (end - start - 1) % size + 1, max(PIECE // size, 1) * size
    return [*range(first + step - size, end, step), end] if end - start > step else [end]


class Sharing:
    """The beginnings of earlier prompts, as hashes, for each owner."""

    def __init__(self, most: int = HASHES) -> None:
        self.most, self._lock = most, threading.Lock()
        self._known: dict[str, OrderedDict] = defaultdict(OrderedDict)  # owner -> {hash: whether it was shared}

    def cut(
        self, owner: str, prompt: Prompt, reader: Reader, cuts: tuple[int, ...] | None, stored: Collection[int] = ()
    ) -> Prompt:
        """Give a prompt the ends of its shared beginnings, and remember the prompt for later ones.

        cuts    where a chat's beginning may end, ascending; None: a plain prompt, cut after any block
        stored  places among them that are shared already
        """
        ids = prompt.ids
        blocks = range(BLOCK, len(ids), BLOCK)
        hashes = _hashes(ids, sorted({*blocks, *(cuts or ())}))
        with self._lock:
            known = self._known[owner]
            known.update({hashes[place]: True for place in stored})
            came = max((place for place in (*blocks, *stored) if hashes[place] in known), default=0)
            ends = self._ends(known, hashes, came, blocks, reader, cuts)
            for place in blocks:
                known.setdefault(hashes[place], False)
            for place in ends:
                known[hashes[place]] = True
            for place in hashes:
                if hashes[place] in known:
                    known.move_to_end(hashes[place])
            while len(known) > self.most:
                known.popitem(last=False)
        return replace(prompt, ends=ends)

    @staticmethod
    def _ends(known: Any, hashes: dict, came: int, blocks: range, reader: Reader, cuts: tuple | None) -> tuple:
        if cuts is None:
            fits = [place for place in blocks if COMPLETION <= place <= came and reader.worth(place)]
            shared = [place for place in fits if known.get(hashes[place])]
            further = fits[-1:] if fits and fits[-1] - max(shared, default=0) >= FURTHER else []
            return (*shared, *further)
        fits = [place for place in cuts if place >= CHAT and CAME * place <= came and reader.worth(place)]
        first = [place for place in fits[:1] if place == cuts[0]]  # other chats may begin with the same system prompt
        shared = [place for place in fits if known.get(hashes[place])]
        return tuple(sorted({*first, *shared, *fits[-1:]}))


def _hashes(ids: list, places: list) -> dict:
    """Make {place: hash of the ids before the place}, for ascending places."""
    digest, found = hashlib.sha256(), {}
    for start, place in pairwise((0, *places)):
        digest.update(np.array(ids[start:place], np.int64).tobytes())
        found[place] = digest.digest()[:16]
    return found


def said(call: Call) -> dict[str, Any]:
    """Tell of a call's shared beginning, for the answer and the log."""
    if call.shared_tokens == 0:
        return {}
    told: dict = dict(shared_tokens=call.shared_tokens, kept=round(call.kept, 3))
    more = "--share-budget, kvevict.budget; or share nothing: kvevict.share"
    if warning := little(call.kept, f"shared {call.shared_tokens} tokens", more):
        told["warning"] = warning
    return told
