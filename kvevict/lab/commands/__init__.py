"""The commands that measure, and the arguments that only they have."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ...commands import model_name, read_text, words
from ...policy.registry import load_folder
from ...policy.text import parse_policy

if TYPE_CHECKING:
    from ...policy.policy import Policy
    from ..analysis.run import Prompt


def add_observe(parser: argparse.ArgumentParser, more: str = "") -> None:
    parser.add_argument("--observe", type=observed, metavar="question|asked|N",
                        help="rows of windows and probes: all from the question on, or N rows up to the question's end "
                        "and all after it; asked: probes are the question's tokens alone, at any place; at most half "
                        f"the budget; default: as the policy says{more}")  # fmt: skip


def observed(text: str) -> int | str:
    """The value of `--observe`, as `kvevict.lab.analysis.run.Prompt.observed` takes it."""
    if text not in ("question", "asked") and not (text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not 'question', 'asked' or a number of rows; give one of them")
    return int(text) if text.isdigit() else text


def add_question(parser: argparse.ArgumentParser, new_tokens: int | None, needed: bool = True) -> None:
    told = "" if needed else "; default: made-up facts"
    default = "as long as the right one needs, 32 with --file" if new_tokens is None else new_tokens
    parser.add_argument("question", nargs=None if needed else "?", type=words,
                        help=f"question about the text (or words to continue it with){told}")  # fmt: skip
    parser.add_argument("--file", required=needed, help=f"text to read; - is standard input{told}")
    parser.add_argument(
        "--opening", type=words, default="",
        help="words that the answer begins with, before the model goes on; the answer then ends with its line",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, help="prompt tokens at most: cuts the text's end; default: the context")
    parser.add_argument("--max-new-tokens", type=int, default=new_tokens,
                        help=f"length of the answer at most; default {default}")  # fmt: skip
    add_observe(parser)


def load_prompt(args: argparse.Namespace) -> tuple[str, Any, Any, Prompt]:
    """(name, model, tokenizer, `Prompt`) of a command with the arguments of `add_model` and `add_question`."""
    from ...models import load_model
    from ...policy.checks import count
    from ..analysis.run import encode

    count("--max-new-tokens", args.max_new_tokens, 1)
    text, name = read_text(args.file), model_name(args)
    model, tokenizer = load_model(name, args.dtype, args.device)
    limit = room(model, args.max_new_tokens, args.limit)
    return name, model, tokenizer, encode(tokenizer, text, args.question, limit, args.opening)


def room(model: Any, new_tokens: int, limit: int | None = None) -> int | None:
    """The largest number of prompt tokens that leaves room for the answer: `--limit`, or by the model's context; None
    without either."""
    context = getattr(model.config, "max_position_embeddings", None)
    if context is None:
        return limit
    if new_tokens >= context:
        raise ValueError(
            f"--max-new-tokens {new_tokens}: the model's context is {context} tokens; give at most {context - 1}"
        )
    return context - new_tokens if limit is None else min(limit, context - new_tokens)


def observing(policies: dict[str, Policy], model: Any, prompt: Prompt, observe: int | str | None) -> dict[str, Policy]:
    """The policies for a model (`in_slots`), with `--observe` applied, except to options that a policy's text names."""
    from ...patch import in_slots
    from ..analysis.run import observe as observed

    policies = {text: in_slots(policy, model) for text, policy in policies.items()}
    if observe is None:
        return policies
    rows, tokens = prompt.observed(observe), len(prompt.context + prompt.question)
    return {text: observed(policy, rows, tokens, parse_policy(text)[1]) for text, policy in policies.items()}


load_folder(sys.modules[__name__])
