"""`kvevict serve` as a process, asked by clients of others: it starts, stops, is killed, and starts again."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter

import httpx
import pytest
from process import asked_of, folder, openai, process, stores_texts  # noqa: F401
from serving import FACTS, FILLER, TEXT, asks

from kvevict.cli import main
from kvevict.serve import start
from kvevict.serve.start import page

OPENS = dict(extra_body=dict(kvevict=dict(text="text")))


@pytest.fixture(scope="module")
def asked(process, tmp_path_factory):  # noqa: F811
    """A server with a stored text."""
    store = str(tmp_path_factory.mktemp("store"))
    server = process("--policy", "take", "--budget", "256", "--store", store)
    server.store(TEXT)
    return server


@pytest.mark.slow
def test_the_openai_client(asked):
    server, client = asked, asked.client
    assert [each.id for each in client.models.list()] == ["small"] and server.page == f"{server.url}/"
    whole = server.ask(f"{TEXT}\n\n{asks('Orshan')}")
    assert str(FACTS["Orshan"]) in whole.choices[0].message.content

    turn = server.ask(asks("Naislet"), **OPENS)
    answer = turn.choices[0].message.content
    assert str(FACTS["Naislet"]) in answer and turn.usage.prompt_tokens_details.cached_tokens > 500
    stream = server.ask(asks("Naislet"), stream=True, **OPENS)
    assert "".join(part.choices[0].delta.content or "" for part in stream) == answer

    messages = [dict(role="user", content=asks("Naislet")), dict(role="assistant", content=answer.strip())]
    messages.append(dict(role="user", content=asks("Velmora")))
    later = client.chat.completions.create(model="small", messages=messages, max_tokens=12, **OPENS)
    assert str(FACTS["Velmora"]) in later.choices[0].message.content

    written = client.completions.create(model="small", prompt=f"{TEXT}\n\n{asks('Naislet')}\nAnswer:", max_tokens=12)
    assert str(FACTS["Naislet"]) in written.choices[0].text

    with pytest.raises(openai.BadRequestError, match="budget"):
        server.ask("Who?", extra_body=dict(kvevict=dict(budget=-1)))
    with pytest.raises(openai.NotFoundError, match="ask at /v1/chat/completions"):
        client.responses.create(model="small", input="Once")
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.chat.completions.create(model="other", messages=messages)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


@pytest.mark.slow
def test_a_server_that_is_killed_under_load(process, tmp_path):  # noqa: F811
    """Each text that it said was stored is there again and right, and no file is damaged."""
    options, stored = ("--budget", "256", "--store", str(tmp_path / "store")), {}
    for round_ in range(3):
        server = process(*options)
        for name, code in list(stored.items()):
            found = asked_of(server, name)
            assert str(code) in found.choices[0].message.content, (round_, name)
            assert found.usage.prompt_tokens_details.cached_tokens > 100
        assert not [line for line in server.lines if "damaged" in line or "read again" in line or "Traceback" in line]
        if round_ == 2:
            break  # nobody would look at what a further load stores
        writers = [threading.Thread(target=stores_texts, args=(server, stored, f"{round_}{at}")) for at in range(3)]
        for each in writers:
            each.start()
        while len(stored) < 4 * (round_ + 1) and all(each.is_alive() for each in writers):
            time.sleep(0.01)
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        for each in writers:
            each.join()
    assert len(stored) >= 8


@pytest.mark.parametrize(("argv", "said"), [
    (["--policy", "nothing"], "unknown policy 'nothing'"), (["--budget", "-1"], "budget"),
    (["--memory-bytes", "x"], "--memory-bytes x: give a number of bytes"), (["--queue", "-1"], "queue"),
    (["--timeout", "0"], "timeout"), (["--store", "/dev/null"], "--store /dev/null"), (["/nowhere"], "/nowhere"),
    (["--host", "1.2.3.4.5"], "1.2.3.4.5"), (["--port", "99999"], "--port 99999: give a number from 0 to 65535"),
    (["--port", "-1"], "--port -1: give a number"),
])  # fmt: skip
def test_mistakes_in_the_arguments(argv, said, capsys):
    assert main(["serve", "--port", "0", *argv]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("host", "want"), [
    ("127.0.0.1", "http://127.0.0.1:80/"), ("0.0.0.0", "http://localhost:80/"), ("::", "http://localhost:80/"),
    ("::1", "http://[::1]:80/"),
])  # fmt: skip
def test_the_address_of_the_page(host, want):
    assert page(host, 80) == want


def test_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == "kvevict serve: kvevict serve needs fastapi; run: pip install 'kvevict[serve]'\n"


@pytest.fixture
def tab(asked):
    """The page on a phone, with the key typed. Needs playwright and CHROMIUM, the path of a browser."""
    api = pytest.importorskip("playwright.sync_api")
    if "CHROMIUM" not in os.environ:
        pytest.skip("CHROMIUM is not set")
    errors = []
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"])
        made = browser.new_context(viewport=dict(width=375, height=700), color_scheme="dark").new_page()
        made.on("pageerror", lambda error: errors.append(str(error)))
        made.goto(asked.page)
        made.wait_for_selector("#keyed:not([hidden])")
        assert made.inner_text("#note") == "this server needs a key"
        made.fill("#key", "key")
        made.press("#key", "Tab")
        made.wait_for_selector("#texts option[value=text]", state="attached")
        yield made
        browser.close()
    assert not errors


def test_the_page_in_a_browser(tab, tmp_path):
    """A text is dropped in, a question answered, and the kept parts shown."""
    (tmp_path / "my notes.txt").write_text(f"<b>{TEXT}</b>")
    tab.set_input_files("#file", tmp_path / "my notes.txt")
    tab.wait_for_selector("#kept span")
    assert tab.inner_text("#kept") == f"<b>{TEXT}</b>" and tab.input_value("#texts") == "my notes.txt"
    tab.wait_for_function("document.getElementById('note').textContent.includes(' tokens read after ')")
    assert tab.is_hidden("#progress")
    assert "364" in tab.evaluate("[...document.querySelectorAll('#kept span')].map(s => s.textContent)")
    assert "by all" in tab.inner_text("#legend")
    for name in FACTS:
        tab.fill("#question", asks(name))
        tab.click("#send")
        tab.wait_for_selector("#stop", state="hidden")
        tab.wait_for_selector("#answers div:first-child small:not(:empty)")
        said = tab.inner_text("#answers div:first-child")
        assert "were read before" in said and asks(name) in said
    assert str(FACTS["Naislet"]) in tab.inner_text("#answers")
    assert tab.evaluate("document.documentElement.scrollWidth") == 375
    tab.select_option("#texts", "")
    assert tab.is_hidden("#shown")


def test_files_of_the_page(tab, tmp_path):
    """A question about a text that is being read waits for it. A name of any script stays, and no text of its name is
    replaced. A file that is not a text is refused."""
    files = {"one": ("文章.txt", TEXT.encode()), "two": ("文章.txt", f"{TEXT} Yes.".encode()),
             "pdf": ("a.pdf", b"%PDF-1.7\xff"), "other": ("b.txt", b"\xe9")}  # fmt: skip
    for place, (name, data) in files.items():
        (tmp_path / place).mkdir()
        (tmp_path / place / name).write_bytes(data)
    tab.fill("#question", asks("Velmora"))
    for place, text in (("one", "文章.txt"), ("two", "文章 (2).txt")):
        tab.set_input_files("#file", tmp_path / place / "文章.txt")
        tab.click("#send")
        tab.wait_for_selector("#stop", state="hidden")
        said = tab.inner_text("#answers div:first-child")
        assert said.startswith(f"{text}\n") and str(FACTS["Velmora"]) in said
        assert tab.input_value("#texts") == text
    for name, why in (("pdf/a.pdf", "save the PDF's text"), ("other/b.txt", "save it as UTF-8")):
        tab.set_input_files("#file", tmp_path / name)
        tab.wait_for_selector(f"#note:has-text({json.dumps(why)})")
        assert tab.input_value("#texts") == "文章 (2).txt"


def test_more_connections_than_files(process):  # noqa: F811
    """Those that are too many are refused, one by one; the others are served, and the log stays short."""
    server = process("--policy", "take", "--budget", "256", files=128)
    address = "127.0.0.1", int(server.url.rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(200)]
        for each in held:
            with contextlib.suppress(OSError):  # it was refused
                each.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        statuses = Counter(_status(each) for each in held)
    assert statuses[200] == 64 and set(statuses) <= {200, 503, None}
    assert server.client.models.list().data[0].id == "small"
    assert server.end() in (0, -signal.SIGTERM)
    assert all(json.loads(line) for line in server.lines) and len(server.lines) < 20


def _status(connection):
    """Of a response; None: the connection was reset."""
    with contextlib.suppress(OSError):
        return int(connection.recv(1 << 12).split()[1])


def test_it_stops(process, tmp_path):  # noqa: F811
    """It says so, and has logged no word of a prompt or an answer."""
    server = process("--policy", "take", "--budget", "256", "--store", str(tmp_path))
    server.store(TEXT)
    server.client.completions.create(model="small", prompt=FILLER * 30, max_tokens=1)
    assert str(FACTS["Naislet"]) in server.ask(asks("Naislet"), **OPENS).choices[0].message.content
    assert server.end() in (0, -signal.SIGTERM)
    log = "".join(server.lines)
    assert "Naislet" not in log and "baker" not in log  # no prompt, no answer
    *_, stopping, stopped = map(json.loads, log.splitlines())
    assert (stopping["message"], stopping["requests"], stopping["answers"]) == ("stopping", 0, 0)
    assert (stopped["message"], stopped["prefixes_written"]) == ("stopped", 1)


@pytest.mark.parametrize("told_first", [True, False])
def test_requests_that_the_end_cuts(process, told_first):  # noqa: F811
    """They are told so, and logged; or only logged, where they do not end in time."""
    last, errors = ("it.STOP" if told_first else "-60"), []
    first = f"import kvevict.serve.connections as it; it.STOP = {60 if told_first else 1}; it.LAST = {last}"
    server = process("--policy", "take", "--budget", "256", first=first)
    client = server.client.with_options(max_retries=0)

    def asks_much(stream):
        try:
            more: dict = dict(model="small", max_tokens=2000, logit_bias={"0": -100})
            list(client.completions.create(prompt="Once", stream=stream, **more))
        except (openai.OpenAIError, httpx.RemoteProtocolError) as error:
            errors.append(str(error))

    asking = [threading.Thread(target=asks_much, args=(stream,)) for stream in (False, True)]
    for each in asking:
        each.start()
    while server.client.get("/kvevict/queue", cast_to=object)["running"] < 2:
        time.sleep(0.01)
    assert server.end() in (0, -signal.SIGTERM)
    for each in asking:
        each.join()
    told = [json.loads(line) for line in server.lines]
    [stopping] = [each for each in told if each["message"] == "stopping"]
    assert stopping["requests"] == 2 >= stopping["answers"] and told[-1]["message"] == "stopped"
    ends = [each["status"] for each in told if each["message"] == "request"]
    assert ends == ([503, 503] if told_first else [499, 499]) and len(errors) == 2
    if told_first:
        assert all("the server stops: send the request again" in each for each in errors)
        assert not [line for line in server.lines if "Traceback" in line]


def test_a_server_is_made_in_a_thread_that_ends():
    """Workers of OpenMP belong to the thread that owns the model alone."""
    makers = []

    def make():
        makers.append(threading.current_thread())
        return 7

    assert start._apart(make) == 7 and not makers[0].is_alive() and makers[0] is not threading.current_thread()
    with pytest.raises(ValueError, match="no such model"):
        start._apart(lambda: (_ for _ in ()).throw(ValueError("no such model")))
