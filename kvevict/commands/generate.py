import sys
from pathlib import Path

from . import command, number, parse_option


@command
def generate(parser, argv):
    """Read a long text, keep a budget of KV slots, answer a question."""
    parser.add_argument("question", help="what to ask about the text (or how to go on)")
    parser.add_argument("--model", required=True, help="folder or hub id of a Transformers causal language model")
    parser.add_argument("--file", required=True, help="text to read; - is standard input")
    parser.add_argument("--policy", default="take", help="preset (see `kvevict policies`), default take")
    parser.add_argument("--budget", default="512", help="slots per kv head, or the fraction kept; default 512")
    parser.add_argument("--chunk-size", type=int, help="tokens read at once; default: the preset's")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="length of the answer at most; default 64")
    parser.add_argument("--limit", type=int, help="prompt tokens at most: cuts the text's end; default: the context")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="policy option, repeatable")
    parser.add_argument("--compare", action="store_true", help="also run the model unpatched")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    args = parser.parse_args(argv)
    from ..checks import count
    from ..policy import build
    from ..run import encode, load_model, measure

    count("--max-new-tokens", args.max_new_tokens, 1)
    options = dict(progress=True, budget=number(args.budget), chunk_size=args.chunk_size)
    policy = build(args.policy, **options | dict(parse_option(text) for text in args.option))
    text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8", errors="replace")
    model, tokenizer = load_model(args.model, args.dtype)
    ids = encode(model, tokenizer, text, args.question, args.max_new_tokens, args.limit)
    runs = {"unpatched": measure(model, tokenizer, ids, None, args.max_new_tokens)} if args.compare else {}
    runs[args.policy] = measure(model, tokenizer, ids, policy, args.max_new_tokens)
    print(table(runs, ids.shape[1]))
    return {"tokens": ids.shape[1], "runs": runs}


def table(runs: dict, tokens: int) -> str:
    """Runs of `kvevict.run.measure` side by side, then what was kept and the answers."""
    head = f"{'':17}{'read s':>9}{'decode s':>10}{'peak MiB':>10}{'KV MiB':>9}{'slots/head':>14}"
    lines = [f"{tokens} prompt tokens", head]
    for name, run in runs.items():
        seen = run.get("report")
        kv = f"{seen['cache_bytes'] / 2**20:9.2f}" if seen else f"{'all':>9}"
        lines.append(
            f"{name:17}{run['read_seconds']:9.2f}{run['decode_seconds']:10.2f}{run['peak_bytes'] / 2**20:10.1f}{kv}"
            f"{slots(seen) if seen else str(tokens):>14}"
        )
    for name, run in runs.items():
        lines.append(f"\n[{name}] {run['answer'].strip()}")
    return "\n".join(lines)


def slots(seen: dict) -> str:
    """Kept slots per kv head, the range over layers and heads."""
    counts = [n for layer in seen["kept"] if layer is not None for row in layer for n in row]
    return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)}..{max(counts)}"
