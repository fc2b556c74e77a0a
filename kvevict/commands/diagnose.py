from . import (
    add_budget,
    add_model,
    add_policies,
    add_question,
    build_policies,
    command,
    grid,
    load_prompt,
    model_name,
    observing,
)

HEADS = (
    "slots/head",
    "joint error",
    "output error",
    "recall",
    "top 16",
    "attention cosine",
    "KV L1 loss",
    "adjacent layers",
)


@command
def diagnose(parser, argv):
    """What policies keep of a prompt, measured against the full cache: errors, recall, overlaps."""
    add_question(parser, new_tokens=8, needed=False)
    add_model(parser)
    add_policies(parser, default=("take", "snapkv", "h2o", "streaming"))
    add_budget(parser, budget=128)
    args = parser.parse_args(argv)
    if (args.file is None) != (args.question is None):
        raise ValueError("give a question and --file, or neither for made-up facts")
    from tqdm import tqdm

    from ..analysis import compare

    policies = build_policies(args.policies, args)
    name, model, tokenizer, prompt = load_prompt(args) if args.file else load_facts(args)
    policies, ids = observing(policies, prompt, args.observe), prompt.row(model.device)
    full = compare.truth(model, ids, args.max_new_tokens)
    kept, runs = {}, {}
    for key, policy in tqdm(policies.items(), unit="policy", delay=1, leave=False, disable=None):
        left = compare.left(model, ids, compare.informed(policy, full.response))
        kept[key] = compare.positions(left)
        runs[key] = run(compare.compare(full, left), kept[key])
    overlap = {a: {b: compare.between(kept[a], kept[b]) for b in kept} for a in kept}
    answer = tokenizer.decode(full.response, skip_special_tokens=True).strip()
    said = answer.partition("\n")[0]
    print(f"{full.tokens} prompt tokens, budget {args.budget}; the full cache answers: {said}\n")
    print(grid([("", *HEADS), *((key, *cells(one)) for key, one in runs.items())]))
    print("\nOverlap (Jaccard) of what they keep\n")
    print(grid([("", *kept), *((a, *(f"{value:.2f}" for value in row.values())) for a, row in overlap.items())]))
    layers = compare.full_cache(full)
    print("\nThe response's attention with the full cache, by layer\n")
    names = {"sparsity": "slots with 90 % of it", "fastcaote_spearman": "FastCAOTE's rank correlation with CAOTE"}
    print(grid([("layer", *map(str, range(len(layers)))),
                *((said, *(f"{layer[key]:.2f}" for layer in layers)) for key, said in names.items())]))  # fmt: skip
    result = {"model": name, "tokens": full.tokens, "answer": answer, "runs": runs, "overlap": overlap}
    return result | {"full_cache": layers}


def load_facts(args) -> tuple:
    """As `load_prompt`, of the first case that `kvevict demo` asks."""
    from ..analysis.run import load_model
    from ..evaluate.ask import encode
    from ..evaluate.tasks import TASKS, Settings
    from ..policy.checks import count
    from .demo import LONGEST, TASK

    count("--max-new-tokens", args.max_new_tokens, 1)
    name = model_name(args)
    model, tokenizer = load_model(name, args.dtype, args.device)
    longest = min(args.limit or LONGEST, model.config.max_position_embeddings - args.max_new_tokens)
    case = next(iter(TASKS.find(TASK)(Settings(tokenizer, longest, cases=1))))
    return name, model, tokenizer, encode(model, tokenizer, case)


def run(layers: list, kept: list) -> dict:
    """Means over layers of what `compare.compare` says, the overlap of neighbouring layers, the slots per kv
    head, and the layers themselves."""
    from ..analysis import compare

    counts = [len(head) for layer in kept for head in layer]
    means = {name: sum(layer[name] for layer in layers) / len(layers) for name in compare.NAMES}
    slots = [min(counts), max(counts)]
    alike = {"adjacent_overlap": compare.adjacent(kept), "layer_overlap": compare.layers_alike(kept)}
    return means | alike | {"slots": slots, "layers": layers}


def cells(one: dict) -> list:
    from ..analysis.compare import NAMES

    least, most = one["slots"]
    numbers = [*(one[name] for name in NAMES), one["adjacent_overlap"]]
    texts = ["-" if number is None else f"{number:.3f}" for number in numbers]
    return [str(least) if least == most else f"{least}..{most}", *texts]
