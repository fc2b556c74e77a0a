"""Holds the commands of `kvevict`, one in each file, and what commands share: arguments, budgets, policies and tables.
A command is a function that adds its arguments to a parser, prints text, and returns a dict, which `kvevict.cli` prints
as JSON. The decorator `command` registers it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..policy.checks import SLOTS, byte_count
from ..policy.registry import Registry, load_folder
from ..policy.text import DEFAULT, FORM, parse_policy
from ..store.files import decoded

if TYPE_CHECKING:
    from ..policy.building import Chosen

COMMANDS = Registry("command")
Command: TypeAlias = Callable[[argparse.ArgumentParser, list[str]], dict[str, Any] | None]


def command(function: Command) -> Command:
    return COMMANDS.add(function.__name__)(function)


# -- arguments ------------------------------------------------------------------------------------------------------


def add_model(parser: argparse.ArgumentParser, name: str = "--model", **how: Any) -> None:
    told = "folder, .gguf file or hub id of a causal language model; default: the bundled one"
    parser.add_argument(name, help=told, **how)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"],
                        help="of the model; auto: as it is stored (default)")  # fmt: skip
    parser.add_argument("--device", help="cpu, cuda or cuda:N; default: a GPU if there is one and the build has CUDA")


def loaded(args: argparse.Namespace) -> tuple[str, Any, Any]:
    """Load the model that the arguments of `add_model` name, and return (name, model, tokenizer)."""
    from ..models.loading import load_model, small_llama

    name = args.model or small_llama()
    return (name, *load_model(name, args.dtype, args.device))


def add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", default=DEFAULT,
                        help=f"{FORM} of `kvevict policies`, such as {DEFAULT}:recall=true; default "
                        f"{DEFAULT}")  # fmt: skip


def add_policies(parser: argparse.ArgumentParser, default: Sequence[str] = ()) -> None:
    told = f"; default {' '.join(default)}" if default else ""
    parser.add_argument("--policies", nargs="+", default=list(default), metavar="POLICY",
                        help=f"policies to compare: {FORM} of `kvevict policies`{told}")  # fmt: skip


class Unsaid(str):
    """The default value of an option. Its type tells it from the same text given by the user."""


def add_budget(
    parser: argparse.ArgumentParser, budget: int | float | str = SLOTS, chunk_size: int | None = None
) -> None:
    parser.add_argument("--budget", default=Unsaid(budget),
                        help="slots per kv head, the fraction kept, or bytes of all slots of a sequence (64MiB); "
                        f"default {budget}")  # fmt: skip
    parser.add_argument("--chunk-size", type=int, default=chunk_size,
                        help=f"tokens read at once; default {chunk_size or 'is up to the policy'}")  # fmt: skip
    parser.add_argument("--kv", default="model", metavar="KIND",
                        help="of stored slots: model (in the model's dtype, default), or packed, int8 (keys and values "
                        "in 8 bits a number), k8v4 (in 8 and 4), int4")  # fmt: skip


def words(text: str) -> str:
    """Decode a command-line argument as UTF-8 whatever the locale is, with U+FFFD for bytes that are not UTF-8."""
    return os.fsencode(text).decode("utf-8", "replace")


def read_text(file: str, option: str = "--file") -> str:
    """Return the text of a file, or of standard input if `file` is "-". option: the option's name in errors."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"{option} {file}: {error.strerror}; give a text file, or - for standard input") from None
    return decoded(data, f"{option} {file}")


def check_file(option: str, path: str | Path) -> None:
    """Raise ValueError if no file can be written at `path`. Commands call this before they load a model, which takes
    long. option: the option's name in the error."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{option} {path}: it is a folder; give a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it, or give another")
    _check_writable(option, path, path.parent)


def check_folder(option: str, path: str | Path) -> None:
    """Raise ValueError if `path` is not a folder to which files can be written, and no such folder can be made there.
    option: the option's name in the error."""
    path = Path(path)
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise ValueError(f"{option} {path}: {there} is not a folder; give another")
    _check_writable(option, path, there)


def _check_writable(option: str, path: str | Path, folder: str | Path) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".kvevict-"):
            pass
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror}; give a place that can be written to") from None


# -- policies -------------------------------------------------------------------------------------------------------


def number(text: str, option: str = "--budget") -> int | float | str:
    """Parse a budget: a number of slots gives an int, a fraction such as 0.1 or 1/8 a float; bytes such as "64MiB" stay
    text."""
    if text.endswith("B"):
        byte_count(option, text)
        return text
    try:
        return int(text) if text.lstrip("-").isdigit() else float(Fraction(text) if "/" in text else text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(
            f"{option} {text}: give a whole number of slots, a fraction such as 0.1 or 1/8, or bytes such as 64MiB"
        ) from None


def build_policies(texts: Iterable[str], args: argparse.Namespace, **common: Any) -> dict[str, Chosen]:
    """Build a policy and its run from each text. The options of `add_budget` and `common` are defaults for options that
    the text does not set; the default of `--budget` does not apply to a text with a threshold. Raises ValueError for a
    wrong option, and for a `recall` folder to which nothing can be written."""
    from ..engine.memory import mapped
    from ..policy.building import choose

    common |= dict(budget=number(args.budget), chunk_size=args.chunk_size, kv=args.kv)
    policies = {}
    for text in texts:
        name, options = parse_policy(text)
        if options.get("threshold") is not None and isinstance(args.budget, Unsaid):
            options = dict(budget=None) | options
        policies[text] = choose(name, **common | options)
        mapped.check(policies[text].run.archive)
    return policies


def complete_policies(texts: Iterable[str], args: argparse.Namespace, **common: Any) -> dict[str, Chosen]:
    """Build policies as `build_policies` does. Raises ValueError, too, for a policy that cannot run as its text gives
    it: without the smaller model that drafts, or without the right answer, which it needs."""
    policies = build_policies(texts, args, **common)
    for text, (policy, _) in policies.items():
        rows, option = policy.rows, ":" if ":" not in text else ","
        if getattr(rows, "draft_model", rows) is None and not rows.needs_full_prompt:
            raise ValueError(
                f"policy {text}: the smaller model that drafts is missing; write {text}{option}draft_model=FOLDER, or "
                "its hub id"
            )
        if getattr(rows, "ids", None) == ():
            raise ValueError(
                f"policy {text}: it needs to know the right answer, as in `kvevict diagnose` and `kvevict eval`; "
                "choose another"
            )
    return policies


def options_of(chosen: Chosen, *skip: str) -> str:
    """Return a policy as the text of Python keyword arguments: its parts and options, and the options of its run that
    differ from the defaults. skip: names to leave out."""
    from ..policy.parts import PARTS
    from ..policy.run import differences

    policy, run = chosen
    options: dict[str, object] = {}
    for kind, (registry, _) in PARTS.items():
        part = getattr(policy, kind)
        options[kind] = registry.name_of(type(part))
        options |= {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    options |= {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy) if f.name not in PARTS}
    options |= differences(run)
    return ", ".join(f"{name}={value!r}" for name, value in options.items() if name not in skip)


# -- tables ---------------------------------------------------------------------------------------------------------


def grid(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Format a table of texts. The first `left` columns are aligned left, all others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]

    def aligned(row: Sequence[str]) -> list[str]:
        return [t.ljust(width) if i < left else t.rjust(width) for i, (t, width) in enumerate(zip(row, widths))]

    return "\n".join("  ".join(aligned(row)).rstrip() for row in rows)


load_folder(__name__)
