"""The table of request fields: each is obeyed, refused, or accepted and ignored (harmless: no answer depends on it).
Fields that are not in the table are refused. docs/serve.md shows the fields of OpenAI's two endpoints."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .errors import Json, Refused

OBEYED, REFUSED, HARMLESS = "obeyed", "refused", "harmless"
CHAT, COMPLETIONS, TEXTS = "/v1/chat/completions", "/v1/completions", "/v1/kvevict/texts"
PROMPT = {CHAT: "messages", COMPLETIONS: "prompt", TEXTS: "text"}  # endpoint -> the field that holds the prompt


class Values(NamedTuple):
    """The values that a field may have."""

    fit: Callable[[Any], bool]  # returns whether a value is allowed
    words: str  # describes the allowed values in error messages: "{field} must be {words}"


class Field(NamedTuple):
    """A row of `TABLE`: what the server does with one field of a request."""

    kind: str  # OBEYED, REFUSED or HARMLESS
    about: str  # the description in the docs; of a refused field, also the end of its error message
    values: Values | None = None  # the allowed values; None: any value, or `kvevict.serve.check` tests the value
    usual: tuple = ()  # values at which a refused field is accepted, because they request nothing unusual


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object, least: float, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def number(least: float, most: float) -> Values:
    return Values(lambda value: is_number(value, least, most), f"a number from {least} to {most}")


def whole(least: int, most: int = 1 << 31) -> Values:
    words = f"a whole number of at least {least}, and at most {most}"
    return Values(lambda value: is_whole(value) and is_number(value, least, most), words)


def _is_stop(value: object) -> bool:
    given = value if isinstance(value, list) else [value]
    return len(given) <= 4 and all(isinstance(each, str) and 0 < len(each) <= 200 for each in given)


def _is_budget(value: object) -> bool:
    slots = is_whole(value) and is_number(value, 1, (1 << 31) - 1)
    return slots or isinstance(value, str) or (isinstance(value, float) and 0 < value <= 1)


FLAG = Values(lambda value: isinstance(value, bool), "true or false")
TEXT = Values(lambda value: isinstance(value, str), "a text")
FILLED = Values(lambda value: isinstance(value, str) and value.strip() != "", "a text that is not empty")
SEED = Values(lambda value: is_whole(value) and abs(value) < 1 << 63, "a whole number below 2**63")
ABOVE = Values(lambda value: is_number(value, 0, 1) and value > 0, "a number above 0, up to 1")
STOP = Values(_is_stop, "a text of at most 200 letters, or up to four of them")
BUDGET = Values(_is_budget, "a whole number of slots, a fraction up to 1.0, or bytes such as '64MiB'")
CALLS = '"auto" or "none": ask for a call in a message, or use vLLM\'s server, which forces calls'
CHOICE = Values(lambda value: value in ("auto", "none"), CALLS)
FORM = "ask for JSON in a message, or use vLLM's server, which follows schemas"

COMMON = {
    "model": Field(OBEYED, "the name of this server's model, or left out", TEXT),
    "stream": Field(OBEYED, "true: each piece once it is written; false (default, OpenAI's): the whole answer", FLAG),
    "temperature": Field(OBEYED, "0 to 2; below 0.01 the likeliest token is taken", number(0, 2)),
    "top_p": Field(OBEYED, "above 0, up to 1", ABOVE),
    "seed": Field(OBEYED, "the same seed gives the same answer", SEED),
    "user": Field(HARMLESS, "users are not told apart by it"),
    "max_tokens": Field(OBEYED, "default [1024](#answers), unless the model's configuration has more", whole(1)),
    "n": Field(OBEYED, "1 to 16 answers, written together", whole(1, 16)),
    "stop": Field(OBEYED, "up to four texts", STOP),
    "stream_options.include_usage": Field(OBEYED, "a stream's last event counts tokens", FLAG),
    "stream_options.include_obfuscation": Field(HARMLESS, "streams are not padded"),
    "frequency_penalty": Field(OBEYED, "-2 to 2, as OpenAI defines it: of the tokens written", number(-2, 2)),
    "presence_penalty": Field(OBEYED, "-2 to 2, as OpenAI defines it: of the tokens written", number(-2, 2)),
    "logit_bias": Field(OBEYED, "token ids, and numbers from -100 to 100"),
    # fields that OpenAI does not have
    "top_k": Field(OBEYED, "default 0, all tokens, unless the model's configuration has one", whole(0)),
    "min_p": Field(OBEYED, "0 to 1: a token's least probability, as a share of the likeliest one's", number(0, 1)),
    "generation_config": Field(OBEYED, "JSON of Transformers; its numbers of sampling and length are taken", TEXT),
    "kvevict.policy": Field(OBEYED, "a preset's name; default `--policy`", TEXT),
    "kvevict.budget": Field(OBEYED, "slots per head, a fraction, or bytes; at most the server's", BUDGET),
    "kvevict.question": Field(OBEYED, "the text that [asks](#the-question)", FILLED),
    "kvevict.text": Field(OBEYED, "the name of a [stored text](#texts)", TEXT),
}
TABLE = {
    CHAT: COMMON | {
        "messages": Field(OBEYED, "of text, tool calls and their results"),
        "max_completion_tokens": Field(OBEYED, "as `max_tokens`, and before it", whole(1)),
        "logprobs": Field(OBEYED, "of every token, with `logit_bias`, before temperature and all penalties", FLAG),
        "top_logprobs": Field(OBEYED, "0 to 20, with `logprobs`", whole(0, 20)),
        "reasoning_effort": Field(OBEYED, "where the chat template has it; refused otherwise", TEXT),
        "chat_template_kwargs": Field(OBEYED, "`enable_thinking` and the like; not of OpenAI"),
        "tools": Field(OBEYED, "functions; the chat template has them"),
        "tool_choice": Field(OBEYED, '"auto" or "none"', CHOICE),
        "parallel_tool_calls": Field(OBEYED, "false: an answer ends with its first call", FLAG),
        "prediction": Field(HARMLESS, "it saves OpenAI time, and changes no answer"),
        "metadata": Field(HARMLESS, "nothing is stored"),
        "store": Field(HARMLESS, "nothing is stored"),
        "service_tier": Field(HARMLESS, "there is one tier"),
        "safety_identifier": Field(HARMLESS, "users are not told apart by it"),
        "prompt_cache_key": Field(HARMLESS, "equal prefixes are found without it"),
        "prompt_cache_options": Field(HARMLESS, "equal prefixes are found without it"),
        "prompt_cache_retention": Field(HARMLESS, "prefixes are kept as long as memory allows"),
        "response_format": Field(REFUSED, FORM, usual=({"type": "text"},)),
        "functions": Field(REFUSED, "give tools", usual=([],)),
        "function_call": Field(REFUSED, "give tools", usual=("none", "auto")),
        "modalities": Field(REFUSED, "answers are text", usual=(["text"],)),
        "verbosity": Field(REFUSED, "ask for it in a message", usual=("medium",)),
    },
    COMPLETIONS: COMMON | {
        "prompt": Field(OBEYED, "a text or token ids, or a list of up to 128 such prompts, answered together"),
        "logprobs": Field(OBEYED, "0 to 5 alternatives of each token; a part of a character is `\\xf0`", whole(0, 5)),
        "best_of": Field(REFUSED, "every answer that is written is given: ask for n", usual=(1,)),
        "echo": Field(REFUSED, "the prompt is not repeated", usual=(False,)),
        "suffix": Field(REFUSED, "text cannot be inserted before another", usual=("",)),
    },
    TEXTS: {
        "name": Field(OBEYED, "of the text"),
        "text": Field(OBEYED, "all of it", FILLED),
        "replace": Field(OBEYED, "false: another text of this name is an error", FLAG),
        "policy": COMMON["kvevict.policy"],
        "budget": COMMON["kvevict.budget"],
    },
}  # fmt: skip
# Names that an error may give as its cause: all fields ("kvevict.text"), and the objects that hold fields ("kvevict").
NAMES = {part for fields in TABLE.values() for name in fields for part in (name, name.partition(".")[0])}
PARTED = {path: {name.partition(".")[0] for name in fields if "." in name} for path, fields in TABLE.items()}


def known(path: str, body: Json) -> None:
    """Raise Refused if a body has a field that is refused or not in the table, or a field with a wrong value."""
    for name, value in body.items():
        if name not in PARTED[path]:
            _known(path, name, value)
        elif isinstance(value, dict):
            for part, each in value.items():
                _known(path, f"{name}.{part}", each)
        else:
            raise Refused(400, f"{name} must be an object", None, name)


def _known(path: str, name: str, value: object) -> None:
    field = TABLE[path].get(name)
    if field is None:
        raise Refused(400, f"{path} has no field {name[:200]!r}", "unknown_parameter", name[:200])
    if field.kind == REFUSED and not any(type(value) is type(each) and value == each for each in field.usual):
        raise Refused(400, f"{name} is not supported: {field.about}", "unsupported_parameter", name)
    if field.values is not None and value is not None and not field.values.fit(value):
        raise Refused(400, f"{name} must be {field.values.words}", None, name)
