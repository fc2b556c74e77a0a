"""The checks of a request's body that the table of fields does not hold."""

import json
import re
import sys
from typing import Any

from .errors import Refused, of_field
from .fields import FLAG, NAMES, is_number, is_whole, number, whole
from .messages import ITEMS, arguments_of

PROMPTS = 128  # of a completion, at most
DEEPEST = 100  # lists and objects in each other, in a field
SAMPLING = {  # of a generation_config
    "temperature": number(0.01, 2), "top_p": number(0.01, 1), "min_p": number(0, 1), "max_new_tokens": whole(1),
    "repetition_penalty": number(0.1, 10), "top_k": whole(0), "do_sample": FLAG,
}  # fmt: skip
TEMPLATE = re.compile(r"enable_[a-z_]+|thinking|reasoning_effort|date_string")
CHOSEN = "auto", "none", "required"  # of tool_choice
FORMATS = "text", "json_object", "json_schema"


def parsed(data: bytes, what: str = "the body") -> dict[str, Any]:
    """Parse a body, a JSON object, and drop the nulls in its fields, messages and items, as `model_dump()` writes them.
    Raises Refused for anything else."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise Refused(400, f"{what} is not JSON") from None
    if not isinstance(body, dict):
        raise Refused(400, f"{what} is not a JSON object")
    for name, value in body.items():
        try:
            name.encode()
            _holds(name, value)
        except UnicodeEncodeError:
            raise Refused(400, f"{what} has half of a surrogate pair: send whole characters") from None
    return {name: _without_nulls(value) for name, value in body.items() if value is not None}


def _without_nulls(value: object, depth: int = 2) -> Any:
    """Drop nulls down to the functions of a message's calls, but not in the schemas and arguments of functions."""
    if isinstance(value, dict):
        told = ((name, each) for name, each in value.items() if each is not None)
        return {name: _without_nulls(each, depth - 1) if depth else each for name, each in told}
    return [_without_nulls(each, depth) for each in value] if isinstance(value, list) else value


def _holds(name: str, value: Any) -> None:
    """Raise Refused for a field with a number that no float holds, or nested too deeply, and UnicodeEncodeError for
    half of a surrogate pair. This is a loop, because one call for all of a field would hold up the other threads."""
    level, depth = [value], 0
    while level:
        below: list = []
        for each in level:
            if isinstance(each, str):
                if not each.isascii():
                    each.encode()
            elif isinstance(each, dict):
                below.extend(each)
                below.extend(each.values())
            elif isinstance(each, list):
                below.extend(each)
            elif each is not None and not abs(each) <= sys.float_info.max:  # not a number is not less
                _must(False, f"{name[:200]} has a number that is not finite, or too large")
        level, depth = below, depth + 1
        if depth >= DEEPEST and any(isinstance(each, (dict, list)) for each in level):
            _must(False, f"{name[:200]} is nested more than {DEEPEST} deep")


def generation(body: dict[str, Any], vocabulary: int, template: str | None) -> None:
    """Raise Refused for a body that cannot be answered. vocabulary: ids that the model knows; template: the chat
    template."""
    _bias(body.get("logit_bias", {}), vocabulary)
    options = body.get("stream_options", {})
    _must(not options or body.get("stream"), "stream_options are of a stream: give stream as well")
    prompt = body.get("prompt", [])
    for ids in (prompt, *(prompt if isinstance(prompt, list) else ())):
        known = not isinstance(ids, list) or all(0 <= each < vocabulary for each in ids if is_whole(each))
        _must(known, "prompt has ids that the model does not know")
    _template(body, template)
    _tools(body)
    _format("response_format", body.get("response_format", {}), body)
    _format("text.format", body.get("text", {}).get("format", {}), body)


def _template(body: dict, template: str | None) -> None:
    kwargs = body.get("chat_template_kwargs", {})
    fits = isinstance(kwargs, dict) and all(isinstance(value, (bool, str)) for value in kwargs.values())
    _must(fits and all(map(TEMPLATE.fullmatch, kwargs)), "chat_template_kwargs may hold enable_thinking and the like")
    efforts = body.get("reasoning_effort"), body.get("reasoning", {}).get("effort")
    for name, effort in zip(("reasoning_effort", "reasoning.effort"), efforts, strict=True):
        had = effort is None or "reasoning_effort" in str(template)
        _must(had, f"{name} is not supported: the model's chat template does not have it")


def _tools(body: dict) -> None:
    tools = body.get("tools", [])
    _must(isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools), "tools must be a list of objects")
    for tool in tools:
        function = tool.get("function", tool)
        fits = tool.get("type", "function") == "function" and isinstance(function, dict)
        _must(fits and isinstance(function.get("name"), str), "tools must be functions, and have names")
        schema = function.get("parameters", {})
        _must(isinstance(schema, dict), "tools: parameters must be a JSON schema")
        strict = function.get("strict") and body.get("tool_choice", "auto") == "auto"
        _must(not strict, "tools: strict is supported where tool_choice forces a call: others may break the schema")
    choice = body.get("tool_choice", "auto")
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        fits = choice.get("type") == "function" and isinstance(function, dict) and isinstance(function.get("name"), str)
        _must(fits, f"tool_choice {json.dumps(choice)[:200]} is not supported: name a function")
    else:
        _must(choice in CHOSEN, f"tool_choice {json.dumps(choice)[:200]} is not supported: give auto, none or required")
    _must(choice in CHOSEN[:2] or tools, "tool_choice needs tools")


