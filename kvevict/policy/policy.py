"""A policy: independent choices of rows and score, budget, selection and schedule."""

import dataclasses
import functools
import json
import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import rules, values
from .checks import PLENTY, builtin, byte_count, one_of, parsed
from .heads import HeadBudget
from .layers import LayerBudget
from .parts import PARTS, as_part, from_plain, to_plain
from .refinements import Refinement
from .rows import Rows
from .run import OPTIONS, Run, apart, differences, refuse
from .scores import Score
from .selections import Selection


@dataclass(frozen=True)
class Policy:
    """An eviction policy: which slots of a KV cache stay.

    rows           the queries that observe: a name of `kvevict.ROWS` or a `Rows` with its options, e.g.
                   `kvevict.ROWS["window"](16)`; None: the score's default
    score          the importance of a slot: a name of `kvevict.SCORES` or a `Score` with its options
    refine         a change of the score before slots are ranked: a name of `kvevict.REFINEMENTS` or an object
    budget         slots kept per kv head and layer on average, window and sinks included (int), or the fraction of
                   the tokens seen that is kept (float in (0, 1)), or the bytes of a sequence's slots in all layers
                   ("64MiB"), as many slots as fit; None: 512, or with a threshold no limit
    threshold      slots that score below this number are evicted, within the budget too; how many stay depends on the
                   text. For scores that compare between layers and heads that compete; None: the budget alone
    keep_last      number of last tokens of a row that a threshold spares
    chunk_size     tokens read at once; None reads the prompt in one pass
    schedule       "prompt" evicts once at the prompt's end, "chunk" after every chunk; None: "chunk" if there is a
                   chunk_size and the rows do not need the whole prompt (laq)
    warmup_layers  W: the first W-1 layers wait for layer W-1 and take its slots (TAKE eq. 6); None: no layer waits;
                   "half": floor(L/2)
    warmup_budget  B_warmup of the layers before W until the last chunk (TAKE eq. 8); None: METHODS' formula
    carry          the score of a slot that was kept before, at the next eviction: its new one ("none"), the sum of all
                   ("sum"), the largest ("max") or the first ("keep"); None: the score's default (h2o, vatp: "sum";
                   kvzip, kvzip+, gate, compactor, lagkv: "keep"; others "none")
    decode         evict while decoding too, so that the cache never grows past budget + interval - 1; None: where it
                   is part of the score's method (streaming, h2o, tova; presets of CAOTE set it)
    interval       decoded tokens between two evictions, with decode=True; None: the score's default: 1 if every token
                   counts (streaming, h2o, tova, vatp), 128 (tri, rkv), 64 (random with redraw), or 16
    keep_prompt    with decode=True: only decoded slots are cut, to `budget` slots; the prompt's slots stay as they were
                   chosen when it was read, so that the cache never grows past twice the budget + interval - 1. The next
                   turn's read cuts all of it to the budget
    recall         nothing is lost (methods.md section 13): the slots of every token go to an archive, too. A further
                   turn, a prompt's last chunk, and its answer's first tokens attend to the whole archive, as without
                   eviction, and choose their slots from it again; the rest is decoded within the budget
    recall_slots   with recall=True: the slots that a turn, or a prompt's last chunk, chooses, counted as in `budget`,
                   which then bounds the chunks before alone; 1.0: all; None: `budget` bounds both. A text that fits
                   `budget` keeps all slots
    recall_after   with recall=True: number of an answer's first tokens that attend to all slots; then their rows and
                   the prompt's last 16 choose the slots that the rest attends to. 0: rows of the prompt choose before
                   the answer; None: 16, or 0 where layers share a choice, where rows are drafted or repeated, and where
                   slots cannot be chosen, or are evicted, while decoding
    layers         how the budget is split over layers: a name of `kvevict.LAYERS` or an object with its options
    heads          how a layer's slots are split over its heads: a name of `kvevict.HEADS` or an object, e.g.
                   `kvevict.HEADS["ada"](floor="max")`
    select         how slots are selected by their scores: a name of `kvevict.SELECTIONS` or an object
    select_by_layer   (start, stop, select) for ranges of evicting layers that select otherwise; stop None: to the last
    keep_first     number of first tokens of a row that are never evicted, whatever their score: a system prompt,
                   learned tokens
    n_reuse        number of layers in a group; a group uses the slots that its first layer chooses (ChunkKV algorithm
                   3)
    tsp            the last decoder layer, from 0, that reads every token; the layers after it read each chunk's best
                   `tsp_len` (FastKV). "half": floor(L/2) - 1; None: all layers read all tokens
    tsp_len        number of a chunk's tokens that the layers after `tsp` read (int), or their share (float in (0, 1))
    """

    rows: Rows | str | None = field(default=None, kw_only=True)
    score: Score | str = "snapkv"
    refine: Refinement | str = "none"
    budget: int | float | str | None = None
    threshold: float | None = None
    keep_last: int = 128
    chunk_size: int | None = None
    schedule: str | None = None
    warmup_layers: int | str | None = None
    warmup_budget: int | None = None
    carry: str | None = None
    decode: bool | None = None
    interval: int | None = None
    keep_prompt: bool = False
    recall: bool = False
    recall_slots: int | float | None = None
    recall_after: int | None = None
    layers: LayerBudget | str = "uniform"
    heads: HeadBudget | str = "equal"
    select: Selection | str = "token"
    select_by_layer: tuple[Any, ...] = ()
    keep_first: int = 0
    n_reuse: int = 1
    tsp: int | str | None = None
    tsp_len: int | float = 2048

    def __new__(cls, *_: object, **fields: object) -> "Policy":
        refuse(fields)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        fill = functools.partial(object.__setattr__, self)
        fill("score", as_part("score", self.score))
        fill("rows", self.score.rows if self.rows is None else self.rows)
        for kind in PARTS:
            fill(kind, as_part(kind, getattr(self, kind)))
        fill("select_by_layer", values.as_ranges(self.select_by_layer))
        fill("budget", 512 if self.budget is None and self.threshold is None else self.budget)
        for name in ("budget", "recall_slots", "threshold", "tsp_len"):
            fill(name, builtin(getattr(self, name)))
        by_chunk = self.chunk_size is not None and not self.rows.needs_full_prompt
        own = dict(carry=self.score.carry, schedule="chunk" if by_chunk else "prompt", decode=self.score.decodes)
        for name, value in own.items():
            if getattr(self, name) is None:
                fill(name, value)
        if self.interval is None and self.decode:
            fill("interval", self.score.own_interval)
        for part in (self.rows, self.score, self.refine, self.layers, self.heads, *self.selections):
            part.check(self)
        values.check(self)
        rules.check(self)
        values.check_recall(self)

    def to_json(self) -> str:
        """Write the policy as text that `from_json` reads, parts by their registered names. Raises ValueError for a
        policy with a loaded model."""
        fields = {f.name: to_plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        try:
            return json.dumps(fields)
        except TypeError as error:
            raise ValueError(f"{error}; name it instead, as in draft_model='FOLDER_OR_HUB_ID'") from None

    @classmethod
    def from_json(cls, text: str) -> "Policy":
        """Read the policy that `to_json` wrote. Raises ValueError for other text and for parts that are not registered,
        and the errors of `Policy(...)` for values of a wrong kind. Warns if an older version's JSON has options of a
        `Run`, which are given beside a policy."""
        policy, run = from_json(text)
        options = ", ".join(f"{option}={value!r}" for option, value in differences(run).items())
        if options:
            warnings.warn(f"a Policy does not hold {options}: give that beside it, as to kvevict.patch", stacklevel=2)
        return policy

    @functools.cached_property
    def recalling(self) -> "Policy":
        """The policy of a cut after `recall` brought slots back: `recall_slots` is its budget."""
        if self.recall_slots is None:
            return self
        all_slots = isinstance(self.recall_slots, float) and self.recall_slots == 1
        return dataclasses.replace(self, budget=PLENTY if all_slots else self.recall_slots, recall_slots=None)

    @functools.cached_property
    def answered(self) -> int:
        """The number of an answer's first tokens that attend to all slots, and then choose."""
        return values.answered(self)

    def slots(self, tokens: int) -> int:
        """Return the budget B of a row that has seen `tokens` valid tokens (METHODS section 0)."""
        if self.budget is None:
            return PLENTY
        if isinstance(self.budget, str):
            raise ValueError(f"budget={self.budget!r} is a number of slots for one model alone: call `in_slots` first")
        if isinstance(self.budget, int):
            return self.budget
        return max(math.ceil(self.budget * tokens), self.smallest_budget())

    def in_slots(self, slot_bytes: int) -> "Policy":
        """Return this policy with a budget in slots per kv head where it is in bytes. slot_bytes: bytes of one slot in
        every kv head of every evicting layer. Raises ValueError if the bytes do not hold the smallest budget."""
        if not isinstance(self.budget, str):
            return self
        slots, smallest = byte_count("budget", self.budget) // slot_bytes, self.smallest_budget()
        if slots < smallest:
            raise ValueError(
                f"budget={self.budget!r} is too small: it holds {slots} slots of each kv head, and this policy needs "
                f"{smallest}: give budget='{-(-smallest * slot_bytes // 1024)}KiB' or more, or a policy with a smaller "
                "window, probe or number of recent slots"
            )
        return dataclasses.replace(self, budget=min(slots, PLENTY))

    @property
    def protected(self) -> int:
        """The number of a kv head's slots that are kept whatever their score: first slots, and the largest of window,
        probe, recent slots and a run that a chunk's end cuts."""
        run = max(select.run for select in self.selections) - 1 if self.schedule == "chunk" else 0
        return self.first + max(self.score.protected[1], self.rows.protected, run, self.spared)

    @property
    def first(self) -> int:
        """The number of a kv head's first slots that are kept whatever their score."""
        return max(self.keep_first, self.score.protected[0])

    @property
    def spared(self) -> int:
        """The number of a kv head's last slots that a threshold leaves alone."""
        return 0 if self.threshold is None else self.keep_last

    @property
    def question(self) -> str:
        """The question that slots are kept for: "known" while the text is read, asked "later", or "none"."""
        if self.score.continues:
            return "none"
        return "known" if self.rows.needs_question else "later"

    @property
    def goes_on(self) -> int:
        """The number of a chunk's last tokens that every layer reads, those after `tsp` too."""
        return max(1, self.rows.decoded)

    @property
    def fewest_propagated(self) -> int:
        """The smallest number of a chunk's tokens that layers after `tsp` can read: first, last and one by score."""
        return self.first + self.goes_on + 1

    def propagated(self, tokens: Any) -> Any:
        """Count the tokens that the layers after `tsp` read of a chunk of `tokens` tokens, int or [B]."""
        if isinstance(self.tsp_len, int):
            return np.minimum(tokens, self.tsp_len)
        share = np.ceil(self.tsp_len * np.asarray(tokens)).astype(int)
        return np.minimum(tokens, np.maximum(share, self.fewest_propagated))

    def smallest_budget(self) -> int:
        """Return the smallest budget that leaves one slot to be won by score."""
        return self.protected + 1

    @property
    def selections(self) -> tuple[Any, ...]:
        """The selections of all layers: `select`, and those of `select_by_layer`."""
        return (self.select, *(select for _, _, select in self.select_by_layer))

    def selection(self, layer: int) -> Selection:
        """Return the selection of the evicting layer number `layer`."""
        for start, stop, select in self.select_by_layer:
            if start <= layer and (stop is None or layer < stop):
                return select
        return self.select  # type: ignore[return-value]  # a name only until the policy is built

    @property
    def shared(self) -> bool:
        """Whether all heads of some layer keep the same slots."""
        return self.score.shared or any(select.shared for select in self.selections)

    def groups(self, layers: int) -> list[list[int]]:
        """Return the groups of neighbouring layers that keep the same slots: layers that wait, layers that reuse an
        index, or single layers."""
        waiting = self.waiting_layers(layers)
        starts = [0, *range(waiting, layers)] if waiting > 1 else range(0, layers, self.n_reuse)
        return [list(range(a, b)) for a, b in zip(starts, [*starts[1:], layers], strict=True)]

    def warmup_slots(self, tokens: int) -> int:
        """Return B_warmup of a row of N = `tokens` tokens (METHODS section 3): `warmup_budget`, or min(10240,
        ceil(5N/64)), and at least B."""
        usual = min(10240, math.ceil(tokens * 5 / 64))
        return max(self.slots(tokens), usual if self.warmup_budget is None else self.warmup_budget)

    def check_layers(self, layers: int) -> None:
        """Raise ValueError if the policy names layers that a model of `layers` evicting ones lacks."""
        for start, stop, _ in self.select_by_layer:
            if max(start + 1, stop or 0) > layers:
                raise ValueError(
                    f"select_by_layer has a range from {start} to {stop}, the model {layers} evicting layers"
                )
        if self.waiting_layers(layers) > layers:
            raise ValueError(f"warmup_layers={self.warmup_layers} is more than the model's {layers} evicting layers")

    def waiting_layers(self, layers: int) -> int:
        """Return W: layers 0..W-1 share the slots that layer W-1 chooses. 1 means that no layer waits."""
        if isinstance(self.warmup_layers, str):  # "half"
            return max(1, layers // 2)
        return self.warmup_layers or 1


def from_json(text: str) -> tuple[Policy, Run]:
    """Read a policy in JSON, as `Policy.from_json`, and the run that an older version's JSON holds."""
    try:
        data = parsed(text)
    except (ValueError, TypeError) as error:
        raise ValueError(f"this is not a policy in JSON: {error}; pass what Policy.to_json wrote") from None
    if not isinstance(data, dict):
        raise ValueError(f"a policy in JSON is an object of its fields, got {text[:40]!r}")
    for name in data:
        one_of("field of a policy", name, {*OPTIONS, *(f.name for f in dataclasses.fields(Policy))})
    fields, run = apart(data)
    kinds = {name: "select" if name == "select_by_layer" else name for name in fields}
    return Policy(**{name: from_plain(value, kinds[name]) for name, value in fields.items()}), Run(**run)
