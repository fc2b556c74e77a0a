"""OpenAI's three endpoints: the messages of a request, and its answers as OpenAI writes them."""

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from itertools import accumulate
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall

from . import messages
from .call import Call
from .errors import Refused
from .events import Items
from .outgoing import DATA, Stream, error_of
from .sharing import said as shared
from .written import HALF, Numbered, Part, Token, Written, joined

DONE = f"{DATA}[DONE]\n\n"


class _Handler:
    """name   of the model"""

    def __init__(self, name: str, tokenizer):
        self.name, self.tokenizer = name, tokenizer

    def messages_of(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """A request's messages, as the chat template takes them."""
        raise NotImplementedError

    def whole(self, call: Call, identity: str, answers: list[Written], parts: list[Numbered]) -> dict[str, Any]:
        """The answers, of all (number of an answer, parts of it)."""
        raise NotImplementedError

    def stream(self, call: Call, identity: str, answers: list[Written], parts: AsyncIterator[Numbered]) -> Stream:
        """The answers as a stream; their parts come one list after the other."""
        raise NotImplementedError

    def _chats(self) -> None:
        if not self.tokenizer.chat_template:
            raise Refused(400, "the model has no chat template: ask at /v1/completions")


class _Choices(_Handler):
    """Of answers that are choices, each with its number."""

    kind, part = "", ""  # of the whole, and of an event of a stream

    def choice(self, identity: str, parts: list[Part]) -> dict[str, Any]:
        """An answer of all its parts."""
        raise NotImplementedError

    def deltas(self, identity: str, calls: int, parts: list[Part]) -> Iterator[dict[str, Any]]:
        """Choices of a stream that tell parts; calls: tool calls before them."""
        raise NotImplementedError

    def first(self) -> list[dict[str, Any]]:
        """Choices before an answer's first part."""
        return []

    def whole(self, call: Call, identity: str, answers: list[Written], parts: list[Numbered]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            found = self.choice(identity, joined([part for at, each in parts if at == index for part in each or ()]))
            choices.append(dict(index=index, finish_reason=answer.finish) | found)
        return self._said(self.kind, identity, choices, call)

    def stream(self, call: Call, identity: str, answers: list[Written], parts: AsyncIterator[Numbered]) -> Stream:
        return Stream(self._events(call, identity, answers, parts), call, error_of)

    async def _events(self, call, identity, answers, parts) -> AsyncGenerator[str, None]:
        calls: dict = {}  # number of an answer -> tool calls that it has had
        async for at, each in parts:
            if at not in calls:
                calls[at] = 0
                for first in self.first():
                    yield self._event(identity, dict(first, index=at))
            if each is None:
                empty = next(iter(self.deltas(identity, 0, [])))
                yield self._event(identity, dict(empty, index=at, finish_reason=answers[at].finish))
                continue
            for delta in self.deltas(identity, calls[at], each):
                yield self._event(identity, dict(delta, index=at))
            calls[at] += sum(isinstance(part, ToolCall) for part in each)
        if call.usage:
            yield _event(self._said(self.part, identity, [], call))
        yield DONE

    def _event(self, identity, choice) -> str:
        return _event(self._said(self.part, identity, [choice]))

    def _said(self, kind, identity, choices, call=None) -> dict:
        usage = {} if call is None else dict(usage=_usage(call)) | _ours(call)
        return dict(id=identity, object=kind, created=int(time.time()), model=self.name, choices=choices) | usage


class Chat(_Choices):
    """/v1/chat/completions."""

    kind, part = "chat.completion", "chat.completion.chunk"

    def messages_of(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        self._chats()
        return messages.of_chat(self.tokenizer, body["messages"])

    def choice(self, identity: str, parts: list[Part]) -> dict[str, Any]:
        text, reasoning = ("".join(part for part in parts if type(part) is kind) for kind in (str, ReasoningText))
        calls = [_call(identity, at, part) for at, part in enumerate(p for p in parts if isinstance(p, ToolCall))]
        said: dict = dict(role="assistant", content=text)
        said |= (dict(tool_calls=calls) if calls else {}) | (dict(reasoning_content=reasoning) if reasoning else {})
        return dict(message=said) | self._logs(parts)

    def first(self) -> list[dict[str, Any]]:
        return [dict(delta=dict(role="assistant"))]

    def deltas(self, identity: str, calls: int, parts: list[Part]) -> Iterator[dict[str, Any]]:
        logs = self._logs(parts)
        for part in parts:
            if isinstance(part, ToolCall):
                yield dict(delta=dict(tool_calls=[dict(_call(identity, calls, part), index=calls)]))
                calls += 1
            elif isinstance(part, str):
                name = "reasoning_content" if isinstance(part, ReasoningText) else "content"
                yield dict(delta={name: part})
        if logs or not parts:
            yield dict(delta={}) | logs

    def _logs(self, parts) -> dict:
        content = [
            dict(_number(part.letters, part.log), top_logprobs=[_number(*each) for each in part.others])
            for part in parts
            if isinstance(part, Token)
        ]
        return dict(logprobs=dict(content=content, refusal=None)) if content else {}


class Completions(_Choices):
    """/v1/completions."""

    kind = part = "text_completion"

    def messages_of(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        return []

    def choice(self, identity: str, parts: list[Part]) -> dict[str, Any]:
        return dict(text="".join(part for part in parts if isinstance(part, str))) | self._logs(parts)

    def deltas(self, identity: str, calls: int, parts: list[Part]) -> Iterator[dict[str, Any]]:
        text, logs = "".join(part for part in parts if isinstance(part, str)), self._logs(parts)
        if text or logs or not parts:
            yield dict(text=text) | logs

    def _logs(self, parts) -> dict:
        tokens = [part for part in parts if isinstance(part, Token)]
        if not tokens:
            return {}
        letters = [token.letters for token in tokens]
        return dict(logprobs=dict(
            tokens=letters, token_logprobs=[token.log for token in tokens],
            top_logprobs=[dict(reversed(token.others)) for token in tokens],
            text_offset=[tokens[0].start, *(tokens[0].start + at for at in accumulate(map(len, letters[:-1])))],
        ))  # fmt: skip


class Responses(_Handler):
    """/v1/responses."""

    def messages_of(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        self._chats()
        return messages.of_input(self.tokenizer, body["input"], body.get("instructions"))

    def whole(self, call: Call, identity: str, answers: list[Written], parts: list[Numbered]) -> dict[str, Any]:
        items = Items(self.name, identity)
        for part in joined([part for _, each in parts for part in each or ()]):
            items.add(part)
        items.close(answers[0].finish)
        return items.response(call) | _ours(call)

    def stream(self, call: Call, identity: str, answers: list[Written], parts: AsyncIterator[Numbered]) -> Stream:
        items = Items(self.name, identity)
        events = self._events(call, items, answers, parts)
        return Stream(events, call, lambda refusal: items.error(refusal.message))

    async def _events(self, call, items, answers, parts) -> AsyncGenerator[str, None]:
        yield items.begin()
        async for _, each in parts:
            for part in each or ():
                yield items.add(part)
        yield items.close(answers[0].finish)
        yield items.last(call)


def _event(value: dict) -> str:
    return f"{DATA}{json.dumps(value, ensure_ascii=False)}\n\n"


def _usage(call) -> dict:
    read, wrote = call.prompt_tokens, call.new_tokens
    return dict(
        prompt_tokens=read, completion_tokens=wrote, total_tokens=read + wrote,
        prompt_tokens_details=dict(cached_tokens=call.cached_tokens),
    )  # fmt: skip


def _ours(call) -> dict:
    """The field `kvevict` of an answer: how much of a shared beginning is kept."""
    told = shared(call)
    return dict(kvevict=told) if told else {}


def _call(identity: str, at: int, part) -> dict:
    function = dict(name=part.name, arguments=part.arguments)
    return dict(id=f"{identity}_tool_call_{at}", type="function", function=function)


def _number(letters: str, log: float) -> dict:
    return dict(token=letters, logprob=log, bytes=None if HALF in letters else list(letters.encode()))
