"""The policy that reads a request."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..answer import room_of
from ..policy.checks import PLENTY, one_of
from ..policy.policy import Policy, build
from ..policy.presets import PRESETS
from ..policy.text import parse_policy
from .errors import Refused
from .options import ALWAYS, AUTO, NEVER, SHARES
from .sharing import Reader

LAST = object()  # the question that a request does not name: the last user's message


class Chosen(NamedTuple):
    """policy    reads the rest of the prompt
    hidden    whether it does so without the question
    question  that the request names, or None
    share     one of `SHARES`
    reader    reads shared beginnings
    """

    policy: Policy
    hidden: bool
    question: str | None
    share: str
    reader: Reader


@dataclass(frozen=True)
class Policies:
    """policy        as text, reads a prompt with a known question
    unasked       as text, reads shared beginnings
    share         of a request that does not say it
    share_budget  of these
    context       the model's, in tokens; a request may not keep more of that many than the server's own budget
    most          slots that memory holds
    kv            how slots are stored; share_kv: those of shared beginnings, None: likewise
    fitted        a policy -> the same for the model, its budget in slots
    """

    policy: str
    unasked: str
    budget: int | float | str
    chunk_size: int | None = None
    share: str = AUTO
    share_budget: int | float = 0.5
    context: int = 1 << 20
    most: int = PLENTY
    kv: str = "model"
    fitted: Callable[[Policy], Policy] = lambda policy: policy
    share_kv: str | None = None

    def __post_init__(self):
        one_of("share", self.share, SHARES)
        self.built(self.policy)
        self.built(self.unasked)
        self.built(self.unasked, self.share_budget, self.share_kv)

    def built(self, text: str, budget: int | float | str | None = None, kv: str | None = None) -> Any:
        name, options = parse_policy(text)
        common: dict = dict(budget=self.budget if budget is None else budget, kv=kv or self.kv)
        if self.chunk_size is not None:
            common["chunk_size"] = self.chunk_size
        return self.fitted(build(name, **common | options))

    def reader(self, name: str | None = None, budget: int | float | str | None = None) -> Reader:
        """By a request's policy and budget, where it gives them."""
        policy = self.built(name or self.unasked, self.share_budget if budget is None else budget, self.share_kv)
        known = self.built(self.policy)
        least = 1 if budget is not None or known.budget is None else known.slots(0)
        longest = self.context - room_of(policy) if policy.rows.repeats else PLENTY
        return Reader(policy, policy.budget, least, self.most, longest)

    def of(self, asked: dict[str, Any], opens_text: bool) -> Chosen:
        """By a request's field `kvevict`. Raises Refused or ValueError for a choice that cannot be had."""
        share, question = self._asked(asked, opens_text)
        hidden, own = share == ALWAYS, self.reader()
        name, budget = asked.get("policy"), asked.get("budget")
        if name not in (None, self.policy, self.unasked, *PRESETS):
            raise Refused(400, f"there is no policy {str(name)[:200]!r}: give a name that `kvevict policies` lists")
        reader = self.reader(name, budget) if hidden else own
        policy = reader.policy if hidden else self.built(name or self.policy, budget)
        most = (own if hidden else self.built(self.policy)).slots(self.context)
        if (reader if hidden else policy).slots(self.context) > most:
            raise Refused(400, f"kvevict.budget is larger than the server's: ask for at most {most} slots")
        return Chosen(policy, hidden, question, share, reader)

    def _asked(self, asked: dict, opens_text: bool) -> tuple:
        """(share, question or None). An always shared prompt is read without a question."""
        share, question = asked.get("share"), asked.get("question", LAST)
        if opens_text and isinstance(question, str):
            raise Refused(400, "a stored text is read before its questions: leave kvevict.question out")
        if share == NEVER and (opens_text or question is None):
            raise Refused(400, "a stored text, and a prompt without a question, are shared: leave kvevict.share out")
        if share in (AUTO, ALWAYS) and isinstance(question, str):
            raise Refused(400, "a prompt whose question is named is not shared: leave kvevict.share out")
        if opens_text or question is None:
            return ALWAYS, None
        if isinstance(question, str):
            return NEVER, question
        return share or self.share, None
