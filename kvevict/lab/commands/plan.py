import contextlib
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...commands import add_budget, add_model, add_policy, build_policies, command, grid
from ...policy.checks import byte_count

if TYPE_CHECKING:
    from ...policy.building import Chosen
    from ...policy.policy import Policy
    from ..analysis.fit import Need
    from ..analysis.shape import Shape

LONG = 131072  # tokens of the default prompt
KINDS = ("model", "int8", "k8v4", "int4")  # of an archive's slots, from many bits to few
BUDGETS = (16384, 8192, 4096, 2048, 1024, 512)  # slots per kv head
LARGE, SMALL = 4096, 512  # tokens of a chunk
HARDWARE = ("tflops", "bandwidth", "efficiency")


@command
def plan(parser: ArgumentParser, argv: list[str]) -> dict[str, object]:
    """Say whether a prompt and its answer fit a memory, or what would, from a model's config: no weights are read."""
    add_model(parser)
    add_policy(parser)
    add_budget(parser)
    parser.add_argument("--memory", metavar="BYTES",
                        help="of the model's device, such as 24GiB; default: this machine's GPU's, or this "
                        "machine's")  # fmt: skip
    parser.add_argument("--tokens", type=int, help="prompt length; default 131072, within the model's context")
    parser.add_argument("--vllm", metavar="BYTES",
                        help="say instead how many such requests a KV cache of vLLM holds, such as one of 2GiB, with "
                        "and without kvevict")  # fmt: skip
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens decoded after it; default 256")
    parser.add_argument("--batch", type=int, default=1, help="prompts read together; default 1")
    parser.add_argument("--costs", action="store_true", help="also the table of FLOPs, bytes and times")
    parser.add_argument("--tflops", type=float, help="for --costs: peak TFLOP/s; default: an H100 SXM's in bf16")
    parser.add_argument("--bandwidth", type=float, help="for --costs: memory GB/s; default: an H100 SXM's")
    parser.add_argument("--efficiency", type=float, help="for --costs: share of both that is reached; default 0.7")
    args = parser.parse_args(argv)
    from transformers import AutoConfig

    from ...models.families import context_of
    from ...models.loading import check_there, pretrained, small_llama
    from ..analysis.cost import UNPATCHED
    from ..analysis.fit import own_memory
    from ..analysis.served import in_vllm
    from ..analysis.shape import shape_of

    if args.memory is None:
        memory, owner, on_cpu = own_memory(args.device)
    else:
        memory, owner = byte_count("--memory", args.memory), "--memory"
        on_cpu = (args.device or "").startswith("cpu")
    chosen = build_policies([args.policy], args)[args.policy]
    name = args.model or small_llama()
    check_there(name)
    config = pretrained(AutoConfig, name)
    shape, context = shape_of(config, args.dtype), context_of(config.get_text_config())
    if args.tokens is None:
        args.tokens = LONG if context is None else max(1, min(LONG, context - args.new_tokens))
    if args.vllm is not None:
        return in_vllm(args, shape)
    if context is not None and args.tokens + args.new_tokens > context:
        print(
            f"kvevict plan: warning: {args.tokens} and {args.new_tokens} more tokens exceed the model's context of "
            f"{context}: it was not trained for such a prompt; give fewer --tokens or --new-tokens",
            file=sys.stderr,
        )
    if isinstance(chosen.policy.budget, str):
        chosen = _in_slots(chosen, shape)
        print(f"A budget of {args.budget} is {chosen.policy.budget} slots of each kv head.")
    costs = _costs(args, chosen, shape)
    print(
        f"{shape.weights / 1e9:.3g} G parameters, {len(shape.windows)} layers ({shape.windows.count(None)} evict); "
        f"{args.batch} x {args.tokens} tokens in chunks of {chosen.policy.chunk_size or args.tokens}, then "
        f"{args.new_tokens} more"
    )
    if args.costs or any(getattr(args, name) is not None for name in HARDWARE):
        print(f"\n{table(*costs['runs'].items())}\n")
    if "reach" in costs:
        print(f"An answer attends to {costs['reach']}.")
    plain = costs["runs"][UNPATCHED]["peak_bytes"]
    found = _verdict(args, chosen, shape, plain, memory, owner, on_cpu)
    return {"tokens": args.tokens, "batch": args.batch} | costs | found


