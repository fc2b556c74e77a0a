from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from ...commands import check_file, command, number
from ...policy.checks import installed
from ...store.files import replacing


@command
def plot(parser: ArgumentParser, argv: list[str]) -> dict[str, object]:
    """Draw the scores of `kvevict eval` against the budget, or the scores of the tasks `turns` against the turn."""
    parser.add_argument("results", nargs="?", help="file written by `kvevict eval`; it is required")
    parser.add_argument("--kind", choices=["budget", "turns"], default="budget", help="the axis; default budget")
    parser.add_argument("--out", default="figure.png", help=".png, .svg or .pdf; default figure.png")
    parser.add_argument("--tasks", nargs="+", help="only these tasks; default: all in the file")
    parser.add_argument("--policies", nargs="+", help="only these policies, and the full cache")
    parser.add_argument("--budgets", nargs="+", type=number, help="only these budgets, and the full cache")
    parser.add_argument("--mode", choices=["known", "later"], help="only this mode, and the full cache")
    args = parser.parse_args(argv)
    installed("plot", "kvevict plot", "matplotlib", "scipy")
    check_file("--out", args.out)
    if Path(args.out).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--out {args.out}: give a name that ends in .png, .svg or .pdf")
    from ..evaluate import plot as figures
    from ..evaluate.results import read

    if args.results is None:
        raise ValueError("the results file is missing; name it before --policies and other options that take several")
    if not Path(args.results).is_file():
        raise ValueError(f"{args.results} does not exist; write one with `kvevict eval`")
    figure = getattr(figures, args.kind)(chosen(read(args.results)[1], args))
    with replacing(args.out) as temporary:
        figure.savefig(temporary)
    print(f"scores by {args.kind.removesuffix('s')} of {args.results} are in {args.out}")
    return {"kind": args.kind, "out": args.out}


def chosen(lines: list[dict[str, Any]], args: Namespace) -> list[dict[str, Any]]:
    """Return the result lines that the arguments select. Raises ValueError, which names the first argument that leaves
    no line of a policy."""
    for field, wanted in dict(task=args.tasks, policy=args.policies, budget=args.budgets).items():
        if wanted:
            known = {line[field] for line in lines if line["policy"] != "full" or field == "task"}
            if not known & set(wanted):
                words = " ".join(map(str, wanted))
                raise ValueError(f"no results of {field} {words}; there are {', '.join(sorted(map(str, known)))}")
            lines = [line for line in lines if line[field] in wanted or (line["policy"] == "full" and field != "task")]
    return [line for line in lines if args.mode in (None, line["mode"]) or line["policy"] == "full"]