def _format(name: str, asked: dict, body: dict) -> None:
    _must(
        isinstance(asked, dict) and asked.get("type", "text") in FORMATS, f"{name} must be of type {', '.join(FORMATS)}"
    )
    if asked.get("type", "text") == "text":
        return
    if asked["type"] == "json_schema":
        field = "schema" if name == "text.format" else "json_schema"
        _must({"schema", "json_schema"} & set(asked), f"{name} of type json_schema needs the field {field}")
    schema = asked.get("json_schema", asked)
    fits = isinstance(schema, dict) and isinstance(schema.get("schema", {}), dict)
    _must(fits, f"{name} must have a JSON schema")
    free = body.get("tools") and body.get("tool_choice", "auto") == "auto"
    _must(not free, f"{name} leaves no tool to call: give no tools, or a tool_choice that is not auto")


def stops(body: dict[str, Any]) -> tuple:
    stop = body.get("stop", [])
    return tuple(stop) if isinstance(stop, list) else (stop,)


def chat(body: dict[str, Any]) -> None:
    _messages("messages", body.get("messages"), ("text",))
    _must(body.get("logprobs") or not body.get("top_logprobs"), "top_logprobs needs logprobs")


def completion(body: dict[str, Any]) -> None:
    """Check a completion's body, and make its prompt a list of prompts."""
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) and prompt and not is_whole(prompt[0]) else [prompt]
    body["prompt"] = prompts
    _must(len(prompts) <= PROMPTS, f"prompt must have at most {PROMPTS} prompts")
    for each in prompts:
        ids = isinstance(each, list) and all(map(is_whole, each))
        _must(each and (ids or isinstance(each, str)), "prompt must be a text or its ids, or a list of such, not empty")


def response(body: dict[str, Any]) -> None:
    asked = body.get("input")
    if not (isinstance(asked, list) and asked and all(isinstance(each, dict) for each in asked)):
        return _must(isinstance(asked, str) and asked, "input must be a text or a list of items, and not empty")
    if "role" not in asked[0] and asked[0].get("type") not in ITEMS:
        return _content("input", asked, ("input_text",))
    for item in asked:
        kind = item.get("type", "message")
        _must(kind in ITEMS, f"input: items of type {str(kind)[:200]!r} are not supported")
        if kind == "message":
            _messages("input", [item], ("input_text", "output_text", "text"))
        elif kind == "reasoning":
            _content("input", item.get("content", []), ("reasoning_text",))
            _content("input", item.get("summary", []), ("summary_text",))
        else:
            names = ("call_id", "output") if kind == "function_call_output" else ("call_id", "name", "arguments")
            fits = (isinstance(item.get(name), (str, list) if name == "output" else str) for name in names)
            _must(all(fits), f"input: a {kind} needs {', '.join(names)}")
            _content("input", item.get("output", ""), ("input_text",))
            _arguments("input", item.get("arguments", "{}"))
    _must(any(item.get("type") != "reasoning" for item in asked), "input must hold more than reasoning")


def sampling(body: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a `generation_config` that are obeyed, from JSON as `transformers chat` sends it."""
    text = body.get("generation_config", "{}")
    with of_field("generation_config"):
        said = parsed(text.encode("utf-8", "surrogatepass"), "generation_config")
    found = {name: said[name] for name in SAMPLING if name in said}
    fits = all(SAMPLING[name].fit(value) for name, value in found.items())
    _must(fits, "generation_config has numbers that cannot be")
    return found


def _messages(name: str, messages: Any, kinds: tuple) -> None:
    _must(isinstance(messages, list) and messages, f"{name} must be a list of messages, and not empty")
    for message in messages:
        _must(isinstance(message, dict) and isinstance(message.get("role"), str), f"{name}: each needs a role")
        _content(name, message.get("content") or [], kinds)
        _calls(name, message)


def _content(name: str, content: Any, kinds: tuple) -> None:
    if isinstance(content, str):
        return
    _must(isinstance(content, list), f"{name}: content must be a text or a list of parts")
    for part in content:
        fits = isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str)
        _must(fits, f"{name}: a part of a content must be of type {kinds[0]} and have a text")


def _calls(name: str, message: dict) -> None:
    """Check the tool calls of an assistant's message, which the template is given."""
    if "tool_calls" not in message:
        return
    calls = message["tool_calls"]
    _must(isinstance(calls, list), f"{name}: tool_calls must be a list")
    for call in calls:
        function = call.get("function", {}) if isinstance(call, dict) else {}
        fits = isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function
        _must(fits, f"{name}: a tool call needs a function with a name and arguments")
        _arguments(name, function["arguments"])


def _arguments(name: str, arguments: object) -> None:
    try:
        arguments_of(arguments)
    except (ValueError, RecursionError):
        raise Refused(400, f"{name}: a tool call's arguments are not JSON", param=name) from None


def _bias(bias: dict, vocabulary: int) -> None:
    fits = isinstance(bias, dict) and all(
        re.fullmatch(r"0|[1-9][0-9]{0,8}", key) and int(key) < vocabulary and is_number(value, -100, 100)
        for key, value in bias.items()
    )
    _must(fits, "logit_bias must give token ids numbers from -100 to 100")


def _must(holds: Any, message: str) -> None:
    """Raise Refused unless a condition holds. The message begins with the field's name."""
    if not holds:
        name = re.match(r"[\w.]*", message)[0]  # type: ignore[index]
        raise Refused(400, message, param=name if name in NAMES else None)
