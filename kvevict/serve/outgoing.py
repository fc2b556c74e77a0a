"""A stream of server-sent events; and clients that leave before their response."""

import asyncio
import json

from fastapi.responses import StreamingResponse

from . import log
from .call import Call
from .errors import Refused, refused

DATA = "data: "


def error_of(refusal: Refused) -> str:
    return f"{DATA}{json.dumps(refusal.body())}\n\n"


class Stream(StreamingResponse):
    """The events of a call. `end` is called once, with how the call came to its end; failed: the events of an error."""

    def __init__(self, events, call: Call, failed):
        self.events, self.call, self.failed, self.end = events, call, failed, lambda status: None
        self.status = 499  # until all was sent
        super().__init__(self._sent(), media_type="text/event-stream")

    async def _sent(self):
        try:
            async for event in self.events:
                yield event
            self.status = 200
        except Exception as error:
            known = refused(error)
            if known.status == 500 and not isinstance(error, Refused):
                log.failed(error)
            yield self.failed(known)
            self.status = known.status

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.call.cancel()
            await self.events.aclose()
            self.end(self.status)


async def unless_gone(request, call, work):
    """The result of a coroutine; it is cancelled, and so is the call, when the client leaves. Raises Refused then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused(499, "the client has left")
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            call.cancel()
            task.cancel()
            await asyncio.wait((task,))


async def _gone(request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
