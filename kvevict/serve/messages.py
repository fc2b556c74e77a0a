"""The messages of a request as a chat template takes them: texts, reasoning and tool calls."""

import json
import re
import sys

from ..asking.prompts import Tokenizer
from .errors import Json, Refused

ROLES = "system", "developer", "user", "assistant", "tool", "function"  # taken even if the template does not name them
DEEPEST = 100  # most levels of nested lists and objects
HALVES = re.compile("[\ud800-\udfff]")  # halves of surrogate pairs


def of_chat(tokenizer: Tokenizer, messages: list[Json]) -> list[Json]:
    """Convert the messages of a request. A developer's message becomes the system's if the template lacks that role.
    Raises Refused without a chat template, and for a role that neither OpenAI nor the template has."""
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
    """Return a tool call's arguments as an object, as templates take them; an empty text is an empty object. Raises
    ValueError for a text that is not JSON or has a `json_fault`. The error's message lacks its subject, the text."""
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
    """Name what is not portable in a value of JSON: a number that no float holds, half of a surrogate pair, or too deep
    nesting; None without a fault. A Python loop lets other threads run, as one long call in C would not."""
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
            elif each is not None and not abs(each) <= sys.float_info.max:  # type: ignore[arg-type]  # NaN is not less
                return "has a number that is not finite, or too large"
        level, depth = below, depth + 1
        if depth >= DEEPEST and any(isinstance(each, (dict, list)) for each in level):
            return f"is nested more than {DEEPEST} deep"
    return None
