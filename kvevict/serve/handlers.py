"""Formats answers as responses and events of OpenAI's two endpoints."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

from transformers.cli.serving.utils import ReasoningText, ToolCall

from .call import Call
from .errors import Json
from .outgoing import DATA
from .template import Part, Token, joined
from .written import Numbered, Written

DONE = f"{DATA}[DONE]\n\n"


class Completions:
    """Formats the answers of /v1/completions. name: the model's name."""

    kind = part = "text_completion"  # value of the field `object`: in a complete response, and in a stream's event
    first: tuple[Json, ...] = ()  # entries of `choices` that a stream sends before an answer's first part

    def __init__(self, name: str) -> None:
        self.name = name

    def choice(self, call: Call, parts: list[Part]) -> Json:
        """Return an answer's entry in the response's field `choices`. parts: all parts of the answer, or, in a stream,
        its new parts."""
        return dict(text="".join(part for part in parts if isinstance(part, str))) | self._logs(parts)

    def deltas(self, call: Call, calls: int, parts: list[Part]) -> Iterator[Json]:
        """Yield the entries of `choices` by which a stream sends new parts of an answer; one empty entry if `parts` is
        empty. calls: number of the answer's tool calls before these parts."""
        made = self.choice(call, parts)
        if made != dict(text="") or not parts:
            yield made

    def whole(self, call: Call, answers: list[Written], parts: list[Numbered]) -> Json:
        """Return the complete response to a request without a stream. parts: (answer's number, some of its parts), for
        all answers, with the parts of an answer in order."""
        choices = []
        for index, answer in enumerate(answers):
            found = self.choice(call, joined([part for at, each in parts if at == index for part in each or ()]))
            choices.append(_choice(index, found, answer.finish))
        return self._response(call, self.kind, choices, usage=_usage(call, answers))

    async def events(
        self, call: Call, answers: list[Written], parts: AsyncIterator[Numbered]
    ) -> AsyncGenerator[str, None]:
        """Yield a stream's server-sent events while the answers are written. parts: yields (answer's number, its new
        parts; None: its end)."""
        calls: dict[int, int] = {}  # number of an answer -> number of its tool calls so far
        async for at, each in parts:
            if at not in calls:
                calls[at] = 0
                for first in self.first:
                    yield self._event(call, _choice(at, first))
            if each is None:
                empty = next(iter(self.deltas(call, 0, [])))
                yield self._event(call, _choice(at, empty, answers[at].finish))
                continue
            for delta in self.deltas(call, calls[at], each):
                yield self._event(call, _choice(at, delta))
            calls[at] += sum(isinstance(part, ToolCall) for part in each)
        if call.usage:
            yield _event(self._response(call, self.part, [], usage=_usage(call, answers)))
        yield DONE

    def _event(self, call: Call, choice: Json) -> str:
        return _event(self._response(call, self.part, [choice], **(dict(usage=None) if call.usage else {})))

    def _response(self, call: Call, kind: str, choices: list, **more: object) -> Json:
        return dict(id=call.identity, object=kind, created=call.created, model=self.name, choices=choices, **more)

    def _logs(self, parts: list) -> Json:
        tokens = [part for part in parts if isinstance(part, Token)]
        if not tokens:
            return {}
        return dict(logprobs=dict(
            tokens=[_letters(token.data) for token in tokens], token_logprobs=[token.log for token in tokens],
            top_logprobs=[{_letters(data): log for data, log in reversed(token.others)} for token in tokens],
            text_offset=[token.start for token in tokens],
        ))  # fmt: skip


class ChatCompletions(Completions):
    """Formats the answers of /v1/chat/completions."""

    kind, part = "chat.completion", "chat.completion.chunk"
    first = (dict(delta=dict(role="assistant")),)

    def choice(self, call: Call, parts: list[Part]) -> Json:
        text, reasoning = ("".join(part for part in parts if type(part) is kind) for kind in (str, ReasoningText))
        calls = [_call(call, part) for part in parts if isinstance(part, ToolCall)]
        message: Json = dict(role="assistant", content=text or (None if calls else ""), refusal=None)
        message |= (dict(tool_calls=calls) if calls else {}) | (dict(reasoning_content=reasoning) if reasoning else {})
        return dict(message=message) | self._logs(parts)

    def deltas(self, call: Call, calls: int, parts: list[Part]) -> Iterator[Json]:
        logs = self._logs(parts)
        for part in parts:
            if isinstance(part, ToolCall):
                yield dict(delta=dict(tool_calls=[dict(_call(call, part), index=calls)]))
                calls += 1
            elif isinstance(part, str):
                name = "reasoning_content" if isinstance(part, ReasoningText) else "content"
                yield dict(delta={name: part})
        if logs or not parts:
            yield dict(delta={}) | logs

    def _logs(self, parts: list) -> Json:
        content = [
            dict(_number(part.data, part.log), top_logprobs=[_number(*each) for each in part.others])
            for part in parts
            if isinstance(part, Token)
        ]
        return dict(logprobs=dict(content=content, refusal=None)) if content else {}


def _event(value: Json) -> str:
    return f"{DATA}{json.dumps(value, ensure_ascii=False)}\n\n"


def _choice(index: int, fields: Json, finish: str | None = None) -> Json:
    """Return an entry of `choices` with every field that OpenAI's schema requires, because some clients check it."""
    return dict(index=index, finish_reason=finish, logprobs=None) | fields


def _usage(call: Call, answers: list[Written]) -> Json:
    call.gather()
    read, wrote = call.prompt_tokens, call.new_tokens
    return dict(
        prompt_tokens=read, completion_tokens=wrote, total_tokens=read + wrote,
        prompt_tokens_details=dict(cached_tokens=call.cached_tokens),
        completion_tokens_details=dict(reasoning_tokens=sum(answer.reasoning for answer in answers)),
    )  # fmt: skip


def _call(call: Call, part: ToolCall) -> Json:
    return dict(id=call.tool_id(), type="function", function=dict(name=part.name, arguments=part.arguments))


def _number(data: bytes, log: float) -> Json:
    return dict(token=_letters(data), logprob=log, bytes=list(data))


def _letters(data: bytes) -> str:
    """Return a token's text in OpenAI's form: a byte that is only a part of a character is written as \\xf0."""
    return data.decode(errors="backslashreplace")
