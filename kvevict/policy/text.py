"""Parses a policy that is written as one text, as on the command line: NAME or NAME:OPTION=VALUE,OPTION=VALUE."""

import contextlib
import dataclasses
import re
from pathlib import Path
from typing import Any

from .checks import parsed

FORM = "NAME[:OPTION=VALUE,...]"
CALIBRATED = ".json"  # suffix of the files that `kvevict calibrate` writes
DEFAULT = "take+edie"  # policy if none is named: the best measured for a prompt with a question (docs/results.md)
PYTHON = {"None": None, "True": True, "False": False}


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a policy's text into (preset's name, options). A value is JSON (such as 3, true, null or [0, 32], which may
    be written as (0, 32)), Python's None, True or False, or a plain word; for an option that may be None, `none` is
    None. NAME may be the path of a file that `kvevict calibrate` wrote, which holds a name and options. Raises
    ValueError for an option without a value, and for any other file."""
    name, colon, rest = text.partition(":")
    rest = rest.translate(str.maketrans("()", "[]"))
    parts = re.split(r",(?![^\[]*\])", rest) if colon else []  # split at commas outside of brackets
    options = dict(_option(part) for part in parts)
    if name.endswith(CALIBRATED):
        name, own = _calibrated(name)
        options = own | options
    return name, options


def _calibrated(path: str) -> tuple[str, dict[str, Any]]:
    """Read a preset's name and options from a file that `kvevict.Calibration.save` wrote."""
    try:
        fields = parsed(Path(path).read_text("utf-8"))
        name, options = parse_policy(fields["policy"])
        return name, options | dict(budget=fields["budget"], kv=fields["kv"], chunk_size=fields["chunk_size"])
    except OSError as error:
        raise ValueError(f"policy {path}: {error.strerror}; `kvevict calibrate` makes such a file") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"policy {path}: it is not a file of `kvevict calibrate` ({error!r}); make it anew") from None


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"policy option {text!r}: write {FORM}")
    name = name.strip().replace("-", "_")
    if value in PYTHON or (value == "none" and name in _options("None")):
        return name, PYTHON.get(value)
    if name not in _options("str"):  # not for an option that is always text: task=7 names the task "7"
        with contextlib.suppress(ValueError):
            value = parsed(value)
    return name, tuple(value) if isinstance(value, list) else value


def _options(kind: str) -> set[str]:
    """Return the names of the options that may be None (kind "None"), or that are always text (kind "str")."""
    from .parts import PARTS
    from .policy import Policy
    from .run import OPTIONS, Run

    made_of = [Policy, Run, *(part for registry, _ in PARTS.values() for part in registry.values())]
    named = {field: option for option, field in OPTIONS.items()}
    fields = [(named.get(f.name, f.name), f.type) for part in made_of for f in dataclasses.fields(part)]
    types = [(name, getattr(of, "__name__", str(of))) for name, of in fields]
    if kind == "str":
        return {name for name, own in types if own == "str"} - {name for name, own in types if own != "str"}
    return {name for name, own in types if "None" in own} - PARTS.keys()
