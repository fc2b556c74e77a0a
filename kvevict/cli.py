"""Runs the command line `kvevict COMMAND ...`. A command prints text, and then, unless standard output is a terminal, a
line of JSON."""

import argparse
import contextlib
import json
import os
import sys

from .commands import COMMANDS
from .lab import commands as _  # noqa: F401  registers the commands that measure
from .version import VERSION


def main(argv: list[str] | None = None) -> int:
    """Run a command, and return its exit code: 0 after success, 1 if the program that reads the output has ended, 2
    after a wrong argument or an error, 130 after Ctrl-C."""
    for name, mode in dict(stdin="r", stdout="w", stderr="w").items():
        if getattr(sys, name) is None:  # closed: the next file opened would get its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal may lack characters of an answer
    try:
        try:
            return run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit would fail again
        return 1


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "kvevict", usage="kvevict COMMAND ...", description="Long prompts in bounded memory.", epilog=listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    name = parser.parse_args(argv[:1]).command
    only_json = "--json" in argv
    try:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing if only_json else sys.stdout):
            result = COMMANDS[name](parser_of(name), argv[1:])
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError) as error:
        print(f"kvevict {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"kvevict {name}: interrupted{f'; {stop}' if str(stop) else ''}", file=sys.stderr)
        return 130
    if result is not None and (only_json or not sys.stdout.isatty()):
        print(json.dumps({"command": name, **result}))
    return 0


def parser_of(name: str) -> argparse.ArgumentParser:
    """Make the parser of a command's arguments, with the option --json. The command adds its own arguments."""
    parser = argparse.ArgumentParser(f"kvevict {name}", description=COMMANDS[name].__doc__)
    told = "print one JSON line and no table; where standard output is not a terminal both are printed"
    parser.add_argument("--json", action="store_true", help=told)
    return parser


def listing() -> str:
    lines = (f"  {name:12}{function.__doc__}" for name, function in sorted(COMMANDS.items()))
    return "\n".join(["commands:", *lines, "", "`kvevict COMMAND --help` tells a command's arguments."])
