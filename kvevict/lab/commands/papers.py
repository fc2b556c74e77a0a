from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ...commands import add_model, check_folder, command, loaded
from ...policy.checks import installed

if TYPE_CHECKING:
    from ..papers.session import Session

QUICK = (256, 512)  # --quick: tokens of prompts
LONG = (1024, 2048, 4096, 8192)  # else, as far as the model's context holds them
ROOM, LONG_ROOM = 48, 512  # tokens of the context that an answer takes at most; with LongBench's summaries


@command
def papers(parser: ArgumentParser, argv: list[str]) -> dict[str, object]:
    """Make a paper's tables and figures with any model: CSV, Markdown and a picture of each."""
    parser.add_argument("paper", metavar="NAME", help="take, edie, chunkkv, lookaheadkv or caote")
    add_model(parser)
    parser.add_argument("--only", nargs="+", default=[], metavar="TABLE",
                        help="these tables, e.g. table2 fig3; default: all that a model can give")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few and short prompts: minutes with the bundled model")
    parser.add_argument("--out", help="folder, resumed if begun; default papers/NAME")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens of prompts; default 1024 to 8192, within the "
                        "model's context")  # fmt: skip
    parser.add_argument("--cases", type=int, help="per task, length and depth; default 5, with --quick 1")
    parser.add_argument("--haystack", help="text to hide facts in, as in `kvevict eval`; default: generated")
    parser.add_argument("--data", help="LongBench's records, for its tables; default: made-up tasks in their place")
    parser.add_argument("--adapter", help="folder of lookahead rows, for lookaheadkv")
    parser.add_argument("--draft", help="folder of a smaller model, for SpecKV's rows")
    args = parser.parse_args(argv)
    installed("eval", "kvevict papers", "scipy")
    if args.data:
        installed("longbench", "--data", "lm_eval", "jieba", "fuzzywuzzy", "rouge")
    from ..papers import PAPERS
    from ..papers.run import chosen

    paper = PAPERS.find(args.paper)
    args.out = Path(args.out or f"papers/{args.paper}")
    check_folder("--out", args.out)
    chosen(paper, args.only)  # raises ValueError for unknown tables alone, before the model is loaded
    session = _session(args)
    session.begin()
    from ..papers.run import run

    made, failed = run(session, paper, args.only)
    return {"model": session.name, "out": str(args.out), "tables": made, "left_out": failed}


def _session(args: Namespace) -> Session:
    from ...models.families import context_of, find_decoder
    from ...policy.checks import count
    from ..papers.session import Session

    cases = args.cases or (1 if args.quick else 5)
    for option, numbers in (("cases", [cases]), ("lengths", args.lengths or [])):
        for number in numbers:
            count(f"--{option}", number, 1)
    name, model, tokenizer = loaded(args)
    context = context_of(find_decoder(model).config)
    most = LONG[-1] if context is None else context - (LONG_ROOM if args.data else ROOM)
    lengths = args.lengths or (QUICK if args.quick else LONG)
    if args.lengths and max(lengths) > most:
        raise ValueError(f"--lengths {max(lengths)}: the model's context leaves {most} tokens for a prompt; give fewer")
    return Session(
        name, model, tokenizer, args.out, tuple(sorted({min(n, most) for n in lengths})), cases,
        texts=3 if args.quick else 8, repeat=1 if args.quick else 3, bundled=args.model is None, haystack=args.haystack,
        data=args.data, adapter=args.adapter, draft=args.draft,
    )  # fmt: skip
