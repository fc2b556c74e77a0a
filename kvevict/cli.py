"""The command line: `kvevict NAME ...`. Every command prints a table and ends with one JSON line."""

import argparse
import json
import sys

from .commands import COMMANDS


def main(argv=None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser("kvevict", description="Long prompts in bounded memory.")
    parser.add_argument("command", choices=COMMANDS, help="; ".join(f"{n}: {f.__doc__}" for n, f in COMMANDS.items()))
    name = parser.parse_args(argv[:1]).command
    function = COMMANDS[name]
    try:
        result = function(argparse.ArgumentParser(f"kvevict {name}", description=function.__doc__), argv[1:])
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        return 1
    except (ValueError, TypeError, OSError) as error:
        print(f"kvevict {name}: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"command": name, **result}))
    return 0
