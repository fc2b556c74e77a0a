"""Clients of `kvevict serve` that are slow, or too many: with sockets, and an application that needs no model."""

import contextlib
import socket
import threading
import time

import pytest
from serving import Client  # noqa: F401  # skips without the extra

from kvevict.serve import connections
from kvevict.serve.connections import Serving

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"


async def echo(scope, receive, send):
    """Answers with the body, and with as many bytes as the path says."""
    assert scope["type"] == "http"
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            LEFT.set()
            return
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(int(scope["path"].strip("/") or 0)):
        await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
    await send({"type": "http.response.body", "body": body + b"END"})
    if len(scope["path"]) > 1:
        LEFT.set()


LEFT = threading.Event()


class Running:
    def __init__(self):
        self.noted: list = []
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.stopped = threading.Event()
        self.server = Serving(echo, lambda *noted: self.noted.append(noted), self.stopped.set, lifespan="off")
        self.thread = threading.Thread(target=self.server.run, kwargs=dict(sockets=[self.listening]))
        LEFT.clear()

    def start(self):
        if not self.thread.is_alive():
            self.thread.start()
            until(lambda: self.server.started)

    def connect(self):
        self.start()
        made = socket.create_connection(self.listening.getsockname(), timeout=60)
        until(lambda: made.getsockname() in [each.client for each in self.connections() if each.client])
        return made

    def connections(self) -> list:
        return list(self.server.server_state.connections)


def until(holds) -> None:
    """Wait for another thread."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def all_of(client) -> bytes:
    """What a client gets until the server closes the connection."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            got += part
    return got


def answer(client) -> bytes:
    """One answer of `echo`."""
    got = b""
    while b"END" not in got and (part := client.recv(1 << 16)):
        got += part
    return got


@pytest.fixture
def running(request, monkeypatch):
    changed = getattr(request, "param", {})
    for name in changed.keys() & {"IDLE", "SEND_BODY"}:
        monkeypatch.setitem(connections.SECONDS, getattr(connections.h11, name), changed[name])
    monkeypatch.setattr(connections, "TAKEN", changed.get("TAKEN", 60))
    monkeypatch.setattr(connections.Connection, "most", changed.get("most", 60))
    made = Running()
    yield made
    made.server.should_exit = True
    made.thread.join(60)
    assert not made.thread.is_alive()


def test_answers_do_not_wait_for_acknowledgements(running):
    with running.connect() as client:
        [connection] = running.connections()
        of_server = connection.transport.get_extra_info("socket")
        assert of_server.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for _ in range(2):  # kept alive
            client.sendall(POST + b"a" * 9)
            assert b"200 OK" in answer(client)


@pytest.mark.parametrize("running", [dict(IDLE=0.05)], indirect=True)
@pytest.mark.parametrize("sent", [b"", GET[:20], POST + b"a" * 9 + GET[:20]])
def test_headers_that_do_not_end(running, sent):
    with socket.create_connection(running.listening.getsockname(), timeout=60) as client:
        client.sendall(sent)
        running.start()  # so that it has all of it at once
        got = all_of(client)
    assert got.count(b"HTTP/1.1 ") == got.count(b"200 OK") == (len(sent) > len(POST))
    until(lambda: not running.connections())


def test_headers_that_are_large(running):
    """uvicorn's bound."""
    with running.connect() as client:
        client.sendall(GET[:-2] + b"X: " + b"a" * (1 << 17))
        assert all_of(client).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("running", [dict(SEND_BODY=0.05)], indirect=True)
@pytest.mark.parametrize("before", [b"", POST + b"a" * 9])
def test_a_body_that_does_not_end(running, before):
    with running.connect() as client:
        client.sendall(before + POST + b"a" * 8)
        got = all_of(client)
    assert got.count(b"HTTP/1.1 ") == got.count(b"200 OK") == bool(before)
    assert LEFT.wait(60)  # the application knows
    until(lambda: not running.connections())


@pytest.mark.parametrize("running", [dict(STOP=60, LAST=60)], indirect=True)
def test_a_stop_waits_for_no_body(running):
    with running.connect() as client:
        client.sendall(POST + b"a" * 8)
        until(lambda: LEFT.is_set() or any(each.cycle for each in running.connections()))
        running.server.should_exit = True
        assert all_of(client) == b"" and LEFT.wait(60)
        running.thread.join(60)
        assert not running.thread.is_alive()


@pytest.mark.parametrize("running", [dict(TAKEN=0.05)], indirect=True)
def test_an_answer_that_is_not_taken(running):
    with running.connect() as client:
        client.sendall(GET.replace(b"/ ", b"/64 "))
        assert LEFT.wait(60)  # the application is not held
        until(lambda: not running.connections())
        assert not all_of(client).endswith(b"END")


def test_what_is_not_http_is_noted(running):
    with running.connect() as client:
        client.sendall(b"nothing\r\n\r\n")
        assert all_of(client).startswith(b"HTTP/1.1 400 ")
        assert [(error.status, here) for error, here in running.noted] == [(400, client.getsockname())]


@pytest.mark.parametrize("running", [dict(most=3)], indirect=True)
def test_too_many_connections(running):
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(running.connect()) for _ in range(3)]
        with socket.create_connection(running.listening.getsockname(), timeout=60) as more:
            assert all_of(more).startswith(b"HTTP/1.1 503 ")
            assert [(error.status, client) for error, client in running.noted] == [(503, more.getsockname())]
        held[0].sendall(GET)
        assert b"200 OK" in answer(held[0])
        held[1].close()
        until(lambda: len(running.connections()) == 2)
        with running.connect() as more:
            more.sendall(GET)
            assert b"200 OK" in answer(more)
