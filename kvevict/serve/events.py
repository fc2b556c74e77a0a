"""A response of /v1/responses: its items, and the events that a stream of them has."""

import time

from openai.types import responses as types
from transformers.cli.serving.response import compute_usage
from transformers.cli.serving.utils import ReasoningText, ToolCall

from .call import Call
from .outgoing import DATA


class Items:
    """The items of a response in their order. Every method returns the events of its change."""

    def __init__(self, name: str, identity: str):
        self.identity, self.output = identity, []  # items that have ended
        self._made = dict(id=f"resp_{identity}", created_at=time.time(), model=name, object="response")
        self._made |= dict(tools=[], parallel_tool_calls=False, tool_choice="auto")  # OpenAI's type needs them
        self._status, self._sent = "in_progress", 0
        self._kind: type | None = None  # of the text that is open
        self._text = ""

    def begin(self) -> str:
        created = self._event(types.ResponseCreatedEvent, "response.created", response=self._response("queued"))
        return created + self._of_all(types.ResponseInProgressEvent)

    def add(self, part: str | ToolCall) -> str:
        """A text, a `ReasoningText` or a `ToolCall`."""
        if isinstance(part, ToolCall):
            return self._end("completed") + self._call(part)
        opened = "" if self._kind is type(part) else self._end("completed") + self._open(type(part))
        self._text += part
        return opened + self._of_text("delta", delta=part)

    def close(self, finish: str) -> str:
        """The end of all that was added; finish: OpenAI's `finish_reason`."""
        self._status = "incomplete" if finish == "length" else "completed"
        opened = "" if self._kind or self.output else self._open(str)
        return opened + self._end(self._status)

    def response(self, call: Call) -> types.Response:
        """The whole response, once it is closed."""
        usage = compute_usage(call.prompt_tokens, call.new_tokens)
        usage.input_tokens_details.cached_tokens = call.cached_tokens
        why = dict(incomplete_details=dict(reason="max_output_tokens")) if self._status == "incomplete" else {}
        return self._response(self._status, output=self.output, usage=usage, **why)

    def last(self, call: Call) -> str:
        incomplete = self._status == "incomplete"
        kind = types.ResponseIncompleteEvent if incomplete else types.ResponseCompletedEvent
        return self._of_all(kind, self.response(call))

    def error(self, message: str) -> str:
        """The end of a response that failed, which may not have begun yet."""
        begun = "" if self._sent else self.begin()
        self._status, error = "failed", types.ResponseError(code="server_error", message=message)
        return (
            begun
            + self._event(types.ResponseErrorEvent, "error", message=message)
            + self._of_all(types.ResponseFailedEvent, self._response("failed", error=error))
        )

    # -- items ------------------------------------------------------------------------------------------------------

    def _call(self, part) -> str:
        name = f"{self.identity}_tool_call_{sum(item.type == 'function_call' for item in self.output)}"
        made = dict(id=name, call_id=name, type="function_call", name=part.name)
        events = self._of_item("added", types.ResponseFunctionToolCall(**made, arguments="", status="in_progress"))
        place, kind = self._place(name), "response.function_call_arguments"
        del place["content_index"]
        events += self._event(
            types.ResponseFunctionCallArgumentsDeltaEvent, f"{kind}.delta", **place, delta=part.arguments
        )
        events += self._event(
            types.ResponseFunctionCallArgumentsDoneEvent, f"{kind}.done", **place, arguments=part.arguments,
            name=part.name,
        )  # fmt: skip
        return events + self._ended(
            types.ResponseFunctionToolCall(**made, arguments=part.arguments, status="completed")
        )

    def _open(self, kind: type) -> str:
        self._kind = kind
        return self._of_item("added", self._item("in_progress")) + self._of_part("added")

    def _end(self, status: str) -> str:
        """End the text that is open."""
        if self._kind is None:
            return ""
        events = self._of_text("done", text=self._text) + self._of_part("done") + self._ended(self._item(status))
        self._kind, self._text = None, ""
        return events

    def _item(self, status: str):
        content = [] if status == "in_progress" else [self._part()]
        made = dict(id=self._name(), status=status, content=content)
        if self._kind is ReasoningText:
            return types.ResponseReasoningItem.model_validate(dict(made, type="reasoning", summary=[]))
        return types.ResponseOutputMessage.model_validate(dict(made, type="message", role="assistant"))

    def _part(self) -> dict:
        if self._kind is ReasoningText:
            return dict(type="reasoning_text", text=self._text)
        return dict(type="output_text", text=self._text, annotations=[])

    def _name(self) -> str:
        return f"{'rs' if self._kind is ReasoningText else 'msg'}_{self.identity}_{len(self.output)}"

    def _place(self, name: str) -> dict:
        return dict(item_id=name, output_index=len(self.output), content_index=0)

    def _response(self, status: str, **more):
        return types.Response.model_validate(dict(self._made, status=status, output=[]) | more)

    # -- events -----------------------------------------------------------------------------------------------------

    def _ended(self, item) -> str:
        events = self._of_item("done", item)
        self.output.append(item)
        return events

    def _of_all(self, kind: type, response=None) -> str:
        return self._event(kind, f"response.{self._status}", response=response or self._response(self._status))

    def _of_item(self, what: str, item) -> str:
        kind = types.ResponseOutputItemAddedEvent if what == "added" else types.ResponseOutputItemDoneEvent
        return self._event(kind, f"response.output_item.{what}", output_index=len(self.output), item=item)

    def _of_part(self, what: str) -> str:
        kind = types.ResponseContentPartAddedEvent if what == "added" else types.ResponseContentPartDoneEvent
        return self._event(kind, f"response.content_part.{what}", **self._place(self._name()), part=self._part())

    def _of_text(self, what: str, **more) -> str:
        place = self._place(self._name())
        if self._kind is ReasoningText:
            delta, done = types.ResponseReasoningTextDeltaEvent, types.ResponseReasoningTextDoneEvent
            return self._event(delta if what == "delta" else done, f"response.reasoning_text.{what}", **place, **more)
        kind = types.ResponseTextDeltaEvent if what == "delta" else types.ResponseTextDoneEvent
        return self._event(kind, f"response.output_text.{what}", **place, **more, logprobs=[])

    def _event(self, kind: type, name: str, /, **fields) -> str:
        event = kind(type=name, sequence_number=self._sent, **fields)
        self._sent += 1
        return f"event: {name}\n{DATA}{event.model_dump_json(exclude_none=True)}\n\n"
