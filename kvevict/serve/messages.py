"""The messages of a request as a chat template takes them: texts, with reasoning and calls of tools."""

import json
from collections.abc import Iterable
from typing import Any

from .errors import Refused

ITEMS = "message", "reasoning", "function_call", "function_call_output"  # of a response
ROLES = "system", "developer", "user", "assistant", "tool", "function"  # of messages that any template is given
REASONING, CALLS = "reasoning_content", "tool_calls"  # of a message of the assistant


def of_chat(tokenizer: Any, messages: list[dict[str, Any]], field: str = "messages") -> list[dict[str, Any]]:
    """Make the messages of a chat's `messages`, or of another field. A developer's is a system's if the template does
    not know that role. Raises Refused without a chat template, and for a role that neither OpenAI nor the template
    has."""
    template = str(tokenizer.chat_template)
    if not tokenizer.chat_template:
        raise Refused(400, "the model has no chat template: ask at /v1/completions")
    for role in (message["role"] for message in messages):
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            sentence = f"{field}: {role[:200]!r} is not a role: give {', '.join(ROLES[:-1])} or {ROLES[-1]}"
            raise Refused(400, sentence, param=field)
    return [_taken(tokenizer, message) for message in messages]


def of_input(tokenizer: Any, asked: str | list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Make the messages of a response's `instructions` and `input`."""
    if isinstance(asked, str):
        asked = [dict(role="user", content=asked)]
    elif "role" not in asked[0] and asked[0].get("type") not in ITEMS:
        asked = [dict(role="user", content=asked)]  # parts of one message
    apart = REASONING in str(tokenizer.chat_template)
    taken = of_chat(tokenizer, _joined(filter(None, map(_message, asked)), apart), "input")
    if instructions and taken[0]["role"] == "system":  # templates have one
        taken[0]["content"] = f"{instructions}\n\n{taken[0]['content']}"
    elif instructions:
        taken.insert(0, dict(role="system", content=instructions))
    return taken


def _message(item: dict) -> dict:
    """Make a message of an item; an empty one of reasoning without letters."""
    kind = item.get("type", "message")
    if kind == "message":
        return item
    if kind == "function_call_output":
        return dict(role="tool", tool_call_id=item["call_id"], content=item["output"])
    said: dict = dict(role="assistant", content="")
    if kind == "reasoning":
        thought = text_of(item.get("content") or item.get("summary", []))
        return said | {REASONING: thought} if thought else {}
    function = dict(name=item["name"], arguments=item["arguments"])
    return said | {CALLS: [dict(id=item["call_id"], type="function", function=function)]}


def _joined(messages: Iterable[dict], apart: bool) -> list:
    """Join messages of the assistant that follow each other to such as templates write: reasoning, a text, calls.
    apart: whether reasoning that comes later begins another message, which tells a template without it nothing."""
    made: list = []
    for message in messages:
        last, new = made[-1] if made else {}, _held(message)
        turn = message["role"] == last.get("role") == "assistant"
        if turn and (_held(last) == {REASONING} or new == {CALLS} or (new == {REASONING} and not apart)):
            said: dict = dict(content=last.get("content") or message.get("content"))
            said[REASONING] = "\n\n".join(each[REASONING] for each in (last, message) if each.get(REASONING))
            said[CALLS] = [*last.get(CALLS, []), *message.get(CALLS, [])]
            made[-1] = last | message | {name: value for name, value in said.items() if value}
        else:
            made.append(message)
    return made


def _held(message: dict) -> set:
    return {name for name in (REASONING, "content", CALLS) if message.get(name)}


def _taken(tokenizer: Any, message: dict) -> dict:
    role, content = message["role"], message.get("content")
    if role == "developer" and "developer" not in str(tokenizer.chat_template):
        role = "system"
    taken = dict(role=role, content=text_of(content or ""))
    for name in ("tool_call_id", REASONING, "name"):
        if name in message:
            taken[name] = message[name]
    if message.get(CALLS):
        taken[CALLS] = [_call(call) for call in message[CALLS]]
    return taken


def _call(call: dict) -> dict:
    function = call["function"]
    return {**call, "function": {**function, "arguments": arguments_of(function["arguments"])}}


def arguments_of(arguments: object) -> object:
    """The arguments of a tool call as an object, as templates take them; without letters it is empty. Raises ValueError
    or RecursionError for a text that is not JSON."""
    return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments


def text_of(content: str | list[dict[str, Any]]) -> str:
    """Join a list of parts; a text is returned as it is."""
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)


def tools_of(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Nest the functions of tools as chat completions do; those of responses are flat."""
    return [
        tool if "function" in tool else dict(type="function", function={k: v for k, v in tool.items() if k != "type"})
        for tool in tools
    ]
