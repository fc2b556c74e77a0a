"""OpenAI's three endpoints: a request in Transformers' words, and an answer in OpenAI's."""

import time

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall
from openai.types.completion_usage import PromptTokensDetails
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import BaseHandler, GenerationState, Modality, ReasoningText, ToolCall

from .errors import Refused
from .events import Items
from .outgoing import DATA, error_of
from .written import joined

LENGTHS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}


class _Handler(BaseHandler):
    """name   of the model"""

    def __init__(self, name: str, model, tokenizer):
        super().__init__(ModelManager(), GenerationState())
        self.name, self.model, self.tokenizer = name, model, tokenizer

    def check(self, body) -> None:
        """Raise Transformers' refusal of a request, before there is a prompt."""
        self._validate_request(body)
        if body.get("model", self.name) != self.name:
            name = str(body["model"])[:200]
            raise Refused(404, f"there is no model {name!r}: this server has {self.name!r}", "model_not_found")

    def messages_of(self, body) -> list:
        """A request's messages, as the chat template takes them."""
        raise NotImplementedError

    def whole(self, call, written, identity: str, parts: list) -> dict:
        """An answer, of all its parts."""
        raise NotImplementedError

    def events(self, call, written, identity: str, parts):
        """The events of an answer whose parts come one list after the other."""
        raise NotImplementedError

    def failed(self, refusal) -> str:
        """The events of a stream that ends with an error."""
        return error_of(refusal)

    def _taken(self, messages: list) -> list:
        if not self.tokenizer.chat_template:
            raise Refused(400, "the model has no chat template: ask at /v1/completions")
        return BaseHandler.get_processor_inputs_from_messages(messages, Modality.LLM)

    def config(self, call, body):
        """How tokens are chosen. A temperature samples, whatever the model's own configuration does."""
        config = self._build_generation_config(body, self.model.generation_config)
        for name, value in call.sampling.items():
            if not body.keys() & (LENGTHS if name == "max_new_tokens" else {name}):
                setattr(config, name, value)
        if body.get("temperature"):
            config.do_sample = True
        return config


class Chat(_Handler, ChatCompletionHandler):
    """/v1/chat/completions."""

    def messages_of(self, body) -> list:
        return self._taken(body["messages"])

    def whole(self, call, written, identity, parts) -> dict:
        parts = joined(parts)
        text, reasoning = ("".join(part for part in parts if type(part) is kind) for kind in (str, ReasoningText))
        calls = [
            dict(type="function", **_called(identity, at, part))
            for at, part in enumerate(part for part in parts if isinstance(part, ToolCall))
        ]
        return self._build_completion(
            identity, text, self.name, written.finish, _usage(call), calls or None, reasoning or None
        )

    async def events(self, call, written, identity, parts):
        def event(**what):
            return self._build_chunk_sse(identity, model=self.name, **what)

        yield event(role="assistant")
        calls = 0
        async for each in parts:
            for part in each:
                if isinstance(part, ToolCall):
                    made = ChoiceDeltaToolCall(index=calls, type="function", **_called(identity, calls, part))
                    calls += 1
                    yield event(tool_calls=[made])
                elif isinstance(part, ReasoningText):
                    yield event(reasoning_content=part)
                else:
                    yield event(content=part)
        yield event(finish_reason=written.finish, usage=_usage(call))
        yield f"{DATA}[DONE]\n\n"


class Completions(_Handler, CompletionHandler):
    """/v1/completions."""

    def messages_of(self, body) -> list:
        return []

    def whole(self, call, written, identity, parts) -> dict:
        choice = CompletionChoice(text="".join(parts), index=0, finish_reason=written.finish)
        return Completion(
            id=identity, created=int(time.time()), model=self.name, choices=[choice], object="text_completion",
            usage=_usage(call),
        ).model_dump(exclude_none=True)  # fmt: skip

    async def events(self, call, written, identity, parts):
        async for each in parts:
            for part in each:
                yield self._build_chunk_sse(identity, self.name, text=part)
        yield self._build_chunk_sse(identity, self.name, finish_reason=written.finish, usage=_usage(call))
        yield f"{DATA}[DONE]\n\n"


class Responses(_Handler, ResponseHandler):
    """/v1/responses."""

    def messages_of(self, body) -> list:
        return self._taken(ResponseHandler._normalize_input(body))

    def whole(self, call, written, identity, parts) -> dict:
        items = Items(self.name, identity)
        for part in joined(parts):
            items.add(part)
        items.close(written.finish)
        return items.response(call).model_dump(exclude_none=True)

    async def events(self, call, written, identity, parts):
        items = Items(self.name, identity)
        yield items.begin()
        async for each in parts:
            for part in each:
                yield items.add(part)
        yield items.close(written.finish)
        yield items.last(call)

    def failed(self, refusal) -> str:
        return Items(self.name, "").error(refusal.message)


def _usage(call) -> CompletionUsage:
    read, wrote = call.prompt_tokens, call.new_tokens
    return CompletionUsage(
        prompt_tokens=read, completion_tokens=wrote, total_tokens=read + wrote,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=call.cached_tokens),
    )  # fmt: skip


def _called(identity: str, at: int, part) -> dict:
    return dict(id=f"{identity}_tool_call_{at}", function=dict(name=part.name, arguments=part.arguments))
