"""Converts the messages of a request to what a chat template takes: texts, reasoning and tool calls."""

import json
import re
import sys

from ..asking.prompts import Tokenizer
from .errors import Json, Refused

ROLES = (
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
)  # accepted even if no template names them
DEEPEST = 100  # most levels of lists and objects inside one another
HALVES = re.compile("[\ud800-\udfff]")  # a half of a surrogate pair, which no UTF-8 text can contain


def of_chat(tokenizer: Tokenizer, messages: list[Json]) -> list[Json]:
    """Convert the messages of a request for the chat template. The role developer becomes system if the template does
    not name it. Raises Refused if the model has no chat template, and for a role that is neither in `ROLES` nor named
    in the template."""
    template = str(tokenizer.chat_template)
    if not tokenizer.chat_template:
        raise Refused(400, "the model has no chat template: ask at /v1/completions")
    for role in (message["role"] for message in messages):
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            sentence = f"messages: {role[:200]!r} is not a role: give {', '.join(ROLES[:-1])} or {ROLES[-1]}"
            raise Refused(400, sentence, param="messages")
    return [_taken(message, template) for message in messages]


def _taken(message: Json, template: str) -> Json:
    role, content = message["role"], message.get("content") or ""
    if role == "developer" and "developer" not in template:
        role = "system"
    text = content if isinstance(content, str) else " ".join(part["text"] for part in content)
    taken = dict(role=role, content=text)
    for name in ("tool_call_id", "reasoning_content", "name"):
        if name in message:
            taken[name] = message[name]
    if message.get("tool_calls"):
        taken["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return taken


def _call(call: Json) -> Json:
    function = call["function"]
    return {**call, "function": {**function, "arguments": arguments_of(function["arguments"])}}


def arguments_of(arguments: object) -> object:
    """Parse the JSON text of a tool call's arguments, because chat templates take an object; an empty text gives {}.
    Arguments that are no text are returned unchanged. Raises ValueError for a text that is not JSON, or not portable
    (`json_fault`), with a message such as "is not JSON", which lacks its subject."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if fault := json_fault(value):
        raise ValueError(fault)
    return value


def json_fault(value: object) -> str | None:
    """Say why a JSON value is not portable: a number beyond the range of floats, half of a surrogate pair, or lists and
    objects nested too deep. None: it is portable. The loop is in Python so that other threads can run meanwhile; during
    one long call of C code they could not."""
    level, depth = [value], 0
    while level:
        below: list = []
        for each in level:
            if isinstance(each, str):
                if not each.isascii() and HALVES.search(each):
                    return "has half of a surrogate pair: send whole characters"
            elif isinstance(each, dict):
                below.extend(each)
                below.extend(each.values())
            elif isinstance(each, list):
                below.extend(each)
            elif each is not None and not abs(each) <= sys.float_info.max:  # type: ignore[arg-type]  # true for NaN
                return "has a number that is not finite, or too large"
        level, depth = below, depth + 1
        if depth >= DEEPEST and any(isinstance(each, (dict, list)) for each in level):
            return f"is nested more than {DEEPEST} deep"
    return None
