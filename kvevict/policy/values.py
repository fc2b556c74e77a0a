"""Checks the values of a policy's fields; `rules.py` checks choices that exclude each other."""

import numbers
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from .checks import byte_count, count, finite, flag, one_of
from .parts import as_part

if TYPE_CHECKING:
    from .policy import Policy

AFTER = 16  # default of `recall_after`


def check(policy: "Policy") -> None:
    """Raise TypeError or ValueError for a field with a wrong value, and for a field that has no effect without another
    field."""
    if policy.threshold is not None:
        finite("threshold", policy.threshold)
    for name, least in (("keep_last", 0), ("keep_first", 0), ("n_reuse", 1)):
        count(name, getattr(policy, name), least)
    if policy.budget is not None:
        _check_budget(policy)
    for name in ("chunk_size", "warmup_budget", "interval"):
        if getattr(policy, name) is not None:
            count(name, getattr(policy, name), 1)
    for name, least in (("warmup_layers", 1), ("tsp", 0)):
        if getattr(policy, name) not in (None, "half"):
            count(name, getattr(policy, name), least)
    if not isinstance(policy.decode, bool):
        raise TypeError(f"decode must be True, False or None, got {policy.decode!r}")
    flag("keep_prompt", policy.keep_prompt)
    if not isinstance(policy.recall, bool):
        raise TypeError(
            f"recall must be True or False in a Policy, got {policy.recall!r}: give the archive's place beside the "
            "policy, as in kvevict.patch(model, policy, recall='memory')"
        )
    for name, given in (("interval", policy.interval is not None), ("keep_prompt", policy.keep_prompt)):
        if given and not policy.decode:
            raise ValueError(
                f"{name}={getattr(policy, name)} is about evicting while decoding, which this policy does not: give "
                f"decode=True too, or leave {name} out"
            )
    one_of("carry", policy.carry, ("none", "sum", "keep", "max"))
    one_of("schedule", policy.schedule, ("prompt", "chunk"))
    if policy.schedule == "chunk" and policy.chunk_size is None:
        raise ValueError("schedule='chunk' needs a chunk_size (tokens); e.g. chunk_size=4096")
    if not isinstance(policy.tsp_len, float):
        count("tsp_len", policy.tsp_len, policy.fewest_propagated)
    elif not 0 < policy.tsp_len < 1:
        raise ValueError(f"tsp_len={policy.tsp_len} is not a share in (0, 1); pass an int for a number of tokens")


def _check_budget(policy: "Policy") -> None:
    budget = policy.budget
    if isinstance(budget, str):
        if "/" in budget or "%" in budget:
            raise ValueError(
                f"budget={budget!r} is a text: give a share as a number, such as 1 / 16, or bytes: '64MiB'"
            )
        byte_count("budget", budget)
        return
    if isinstance(budget, bool) or not isinstance(budget, numbers.Real):
        raise TypeError(
            "budget must be an int (slots per kv head), a float in (0, 1] (fraction kept) or a text such as "
            f"'64MiB' (bytes of all slots), got {budget!r}"
        )
    if not isinstance(budget, numbers.Integral):
        if not 0 < budget <= 1:
            raise ValueError(f"budget={budget} is not a fraction in (0, 1]; pass an int for a number of slots")
        return
    count("budget", budget, 1)
    smallest = policy.smallest_budget()
    if budget < smallest:
        raise ValueError(
            f"budget={budget} is too small: the policy always keeps {smallest - 1} slots of each head (window, probe, "
            "recent slots, sinks, keep_first, a threshold's keep_last or a run cut by a chunk): "
            f"give budget >= {smallest} or fewer of those" + (" (1.0 keeps all slots)" if budget == 1 else "")
        )


def check_recall(policy: "Policy") -> None:
    """Raise TypeError or ValueError if `recall_slots` cannot be the policy's budget, or if the policy cannot have its
    `recall_after`."""
    for name in ("recall_slots", "recall_after", "recall_check"):
        if getattr(policy, name) and not policy.recall:
            raise ValueError(f"{name}={getattr(policy, name)} is about recall: give recall=True too, or leave it out")
    try:
        if isinstance(policy.recall_slots, str):
            raise TypeError("bytes are for budget alone: give a number of slots or a fraction")
        _ = policy.recalling  # makes a policy with this budget, which checks it
    except (ValueError, TypeError) as error:
        raise type(error)(f"recall_slots: {error}") from None
    if policy.recall_after is not None:
        count("recall_after", policy.recall_after, 0)
    if policy.recall_check is not None:
        _check_checks(policy)
    _ = policy.answered


def _check_checks(policy: "Policy") -> None:
    """Raise TypeError or ValueError if the policy's answers cannot be checked as `recall_check` says."""
    rows = count("recall_check", policy.recall_check, 2)
    for why in (
        (policy.recall_after, "answers are checked from their first token on: leave recall_after out"),
        (policy.decode, "tokens are taken back, which eviction while decoding cannot do: decode=False"),
        (policy.rows.needs_full_prompt or policy.rows.repeats,
         "this policy drafts, or repeats the prompt, and an answer's rows would choose instead"),
        (policy.chunk_size is not None and policy.chunk_size < rows,
         f"the tokens are checked in one call, and chunk_size={policy.chunk_size} splits it: give a larger one"),
    ):  # fmt: skip
        if why[0]:
            raise ValueError(f"recall_check={rows}: {why[1]}; or leave recall_check out")


def answered(policy: "Policy") -> int:
    """Return the policy's `recall_after`, or its default. Raises ValueError if the policy cannot have the value."""
    given = policy.recall_after
    if given == 0 or not policy.recall or policy.recall_check:
        return 0
    reason = _never_chooses_again(policy)
    if reason and given is not None:
        raise ValueError(f"recall_after={given}: {reason}; or recall_after=0")
    return 0 if reason else AFTER if given is None else given


def _never_chooses_again(policy: "Policy") -> str | None:
    """Return the reason why the rows of an answer cannot choose among all slots, or None if they can."""
    if policy.rows.needs_full_prompt or policy.rows.repeats:
        return "this policy drafts, or repeats the prompt, and an answer's rows would choose instead"
    if policy.n_reuse > 1 or policy.warmup_layers not in (None, 1):
        return "layers take another layer's slots, and after an answer's first tokens each chooses its own"
    if policy.decode:
        return "with decode=True slots are evicted after each token, or after a few"
    try:
        replace(policy, decode=True, interval=1, recall_after=0)
    except ValueError as error:
        return str(error)
    return None


def as_ranges(entries: Any) -> tuple[tuple[int, int | None, Any], ...]:
    """Check the `select_by_layer` entries and return them as (start, stop, selection). Raises TypeError or ValueError
    for wrong entries, and ValueError for a layer in two ranges."""
    if not isinstance(entries, (tuple, list)):
        raise TypeError(f"select_by_layer must be a tuple of (start, stop, select), got {entries!r}")
    ranges = []
    for entry in entries:
        try:
            start, stop, select = entry
        except (TypeError, ValueError):
            raise ValueError(f"select_by_layer must hold (start, stop, select), got {entry!r}") from None
        count("select_by_layer: start", start, 0)
        if stop is not None:
            count("select_by_layer: stop", stop, start + 1)
        ranges.append((start, stop, as_part("select", select)))
    for (a, stop, _), (b, _, _) in pairwise(sorted(ranges, key=lambda entry: entry[0])):
        if stop is None or b < stop:
            raise ValueError(f"select_by_layer has layer {b} in two ranges, from {a} on and from {b} on; part them")
    return tuple(ranges)
