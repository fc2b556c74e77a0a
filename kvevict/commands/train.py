import contextlib
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

from . import add_model, check_folder, command, loaded, read_text


@command
def train(parser: ArgumentParser, argv: list[str]) -> dict[str, object] | None:
    """Train a lookahead adapter on prompts, or gates on a text, for `lookahead:adapter=OUT` or `gate:gates=OUT`."""
    add_model(parser)
    parser.add_argument(
        "--kind", default="lookahead", choices=["lookahead", "gates"], help="rows and their adapter (default), or gates"
    )
    parser.add_argument(
        "--data", required=True,
        help="JSONL of `prompt` and optionally `response`, or of `messages`; for gates a text, - is standard input",
    )  # fmt: skip
    parser.add_argument("--out", required=True, help="folder for the result; continued if begun")
    parser.add_argument("--held-out", type=int,
                        help="last pairs, or pieces of the text, kept from training to validate with; default: no "
                        "pairs, an eighth of the pieces")  # fmt: skip
    rows = parser.add_argument_group("lookahead")
    rows.add_argument("--steps", type=int, help="optimizer steps; more lengthen a finished training; default 7600")
    rows.add_argument("--seed", type=int, help="of first weights and the order of pairs; default 0")
    rows.add_argument("--batch", type=int, help="pairs per step, over all processes; default 32")
    rows.add_argument("--lr", type=float, help="default 2e-4 for Qwen, 1e-3 for others")
    rows.add_argument("--tokens", type=int, help="lookahead rows; default 32")
    rows.add_argument("--rank", type=int, help="of the LoRA; default 8")
    rows.add_argument("--alpha", type=float, help="its scale is alpha / rank; default 32")
    rows.add_argument("--targets", nargs="+", help="all (default), qv, none, or linear layers")
    rows.add_argument(
        "--target", choices=["response", "repeat"],
        help="rows learn the attention of the response (default) or of the prompt read again",
    )  # fmt: skip
    rows.add_argument("--max-prompt", type=int, help="tokens at most; default 16384")
    rows.add_argument("--max-response", type=int, help="tokens at most; default 512")
    rows.add_argument("--responses", choices=["given", "model"],
                      help="those of the data (default), or all written by the model")  # fmt: skip
    rows.add_argument("--temperature", type=float, help="sample the model's responses; default: greedy")
    rows.add_argument("--validate-every", type=int, help="steps; default 100")
    rows.add_argument("--save-every", type=int, help="steps between checkpoints; default 100")
    gates = parser.add_argument_group("gates")
    gates.add_argument(
        "--label", choices=["kvzip", "kvzip+"], help="the policy with the numbers to learn; default kvzip"
    )
    gates.add_argument("--length", type=int, help="tokens of a piece at most; default 1500")
    gates.add_argument("--limit", type=int, help="tokens that are read at most, spread evenly; default 30000")
    args = parser.parse_args(argv)
    known = {group: [action.dest for action in group._group_actions] for group in (rows, gates)}
    chosen, other = (gates, rows) if args.kind == "gates" else (rows, gates)
    for option in known[other]:
        if getattr(args, option) is not None:
            raise ValueError(f"--{option.replace('_', '-')} is not of --kind {args.kind}: leave it out")
    own = {option: getattr(args, option) for option in known[chosen] if getattr(args, option) is not None}
    return (_gates if args.kind == "gates" else _lookahead)(args, own)


def _lookahead(args: Namespace, options: dict) -> dict | None:
    from ..train.lookahead import train
    from ..train.lookahead.training import LOG, check_installed
    from ..train.processes import Processes

    held_out, targets = args.held_out or 0, options.pop("targets", ["all"])
    check_installed(held_out)
    if not Path(args.data).is_file():
        raise ValueError(f"--data {args.data} does not exist; give JSON lines with a prompt each")
    check_folder("--out", args.out)
    name, model, tokenizer = loaded(args)
    targets = targets[0] if len(targets) == 1 and "_" not in targets[0] else targets
    options |= dict(tokenizer=tokenizer, targets=targets, held_out=held_out)
    log = Path(args.out, LOG)
    before = log.read_text(encoding="utf-8") if log.exists() else ""
    with _resumable(args.out):
        adapter = train(model, args.data, args.out, **options)
    if Processes().rank > 0:
        return None  # the first process prints and returns the result
    parameters, after = sum(p.numel() for p in adapter.parameters()), log.read_text(encoding="utf-8")
    last = json.loads(after.splitlines()[-1])
    told = f"{args.out}: adapter of {parameters:,} parameters; step {last['step']}, loss {last['loss']:.4f}"
    if valid := last.get("valid"):
        told += f"; on held-out pairs loss {valid['loss']:.4f}, recall {valid['recall']:.2f}, tau {valid['tau']:.2f}"
    print(told + "; it was finished before, nothing was left to train" * (after == before))
    return {"model": name, "out": args.out, "parameters": parameters}


def _gates(args: Namespace, options: dict) -> dict | None:
    from ..train.gates import train
    from ..train.processes import Processes

    text = read_text(args.data, "--data")
    check_folder("--out", args.out)
    name, model, tokenizer = loaded(args)
    options |= dict(tokenizer=tokenizer, held_out=args.held_out)
    with _resumable(args.out):
        about = train(model, [text], args.out, **options).about
    if Processes().rank > 0:
        return None  # the first process prints and returns the result
    held, told = about.get("held_out"), "nothing was held out to measure them on"
    if held is not None:
        shares = ", ".join(f"{recall:.2f} at {share}" for share, recall in held["recall"].items())
        told = f"on {held['tokens']} others R^2 {held['r2']:.2f}, recall {shares}"
    print(f"{args.out}: gates of {about['tokens']} tokens; {told}")
    return {"model": name, "out": args.out, "tokens": about["tokens"], "held_out": held}


@contextlib.contextmanager
def _resumable(out: str) -> Iterator[None]:
    """Make the command print how to continue the training if Ctrl-C ends the block."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the same command goes on from the last checkpoint in {out}") from None
