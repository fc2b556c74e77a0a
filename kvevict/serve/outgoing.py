"""Sends streams of server-sent events, and cancels calls whose clients disconnect."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from . import log
from .call import Call
from .errors import Refused
from .written import Numbered

Result = TypeVar("Result")
DATA = "data: "
PAUSE = 5.0  # seconds without an event after which a stream sends a comment
COMMENT = ": no event yet\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # ask proxies to pass on each event at once


class Stream(StreamingResponse):
    """Streams the events of a call. While no event comes, it sends comments, because proxies and clients may take a
    silent connection for a broken one. An error is sent as the last event. At the stream's end `end` is called once,
    with the call's HTTP status and error."""

    def __init__(self, events: AsyncGenerator[str, None], call: Call) -> None:
        self.events, self.call = events, call
        self.end: Callable[[int, Refused | None], None] = lambda status, error: None
        self.status = 499  # HTTP status: 499, the client has left, until `_sent` has sent all events
        self.error: Refused | None = None
        self._next: asyncio.Future[str | None] | None = None
        super().__init__(self._sent(), media_type="text/event-stream", headers=HEADERS)

    async def _sent(self) -> AsyncIterator[str]:
        try:
            while True:
                self._next = asyncio.ensure_future(_next(self.events))
                while not (await asyncio.wait((self._next,), timeout=PAUSE))[0]:
                    yield COMMENT
                event = self._next.result()
                if event is None:
                    break
                yield event
            self.status = 200
        except Exception as error:
            known = log.failure(error)
            yield f"{DATA}{json.dumps(known.body())}\n\n"
            self.status, self.error = known.status, known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.call.cancel()
            if self._next is not None:
                await _stopped(self._next)
            await self.events.aclose()
            self.end(self.status, self.error)


async def unless_gone(request: Request, call: Call, work: Awaitable[Result]) -> Result:
    """Await `work`, and return its result. If the client disconnects first, cancel the work and the call, and raise
    Refused."""
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
            await _stopped(task)


async def _gone(request: Request) -> None:
    """Wait until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _next(items: AsyncIterator[Result]) -> Result | None:
    """Return the next item of an iterator; None after the last item."""
    return await anext(items, None)


async def _stopped(task: asyncio.Future) -> None:
    """Cancel a task, and wait until it has ended."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # else asyncio logs that the error was never retrieved


async def together(streams: list[AsyncGenerator[Numbered, None]], answers: int) -> AsyncGenerator[Numbered, None]:
    """Merge the streams of several calls: yield (answer's number, its new parts) as soon as a call has any. Each
    call has `answers` answers; answer i of call c gets the number c * answers + i."""
    waiting = {asyncio.ensure_future(_next(stream)): at for at, stream in enumerate(streams)}
    try:
        while waiting:
            for task in (await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))[0]:
                number, found = waiting.pop(task), task.result()
                if found is not None:
                    waiting[asyncio.ensure_future(_next(streams[number]))] = number
                    yield number * answers + found[0], found[1]
    finally:
        for task in waiting:
            await _stopped(task)
        for stream in streams:
            await stream.aclose()
