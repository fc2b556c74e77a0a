"""OpenAI's three endpoints: the messages of a request, and answers as OpenAI writes them."""

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from itertools import accumulate
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall

from . import messages
from .call import Call
from .events import Items
from .outgoing import DATA, Stream, error_of
from .sharing import said as shared
from .written import HALF, Numbered, Part, Token, Written, joined

DONE = f"{DATA}[DONE]\n\n"


class Completions:
    """/v1/completions. name: the model's."""

    kind = part = "text_completion"  # of a whole answer, and of an event of a stream
    first: tuple = ()  # choices before an answer's first part

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name, self.tokenizer = name, tokenizer

    def messages_of(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Make the messages that the chat template takes."""
        return []

    def choice(self, call: Call, parts: list[Part]) -> dict[str, Any]:
        """Make the choice of an answer's parts."""
        return dict(text="".join(part for part in parts if isinstance(part, str))) | self._logs(parts)

    def deltas(self, call: Call, calls: int, parts: list[Part]) -> Iterator[dict[str, Any]]:
        """Make the choices of a stream that tell parts. calls: tool calls before them."""
        text, logs = "".join(part for part in parts if isinstance(part, str)), self._logs(parts)
        if text or logs or not parts:
            yield dict(text=text) | logs

    def whole(self, call: Call, answers: list[Written], parts: list[Numbered]) -> dict[str, Any]:
        """Make the response of all (number of an answer, parts of it)."""
        choices = []
        for index, answer in enumerate(answers):
            found = self.choice(call, joined([part for at, each in parts if at == index for part in each or ()]))
            choices.append(dict(index=index, finish_reason=answer.finish) | found)
        return self._said(call, self.kind, choices, usage=True)

    def stream(self, call: Call, answers: list[Written], parts: AsyncIterator[Numbered]) -> Stream:
        """Make the response of parts that come one list after the other."""
        return Stream(self._events(call, answers, parts), call, error_of)

    async def _events(self, call: Call, answers: list, parts: Any) -> AsyncGenerator[str, None]:
        calls: dict = {}  # number of an answer -> tool calls that it has had
        async for at, each in parts:
            if at not in calls:
                calls[at] = 0
                for first in self.first:
                    yield self._event(call, dict(first, index=at))
            if each is None:
                empty = next(iter(self.deltas(call, 0, [])))
                yield self._event(call, dict(empty, index=at, finish_reason=answers[at].finish))
                continue
            for delta in self.deltas(call, calls[at], each):
                yield self._event(call, dict(delta, index=at))
            calls[at] += sum(isinstance(part, ToolCall) for part in each)
        if call.usage:
            yield _event(self._said(call, self.part, [], usage=True))
        yield DONE

    def _event(self, call: Call, choice: dict) -> str:
        return _event(self._said(call, self.part, [choice]))

    def _said(self, call: Call, kind: str, choices: list, usage: bool = False) -> dict:
        said = dict(id=call.identity, object=kind, created=int(time.time()), model=self.name, choices=choices)
        return said | dict(usage=_usage(call)) | _ours(call) if usage else said

    def _logs(self, parts: list) -> dict:
        tokens = [part for part in parts if isinstance(part, Token)]
        if not tokens:
            return {}
        letters = [token.letters for token in tokens]
        return dict(logprobs=dict(
            tokens=letters, token_logprobs=[token.log for token in tokens],
            top_logprobs=[dict(reversed(token.others)) for token in tokens],
            text_offset=[tokens[0].start, *(tokens[0].start + at for at in accumulate(map(len, letters[:-1])))],
        ))  # fmt: skip


class Chat(Completions):
    """/v1/chat/completions."""

    kind, part = "chat.completion", "chat.completion.chunk"
    first = (dict(delta=dict(role="assistant")),)

    def messages_of(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        return messages.of_chat(self.tokenizer, body["messages"])

    def choice(self, call: Call, parts: list[Part]) -> dict[str, Any]:
        text, reasoning = ("".join(part for part in parts if type(part) is kind) for kind in (str, ReasoningText))
        calls = [_call(call, at, part) for at, part in enumerate(p for p in parts if isinstance(p, ToolCall))]
        said: dict = dict(role="assistant", content=text)
        said |= (dict(tool_calls=calls) if calls else {}) | (dict(reasoning_content=reasoning) if reasoning else {})
        return dict(message=said) | self._logs(parts)

    def deltas(self, call: Call, calls: int, parts: list[Part]) -> Iterator[dict[str, Any]]:
        logs = self._logs(parts)
        for part in parts:
            if isinstance(part, ToolCall):
                yield dict(delta=dict(tool_calls=[dict(_call(call, calls, part), index=calls)]))
                calls += 1
            elif isinstance(part, str):
                name = "reasoning_content" if isinstance(part, ReasoningText) else "content"
                yield dict(delta={name: part})
        if logs or not parts:
            yield dict(delta={}) | logs

    def _logs(self, parts: list) -> dict:
        content = [
            dict(_number(part.letters, part.log), top_logprobs=[_number(*each) for each in part.others])
            for part in parts
            if isinstance(part, Token)
        ]
        return dict(logprobs=dict(content=content, refusal=None)) if content else {}


class Responses:
    """/v1/responses, with the methods of `Completions`. name: the model's."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name, self.tokenizer = name, tokenizer

    def messages_of(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        return messages.of_input(self.tokenizer, body["input"], body.get("instructions"))

    def whole(self, call: Call, answers: list[Written], parts: list[Numbered]) -> dict[str, Any]:
        items = Items(self.name, call.identity)
        for part in joined([part for _, each in parts for part in each or ()]):
            items.add(part)
        items.close(answers[0].finish)
        return items.response(call) | _ours(call)

    def stream(self, call: Call, answers: list[Written], parts: AsyncIterator[Numbered]) -> Stream:
        items = Items(self.name, call.identity)
        events = self._events(call, items, answers, parts)
        return Stream(events, call, lambda refusal: items.error(refusal.message))

    async def _events(self, call: Call, items: Items, answers: list, parts: Any) -> AsyncGenerator[str, None]:
        yield items.begin()
        async for _, each in parts:
            for part in each or ():
                yield items.add(part)
        yield items.close(answers[0].finish)
        yield items.last(call)


def _event(value: dict) -> str:
    return f"{DATA}{json.dumps(value, ensure_ascii=False)}\n\n"


def _usage(call: Call) -> dict:
    read, wrote = call.prompt_tokens, call.new_tokens
    return dict(
        prompt_tokens=read, completion_tokens=wrote, total_tokens=read + wrote,
        prompt_tokens_details=dict(cached_tokens=call.cached_tokens),
    )  # fmt: skip


def _ours(call: Call) -> dict:
    """Make the field `kvevict` of an answer, which says how much of a shared beginning is kept."""
    told = shared(call)
    return dict(kvevict=told) if told else {}


def _call(call: Call, at: int, part: Any) -> dict:
    function = dict(name=part.name, arguments=part.arguments)
    return dict(id=f"{call.identity}_tool_call_{at}", type="function", function=function)


def _number(letters: str, log: float) -> dict:
    return dict(token=letters, logprob=log, bytes=None if HALF in letters else list(letters.encode()))
