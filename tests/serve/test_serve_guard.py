"""Requests to `kvevict serve` that an attacker sends: from other sites, too large, with numbers that are none."""

import asyncio
import json
import logging

import pytest
from serving import Client, asks, said, server, unpatched  # noqa: F401

from kvevict.cli import main

ONCE = dict(messages=[dict(role="user", content="Once")], max_tokens=2)


def sent(client, headers, parts=(), method="GET", path="/health", came_to="127.0.0.1", version="1.1") -> tuple:
    """(status, headers, body) of a request with these headers alone; parts: of its body, as they are asked for."""
    scope = dict(
        type="http", asgi={"version": "3.0", "spec_version": "2.3"}, method=method, path=path, http_version=version,
        headers=[(name.encode(), value.encode()) for name, value in headers.items()], query_string=b"", scheme="http",
        root_path="", server=(came_to, 80), client=("10.1.2.3", 1), raw_path=path.encode(),
    )  # fmt: skip
    left, got = iter(parts), []

    async def receive():
        try:
            return dict(type="http.request", body=next(left), more_body=True)
        except StopIteration:
            return dict(type="http.request", body=b"", more_body=False)

    async def send(message):
        got.append(message)

    asyncio.run(client.app(scope, receive, send))
    names = {name.decode(): value.decode() for name, value in got[0]["headers"]}
    return got[0]["status"], names, b"".join(each.get("body", b"") for each in got[1:])


@pytest.fixture(scope="module")
def client():
    return Client(server(hosts=("Texts.Example", "2001:db8::1")))


LOCAL = ["localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:8000", "[::1]:8000", "[0:0:0:0:0:0:0:1]"]
ALLOWED = ["texts.example", "TEXTS.example.:443", "[2001:db8::1]", "10.0.0.7:80"]  # the last is what it came to
OTHER = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.8", "", "[::2]",
    "texts.example.evil", "evil.example@localhost", "[::1", "[::1]evil.example", "[", "localhost evil", "localhost:x",
]  # fmt: skip


@pytest.mark.parametrize("host", LOCAL + ALLOWED + OTHER)
def test_hosts(client, host):
    """A page of a site whose name has this machine's address reads nothing."""
    want = 421 if host in OTHER else 200
    for method, path in (("GET", "/health"), ("GET", "/v1/kvevict/texts"), ("GET", "/"), ("DELETE", "/nothing")):
        status, _, body = sent(client, {"host": host}, method=method, path=path, came_to="10.0.0.7")
        assert status == (404 if want == 200 and path == "/nothing" else want)
        if want == 421:
            assert "--allow-host" in json.loads(body)["error"]["message"]


def test_a_request_without_a_host(client):
    assert sent(client, {}, version="1.0")[0] == 200  # no browser's


def test_the_page_is_in_no_frame(client):
    _, headers, _ = sent(client, {"host": "localhost"}, path="/")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_a_length_that_is_too_large(client):
    """It is refused before the body is read."""

    def body():
        raise AssertionError("the body is read")
        yield

    headers = {"host": "localhost", "content-type": "application/json", "content-length": f"{100 << 30}"}
    status, headers, _ = sent(client, headers, body(), "POST", "/v1/completions")
    assert status == 413 and headers["connection"] == "close"


def test_a_client_that_leaves_within_its_body(client, caplog):
    async def gone():
        return dict(type="http.disconnect")

    async def send(message):
        pass

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = dict(
        type="http", method="POST", path="/v1/completions", headers=headers, query_string=b"", http_version="1.1"
    )
    with caplog.at_level(logging.INFO, "kvevict.serve"):
        asyncio.run(client.app(scope, gone, send))
    assert [(each.message, each.facts["status"]) for each in caplog.records if each.name == "kvevict.serve"] == [
        ("refused", 499)
    ]


def test_a_request_that_takes_too_long_is_not_sent_again():
    """OpenAI's clients repeat it otherwise."""
    late = Client(server(timeout=0)).post("/v1/chat/completions", **ONCE)
    assert late.status_code == 504 and late.headers["x-should-retry"] == "false"


NUMBERS = ["9" * 400, "-" + "9" * 400, "1e999", "-1e999", "NaN", "Infinity", "-Infinity"]
FIELDS = {
    "/v1/chat/completions": (
        "messages", "temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "seed", "n", "tools",
        "top_logprobs", "logit_bias", "frequency_penalty", "presence_penalty", "kvevict", "user", "metadata",
        "stream_options", "unknown",
    ),
    "/v1/completions": ("prompt", "temperature", "logit_bias", "best_of", "max_tokens", "user"),
    "/v1/responses": ("input", "temperature", "max_output_tokens", "metadata", "truncation", "tools", "top_logprobs"),
    "/v1/kvevict/texts": ("name", "text", "budget"),
}  # fmt: skip
RIGHT = {
    "/v1/chat/completions": ONCE, "/v1/completions": dict(prompt="Once", max_tokens=1),
    "/v1/responses": dict(input="Once", max_output_tokens=1), "/v1/kvevict/texts": dict(name="text", text="Once"),
}  # fmt: skip


