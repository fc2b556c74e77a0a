"""The parts of a policy that have options: by name, as objects, and in JSON."""

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

# `per_head` is an option of two parts, a score and a selection: it goes to both.
PARTS: dict[str, tuple[Registry, type[Any]]] = {
    "rows": (ROWS, Rows),
    "score": (SCORES, Score),
    "refine": (REFINEMENTS, Refinement),
    "layers": (LAYERS, LayerBudget),
    "heads": (HEADS, HeadBudget),
    "select": (SELECTIONS, Selection),
}


def as_part(kind: str, value: object) -> Any:
    """Return one of PARTS by its name, or an object as it is."""
    registry, base = PARTS[kind]
    if isinstance(value, str):
        return registry.find(value)()
    if not isinstance(value, base):
        raise TypeError(f"{kind} must be a name or a kvevict {base.__name__}, got {value!r}")
    return value


def to_plain(value: object) -> Any:
    """Return a field for JSON: a part becomes its name and options."""
    for registry, base in PARTS.values():
        if isinstance(value, base):
            fields = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
            return {"name": registry.name_of(type(value)), **fields}
    return [to_plain(item) for item in value] if isinstance(value, tuple) else builtin(value)


def from_plain(value: object, kind: str) -> Any:
    """Return the field that `to_plain` wrote; an object in the field is a part of that kind. Options that are constants
    now are dropped. Raises ValueError for unknown names, and for an object where `kind` is none of PARTS."""
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
    """Write a part as an option, by its name, or by its class if it is not registered."""
    return f"{kind}={PARTS[kind][0].name_or_class(part)}"


def returned(
    kind: str, part: object, x: object, shape: Sequence[int], heads: Iterable[int] = (), dtype: object = torch.float32
) -> torch.Tensor:
    """Return x, which a part returned. Raises TypeError or ValueError unless x is a tensor of the dtype and the shape,
    [B, Hkv, ..], or one with any of `heads` in the place of Hkv. No number is read, so no device is waited for."""
    allowed = [[shape[0], each, *shape[2:]] for each in (shape[1], *heads)]
    if isinstance(x, torch.Tensor) and x.dtype == dtype and list(x.shape) in allowed:
        return x
    said = f"{PARTS[kind][0].kind} {PARTS[kind][0].name_or_class(part)} returned"
    if not isinstance(x, torch.Tensor) or x.dtype != dtype:
        raise TypeError(f"{said} {getattr(x, 'dtype', type(x).__name__)}: return a tensor of {dtype}")
    raise ValueError(f"{said} the shape {list(x.shape)}: return {' or '.join(map(str, allowed))}")


def check_option(name: str, known: Collection[str], kind: str = "option", parts: dict[str, Any] | None = None) -> None:
    """Raise ValueError for an option that is not `known`. The error says what to write instead of an option that is
    gone, and of another part's option, which options the policy's own part has. parts: the policy's, by kind."""
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
