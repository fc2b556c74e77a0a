"""A response of /v1/responses: its items, and the events that a stream of them has."""

import json
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall

from .call import Call
from .outgoing import DATA

NULLS = "error", "incomplete_details", "instructions", "metadata", "temperature", "top_p"  # a response has these fields


class Items:
    """The items of a response in their order. Every method returns the events of the change that it makes."""

    def __init__(self, name: str, call: Call) -> None:
        self.call, self.output = call, []  # items that have ended
        self._made = dict(id=f"resp_{call.identity}", created_at=call.created, model=name, object="response")
        self._made |= dict(tools=[], parallel_tool_calls=False, tool_choice="auto")  # OpenAI's type needs them
        self._made |= dict.fromkeys(NULLS)
        self._status, self._sent = "in_progress", 0
        self._kind: type | None = None  # of the text that is open
        self._text = ""

    def begin(self) -> str:
        return self._event("created", response=self._response("queued")) + self._of_all(self._response(self._status))

    def add(self, part: str | ToolCall) -> str:
        """Append a text, a `ReasoningText` or a `ToolCall`."""
        if isinstance(part, ToolCall):
            return self._end("completed") + self._call(part)
        opened = "" if self._kind is type(part) else self._end("completed") + self._open(type(part))
        self._text += part
        return opened + self._of_text("delta", delta=part)

    def close(self, finish: str) -> str:
        """End the last item. finish: OpenAI's `finish_reason`."""
        self._status = "incomplete" if finish == "length" else "completed"
        opened = "" if self._kind or self.output else self._open(str)
        return opened + self._end(self._status)

    def response(self) -> dict[str, Any]:
        """Return the whole response, after `close`."""
        read, wrote = self.call.prompt_tokens, self.call.new_tokens
        usage = dict(
            input_tokens=read, output_tokens=wrote, total_tokens=read + wrote,
            input_tokens_details=dict(cached_tokens=self.call.cached_tokens, cache_write_tokens=0),
            output_tokens_details=dict(reasoning_tokens=0),
        )  # fmt: skip
        why = dict(incomplete_details=dict(reason="max_output_tokens")) if self._status == "incomplete" else {}
        return self._response(self._status, output=self.output, usage=usage, **why)

    def last(self) -> str:
        return self._of_all(self.response())

    def error(self, message: str) -> str:
        """End the response with an error, also before its beginning."""
        begun = "" if self._sent else self.begin()
        self._status, error = "failed", dict(code="server_error", message=message)
        return (
            begun + self._event("error", "", **error, param=None) + self._of_all(self._response("failed", error=error))
        )

    # -- items ------------------------------------------------------------------------------------------------------

    def _call(self, part: Any) -> str:
        name = self.call.tool_id()
        made = dict(id=name, call_id=name, type="function_call", name=part.name, arguments="", status="in_progress")
        events = self._of_item("added", made)
        place, kind = dict(item_id=name, output_index=len(self.output)), "function_call_arguments"
        events += self._event(f"{kind}.delta", **place, delta=part.arguments)
        events += self._event(f"{kind}.done", **place, arguments=part.arguments, name=part.name)
        return events + self._ended(dict(made, arguments=part.arguments, status="completed"))

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

    def _item(self, status: str) -> dict:
        made = dict(id=self._name(), status=status, content=[] if status == "in_progress" else [self._part()])
        return made | (dict(type="reasoning", summary=[]) if self._reasons else dict(type="message", role="assistant"))

    def _part(self) -> dict:
        if self._reasons:
            return dict(type="reasoning_text", text=self._text)
        return dict(type="output_text", text=self._text, annotations=[], logprobs=[])

    @property
    def _reasons(self) -> bool:
        return self._kind is ReasoningText

    def _name(self) -> str:
        return f"{'rs' if self._reasons else 'msg'}_{self.call.identity}_{len(self.output)}"

    def _place(self) -> dict:
        return dict(item_id=self._name(), output_index=len(self.output), content_index=0)

    def _response(self, status: str, **more: Any) -> dict:
        return dict(self._made, status=status, output=[]) | more

    # -- events -----------------------------------------------------------------------------------------------------

    def _ended(self, item: dict) -> str:
        events = self._of_item("done", item)
        self.output.append(item)
        return events

    def _of_all(self, response: dict) -> str:
        return self._event(self._status, response=response)

    def _of_item(self, what: str, item: dict) -> str:
        return self._event(f"output_item.{what}", output_index=len(self.output), item=item)

    def _of_part(self, what: str) -> str:
        return self._event(f"content_part.{what}", **self._place(), part=self._part())

    def _of_text(self, what: str, **more: Any) -> str:
        if self._reasons:
            return self._event(f"reasoning_text.{what}", **self._place(), **more)
        return self._event(f"output_text.{what}", **self._place(), **more, logprobs=[])

    def _event(self, name: str, prefix: str = "response.", /, **fields: Any) -> str:
        event = dict(type=prefix + name, sequence_number=self._sent, **fields)
        self._sent += 1
        return f"event: {prefix}{name}\n{DATA}{json.dumps(event, ensure_ascii=False)}\n\n"
