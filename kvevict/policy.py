"""What to keep and when: a policy is a few independent choices (rows and score, budget, selection, schedule)."""

import dataclasses
import inspect
import math
import numbers
from dataclasses import dataclass

from .checks import count, one_of, unknown
from .heads import HEADS
from .layers import LAYERS
from .registry import Registry
from .scores import SCORES, Score
from .selections import SELECTIONS

PRESETS = Registry("policy")


@dataclass(frozen=True)
class Policy:
    """One way to evict.

    score          a name of `kvevict.scores` or a `Score` with its options, e.g. `SnapKV(window=16)`
    budget         slots kept per kv head and layer on average, window and sinks included (int), or the fraction of
                   the tokens seen that is kept (float in (0, 1))
    chunk_size     tokens read at once; None reads the prompt whole
    schedule       "prompt" evicts once at the prompt's end, "chunk" after every chunk; None: "chunk" if there is a
                   chunk_size
    warmup_layers  W: the first W-1 layers wait for layer W-1 and take its slots (TAKE eq. 6); None: nobody waits;
                   "half": floor(L/2)
    warmup_budget  B_warmup of the layers before W until the last chunk (TAKE eq. 8); None: METHODS' formula
    decode         evict while decoding too, so that the cache never grows past budget + interval - 1; None: where it
                   is part of the score's method (streaming, h2o, tova)
    interval       decoded tokens between two evictions
    layers, heads, select   how the budget is split over layers and heads, and which slots are taken by it
    progress       show a progress bar while a prompt is read
    """

    score: Score | str = "snapkv"
    budget: int | float = 512
    chunk_size: int | None = None
    schedule: str | None = None
    warmup_layers: int | str | None = None
    warmup_budget: int | None = None
    decode: bool | None = None
    interval: int | None = None
    layers: str = "uniform"
    heads: str = "equal"
    select: str = "token"
    progress: bool = False

    def __post_init__(self):
        object.__setattr__(self, "score", as_score(self.score))
        if self.interval is None:
            object.__setattr__(self, "interval", self.score.interval)
        if self.schedule is None:
            object.__setattr__(self, "schedule", "prompt" if self.chunk_size is None else "chunk")
        if self.decode is None:
            object.__setattr__(self, "decode", self.score.decodes)
        self.score.check(self)
        self._check_counts()
        LAYERS.find(self.layers)
        HEADS.find(self.heads)
        SELECTIONS.find(self.select)
        one_of("schedule", self.schedule, ("prompt", "chunk"))
        if self.schedule == "chunk" and self.chunk_size is None:
            raise ValueError("schedule='chunk' needs a chunk_size (tokens); e.g. chunk_size=4096")
        if self.warmup_layers is not None and self.warmup_layers != "half":
            count("warmup_layers", self.warmup_layers, 1)

    def _check_counts(self):
        if isinstance(self.budget, bool) or not isinstance(self.budget, numbers.Real):
            raise TypeError(
                f"budget must be an int (slots per kv head) or a float in (0, 1) (fraction kept), got {self.budget!r}"
            )
        if not isinstance(self.budget, numbers.Integral) and not 0 < self.budget < 1:
            raise ValueError(f"budget={self.budget} is no fraction in (0, 1); pass an int for a number of slots")
        smallest = self.score.smallest_budget()
        if isinstance(self.budget, numbers.Integral) and self.budget < smallest:
            raise ValueError(
                f"budget={self.budget} is too small: {type(self.score).__name__} always keeps {smallest - 1} slots "
                f"(window, probe, recent slots or sinks): give budget >= {smallest} or fewer of those"
            )
        if self.chunk_size is not None:
            count("chunk_size", self.chunk_size, 1)
        if self.warmup_budget is not None:
            count("warmup_budget", self.warmup_budget, 1)
        count("interval", self.interval, 1)
        if not isinstance(self.decode, bool):
            raise TypeError(f"decode must be True, False or None, got {self.decode!r}")

    def slots(self, tokens: int) -> int:
        """Budget B of a row that has seen `tokens` valid tokens (METHODS section 0)."""
        if isinstance(self.budget, numbers.Integral):
            return self.budget
        return max(math.ceil(self.budget * tokens), self.score.smallest_budget())

    def warmup_slots(self, tokens: int) -> int:
        """B_warmup of a row of `tokens` tokens (METHODS section 3): min(N, 10240, max(B, ceil(5N/64))), at least B."""
        budget = self.slots(tokens)
        if self.warmup_budget is not None:
            return max(budget, self.warmup_budget)
        return max(budget, min(tokens, 10240, max(budget, math.ceil(tokens * 5 / 64))))

    def waiting_layers(self, layer_count: int) -> int:
        """W: layers 0..W-1 share the slots that layer W-1 chooses. 1 means that nobody waits."""
        if self.warmup_layers is None:
            return 1
        if self.warmup_layers == "half":
            return max(1, layer_count // 2)
        if self.warmup_layers > layer_count:
            raise ValueError(
                f"warmup_layers={self.warmup_layers} is more than the model's {layer_count} evicting layers"
            )
        return self.warmup_layers


def as_score(score) -> Score:
    """A score by name, or as it is."""
    if isinstance(score, str):
        return SCORES.find(score)()
    if not isinstance(score, Score):
        raise TypeError(f"score must be a name or a kvevict Score, got {score!r}")
    return score


def build(policy, *, budget=None, chunk_size=None, **options) -> Policy:
    """A `Policy` from a preset's name or another policy, with options by keyword.

    Options are the fields of `Policy` and of the preset's score; an unknown one raises ValueError with the nearest
    names. A `chunk_size` without a `schedule` means schedule="chunk".
    """
    if isinstance(policy, str):
        choices = dict(PRESETS.find(policy))
        if budget is None:
            raise ValueError("budget is missing: slots per kv head (int) or the fraction kept (float in (0, 1))")
    elif isinstance(policy, Policy):
        choices = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}
    else:
        raise TypeError(f"policy must be a preset's name or a kvevict.Policy, got {type(policy).__name__}")
    if budget is not None:
        choices["budget"] = budget
    if chunk_size is not None:
        choices["chunk_size"] = chunk_size
        choices["schedule"] = None
    score = as_score(options.pop("score", choices["score"]))
    own = {f.name for f in dataclasses.fields(score) if f.init}
    fields = {f.name for f in dataclasses.fields(Policy)} - {"score", "budget", "chunk_size"}
    for option in options:
        if option not in own | fields:
            raise ValueError(unknown("option", option, own | fields | {"budget", "chunk_size"}))
    score_options = {name: options.pop(name) for name in list(options) if name in own}
    choices["score"] = dataclasses.replace(score, **score_options) if score_options else score
    return Policy(**(choices | options))


