from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ...commands import (
    add_budget,
    add_model,
    add_policies,
    check_folder,
    command,
    complete_policies,
    grid,
    loaded,
    number,
)
from ...policy.text import DEFAULT
from ...store import files
from .inspect import page_run

if TYPE_CHECKING:
    from ...asking.prompts import Tokenizer
    from ...policy.building import Chosen
    from ..evaluate.tasks import Case

TASK = "facts"
LONGEST = 2048  # most prompt tokens: two CPU cores read such a prompt in seconds
ANSWER = 32  # tokens of the context that are left for the answer
WIDE = 24  # number of characters that are shown of an answer
FULL = "full cache"


@command
def demo(parser: ArgumentParser, argv: list[str]) -> dict[str, object]:
    """Ask the bundled model for facts in a long text, with a full cache and with small ones."""
    add_model(parser)
    add_policies(parser, default=(DEFAULT, "snapkv", "streaming"))
    add_budget(parser, budget=128, chunk_size=256)  # 1/16 of the tiny model's context, and several chunks of it
    parser.add_argument("--cases", type=int, default=4, help="texts, each with a question; default 4")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other texts; default 0")
    parser.add_argument("--out", default="kvevict-demo", help="folder for page and picture; default kvevict-demo")
    args = parser.parse_args(argv)
    from transformers.utils import logging

    from ...policy.checks import count
    from ..analysis.speed import COSTS, costs

    count("--cases", args.cases, 1)
    check_folder("--out", args.out)
    policies = complete_policies(args.policies, args)
    logging.disable_progress_bar()
    name, model, tokenizer = loaded(args)
    asked = list(ask(model, tokenizer, policies, args))
    totals = {run: total(run, asked) for run in (FULL, *policies)}
    print(f"{asked[0]['ids'].shape[1]} prompt tokens; budget {args.budget}, chunks of {args.chunk_size}\n")
    answers = [[asks(one["case"]), " ".join(one["case"].answers), *map(said, one["runs"].values())] for one in asked]
    taken = [
        [run, f"{row['right']}/{row['cases']}", *costs(row, row["slots"], row["cache_bytes"])]
        for run, row in totals.items()
    ]
    heads = ["question", "truth", *totals]
    print(grid([heads, *answers], left=len(heads)), grid([["", "right", *COSTS], *taken]), sep="\n\n")
    made = write(Path(args.out), tokenizer, asked, policies, name)
    print("\nWhich tokens were kept:", *made, sep="\n  ")
    settings = {"budget": number(args.budget), "chunk_size": args.chunk_size, "seed": args.seed}
    return {"model": name, **settings, "runs": totals, "files": made}


def ask(model: Any, tokenizer: Tokenizer, policies: dict[str, Chosen], args: Namespace) -> Iterator[dict[str, Any]]:
    """Yield a dict for each case: case, ids [1, N], and runs, which maps a run's name to the result of
    `kvevict.lab.analysis.run.measure` and `right`, whether the answer is right."""
    from tqdm import tqdm

    from ...models.families import device_of
    from ..analysis.run import measure
    from ..evaluate.ask import encode
    from ..evaluate.metrics import METRICS
    from ..evaluate.tasks import TASKS, TaskSettings

    longest = min(LONGEST, model.config.max_position_embeddings) - ANSWER
    cases = list(TASKS.find(TASK)(TaskSettings(tokenizer, longest, args.cases, args.seed)))
    with tqdm(total=len(cases) * (1 + len(policies)), unit="run", delay=1, leave=False, disable=None) as bar:
        for case in cases:
            prompt, runs = encode(model, tokenizer, case), {}
            ids = prompt.row(device_of(model))
            for name, policy in ((FULL, None), *policies.items()):
                runs[name] = run = measure(model, tokenizer, ids, policy, case.new_tokens, True, case.one_line)
                run["right"] = METRICS[case.metric](run["answer"], case.answers) == 1
                bar.update()
            yield dict(case=case, ids=ids, runs=runs)


def total(name: str, asked: list) -> dict:
    """Return the median costs of the run `name` over all cases, and its number of right answers."""
    from ..analysis.speed import held

    runs = [one["runs"][name] for one in asked]
    seen = [next(run["report"] for run in one["runs"].values() if "report" in run) for one in asked]
    slots, sizes = zip(*map(held, runs, seen))
    return dict(
        right=sum(run["right"] for run in runs), cases=len(runs), cache_bytes=int(median(sizes)), slots=slots[0],
        **{key: median(run[key] for run in runs) for key in ("peak_bytes", "read_seconds", "decode_seconds")},
    )  # fmt: skip


def said(run: dict) -> str:
    """Return the start of an answer's first line, marked right or wrong."""
    line = (run["answer"].strip().splitlines() or [""])[0]
    return ("✓ " if run["right"] else "✗ ") + line[:WIDE]


def asks(case: Case) -> str:
    return case.question.strip().splitlines()[0].removeprefix("Question: ")


def write(
    out: Path, tokenizer: Tokenizer, asked: list[dict[str, Any]], policies: dict[str, Chosen], model: str
) -> list[str]:
    """Write the page and, with matplotlib, the picture of one case: the first case that some runs answer right and
    others wrong. Returns the paths."""
    from ...asking.prompts import pieces
    from ..analysis.page import page, picture, places

    one = next((one for one in asked if len({run["right"] for run in one["runs"].values()}) > 1), asked[0])
    case, ids, runs = one["case"], one["ids"], one["runs"]
    facts = [("model", model), ("question", asks(case)), ("truth", case.answers[0]), (FULL, said(runs[FULL]))]
    shown = [page_run(name, policy, said(runs[name]), runs[name]["report"]) for name, policy in policies.items()]
    out.mkdir(parents=True, exist_ok=True)
    html, png = out / "kept.html", out / "kept.png"
    files.write(html, page(tokenizer, ids, shown, facts, case.answers[0]))
    try:
        marks = places(pieces(tokenizer, ids[0].tolist()), case.answers[0])
        picture(png, shown, ids.shape[1], f"{asks(case)} ({case.answers[0]}, marked)", marks)
    except ImportError:
        print("\nNo picture was drawn: it needs matplotlib; run: pip install 'kvevict[plot]'")
        return [str(html)]
    return [str(html), str(png)]
