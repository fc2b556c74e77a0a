"""Limits the number of connections, the time in which a client must send its request, and the time in which it must
receive the response. uvicorn itself limits only the size of headers (16 KiB) and the idle time after a response."""

import asyncio
import functools
import resource
import socket
from collections.abc import Callable
from typing import Any, TypeAlias

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import Refused

MOST = 1000  # most connections at once
QUEUE = 2048  # most connections that wait in the operating system to be accepted (listen backlog)
STOP = 30  # seconds in which running requests may finish after the server was told to stop
LAST = 5  # seconds before the end of `STOP` at which requests that still run get an error response
SECONDS = {h11.IDLE: 20.0, h11.SEND_BODY: 120.0}  # most seconds to receive a request's headers, and its body
TAKEN = 120.0  # most seconds that the send buffer may stay full because the client does not receive its response
Note: TypeAlias = Callable[[Refused, Any], None]  # called with an error and the client's (address, port)


class Connection(H11Protocol):
    """A uvicorn connection that closes if its client is too slow, or if there are more than `most` connections. It
    calls `note` with the errors that occur before there is a request: too many connections, data that is not HTTP."""

    most = min(MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    def __init__(self, *args: Any, note: Note, **options: Any) -> None:
        super().__init__(*args, **options)
        self.note = note
        self._part: tuple = ()  # what is being received: (h11's state of the client, uvicorn's cycle of the request)
        # "sent": time left to receive a request's headers or body; "taken": time left for the send buffer to drain.
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's signature
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self.note(Refused(503, "there are too many connections"), self.client)
            transport.write(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            transport.close()
        else:
            self._watch()

    def send_400_response(self, msg: str) -> None:
        self.note(Refused(400, msg), self.client)
        super().send_400_response(msg)

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def shutdown(self) -> None:
        if self.conn.their_state is h11.SEND_BODY:  # the body is incomplete, so no call runs for the request
            self.transport.close()
        else:
            super().shutdown()

    def _watch(self) -> None:
        """Restart the timer "sent" whenever a request's headers or its body begin; stop it when the body has ended. The
        timer closes the connection."""
        part = (self.conn.their_state, self.cycle)
        if part != self._part:
            self._part = part
            self._end("sent")
            if part[0] in SECONDS:
                self._timers["sent"] = self.loop.call_later(SECONDS[part[0]], self.transport.close)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._timers["taken"] = self.loop.call_later(TAKEN, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end("taken")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("sent", "taken")
        super().connection_lost(exc)

    def _end(self, *names: str) -> None:
        for name in names:
            if name in self._timers:
                self._timers.pop(name).cancel()


class Serving(uvicorn.Server):
    """A uvicorn server whose connections are `Connection`s. It calls `begins` when it begins to stop, and `overdue` if
    requests still run `STOP - LAST` seconds later."""

    def __init__(
        self, app: Callable[..., Any], note: Note, overdue: Callable[[], None],
        begins: Callable[[], None] = lambda: None, **options: Any,
    ) -> None:  # fmt: skip
        self.overdue, self.begins = overdue, begins
        connection: Any = functools.partial(Connection, note=note)
        # asyncio accepts up to `backlog` connections at once, and logs an error for each one that finds no free file
        # descriptor.
        super().__init__(uvicorn.Config(
            app, http=connection, ws="none", log_config=None, backlog=max(Connection.most // 8, 1),
            timeout_graceful_shutdown=STOP, **options,
        ))  # fmt: skip

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it
            each.listen(QUEUE)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.begins()
        timer = asyncio.get_running_loop().call_later(STOP - LAST, self.overdue)
        await super().shutdown(sockets)
        timer.cancel()
