from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...commands import (
    add_budget,
    add_model,
    build_policies,
    check_complete,
    check_file,
    command,
    options_of,
)
from ...policy.text import DEFAULT, FORM
from . import add_question, load_prompt

if TYPE_CHECKING:
    from ...policy.policy import Policy


@command
def inspect(parser: ArgumentParser, argv: list[str]) -> dict[str, Any]:
    """Show which tokens of a prompt every layer and head kept, as one HTML page."""
    add_question(parser, new_tokens=32)
    add_model(parser)
    parser.add_argument("--policy", action="append",
                        help=f"{FORM} of `kvevict policies`, repeatable; default {DEFAULT}")  # fmt: skip
    add_budget(parser)
    parser.add_argument("--find", default="", help="words to underline wherever the prompt has them")
    parser.add_argument("--out", default="kvevict-inspect.html", help="the page; default kvevict-inspect.html")
    args = parser.parse_args(argv)
    from ...families import device_of
    from ...files import write
    from ..analysis.page import page
    from ..analysis.run import measure
    from ..analysis.speed import slots

    out = Path(args.out)
    check_file("--out", out)
    policies = build_policies(args.policy or [DEFAULT], args)
    check_complete(policies)
    name, model, tokenizer, prompt = load_prompt(args)
    ids = prompt.row(device_of(model))
    how: dict = dict(max_new_tokens=args.max_new_tokens, positions=True, one_line=bool(args.opening))
    how |= dict(question=args.question)
    runs = {key: measure(model, tokenizer, ids, p, **how) for key, p in policies.items()}
    facts = [("model", name), ("text", args.file), ("question", args.question)]
    shown = [page_run(key, policies[key], run["answer"].strip(), run["report"]) for key, run in runs.items()]
    write(out, page(tokenizer, ids, shown, facts, args.find))
    for key, run in runs.items():
        print(f"{key}: kept {slots(run['report'])} of {ids.shape[1]} slots per head; answer: {run['answer'].strip()}")
        del run["report"]["positions"]
    print(f"\nOpen {out.resolve().as_uri()} in a browser.")
    return {"tokens": ids.shape[1], "out": str(out), "runs": runs}


def page_run(name: str, policy: Policy, answer: str, seen: dict[str, Any]) -> dict[str, Any]:
    """A policy's run as `kvevict.lab.analysis.page` takes it, from its report with positions."""
    from ..analysis.speed import slots

    kept, full = seen["cache_bytes"], seen["full_cache_bytes"]
    facts = [
        ("kept", f"{slots(seen)} of {seen['seen'][0]} slots per kv head"),
        ("KV cache", f"{kept / 1024:,.0f} of {full / 1024:,.0f} KiB ({kept / full:.1%}), once the prompt was read"),
        ("options", options_of(policy)),
    ]
    return dict(name=name, answer=answer, facts=facts, positions=seen["positions"])
