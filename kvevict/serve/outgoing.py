"""Streams of server-sent events, and clients that leave before their response."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from . import log
from .call import Call
from .errors import Refused
from .written import Numbered

DATA = "data: "
PAUSE = 5.0  # seconds without an event, after which a stream has a comment
COMMENT = ": no event yet\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies pass events on at once


class Stream(StreamingResponse):
    """The events of a call, and comments while there are none: proxies and clients end a connection that is silent. An
    error is the last event. `end` is called once, with the status of the call's end and the error that ended it."""

    def __init__(self, events: AsyncGenerator[str, None], call: Call) -> None:
        self.events, self.call, self.end = events, call, lambda status, error: None
        self.status = 499  # 200 once all was sent
        self.error: Refused | None = None
        self._next: asyncio.Future | None = None
        super().__init__(self._sent(), media_type="text/event-stream", headers=HEADERS)

    async def _sent(self) -> AsyncIterator[Any]:
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
            known = log.told(error)
            yield f"{DATA}{json.dumps(known.body())}\n\n"
            self.status, self.error = known.status, known

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.call.cancel()
            if self._next is not None:
                await _stopped(self._next)
            await self.events.aclose()
            self.end(self.status, self.error)


async def unless_gone(request: Request, call: Call, work: Awaitable[Any]) -> Any:
    """Await a coroutine. When the client leaves before the coroutine ends, cancel it and the call, and raise
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


async def _gone(request: Any) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _next(events: Any) -> Any:
    """Await the next event; None after the last."""
    return await anext(events, None)


async def _stopped(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait until it has ended."""
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # counts as seen


async def together(
    streams: list[AsyncGenerator[Numbered, None]], answers: int, after: Callable[[], None]
) -> AsyncGenerator[Numbered, None]:
    """Yield the parts of several calls' answers as they come. answers: number of answers of each call; after: called
    before each part."""
    waiting = {asyncio.ensure_future(_next(stream)): at for at, stream in enumerate(streams)}
    try:
        while waiting:
            for task in (await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))[0]:
                number, found = waiting.pop(task), task.result()
                if found is not None:
                    waiting[asyncio.ensure_future(_next(streams[number]))] = number
                    after()
                    yield number * answers + found[0], found[1]
    finally:
        for task in waiting:
            await _stopped(task)
        for stream in streams:
            await stream.aclose()
        after()
