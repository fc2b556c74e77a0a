"""An answer: its text, reasoning, tool calls and end, from the tokens that the model writes, one after the other."""

import json
import re
from itertools import chain

from transformers.cli.serving.utils import ReasoningText, ToolCall, get_response_template
from transformers.utils.chat_parsing import ResponseParser

from ..prompts import rendered

HALF = "\ufffd"  # what a tokenizer makes of a part of a character
REASONING, CALLS = ("reasoning_content", "thinking"), "tool_calls"  # fields of response templates


class Form:
    """How a model writes: which of its tokens are not text, and its response template, which tells reasoning and tool
    calls from text. The template that Transformers has for the model's type counts only where the chat template opens
    an answer as that one expects."""

    def __init__(self, tokenizer, model):
        added = tokenizer.added_tokens_decoder
        self.tokenizer = tokenizer
        self.special = {at for at, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        self.template = get_response_template(tokenizer, model) if tokenizer.chat_template else None
        if self.template is not None and getattr(tokenizer, "response_template", None) is None:
            opened = rendered(tokenizer, [{"role": "user", "content": "?"}], "a user's turn alone")
            anchors = self.template["start_anchor"]
            if not any(each in opened for each in ([anchors] if isinstance(anchors, str) else anchors)):
                self.template = None

    def parser(self, prompt: list, tools: list | None):
        """Of an answer to a prompt's ids; without tools there are no calls. None: all is text."""
        if self.template is None:
            return None
        fields = {name: field for name, field in self.template["fields"].items() if tools or name != CALLS}
        return Parser({**self.template, "fields": fields}, self.tokenizer.decode(prompt), tools)

    def silent(self, parser) -> set:
        """Special tokens that are not written; those are that the response template looks for."""
        if parser is None:
            return self.special
        looked_for = "\n".join(_strings(self.template))
        letters = {at: self.tokenizer.decode([at]) for at in self.special}
        return {at for at, each in letters.items() if each not in looked_for and re.escape(each) not in looked_for}


class Written:
    """An answer that grows by `put` until it has `ended`; `close` has the rest. Both return the parts that are certain:
    texts, `ReasoningText` and `ToolCall`.

    stops   strings before which the answer ends, wherever the model writes them
    ends    tokens with which it ends
    most    tokens that it may have
    """

    def __init__(self, form: Form, parser, stops, ends, most: int):
        self.tokenizer, self.parser, self.silent = form.tokenizer, parser, form.silent(parser)
        self.stops, self.ends, self.most = stops, ends, most
        self.tokens, self.ended, self.calls = 0, False, False
        self._ids: list = []  # that are decoded together; the first `_told` are in a part already
        self._told, self._held = 0, ""  # text that may begin a stop string
        self._end: int | None = None  # the token that ended it

    @property
    def finish(self) -> str:
        """OpenAI's `finish_reason`."""
        if not self.ended and self.tokens >= self.most:
            return "length"
        return "tool_calls" if self.calls else "stop"

    def put(self, token: int) -> list:
        self.tokens += 1
        if token in self.ends:
            self.ended, self._end = True, token
        elif token not in self.silent:
            self._ids.append(token)
            text = self._new()
            if text and not text.endswith(HALF):
                self._ids, self._told = self._ids[self._told :], len(self._ids) - self._told
                return self._parsed(self._until_stop(text))
        return []

    def close(self) -> list:
        if self.ended and self._end is None:
            rest = ""  # it comes after a stop string
        else:
            rest = self._until_stop(self._new().rstrip(HALF)) + self._held
        return self._parsed(rest) + self._last()

    def _last(self) -> list:
        if self.parser is None:
            return []
        end = "" if self._end is None or self._end in self.silent else self._decoded([self._end])
        parts = self.parser.close(end, cut=self._end is None)
        if end and parts and isinstance(parts[-1], str):  # where the template expects no end
            parts[-1] = type(parts[-1])(parts[-1].removesuffix(end))
        return self._counted([part for part in parts if part])

    def _new(self) -> str:
        """The letters of the ids that are not told."""
        return self._decoded(self._ids)[len(self._decoded(self._ids[: self._told])) :]

    def _decoded(self, ids) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""

    def _until_stop(self, text: str) -> str:
        """What of a text, after what was held of it before, stands before a stop string for certain."""
        text = self._held + text
        cut = cut_at(text, self.stops)
        if cut < len(text):
            self.ended, self._end, self._held = True, None, ""
        else:
            cut -= unfinished(text, self.stops)
            self._held = text[cut:]
        return text[:cut]

    def _parsed(self, text: str) -> list:
        if self.parser is None:
            return [text] if text else []
        return self._counted(self.parser.parts(text)) if text else []

    def _counted(self, parts: list) -> list:
        self.calls = self.calls or any(isinstance(part, ToolCall) for part in parts)
        return parts


class Parser(ResponseParser):
    """Transformers' parser, which loses nothing: a tool call that is cut, or cannot be read, is text. Nothing
    of the prompt is in what it returns."""

    _given = 1 << 62  # letters of the buffer that are the prompt's

    def __init__(self, template: dict, prompt: str, tools: list | None):
        self._cut, self._start, self._inside = False, 0, 0  # where the field that is open begins, and its content
        self._spoke, self._blank = False, ""  # whether a field has letters, and space after them
        self._lost = False  # whether a call that is none was the last
        super().__init__(template, prompt, tools=tools)
        self._given = len(self._buffer)

    def parts(self, text: str) -> list:
        """What more text tells."""
        return self._told(self.feed(text))

    def close(self, text: str, cut: bool) -> list:
        """What the last text tells; cut: whether the answer could have gone on."""
        events = self.feed(text)
        self._cut = cut
        self._process(events, eos=True)
        return self._told(events)

    def _told(self, events: list) -> list:
        parts: list = []
        for event in events:
            field, kind = event["field"], event["type"]
            if kind == "text":
                parts.append(self._blank + event["text"])
                self._lost, self._blank = True, ""
            elif kind == "region_open" and field != CALLS:
                self._spoke, self._blank, self._lost = self._lost and field == "content", "", False
            elif kind == "region_close" and field == CALLS:
                parts.extend(map(_call, _listed(event["value"])))
                self._blank = ""
            elif kind == "region_chunk" and not event["dirty"] and (field == "content" or field in REASONING):
                text = self._stripped(event["text"], field)
                if text:
                    parts.append(ReasoningText(text) if field in REASONING else text)
        return joined(parts)

    def _stripped(self, text: str, field: str) -> str:
        """Without the space at the ends of a field, as the whole message has it."""
        if not self._spec.fields[field].content_args.get("strip", True):
            return text
        text = self._blank + text if self._spoke else text.lstrip()
        said = text.rstrip()
        self._spoke, self._blank = self._spoke or bool(said), text[len(said) :]
        return said

    # -- Transformers' methods, around which this stands ------------------------------------------------------------

    def _accumulate(self, events, text) -> None:
        count = len(events)
        super()._accumulate(events, text)
        for event in events[count:]:
            if "text" in event:
                event["text"] = text[max(self._given - self._pos, 0) :]

    def _open_explicit(self, events, field, m) -> None:
        self._start, self._inside = m.start(), m.end()
        super()._open_explicit(events, field, m)

    def _close_current(self, events) -> None:
        field, count = self._current, len(events)
        try:
            if field == CALLS and self._cut and self._inside + len(self._body) == self._pos:
                raise ValueError("its end did not come")
            super()._close_current(events)
            if field == CALLS:
                for event in events[count:]:
                    list(map(_call, _listed(event["value"])))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            del events[count:]
            text = self._buffer[max(self._start, self._given) : self._pos]
            events.append({"type": "text", "field": field, "text": text})
            self._reset_to_implicit()


def joined(parts: list) -> list:
    """Parts of which no two texts of a kind follow each other."""
    found: list = []
    for part in parts:
        if found and isinstance(part, str) and type(found[-1][0]) is type(part):
            found[-1].append(part)
        else:
            found.append([part])
    return [type(each[0])("".join(each)) if isinstance(each[0], str) else each[0] for each in found]


def _listed(value) -> list:
    return value if isinstance(value, list) else [value]


def _call(value) -> ToolCall:
    """Raises what a value raises that is not a call."""
    function = value["function"]
    name, arguments = function["name"], function["arguments"]
    if not (isinstance(name, str) and name):
        raise ValueError("a call needs a name")
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments))


def _strings(value):
    """The texts in a value of JSON."""
    if isinstance(value, str):
        return [value]
    each = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return chain.from_iterable(map(_strings, each))


def cut_at(text: str, stops) -> int:
    """Where the first stop string begins; the text's length without one."""
    return min((at for at in map(text.find, stops) if at >= 0), default=len(text))


def unfinished(text: str, stops) -> int:
    """How many of the text's last letters may begin a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
