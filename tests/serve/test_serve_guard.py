"""Requests to `kvevict serve` that an attacker sends: from other sites, too large, with numbers that are none."""

import asyncio
import contextlib
import gc
import importlib
import json
import logging
import random
import sys
import threading

import pytest
from fuzzing import SEED
from serving import JSON, Client, asks, said, scope_of, server, unpatched  # noqa: F401

from kvevict.cli import main
from kvevict.serve import start
from kvevict.serve.options import Options

ONCE = dict(messages=[dict(role="user", content="Once")], max_tokens=2)


def sent(client, headers, parts=(), method="GET", path="/health", came_to="127.0.0.1", version="1.1") -> tuple:
    """(status, headers, body) of a request with these headers alone; parts: of its body, as they are asked for."""
    more = dict(http_version=version, server=(came_to, 80), client=("10.1.2.3", 1))
    scope = scope_of(method, path, headers, **more)
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
    for method, path in (("GET", "/health"), ("GET", "/v1/kvevict/texts"), ("GET", "/")):
        status, _, body = sent(client, {"host": host}, method=method, path=path, came_to="10.0.0.7")
        assert status == want
        if want == 421:
            assert "--allow-host" in json.loads(body)["error"]["message"]


def test_requests_of_no_browser_and_frames(client):
    assert sent(client, {}, version="1.0")[0] == 200  # without a Host
    assert sent(client, {"host": "localhost"}, method="HEAD")[0] == 200
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

    scope = scope_of("POST", "/v1/completions", dict(JSON, host="localhost"))
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
        "stream_options", "unknown", "model", "stream", "generation_config", "chat_template_kwargs", "response_format",
        "logprobs", "tool_choice",
    ),
    "/v1/completions": ("prompt", "temperature", "logit_bias", "best_of", "max_tokens", "user", "kvevict", "echo"),
    "/v1/kvevict/texts": ("name", "text", "budget", "policy"),
}  # fmt: skip
RIGHT = {
    "/v1/chat/completions": ONCE, "/v1/completions": dict(prompt="Once", max_tokens=1),
    "/v1/kvevict/texts": dict(name="text", text="Once"),
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


GARBAGE = [
    None, True, False, 0, -1, 1 << 70, 0.5, -0.5, 1e300, "", "x", "\0", "\ud800", [], [None], [[]], [{}], {}, {"a": 1},
    [{"role": "user"}], [{"role": "user", "content": 5}], [{"role": 3, "content": "x"}], ["x"] * 9, "../../x",
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": "assistant", "tool_calls": [{}]}], {"policy": "nothing"}, {"budget": -5}, {"budget": 0}, {"budget": 2.5},
    {"policy": "take:probe=4"}, {"policy": "lookahead:adapter=/etc"}, {"question": ""}, {"question": 5},
    {"question": "not there"}, {"text": "../x"}, {"text": "unknown"}, {"other": 1}, {"x" * 100: "y" * 100},
    json.dumps({"max_new_tokens": -1}), json.dumps({"do_sample": "x"}), "{", "[]", {"chat_template": "{{ 1 }}"},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path", RIGHT)
def test_requests_that_make_no_sense(path):
    """An answer, or 4xx with one sentence; never 500."""
    rng, client = random.Random(SEED), Client(server(), None)
    cases = [(field, value) for field in FIELDS[path] for value in GARBAGE]
    for field, value in rng.sample(cases, 120):
        response = client.ask("POST", path, content=json.dumps(RIGHT[path] | {field: value}))
        told(response, field, value)
    for content in (b"", b"{", b"\xff\xfe", b"[1]", b"null", b'"x"', b"[" * 100_000, b'{"a":' * 5000, b"1" * 5000):
        assert client.ask("POST", path, content=content).status_code == 400
    assert client.ask("POST", path, content=b" " * ((1 << 24) + 1)).status_code == 413
    assert client.ask("GET", path.replace("texts", "nothing")).status_code in (404, 405)
    assert client.post(path, **RIGHT[path]).status_code == 200


def told(response, *case) -> None:
    assert response.status_code < 500, (case, response.text)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, case
        assert error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"], case
        assert len(error["message"]) < 1200, case


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


@pytest.mark.parametrize("name", ["max_tokens", "top_k"])
def test_numbers_that_are_large(client, name):
    assert client.post("/v1/chat/completions", **ONCE | {name: 1 << 31}).status_code == 200
    message = client.post("/v1/chat/completions", **ONCE | {name: 10**12}).json()["error"]["message"]
    assert message.startswith(f"{name} must be") and message.endswith(f"at most {1 << 31}")


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"])
def test_types_of_json(client, kind):
    """RFC 9110: a media type has no case."""
    headers = {"host": "localhost", "content-type": kind}
    status, _, body = sent(client, headers, [b"{"], "POST", "/v1/chat/completions")
    assert status == 400 and b"not JSON" in body


@pytest.mark.parametrize("path", FIELDS)
def test_fields_that_are_nested_deeply(client, path):
    """400 with the field's name, and no end of the stack."""
    for field in FIELDS[path]:
        for opened, inner, closed in ("[", "", "]"), ('{"a":', "1", "}"), ('[{"function":', "{}", "}]"):
            for depth in (60, 101, 450, 490, 900):
                rest = json.dumps({name: each for name, each in RIGHT[path].items() if name != field})[1:]
                body = f'{{"{field}": {opened * depth}{inner}{closed * depth}{", " if len(rest) > 1 else ""}{rest}'
                response = client.ask("POST", path, content=body)
                assert response.status_code == 400 or (depth == 60 and response.status_code == 200), (field, depth)
                if 101 <= depth < 490:
                    assert f"{field} is nested more than 100 deep" in response.json()["error"]["message"]


def test_a_process_of_its_own(monkeypatch, capsys):
    """No collection of all modules' objects, and no other thread, holds the server long."""

    class Serving:
        def __init__(self, app, note, stop, stops):
            pass

        def run(self, sockets):
            assert gc.get_freeze_count() > 100_000 and sys.getswitchinterval() < 1e-3

    monkeypatch.setattr(start, "Serving", Serving)
    before, log = sys.getswitchinterval(), logging.getLogger("kvevict.serve")
    handlers = log.handlers
    try:
        start.start(None, "127.0.0.1", 0, Options())
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before)
        for each in (log, *map(logging.getLogger, ("uvicorn", "asyncio"))):
            each.handlers, each.propagate = handlers if each is log else [], True


def test_a_method_that_a_path_does_not_have():
    """RFC 9110 requires the header Allow."""
    response = Client(server()).ask("DELETE", "/v1/chat/completions")
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert response.json()["error"]["message"] == "/v1/chat/completions takes POST, not DELETE"
    assert "takes GET and POST, not PUT" in Client(server()).ask("PUT", "/v1/kvevict/texts").text


def test_an_endpoint_that_there_is_not():
    """The sentence names those that there are."""
    response = Client(server()).post("/v1/embeddings", input="Once")
    message = response.json()["error"]["message"]
    assert response.status_code == 404 and message.startswith("/v1/embeddings is not an endpoint of this server")
    assert "/v1/chat/completions, " in message and "/v1/kvevict/texts/{name}/kept" in message


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
        ("refused", "/v1/models", 421), ("refused", "/v1/kvevict/texts/{name}", 404), ("refused", "other", 404),
        ("request", chat, 200), ("refused", chat, 404),
    ]  # fmt: skip
    assert {each.facts["client"] for each in lines[:7]} == {"10.1.2.3"}
    codes = [each.facts.get("code") for each in lines]
    want = {0: "invalid_api_key", 5: "text_not_found", 8: "model_not_found"}
    assert codes == [want.get(at) for at in range(9)] and lines[-1].facts["param"] == "model"
    assert not [each for each in lines if "secret" in str(each.facts)]
    text = client.ask("GET", "/metrics").text
    for endpoint, status in ((chat, 401), (chat, 400), (chat, 415), (chat, 413), ("/v1/models", 421), ("other", 404)):
        assert f'kvevict_requests_total{{endpoint="{endpoint}",status="{status}"}} 1.0' in text


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_what_is_tokenised_or_read_are_logged(stream, caplog):
    """With the address and the code, as those are that come before."""
    client = Client(server())
    bodies = [
        dict(ONCE, messages=[dict(role="user", content="Once " * 3000)]), dict(ONCE, kvevict=dict(policy="oracle")),
        dict(ONCE, kvevict=dict(text="none")),
    ]  # fmt: skip
    with caplog.at_level(logging.INFO, "kvevict.serve"):
        for body in bodies:
            client.post("/v1/chat/completions", **body, stream=stream)
    lines = [each.facts for each in caplog.records if each.name == "kvevict.serve"]
    assert [(each["status"], each["client"], each["code"], each["param"]) for each in lines] == [
        (400, "127.0.0.1", "context_length_exceeded", "messages"), (400, "127.0.0.1", None, "kvevict.policy"),
        (404, "127.0.0.1", "text_not_found", "kvevict.text"),
    ]  # fmt: skip


