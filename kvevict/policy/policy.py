"""A policy is a few independent choices: rows and score, budget, selection, schedule."""

import dataclasses
import functools
import json
import math
import numbers
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from . import peers, rules
from .checks import PLENTY, builtin, byte_count, count, finite, flag, one_of, parsed
from .heads import HeadBudget
from .kv import KINDS
from .layers import LayerBudget
from .parts import PARTS as PARTS
from .parts import as_part, check_option, from_plain, option_names, to_plain
from .presets import PRESETS as PRESETS
from .refinements import Refinement
from .rows import Rows
from .scores import Score
from .selections import Selection
from .text import parse_policy

CARRIES = ("none", "sum", "keep", "max")


@dataclass(frozen=True)
class Policy:
    """An eviction policy.

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
    carry          the score at the next eviction of a slot that was kept before: "none": its score then, "sum": its
                   score then plus its earlier one, "max": the larger of both, "keep": its score when it was new;
                   None: the score's default (h2o, vatp: "sum"; kvzip, kvzip+, gate, compactor, lagkv: "keep"; others
                   "none")
    decode         evict while decoding too, so that the cache never grows past budget + interval - 1; None: where it
                   is part of the score's method (streaming, h2o, tova; presets of CAOTE set it)
    interval       decoded tokens between two evictions, with decode=True; None: the score's default: 1 if every token
                   counts (streaming, h2o, tova, vatp), 128 (tri, rkv), 64 (random with redraw), or 16
    keep_prompt    with decode=True: only decoded slots are cut, to `budget` slots; the prompt's slots stay as they were
                   chosen when it was read, so that the cache never grows past twice the budget + interval - 1. The next
                   turn's read cuts all of it to the budget
    kv             how stored slots are represented (methods.md section 11): "model": in the model's dtype; "int8": in 8
                   bits a number, "k8v4": keys in 8, values in 4, "int4": in 4. A layer whose logits have an expected
                   error above 1 takes more bits for its keys
    recall         nothing is lost (methods.md section 13): the slots of every token go to an archive in memory, too.
                   A further turn, and a prompt's last chunk, attend to all of it, as without eviction, and choose
                   their slots anew from it; decoding stays within the budget. A folder's path: the archive lies in
                   files there, mapped into memory (models on the CPU)
    recall_slots   with recall=True: the slots that a turn, or a prompt's last chunk, chooses, counted as in `budget`
                   and no more than that, which then bounds the chunks before alone; None: `budget` bounds both
    layers         how the budget is split over layers: a name of `kvevict.LAYERS` or an object with its options
    heads          how a layer's slots are split over its heads: a name of `kvevict.HEADS` or an object, e.g.
                   `kvevict.HEADS["ada"](floor="max")`
    select         how slots are selected by their scores: a name of `kvevict.SELECTIONS` or an object
    select_by_layer   (start, stop, select) for ranges of evicting layers that select otherwise; stop None: to the last
    keep_first     number of first tokens of a row that are never evicted, whatever their score: a system prompt,
                   learned tokens
    n_reuse        groups of this many layers use the slots that their first layer chooses (ChunkKV algorithm 3)
    tsp            the last decoder layer, from 0, that reads every token; the layers after it read each chunk's best
                   `tsp_len` (FastKV). "half": floor(L/2) - 1; None: all layers read all tokens
    tsp_len        how many of a chunk's tokens these layers read (int), or their share (float in (0, 1))
    progress       show a progress bar while a prompt is read
    diagnose       measure for `kvevict.report` how much of the observing rows' attention every eviction of a read
                   loses; takes about a tenth more time
    compiled       decoded tokens are recorded once, on a GPU as a CUDA graph, and replayed without Python. What cannot
                   be recorded is decoded as without it, with one warning that says why
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
    kv: str = "model"
    recall: bool | str = False
    recall_slots: int | float | None = None
    layers: LayerBudget | str = "uniform"
    heads: HeadBudget | str = "equal"
    select: Selection | str = "token"
    select_by_layer: tuple[Any, ...] = ()
    keep_first: int = 0
    n_reuse: int = 1
    tsp: int | str | None = None
    tsp_len: int | float = 2048
    progress: bool = False
    diagnose: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        def fill(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        fill("score", as_part("score", self.score))
        fill("rows", self.score.rows if self.rows is None else self.rows)
        for kind in PARTS:
            fill(kind, as_part(kind, getattr(self, kind)))
        if not isinstance(self.select_by_layer, (tuple, list)):
            raise TypeError(f"select_by_layer must be a tuple of (start, stop, select), got {self.select_by_layer!r}")
        fill("select_by_layer", _as_ranges(self.select_by_layer))
        fill("budget", 512 if self.budget is None and self.threshold is None else builtin(self.budget))
        fill("recall_slots", builtin(self.recall_slots))
        fill("threshold", builtin(self.threshold))
        if self.carry is None:
            fill("carry", self.score.carry)
        one_of("carry", self.carry, CARRIES)
        if self.schedule is None:
            fill("schedule", "prompt" if self.chunk_size is None or self.rows.needs_full_prompt else "chunk")
        if self.decode is None:
            fill("decode", self.score.decodes)
        if self.interval is None and self.decode:
            fill("interval", self.score.own_interval)
        for part in (self.rows, self.score, self.refine, self.layers, self.heads, *self.selections):
            part.check(self)
        self._check_counts()
        one_of("schedule", self.schedule, ("prompt", "chunk"))
        one_of("kv", self.kv, KINDS)
        if self.schedule == "chunk" and self.chunk_size is None:
            raise ValueError("schedule='chunk' needs a chunk_size (tokens); e.g. chunk_size=4096")
        if self.warmup_layers is not None and self.warmup_layers != "half":
            count("warmup_layers", self.warmup_layers, 1)
        if self.tsp is not None and self.tsp != "half":
            count("tsp", self.tsp, 0)
        if not isinstance(self.tsp_len, float):
            count("tsp_len", self.tsp_len, self.fewest_propagated)
        elif not 0 < self.tsp_len < 1:
            raise ValueError(f"tsp_len={self.tsp_len} is not a share in (0, 1); pass an int for a number of tokens")
        rules.check(self)
        if self.recall_slots is not None:
            self._check_recall_slots()

    def to_json(self) -> str:
        """Write the policy as text that `from_json` reads, parts by their registered names. Raises ValueError for a
        policy with a loaded model."""
        fields = {f.name: to_plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return json.dumps(fields, default=_refuse_in_json)

    @classmethod
    def from_json(cls, text: str) -> "Policy":
        """Read the policy that `to_json` wrote. Raises ValueError for other text and for parts that are not registered,
        and the errors of `Policy(...)` for values of a wrong kind."""
        try:
            data = parsed(text)
        except (ValueError, TypeError) as error:
            raise ValueError(f"this is not a policy in JSON: {error}; pass what Policy.to_json wrote") from None
        known = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(data, dict):
            raise ValueError(f"a policy in JSON is an object of its fields, got {text[:40]!r}")
        for name in data:
            one_of("field of a policy", name, known)
        kinds = {name: "select" if name == "select_by_layer" else name for name in data}
        return cls(**{name: from_plain(value, kinds[name]) for name, value in data.items()})

    def _check_counts(self) -> None:
        if self.threshold is not None:
            finite("threshold", self.threshold)
        count("keep_last", self.keep_last, 0)
        if self.budget is not None:
            self._check_budget()
        if self.chunk_size is not None:
            count("chunk_size", self.chunk_size, 1)
        if self.warmup_budget is not None:
            count("warmup_budget", self.warmup_budget, 1)
        if self.interval is not None:
            count("interval", self.interval, 1)
        count("n_reuse", self.n_reuse, 1)
        count("keep_first", self.keep_first, 0)
        if not isinstance(self.decode, bool):
            raise TypeError(f"decode must be True, False or None, got {self.decode!r}")
        for name in ("keep_prompt", "progress", "diagnose", "compiled"):
            flag(name, getattr(self, name))
        if not isinstance(self.recall, (bool, str)) or self.recall == "":
            raise TypeError(f"recall must be True, False or a folder's path, got {self.recall!r}")
        for name, given in (("interval", self.interval is not None), ("keep_prompt", self.keep_prompt)):
            if given and not self.decode:
                raise ValueError(
                    f"{name}={getattr(self, name)} is about evicting while decoding, which this policy does not: give "
                    f"decode=True too, or leave {name} out"
                )

    def _check_budget(self) -> None:
        if isinstance(self.budget, str):
            byte_count("budget", self.budget)
            return
        if isinstance(self.budget, bool) or not isinstance(self.budget, numbers.Real):
            raise TypeError(
                "budget must be an int (slots per kv head), a float in (0, 1) (fraction kept) or a text such as "
                f"'64MiB' (bytes of all slots), got {self.budget!r}"
            )
        if not isinstance(self.budget, numbers.Integral) and not 0 < self.budget < 1:
            raise ValueError(f"budget={self.budget} is not a fraction in (0, 1); pass an int for a number of slots")
        if isinstance(self.budget, numbers.Integral):
            count("budget", self.budget, 1)
        smallest = self.smallest_budget()
        if isinstance(self.budget, numbers.Integral) and self.budget < smallest:
            raise ValueError(
                f"budget={self.budget} is too small: {type(self.score).__name__} always keeps {smallest - 1} slots "
                "(window, probe, recent slots, sinks, keep_first, a threshold's keep_last or a run cut by a chunk): "
                "give budget >= "
                f"{smallest} or fewer of those"
            )
        if self.budget > PLENTY:
            raise ValueError(f"budget must be at most {PLENTY} slots, got {self.budget}")

    def _check_recall_slots(self) -> None:
        if not self.recall:
            raise ValueError(f"recall_slots={self.recall_slots} is about recall: give recall=True too, or leave it out")
        try:
            if isinstance(self.recall_slots, str):
                raise TypeError("bytes are for budget alone: give a number of slots or a fraction")
            assert self.recalling  # made here, with the checks of a budget
        except (ValueError, TypeError) as error:
            raise type(error)(f"recall_slots: {error}") from None
        slots, budget = self.recall_slots, self.budget
        if isinstance(budget, (int, float)) and isinstance(slots, type(budget)) and slots > budget:
            raise ValueError(f"recall_slots={slots} is more than budget={budget}: give fewer")

    @functools.cached_property
    def recalling(self) -> "Policy":
        """The policy of a cut after slots came back: `recall_slots` is its budget."""
        if self.recall_slots is None:
            return self
        return dataclasses.replace(self, budget=self.recall_slots, recall_slots=None)

    def slots(self, tokens: int) -> int:
        """Return the budget B of a row that has seen `tokens` valid tokens (METHODS section 0)."""
        if self.budget is None:
            return PLENTY
        if isinstance(self.budget, str):
            raise ValueError(f"budget={self.budget!r} is a number of slots for one model alone: call `in_slots` first")
        if isinstance(self.budget, numbers.Integral):
            return self.budget
        return max(math.ceil(self.budget * tokens), self.smallest_budget())

    def in_slots(self, slot_bytes: int) -> "Policy":
        """Return this policy with a budget in bytes as slots per kv head. slot_bytes: of one slot in every kv head of
        every layer that evicts. Raises ValueError if the bytes do not hold the smallest budget."""
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
        """Number of a kv head's slots that are kept whatever their score: sinks, and the largest of window, probe,
        recent slots and a run that a chunk's end cuts."""
        run = max(select.run for select in self.selections) - 1 if self.schedule == "chunk" else 0
        return self.first + max(self.score.protected[1], self.rows.protected, run, self.spared)

    @property
    def first(self) -> int:
        """Number of a kv head's first slots that are kept whatever their score."""
        return max(self.keep_first, self.score.protected[0])

    @property
    def spared(self) -> int:
        """Number of a kv head's last slots that a threshold leaves alone."""
        return 0 if self.threshold is None else self.keep_last

    @property
    def question(self) -> str:
        """The question that slots are kept for: "known" while the text is read, asked "later", or "none"."""
        if self.score.continues:
            return "none"
        return "known" if self.rows.needs_question else "later"

    @property
    def goes_on(self) -> int:
        """Number of a chunk's last tokens that every layer reads, those after `tsp` too."""
        return max(1, self.rows.decoded)

    @property
    def fewest_propagated(self) -> int:
        """The fewest of a chunk's tokens for the layers after `tsp`: those that always go on, and one."""
        return self.first + self.goes_on + 1

    def propagated(self, tokens: Any) -> Any:
        """Count a chunk's tokens, int or [B], that the layers after `tsp` read."""
        if isinstance(self.tsp_len, numbers.Integral):
            return np.minimum(tokens, self.tsp_len)
        share = np.ceil(self.tsp_len * np.asarray(tokens)).astype(int)
        return np.minimum(tokens, np.maximum(share, self.fewest_propagated))

    def smallest_budget(self) -> int:
        """Return the smallest budget that leaves one slot to be won by score."""
        return self.protected + 1

    @property
    def selections(self) -> tuple[Any, ...]:
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

    def groups(self, layers: int) -> list[Any]:
        """Return the runs of layers that keep the same slots: layers that wait, layers that reuse an index, or one
        each."""
        waiting = self.waiting_layers(layers)
        starts = [0, *range(waiting, layers)] if waiting > 1 else range(0, layers, self.n_reuse)
        return [list(range(a, b)) for a, b in zip(starts, [*starts[1:], layers], strict=True)]

    def warmup_slots(self, tokens: int) -> int:
        """Return B_warmup of a row of `tokens` tokens (METHODS section 3): min(N, 10240, max(B, ceil(5N/64))), at least
        B."""
        budget = self.slots(tokens)
        if self.warmup_budget is not None:
            return max(budget, self.warmup_budget)
        return max(budget, min(tokens, 10240, max(budget, math.ceil(tokens * 5 / 64))))

    def check_layers(self, layer_count: int) -> None:
        """Raise ValueError if `select_by_layer` names layers that a model of `layer_count` evicting ones lacks."""
        for start, stop, _ in self.select_by_layer:
            if max(start + 1, stop or 0) > layer_count:
                raise ValueError(
                    f"select_by_layer has a range from {start} to {stop}, the model {layer_count} evicting layers"
                )

    def waiting_layers(self, layer_count: int) -> int:
        """Return W: layers 0..W-1 share the slots that layer W-1 chooses. 1 means that no layer waits."""
        if self.warmup_layers is None:
            return 1
        if isinstance(self.warmup_layers, str):  # "half"
            return max(1, layer_count // 2)
        if self.warmup_layers > layer_count:
            raise ValueError(
                f"warmup_layers={self.warmup_layers} is more than the model's {layer_count} evicting layers"
            )
        return self.warmup_layers


def _refuse_in_json(value: object) -> Any:
    raise ValueError(
        f"JSON cannot hold a {type(value).__name__}; name it instead, as in draft_model='FOLDER_OR_HUB_ID'"
    )


def _as_ranges(entries: Any) -> tuple[Any, ...]:
    """Check `select_by_layer` and return its ranges; no layer may be in two."""
    ranges = tuple(map(_as_range, entries))
    for (a, stop, _), (b, _, _) in pairwise(sorted(ranges, key=lambda entry: entry[0])):
        if stop is None or b < stop:
            raise ValueError(f"select_by_layer has layer {b} in two ranges, from {a} on and from {b} on; part them")
    return ranges


def _as_range(entry: Any) -> tuple[Any, ...]:
    """Check one range of `select_by_layer` and return (start, stop, selection)."""
    try:
        start, stop, select = entry
    except (TypeError, ValueError):
        raise ValueError(f"select_by_layer must hold (start, stop, select), got {entry!r}") from None
    count("select_by_layer: start", start, 0)
    if stop is not None:
        count("select_by_layer: stop", stop, start + 1)
    return start, stop, as_part("select", select)


def build(policy: Any, *, budget: Any = None, chunk_size: Any = None, **options: Any) -> Policy:
    """Make a `Policy` from a preset's name, a text NAME:OPTION=VALUE,... or another policy, with options by keyword.

    Options are the fields of `Policy` and of the parts that it is made of (rows, score, refine, layers, heads, select);
    an unknown one raises ValueError with the nearest names. A `chunk_size` without a `schedule` means schedule="chunk".
    """
    peers.check(options)
    if isinstance(policy, str):
        if ":" in policy:
            name, given = parse_policy(policy)
            given |= {} if budget is None else {"budget": budget}
            given |= {} if chunk_size is None else {"chunk_size": chunk_size}
            return build(name, **given | options)
        choices = dict(PRESETS.find(policy))
        if budget is None and options.get("threshold") is None:
            raise ValueError(
                "budget is missing: slots per kv head (int), the fraction kept (float in (0, 1)), bytes ('64MiB'), or "
                "threshold=, the smallest score that stays"
            )
    elif isinstance(policy, Policy):
        if budget is None and chunk_size is None and not options:
            return policy  # the same object: a cache knows the policy that read it
        choices = {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}
    else:
        raise TypeError(f"policy must be a preset's name or a kvevict.Policy, got {type(policy).__name__}")
    if isinstance(policy, Policy) and "score" in options:  # the old score's defaults go with it
        old = policy.score
        own_choices = dict(decode=old.decodes, interval=old.own_interval, rows=old.rows, carry=old.carry)
        for name, own in own_choices.items():
            choices[name] = None if choices[name] == own else choices[name]
    if options.get("decode") is False:  # the options of decoding go with it
        choices["interval"], choices["keep_prompt"] = None, False
    if budget is not None:
        choices["budget"] = budget
    if chunk_size is not None:
        choices["chunk_size"] = chunk_size
        choices["schedule"] = None
    defaults = {f.name: f.default for f in dataclasses.fields(Policy)}
    parts = {kind: options.pop(kind, choices.get(kind, defaults[kind])) for kind in PARTS}
    parts["score"] = as_part("score", parts["score"])
    parts = {kind: as_part(kind, parts["score"].rows if part is None else part) for kind, part in parts.items()}
    own = {kind: option_names(part) for kind, part in parts.items()}
    general = set(defaults) - {*PARTS, "budget", "chunk_size"}
    known = general.union(*own.values())
    for option in options:
        check_option(option, known | {*PARTS, "budget", "chunk_size"}, parts=parts)
    for kind, part in parts.items():
        mine = {name: options[name] for name in own[kind] & options.keys()}
        choices[kind] = dataclasses.replace(part, **mine) if mine else part
    return Policy(**(choices | {name: value for name, value in options.items() if name in general}))
