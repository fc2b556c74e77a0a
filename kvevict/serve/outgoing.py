"""What leaves the server: Transformers' responses, with what a request had from stored prefixes."""

import json

from fastapi.responses import JSONResponse, StreamingResponse

from .call import Call
from .errors import refused

DATA = "data: "


def with_usage(response, call: Call) -> JSONResponse:
    """A whole answer."""
    said = json.loads(bytes(response.body))
    _note_cached(said, call)
    return JSONResponse(said, response.status_code)


async def first_of(response, call: Call):
    """A stream's parts, once it is known that the model reads: what ends the call before its first token is raised."""
    parts = response.body_iterator
    begun = []
    async for part in parts:
        begun.append(part)
        if call.error is not None:
            raise call.error
        if call.first_token is not None:
            break

    async def all_of():
        try:
            for part in begun:
                yield part
            async for part in parts:
                yield part
        finally:
            await parts.aclose()

    return all_of()


class Stream(StreamingResponse):
    """Server-sent events of a call. `end` is called once, with how the call came to its end."""

    def __init__(self, parts, call: Call, done: bool):
        super().__init__(self._events(parts), media_type="text/event-stream")
        self.parts, self.call, self.done, self.end = parts, call, done, lambda status: None
        self.status = 499  # until all was sent

    async def _events(self, parts):
        async for part in parts:
            yield "".join(self._event(event) + "\n\n" for event in part.split("\n\n") if event)
        if self.done and self.call.error is None:
            yield f"{DATA}[DONE]\n\n"
        self.status = 200 if self.call.error is None else refused(self.call.error).status

    def _event(self, event: str) -> str:
        if self.call.error is not None and event.startswith(f'{DATA}{{"error"'):
            return DATA + json.dumps(refused(self.call.error).body())
        if '"usage"' not in event:
            return event
        said = json.loads(event.removeprefix(DATA))
        _note_cached(said.get("response", said), self.call)
        return DATA + json.dumps(said)

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.call.cancel()
            await self.parts.aclose()
            self.end(self.status)


def _note_cached(said: dict, call: Call) -> None:
    usage = said.get("usage")
    if usage is None:
        return
    if "prompt_tokens" in usage:
        usage["prompt_tokens_details"] = {"cached_tokens": call.cached_tokens}
    else:
        usage["input_tokens_details"]["cached_tokens"] = call.cached_tokens
