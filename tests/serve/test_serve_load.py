"""`kvevict serve` under load: a bounded queue, clients that leave, time limits; and requests that make no sense."""

import asyncio
import gc
import json
import threading
import time

import pytest
from serving import FILLER, JSON, Client, asks, events, said, scope_of, server, unpatched  # noqa: F401

from kvevict.serve import call, outgoing

CHAT, OPENS = "/v1/chat/completions", dict(kvevict=dict(text="text"))
LONG = dict(messages=[dict(role="user", content="Once")], max_tokens=1500, logit_bias={"0": -100})


def question(name, **more) -> dict:
    return dict(messages=[dict(role="user", content=asks(name))], max_tokens=12) | OPENS | more


def test_a_queue_that_is_full():
    client = Client(server(batch=1, queue=3))
    responses = client.together([question("Orshan", kvevict={})] * 8)
    assert sorted(response.status_code for response in responses) == [200] * 4 + [429] * 4
    refused = next(response for response in responses if response.status_code == 429)
    assert refused.headers["retry-after"] == "1" and refused.json()["error"]["code"] == "queue_full"
    assert client.post(CHAT, **question("Orshan", kvevict={})).status_code == 200


def took_too_long(response, stream) -> bool:
    if response.status_code == 200:  # its answer had begun
        return stream and events(response)[-1]["error"]["message"].startswith("the request took longer")
    return response.status_code == 504


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(stream, monkeypatch):
    """Its time is over after three tokens; who waits for its turn gets it."""
    client, token, first = Client(server()), call.Call.token, []

    def three(self):
        token(self)
        first.append(self)
        if self is first[0] and first.count(self) == 3:
            self.deadline = 0.0

    monkeypatch.setattr(call.Call, "token", three)
    body = LONG | dict(stream=stream)
    late, waited = client.together([body, question("Orshan", kvevict={})])
    assert took_too_long(late, stream) and first.count(first[0]) == 3
    assert waited.status_code == 200


def test_a_client_that_leaves_as_a_token_comes(monkeypatch):
    """The request ends then, and not when its time is over."""
    client, get, items = Client(server(timeout=20)), asyncio.Queue.get, []

    async def got(queue):
        items.append(await get(queue))
        if len(items) == 3:
            [answer] = [each for each in asyncio.all_tasks() if each.get_coro().__name__ == "_answer"]
            client.server.calls[0].cancel()
            answer.cancel()
        return items[-1]

    monkeypatch.setattr(asyncio.Queue, "get", got)
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        client.ask("POST", "/v1/chat/completions", LONG)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reading", [False, True])
def test_a_client_that_leaves(stream, reading, monkeypatch, caplog):
    """The turn is free at once, in the middle of a read, and of an answer; after comments, too."""
    monkeypatch.setattr(outgoing, "PAUSE", 0.01)
    client = Client(server(context=2048))
    begun = threading.Event()

    def until_it_leaves(function):
        def stopped(self, *args):
            if not begun.is_set():
                begun.set()
                assert self._cancelled.wait(60)
                with pytest.raises(call.Cancelled):
                    function(self, *args)
            return function(self, *args)

        return stopped

    if reading:
        monkeypatch.setattr(call.Call, "reads", until_it_leaves(call.Call.reads))
        body = dict(messages=[dict(role="user", content=FILLER * 80)], max_tokens=1, stream=stream)
    else:
        monkeypatch.setattr(call.Call, "token", until_it_leaves(call.Call.token))
        body = LONG | dict(stream=stream)

    async def leave():
        """What uvicorn does when a connection is closed."""
        given, sent = [dict(type="http.request", body=json.dumps(body).encode(), more_body=False)], []

        async def receive():
            if given:
                return given.pop()
            assert await asyncio.to_thread(begun.wait, 60)
            return dict(type="http.disconnect")

        async def send(message):
            sent.append(message)

        await client.app(scope_of("POST", "/v1/chat/completions", JSON), receive, send)
        await asyncio.to_thread(client.server.scheduler.submit(bool).result)  # the thread has ended the call
        gc.collect()
        await asyncio.sleep(0)
        return sent

    asyncio.run(leave())
    assert begun.is_set()
    assert not [each for each in caplog.records if each.name == "asyncio"]
    assert said(client.post(CHAT, **question("Orshan", kvevict={})))
    text = client.ask("GET", "/metrics").text
    assert 'status="499"} 1.0' in text and "kvevict_queue 0.0" in text


def silent(monkeypatch, seconds=0.4) -> None:
    """Reading takes so long, and a stream may be silent for a tenth of it."""
    read = call.Call.reads

    def slow(self, *args):
        time.sleep(seconds / 2)  # the bundled model reads with two layers
        return read(self, *args)

    monkeypatch.setattr(call.Call, "reads", slow)
    monkeypatch.setattr(outgoing, "PAUSE", seconds / 10)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_that_is_not_silent(path, monkeypatch):
    """A stream has comments while it waits and is read; its events are the same, and an error is the last."""
    client, words = Client(server(batch=1)), FILLER * 20
    asked = {
        "/v1/chat/completions": dict(messages=[dict(role="user", content=words)], max_tokens=2, n=2),
        "/v1/completions": dict(prompt=words, max_tokens=2, n=2),
    }[path] | dict(stream=True)  # fmt: skip
    before = client.post(path, **asked)
    silent(monkeypatch)
    for response in client.together([asked] * 2, path):
        assert kinds(response) == kinds(before) and response.status_code == 200
        assert response.headers["cache-control"] == "no-cache" and response.headers["x-accel-buffering"] == "no"
        assert ":" in [piece[:1] for piece in response.text.split("\n\n")]
    assert ":" not in [piece[:1] for piece in before.text.split("\n\n")]
    client.server.timeout = 0.2
    for late in client.together([asked] * 2, path):
        assert late.status_code == 200 and "the request took longer" in late.text.split("data: ")[-1]
    text = client.ask("GET", "/metrics").text
    assert f'endpoint="{path}",status="504"}} 2.0' in text and "kvevict_queue 0.0" in text


def kinds(response) -> list:
    return [each.get("choices") for each in events(response)]
