from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from ...commands import check_file, command, number
from ...files import replacing
from ...policy.checks import installed, parsed

KINDS = ("heatmap", "budget", "families", "speed", "slots", "layers", "overlap")


@command
def plot(parser: ArgumentParser, argv: list[str]) -> dict[str, Any]:
    """Draw a figure: needle heat map, score against budget (all or by family), speed, kept slots, layer by layer."""
    parser.add_argument(
        "results",
        nargs="?",
        help="file written by `kvevict eval`; for speed: the output of `kvevict bench`; for "
        "layers (curves) and overlap (layer by layer): that of `kvevict diagnose`",
    )
    parser.add_argument("--kind", choices=KINDS, required=True, help="figure to draw")
    parser.add_argument("--out", default="figure.png", help=".png, .svg or .pdf; default figure.png")
    parser.add_argument("--tasks", nargs="+", help="only these tasks; default: all in the file")
    parser.add_argument("--policies", nargs="+", help="only these policies, and the full cache")
    parser.add_argument("--budgets", nargs="+", type=number, help="only these budgets, and the full cache")
    parser.add_argument("--mode", choices=["aware", "agnostic"], help="only this mode, and the full cache")
    args = parser.parse_args(argv)
    installed("plot", "kvevict plot", "matplotlib", "scipy")
    check_file("--out", args.out)
    if Path(args.out).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--out {args.out}: give a name that ends in .png, .svg or .pdf")
    from ..analysis import plot as of_runs
    from ..evaluate import plot as of_results
    from ..evaluate.results import read

    if args.results is None:
        raise ValueError("the results file is missing; name it before --policies and other options that take several")
    if not Path(args.results).is_file():
        raise ValueError(f"{args.results} does not exist; write one with `kvevict eval` or `kvevict bench`")
    if args.kind in OF_OUTPUT:
        for name in ("tasks", "budgets", "mode"):
            if getattr(args, name):
                raise ValueError(f"--{name} selects results of `kvevict eval`, not of {args.kind}; leave it out")
        try:
            figure = getattr(of_runs, args.kind)(of_policies(OF_OUTPUT[args.kind](args.results), args.policies))
        except (KeyError, TypeError, AttributeError) as error:  # rows or layers without the needed numbers
            raise ValueError(f"{args.results} is not what the command printed ({error!r}); give all of that") from None
    else:
        lines = chosen(read(args.results)[1], args)
        if args.kind == "slots":
            figure = of_runs.slots(of_results.mean_kept(lines))
        else:
            figure = getattr(of_results, args.kind)(lines)
    with replacing(args.out) as temporary:
        figure.savefig(temporary)
    print(f"{args.kind} of {args.results} is in {args.out}")
    return {"kind": args.kind, "out": args.out}


def chosen(lines: list[dict[str, Any]], args: Namespace) -> list[dict[str, Any]]:
    """The lines that the arguments ask for; ValueError names the first argument that leaves none of a policy's."""
    for field, wanted in dict(task=args.tasks, policy=args.policies, budget=args.budgets).items():
        if wanted:
            some_known(field, wanted, {line[field] for line in lines if line["policy"] != "full" or field == "task"})
            lines = [line for line in lines if line[field] in wanted or (line["policy"] == "full" and field != "task")]
    return [line for line in lines if args.mode in (None, line["mode"]) or line["policy"] == "full"]


def some_known(field: str, wanted: list[Any], known: set[Any]) -> None:
    if not known & set(wanted):
        words = " ".join(map(str, wanted))
        raise ValueError(f"no results of {field} {words}; there are {', '.join(sorted(map(str, known)))}")


def of_policies(found: Any, wanted: list[str] | None) -> Any:
    """The rows of `kvevict bench`, or the runs in the JSON of `kvevict diagnose`, of these policies; None: all."""
    if not wanted:
        return found
    if isinstance(found, list):
        some_known("policy", wanted, {row["policy"] for row in found})
        return [row for row in found if row["policy"] in (*wanted, "unpatched")]
    some_known("policy", wanted, set(found["runs"]))
    return found | dict(runs={name: run for name, run in found["runs"].items() if name in wanted})


def diagnosis(path: str) -> dict[str, Any]:
    """The last JSON line of `kvevict diagnose`'s output."""
    for line in reversed(objects(path)):
        if "overlap" in line:
            return line
    raise ValueError(f"{path} is not the output of `kvevict diagnose`; write one with: kvevict diagnose ... > FILE")


def bench_rows(path: str) -> list[dict[str, Any]]:
    """The rows of a file's JSON lines. Other lines, such as printed tables, are skipped."""
    rows = []
    for line in objects(path):
        rows += [row for row in line.get("rows", [line]) if "read_seconds" in row and "peak_bytes" in row]
    return rows


def objects(path: str) -> list[dict[str, Any]]:
    """The JSON objects among a file's lines, one a line."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [parsed(line) for line in lines if line.startswith("{")]


OF_OUTPUT = dict(speed=bench_rows, layers=diagnosis, overlap=diagnosis)  # kind -> the reader of a command's output
