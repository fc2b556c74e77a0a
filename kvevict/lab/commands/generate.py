from argparse import ArgumentParser

from ...commands import add_budget, add_model, add_policy, command, complete_policies, grid
from . import add_question, load_prompts
from .inspect import told_of


@command
def generate(parser: ArgumentParser, argv: list[str]) -> dict[str, object]:
    """Read a long text, keep a budget of KV slots, answer a question."""
    add_question(parser, new_tokens=64)
    add_model(parser)
    add_policy(parser)
    add_budget(parser)
    parser.add_argument("--compare", action="store_true", help="also run the model unpatched")
    args = parser.parse_args(argv)
    from ...models.families import device_of
    from ..analysis.cost import UNPATCHED
    from ..analysis.run import measure

    policies = complete_policies([args.policy], args, progress=True)
    _, model, tokenizer, (prompt,) = load_prompts(args, [args.question])
    ids = prompt.row(device_of(model))
    chosen = {UNPATCHED: None} | policies if args.compare else policies
    how: dict = dict(max_new_tokens=args.max_new_tokens, one_line=bool(args.opening), question=args.question)
    runs = {name: measure(model, tokenizer, ids, policy, **how) for name, policy in chosen.items()}
    print(table(runs, ids.shape[1]))
    return {"tokens": ids.shape[1], "runs": runs}


def table(runs: dict, tokens: int) -> str:
    """Format the runs of one prompt, results of `measure`, side by side, and then their answers. At least one run has a
    policy."""
    from ..analysis.speed import COSTS, costs, held

    seen = next(run["report"] for run in runs.values() if "report" in run)
    rows = [("", *COSTS), *((name, *costs(run, *held(run, seen))) for name, run in runs.items())]
    answers = [f"[{name}] {run['answer'].strip()}" for name, run in runs.items()]
    if seen["archive_bytes"]:
        answers.insert(0, f"kept {told_of(seen)}")
    return "\n\n".join([f"{tokens} prompt tokens\n{grid(rows)}", *answers])