@pytest.mark.parametrize("path", FIELDS)
def test_numbers_that_no_float_holds(client, path):
    """400 with the field's name, wherever in it the number stands."""
    for field in FIELDS[path]:
        for number in NUMBERS:
            for value in (number, f'[{{"5": {number}}}]', f'{{"budget": {number}}}'):
                body = json.dumps({name: each for name, each in RIGHT[path].items() if name != field})
                body = f'{body[:-1]}{", " if len(body) > 2 else ""}"{field}": {value}}}'
                response = client.ask("POST", path, content=body)
                assert response.status_code == 400, (field, value[:20], response.text)
                assert field in response.json()["error"]["message"], (field, value[:20], response.text)
    if path == "/v1/chat/completions":
        config = json.dumps(dict(do_sample=True)).replace("}", ', "temperature": 1e999}')
        assert client.post(path, **ONCE, generation_config=config).status_code == 400


@pytest.mark.parametrize("numbers", [
    dict(temperature=1e-300), dict(temperature=1e-12), dict(temperature=5e-324, top_p=1e-300), dict(top_p=5e-324),
    dict(temperature=2, top_p=1e-300), dict(logit_bias={"5": 1e-300}), dict(frequency_penalty=-0.9),
    dict(seed=-(1 << 62)),
])  # fmt: skip
def test_numbers_that_are_small(client, numbers):
    response = client.post("/v1/chat/completions", **ONCE | numbers)
    assert response.status_code == 200, response.text
    if numbers.get("temperature", 1) < 0.01:
        assert said(response) == said(client.post("/v1/chat/completions", **ONCE, temperature=0))


def test_refusals_are_counted_and_logged(caplog):
    client = Client(server(keys=("one",)), "one")
    here = {"host": "localhost", "authorization": "Bearer one", "content-type": "application/json"}
    chat = "/v1/chat/completions"
    with caplog.at_level(logging.INFO, "kvevict.serve"):
        assert sent(client, here | {"authorization": "Bearer secret"}, method="POST", path=chat)[0] == 401
        assert sent(client, here, [b"{"], "POST", chat)[0] == 400
        assert sent(client, here | {"content-type": "text/plain"}, [b"{}"], "POST", chat)[0] == 415
        assert sent(client, here | {"content-length": "1" * 20}, method="POST", path=chat)[0] == 413
        assert sent(client, here | {"host": "evil.example"}, path="/v1/models")[0] == 421
        assert sent(client, here, method="DELETE", path="/v1/kvevict/texts/none")[0] == 404
        assert sent(client, here, path="/nothing/secret")[0] == 404
        assert client.post(chat, **ONCE).status_code == 200
        assert client.post(chat, **ONCE | dict(model="other")).status_code == 404
    lines = [each for each in caplog.records if each.name == "kvevict.serve"]
    assert [(each.message, each.facts["endpoint"], each.facts["status"]) for each in lines] == [
        ("refused", chat, 401), ("refused", chat, 400), ("refused", chat, 415), ("refused", chat, 413),
        ("refused", "other", 421), ("refused", "/v1/kvevict/texts/{name}", 404), ("refused", "other", 404),
        ("request", chat, 200), ("request", chat, 404),
    ]  # fmt: skip
    assert {each.facts["client"] for each in lines[:7]} == {"10.1.2.3"}
    assert not [each for each in lines if "secret" in str(each.facts)]
    text = client.ask("GET", "/metrics").text
    for endpoint, status in ((chat, 401), (chat, 400), (chat, 415), (chat, 413), ("other", 421), ("other", 404)):
        assert f'kvevict_requests_total{{endpoint="{endpoint}",status="{status}"}} 1.0' in text


def test_a_key_of_other_letters():
    client = Client(server(keys=("schlüssel",)))
    here = {"host": "localhost", "authorization": "Bearer schlüssel"}  # `sent` writes UTF-8, as clients do
    assert sent(client, here, path="/v1/models")[0] == 200
    assert sent(client, here | {"authorization": "Bearer schlussel"}, path="/v1/models")[0] == 401


@pytest.mark.parametrize("name", ["", "http://texts.example", "[", "a b"])
def test_a_host_that_is_none(name, capsys):
    assert main(["serve", "--port", "0", "--allow-host", name, "/nowhere"]) == 2
    assert f"--allow-host {name}: give a name" in capsys.readouterr().err


def test_an_empty_key(monkeypatch, capsys):
    monkeypatch.setenv("KVEVICT_API_KEY", "")
    assert main(["serve", "--port", "0", "/nowhere"]) == 2
    assert capsys.readouterr().err == "kvevict serve: KVEVICT_API_KEY is empty: give a key, or unset it\n"
    assert main(["serve", "--port", "0", "--api-key", "", "/nowhere"]) == 2
    assert "--api-key is empty" in capsys.readouterr().err
