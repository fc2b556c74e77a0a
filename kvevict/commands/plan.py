from . import command, number, parse_option


@command
def plan(parser, argv):
    """Say what reading a prompt will cost, from a model's config alone."""
    parser.add_argument("--model", required=True, help="folder, config.json or hub id; no weights are read")
    parser.add_argument("--policy", default="take", help="preset (see `kvevict policies`), default take")
    parser.add_argument("--budget", default="512", help="slots per kv head, or the fraction kept; default 512")
    parser.add_argument("--chunk-size", type=int, help="tokens read at once; default: the preset's")
    parser.add_argument("--tokens", type=int, default=131072, help="prompt length; default 131072")
    parser.add_argument("--batch", type=int, default=1, help="prompts read together; default 1")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="policy option, repeatable")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--tflops", type=float, help="peak TFLOP/s; default: an H100 SXM's in bf16")
    parser.add_argument("--bandwidth", type=float, help="memory GB/s; default: an H100 SXM's")
    parser.add_argument("--efficiency", type=float, help="share of both that is reached; default 0.7")
    args = parser.parse_args(argv)
    from transformers import AutoConfig

    from ..plan import Hardware, shape_of
    from ..plan import plan as cost
    from ..policy import build

    numbers = {name: getattr(args, name) for name in ("tflops", "bandwidth", "efficiency")}
    hardware = Hardware(**{name: value for name, value in numbers.items() if value is not None})
    options = dict(parse_option(text) for text in args.option)
    policy = build(args.policy, budget=number(args.budget), chunk_size=args.chunk_size, **options)
    shape = shape_of(AutoConfig.from_pretrained(args.model), args.dtype)
    runs = {
        name: cost(shape, chosen, args.tokens, batch=args.batch, hardware=hardware)
        for name, chosen in (("unpatched", None), (args.policy, policy))
    }
    print(
        f"{shape.weights / 1e9:.2f} G parameters, {len(shape.windows)} layers ({shape.windows.count(None)} evict); "
        f"{args.batch} x {args.tokens} tokens in chunks of {policy.chunk_size or args.tokens}; "
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
    (_, base), (name, run) = plain, patched
    lines = [f"{'':22}{'unpatched':>12}{name:>18}{'share':>9}"]
    for label, value in ROWS:
        a, b = value(base), value(run)
        share = f"{b / a:9.4f}" if a else f"{'':9}"
        lines.append(f"{label:22}{a:12.4g}{b:18.4g}{share}")
    return "\n".join(lines)
