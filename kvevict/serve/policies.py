"""Which policy reads a request."""

from dataclasses import dataclass
from typing import Any

from ..policy.policy import build
from ..policy.presets import PRESETS
from ..policy.text import parse_policy
from .errors import Refused

LAST = object()  # the question that a request does not name: the last user's message


@dataclass(frozen=True)
class Policies:
    """policy   as text, reads a prompt whose question is known
    unasked  as text, reads what is shared: stored texts, and prompts whose question is null
    share    whether a request's question is null where it does not name one
    context  the model's, in tokens; a request may not keep more of that many than the server's own budget
    """

    policy: str
    unasked: str
    budget: int | float
    chunk_size: int | None = None
    share: bool = False
    context: int = 1 << 20

    def __post_init__(self):
        self.built(self.policy)
        self.built(self.unasked)

    def built(self, text: str, budget=None) -> Any:
        name, options = parse_policy(text)
        common = dict(budget=self.budget if budget is None else budget)
        if self.chunk_size is not None:
            common["chunk_size"] = self.chunk_size
        return build(name, **common | options)

    def of(self, asked: dict, opens_text: bool) -> tuple:
        """(policy, whether the question is hidden from it, the question or None) of a request's field `kvevict`.

        Raises Refused or ValueError for what cannot be had.
        """
        question = asked.get("question", None if self.share else LAST)
        if opens_text and isinstance(question, str):
            raise Refused(400, "a stored text is read before its questions: leave kvevict.question out")
        hidden = opens_text or question is None
        own = self.unasked if hidden else self.policy
        name = asked.get("policy", own)
        if name not in (self.policy, self.unasked, *PRESETS):
            raise Refused(400, f"there is no policy {str(name)[:200]!r}: give a name that `kvevict policies` lists")
        policy = self.built(name, asked.get("budget"))
        most = self.built(own).slots(self.context)
        if policy.slots(self.context) > most:
            raise Refused(400, f"kvevict.budget is larger than the server's: ask for at most {most} slots")
        return policy, hidden, question if isinstance(question, str) else None
