"""Builds the eviction policies of requests from the requests' fields and the server's options."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..policy.building import Chosen, choose
from ..policy.policy import Policy
from ..policy.presets import PRESETS
from ..policy.run import Run
from ..policy.text import parse_policy
from .errors import Json, Refused, of_field
from .options import Options


@dataclass(frozen=True)
class Policies:
    """Builds the eviction policies of requests. A request may choose another policy or budget than the server's, unless
    it would keep more slots of a prompt as long as the model's context."""

    options: Options
    context: int = 1 << 20  # length of the model's context in tokens
    fitted: Callable[[Policy, Run], Policy] = lambda policy, run: policy  # converts a budget in bytes to slots
    records: bool = False  # default of the option `compiled` (`Run.compiled`)

    def __post_init__(self) -> None:
        self.built()

    def built(self, text: str | None = None, budget: int | float | str | None = None) -> Chosen:
        """Build the policy that `text`, NAME[:OPTION=VALUE,...], describes (None: the server's). It recalls, unless the
        text sets the option `recall` or the policy cannot recall."""
        options = self.options
        name, own = parse_policy(text or options.policy)
        if any(option.startswith("recall_") for option in own):
            own = dict(recall=True) | own
        budget = options.budget if budget is None else budget
        common: Json = dict(budget=budget, chunk_size=options.chunk_size, kv=options.kv, compiled=self.records)
        policy, run = choose(name, **common | own)
        if run.archive_kv is not None:
            raise ValueError("recall_kv: here a text's slots are those that answers attend to: give kvevict serve --kv")
        if "recall" not in own:
            with contextlib.suppress(ValueError):
                policy = replace(policy, recall=True)
        return Chosen(self.fitted(policy, run), run)

    def of(self, asked: Json, opens_text: bool, prefix: str = "kvevict.") -> Policy:
        """Return the policy that the fields of a request choose. Raises Refused for an unknown policy, a wrong budget,
        or a policy that keeps more slots than the server's policy.

        asked       `policy`, `budget` and `question`, from the request's field `kvevict` or with a text to be stored
        opens_text  whether the prompt begins with a stored text
        prefix      what error messages put before a field's name
        """
        if opens_text and asked.get("question") is not None:
            sentence = "a stored text is read before its questions: leave kvevict.question out"
            raise Refused(400, sentence, param="kvevict.question")
        name, budget = asked.get("policy"), asked.get("budget")
        if name not in (None, self.options.policy, *PRESETS):
            sentence = f"there is no policy {str(name)[:200]!r}: give a name that `kvevict policies` lists"
            raise Refused(400, sentence, param=f"{prefix}policy")
        with of_field(prefix + ("policy" if budget is None else "budget")):
            policy, most = self.built(name, budget).policy, self.built().policy.slots(self.context)
            if policy.slots(self.context) > most:
                raise Refused(400, f"{prefix}budget is larger than the server's: ask for at most {most} slots")
        return policy
