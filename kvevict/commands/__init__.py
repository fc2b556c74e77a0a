"""The commands of `kvevict`. One file per command; the file registers it.

A command gets an empty argument parser and its arguments, prints what a person reads, and returns the dict that
`kvevict.cli` prints as the last line's JSON.
"""

import contextlib
import json
import sys

from ..registry import Registry, load_folder

COMMANDS = Registry("command")


def command(function):
    return COMMANDS.add(function.__name__)(function)


def number(text: str):
    """A budget: slots when whole, a fraction otherwise."""
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise ValueError(f"--budget {text}: give a whole number of slots or a fraction such as 0.1") from None


def parse_option(text: str):
    """NAME=VALUE with VALUE as JSON (a number, true, null, [0, 32]) or a plain word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--option {text!r}: write NAME=VALUE")
    with contextlib.suppress(json.JSONDecodeError):
        value = json.loads(value)
    return name.replace("-", "_"), tuple(value) if isinstance(value, list) else value


def parse_policy(text: str):
    """NAME or NAME:OPTION=VALUE,OPTION=VALUE as (preset's name, options); values as in `parse_option`."""
    name, colon, rest = text.partition(":")
    return name, dict(parse_option(part) for part in rest.split(",")) if colon else {}


load_folder(sys.modules[__name__])
