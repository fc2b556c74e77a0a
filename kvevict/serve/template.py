"""Separates reasoning and tool calls from text while an answer is generated, by the model's response template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeAlias

from transformers.cli.serving.utils import ReasoningText, ToolCall, get_response_template
from transformers.utils.chat_parsing import ResponseParser, parse_response

from ..asking.prompts import rendered
from .errors import Json
from .messages import arguments_of, json_fault

CONTENT, REASONING, CALLS = "content", ("reasoning_content", "thinking"), "tool_calls"  # fields of response templates
TEXTS = CONTENT, *REASONING
UNREADABLE = ValueError, TypeError, LookupError, AttributeError, RecursionError  # errors of parsing a malformed call


class Token(NamedTuple):
    """A generated token, with its probability."""

    data: bytes  # the bytes that the token adds to the text
    log: float  # the token's log-probability
    others: list[tuple[bytes, float]]  # (bytes, log-probability) of the likeliest tokens, in descending order
    start: int  # number of the answer's characters before the token, or before the character that it is a part of


Part: TypeAlias = str | ToolCall | Token


class Form:
    """A model's special tokens and its response template, which says how reasoning, tool calls and text are marked in
    an answer. If the tokenizer has no response template, Transformers' template for the model's type is used, provided
    that the chat template opens an answer as that response template expects."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        added = tokenizer.added_tokens_decoder
        self.tokenizer = tokenizer
        self.special = {at for at, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self.template = get_response_template(tokenizer, model) if tokenizer.chat_template else None
        if self.template is not None and getattr(tokenizer, "response_template", None) is None:
            opened = rendered(tokenizer, [{"role": "user", "content": "?"}], "a user's turn alone")
            anchors = self.template["start_anchor"]
            if not any(each in opened for each in ([anchors] if isinstance(anchors, str) else anchors)):
                self.template = None

    def parser(self, prompt: list[int], tools: list[Json] | None) -> Parser | None:
        """Make the parser of an answer to a prompt. It looks for tool calls only if there are tools. Returns None if
        there is nothing to look for: all of the answer is text. prompt: token ids."""
        if self.template is None:
            return None
        fields = {name: field for name, field in self.template["fields"].items() if tools or name != CALLS}
        return Parser({**self.template, "fields": fields}, self.tokenizer.decode(prompt), tools) if fields else None

    def silent(self, parser: object) -> set[int]:
        """Return the special tokens to leave out of an answer's text: all tokens that its parser does not look for, or
        all special tokens if there is no parser."""
        if parser is None:
            return self.special
        looked_for = "\n".join(_strings(self.template))
        letters = {at: self.tokenizer.decode([at]) for at in self.special}
        return {at for at, each in letters.items() if each not in looked_for and re.escape(each) not in looked_for}


class Parser:
    """Parses an answer while it is generated. A tool call that is cut off or malformed becomes text. Transformers'
    parser would raise for it and lose its text, so here that parser only divides the answer into regions of text, and
    each region is then parsed alone. The end of the prompt is parsed, too, but no part contains any of its text."""

    def __init__(self, template: Json, prompt: str, tools: list | None) -> None:
        self._template, self._tools = template, tools
        whole = {**template, "fields": {name: _whole(name, field) for name, field in template["fields"].items()}}
        self._parser = ResponseParser(whole, prompt)
        # Number of the prompt's last characters that are in no event yet, as a region or delimiter is open at its end.
        self._given = sum(len(_letters(event)) for event in ResponseParser(whole, prompt).finalize()[1])
        self.reasons = False  # whether the next text belongs to the answer's reasoning
        for event in self._parser.initial_events:
            self._follow(event)
        self._spoke, self._blank = False, ""  # of the open field: whether it has text yet; white space after the text
        self._lost = False  # whether the last region that is not text could not be parsed

    def parts(self, text: str) -> list[Part]:
        """Append text, and return the parts that are certain by now: later text cannot change them."""
        return self._parts(self._parser.feed(text))

    def close(self, text: str, cut: bool) -> list[Part]:
        """Append the last text, and return all remaining parts. cut: whether the answer was cut off before its end."""
        return self.parts(text) + self._parts(self._parser.finalize()[1], cut)

    def _parts(self, events: list[Json], cut: bool = False) -> list[Part]:
        """Convert events of Transformers' parser to parts. cut: whether the answer was cut off before its end."""
        parts: list[Part] = []
        for event in events:
            field, kind = event["field"], event["type"]
            self._follow(event)
            if kind == "region_open" and field in TEXTS:
                self._spoke, self._blank, self._lost = self._lost and field == CONTENT, "", False
                if self._template["fields"][field].keys() & {"open", "open_pattern"}:
                    self._given = 0
            elif kind == "region_chunk" and field in TEXTS:
                text = self._stripped(self._new(event["text"]), field)
                if text:
                    parts.append(ReasoningText(text) if field in REASONING else text)
            elif kind == "region_close" and field not in TEXTS:
                parts.extend(self._region(event, cut))
        return joined(parts)

    def _follow(self, event: Json) -> None:
        if event["type"] != "region_chunk":
            self.reasons = event["type"] == "region_open" and event["field"] in REASONING

    def _region(self, event: Json, cut: bool) -> list:
        """Return the tool calls in a region that is not text; [the region's text] if it cannot be parsed."""
        letters = _letters(event)
        new = self._new(letters)
        try:
            if cut and not event["value"].get("end"):
                raise ValueError("its end did not come")
            calls = self._calls(event["field"], letters)
            self._blank = ""
            return calls
        except UNREADABLE:
            new, self._lost, self._blank = self._blank + new, True, ""
            return [new]

    def _calls(self, field: str, letters: str) -> list:
        alone = {**self._template, "fields": {field: self._template["fields"][field]}}
        message = parse_response(letters, alone, prefix="", tools=self._tools)
        return [call_of(each) for value in _listed(message[field]) for each in _listed(value)] if field == CALLS else []

    def _new(self, text: str) -> str:
        """Remove characters that belong to the prompt from the start of a text."""
        new = text[self._given :]
        self._given = max(self._given - len(text), 0)
        return new

    def _stripped(self, text: str, field: str) -> str:
        """Strip white space at both ends of a field, as Transformers does with a complete message. text: the field's
        next piece; white space at its end is held back until more text follows."""
        if not self._template["fields"][field].get("content_args", {}).get("strip", True):
            return text
        text = self._blank + text if self._spoke else text.lstrip()
        stripped = text.rstrip()
        self._spoke, self._blank = self._spoke or bool(stripped), text[len(stripped) :]
        return stripped


def _whole(name: str, field: Json) -> Json:
    """Change a field of a response template so that it is optional and its value is its unparsed text, delimiters
    included if the field is not text."""
    if name in TEXTS:
        return {**field, "content": "text", "optional": True}
    start, end = _pattern(field, "open"), _pattern(field, "close")
    made: dict = dict(content="text", content_args=dict(strip=False), repeats=True, transform=dict(content="{content}"))
    if start is not None:
        made["open_pattern"] = f"(?P<start_>{start})(?P<end_>)"  # the empty <end_> serves regions without an end
        made["transform"] = dict(start="{start_}", content="{content}", end="{end_}")
    if end is not None:
        made["close_pattern"] = f"(?P<end_>{end})"
    return made


def _pattern(field: Json, key: str) -> str | None:
    """Return the regular expression of a field's delimiter `key`, "open" or "close"; None if the field has none. The
    field gives the delimiter as a regular expression, a text, or a list of texts."""
    if key not in field:
        return field.get(f"{key}_pattern")
    texts = [field[key]] if isinstance(field[key], str) else sorted(field[key], key=len, reverse=True)
    return "|".join(map(re.escape, texts))


def _letters(event: Json) -> str:
    """Return the characters that an event adds: the chunk, if the event is a chunk of text; all characters of a region
    that is not text, if the event closes this region; else none."""
    if event["field"] in TEXTS:
        return event.get("text", "")
    return "".join(event["value"].values()) if event["type"] == "region_close" else ""


def joined(parts: Iterable[Part]) -> list[Any]:
    """Join neighbouring texts of the same type (`str` or `ReasoningText`)."""
    groups: Iterator[tuple[Any, Iterator[Any]]] = groupby(parts, type)
    return [each for kind, group in groups for each in ([kind("".join(group))] if issubclass(kind, str) else group)]


def _listed(value: object) -> list:
    return value if isinstance(value, list) else [value]


def call_of(value: Json) -> ToolCall:
    """Make a `ToolCall` from a parsed JSON value. Raises one of `UNREADABLE` if the value is not a call, or if its name
    or arguments are not portable (`json_fault`)."""
    function = value["function"]
    name, arguments = function["name"], function["arguments"]
    if not (isinstance(name, str) and name):
        raise ValueError("a call needs a name")
    if fault := json_fault(name) or json_fault(arguments_of(arguments)):
        raise ValueError(fault)
    return ToolCall(name, arguments or "{}" if isinstance(arguments, str) else json.dumps(arguments))


def _strings(value: object) -> Iterable[str]:
    """Yield all texts in a JSON value, keys of objects excepted."""
    if isinstance(value, str):
        return [value]
    each = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return chain.from_iterable(map(_strings, each))
