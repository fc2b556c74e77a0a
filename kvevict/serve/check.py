"""Checks the parts of a request's body that the table in fields.py does not describe."""

import json
import re
from typing import Any

from .errors import Json, Refused, of_field
from .fields import FLAG, NAMES, is_number, is_whole, number, whole
from .messages import arguments_of, json_fault

PROMPTS = 128  # most prompts in one request to /v1/completions
SAMPLING = {  # entries of the field `generation_config` that the server uses (it ignores others) -> allowed values
    "temperature": number(0.01, 2), "top_p": number(0.01, 1), "min_p": number(0, 1), "max_new_tokens": whole(1),
    "repetition_penalty": number(0.1, 10), "top_k": whole(0), "do_sample": FLAG,
}  # fmt: skip
TEMPLATE = re.compile(r"enable_[a-z_]+|thinking|reasoning_effort|date_string")


def parsed(data: bytes, what: str = "the body") -> Json:
    """Parse a JSON object and drop its nulls, which clients write for fields that are not set (pydantic's
    `model_dump()`). Raises Refused if the data is not a JSON object, or not portable (`json_fault`). what: the data's
    name in error messages."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise Refused(400, f"{what} is not JSON") from None
    if not isinstance(body, dict):
        raise Refused(400, f"{what} is not a JSON object")
    _must(json_fault([*body]) is None, f"{what} has a field whose name has half of a surrogate pair")
    for name, value in body.items():
        fault = json_fault(value)
        _must(fault is None, f"{name[:200]} {fault}")
    return {name: _without_nulls(value) for name, value in body.items() if value is not None}


def _without_nulls(value: object, depth: int = 2) -> Any:
    """Drop nulls from the objects in a value, down to those nested `depth` levels inside the outermost object. The
    default reaches a tool call's `function`, but not its arguments; of a tool's schema it reaches the top level."""
    if isinstance(value, dict):
        kept = {name: each for name, each in value.items() if each is not None}
        return {name: _without_nulls(each, depth - 1) for name, each in kept.items()} if depth else kept
    return [_without_nulls(each, depth) for each in value] if isinstance(value, list) else value


def chat(body: Json, vocabulary: int, template: str | None) -> None:
    """Raise Refused for a body of /v1/chat/completions that cannot be answered. vocabulary: number of token ids that
    the model has; template: the model's chat template."""
    _generation(body, vocabulary)
    kwargs = body.get("chat_template_kwargs", {})
    fits = isinstance(kwargs, dict) and all(isinstance(value, (bool, str)) for value in kwargs.values())
    _must(fits and all(map(TEMPLATE.fullmatch, kwargs)), "chat_template_kwargs may hold enable_thinking and the like")
    fits = body.get("reasoning_effort") is None or "reasoning_effort" in str(template)
    _must(fits, "reasoning_effort is not supported: the model's chat template does not have it")
    _tools(body.get("tools", []))
    messages = body.get("messages", [])
    _must(isinstance(messages, list) and messages, "messages must be a list of messages, and not empty")
    for message in messages:
        _must(isinstance(message, dict) and isinstance(message.get("role"), str), "messages: each needs a role")
        _content(message.get("content") or [])
        _calls(message.get("tool_calls", []))
    _must(body.get("logprobs") or not body.get("top_logprobs"), "top_logprobs needs logprobs")


def completion(body: Json, vocabulary: int, template: str | None) -> None:
    """Raise Refused for a body of /v1/completions that cannot be answered, and replace its prompt by a list of
    prompts."""
    _generation(body, vocabulary)
    prompt: Any = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) and prompt and not is_whole(prompt[0]) else [prompt]
    body["prompt"] = prompts
    _must(len(prompts) <= PROMPTS, f"prompt must have at most {PROMPTS} prompts")
    for each in prompts:
        ids = isinstance(each, list) and all(map(is_whole, each))
        _must(each and (ids or isinstance(each, str)), "prompt must be a text or its ids, or a list of such, not empty")
        _must(not ids or 0 <= min(each) <= max(each) < vocabulary, "prompt has ids that the model does not know")


def _generation(body: Json, vocabulary: int) -> None:
    bias = body.get("logit_bias", {})
    fits = isinstance(bias, dict) and all(
        re.fullmatch(r"0|[1-9][0-9]{0,8}", key) and int(key) < vocabulary and is_number(value, -100, 100)
        for key, value in bias.items()
    )
    _must(fits, "logit_bias must give token ids numbers from -100 to 100")
    _must(not body.get("stream_options") or body.get("stream"), "stream_options are of a stream: give stream as well")


def _tools(tools: Any) -> None:
    _must(isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools), "tools must be a list of objects")
    for tool in tools:
        function: Any = tool.get("function") if tool.get("type", "function") == "function" else None
        fits = isinstance(function, dict) and isinstance(function.get("name"), str)
        _must(fits, 'tools must be functions with names: {"type": "function", "function": {"name": ...}}')
        _must(isinstance(function.get("parameters", {}), dict), "tools: parameters must be a JSON schema")
        strict = "tools: strict is not supported: leave it out, or use vLLM's server, where calls follow their schemas"
        _must(not function.get("strict"), strict)


def sampling(body: Json) -> Json:
    """Return the entries of a body's field `generation_config` that the server uses (`SAMPLING`). The field is a JSON
    text, as the client `transformers chat` sends it."""
    with of_field("generation_config"):
        config = parsed(body.get("generation_config", "{}").encode(), "generation_config")
    found = {name: config[name] for name in SAMPLING if name in config}
    _must(all(SAMPLING[name].fit(found[name]) for name in found), "generation_config has numbers that cannot be")
    return found


def _content(content: Any) -> None:
    _must(isinstance(content, (str, list)), "messages: content must be a text or a list of parts")
    for part in content if isinstance(content, list) else ():
        fits = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        _must(fits, "messages: a part of a content must be of type text and have a text")


def _calls(calls: Any) -> None:
    _must(isinstance(calls, list), "messages: tool_calls must be a list")
    for call in calls:
        function = call.get("function", {}) if isinstance(call, dict) else {}
        fits = isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function
        _must(fits, "messages: a tool call needs a function with a name and arguments")
        try:
            arguments_of(function["arguments"])
        except ValueError as error:
            _must(False, f"messages: the text of a tool call's arguments {error}")


def _must(holds: object, message: str) -> None:
    """Raise Refused unless a condition holds. If the message begins with a field's name, the error names that field as
    its cause."""
    if not holds:
        name = re.match(r"[\w.]*", message)[0]  # type: ignore[index]
        raise Refused(400, message, param=name if name in NAMES else None)
