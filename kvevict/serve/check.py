"""What a request's body may hold: OpenAI's fields, with values that Transformers' handlers can take."""

import json
import math
import re

from .errors import Refused

NUMBERS = {  # name: least, most
    "temperature": (0, 2), "top_p": (0, 1), "frequency_penalty": (-0.9, 2), "presence_penalty": (-2, 2),
}  # fmt: skip
COUNTS = {"max_tokens": 1 << 31, "max_completion_tokens": 1 << 31, "max_output_tokens": 1 << 31}
SEED, TEXT = 1 << 63, {"type": "text"}
SAMPLING = {"temperature": (0.01, 2), "top_p": (0.01, 1), "repetition_penalty": (0.1, 10)}  # of a generation_config
OURS = ("policy", "budget", "question", "text")
REFUSED = {  # what would change the answer, and is not done
    "suffix": "text cannot be inserted before another",
    "echo": "the prompt is not repeated",
    "previous_response_id": "responses are not stored: send the whole conversation",
}
TEMPLATE = re.compile(r"enable_[a-z_]+|thinking|reasoning_effort|date_string")


def parsed(data: bytes) -> dict:
    """A body as a dict, without the fields that are null. Raises Refused for anything but a JSON object."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON") from None
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise Refused(400, "the body has half of a surrogate pair: send whole characters") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body is not a JSON object")
    for name, value in body.items():
        _must(not _beyond(value), f"{name[:200]} has a number that is not finite, or too large")
    return {name: value for name, value in body.items() if value is not None}


def _beyond(value) -> bool:
    """Whether a number anywhere in a value is none that a float holds."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, (int, float)):
            try:
                if not math.isfinite(each):
                    return True
            except OverflowError:
                return True
        elif isinstance(each, (dict, list)):
            left.extend(each.values() if isinstance(each, dict) else each)
    return False


def generation(body: dict, vocabulary: int) -> None:
    """Raise Refused for a body that no answer can be given to; vocabulary: ids that the model knows."""
    for name, advice in REFUSED.items():
        _must(name not in body or (name == "echo" and body[name] is False), f"{name} is not supported: {advice}")
    for name in ("n", "best_of"):
        _must(body.get(name, 1) == 1, f"{name} must be 1: a request has one answer")
    for name in ("logprobs", "background"):
        _must(not body.get(name), f"{name} is not supported: leave it out")
    _must(isinstance(body.get("stream", False), bool), "stream must be true or false")
    _must(body.get("response_format", TEXT) == TEXT, "response_format is not supported: answers are text")
    for name, (least, most) in NUMBERS.items():
        _must(name not in body or _number(body[name], least, most), f"{name} must be a number from {least} to {most}")
    _must(body.get("top_p", 1) != 0, "top_p must be above 0")
    for name, most in COUNTS.items():
        _must(
            name not in body or (_whole(body[name]) and 1 <= body[name] <= most),
            f"{name} must be a number of at least 1",
        )
    _must(
        "seed" not in body or (_whole(body["seed"]) and abs(body["seed"]) < SEED),
        "seed must be a whole number below 2**63",
    )
    _must("model" not in body or isinstance(body["model"], str), "model must be a name")
    stop = stops(body)
    fits = len(stop) <= 4 and all(isinstance(each, str) and 0 < len(each) <= 200 for each in stop)
    _must(fits, "stop must be a text of at most 200 letters, or up to four of them")
    _bias(body.get("logit_bias", {}), vocabulary)
    template = body.get("chat_template_kwargs", {})
    fits = isinstance(template, dict) and all(isinstance(value, (bool, str)) for value in template.values())
    _must(fits and all(map(TEMPLATE.fullmatch, template)), "chat_template_kwargs may hold enable_thinking and the like")
    tools = body.get("tools", [])
    _must(isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools), "tools must be a list of objects")


def stops(body: dict) -> tuple:
    stop = body.get("stop", [])
    return tuple(stop) if isinstance(stop, list) else (stop,)


def chat(body: dict) -> None:
    _messages("messages", body.get("messages"), ("text",))


def completion(body: dict) -> None:
    _must(isinstance(body.get("prompt"), str) and body["prompt"], "prompt must be a text, and not empty")


