from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ...commands import add_budget, add_model, check_file, command, complete_policies, options_of
from ...policy.text import DEFAULT, FORM
from . import add_question, load_prompts

if TYPE_CHECKING:
    from ...policy.building import Chosen


@command
def inspect(parser: ArgumentParser, argv: list[str]) -> dict[str, object]:
    """Show which tokens of a prompt every layer and head kept, as one HTML page."""
    add_question(parser, new_tokens=32, several="; of several the text is read without any, and each is asked of a "
                 "copy of what was kept: a policy with recall=true chooses anew for each")  # fmt: skip
    add_model(parser)
    parser.add_argument("--policy", action="append",
                        help=f"{FORM} of `kvevict policies`, such as {DEFAULT}:recall=true, repeatable; default "
                        f"{DEFAULT}")  # fmt: skip
    add_budget(parser)
    parser.add_argument("--find", default="", help="words to underline wherever the prompt has them")
    parser.add_argument("--out", default="kvevict-inspect.html", help="the page; default kvevict-inspect.html")
    args = parser.parse_args(argv)
    import torch

    from ...models.families import device_of
    from ...store.files import write
    from ..analysis.page import page
    from ..analysis.run import ask_each, measure

    out = Path(args.out)
    check_file("--out", out)
    policies = complete_policies(args.policy or [DEFAULT], args)
    name, model, tokenizer, prompts = load_prompts(args, args.question)
    several, device = len(prompts) > 1, device_of(model)
    asked = ["no question", *args.question] if several else args.question
    ids = min((p.row(device)[:, : len(p.context) if several else None] for p in prompts), key=torch.numel)
    how: dict = dict(max_new_tokens=args.max_new_tokens, one_line=bool(args.opening))
    runs, shown = {}, []
    for key, policy in policies.items():
        if several:
            made = ask_each(model, tokenizer, ids, [prompt.question for prompt in prompts], policy, **how)
        else:
            made = [measure(model, tokenizer, ids, policy, positions=True, question=args.question[0], **how)]
        alone = len(shown)
        for question, run in zip(asked, made, strict=True):
            seen, answer = run["report"], run["answer"].strip()
            label = f"{' '.join(question.split())} ({key})" if several else key
            print(f"{label}: kept {told_of(seen)}" + (f"; answer: {answer}" if answer else ""))
            own = page_run(label, policy, answer, seen, [("question", question)])
            shown.append(own | dict(before=alone) if len(shown) > alone else own)
            runs[label] = run
    write(out, page(tokenizer, ids, shown, [("model", name), ("text", args.file)], args.find))
    for run in runs.values():
        del run["report"]["positions"]
    print(f"\nOpen {out.resolve().as_uri()} in a browser.")
    return {"tokens": ids.shape[1], "out": str(out), "runs": runs}


def told_of(seen: dict) -> str:
    """Describe in words how many slots a read kept, and the share of them that came from the archive."""
    from ..analysis.speed import slots

    kept = f"{slots(seen)} of {seen['seen'][0]} slots per kv head"
    if not seen["archive_bytes"]:
        return kept
    archive = f"archive of {seen['archive_bytes'] / 1024:,.0f} KiB in {seen['archive_in']}"
    if all(each is None for each in seen["recalled"] or ()):  # the archive was empty before this read
        return f"{kept}, beside an {archive}"
    back, total = (sum(sum(heads[0]) for heads in seen[key] or () if heads) for key in ("recalled", "kept"))
    return f"{kept}, {back / total:.0%} of them from the {archive}"


def page_run(name: str, chosen: Chosen, answer: str, seen: dict, facts: Iterable = ()) -> dict:
    """Make a run, a dict as `kvevict.lab.analysis.page.page` takes it, from a policy's report with positions. `facts`
    are shown before the run's own facts."""
    kept, full = seen["cache_bytes"], seen["full_cache_bytes"]
    sizes = f"{kept / 1024:,.0f} of {full / 1024:,.0f} KiB ({kept / full:.1%}), once the prompt was read"
    said = [("answer", answer)] if answer else []
    own = [*said, ("kept", told_of(seen)), ("KV cache", sizes), ("options", options_of(chosen))]
    return dict(name=name, answer=answer, facts=[*facts, *own], positions=seen["positions"])
