"""The policy that reads a request."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..answer import room_of
from ..policy.checks import PLENTY, one_of
from ..policy.policy import Policy, build
from ..policy.presets import PRESETS
from ..policy.text import parse_policy
from .errors import Refused, of_field
from .options import ALWAYS, AUTO, NEVER, SHARES, Options
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
    """options  of the server; `unasked` and `share_kv` are set
    context  the model's, in tokens; a request may not keep more of that many than the server's own budget
    most     slots that memory holds
    fitted   makes a policy that of the model, with its budget in slots
    """

    options: Options
    context: int = 1 << 20
    most: int = PLENTY
    fitted: Callable[[Policy], Policy] = lambda policy: policy

    def __post_init__(self) -> None:
        one_of("share", self.options.share, SHARES)
        self.built(self.options.policy)
        self.built(self.options.unasked)
        self.reader()

    def built(self, text: str | None, budget: int | float | str | None = None, kv: str | None = None) -> Any:
        """Build a policy by its text; None: that of a prompt with a known question."""
        options = self.options
        name, own = parse_policy(text or options.policy)
        common: dict = dict(budget=options.budget if budget is None else budget, kv=kv or options.kv)
        if options.chunk_size is not None:
            common["chunk_size"] = options.chunk_size
        return self.fitted(build(name, **common | own))

    def reader(self, name: str | None = None, budget: int | float | str | None = None) -> Reader:
        """Make the reader of shared beginnings by a request's policy and budget, where it gives them."""
        share_budget = self.options.share_budget if budget is None else budget
        policy, known = self.built(name or self.options.unasked, share_budget, self.options.share_kv), self.built(None)
        least = 1 if budget is not None or known.budget is None else known.slots(0)
        longest = self.context - room_of(policy) if policy.rows.repeats else PLENTY
        slots: Any = policy.budget  # `fitted` has made slots of bytes
        return Reader(policy, slots, least, self.most, longest)

    def of(self, asked: dict[str, Any], opens_text: bool, prefix: str = "kvevict.") -> Chosen:
        """Choose by a request's fields, which have this prefix. Raises Refused for a choice that cannot be had."""
        share, question = self._asked(asked, opens_text)
        hidden, own = share == ALWAYS, self.reader()
        name, budget = asked.get("policy"), asked.get("budget")
        if name not in (None, self.options.policy, self.options.unasked, *PRESETS):
            sentence = f"there is no policy {str(name)[:200]!r}: give a name that `kvevict policies` lists"
            raise Refused(400, sentence, param=f"{prefix}policy")
        with of_field(prefix + ("policy" if budget is None else "budget")):
            reader = self.reader(name, budget) if hidden else own
            policy = reader.policy if hidden else self.built(name, budget)
            most = (own if hidden else self.built(None)).slots(self.context)
            if (reader if hidden else policy).slots(self.context) > most:
                raise Refused(400, f"{prefix}budget is larger than the server's: ask for at most {most} slots")
        return Chosen(policy, hidden, question, share, reader)

    def _asked(self, asked: dict, opens_text: bool) -> tuple:
        """Return (share, question or None). An always shared prompt is read without a question."""
        share, question = asked.get("share"), asked.get("question", LAST)
        if opens_text and isinstance(question, str):
            sentence = "a stored text is read before its questions: leave kvevict.question out"
            raise Refused(400, sentence, param="kvevict.question")
        if share == NEVER and (opens_text or question is None):
            sentence = "a stored text, and a prompt without a question, are shared: leave kvevict.share out"
            raise Refused(400, sentence, param="kvevict.share")
        if share in (AUTO, ALWAYS) and isinstance(question, str):
            sentence = "a prompt whose question is named is not shared: leave kvevict.share out"
            raise Refused(400, sentence, param="kvevict.share")
        if opens_text or question is None:
            return ALWAYS, None
        if isinstance(question, str):
            return NEVER, question
        return share or self.options.share, None
