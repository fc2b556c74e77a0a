"""Answers in a form that a request gives: JSON by a schema, or a forced call. llguidance names the tokens that the form
allows next."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from transformers import LogitsProcessor

from .errors import Refused
from .template import NOT_READ, Part, call_of

if TYPE_CHECKING:
    import llguidance

READER = json.JSONDecoder()
STYLE: Any = dict(whitespace_flexible=False, item_separator=", ", key_separator=": ", lenient=False)


def schema_of(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema of the JSON that a checked body asks for; None: any text."""
    asked = body.get("response_format") or body.get("text", {}).get("format") or {}
    if asked.get("type") == "json_object":
        return dict(type="object")
    return _closed(asked.get("json_schema", asked).get("schema", {})) if asked.get("type") == "json_schema" else None


def schema_of_calls(choice: Any, tools: list[Any] | None, single: bool) -> dict[str, Any] | None:
    """Return the schema of the calls that a `tool_choice` forces; None: no call."""
    if choice in ("auto", "none") or tools is None:
        return None
    named: str | None = None if choice == "required" else choice.get("function", choice)["name"]
    functions = [tool["function"] for tool in tools if named in (None, tool["function"]["name"])]
    if not functions:
        raise Refused(400, f"tool_choice: there is no tool {str(named)[:200]!r}", None, "tool_choice")
    arguments = _apart([_closed(each.get("parameters") or dict(type="object")) for each in functions])
    one = dict(anyOf=[_call(each["name"], own) for each, own in zip(functions, arguments, strict=True)])
    return one if named or single else dict(type="array", items=one, minItems=1)


def _closed(schema: dict) -> dict:
    """Close the schema of an object: no properties but those named, unless the schema allows more. Small models write
    more without end."""
    more = {"additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
    return schema if "properties" not in schema or more & set(schema) else schema | dict(additionalProperties=False)


def _apart(schemas: list[dict]) -> list[dict]:
    """Give each schema an `$id` (draft 4: `id`) that no other has, so that a `$ref` to `#/$defs/...`, or to its root,
    means the same within another schema."""
    known = [each.get("$id") for each in schemas]
    return [
        each if own and known.count(own) == 1 else each | {"$id": f"tool:///{at}", "id": f"tool:///{at}"}
        for at, (each, own) in enumerate(zip(schemas, known, strict=True))
    ]


def _call(name: str, arguments: dict) -> dict:
    properties = dict(name=dict(const=name), arguments=arguments)
    return dict(type="object", properties=properties, required=list(properties), additionalProperties=False)


class Calls:
    """A parser of an answer that is nothing but calls: one, or a list. A call that is cut is text."""

    def __init__(self) -> None:
        self._text = ""  # that is in no part yet

    def parts(self, text: str) -> list[Part]:
        """Return the calls that are complete after more text."""
        self._text += text
        calls: list[Part] = []
        while "}" in text:
            try:
                value, end = READER.raw_decode(self._text, self._text.index("{"))
                calls.append(call_of(dict(function=value)))
            except NOT_READ:
                break
            self._text = self._text[end:]
        return calls

    def close(self, end: str, cut: bool) -> list[Part]:
        """Return the rest. end: letters of the end token, which the JSON does not have."""
        rest = self._text.lstrip(", ")
        return [] if rest in ("", "]") else [rest]


class Grammars:
    """Makes the matchers of a tokenizer. ends: tokens that end an answer."""

    def __init__(self, tokenizer: Any, ends: list) -> None:
        self.tokenizer, self.ends = tokenizer, ends
        self._known: Any = None  # llguidance's tokenizer, once it is needed

    def matcher(self, schema: dict[str, Any]) -> llguidance.LLMatcher:
        """Make the matcher of a schema. Raises Refused for a schema that llguidance cannot follow, or without
        llguidance."""
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            sentence = (
                "response_format and forced tool calls need llguidance where the server runs: pip install llguidance"
            )
            raise Refused(400, sentence, "unsupported_parameter") from None
        if self._known is None:
            self._known = llguidance.hf.from_tokenizer(self.tokenizer, eos_token=self.ends or None)
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=STYLE)
        matcher = llguidance.LLMatcher(self._known, grammar, log_level=0)
        if matcher.is_error():
            raise Refused(400, f"the JSON schema cannot be followed: {' '.join(matcher.get_error().split())[:500]}")
        return matcher


class Following(LogitsProcessor):
    """Leaves the tokens that a matcher allows. start: tokens of the prompt."""

    def __init__(self, matcher: Any, start: int) -> None:
        self.matcher, self.seen = matcher, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.matcher.consume_tokens(input_ids[0, self.seen :].tolist())
        self.seen = input_ids.shape[1]
        bits = torch.frombuffer(bytearray(self.matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[: scores.shape[-1]]
        refused = torch.ones(scores.shape[-1], dtype=torch.bool)  # logits without a token, too
        refused[: len(allowed)] = allowed == 0
        return scores.masked_fill(refused.to(scores.device), float("-inf"))