def _in_slots(chosen: "Chosen", shape: "Shape") -> "Chosen":
    each = replace(shape, kv=chosen.run.kv).slot_bytes * shape.windows.count(None)
    return chosen._replace(policy=chosen.policy.in_slots(each))


def _costs(args: Namespace, chosen: "Chosen", shape: "Shape") -> dict:
    """Return the hardware, the costs of the unpatched model and of the policy, and with recall how far an answer
    attends."""
    from ...policy.reach import Sizes, reach
    from ..analysis.cost import UNPATCHED, Hardware
    from ..analysis.cost import plan as cost

    given = {name: getattr(args, name) for name in HARDWARE if getattr(args, name) is not None}
    (policy, run), hardware = chosen, Hardware(**given)
    common: dict = dict(batch=args.batch, hardware=hardware, new_tokens=args.new_tokens)
    plain, patched = (cost(shape, each, args.tokens, run=run if each else None, **common) for each in (None, policy))
    slots = replace(shape, kv=run.archive_kv or run.kv).slot_bytes * shape.windows.count(None)
    sizes = Sizes(slots, shape.element * (min(shape.layer_weights, shape.products) + shape.head_weights))
    rule = reach(policy, run.archive is True, args.tokens, sizes)
    if policy.recall_slots is not None or (policy.recall and rule.every):
        later = replace(policy, recall_slots=1.0) if rule.every else policy
        after = cost(shape, later.recalling, args.tokens, run=run, **common)
        patched |= {name: after[name] for name in ("cache_bytes", "decode")}
    found = {"hardware": vars(hardware), "runs": {UNPATCHED: plain, args.policy: patched}}
    return found | ({"reach": rule.why} if policy.recall else {})


def _verdict(
    args: Namespace, chosen: "Chosen", shape: "Shape", plain: int, memory: int, owner: str, on_cpu: bool
) -> dict[str, object]:
    """Print what the policy takes, whether it fits, and what else does: settings with better answers or, if the policy
    does not fit, any. `plain` is what the unpatched model takes. Raises ValueError if nothing fits."""
    from ..analysis.cost import UNPATCHED
    from ..analysis.fit import needed

    common: dict = dict(batch=args.batch, new_tokens=args.new_tokens, on_cpu=on_cpu)
    own = needed(shape, chosen, args.tokens, **common)
    _print_need(own, chosen)
    fits, limit = own.device <= memory, f"{_gib(memory)} GiB of {owner}"
    print(f"It {'fits' if fits else 'does not fit'} the {limit}. The unpatched model takes {_gib(plain)}.")
    most = _batches(args, chosen, shape, memory, on_cpu)
    if any(most.values()):
        print(f"The largest batch of such prompts that fits is {most[args.policy]}, unpatched {most[UNPATCHED]}.")
    others: dict[str, Need] = {}
    for text, other in _settings(args, chosen.policy, on_cpu):
        if not fits or _loss(other, args) < _loss(chosen, args):
            need = needed(shape, other, args.tokens, **common)
            others |= {text: need} if need.device <= memory else {}
    if others:
        print(f"\n{'With better answers these fit, too' if fits else 'These fit'}, the best answers first:\n{ORDER}.\n")
        print(grid([("", "GiB", "elsewhere"), *((t, _gib(n.device), _gib(n.elsewhere)) for t, n in others.items())]))
    elif not fits:
        weights = own.parts["weights"]
        why = f", the weights alone take {_gib(weights)}: give" if weights > memory else ": give fewer --tokens, or"
        half = ", or weights in half of the bits (--dtype bfloat16)" if shape.element > 2 else ""
        raise ValueError(f"nothing fits the {limit}{why} a smaller model{half}")
    sizes = {text: {"device_bytes": need.device, "elsewhere_bytes": need.elsewhere} for text, need in others.items()}
    needs = vars(own) | {"device": own.device}
    return {"memory": memory, "fits": fits, "largest_batch": most, "needs": needs, "others": sizes}


