import sys
from argparse import ArgumentParser
from dataclasses import replace
from typing import Any

from ...commands import add_budget, add_model, add_policy, build_policies, command, grid

LONG = 131072  # tokens of the default prompt


@command
def plan(parser: ArgumentParser, argv: list[str]) -> dict[str, object]:
    """Compute the cost of a prompt and its answer from a model's config alone: no weights are read."""
    add_model(parser)
    add_policy(parser)
    add_budget(parser)
    parser.add_argument("--tokens", type=int, help="prompt length; default 131072, within the model's context")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens decoded after it; default 256")
    parser.add_argument("--batch", type=int, default=1, help="prompts read together; default 1")
    parser.add_argument("--tflops", type=float, help="peak TFLOP/s; default: an H100 SXM's in bf16")
    parser.add_argument("--bandwidth", type=float, help="memory GB/s; default: an H100 SXM's")
    parser.add_argument("--efficiency", type=float, help="share of both that is reached; default 0.7")
    args = parser.parse_args(argv)
    from transformers import AutoConfig

    from ...models.families import context_of
    from ...models.loading import check_there, pretrained, small_llama
    from ...policy.reach import Sizes, reach
    from ..analysis.cost import UNPATCHED, Hardware
    from ..analysis.cost import plan as cost
    from ..analysis.shape import shape_of

    numbers = {name: getattr(args, name) for name in ("tflops", "bandwidth", "efficiency")}
    hardware = Hardware(**{name: value for name, value in numbers.items() if value is not None})
    policy, run = build_policies([args.policy], args)[args.policy]
    name = args.model or small_llama()
    check_there(name)
    config = pretrained(AutoConfig, name)
    shape, context = shape_of(config, args.dtype), context_of(config.get_text_config())
    if args.tokens is None:
        args.tokens = LONG if context is None else max(1, min(LONG, context - args.new_tokens))
    if context is not None and args.tokens + args.new_tokens > context:
        print(
            f"kvevict plan: warning: {args.tokens} and {args.new_tokens} more tokens exceed the model's context of "
            f"{context}: it was not trained for such a prompt; give fewer --tokens or --new-tokens",
            file=sys.stderr,
        )
    common = dict(batch=args.batch, hardware=hardware, new_tokens=args.new_tokens)
    if isinstance(policy.budget, str):
        policy = policy.in_slots(replace(shape, kv=run.kv).slot_bytes * shape.windows.count(None))
        print(f"A budget of {args.budget} is {policy.budget} slots of each kv head.")
    runs = {
        UNPATCHED: cost(shape, None, args.tokens, **common),
        args.policy: cost(shape, policy, args.tokens, run=run, **common),
    }
    slots = replace(shape, kv=run.archive_kv or run.kv).slot_bytes * shape.windows.count(None)
    sizes = Sizes(slots, shape.element * (min(shape.layer_weights, shape.products) + shape.head_weights))
    rule = reach(policy, run.archive is True, args.tokens, sizes)
    if policy.recall_slots is not None or (policy.recall and rule.every):
        later = replace(policy, recall_slots=1.0) if rule.every else policy
        after = cost(shape, later.recalling, args.tokens, run=run, **common)
        runs[args.policy] |= {name: after[name] for name in ("cache_bytes", "decode")}
    print(
        f"{shape.weights / 1e9:.3g} G parameters, {len(shape.windows)} layers ({shape.windows.count(None)} evict); "
        f"{args.batch} x {args.tokens} tokens in chunks of {policy.chunk_size or args.tokens}; "
        f"{hardware.tflops:g} TFLOP/s and {hardware.bandwidth:g} GB/s at {hardware.efficiency:.0%}"
    )
    print(table(*runs.items()))
    if policy.threshold is not None:
        most = "the full cache" if policy.budget is None else f"a budget of {policy.budget}"
        print(f"What a threshold leaves follows the text: KV here is the most, {most}.")
    if policy.recall:
        archive = runs[args.policy]["archive_bytes"]
        here = archive if run.archive is True else 2 * archive // max(shape.windows.count(None), 2)
        where = "" if run.archive is True else f" on the host, with {here / 2**30:.3g} GiB on the GPU during a recall"
        print(f"The archive is beside the peak memory{where}. An answer attends to {rule.why}.")
        archives = {"device_bytes": here, "host_bytes": 0 if run.archive is True else archive}
    if policy.rows.n_d and not policy.rows.needs_full_prompt:
        print("What the smaller model drafts is left out: plan it by --model.")
    facts = {"tokens": args.tokens, "batch": args.batch, "hardware": vars(hardware), "runs": runs}
    return facts | ({"archive": archives} if policy.recall else {})


ROWS = (
    ("linear layers, TFLOP", lambda run: run["flops"]["linear"] / 1e12),
    ("attention, TFLOP", lambda run: run["flops"]["attention"] / 1e12),
    ("appended rows, TFLOP", lambda run: run["flops"]["appended"] / 1e12),
    ("drafts, TFLOP", lambda run: run["flops"].get("drafts", 0) / 1e12 or None),
    ("all, TFLOP", lambda run: sum(run["flops"].values()) / 1e12),
    ("weights read, GiB", lambda run: run["moved"]["linear"] / 2**30),
    ("drafts' weights and KV, GiB", lambda run: run["moved"].get("drafts", 0) / 2**30 or None),
    ("KV read, GiB", lambda run: run["moved"]["attention"] / 2**30),
    ("peak KV, GiB", lambda run: (run["peak_cache_bytes"] + run["sliding_bytes"]) / 2**30),
    ("KV after, GiB", lambda run: (run["cache_bytes"] + run["sliding_bytes"]) / 2**30),
    ("activations, GiB", lambda run: run["activation_bytes"] / 2**30),
    ("peak memory, GiB", lambda run: run["peak_bytes"] / 2**30),
    ("archive, GiB", lambda run: run["archive_bytes"] / 2**30 if "archive_bytes" in run else None),
    ("first token, s", lambda run: run["seconds"]),
    ("per new token, GFLOP", lambda run: run["decode"]["first"] and run["decode"]["first"]["flops"] / 1e9),
    ("moved per new token, GiB", lambda run: run["decode"]["first"] and run["decode"]["first"]["moved"] / 2**30),
    ("tokens/s, the first", lambda run: run["decode"]["first"] and run["decode"]["first"]["tokens_per_second"]),
    ("tokens/s, the last", lambda run: run["decode"]["last"] and run["decode"]["last"]["tokens_per_second"]),
    ("KV at the end, GiB", lambda run: (run["decode"]["cache_bytes"] + run["sliding_bytes"]) / 2**30),
)


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def table(plain: tuple[str, dict[str, Any]], patched: tuple[str, dict[str, Any]]) -> str:
    """Format two pairs (name, run), of the unpatched model and of a policy, side by side, with the policy's numbers as
    shares of the unpatched model's. Rows that neither run has are left out."""
    rows = [("", plain[0], patched[0], "share")]
    for label, value in ROWS:
        a, b = value(plain[1]), value(patched[1])
        if a is not None or b is not None:
            rows.append((label, _text(a), _text(b), f"{b / a:.4f}" if a and b is not None else ""))
    return grid(rows)
