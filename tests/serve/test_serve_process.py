"""`kvevict serve` as a process, asked by clients of others: it starts, stops, is killed, and starts again."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from process import asked_of, folder, openai, process, stores_texts  # noqa: F401
from serving import FACTS, TEXT, asks

import kvevict
from kvevict.cli import main

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
    counting = dict(stream=True, stream_options=dict(include_usage=True))
    stream = list(server.ask(asks("Naislet"), **counting, **OPENS))
    assert "".join(part.choices[0].delta.content or "" for part in stream[:-1]) == answer
    assert stream[-1].usage.prompt_tokens_details.cached_tokens == turn.usage.prompt_tokens_details.cached_tokens

    messages = [dict(role="user", content=asks("Naislet")), dict(role="assistant", content=answer.strip())]
    messages.append(dict(role="user", content=asks("Velmora")))
    later = client.chat.completions.create(model="small", messages=messages, max_tokens=12, **OPENS)
    assert str(FACTS["Velmora"]) in later.choices[0].message.content

    said = client.responses.create(model="small", input=f"{TEXT}\n\n{asks('Naislet')}", max_output_tokens=12)
    assert str(FACTS["Naislet"]) in said.output_text
    events = client.responses.create(model="small", input="Once", max_output_tokens=3, stream=True)
    assert [event.type for event in events][-1] == "response.incomplete"
    written = client.completions.create(model="small", prompt=f"{TEXT}\n\n{asks('Naislet')}\nAnswer:", max_tokens=12)
    assert str(FACTS["Naislet"]) in written.choices[0].text

    with pytest.raises(openai.BadRequestError, match="budget"):
        server.ask("Who?", extra_body=dict(kvevict=dict(budget=-1)))
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.chat.completions.create(model="other", messages=messages)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


@pytest.mark.slow
def test_a_server_that_is_killed(process, tmp_path):  # noqa: F811
    options = ("--budget", "256", "--store", str(tmp_path / "store"), "--share", "always")
    server = process(*options)
    server.store(TEXT)
    before = server.ask(asks("Orshan"), **OPENS)
    long = threading.Thread(target=_ignored, args=(server.ask, TEXT * 3))
    long.start()
    assert server.end(signal.SIGKILL) == -signal.SIGKILL
    long.join()
    again = process(*options)
    after = again.ask(asks("Orshan"), **OPENS)
    assert after.choices == before.choices
    assert after.usage.prompt_tokens_details.cached_tokens == before.usage.prompt_tokens_details.cached_tokens > 500


@pytest.mark.slow
def test_a_server_that_is_killed_under_load(process, tmp_path):  # noqa: F811
    """Each text that it said was stored is there again and right, and no file is damaged."""
    options, stored = ("--budget", "256", "--share", "always", "--store", str(tmp_path / "store")), {}
    for round_ in range(3):
        server = process(*options)
        for name, code in list(stored.items()):
            found = asked_of(server, name)
            assert str(code) in found.choices[0].message.content, (round_, name)
            assert found.usage.prompt_tokens_details.cached_tokens > 100
        assert not [line for line in server.lines if "damaged" in line or "read again" in line or "Traceback" in line]
        writers = [threading.Thread(target=stores_texts, args=(server, stored, f"{round_}{at}")) for at in range(3)]
        for each in writers:
            each.start()
        while len(stored) < 4 * (round_ + 1) and all(each.is_alive() for each in writers):
            time.sleep(0.01)
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        for each in writers:
            each.join()
    assert len(stored) >= 12


@pytest.mark.slow
def test_slots_of_8_bits(process, asked, tmp_path):  # noqa: F811
    """The default of shared texts: they answer as slots in the model's dtype, and take less memory."""
    server = process("--policy", "take", "--budget", "256", "--share-kv", "model", "--store", str(tmp_path))
    server.store(TEXT)
    for name, code in FACTS.items():
        answer = server.ask(asks(name), **OPENS)
        assert (str(code) in answer.choices[0].message.content) == (
            str(code) in asked.ask(asks(name), **OPENS).choices[0].message.content
        )
        assert answer.usage.prompt_tokens_details.cached_tokens > 500
    assert str(FACTS["Orshan"]) in server.ask(f"{TEXT}\n\n{asks('Orshan')}").choices[0].message.content
    assert _disk(asked) < 0.6 * _disk(server)


