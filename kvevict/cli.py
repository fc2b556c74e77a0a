"""The command line: `kvevict NAME ...`. Every command prints a table and ends with one JSON line."""

import argparse
import json
import os
import sys

from .commands import COMMANDS
from .version import VERSION


def main(argv=None) -> int:
    """Exit code: 0, 1 when the reader of our output has left, 2 after a mistake in the arguments."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # an answer may have letters that the terminal has not
    try:
        try:
            return run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit works
        return 1


def run(argv) -> int:
    parser = argparse.ArgumentParser(
        "kvevict", usage="kvevict COMMAND ...", description="Long prompts in bounded memory.", epilog=listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    name = parser.parse_args(argv[:1]).command
    function = COMMANDS[name]
    try:
        result = function(argparse.ArgumentParser(f"kvevict {name}", description=function.__doc__), argv[1:])
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, OSError) as error:
        print(f"kvevict {name}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if result is not None:
        print(json.dumps({"command": name, **result}))
    return 0


def listing() -> str:
    lines = (f"  {name:12}{function.__doc__}" for name, function in sorted(COMMANDS.items()))
    return "\n".join(["commands:", *lines, "", "`kvevict COMMAND --help` tells a command's arguments."])
