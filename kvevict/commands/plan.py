from . import add_budget, add_model, add_policy, build_policies, command, grid, model_name


@command
def plan(parser, argv):
    """Say what reading a prompt will cost, from a model's config alone: no weights are read."""
    add_model(parser)
    add_policy(parser)
    add_budget(parser)
    parser.add_argument("--tokens", type=int, default=131072, help="prompt length; default 131072")
    parser.add_argument("--batch", type=int, default=1, help="prompts read together; default 1")
    parser.add_argument("--tflops", type=float, help="peak TFLOP/s; default: an H100 SXM's in bf16")
    parser.add_argument("--bandwidth", type=float, help="memory GB/s; default: an H100 SXM's")
    parser.add_argument("--efficiency", type=float, help="share of both that is reached; default 0.7")
    args = parser.parse_args(argv)
    from transformers import AutoConfig

    from ..analysis.cost import Hardware
    from ..analysis.cost import plan as cost
    from ..analysis.shape import shape_of
    from ..analysis.speed import UNPATCHED
    from ..models import pretrained

    numbers = {name: getattr(args, name) for name in ("tflops", "bandwidth", "efficiency")}
    hardware = Hardware(**{name: value for name, value in numbers.items() if value is not None})
    policies = build_policies([args.policy], args)
    shape = shape_of(pretrained(AutoConfig, model_name(args)), args.dtype)
    runs = {
        name: cost(shape, chosen, args.tokens, batch=args.batch, hardware=hardware)
        for name, chosen in {UNPATCHED: None, **policies}.items()
    }
    print(
        f"{shape.weights / 1e9:.3g} G parameters, {len(shape.windows)} layers ({shape.windows.count(None)} evict); "
        f"{args.batch} x {args.tokens} tokens in chunks of {policies[args.policy].chunk_size or args.tokens}; "
        f"{hardware.tflops:g} TFLOP/s and {hardware.bandwidth:g} GB/s at {hardware.efficiency:.0%}"
    )
    print(table(*runs.items()))
    return {"tokens": args.tokens, "batch": args.batch, "hardware": vars(hardware), "runs": runs}


ROWS = (
    ("linear layers, TFLOP", lambda run: run["flops"]["linear"] / 1e12),
    ("attention, TFLOP", lambda run: run["flops"]["attention"] / 1e12),
    ("probe, TFLOP", lambda run: run["flops"]["probe"] / 1e12),
    ("scoring, TFLOP", lambda run: run["flops"]["evict"] / 1e12),
    ("all, TFLOP", lambda run: sum(run["flops"].values()) / 1e12),
    ("weights read, GiB", lambda run: run["moved"]["linear"] / 2**30),
    ("KV moved, GiB", lambda run: (run["moved"]["attention"] + run["moved"]["evict"]) / 2**30),
    ("KV at most, GiB", lambda run: (run["peak_cache_bytes"] + run["sliding_bytes"]) / 2**30),
    ("KV after, GiB", lambda run: (run["cache_bytes"] + run["sliding_bytes"]) / 2**30),
    ("activations, GiB", lambda run: run["activation_bytes"] / 2**30),
    ("peak memory, GiB", lambda run: run["peak_bytes"] / 2**30),
    ("first token, s", lambda run: run["seconds"]),
)


def table(plain, patched) -> str:
    """(name, run) of the unpatched model and of a policy side by side, and the second's share of the first."""
    rows = [("", plain[0], patched[0], "share")]
    for label, value in ROWS:
        a, b = value(plain[1]), value(patched[1])
        rows.append((label, f"{a:.4g}", f"{b:.4g}", f"{b / a:.4f}" if a else ""))
    return grid(rows)
