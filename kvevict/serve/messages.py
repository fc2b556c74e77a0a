"""The messages of a request as a chat template takes them: texts, with reasoning and calls of tools."""

import json
from typing import Any

from .errors import Refused

ITEMS = "message", "reasoning", "function_call", "function_call_output"  # of a response


def of_chat(tokenizer: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make the messages of a chat's `messages`. A developer's is a system's if the template does not know that role.
    Raises Refused without a chat template."""
    if not tokenizer.chat_template:
        raise Refused(400, "the model has no chat template: ask at /v1/completions")
    return [_taken(tokenizer, message) for message in messages]


def of_input(tokenizer: Any, asked: str | list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Make the messages of a response's `instructions` and `input`."""
    if isinstance(asked, str):
        asked = [dict(role="user", content=asked)]
    elif "role" not in asked[0] and asked[0].get("type") not in ITEMS:
        asked = [dict(role="user", content=asked)]  # parts of one message
    messages: list = []
    reasoning = {}
    for item in asked:
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning = dict(reasoning_content=text_of(item.get("content", [])))
        elif kind == "function_call_output":
            messages.append(dict(role="tool", tool_call_id=item["call_id"], content=item["output"]))
        elif kind == "function_call":
            call = dict(
                id=item["call_id"], type="function", function=dict(name=item["name"], arguments=item["arguments"])
            )
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append(dict(role="assistant", content="") | reasoning)
                reasoning = {}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif item["role"] == "assistant":
            messages.append(item | reasoning)
            reasoning = {}
        else:
            messages.append(item)
    taken = of_chat(tokenizer, messages)
    if instructions and taken[0]["role"] == "system":  # templates have one
        taken[0]["content"] = f"{instructions}\n\n{taken[0]['content']}"
    elif instructions:
        taken.insert(0, dict(role="system", content=instructions))
    return taken


def _taken(tokenizer: Any, message: dict) -> dict:
    role, content = message["role"], message.get("content")
    if role == "developer" and "developer" not in str(tokenizer.chat_template):
        role = "system"
    taken = dict(role=role, content=text_of(content or ""))
    for name in ("tool_call_id", "reasoning_content", "name"):
        if name in message:
            taken[name] = message[name]
    if message.get("tool_calls"):
        taken["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return taken


def _call(call: dict) -> dict:
    """Make the arguments of a tool call an object, as templates take them."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def text_of(content: str | list[dict[str, Any]]) -> str:
    """Join a list of parts; a text is returned as it is."""
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)


def tools_of(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Nest the functions of tools as chat completions do; those of responses are flat."""
    return [
        tool if "function" in tool else dict(type="function", function={k: v for k, v in tool.items() if k != "type"})
        for tool in tools
    ]
