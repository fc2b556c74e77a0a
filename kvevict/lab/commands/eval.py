import contextlib
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...commands import add_model, check_file, command, loaded, number
from ...policy.checks import installed
from ...policy.text import DEFAULT, FORM

POLICIES = (DEFAULT, "snapkv")  # without --policies and --protocol


@command
def eval(parser: ArgumentParser, argv: list[str]) -> dict[str, object] | None:
    """Evaluate policies on tasks: print accuracy tables, and write each case to a file that lets a run resume."""
    parser.add_argument("--out", default="results.jsonl",
                        help="a JSON line per case and run, resumed if begun; default results.jsonl. "
                        "`accelerate launch -m kvevict eval ...` shares the cases among processes")  # fmt: skip
    parser.add_argument("--tasks", nargs="+", default=[], help="tasks to run; without any they are listed")
    add_model(parser)
    parser.add_argument("--policies", nargs="+", default=[], metavar="POLICY",
                        help=f"policies to compare: {FORM} of `kvevict policies`; default "
                        f"{' '.join(POLICIES)}")  # fmt: skip
    parser.add_argument("--protocol", metavar="NAME",
                        help="instead of --policies: a paper's comparisons, and whether the results support its "
                        "claims; with --table-only: those claims that the results of any policies can test; an "
                        "unknown name lists them")  # fmt: skip
    parser.add_argument("--adapter", help="folder of lookahead rows, for a protocol that has them")
    parser.add_argument("--draft", help="folder of a smaller model, for a protocol with a drafting model (speckv)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024], help="tokens of a prompt; default 1024")
    parser.add_argument("--budgets", "--shares", nargs="+", default=["128"],
                        help="slots per kv head, shares (1/8, 0.1) or bytes (64MiB); default 128")  # fmt: skip
    parser.add_argument("--chunk-size", nargs="+", type=int,
                        help="tokens read at once, 0: all; default: the policy's own, as kvevict.patch "
                        "reads")  # fmt: skip
    parser.add_argument("--question", choices=["found", "last"],
                        help="found: the policy finds a known question as kvevict.patch does (default); last: a probe "
                        "is the prompt's last tokens, or the question where the task names it, as with "
                        "--protocol")  # fmt: skip
    parser.add_argument("--mode", choices=["known", "later", "both", "other"], default="both",
                        help="question known or later; default both; other, for turns: each asked of the slots that "
                        "the turn before chose")  # fmt: skip
    parser.add_argument("--temperature", type=float, help="sample answers; default: the likeliest token")
    parser.add_argument("--cases", type=int, default=20, help="per length, seed (and depth); default 20")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="each makes different cases; default 0")
    parser.add_argument("--depths", nargs="+", type=float, help="where a needle is hidden, 0 to 1; default 5 places")
    parser.add_argument(
        "--haystack", help="text to hide things in (.txt, a folder of them, .jsonl, .jsonl.xz); default: generated"
    )
    parser.add_argument("--data", help="folder of a downloaded benchmark, for tasks that need one (longbench: or file)")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N",
                        help="ask up to N questions about a text at once, if it was read without them (tasks many, "
                        "--mode later); seconds are a question's share; default 1")  # fmt: skip
    parser.add_argument("--by", nargs="+", default=[], metavar="TAG", help="columns of the table: depth, length, facts")
    parser.add_argument("--table-only", action="store_true", help="only print the table of the results there are")
    args = parser.parse_args(argv)
    installed("eval", "kvevict eval", "scipy")
    from ...train.processes import Processes
    from ..evaluate.results import read
    from ..evaluate.table import render
    from ..evaluate.told import described

    if not args.table_only:
        try:
            _evaluate(args)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"the same command goes on with what {args.out} lacks") from None
    elif not Path(args.out).exists():
        raise ValueError(f"--out {args.out} does not exist; run without --table-only to make it")
    if Processes().rank > 0:
        return None  # only the first process writes the file
    settings, lines = read(args.out)
    tags = {tag for line in lines for tag in line["tags"]}
    if set(args.by) - tags and lines:
        raise ValueError(f"--by {' '.join(args.by)}: the cases' tags are {', '.join(sorted(tags))}; give some of them")
    tables = [render(lines, tuple(args.by))]
    if lines:
        with contextlib.suppress(KeyError, TypeError):  # a file of an earlier version may lack settings
            tables.append(f"\nRan: {described(settings)}")
    settings["protocol"] = args.protocol or settings.get("protocol")
    if settings["protocol"]:
        tables.append(_claims(settings, lines))
    print(*tables, sep="\n")
    return {"model": settings.get("model"), "out": args.out, "lines": len(lines)}


