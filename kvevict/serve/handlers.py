"""OpenAI's two endpoints: the messages of a request, and answers as OpenAI writes them."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall

from . import messages
from .call import Call
from .outgoing import DATA, Stream
from .template import Part, Token, joined
from .written import Numbered, Written

DONE = f"{DATA}[DONE]\n\n"


class Completions:
    """Answers of /v1/completions. name: the model's."""

    kind = part = "text_completion"  # the `object` of a whole answer, and of an event of a stream
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
        """Make the choices of a stream that hold parts. calls: number of tool calls before the parts."""
        made = self.choice(call, parts)
        if made != dict(text="") or not parts:
            yield made

    def whole(self, call: Call, answers: list[Written], parts: list[Numbered]) -> dict[str, Any]:
        """Make the response of all (number of an answer, parts of it)."""
        choices = []
        for index, answer in enumerate(answers):
            found = self.choice(call, joined([part for at, each in parts if at == index for part in each or ()]))
            choices.append(_choice(index, found, answer.finish))
        return self._said(call, self.kind, choices, usage=_usage(call, answers))

    def stream(self, call: Call, answers: list[Written], parts: AsyncIterator[Numbered]) -> Stream:
        """Make the response of parts that come one list after the other."""
        return Stream(self._events(call, answers, parts), call)

    async def _events(self, call: Call, answers: list, parts: Any) -> AsyncGenerator[str, None]:
        calls: dict = {}  # number of an answer -> tool calls that it has had
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
            yield _event(self._said(call, self.part, [], usage=_usage(call, answers)))
        yield DONE

    def _event(self, call: Call, choice: dict) -> str:
        return _event(self._said(call, self.part, [choice], **(dict(usage=None) if call.usage else {})))

    def _said(self, call: Call, kind: str, choices: list, **more: Any) -> dict:
        return dict(id=call.identity, object=kind, created=call.created, model=self.name, choices=choices, **more)

    def _logs(self, parts: list) -> dict:
        tokens = [part for part in parts if isinstance(part, Token)]
        if not tokens:
            return {}
        return dict(logprobs=dict(
            tokens=[_letters(token.data) for token in tokens], token_logprobs=[token.log for token in tokens],
            top_logprobs=[{_letters(data): log for data, log in reversed(token.others)} for token in tokens],
            text_offset=[token.start for token in tokens],
        ))  # fmt: skip


class Chat(Completions):
    """Answers of /v1/chat/completions."""

    kind, part = "chat.completion", "chat.completion.chunk"
    first = (dict(delta=dict(role="assistant")),)

    def messages_of(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        return messages.of_chat(self.tokenizer, body["messages"])

    def choice(self, call: Call, parts: list[Part]) -> dict[str, Any]:
        text, reasoning = ("".join(part for part in parts if type(part) is kind) for kind in (str, ReasoningText))
        calls = [_call(call, part) for part in parts if isinstance(part, ToolCall)]
        said: dict = dict(role="assistant", content=text or (None if calls else ""), refusal=None)
        said |= (dict(tool_calls=calls) if calls else {}) | (dict(reasoning_content=reasoning) if reasoning else {})
        return dict(message=said) | self._logs(parts)

    def deltas(self, call: Call, calls: int, parts: list[Part]) -> Iterator[dict[str, Any]]:
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

    def _logs(self, parts: list) -> dict:
        content = [
            dict(_number(part.data, part.log), top_logprobs=[_number(*each) for each in part.others])
            for part in parts
            if isinstance(part, Token)
        ]
        return dict(logprobs=dict(content=content, refusal=None)) if content else {}


def _event(value: dict) -> str:
    return f"{DATA}{json.dumps(value, ensure_ascii=False)}\n\n"


def _choice(index: int, said: dict, finish: str | None = None) -> dict:
    """Make a choice, with null for fields that it lacks: clients with a schema stop where a field is missing."""
    return dict(index=index, finish_reason=finish, logprobs=None) | said


def _usage(call: Call, answers: list[Written]) -> dict:
    read, wrote = call.prompt_tokens, call.new_tokens
    return dict(
        prompt_tokens=read, completion_tokens=wrote, total_tokens=read + wrote,
        prompt_tokens_details=dict(cached_tokens=call.cached_tokens),
        completion_tokens_details=dict(reasoning_tokens=sum(answer.reasoning for answer in answers)),
    )  # fmt: skip


def _call(call: Call, part: Any) -> dict:
    return dict(id=call.tool_id(), type="function", function=dict(name=part.name, arguments=part.arguments))


def _number(data: bytes, log: float) -> dict:
    return dict(token=_letters(data), logprob=log, bytes=list(data))


def _letters(data: bytes) -> str:
    """Name a token as OpenAI does: bytes that are a part of a character look like \\xf0."""
    return data.decode(errors="backslashreplace")
