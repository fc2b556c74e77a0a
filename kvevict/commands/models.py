from argparse import ArgumentParser
from collections import Counter

from . import command


@command
def models(parser: ArgumentParser, argv: list[str]) -> dict[str, object]:
    """List the model types whose patched models were compared with unpatched ones, and the results."""
    parser.add_argument("names", nargs="*", metavar="TYPE", help="only those with this in their name")
    args = parser.parse_args(argv)
    from ..models.known import table

    wanted = [t for t in table() if not args.names or any(name in t.name for name in args.names)]
    if not args.json:
        for each in wanted:
            print(f"{each.label:44} {each.verdict:8} {each.note}".rstrip())
        print("\nOther types are compared on a few tokens when they are patched, and refused if they differ.")
    return {"models": [t._asdict() for t in wanted], "counts": dict(Counter(t.verdict for t in wanted))}
