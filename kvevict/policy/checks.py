"""Checks of arguments, whose errors name the argument and the value to pass."""

import difflib
import importlib.util
import json
import numbers
import os
import re
import sys
from collections.abc import Iterable
from typing import Any

PLENTY = 2**31 - 1  # no limit: no cache has more slots or tokens, since positions are int32
# Budget if none is named and there is no threshold: of the slots per kv head that were measured, the most with which
# Qwen2.5-Coder-0.5B reads 8,000 and 12,000 tokens in at most 1.2 of the time with 512 (docs/usage.md, Which budget?)
SLOTS = 4096
# Chunk size of presets that read in chunks, where their method has none of its own (docs/usage.md, Which chunk size?)
CHUNK = 4096
DEEPEST = 64  # largest number of levels of nested objects and lists in JSON text


def parsed(text: str | bytes) -> Any:
    """Return the value of JSON text (or its bytes). Raises ValueError for text that is not JSON, and for values nested
    so deeply that comparing or printing them would fail."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} deep") from None
    level = [value]
    for _ in range(DEEPEST):
        holders = [each for each in level if isinstance(each, (dict, list))]
        level = [inner for each in holders for inner in (each.values() if isinstance(each, dict) else each)]
    if level:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    return value


def unknown(kind: str, name: object, known: Iterable[Any], listed: bool = False) -> str:
    """Return the error message for an unknown name. The message has the nearest known names, or all known names if none
    is near; with `listed` it has both."""
    written = {str(each).lower(): each for each in known}
    near = [written[each] for each in difflib.get_close_matches(str(name).lower(), list(written), n=3)]
    hints = [f"did you mean {' or '.join(map(repr, near))}?"] if near else []
    hints += [f"known: {', '.join(sorted(known))}"] if listed or not near else []
    return f"unknown {kind} {name!r}; {' '.join(hints)}"


def one_of(kind: str, name: Any, known: Iterable[Any]) -> None:
    """Raise ValueError unless `name` is one of the `known` names."""
    if name not in known:
        raise ValueError(unknown(kind, name, known))


def installed(extra: str, what: str, *modules: str) -> None:
    """Raise ValueError if one of the `modules` that `what` needs is missing. The error has the command that installs
    them: they belong to the package's extra requirements `extra`."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ValueError(f"{what} needs {' and '.join(missing)}; run: pip install 'kvevict[{extra}]'")


def builtin(value: object) -> Any:
    """Convert a number of another type, such as numpy's, to Python's int or float. Other values are returned
    unchanged."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def hold_text(part: object, name: str, only: str = "") -> None:
    """Replace a path object in a field of a frozen dataclass by its text, which JSON can hold. only: description of the
    path, for a field that must be a path, a text or None; another value raises TypeError with this description."""
    if isinstance(path := getattr(part, name), os.PathLike):
        object.__setattr__(part, name, os.fspath(path))
    elif only and not isinstance(path, (str, type(None))):
        raise TypeError(f"{name} must be {only}, got {path!r}")


def flag(name: str, value: object) -> None:
    """Raise TypeError unless the value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def count(name: str, value: object, least: int) -> int:
    """Return the value as an int. Raises TypeError unless it is a whole number, and ValueError unless it is from
    `least` to PLENTY; both errors name the argument."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if int(value) > PLENTY:
        raise ValueError(f"{name} must be at most {PLENTY}, got {value}")
    return int(value)


def fraction(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a number in [0, 1]."""
    if not (_is_number(value) and 0 <= value <= 1):
        raise ValueError(f"{name} must be a number in [0, 1], got {value!r}")


def finite(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a finite number."""
    if not (_is_number(value) and abs(value) <= sys.float_info.max):
        raise ValueError(f"{name} must be a finite number, got {value!r}")


def at_least_0(name: str, value: Any, positive: bool = False) -> None:
    """Raise ValueError unless the value is a finite number >= 0; with `positive`, > 0."""
    if not (_is_number(value) and 0 <= value <= sys.float_info.max and (value or not positive)):
        raise ValueError(f"{name} must be a finite number {'>' if positive else '>='} 0, got {value!r}")


UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "k": 10**3, "M": 10**6, "G": 10**9}


def keeps_all(budget: object) -> bool:
    """Return whether a budget is 1.0, the share that keeps all slots; the int 1 is one slot."""
    return isinstance(budget, float) and budget == 1


def byte_count(name: str, text: str) -> int:
    """Return the number of bytes that a text such as "64MiB" or "1.5GB" names."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i|[kMG]?)B", text)
    if found is None or not 1 <= (bytes_ := int(float(found[1]) * UNITS[found[2]])) < 1 << 60:
        raise ValueError(f"{name}={text!r} is not a number of bytes; write it as in 64MiB, 1.5GiB or 500kB")
    return bytes_


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
