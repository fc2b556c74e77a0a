"""Texts and questions as token ids, in the tokenizer's chat template if it has one."""

from collections.abc import Callable
from typing import Any

import torch

MARK = "\u0001"  # put beside a message in a chat template, to keep the template from trimming it
MARGIN = 256  # tokens after a cut that a tokenizer may look at, far more than it does


def check(tokenizer: Any, other: str = "") -> None:
    """Raise TypeError for an object that is not a tokenizer; `other` names what else may be given."""
    processor = hasattr(tokenizer, "tokenizer") and not hasattr(tokenizer, "vocab_size")  # of texts and pictures
    if processor or not callable(tokenizer):
        advice = ": give the processor's own, processor.tokenizer" if processor else ""
        raise TypeError(f"tokenizer must be the model's tokenizer{other}, got {type(tokenizer).__name__}{advice}")


def first_ids(
    tokenizer: Any, text: str, count: int, tokenise: Callable[[Any, str], list[int]] | None = None
) -> tuple[list[int], bool]:
    """(the first `count` ids of a text, whether these are all of its ids). Of a long text only the needed part is
    tokenised. tokenise: `ids_of`, or a function with its arguments."""
    letters, tokenise = 8 * (count + MARGIN), tokenise or ids_of
    while True:
        ids, whole = tokenise(tokenizer, text[:letters]), letters >= len(text)
        if whole or len(ids) >= count + MARGIN:
            return ids[:count], whole and len(ids) <= count
        letters *= 2


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text as it is: a special token's name in it is text like any other."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def frame(tokenizer: Any, question: str, opening: str = "", chat: bool = True) -> tuple[list[int], list[int]]:
    """(ids before a text, ids after it).

    After the text come the question and the answer's opening. In a chat template, if the tokenizer has one and `chat`
    is true, the question ends the user's turn and the opening starts the assistant's. Raises ValueError for a template
    that refuses a single user's turn or changes it.
    """
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


def turns_frame(tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """Ids before the first user's turn, after a user's turn, and between an answer and the next user's turn. Raises
    ValueError for a chat template that refuses two turns or changes them."""
    if not tokenizer.chat_template:
        return tokenizer("")["input_ids"], ids_of(tokenizer, "\nAnswer:"), ids_of(tokenizer, "\n")
    asked = [dict(role=role, content=MARK) for role in ("user", "assistant", "user")]
    parts = rendered(tokenizer, asked, "two turns").split(MARK)
    if len(parts) != 4:
        raise ValueError("the tokenizer's chat template does not give each turn's text once; set another chat_template")
    head, ends, between, _ = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts)
    return head, ends, between


def rendered(tokenizer: Any, messages: list[Any], what: str, **options: Any) -> str:
    """The messages in the tokenizer's chat template, up to the start of the assistant's turn. Raises ValueError with
    the template's message if it refuses them; `what` names the messages there. options go to the template."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except ImportError:  # the template engine is missing; Transformers' error names it
        raise
    except Exception as error:  # a template raises the engine's errors and those of its expressions
        raise ValueError(f"the tokenizer's chat template refuses {what}: {error}") from None


def line_ended(tokenizer: Any, tokens: list[int] | torch.Tensor) -> bool:
    """Whether generated ids have ended a line that is not empty."""
    return "\n" in tokenizer.decode(tokens, skip_special_tokens=True).lstrip()


def until_line_end(tokenizer: Any, start: int) -> list[Callable[..., torch.Tensor]]:
    """For `generate(stopping_criteria=...)` of one row: stop at the end of a line after the first `start` tokens."""
    return [lambda ids, scores, **kwargs: torch.tensor([line_ended(tokenizer, ids[0, start:])], device=ids.device)]


LONGEST = 16  # tokens of a piece: characters may be split in a chain, but bytes that are not text need an end


def pieces(tokenizer: Any, ids: list[int]) -> list[list[Any]]:
    """[text, number of tokens] of each token; tokens that share one character are one piece. The joined texts are the
    tokenizer's decoding of all ids.

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