def preset(name: str, **choices) -> None:
    PRESETS.add(name)(choices)


def describe(name: str) -> str:
    """The first line of a preset's score docstring: what it is and where it comes from."""
    return inspect.getdoc(type(PRESETS.find(name)["score"])).splitlines()[0]


_Z = 4096  # chunk size of the methods that evict chunk by chunk
preset("streaming", score=SCORES["streaming"](), chunk_size=_Z)
preset("h2o", score=SCORES["h2o"](), chunk_size=_Z)
preset("h2o/kvcf", score=SCORES["h2o"](recent=8), chunk_size=_Z)
preset("tova", score=SCORES["tova"](), chunk_size=_Z)
preset("snapkv", score=SCORES["snapkv"]())
preset("snapkv/kvcf", score=SCORES["snapkv"](window=8))
preset("snapkv/kvpress", score=SCORES["snapkv"](window=64, kernel=5, pool="avg", reduce="mean"))
preset("random", score=SCORES["random"]())
preset("knorm", score=SCORES["knorm"]())
preset("keydiff", score=SCORES["keydiff"]())
preset("take", score=SCORES["take"](), chunk_size=_Z, warmup_layers="half")
preset("take/no-probe", score=SCORES["take"](append=False), chunk_size=_Z, warmup_layers="half")
preset("take/no-delay", score=SCORES["take"](), chunk_size=_Z)
preset("oracle", score=SCORES["oracle"]())
preset("take/chunk-only", score=SCORES["take"](append=False), chunk_size=_Z)
