"""Finds the texts with which a chat template surrounds a user's turn, and a tool's result and schemas in this turn."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .prompts import Tokenizer, rendered

MARK = "\ue000"  # placeholder for a message's text when a template is tried; JSON does not need to escape it


def _tool(name: str) -> dict:
    schema = dict(type="object", properties={name: dict(type="string", description=name)}, required=[name])
    return dict(type="function", function=dict(name=name, description=name, parameters=schema))


# Two tools that share no text, so that what a template writes for both is the template's own.
TOOLS = _tool("a"), dict(reversed(_tool("b").items()))


@dataclass(frozen=True)
class Turns:
    """The fixed texts of a chat template; each is "" if it is unknown or if there is no template.

    opened   the text that opens a user's turn
    ends     the text that ends a user's turn
    tail     the text that ends the last turn and opens the answer
    result   the text that follows `opened` if the turn is a tool's result instead of the user's words
    schemas  the two texts at the start and the end of the tools' schemas, if a turn has them before the user's words
    """

    opened: str = ""
    ends: str = ""
    tail: str = ""
    result: str = ""
    schemas: tuple[str, str] = "", ""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Turns":
        if not getattr(tokenizer, "chat_template", None):
            return cls()
        user, answer = ({"role": role, "content": MARK} for role in ("user", "assistant"))
        try:
            head, tail = rendered(tokenizer, [user], "a user's turn").split(MARK)
        except ValueError:
            return cls()
        try:
            _, end, begin, _ = rendered(tokenizer, [user, answer, user], "a second turn").split(MARK)
        except ValueError:  # the template refuses a second turn
            opened, ends = head, tail
        else:
            # Tokens are compared, not characters: those shared by "<s>[INST]" and "</s>[INST]" begin within a token.
            both = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (head, begin))
            opened = tokenizer.decode(common(*both, last=True), clean_up_tokenization_spaces=False)
            ends = common(tail, end)
        # A text of white space alone cannot delimit turns: messages have white space, too.
        opened, ends, tail = (mark if mark.strip() else "" for mark in (opened, ends, tail))
        if not opened:
            return cls(opened, ends, tail)
        schemas = _before(tokenizer, opened, [[user]] * len(TOOLS))
        for written in (dict, json.dumps):  # templates take a call's arguments as a dict or as JSON text
            result, _ = _before(tokenizer, opened, [[user, *_called(tool, written)] for tool in TOOLS])
            if result.strip():
                break
        return cls(opened, ends, tail, result.strip(), schemas if schemas[0].strip() else ("", ""))

    def last(self, text: str) -> tuple[str, str]:
        """Split a prompt into (the last user's turn, the text after it); ("", "") if there is no user's turn."""
        turns = text.split(self.opened) if self.opened else ["", text]
        results = (bool(self.result) and turn.lstrip().startswith(self.result) for turn in turns[:0:-1])
        at = next((len(turns) - 1 - n for n, result in enumerate(results) if not result), 0)
        if not at:
            return "", ""
        turn, _, rest = turns[at].partition(self.ends) if self.ends else (turns[at], "", "")
        begin, end = self.schemas
        if begin and turn.startswith(begin):
            turn = turn.rpartition(end)[2]
        return turn, self.opened.join([rest, *turns[at + 1 :]])

    def inside(self, text: str, special: Iterable[str]) -> tuple[str, str]:
        """Split a text that goes on inside a user's turn into (the rest of the turn, the text after it); ("", "") if it
        does not: if no turn ends in it, or another message begins before, which one of the `special` tokens shows."""
        turn, end, rest = text.partition(self.ends) if self.ends else ("", "", "")
        return (turn, rest) if end and not any(token in turn for token in special) else ("", "")


def _called(tool: dict, written: Callable[[dict], object]) -> list[dict]:
    """Return two messages: the assistant's call of a tool, with its arguments encoded by `written`, and the tool's
    result."""
    name, known = tool["function"]["name"], tool["function"]["name"] * 9  # Mistral's call ids have nine characters
    call = dict(id=known, type="function", function=dict(name=name, arguments=written({name: name})))
    return [
        dict(role="assistant", content="", tool_calls=[call]),
        dict(role="tool", name=name, tool_call_id=known, content=MARK),
    ]


def _before(tokenizer: Tokenizer, opened: str, chats: list[list[dict]]) -> tuple[str, str]:
    """Render each chat with one of `TOOLS`, and return the longest (prefix, suffix) that the renderings share in the
    text between the last user turn's opening and the turn's content. Returns ("", "") if a template refuses a chat or
    writes the content outside a user's turn."""
    found = []
    for chat, tool in zip(chats, TOOLS, strict=True):
        try:
            *_, before, _ = rendered(tokenizer, chat, "a tool", tools=[tool]).split(MARK)
        except ValueError:
            return "", ""
        _, here, text = before.rpartition(opened)
        if not here:
            return "", ""
        found.append(text)
    a, b = found
    return common(a, b), common(a, b, last=True)


def common(a: Any, b: Any, last: bool = False) -> Any:
    """Return the longest common prefix of two texts or lists or, if `last`, their longest common suffix."""
    if last:
        return common(a[::-1], b[::-1])[::-1]
    return a[: next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))]
