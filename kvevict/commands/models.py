from collections import Counter

from . import command

HEAD = """# Model types

Made by `kvevict models --markdown` from `kvevict/known.tsv`, which tests/hf/test_types.py makes: a tiny random model of
every type is read in chunks, with rows that read along, with left padding and beams, at tight budgets and under several
policies, and compared with the unpatched one. The number behind a type is the oldest Transformers that it was right
with. On an older one, as with any type that is not here and with remote code, a model is compared on a few tokens
when it is patched, and refused if it differs.
"""
MEANING = {
    "equal": "Equal to the unpatched model with every policy",
    "limited": "Equal, but for what the last column says",
    "refused": "Refused, with the reason",
    "untried": "Not compared: no tiny model is made of its config alone, or that reads no ids",
}


@command
def models(parser, argv):
    """List the model types that were compared with the unpatched model, and how each one did."""
    parser.add_argument("names", nargs="*", metavar="TYPE", help="only those with this in their name")
    parser.add_argument("--markdown", action="store_true", help="print the page docs/models.md")
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    args = parser.parse_args(argv)
    from ..known import table

    wanted = [t for t in table() if not args.names or any(name in t.name for name in args.names)]
    if args.markdown:
        print(page(wanted), end="")
        return None
    if not args.json:
        for each in wanted:
            print(f"{_name(each):44} {each.verdict:8} {each.note}".rstrip())
        print("\nOther types are compared on a few tokens when they are patched, and refused if they differ.")
    return {"models": [t._asdict() for t in wanted], "counts": dict(Counter(t.verdict for t in wanted))}


def page(types) -> str:
    """The types as a Markdown page."""
    parts = [HEAD]
    for verdict, meaning in MEANING.items():
        some = [t for t in types if t.verdict == verdict]
        parts.append(f"\n## {meaning}: {len(some)}\n")
        if verdict == "equal":
            parts.append("\n" + ", ".join(f"`{_name(t)}` {t.since}" for t in some) + "\n")
            continue
        parts.append("\n| type | |\n|---|---|\n")
        parts += [f"| `{_name(t)}` {t.since}".rstrip() + f" | {t.note.replace('|', '/')} |\n" for t in some]
    return "".join(parts)


def _name(each) -> str:
    return each.name + ("" if each.decoder in ("", each.name) else f" ({each.decoder})")
