from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from ...commands import add_budget, add_model, add_policies, build_policies, command, grid, loaded
from ...policy.checks import installed
from ...policy.text import DEFAULT
from . import add_question, load_prompts, room

if TYPE_CHECKING:
    from torch.nn import Module
    from tqdm import tqdm

    from ...asking.prompts import Tokenizer
    from ...policy.building import Chosen
    from ..analysis.run import EncodedPrompt

NEW = 32  # most tokens of an answer about a file's text


@command
def diagnose(parser: ArgumentParser, argv: list[str]) -> dict[str, object]:
    """Compare the slots that policies keep with those that the full cache's response attends to."""
    add_question(parser, new_tokens=None, needed=False)
    parser.add_argument("--cases", type=int, default=1,
                        help="made-up texts; of several, means and their standard errors; default 1")  # fmt: skip
    add_model(parser)
    add_policies(parser, default=(DEFAULT, "snapkv", "h2o", "streaming"))
    add_budget(parser, budget=128)
    args = parser.parse_args(argv)
    installed("eval", "kvevict diagnose", "scipy")
    if (args.file is None) != (args.question is None):
        raise ValueError("give a question, before --policies, and --file, or neither for made-up facts")
    if args.file and args.cases != 1:
        raise ValueError(f"--cases {args.cases}: a file is one text; leave out --file and the question, or --cases")
    from tqdm import tqdm

    from ..analysis.compare import FOUND, NAMES
    from ..evaluate.intervals import standard_error

    policies = build_policies(args.policies, args)
    name, model, tokenizer, prompts = load_file(args) if args.file else load_facts(args)
    with tqdm(total=len(prompts) * len(policies), unit="policy", delay=1, leave=False, disable=None) as bar:
        each = [one(model, tokenizer, policies, *prompt, bar) for prompt in prompts]
    found, said = mean([found for found, _ in each]), [said for _, said in each]
    numbers = {key: {n: [alone["runs"][key][n] for alone, _ in each] for n in (*NAMES, FOUND)} for key in policies}
    wide = standard_error if len(each) > 1 else lambda values: None
    errors = {key: {n: wide(values) for n, values in own.items()} for key, own in numbers.items()}
    print(f"{round(found['tokens'])} prompt tokens, budget {args.budget}; the full cache answers: {'; '.join(said)}\n")
    heads = ("", "slots/head", "joint error", "output error", "recall", "top 16", "found 16")
    print(grid([heads, *((key, *cells(run, errors[key])) for key, run in found["runs"].items())]))
    print("\nOverlap (Jaccard) of the slots that they keep\n")
    rows = [(key, *(f"{value:.2f}" for value in row.values())) for key, row in found["overlap"].items()]
    print(grid([("", *policies), *rows]))
    return {"model": name, "cases": len(each), "answers": said, **found, "standard_errors": errors}


def load_file(args: Namespace) -> tuple[str, Module, Tokenizer, list[tuple[EncodedPrompt, int, bool]]]:
    """Load (name, model, tokenizer, [(prompt, new tokens, whether the answer is one line)]) for a file's text."""
    args.max_new_tokens = NEW if args.max_new_tokens is None else args.max_new_tokens
    name, model, tokenizer, (prompt,) = load_prompts(args, [args.question])
    return name, model, tokenizer, [(prompt, args.max_new_tokens, bool(args.opening))]


def load_facts(args: Namespace) -> tuple[str, Module, Tokenizer, list[tuple[EncodedPrompt, int, bool]]]:
    """Load what `load_file` returns, with prompts of the task that `kvevict demo` asks."""
    from ...policy.checks import count
    from ..evaluate.ask import encode
    from ..evaluate.tasks import TASKS, TaskSettings
    from .demo import ANSWER, LONGEST, TASK

    for option, number in (("cases", args.cases), ("max-new-tokens", args.max_new_tokens), ("limit", args.limit)):
        if number is not None:
            count(f"--{option}", number, 1)
    name, model, tokenizer = loaded(args)
    new = ANSWER if args.max_new_tokens is None else args.max_new_tokens
    longest = room(model, new, args.limit or LONGEST) or LONGEST
    cases = TASKS.find(TASK)(TaskSettings(tokenizer, longest, args.cases))
    prompts = [(encode(model, tokenizer, x), args.max_new_tokens or x.new_tokens, x.one_line) for x in cases]
    return name, model, tokenizer, prompts


def one(
    model: Module, tokenizer: Tokenizer, policies: dict[str, Chosen], prompt: EncodedPrompt, new_tokens: int,
    one_line: bool, bar: tqdm,
) -> tuple[dict, str]:  # fmt: skip
    """Measure one prompt. Returns the policies' numbers, and the first line of the full cache's answer."""
    from ...asking.prompts import until_line_end
    from ...models.families import device_of
    from ..analysis import compare

    ids = prompt.row(device_of(model))
    stop = until_line_end(tokenizer, ids.shape[1]) if one_line else None
    full = compare.full_cache(model, ids, new_tokens, stop)
    exact, kept, runs = compare.errors(model, ids), {}, {}
    for key, chosen in policies.items():
        informed = chosen._replace(policy=compare.informed(chosen.policy, full.response))
        left = compare.left(model, ids, informed.with_tokenizer(tokenizer))
        estimate = compare.found(exact, compare.scores(model, ids, informed.policy))
        layers, kept[key] = compare.compare(full, left), compare.positions(left)
        layers = [layer | {compare.FOUND: share} for layer, share in zip(layers, estimate, strict=True)]
        counts = [len(head) for layer in kept[key] for head in layer]
        means = {name: sum(layer[name] for layer in layers) / len(layers) for name in layers[0]}
        runs[key] = means | {"slots": [min(counts), max(counts)], "layers": layers}
        bar.update()
    overlap = {a: {b: compare.overlap(kept[a], kept[b]) for b in kept} for a in kept}
    answer = tokenizer.decode(full.response, skip_special_tokens=True).strip()
    return {"tokens": full.tokens, "runs": runs, "overlap": overlap}, answer.partition("\n")[0]


def mean(found: list[Any]) -> Any:
    """Average equally nested dicts and lists, number by number."""
    first = found[0]
    if isinstance(first, dict):
        return {key: mean([each[key] for each in found]) for key in first}
    if isinstance(first, list):
        return [mean(list(values)) for values in zip(*found, strict=True)]
    return first if len(found) == 1 else sum(found) / len(found)


def cells(run: dict, errors: dict) -> list[str]:
    """Format a policy's number of slots per head, and its other numbers with their standard errors."""
    least, most = (f"{slots:.0f}" for slots in run["slots"])
    beside = {name: "" if wide is None else f" ±{wide:.3f}" for name, wide in errors.items()}
    return [least if least == most else f"{least}..{most}", *(f"{run[name]:.3f}{beside[name]}" for name in errors)]
