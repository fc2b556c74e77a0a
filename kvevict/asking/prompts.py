"""Encodes texts and questions as token ids, in the tokenizer's chat template if it has one."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

MARK = "\u0001"  # placeholder for a message's text in a chat template, which does not trim it as white space
MARGIN = 256  # tokens beyond the needed ones: cutting a text may change tokens before the cut, but far fewer than these


class Tokenizer(Protocol):
    """The methods of a model's tokenizer that this package calls."""

    chat_template: str | None
    eos_token_id: int | None

    def __call__(self, text: str, **options: Any) -> Any: ...
    def decode(self, ids: Any, **options: Any) -> str: ...
    def apply_chat_template(self, messages: list[dict], **options: Any) -> str: ...


def check(tokenizer: object, other: str = "") -> None:
    """Raise TypeError for an object that is not a tokenizer. The error message ends in `other`, which names what else
    may be given."""
    # A processor, which encodes texts and pictures, is callable too; it contains a tokenizer.
    processor = hasattr(tokenizer, "tokenizer") and not hasattr(tokenizer, "vocab_size")
    if processor or not callable(tokenizer):
        advice = ": give the processor's own, processor.tokenizer" if processor else ""
        raise TypeError(f"tokenizer must be the model's tokenizer{other}, got {type(tokenizer).__name__}{advice}")


def first_ids(
    tokenizer: Tokenizer, text: str, count: int, tokenise: Callable[["Tokenizer", str], list[int]] | None = None
) -> tuple[list[int], bool]:
    """Return (the first `count` ids of a text, whether these are all of its ids). Only the needed part of a long text
    is tokenised, by `tokenise` or, by default, `ids_of`; both take the same arguments."""
    size, tokenise = 8 * (count + MARGIN), tokenise or ids_of  # size: characters to tokenise
    while True:
        ids, complete = tokenise(tokenizer, text[:size]), size >= len(text)
        if complete or len(ids) >= count + MARGIN:
            return ids[:count], complete and len(ids) <= count
        size *= 2


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenise a text without adding special tokens. A special token's name in the text is treated as plain text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def frame(
    tokenizer: Tokenizer, question: str, opening: str = "", chat: bool = True, system: str = ""
) -> tuple[list[int], list[int]]:
    """Return (ids before a text, ids after it). After a text stand the question and the opening of the answer. In a
    chat template, if the tokenizer has one and `chat` is true, the question ends the user's turn and the opening starts
    the assistant's. The `system` prompt, if any, is a turn before these; without a template it opens the prompt. Raises
    ValueError for a template that refuses these turns or changes the user's text."""
    if not (chat and tokenizer.chat_template):
        before = ids_of(tokenizer, f"{system}\n\n") if system else []
        return tokenizer("")["input_ids"] + before, ids_of(tokenizer, question + opening)
    try:
        first = [dict(role="system", content=system)] if system else []
        parts = rendered(tokenizer, [*first, dict(role="user", content=MARK + MARK)], "a user's turn alone").split(MARK)
    except ValueError as error:
        raise ValueError(f"{error}; set another chat_template") from None
    if len(parts) != 3:
        raise ValueError("the tokenizer's chat template does not give the user's text once; set another chat_template")
    head, _, tail = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts)
    tail += ids_of(tokenizer, opening.lstrip())
    return head, ids_of(tokenizer, question.rstrip() if opening else question) + tail


def turns_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int], list[int]]:
    """Return three lists of ids: those before the first user's text, those between a user's text and the answer, and
    those between an answer and the next user's text. Raises ValueError for a chat template that refuses two turns or
    changes their texts."""
    if not tokenizer.chat_template:
        return tokenizer("")["input_ids"], ids_of(tokenizer, "\nAnswer:"), ids_of(tokenizer, "\n")
    asked = [dict(role=role, content=MARK) for role in ("user", "assistant", "user")]
    parts = rendered(tokenizer, asked, "two turns").split(MARK)
    if len(parts) != 4:
        raise ValueError("the tokenizer's chat template does not give each turn's text once; set another chat_template")
    head, ends, between, _ = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts)
    return head, ends, between


def rendered(tokenizer: Tokenizer, messages: list[dict], what: str, **options: object) -> str:
    """Render messages in the tokenizer's chat template, up to the start of the assistant's turn; `options` are passed
    to the template. Raises ValueError with the template's error if the template refuses the messages, which the error
    message calls `what`."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except ImportError:  # Jinja is not installed, as Transformers' error says
        raise
    except Exception as error:  # an error of Jinja, or of an expression in the template
        raise ValueError(f"the tokenizer's chat template refuses {what}: {error}") from None


def line_ended(tokenizer: Tokenizer, tokens: list[int] | torch.Tensor) -> bool:
    """Return whether generated ids have completed a line that is not empty."""
    return "\n" in tokenizer.decode(tokens, skip_special_tokens=True).lstrip()


def until_line_end(tokenizer: Tokenizer, start: int) -> list[Callable[..., torch.Tensor]]:
    """Make a list of stopping_criteria with which `generate`, for one row, stops after the first line that is not
    empty; the lines are those of the tokens from `start` on."""
    return [lambda ids, scores, **kwargs: torch.tensor([line_ended(tokenizer, ids[0, start:])], device=ids.device)]


LONGEST = 16  # most tokens of a piece: bytes that are not text may never complete a character


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[list]:
    """Split ids into pieces [text, number of tokens], each of one token or of several tokens that share a character.
    The joined texts are the tokenizer's decoding of all ids.

    A piece's text is what it adds to the decoded text of the piece before it, because decoders strip a space at the
    start of a text and decode the bytes of half a character to U+FFFD. The function needs the ids alone, so it works
    for chat templates and cut texts too.
    """
    made, known, start = [], 0, 0  # ids[known:start]: the previous piece, decoded again together with the next one

    def decode(stop: int) -> str:
        return tokenizer.decode(ids[known:stop], clean_up_tokenization_spaces=False)

    for stop in range(1, len(ids) + 1):
        text = decode(stop)
        if text.endswith("\ufffd") and stop - start < LONGEST and stop < len(ids):
            continue
        made.append([text[len(decode(start)) :], stop - start])
        known, start = start, stop
    return made
