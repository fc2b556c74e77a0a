from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from ...commands import (
    add_budget,
    add_model,
    add_policies,
    build_policies,
    command,
    model_name,
)
from ...policy.checks import installed
from ...policy.text import DEFAULT
from . import add_question, load_prompt, observing, room

if TYPE_CHECKING:
    from tqdm import tqdm

    from ...policy.policy import Policy
    from ..analysis.run import Prompt

HEADS = {
    "joint_error": "joint error",
    "output_error": "output error",
    "recall": "recall",
    "top16": "top 16",
    "attention_cosine": "attention cosine",
    "kv_l1_loss": "KV L1 loss",
    "adjacent_overlap": "adjacent layers",
    "eighth": "ranked: best 1/8",
    "tau": "tau",
}


@command
def diagnose(parser: ArgumentParser, argv: list[str]) -> dict[str, Any]:
    """Compare the slots that policies keep, and their rankings, with the full cache's attention for its response."""
    add_question(parser, new_tokens=None, needed=False)
    parser.add_argument("--cases", type=int, default=1,
                        help="made-up texts; of several, means and their standard errors; default 1")  # fmt: skip
    add_model(parser)
    add_policies(parser, default=(DEFAULT, "snapkv", "h2o", "streaming"))
    add_budget(parser, budget=128)
    args = parser.parse_args(argv)
    installed("eval", "kvevict diagnose", "scipy", "tabulate")
    if (args.file is None) != (args.question is None):
        raise ValueError("give a question, before --policies, and --file, or neither for made-up facts")
    if args.file and args.cases != 1:
        raise ValueError(f"--cases {args.cases}: a file is one text; leave out --file and the question, or --cases")
    from tqdm import tqdm

    from ..evaluate.table import format_table

    policies = build_policies(args.policies, args)
    name, model, tokenizer, prompts = load_file(args) if args.file else load_facts(args)
    with tqdm(total=len(prompts) * len(policies), unit="policy", delay=1, leave=False, disable=None) as bar:
        each = [one(model, tokenizer, policies, args, *prompt, bar) for prompt in prompts]
    found, said = mean([found for found, _ in each]), [said for _, said in each]
    errors = {key: {n: error([alone["runs"][key][n] for alone, _ in each]) for n in HEADS} for key in policies}
    print(f"{round(found['tokens'])} prompt tokens, budget {args.budget}; the full cache answers: {'; '.join(said)}\n")
    rows = [("", "slots/head", *HEADS.values()), *((k, *cells(r, errors[k])) for k, r in found["runs"].items())]
    print(format_table(rows, left=1))
    print("\nOverlap (Jaccard) of what they keep\n")
    rows = [("", *policies)]
    rows += [(key, *(f"{value:.2f}" for value in row.values())) for key, row in found["overlap"].items()]
    print(format_table(rows, left=1))
    layers = found["full_cache"]
    print("\nThe response's attention with the full cache, by layer\n")
    names = {"sparsity": "slots with 90 % of it", "fastcaote_spearman": "FastCAOTE's rank correlation with CAOTE"}
    rows = [("layer", *map(str, range(len(layers))))]
    rows += [(said, *(f"{layer[key]:.2f}" for layer in layers)) for key, said in names.items()]
    print(format_table(rows, left=1))
    return {"model": name, "cases": len(each), "answers": said, **found, "standard_errors": errors}


NEW = 32  # tokens of an answer about a file's text


def load_file(args: Namespace) -> tuple[str, Any, Any, list[tuple[Prompt, int, bool]]]:
    """(name, model, tokenizer, [(prompt, new tokens, whether the answer is one line)]) of a text and a question."""
    args.max_new_tokens = NEW if args.max_new_tokens is None else args.max_new_tokens
    name, model, tokenizer, prompt = load_prompt(args)
    return name, model, tokenizer, [(prompt, args.max_new_tokens, bool(args.opening))]


