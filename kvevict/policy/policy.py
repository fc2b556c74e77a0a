"""Defines `Policy`: independent choices of rows, score, budget, selection and schedule."""

import dataclasses
import functools
import json
import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import rules, values
from .checks import PLENTY, SLOTS, builtin, byte_count, keeps_all, one_of, parsed
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

    rows           the observing queries, whose attention scores slots: a name of `kvevict.ROWS` or a `Rows` with its
                   options, e.g. `kvevict.ROWS["window"](16)`; None: the score's default
    score          the importance of a slot: a name of `kvevict.SCORES` or a `Score` with its options
    refine         a change of the score before slots are ranked: a name of `kvevict.REFINEMENTS` or an object
    budget         slots kept per kv head and layer on average, window and sinks included (int), or the fraction of
                   the tokens seen that is kept (float in (0, 1); 1.0: all slots, nothing is evicted), or the bytes that
                   all slots of a sequence may take ("64MiB"); None: 4,096, or no limit if there is a threshold
    threshold      slots that score below this number are evicted, even if the budget has room for them, so the number
                   of slots kept depends on the text. It needs scores that are comparable between layers, and head
                   budgets in which heads compete; None: the budget alone decides
    keep_last      number of last tokens of a row that a threshold does not evict
    chunk_size     tokens read at once; None reads the prompt in one pass
    schedule       "prompt" evicts once at the prompt's end, "chunk" after every chunk; None: "chunk" if there is a
                   chunk_size and the rows do not need the whole prompt (laq)
    warmup_layers  W: layers 0 .. W-2 wait for layer W-1 and keep the slots that it chooses (TAKE eq. 6); None: no layer
                   waits; "half": floor(L/2)
    warmup_budget  B_warmup, the budget of layers 0 .. W-1 until the last chunk (TAKE eq. 8); None: by the number of
                   tokens (methods.md section 3)
    carry          the score that a slot kept before has at the next eviction: the new score ("none"), the sum of all
                   its scores ("sum"), the largest ("max") or the first ("keep"); None: the score's default (h2o, vatp:
                   "sum"; kvzip, kvzip+, gate, compactor, lagkv: "keep"; others "none")
    decode         evict while decoding too, so that the cache never exceeds budget + interval - 1 slots; None: True if
                   that is part of the score's method (streaming, h2o, tova); presets of CAOTE set True
    interval       with decode=True: number of decoded tokens from one eviction to the next; None: the score's default:
                   1 (streaming, h2o, tova, vatp), 128 (tri, rkv), 64 (random with redraw), or 16
    keep_prompt    with decode=True: only the slots of decoded tokens are evicted, down to `budget`; the slots that were
                   kept of the prompt stay, so the cache never exceeds twice the budget + interval - 1 slots. The read
                   of the next turn cuts all slots to the budget
    recall         True: no slot is lost (methods.md section 13), because the slots of every token also go to an
                   archive, which a further turn, a prompt's last chunk and an answer attend to
    recall_slots   with recall=True: the number of slots that a further turn or a prompt's last chunk chooses, given as
                   for `budget`, which then limits the earlier chunks only; 1.0: all slots. A text that fits `budget`
                   keeps all slots. None: all slots, if the archive is in the memory of the model's device and takes no
                   more bytes than the weights that a token reads; else, or with `recall_after`, as many as `budget`
    recall_after   with recall=True: number of an answer's first tokens that attend to all slots; then their rows and
                   the prompt's last 16 rows choose the slots that later tokens attend to. 0: rows of the prompt choose
                   before the answer; None: 16, or 0 if layers share a choice, if rows are drafted or repeated, or if
                   the policy cannot choose slots, or evicts them, while decoding
    recall_check   with recall=True: number of an answer's tokens that one call checks. This many tokens are written
                   over the chosen slots, and the call reads them over all slots, replaces the first that would be
                   another there, and takes the later ones back. So the answer is the one of all slots, at a fraction
                   of their traffic; the call's rows choose the slots for the next tokens. None: answers are not
                   checked
    layers         how the budget is split over layers: a name of `kvevict.LAYERS` or an object with its options
    heads          how a layer's slots are split over its heads: a name of `kvevict.HEADS` or an object, e.g.
                   `kvevict.HEADS["ada"](floor="max")`
    select         how slots are selected by their scores: a name of `kvevict.SELECTIONS` or an object
    select_by_layer   (start, stop, select): selection of evicting layers start .. stop - 1; stop None: to the last one
    keep_first     number of first tokens of a row that are never evicted, whatever their score: a system prompt,
                   learned tokens
    n_reuse        number of neighbouring layers in a group, all of which keep the slots that the group's first layer
                   chooses (ChunkKV algorithm 3)
    tsp            number, from 0, of the last decoder layer that reads every token; later layers read the `tsp_len`
                   best tokens of each chunk (FastKV). "half": floor(L/2) - 1; None: all layers read all tokens
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
    recall_check: int | None = None
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
        fill("budget", SLOTS if self.budget is None and self.threshold is None else self.budget)
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
        """Return the policy as JSON that `from_json` reads, with parts by their registered names. Raises ValueError if
        an option holds a loaded model."""
        fields = {f.name: to_plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        try:
            return json.dumps(fields)
        except TypeError as error:
            raise ValueError(f"{error}; name it instead, as in draft_model='FOLDER_OR_HUB_ID'") from None

    @classmethod
    def from_json(cls, text: str) -> "Policy":
        """Make the policy from the JSON that `to_json` returned. Raises ValueError for other text and for parts that
        are not registered, and the errors of `Policy(...)` for wrong values. Warns if the JSON of an older version has
        options of a `Run`, which this policy leaves out."""
        policy, run = from_json(text)
        options = ", ".join(f"{option}={value!r}" for option, value in differences(run).items())
        if options:
            warnings.warn(f"a Policy does not hold {options}: give that beside it, as to kvevict.patch", stacklevel=2)
        return policy

    @functools.cached_property
    def recalling(self) -> "Policy":
        """The policy that chooses slots from the archive of `recall`: this policy with `recall_slots` as its budget."""
        if self.recall_slots is None:
            return self
        return dataclasses.replace(self, budget=self.recall_slots, recall_slots=None)

    @functools.cached_property
    def answered(self) -> int:
        """The number of an answer's first tokens that attend to all slots and then choose the slots that stay."""
        return values.answered(self)

    def slots(self, tokens: int) -> int:
        """Return B, the slots per kv head, of a batch row that has seen `tokens` tokens of text (METHODS section 0)."""
        if self.budget is None or keeps_all(self.budget):
            return PLENTY
        if isinstance(self.budget, str):
            raise ValueError(f"budget={self.budget!r} is a number of slots for one model alone: call `in_slots` first")
        if isinstance(self.budget, int):
            return self.budget
        return max(math.ceil(self.budget * tokens), self.smallest_budget())

    def in_slots(self, slot_bytes: int) -> "Policy":
        """Return this policy with its budget converted from bytes to slots per kv head; a policy without a budget in
        bytes is returned as it is. slot_bytes: total bytes of one slot in each kv head of each evicting layer. Raises
        ValueError if the budget's bytes do not hold the smallest budget."""
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
        """The number of a kv head's slots that are kept whatever their score: the protected first slots, and the
        largest number of last slots that the score, the rows, a run cut by a chunk's end, or `keep_last` protects."""
        run = max(select.run for select in self.selections) - 1 if self.schedule == "chunk" else 0
        return self.first + max(self.score.protected[1], self.rows.protected, run, self.spared, self.recall_check or 0)

    @property
    def first(self) -> int:
        """The number of a kv head's first slots that are kept whatever their score."""
        return max(self.keep_first, self.score.protected[0])

    @property
    def spared(self) -> int:
        """The number of last slots of a kv head that a threshold does not evict; 0 without a threshold."""
        return 0 if self.threshold is None else self.keep_last

    @property
    def question(self) -> str:
        """When the question that slots are kept for is known: "known" (while the text is read), "later" (it is asked
        after the text was read), or "none" (the text goes on without a question)."""
        if self.score.continues:
            return "none"
        return "known" if self.rows.needs_question else "later"

    @property
    def goes_on(self) -> int:
        """The number of last tokens of a chunk that every layer reads, the layers after `tsp` too."""
        return max(1, self.rows.decoded)

    @property
    def fewest_propagated(self) -> int:
        """The smallest number of a chunk's tokens that the layers after `tsp` can read: the protected first tokens, the
        last tokens (`goes_on`), and one token chosen by score."""
        return self.first + self.goes_on + 1

    def propagated(self, tokens: Any) -> Any:
        """Return how many tokens of a chunk of `tokens` tokens (int or [B]) the layers after `tsp` read."""
        if isinstance(self.tsp_len, int):
            return np.minimum(tokens, self.tsp_len)
        share = np.ceil(self.tsp_len * np.asarray(tokens)).astype(int)
        return np.minimum(tokens, np.maximum(share, self.fewest_propagated))

    def smallest_budget(self) -> int:
        """Return the smallest budget: the protected slots and one slot chosen by score."""
        return self.protected + 1

    @property
    def selections(self) -> tuple[Any, ...]:
        """The selections that layers use: `select`, and the selections in `select_by_layer`."""
        return (self.select, *(select for _, _, select in self.select_by_layer))

    def selection(self, layer: int) -> Selection:
        """Return the selection that evicting layer number `layer` (counted from 0) uses."""
        for start, stop, select in self.select_by_layer:
            if start <= layer and (stop is None or layer < stop):
                return select
        return self.select  # type: ignore[return-value]  # a `Selection` here, not its name

    @property
    def shared(self) -> bool:
        """Whether all heads of some layer keep the same slots."""
        return self.score.shared or any(select.shared for select in self.selections)

    def groups(self, layers: int) -> list[list[int]]:
        """Return the groups of neighbouring layers that keep the same slots, of a model with `layers` evicting layers:
        the `waiting_layers` together, `n_reuse` layers each, or single layers."""
        waiting = self.waiting_layers(layers)
        starts = [0, *range(waiting, layers)] if waiting > 1 else range(0, layers, self.n_reuse)
        return [list(range(a, b)) for a, b in zip(starts, [*starts[1:], layers], strict=True)]

    def warmup_slots(self, tokens: int) -> int:
        """Return B_warmup of a batch row with N = `tokens` tokens (METHODS section 3): `warmup_budget`, or by default
        min(10240, ceil(5N/64)), but at least the budget B."""
        usual = min(10240, math.ceil(tokens * 5 / 64))
        return max(self.slots(tokens), usual if self.warmup_budget is None else self.warmup_budget)

    def check_layers(self, layers: int) -> None:
        """Raise ValueError if the policy names evicting layers that a model with `layers` of them does not have."""
        for start, stop, _ in self.select_by_layer:
            if max(start + 1, stop or 0) > layers:
                raise ValueError(
                    f"select_by_layer has a range from {start} to {stop}, the model {layers} evicting layers"
                )
        if self.waiting_layers(layers) > layers:
            raise ValueError(f"warmup_layers={self.warmup_layers} is more than the model's {layers} evicting layers")

    def waiting_layers(self, layers: int) -> int:
        """Return W: of `layers` evicting layers, 0 .. W-1 keep the slots that layer W-1 chooses; 1: no layer waits."""
        if isinstance(self.warmup_layers, str):  # "half"
            return max(1, layers // 2)
        return self.warmup_layers or 1


def from_json(text: str) -> tuple[Policy, Run]:
    """Make a policy from JSON, as `Policy.from_json`, and a `Run` from the options of a run that older JSON has."""
    try:
        data = parsed(text)
    except (ValueError, TypeError) as error:
        raise ValueError(f"this is not a policy in JSON: {error}; pass what Policy.to_json wrote") from None
    if not isinstance(data, dict):
        raise ValueError(f"a policy in JSON is an object of its fields, got {text[:40]!r}")
    for name in data:
        one_of("field of a policy", name, {*OPTIONS, *(f.name for f in dataclasses.fields(Policy))})
    fields, run = apart(data)
    run = {name: value for name, value in run.items() if (name, value) != ("compiled", False)}  # the older default
    kinds = {name: "select" if name == "select_by_layer" else name for name in fields}
    return Policy(**{name: from_plain(value, kinds[name]) for name, value in fields.items()}), Run(**run)
