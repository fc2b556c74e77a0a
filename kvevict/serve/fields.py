"""Every field of OpenAI's three endpoints, and of ours: obeyed, refused, or harmless, because no answer depends on it.
docs/serve.md has the table."""

from typing import Any, NamedTuple

from .errors import Refused

OBEYED, REFUSED, HARMLESS = "obeyed", "refused", "harmless"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


class Field(NamedTuple):
    """kind    one of the three
    about   for a reader of the docs; of a refused field: advice, which its error has, too
    usual   values of a refused field that ask for nothing
    """

    kind: str
    about: str
    usual: tuple = ()


COMMON = {
    "model": Field(OBEYED, "the name of this server's model, or left out"),
    "stream": Field(OBEYED, "true or false"),
    "temperature": Field(OBEYED, "0 to 2; below 0.01 the likeliest token is taken"),
    "top_p": Field(OBEYED, "above 0, up to 1"),
    "seed": Field(OBEYED, "the same seed gives the same answer"),
    "user": Field(HARMLESS, "users are not told apart by it"),
    "stream_options.include_obfuscation": Field(HARMLESS, "streams are not padded"),
    # not of OpenAI
    "top_k": Field(OBEYED, "a whole number; 0: of all tokens, the default unless the model's configuration has one"),
    "min_p": Field(OBEYED, "0 to 1: a token's least probability, as a share of the likeliest one's"),
    "generation_config": Field(OBEYED, "JSON of Transformers; its numbers of sampling and length are taken"),
    "kvevict": Field(OBEYED, "[see below](#who-observes)"),
}
WRITING = {  # of chat and completions
    "max_tokens": Field(OBEYED, "at least 1; default [1024](#length), or more where the model's configuration says so"),
    "n": Field(OBEYED, "1 to 16 answers, written together"),
    "stop": Field(OBEYED, "up to four texts"),
    "stream_options.include_usage": Field(OBEYED, "a stream's last event counts tokens"),
    "frequency_penalty": Field(OBEYED, "-2 to 2, as OpenAI defines it: of the tokens that were written"),
    "presence_penalty": Field(OBEYED, "-2 to 2, likewise"),
    "logit_bias": Field(OBEYED, "token ids, and numbers from -100 to 100"),
}
AGENTS = {  # of chat and responses
    "chat_template_kwargs": Field(OBEYED, "`enable_thinking` and the like; not of OpenAI"),
    "tools": Field(OBEYED, "functions; the chat template has them"),
    "tool_choice": Field(OBEYED, '"auto", "none", "required" or a function; a forced call follows its schema'),
    "parallel_tool_calls": Field(OBEYED, "false: an answer ends with its first call"),
    "metadata": Field(HARMLESS, "nothing is stored"),
    "store": Field(HARMLESS, "nothing is stored"),
    "service_tier": Field(HARMLESS, "there is one tier"),
    "safety_identifier": Field(HARMLESS, "users are not told apart by it"),
    "prompt_cache_key": Field(HARMLESS, "equal prefixes are found without it"),
    "prompt_cache_options": Field(HARMLESS, "equal prefixes are found without it"),
    "prompt_cache_retention": Field(HARMLESS, "prefixes are kept as long as memory allows"),
    "moderation": Field(REFUSED, "nothing is moderated"),
}
TABLE = {
    CHAT: COMMON | WRITING | AGENTS | {
        "messages": Field(OBEYED, "of text, tool calls and their results"),
        "max_completion_tokens": Field(OBEYED, "the same as `max_tokens`, and before it"),
        "logprobs": Field(OBEYED, "of every token that is written, those of reasoning and calls, too"),
        "top_logprobs": Field(OBEYED, "0 to 20, with `logprobs`"),
        "reasoning_effort": Field(OBEYED, "where the chat template has it; refused otherwise"),
        "prediction": Field(HARMLESS, "it saves OpenAI time, and changes no answer"),
        "response_format": Field(OBEYED, "text, a JSON object, or JSON by a schema"),
        "functions": Field(REFUSED, "give tools", ([],)),
        "function_call": Field(REFUSED, "give tools", ("none", "auto")),
        "modalities": Field(REFUSED, "answers are text", (["text"],)),
        "audio": Field(REFUSED, "answers are text"),
        "verbosity": Field(REFUSED, "ask for it in a message", ("medium",)),
        "web_search_options": Field(REFUSED, "the server searches nothing"),
    },
    COMPLETIONS: COMMON | WRITING | {
        "prompt": Field(OBEYED, "a text or token ids, or a list of up to 128 such prompts, answered together"),
        "logprobs": Field(OBEYED, "0 to 5 alternatives of each token"),
        "best_of": Field(REFUSED, "every answer that is written is given: ask for n", (1,)),
        "echo": Field(REFUSED, "the prompt is not repeated", (False,)),
        "suffix": Field(REFUSED, "text cannot be inserted before another", ("",)),
    },
    RESPONSES: COMMON | AGENTS | {
        "input": Field(OBEYED, "a text, or items: messages of text, reasoning, calls of functions and their outputs"),
        "instructions": Field(OBEYED, "a system message before the others"),
        "max_output_tokens": Field(OBEYED, "as `max_tokens` of chats"),
        "reasoning.effort": Field(OBEYED, "where the chat template has it; refused otherwise"),
        "reasoning.summary": Field(REFUSED, "reasoning is given in full"),
        "reasoning.generate_summary": Field(REFUSED, "reasoning is given in full"),
        "reasoning.context": Field(REFUSED, "leave it out"),
        "reasoning.mode": Field(REFUSED, "leave it out"),
        "text.format": Field(OBEYED, "text, a JSON object, or JSON by a schema"),
        "text.verbosity": Field(REFUSED, "ask for it in a message", ("medium",)),
        "max_tool_calls": Field(HARMLESS, "it is about OpenAI's tools, and those are refused"),
        "access_programs": Field(REFUSED, "leave it out"),
        "background": Field(REFUSED, "answers are not stored: ask for a stream", (False,)),
        "background_options": Field(REFUSED, "answers are not stored: ask for a stream"),
        "context_management": Field(REFUSED, "the policy manages the context", ([],)),
        "conversation": Field(REFUSED, "conversations are not stored: send all of it"),
        "image": Field(REFUSED, "images are not read"),
        "include": Field(REFUSED, "a response has all that there is", ([],)),
        "previous_response_id": Field(REFUSED, "responses are not stored: send the whole conversation"),
        "prompt": Field(REFUSED, "prompts are not stored: send the text"),
        "top_logprobs": Field(REFUSED, "ask at /v1/chat/completions", (0,)),
        "truncation": Field(REFUSED, "shorten the input", ("disabled",)),
    },
}  # fmt: skip
NAMES = {name for fields in TABLE.values() for name in fields}
PARTED = {path: {name.partition(".")[0] for name in fields if "." in name} for path, fields in TABLE.items()}


def known(path: str, body: dict[str, Any]) -> None:
    """Raise Refused for a body with a field that is refused, or that is not in the table."""
    for name, value in body.items():
        if name not in PARTED[path]:
            _known(path, name, value)
        elif isinstance(value, dict):
            for part, each in value.items():
                _known(path, f"{name}.{part}", each)
        else:
            raise Refused(400, f"{name} must be an object", None, name)


def _known(path: str, name: str, value: Any) -> None:
    field = TABLE[path].get(name)
    if field is None:
        raise Refused(400, f"{path} has no field {name[:200]!r}", "unknown_parameter", name[:200])
    if field.kind == REFUSED and not _among(value, field.usual):
        raise Refused(400, f"{name} is not supported: {field.about}", "unsupported_parameter", name)


def _among(value, usual: tuple) -> bool:
    return any(type(value) is type(each) and value == each for each in usual)
