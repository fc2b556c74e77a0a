"""OpenAI's three endpoints: what a request says in Transformers' words, and an answer in OpenAI's."""

import time

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall
from openai.types.completion_usage import PromptTokensDetails
from openai.types.responses import ResponseCompletedEvent, ResponseIncompleteEvent
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler, _ResponseStreamBuilder, compute_usage
from transformers.cli.serving.utils import BaseHandler, GenerationState, Modality, ReasoningText, ToolCall

from .errors import Refused
from .outgoing import DATA, error_of
from .written import joined

LENGTHS = {"max_tokens", "max_completion_tokens", "max_output_tokens"}


class _Handler(BaseHandler):
    """name   of the model"""

    def __init__(self, name: str, model, tokenizer):
        super().__init__(ModelManager(), GenerationState())
        self.name, self.model, self.tokenizer = name, model, tokenizer

    def check(self, body) -> None:
        """Raise what Transformers' handler refuses, before there is a prompt."""
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
        items.close(written)
        return items.response(call).model_dump(exclude_none=True)

    async def events(self, call, written, identity, parts):
        items = Items(self.name, identity)
        yield "".join(items.start_response())
        async for each in parts:
            for part in each:
                yield "".join(items.add(part))
        yield "".join(items.close(written))
        yield items.last(call)

    def failed(self, refusal) -> str:
        return "".join(Items(self.name, "").error(refusal.message))


class Items(_ResponseStreamBuilder):
    """The items of a response, in their order, and the events that tell them."""

    def __init__(self, name: str, identity: str):
        made = dict(id=f"resp_{identity}", created_at=time.time(), model=name, object="response")
        made |= dict(tools=[], parallel_tool_calls=False, tool_choice="auto")  # OpenAI's type needs them
        super().__init__(request_id=identity, response_defaults=made)
        self.identity, self.output, self.state = identity, [], "completed"

    def add(self, part) -> list:
        if isinstance(part, ToolCall):
            return self._closed() + self._call(part)
        if isinstance(part, ReasoningText):
            opened = [] if self.reasoning_open else self._closed() + self.start_reasoning()
            return opened + self.reasoning_delta(part)
        opened = [] if self.message_open else self._closed() + self.start_message()
        return opened + self.text_delta(part)

    def close(self, written) -> list:
        """What remains once all parts were added."""
        self.state = "incomplete" if written.finish == "length" else "completed"
        opened = [] if self.message_open or self.output or self.reasoning_open else self.start_message()
        return opened + self._closed()

    def response(self, call):
        usage = compute_usage(call.prompt_tokens, call.new_tokens)
        usage.input_tokens_details.cached_tokens = call.cached_tokens
        why = dict(incomplete_details=dict(reason="max_output_tokens")) if self.state == "incomplete" else {}
        return self._response(self.state, output=self.output, usage=usage, **why)

    def last(self, call) -> str:
        said = self.response(call)
        if self.state == "completed":
            return self._emit(
                ResponseCompletedEvent(type="response.completed", sequence_number=self.seq, response=said)
            )
        event = ResponseIncompleteEvent(type="response.incomplete", sequence_number=self.seq, response=said)
        return self._emit(event)

    def _call(self, part) -> list:
        self.output_index -= 1  # Transformers' builder leaves one out
        events = self.tool_call(_named(self.identity, len(self.tool_calls)), part.name, part.arguments)
        self.output_index += 1
        self.output.append(self.tool_calls[-1])
        return events

    def _closed(self) -> list:
        """The events that end what is open."""
        if self.reasoning_open:
            events = self.finish_reasoning()
            self.output.append(self.reasoning_item)
            self.full_reasoning = ""
            self.reasoning_id = f"rs_{self.identity}_{len(self.output)}"
            return events
        if self.message_open:
            events = self.finish_message()
            self.output.append(self.message_item)
            self.content, self.output_index = "", self.output_index + 1
            self.msg_id = f"msg_{self.identity}_{len(self.output)}"
            return events
        return []

    def _emit(self, event) -> str:
        """The end of an item says whether it is all of it."""
        if event.type == "response.output_item.done" and event.item.type != "function_call":
            event.item.status = self.state
        return super()._emit(event)


def _usage(call) -> CompletionUsage:
    read, wrote = call.prompt_tokens, call.new_tokens
    return CompletionUsage(
        prompt_tokens=read, completion_tokens=wrote, total_tokens=read + wrote,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=call.cached_tokens),
    )  # fmt: skip


def _named(identity: str, at: int) -> str:
    return f"{identity}_tool_call_{at}"


def _called(identity: str, at: int, part) -> dict:
    return dict(id=_named(identity, at), function=dict(name=part.name, arguments=part.arguments))
