"""The commands of `kvevict`. One file per command; the file registers it.

A command gets an empty argument parser and its arguments, prints text for a person, and returns a dict that
`kvevict.cli` prints as JSON in the last line. This file has the shared parts: arguments, declared once, and the
notation of budgets, policies and tables.
"""

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

from ..policy.checks import byte_count
from ..policy.registry import Registry, load_folder
from ..policy.text import DEFAULT, FORM, parse_policy
from ..store.files import decoded

if TYPE_CHECKING:
    from ..policy.policy import Policy

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
    """(name, model, tokenizer) by the arguments of `add_model`; by default the bundled model."""
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
    """A default that the user did not override."""


def add_budget(parser: argparse.ArgumentParser, budget: int | float | str = 512, chunk_size: int | None = None) -> None:
    parser.add_argument("--budget", default=Unsaid(budget),
                        help="slots per kv head, the fraction kept, or bytes of all slots of a sequence (64MiB); "
                        f"default {budget}")  # fmt: skip
    parser.add_argument("--chunk-size", type=int, default=chunk_size,
                        help=f"tokens read at once; default {chunk_size or 'is up to the policy'}")  # fmt: skip
    parser.add_argument("--kv", default="model", metavar="KIND",
                        help="of stored slots: model (in the model's dtype, default), or packed, int8 (keys and values "
                        "in 8 bits a number), k8v4 (in 8 and 4), int4")  # fmt: skip


def words(text: str) -> str:
    """An argument as UTF-8, whatever the locale decoded it as; bytes that are not UTF-8 are replaced."""
    return os.fsencode(text).decode("utf-8", "replace")


def read_text(file: str, option: str = "--file") -> str:
    """A file's text, or standard input's."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ValueError(f"{option} {file}: {error.strerror}; give a text file, or - for standard input") from None
    return decoded(data, f"{option} {file}")


def check_file(option: str, path: str | Path) -> None:
    """Raise ValueError where a file cannot be written: for a command to see before it loads a model."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{option} {path}: it is a folder; give a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it, or give another")
    _check_writable(option, path, path.parent)


def check_folder(option: str, path: str | Path) -> None:
    """Raise ValueError where a folder cannot be written to, or made."""
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
    """A budget: slots if whole, the text of a number of bytes, else a fraction."""
    if text.endswith("B"):
        byte_count(option, text)
        return text
    try:
        return int(text) if text.lstrip("-").isdigit() else float(Fraction(text) if "/" in text else text)
    except (ValueError, ZeroDivisionError):
        raise ValueError(
            f"{option} {text}: give a whole number of slots, a fraction such as 0.1 or 1/8, or bytes such as 64MiB"
        ) from None


def build_policies(texts: Iterable[str], args: argparse.Namespace, **common: Any) -> dict[str, Policy]:
    """Text -> `Policy`. Options in a policy's text win over `--budget`, `--chunk-size`, `--kv` and the `common`
    ones. A threshold replaces the default of `--budget`. Raises ValueError, too, for a `recall` folder that cannot be
    written to."""
    from ..engine.memory import mapped
    from ..policy.building import build

    common |= dict(budget=number(args.budget), chunk_size=args.chunk_size, kv=args.kv)
    policies = {}
    for text in texts:
        name, options = parse_policy(text)
        unbound = options.get("threshold") is not None and isinstance(args.budget, Unsaid)
        policies[text] = build(name, **common | (dict(budget=None) if unbound else {}) | options)
        mapped.check(policies[text].recall)
    return policies


def check_complete(policies: dict[str, Policy]) -> None:
    """Raise ValueError for policies that miss an argument that no command has."""
    for text, policy in policies.items():
        rows, option = policy.rows, ":" if ":" not in text else ","
        if getattr(rows, "draft_model", rows) is None and not rows.needs_full_prompt:
            raise ValueError(
                f"policy {text}: a smaller model drafts, which is missing; write {text}{option}draft_model=FOLDER, or "
                "its hub id"
            )
        if getattr(rows, "ids", None) == ():
            raise ValueError(
                f"policy {text}: it needs to know the right answer, as in `kvevict diagnose` and `kvevict eval`; "
                "choose another"
            )


def options_of(policy: Policy, *skip: str) -> str:
    """The parts of a policy, each with its options, and its other options except `skip`, as Python arguments."""
    from ..policy.parts import PARTS

    options = {}
    for kind, (registry, _) in PARTS.items():
        part = getattr(policy, kind)
        options[kind] = registry.name_of(type(part))
        options |= {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    options |= {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy) if f.name not in PARTS}
    return ", ".join(
        f"{name}={value!r}" for name, value in options.items() if name not in ("progress", "diagnose", *skip)
    )


# -- tables ---------------------------------------------------------------------------------------------------------


def grid(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows of texts, the head first, as columns: the first `left` are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]

    def aligned(row: Any) -> list:
        return [t.ljust(width) if i < left else t.rjust(width) for i, (t, width) in enumerate(zip(row, widths))]

    return "\n".join("  ".join(aligned(row)).rstrip() for row in rows)


load_folder(__name__)