def _disk(server) -> float:
    text = server.client.with_options(base_url=server.url).get("/metrics", cast_to=str)
    return next(
        float(line.split()[1]) for line in text.splitlines() if line.startswith('kvevict_cache_bytes{place="disk"')
    )


def _ignored(function, *args):
    with contextlib.suppress(openai.OpenAIError):
        function(*args)


@pytest.mark.parametrize(("argv", "said"), [
    (["--policy", "nothing"], "unknown policy 'nothing'"), (["--budget", "-1"], "budget"),
    (["--memory-bytes", "x"], "--memory-bytes x: give a number of bytes"), (["--queue", "-1"], "queue"),
    (["--timeout", "0"], "timeout"), (["--store", "/dev/null"], "--store /dev/null"), (["/nowhere"], "/nowhere"),
    (["--host", "1.2.3.4.5"], "1.2.3.4.5"),
])  # fmt: skip
def test_mistakes_in_the_arguments(argv, said, capsys):
    assert main(["serve", "--port", "0", *argv]) == 2
    assert said in capsys.readouterr().err


def test_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == "kvevict serve: kvevict serve needs fastapi; run: pip install 'kvevict[serve]'\n"


def test_the_package_does_not_need_it():
    code = (
        "import kvevict, kvevict.cli, sys; kvevict.patch; sys.exit('fastapi' in sys.modules or 'openai' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(kvevict.__file__).parents[1]).returncode == 0


def test_langchain(asked):
    pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="small", base_url=f"{asked.url}/v1", api_key="key", max_tokens=12, max_retries=0)
    said = chat.invoke(f"{TEXT}\n\n{asks('Orshan')}")
    assert str(FACTS["Orshan"]) in said.content and said.usage_metadata["output_tokens"] == 12
    assert "".join(part.content for part in chat.stream(f"{TEXT}\n\n{asks('Orshan')}")) == said.content
    later = chat.invoke([("user", TEXT), ("assistant", "Yes?"), ("user", asks("Velmora"))])
    assert str(FACTS["Velmora"]) in later.content
    with pytest.raises(openai.BadRequestError, match="n must be"):
        chat.invoke("Once", n=17)


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_s_tools_and_forms(asked, responses):
    pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel, Field

    class Code(BaseModel):
        """A code."""

        number: int = Field(ge=100_000, le=999_999)

    chat = ChatOpenAI(
        model="small", base_url=f"{asked.url}/v1", api_key="key", max_tokens=200, max_retries=0,
        use_responses_api=responses,
    )  # fmt: skip
    question = HumanMessage(f"{TEXT}\n\n{asks('Orshan')}")
    for method in ("json_schema", "function_calling"):
        found = chat.with_structured_output(Code, method=method).invoke([question])
        assert isinstance(found, Code), method
    forced = chat.bind_tools([Code], tool_choice="Code", parallel_tool_calls=False)
    answer, streamed = forced.invoke([question]), None
    for part in forced.stream([question]):
        streamed = part if streamed is None else streamed + part
    [call], [same] = answer.tool_calls, streamed.tool_calls
    assert call["name"] == "Code" and Code(**call["args"]) == Code(**same["args"])
    assert chat.bind_tools([Code], tool_choice="none").invoke([question]).tool_calls == []
    said = chat.bind_tools([Code]).invoke([question, answer, ToolMessage("it is right", tool_call_id=call["id"])])
    assert said.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]


def test_transformers_chat(asked, monkeypatch):
    """The client that `transformers chat` has, with its requests."""
    from huggingface_hub import InferenceClient, constants
    from transformers import GenerationConfig

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # else the client asks no server, not even this one
    client, config = (
        InferenceClient(base_url=f"{asked.url}/v1", api_key="key"),
        GenerationConfig(do_sample=False, max_new_tokens=12),
    )
    chat = [dict(role="user", content=f"{TEXT}\n\n{asks('Orshan')}")]
    extra = dict(generation_config=config.to_json_string(), model="small")
    parts = client.chat_completion(chat, stream=True, model="small", extra_body=extra)
    assert str(FACTS["Orshan"]) in "".join(part.choices[0].delta.content or "" for part in parts)