def response(body: dict) -> None:
    asked = body.get("input")
    _must(isinstance(body.get("instructions", ""), str), "instructions must be a text")
    if isinstance(asked, list) and asked and all(isinstance(each, dict) for each in asked):
        if (
            "role" in asked[0]
            or "type" not in asked[0]
            or asked[0]["type"] in ("message", "reasoning", "function_call")
        ):
            spoken = [each for each in asked if "role" in each]
            _must(len(spoken) == len(asked), "input must hold messages: tool calls are taken at /v1/chat/completions")
            return _messages("input", asked, ("input_text", "output_text", "text"))
        return _content("input", asked, ("input_text",))
    _must(isinstance(asked, str) and asked, "input must be a text or a list of messages, and not empty")


def sampling(body: dict) -> dict:
    """What a Transformers' generation_config, JSON as `transformers chat` sends it, says of how tokens are chosen; it
    leaves the body."""
    text = body.pop("generation_config", "{}")
    _must(isinstance(text, str), "generation_config must be JSON in a text")
    said = parsed(text.encode("utf-8", "surrogatepass"))
    fits = all(name not in said or _number(said[name], *ends) for name, ends in SAMPLING.items())
    fits = fits and all(
        name not in said or (_whole(said[name]) and said[name] >= 1) for name in ("max_new_tokens", "top_k")
    )
    _must(fits and isinstance(said.get("do_sample", False), bool), "generation_config has numbers that cannot be")
    return {name: said[name] for name in (*SAMPLING, "max_new_tokens", "top_k", "do_sample") if name in said}


def ours(body: dict) -> dict:
    """The field `kvevict`. A question that is null differs from one that is not there."""
    asked = body.pop("kvevict", {})
    _must(isinstance(asked, dict) and set(asked) <= set(OURS), f"kvevict may hold {', '.join(OURS)}")
    for name in ("policy", "text"):
        _must(isinstance(asked.get(name, ""), str), f"kvevict.{name} must be a name")
    question = asked.get("question")
    _must(
        question is None or (isinstance(question, str) and question.strip()), "kvevict.question must be a text or null"
    )
    budget = asked.get("budget")
    fits = (_whole(budget) and 1 <= budget < 1 << 31) or (isinstance(budget, float) and 0 < budget < 1)
    _must(budget is None or fits, "kvevict.budget must be a whole number of slots, or a fraction between 0 and 1")
    return asked


def _messages(name, messages, kinds) -> None:
    _must(isinstance(messages, list) and messages, f"{name} must be a list of messages, and not empty")
    for message in messages:
        _must(isinstance(message, dict) and isinstance(message.get("role"), str), f"{name}: each needs a role")
        _content(name, message.get("content") or [], kinds)
        _calls(name, message)


def _content(name, content, kinds) -> None:
    if isinstance(content, str):
        return
    _must(isinstance(content, list), f"{name}: content must be a text or a list of parts")
    for part in content:
        fits = isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str)
        _must(fits, f"{name}: a part of a content must be of type {kinds[0]} and have a text")


def _calls(name, message) -> None:
    """Tool calls of an assistant's message, which the template is given."""
    if "tool_calls" not in message:
        return
    calls = message["tool_calls"]
    _must(isinstance(calls, list), f"{name}: tool_calls must be a list")
    for call in calls:
        function = call.get("function", {}) if isinstance(call, dict) else {}
        fits = isinstance(function, dict) and isinstance(function.get("name"), str) and "arguments" in function
        _must(fits, f"{name}: a tool call needs a function with a name and arguments")
        if isinstance(function["arguments"], str):
            try:
                json.loads(function["arguments"])
            except (ValueError, RecursionError):
                raise Refused(400, f"{name}: a tool call's arguments are not JSON") from None


def _bias(bias, vocabulary) -> None:
    fits = isinstance(bias, dict) and all(
        re.fullmatch(r"0|[1-9][0-9]{0,8}", key) and int(key) < vocabulary and _number(value, -100, 100)
        for key, value in bias.items()
    )
    _must(fits, "logit_bias must give token ids numbers from -100 to 100")


def _number(value, least, most) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def _whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _must(holds, message: str) -> None:
    if not holds:
        raise Refused(400, message)