def _evaluate(args: Namespace) -> None:
    from ...policy.checks import count
    from ..evaluate.run import Evaluation, evaluate
    from ..evaluate.runs import FOUND, MODES, OWN
    from ..evaluate.tasks import TASKS, find

    for name in args.tasks:
        find(name)
    if args.protocol:
        _protocol(args)
    elif not args.policies:
        args.policies = POLICIES
    if not args.tasks:
        raise ValueError(f"--tasks is missing: give at least one of {', '.join(sorted(TASKS))}")
    for name in ("cases", "lengths", "chunk_size", "batch_size"):
        values = getattr(args, name)
        for value in values if isinstance(values, list) else [1 if values is None else values]:
            count(f"--{name.replace('_', '-')}", value, int(name != "chunk_size"))
    if args.temperature is not None and not args.temperature > 0:
        raise ValueError(f"--temperature must be above 0, got {args.temperature}; leave it out for the likeliest token")
    chosen = dict(depths=tuple(args.depths)) if args.depths else {}
    chunk_sizes = tuple(OWN if size is None else size or None for size in args.chunk_size or (None,))
    plan = Evaluation(
        tasks=tuple(args.tasks), lengths=tuple(args.lengths), policies=tuple(args.policies),
        budgets=tuple(map(number, args.budgets)), chunk_sizes=chunk_sizes,
        modes=MODES[:2] if args.mode == "both" else (args.mode,), seeds=tuple(args.seeds), cases=args.cases,
        haystack=args.haystack, data=args.data, temperature=args.temperature,
        protocol=args.protocol, adapter=args.adapter, draft=args.draft, question=args.question or FOUND, **chosen,
    )  # fmt: skip
    plan.runs(), plan.groups(None)  # both raise ValueError for mistakes, before the model is loaded
    check_file("--out", args.out)
    name, model, tokenizer = loaded(args)
    evaluate(model, tokenizer, plan, args.out, name, args.batch_size)


def _protocol(args: Namespace) -> None:
    """Set the arguments that a protocol determines. Raises ValueError for arguments that contradict the protocol."""
    from ..evaluate.protocols import PROTOCOLS, TASKS
    from ..evaluate.runs import LAST

    PROTOCOLS.find(args.protocol)
    for name, same in (("policies", [[]]), ("chunk_size", [None, [0]]), ("question", [None, LAST])):
        if getattr(args, name) not in same:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} and --protocol exclude each other: a protocol names its own; leave one out")
    if fractions := [budget for budget in args.budgets if not isinstance(number(budget), int)]:
        raise ValueError(f"--budgets {fractions[0]}: a protocol's budgets are whole numbers of slots; give e.g. 64")
    args.chunk_size, args.question = [0], LAST  # of runs that name no chunks; the paper's read in one pass
    args.tasks = args.tasks or list(TASKS)
    args.mode = "known" if args.mode == "both" else args.mode


def _claims(settings: dict, lines: list) -> str:
    from ..evaluate.claims import render

    about = (settings.get(key) for key in ("protocol", "budgets", "modes", "layers", "adapter", "draft"))
    name, budgets, modes, layers, adapter, draft = about
    if not (name and isinstance(budgets, list) and modes and isinstance(modes, list) and isinstance(layers, int)):
        raise ValueError("--out: its settings lack the protocol's budgets, modes or layers; evaluate into another file")
    return f"\n{render(lines, name, budgets, modes[0], layers, adapter, draft)}"
