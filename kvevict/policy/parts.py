"""Converts the parts of a policy between names, objects and JSON, and checks their options."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from . import peers
from .checks import builtin, unknown
from .heads import HEADS, HeadBudget
from .layers import LAYERS, LayerBudget
from .peers import FIXED
from .refinements import REFINEMENTS, Refinement
from .registry import Registry
from .rows import ROWS, Rows
from .scores import SCORES, Score
from .selections import SELECTIONS, Selection

# kind of a part -> (registry, base class). The option `per_head` belongs to scores and to selections: both get it.
PARTS: dict[str, tuple[Registry, type[Any]]] = {
    "rows": (ROWS, Rows),
    "score": (SCORES, Score),
    "refine": (REFINEMENTS, Refinement),
    "layers": (LAYERS, LayerBudget),
    "heads": (HEADS, HeadBudget),
    "select": (SELECTIONS, Selection),
}


def as_part(kind: str, value: object) -> Any:
    """Make the part of a kind (a key of PARTS) that has the name `value`; a part is returned as it is. Raises TypeError
    for any other object."""
    registry, base = PARTS[kind]
    if isinstance(value, str):
        return registry.find(value)()
    if not isinstance(value, base):
        raise TypeError(f"{kind} must be a name or a kvevict {base.__name__}, got {value!r}")
    return value


def to_plain(value: object) -> Any:
    """Return a policy's field as a value that JSON can hold: a part becomes a dict of its name and options."""
    for registry, base in PARTS.values():
        if isinstance(value, base):
            fields = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
            return {"name": registry.name_of(type(value)), **fields}
    return [to_plain(item) for item in value] if isinstance(value, tuple) else builtin(value)


def from_plain(value: object, kind: str) -> Any:
    """Return the field from the value that `to_plain` made of it. A dict in the value becomes a part of the kind `kind`
    (a key of PARTS); options that are constants now (`FIXED`) are dropped. Raises ValueError for unknown names, and for
    a dict if `kind` is not in PARTS."""
    if isinstance(value, list):
        return tuple(from_plain(item, kind) for item in value)
    if not isinstance(value, dict):
        return value
    if kind not in PARTS or not isinstance(value.get("name"), str):
        wanted = "an object must have a name" if kind in PARTS else "cannot be an object"
        raise ValueError(f"{kind} of a policy in JSON: {wanted}, got {value!r}")
    part = PARTS[kind][0].find(value["name"])
    known = option_names(part)
    given = {name: option for name, option in value.items() if name in known or (name, option) not in FIXED.items()}
    options = {name: from_plain(option, name) for name, option in given.items() if name != "name"}
    for name in options:
        check_option(name, known, f"option of {value['name']}")
    return part(**options)


def option_names(part: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(part) if f.init}


def written(kind: str, part: Any) -> str:
    """Return the text KIND=NAME of a part; NAME is the part's class if the part is not registered."""
    return f"{kind}={PARTS[kind][0].name_or_class(part)}"


def returned(
    kind: str, part: object, x: object, shape: Sequence[int], heads: Iterable[int] = (), dtype: object = torch.float32
) -> torch.Tensor:
    """Check x, the result of a part's method, and return it. Raises TypeError or ValueError unless x is a tensor of
    `dtype` and of `shape` [B, Hkv, ..], where any of `heads` may take the place of Hkv. No element of x is read, so
    the host does not wait for the device."""
    allowed = [[shape[0], each, *shape[2:]] for each in (shape[1], *heads)]
    if isinstance(x, torch.Tensor) and x.dtype == dtype and list(x.shape) in allowed:
        return x
    said = f"{PARTS[kind][0].kind} {PARTS[kind][0].name_or_class(part)} returned"
    if not isinstance(x, torch.Tensor) or x.dtype != dtype:
        raise TypeError(f"{said} {getattr(x, 'dtype', type(x).__name__)}: return a tensor of {dtype}")
    raise ValueError(f"{said} the shape {list(x.shape)}: return {' or '.join(map(str, allowed))}")


def check_option(name: str, known: Collection[str], kind: str = "option", parts: dict[str, Any] | None = None) -> None:
    """Raise ValueError if an option's name is not in `known`. The error says what to write instead of a removed option.
    For an option that only other parts have, it lists the options of the policy's own part. parts: kind -> the
    policy's part."""
    if name in known:
        return
    if name in peers.OPTIONS:
        raise ValueError(f"unknown {kind} {name!r}; {peers.OPTIONS[name]}")
    text = unknown(kind, name, known)
    for each, part in (parts or {}).items() if "did you mean" not in text else ():
        owners = [repr(owner) for owner, other in PARTS[each][0].items() if name in option_names(other)]
        if owners:
            own = ", ".join(sorted(option_names(part))) or "none"
            text = f"unknown {kind} {name!r}: it is of {each}={', '.join(owners)}; {written(each, part)} has {own}"
    raise ValueError(text)
