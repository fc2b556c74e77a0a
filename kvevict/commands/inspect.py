import dataclasses
import sys
from pathlib import Path

from . import command
from .bench import build_policies
from .generate import slots


@command
def inspect(parser, argv):
    """Show which tokens of a prompt every layer and head kept, as one HTML page."""
    parser.add_argument("question", help="what to ask about the text (or how to go on)")
    parser.add_argument("--model", required=True, help="folder or hub id of a Transformers causal language model")
    parser.add_argument("--file", required=True, help="text to read; - is standard input")
    parser.add_argument("--policy", action="append", metavar="NAME[:OPTION=VALUE,...]",
                        help="preset; repeat it to switch between several on the page; default take")  # fmt: skip
    parser.add_argument("--budget", default="512", help="slots per kv head, or the fraction kept; default 512")
    parser.add_argument("--chunk-size", type=int, help="tokens read at once; default: the preset's")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="length of the answer at most; default 32")
    parser.add_argument("--limit", type=int, help="prompt tokens at most: cuts the text's end; default: the context")
    parser.add_argument("--find", default="", help="words to underline wherever the prompt has them")
    parser.add_argument("--out", default="kvevict-inspect.html", help="the page; default kvevict-inspect.html")
    args = parser.parse_args(argv)
    from ..checks import count
    from ..page import page
    from ..run import encode, load_model
    from ..speed import look

    count("--max-new-tokens", args.max_new_tokens, 1)
    policies = build_policies(args.policy or ["take"], args.budget, args.chunk_size)
    text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8", errors="replace")
    model, tokenizer = load_model(args.model)
    ids = encode(model, tokenizer, text, args.question, args.max_new_tokens, args.limit)
    runs = {name: look(model, tokenizer, ids, policy, args.max_new_tokens) for name, policy in policies.items()}
    facts = [("model", args.model), ("text", args.file), ("question", args.question)]
    shown = [page_run(name, policies[name], run["answer"].strip(), run["report"]) for name, run in runs.items()]
    out = Path(args.out)
    out.write_text(page(tokenizer, ids, shown, facts, args.find), encoding="utf-8")
    for name, run in runs.items():
        print(f"{name}: kept {slots(run['report'])} of {ids.shape[1]} slots per head; answer: {run['answer'].strip()}")
        del run["report"]["positions"]
    print(f"\nOpen {out.resolve().as_uri()} in a browser.")
    return {"tokens": ids.shape[1], "out": str(out), "runs": runs}


def page_run(name: str, policy, answer: str, seen: dict) -> dict:
    """What `kvevict.page` draws of a policy's run, from its report with positions."""
    from ..speed import full_cache_bytes

    kept, full = seen["cache_bytes"], full_cache_bytes(seen)
    facts = [
        ("kept", f"{slots(seen)} of {seen['seen'][0]} slots per kv head"),
        ("KV cache", f"{kept / 1024:,.0f} of {full / 1024:,.0f} KiB ({kept / full:.1%}), once the prompt was read"),
        ("options", settings(policy)),
    ]
    return dict(name=name, answer=answer, facts=facts, positions=seen["positions"])


def settings(policy) -> str:
    """The policy's and its score's options, as one would write them."""
    pairs = [
        (f.name, getattr(part, f.name)) for part in (policy, policy.score) for f in dataclasses.fields(part) if f.init
    ]
    return ", ".join(f"{name}={value!r}" for name, value in pairs if name not in ("score", "progress"))