def load_facts(args: Namespace) -> tuple[str, Any, Any, list[tuple[Prompt, int, bool]]]:
    """As `load_file`, of cases that `kvevict demo` asks."""
    from ...models import load_model
    from ...policy.checks import count
    from ..evaluate.ask import encode
    from ..evaluate.tasks import TASKS, Settings
    from .demo import ANSWER, LONGEST, TASK

    count("--cases", args.cases, 1)
    for option, number in (("--max-new-tokens", args.max_new_tokens), ("--limit", args.limit)):
        if number is not None:
            count(option, number, 1)
    name = model_name(args)
    model, tokenizer = load_model(name, args.dtype, args.device)
    new = ANSWER if args.max_new_tokens is None else args.max_new_tokens
    longest = room(model, new, args.limit or LONGEST) or LONGEST
    cases = TASKS.find(TASK)(Settings(tokenizer, longest, args.cases))
    prompts = [(encode(model, tokenizer, x), args.max_new_tokens or x.new_tokens, x.one_line) for x in cases]
    return name, model, tokenizer, prompts


def one(
    model: Any,
    tokenizer: Any,
    policies: dict[str, Policy],
    args: Namespace,
    prompt: Prompt,
    new_tokens: int,
    one_line: bool,
    bar: tqdm,
) -> tuple[dict[str, Any], str]:
    """The measures of one prompt, and the first line of the full cache's answer."""
    from ...families import device_of
    from ...policy.tokenizer import told
    from ...prompts import until_line_end
    from ..analysis import compare

    policies, ids = observing(policies, model, prompt, args.observe), prompt.row(device_of(model))
    stop = until_line_end(tokenizer, ids.shape[1]) if one_line else None
    full = compare.truth(model, ids, new_tokens, stop)
    kept, runs = {}, {}
    for key, policy in policies.items():
        policy = told(compare.informed(policy, full.response), tokenizer)
        left = compare.left(model, ids, policy)
        kept[key] = compare.positions(left)
        ranked = compare.ranking(model, ids, policy, full) or dict.fromkeys(compare.RANKED)
        runs[key] = run(compare.compare(full, left), kept[key]) | ranked
        bar.update()
    overlap = {a: {b: compare.between(kept[a], kept[b]) for b in kept} for a in kept}
    answer = tokenizer.decode(full.response, skip_special_tokens=True).strip()
    found = {"tokens": full.tokens, "runs": runs, "overlap": overlap, "full_cache": compare.full_cache(full)}
    return found, answer.partition("\n")[0]


def run(layers: list, kept: list) -> dict:
    """Means over layers of `compare.compare`'s numbers, the overlap of neighbouring layers, the slots per kv head, and
    the layers' numbers."""
    from ..analysis import compare

    counts = [len(head) for layer in kept for head in layer]
    means = {name: sum(layer[name] for layer in layers) / len(layers) for name in compare.NAMES}
    slots = [min(counts), max(counts)]
    alike = {"adjacent_overlap": compare.adjacent(kept), "layer_overlap": compare.layers_alike(kept)}
    return means | alike | {"slots": slots, "layers": layers}


def mean(found: list[Any]) -> Any:
    """Of equally nested dicts and lists, the mean of each number; None where one is None."""
    first = found[0]
    if isinstance(first, dict):
        return {key: mean([each[key] for each in found]) for key in first}
    if isinstance(first, list):
        return [mean(list(values)) for values in zip(*found, strict=True)]
    return first if len(found) == 1 else None if None in found else sum(found) / len(found)


def error(values: list) -> float | None:
    """The standard error of a mean; None of a single value, or where one is None."""
    from ..evaluate.intervals import standard_error

    return None if len(values) < 2 or None in values else standard_error(values)


def cells(one: dict, errors: dict) -> list:
    least, most = (f"{slots:.0f}" for slots in one["slots"])
    texts = ["-" if one[name] is None else f"{one[name]:.3f}" for name in HEADS]
    beside = ["" if errors[name] is None else f" ±{errors[name]:.3f}" for name in HEADS]
    return [least if least == most else f"{least}..{most}", *map("".join, zip(texts, beside))]
