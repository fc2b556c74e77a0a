"""Encodes texts and questions as token ids, in the tokenizer's chat template if it has one."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

MARK = "\u0001"  # put beside a message in a chat template, to keep the template from trimming it
MARGIN = 256  # tokens after a cut that may change those before the cut: far more than a tokenizer looks at


class Tokenizer(Protocol):
    """The methods of a model's tokenizer that this package calls."""

    chat_template: str | None
    eos_token_id: int | None

    def __call__(self, text: str, **options: Any) -> Any: ...
    def decode(self, ids: Any, **options: Any) -> str: ...
    def apply_chat_template(self, messages: list[dict], **options: Any) -> str: ...


def check(tokenizer: object, other: str = "") -> None:
    """Raise TypeError for an object that is not a tokenizer; `other` names what else may be given."""
    # A processor is for texts and pictures, and has a tokenizer.
    processor = hasattr(tokenizer, "tokenizer") and not hasattr(tokenizer, "vocab_size")
    if processor or not callable(tokenizer):
        advice = ": give the processor's own, processor.tokenizer" if processor else ""
        raise TypeError(f"tokenizer must be the model's tokenizer{other}, got {type(tokenizer).__name__}{advice}")


def first_ids(
    tokenizer: Tokenizer, text: str, count: int, tokenise: Callable[["Tokenizer", str], list[int]] | None = None
) -> tuple[list[int], bool]:
    """Return (the first `count` ids of a text, whether these are all of its ids). Only the needed part of a long text
    is tokenised, by `ids_of` or another function with its arguments."""
    size, tokenise = 8 * (count + MARGIN), tokenise or ids_of  # in characters
    while True:
        ids, complete = tokenise(tokenizer, text[:size]), size >= len(text)
        if complete or len(ids) >= count + MARGIN:
            return ids[:count], complete and len(ids) <= count
        size *= 2


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenise a text as it is: a special token's name in the text is plain text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def frame(tokenizer: Tokenizer, question: str, opening: str = "", chat: bool = True) -> tuple[list[int], list[int]]:
    """Return (ids before a text, ids after it); the question and the answer's opening follow a text. In a chat
    template, if the tokenizer has one and `chat` is true, the question ends the user's turn and the opening starts the
    assistant's. Raises ValueError for a template that refuses a single user's turn or changes its text."""
    if not (chat and tokenizer.chat_template):
        return tokenizer("")["input_ids"], ids_of(tokenizer, question + opening)
    try:
        parts = rendered(tokenizer, [{"role": "user", "content": MARK + MARK}], "a user's turn alone").split(MARK)
    except ValueError as error:
        raise ValueError(f"{error}; set another chat_template") from None
    if len(parts) != 3:
        raise ValueError("the tokenizer's chat template does not give the user's text once; set another chat_template")
    head, _, tail = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts)
    tail += ids_of(tokenizer, opening.lstrip())
    return head, ids_of(tokenizer, question.rstrip() if opening else question) + tail


def turns_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int], list[int]]:
    """Return the ids before the first user's turn, after a user's turn, and between an answer and the next user's turn.
    Raises ValueError for a chat template that refuses two turns or changes their texts."""
    if not tokenizer.chat_template:
        return tokenizer("")["input_ids"], ids_of(tokenizer, "\nAnswer:"), ids_of(tokenizer, "\n")
    asked = [dict(role=role, content=MARK) for role in ("user", "assistant", "user")]
    parts = rendered(tokenizer, asked, "two turns").split(MARK)
    if len(parts) != 4:
        raise ValueError("the tokenizer's chat template does not give each turn's text once; set another chat_template")
    head, ends, between, _ = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts)
    return head, ends, between


def rendered(tokenizer: Tokenizer, messages: list[dict], what: str, **options: object) -> str:
    """Render messages in the tokenizer's chat template, up to the start of the assistant's turn; the template gets
    `options`. Raises ValueError with the template's error if it refuses the messages, which the error calls `what`."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except ImportError:  # Jinja is missing, and Transformers' error names it
        raise
    except Exception as error:  # Jinja's errors, and any error of a template's expressions
        raise ValueError(f"the tokenizer's chat template refuses {what}: {error}") from None


def line_ended(tokenizer: Tokenizer, tokens: list[int] | torch.Tensor) -> bool:
    """Whether generated ids have ended a line that is not empty."""
    return "\n" in tokenizer.decode(tokens, skip_special_tokens=True).lstrip()


def until_line_end(tokenizer: Tokenizer, start: int) -> list[Callable[..., torch.Tensor]]:
    """Make `generate`'s stopping_criteria for one row, which end it after a line that is not empty; lines count from
    token `start` on."""
    return [lambda ids, scores, **kwargs: torch.tensor([line_ended(tokenizer, ids[0, start:])], device=ids.device)]


LONGEST = 16  # tokens of a piece at most: bytes that are not text may never complete a character


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[list]:
    """Split ids into pieces [text, number of tokens], one for each token or for tokens that share a character. The
    joined texts are the tokenizer's decoding of all ids.

    A token's text is its addition to its predecessors' text, because decoders strip a space at a text's start, and
    bytes of half a character decode to U+FFFD. Only ids are needed, so chat templates and cut text work too.
    """
    made, known, start = [], 0, 0  # ids[known:start]: the previous piece, decoded before the next

    def decode(stop: int) -> str:
        return tokenizer.decode(ids[known:stop], clean_up_tokenization_spaces=False)

    for stop in range(1, len(ids) + 1):
        text = decode(stop)
        if text.endswith("\ufffd") and stop - start < LONGEST and stop < len(ids):
            continue
        made.append([text[len(decode(start)) :], stop - start])
        known, start = start, stop
    return made
