"""Loads the commands that measure, and adds the arguments that several of them have."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from ...commands import loaded, read_text, words
from ...policy.registry import load_folder

if TYPE_CHECKING:
    import torch

    from ...asking.prompts import Tokenizer
    from ..analysis.run import EncodedPrompt


def add_question(
    parser: argparse.ArgumentParser, new_tokens: int | None, needed: bool = True, several: str = ""
) -> None:
    """Add a question and its options to a command's parser. If the command takes several questions, `several` is the
    end of the help text, which says what they mean."""
    told = "" if needed else "; default: made-up facts"
    default = "as long as the right one needs, 32 with --file" if new_tokens is None else new_tokens
    parser.add_argument("question", nargs="+" if several else None if needed else "?", type=words,
                        help=f"question about the text (or words to continue it with){several or told}")  # fmt: skip
    parser.add_argument("--file", required=needed, help=f"text to read; - is standard input{told}")
    parser.add_argument(
        "--opening", type=words, default="",
        help="words that the answer begins with, before the model goes on; the answer then ends with its line",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, help="prompt tokens at most: cuts the text's end; default: the context")
    parser.add_argument("--max-new-tokens", type=int, default=new_tokens,
                        help=f"length of the answer at most; default {default}")  # fmt: skip


def load_prompts(
    args: argparse.Namespace, questions: list[str]
) -> tuple[str, torch.nn.Module, Tokenizer, list[EncodedPrompt]]:
    """Load (name, model, tokenizer, an `EncodedPrompt` for each question) by the arguments that `add_model` and
    `add_question` added."""
    from ...policy.checks import count
    from ..analysis.run import encode

    count("--max-new-tokens", args.max_new_tokens, 1)
    text = read_text(args.file)
    if args.model is None:
        print("the bundled model finds names and numbers such as \"The code of Naislet is 364735.\" and little else; "
              "give --model for other texts and questions", file=sys.stderr)  # fmt: skip
    name, model, tokenizer = loaded(args)
    limit = room(model, args.max_new_tokens, args.limit)
    return name, model, tokenizer, [encode(tokenizer, text, each, limit, args.opening) for each in questions]


def room(model: torch.nn.Module, new_tokens: int, limit: int | None = None) -> int | None:
    """Return the largest number of prompt tokens that --limit and the model's context allow; the context must also hold
    the answer's `new_tokens`. None if neither sets a limit."""
    from ...models.families import context_of, find_decoder

    context = context_of(find_decoder(model).config)
    if context is None:
        return limit
    if new_tokens >= context:
        raise ValueError(
            f"--max-new-tokens {new_tokens}: the model's context is {context} tokens; give at most {context - 1}"
        )
    return min(context if limit is None else limit, context - new_tokens)


load_folder(__name__)