def _batches(args: Namespace, chosen: "Chosen", shape: "Shape", memory: int, on_cpu: bool) -> dict[str, int]:
    """Return the largest batch of prompts and answers that fits the memory, of the unpatched model and the policy."""
    from ..analysis.cost import UNPATCHED, largest
    from ..analysis.cost import plan as cost
    from ..analysis.fit import needed

    plain = partial(cost, shape, None, args.tokens, new_tokens=args.new_tokens)
    patched = partial(needed, shape, chosen, args.tokens, new_tokens=args.new_tokens, on_cpu=on_cpu)
    return {
        UNPATCHED: largest(lambda batch: plain(batch=batch)["peak_bytes"] <= memory),
        args.policy: largest(lambda batch: patched(batch=batch).device <= memory),
    }


def _print_need(need: "Need", chosen: "Chosen") -> None:
    policy = chosen.policy
    print(grid([("", "GiB"), *((part, _gib(size)) for part, size in need.parts.items()), ("all", _gib(need.device))]))
    if need.elsewhere:
        place = "the host's memory" if chosen.run.archive == "memory" else f"files of {chosen.run.archive}"
        print(f"The archive has {_gib(need.elsewhere)} GiB in {place}.")
    if policy.threshold is not None:
        most = "the full cache" if policy.budget is None else f"a budget of {policy.budget}"
        print(f"What a threshold leaves follows the text: the slots are the most, {most}.")
    if policy.rows.n_d and not policy.rows.needs_full_prompt:
        print("What the smaller model drafts is left out: plan it by --model.")


ORDER = (
    "all slots, then recall, then fewer slots; an archive of more bits first, and on the device, where an answer may\n"
    "attend to all of it, before elsewhere (the host's memory), where a recall takes longer, too"
)


def _loss(chosen: "Chosen", args: Namespace) -> tuple[int, ...]:
    """Return a number of how much answers lose by a setting, as `ORDER` says, to sort by."""
    (policy, run), tokens = chosen, args.tokens + args.new_tokens
    slots = tokens if policy.budget is None else policy.slots(args.tokens)
    if slots >= args.tokens:
        return (0,)
    return (1, KINDS.index(run.archive_kv or run.kv), run.archive is not True) if policy.recall else (2, -slots)


def _settings(args: Namespace, policy: "Policy", on_cpu: bool) -> Iterator[tuple[str, "Chosen"]]:
    """Yield the policy with other settings, the best answers first: (options of the command, policy and run). Settings
    that it refuses are left out. A policy that reads a long prompt in one pass gets chunks, since the pass takes most
    of the memory."""
    name, _, rest = args.policy.partition(":")
    slots = policy.budget or BUDGETS[2]
    own = [part for part in rest.split(",") if part and not part.startswith(("recall", "budget", "threshold"))]
    places = ["true"] if on_cpu else ["true", "memory"]
    kinds = ["", *(f"recall_kv={kind}" for kind in KINDS[1:])]
    recalls = [[f"recall={place}", *kind.split()] for kind in kinds for place in places]
    whole = LARGE if (policy.chunk_size or args.tokens) > LARGE else None  # else the policy's chunks
    least = [([], BUDGETS[-1], SMALL)] if args.tokens > SMALL else []
    fewer = [([], budget, whole) for budget in BUDGETS if budget < args.tokens]
    both = [(more, slots, whole) for more in recalls]
    for more, budget, chunk in [([], 1.0, whole), *both, *fewer, *least]:
        text = name + ":" * bool(own or more) + ",".join(own + more)
        changed = {"budget": str(budget), "chunk_size": chunk or args.chunk_size}
        with contextlib.suppress(ValueError):
            made = build_policies([text], Namespace(**vars(args) | changed))[text]
            yield f"--policy {text} --budget {budget}" + (f" --chunk-size {chunk}" if chunk else ""), made


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}" if size > 2**27 else f"{size / 2**30:.2g}"


ROWS = (
    ("linear layers, TFLOP", lambda run: run["flops"]["linear"] / 1e12),
    ("attention, TFLOP", lambda run: run["flops"]["attention"] / 1e12),
    ("appended rows, TFLOP", lambda run: run["flops"]["appended"] / 1e12),
    ("scoring, TFLOP", lambda run: run["flops"].get("scoring", 0) / 1e12 or None),
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
