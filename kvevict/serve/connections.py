"""Connections to the server: how many there are, and how long each may take to send a request or to take an answer."""

import asyncio
import contextlib
import functools
import resource
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 1000  # connections at once
QUEUE = 2048  # connections that the system holds until they are accepted
STOP = 30  # seconds that running requests have to end when the server stops


class Connection(H11Protocol):
    """uvicorn's connection, which ends when its client is slow. note: takes the status of a refusal that reaches no
    application."""

    headers_seconds, body_seconds, taken_seconds = 20.0, 120.0, 120.0

    def __init__(self, *args, most: int, note, **options):
        super().__init__(*args, **options)
        self.most, self.note = most, note
        self._part: tuple = ()  # what the client sends
        self._late: Any = None  # timers
        self._stuck: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        with contextlib.suppress(OSError):  # the client has left already
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.most:
            self._refuse(503, b"Service Unavailable")
            return
        self._watch()

    def handle_events(self) -> None:
        super().handle_events()
        self._watch()

    def _watch(self) -> None:
        """Give each part of a request, its headers and its body, a time of its own."""
        part = (self.conn.their_state, self.cycle)
        if part == self._part:
            return
        self._part = part
        _cancel(self._late)
        if part[0] in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing():
            seconds = self.headers_seconds if part[0] is h11.IDLE else self.body_seconds
            self._late = self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        if self._part[0] is h11.SEND_BODY and self.cycle.response_started:
            self.transport.abort()
        elif self._part[0] is h11.IDLE and not self.conn.trailing_data[0]:
            self.transport.close()  # it sent nothing
        else:
            self._refuse(408, b"Request Timeout")

    def _refuse(self, status: int, reason: bytes) -> None:
        self.transport.write(b"HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Length: 0\r\n\r\n" % (status, reason))
        self.transport.close()
        self.note(status)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(self.taken_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._stuck)

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._late)
        _cancel(self._stuck)
        super().connection_lost(exc)


def _cancel(timer) -> None:
    if timer is not None:
        timer.cancel()


class Serving(uvicorn.Server):
    """An application that is served. note: as of `Connection`."""

    def __init__(self, app, note, **options):
        most = min(MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        connection: Any = functools.partial(Connection, most=most, note=note)
        # asyncio accepts as many connections as the backlog says before it looks at the first of them. Without a
        # descriptor for one it goes on to try, and logs an error for each.
        super().__init__(uvicorn.Config(
            app, http=connection, ws="none", log_config=None, backlog=max(most // 8, 1), timeout_graceful_shutdown=STOP,
            **options,
        ))  # fmt: skip

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(QUEUE)