def test_the_page_in_a_browser(asked, tmp_path):
    """A text is dropped in, a question answered, and the kept parts shown. Needs playwright and CHROMIUM, the path of a
    browser."""
    api = pytest.importorskip("playwright.sync_api")
    if "CHROMIUM" not in os.environ:
        pytest.skip("CHROMIUM is not set")
    (tmp_path / "my notes.txt").write_text(f"<b>{TEXT}</b>")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"])
        tab, errors = browser.new_page(), []
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto(asked.page)
        tab.wait_for_selector("#keyed:not([hidden])")
        tab.fill("#key", "key")
        tab.press("#key", "Tab")
        tab.wait_for_selector("#texts option[value=text]", state="attached")
        tab.set_input_files("#file", tmp_path / "my notes.txt")
        tab.wait_for_selector("#kept span")
        assert tab.inner_text("#kept") == f"<b>{TEXT}</b>" and tab.input_value("#texts") == "my notes.txt"
        tab.wait_for_function("document.getElementById('note').textContent.includes(' tokens read after ')")
        assert " kept." in tab.inner_text("#note") and tab.is_hidden("#progress")
        assert "364" in tab.evaluate("[...document.querySelectorAll('#kept span')].map(s => s.textContent)")
        for name in FACTS:
            tab.fill("#question", asks(name))
            tab.click("#send")
            tab.wait_for_selector("#stop", state="hidden")
            tab.wait_for_selector("#answers div:first-child small:not(:empty)")
            said = tab.inner_text("#answers div:first-child")
            assert "were read before" in said and asks(name) in said
        assert str(FACTS["Naislet"]) in tab.inner_text("#answers")
        tab.select_option("#texts", "")
        assert tab.is_hidden("#shown") and not errors
        browser.close()


def test_the_page_of_a_phone(asked, tmp_path):
    """A question about a text that is being read waits for it. A name of any script stays, and no text of its name is
    replaced. A file that is not a text is refused. Its needs are those of the test before."""
    api = pytest.importorskip("playwright.sync_api")
    if "CHROMIUM" not in os.environ:
        pytest.skip("CHROMIUM is not set")
    files = {
        "one/文章.txt": TEXT.encode(),
        "two/文章.txt": f"{TEXT} Yes.".encode(),
        "a.pdf": b"%PDF-1.7\xff",
        "b.txt": b"\xe9",
    }
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"])
        phone = browser.new_context(viewport=dict(width=375, height=700), color_scheme="dark")
        tab = phone.new_page()
        tab.goto(asked.page)
        tab.wait_for_selector("#keyed:not([hidden])")
        assert tab.inner_text("#note") == "this server needs a key"
        tab.fill("#key", "key")
        tab.press("#key", "Tab")
        tab.wait_for_selector("#texts option[value=text]", state="attached")
        tab.fill("#question", asks("Velmora"))
        for name, text in (("one", "文章.txt"), ("two", "文章 (2).txt")):
            tab.set_input_files("#file", tmp_path / name / "文章.txt")
            tab.click("#send")
            tab.wait_for_selector("#stop", state="hidden")
            said = tab.inner_text("#answers div:first-child")
            assert said.startswith(f"{text}\n") and str(FACTS["Velmora"]) in said
            assert tab.input_value("#texts") == text
        for name, why in (("a.pdf", "save the PDF's text"), ("b.txt", "save it as UTF-8")):
            tab.set_input_files("#file", tmp_path / name)
            tab.wait_for_selector(f"#note:has-text({json.dumps(why)})")
            assert tab.input_value("#texts") == "文章 (2).txt"
        tab.wait_for_selector("#kept span")
        assert "by all" in tab.inner_text("#legend")
        assert tab.evaluate("document.documentElement.scrollWidth") == 375
        browser.close()


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


def test_it_stops(process):  # noqa: F811
    """It has logged no word of a prompt or an answer."""
    server = process("--policy", "take", "--budget", "256")
    server.store(TEXT)
    assert str(FACTS["Naislet"]) in server.ask(asks("Naislet"), **OPENS).choices[0].message.content
    assert server.end() in (0, -signal.SIGTERM)
    log = "".join(server.lines)
    assert "Naislet" not in log and "baker" not in log  # no prompt, no answer
    assert all(json.loads(line) for line in log.splitlines())