@pytest.mark.parametrize("given, want", [
    ("Bearer one", 200), ("bearer one", 200), ("BEARER one", 200), ("one", 401), ("Basic one", 401), ("Bearer", 401),
    ("Bearer  one", 401), ("Bearer one ", 401), ("Bearer one two", 401), ("", 401), ("Bearer schlüssel", 200),
    ("Bearer schlussel", 401),
])  # fmt: skip
def test_how_a_key_is_sent(given, want):
    client = Client(server(keys=("one", "schlüssel")))  # `sent` writes UTF-8, as clients do
    assert sent(client, {"host": "localhost", "authorization": given}, path="/v1/models")[0] == want


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


@contextlib.contextmanager
def held(monkeypatch, owner, name):
    """Inside, the first call of a function waits for an event that nobody but the test sets."""
    function, begun, go = getattr(owner, name), threading.Event(), threading.Event()

    def waits(*args, **options):
        if not begun.is_set():
            begun.set()
            assert go.wait(20), "the event loop waits for this call"
        return function(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, waits)
        yield begun, go


CHAT = ("POST", "/v1/chat/completions", ONCE)
LARGE = ("POST", "/v1/chat/completions", ONCE | dict(user="a" * 100_000))
HIDDEN = ("POST", "/v1/chat/completions", ONCE | dict(kvevict=dict(question=None)))
OF_TEXT = ("POST", "/v1/chat/completions", ONCE | dict(kvevict=dict(text="held")))
STORE = ("POST", "/v1/kvevict/texts", dict(name="held", text="Once. " * 60))
CASES = {
    "a body is parsed": ("kvevict.serve.check.parsed", LARGE),
    "a body is checked": ("kvevict.serve.check._generation", LARGE),
    "a template is rendered": ("tokenizer.apply_chat_template", CHAT),
    "a template is rendered in parts": ("tokenizer.apply_chat_template", HIDDEN),
    "a chat is tokenised": ("kvevict.serve.prompt._plain", CHAT),
    "a prompt": ("kvevict.serve.prompt._opened", ("POST", "/v1/completions", dict(prompt="Once", max_tokens=2))),
    "a text": ("kvevict.serve.prompt.ids_of", STORE), "a text is written": ("texts.put", STORE),
    "a text is opened": ("kvevict.serve.prompt.ids_of", OF_TEXT),
    "a text's pieces": ("kvevict.serve.server.parts", ("GET", "/v1/kvevict/texts/held/kept")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_nothing_that_grows_with_a_request_holds_others(client, monkeypatch, case):
    """/health is answered while it runs."""
    where, asked = CASES[case]
    client.ask(*STORE)
    module, _, name = where.rpartition(".")
    owner = getattr(client.server, module, None) or importlib.import_module(module)

    async def both(begun, go):
        long = asyncio.ensure_future(client.asked(*asked))
        while not begun.is_set():
            assert not long.done(), (await long).text
            await asyncio.sleep(0)
        assert not go.is_set() and (await client.asked("GET", "/health")).status_code == 200
        assert not long.done()
        go.set()
        return await long

    with held(monkeypatch, owner, name) as events:
        assert asyncio.run(both(*events)).status_code == 200


@pytest.mark.parametrize("more", [{}, dict(kvevict=dict(question=None))])
def test_what_does_not_fit_is_not_tokenised(client, monkeypatch, more):
    """Neither a long message nor more of them than the context has tokens."""
    kind, letters = type(client.server.tokenizer), []
    encode = kind.__call__

    def counted(self, text, *args, **options):
        letters.append(len(text))
        return encode(self, text, *args, **options)

    monkeypatch.setattr(kind, "__call__", counted)
    long, many = [dict(role="user", content="a b " * 2_000_000)], [dict(role="user", content="a")] * 50_000
    client.server.most, was = 1 << 24, client.server.most
    for messages in (long, many, [dict(role="system", content="a b " * 2000), *long]):
        response = client.post("/v1/chat/completions", messages=messages, max_tokens=1, **more)
        assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    for path, body, what, field in (
        ("/v1/completions", dict(prompt=long[0]["content"]), "prompt", "prompt"),
        ("/v1/kvevict/texts", dict(name="long", text=long[0]["content"]), "text", "text"),
    ):
        response = client.post(path, **body)
        error = response.json()["error"]
        assert response.status_code == 400 and error["code"] == "context_length_exceeded", path
        assert error["message"].startswith(f"the {what} has more tokens than") and error["param"] == field
    client.server.most = was
    assert sum(letters) < 300_000


def test_the_largest_prompt(client):
    """A prompt of the context less one token is answered, one more is refused; with and without a shared beginning."""
    tokens, context = client.server.tokenizer, client.server.manager.context
    word = next(
        each for each in ("a", " a", " the") if len(tokens(each * 4, add_special_tokens=False)["input_ids"]) == 4
    )
    spent = client.post("/v1/completions", prompt=word, max_tokens=1).json()["usage"]["prompt_tokens"]
    for more, want in ((context - 1 - spent, 200), (context - spent, 400)):
        response = client.post("/v1/completions", prompt=word * (1 + more), max_tokens=1)
        assert response.status_code == want, response.text
        if want == 200:
            assert response.json()["usage"]["prompt_tokens"] == context - 1


def test_small_requests_do_not_wait_for_large_ones(monkeypatch):
    """Each kind has a tokenizer."""
    served = Client(server(context=2048))
    prepare, answered = type(served.server.manager).prepare, threading.Event()

    def slow(self, call, tokenizer):
        large = isinstance(call.prompt, str) and len(call.prompt) > 1 << 16
        assert large == (tokenizer is not served.server.tokenizer)
        assert not large or answered.wait(60)
        prepare(self, call, tokenizer)

    monkeypatch.setattr(type(served.server.manager), "prepare", slow)

    async def both():
        large = asyncio.ensure_future(served.asked("POST", "/v1/completions", dict(prompt="Once " * (1 << 14))))
        await asyncio.sleep(0.1)
        small = await served.asked("POST", "/v1/chat/completions", ONCE)
        answered.set()
        return small, await large

    small, large = asyncio.run(both())
    assert small.status_code == 200 and large.status_code == 400
    assert large.json()["error"]["code"] == "context_length_exceeded"
