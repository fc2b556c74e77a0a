"""`kvevict serve` as a process, asked by OpenAI's own client: it starts, stops, is killed, and starts again."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from serving import FACTS, TEMPLATE, TEXT, asks

import kvevict
from kvevict.cli import main

openai = pytest.importorskip("openai", reason="the openai package is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The bundled model with a chat template."""
    made = tmp_path_factory.mktemp("model") / "small"
    shutil.copytree(kvevict.small_llama(), made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


class Process:
    """A server, and a client of it."""

    def __init__(self, folder, *options, key="key"):
        command = [
            sys.executable,
            "-m",
            "kvevict",
            "serve",
            str(folder),
            "--port",
            "0",
            "--chunk-size",
            "256",
            *options,
        ]
        environment = os.environ | dict(KVEVICT_API_KEY=key, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.lines = []
        for line in self.process.stderr:
            self.lines.append(line)
            if '"ready"' in line:
                port = json.loads(line)["port"]
                break
        else:
            raise AssertionError("".join(self.lines))
        threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=300)

    def ask(self, question, **more):
        messages = [dict(role="user", content=question)]
        return self.client.chat.completions.create(model="small", messages=messages, max_tokens=12, **more)

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        return self.process.wait(60)


@pytest.fixture
def process(folder, request):
    started = []

    def start(*options):
        started.append(Process(folder, *options))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait(60)
        each.process.stdout.close()


def test_the_openai_client(process, tmp_path):
    server = process("--policy", "take", "--budget", "256", "--store", str(tmp_path / "store"))
    client, opens = server.client, dict(extra_body=dict(kvevict=dict(text="text")))
    assert [each.id for each in client.models.list()] == ["small"]
    whole = server.ask(f"{TEXT}\n\n{asks('Orshan')}")
    assert str(FACTS["Orshan"]) in whole.choices[0].message.content
    client.post("/kvevict/texts", body=dict(name="text", text=TEXT), cast_to=object)

    turn = server.ask(asks("Naislet"), **opens)
    answer = turn.choices[0].message.content
    assert str(FACTS["Naislet"]) in answer and turn.usage.prompt_tokens_details.cached_tokens > 500
    stream = list(server.ask(asks("Naislet"), stream=True, **opens))
    assert "".join(part.choices[0].delta.content or "" for part in stream) == answer
    assert stream[-1].usage.prompt_tokens_details.cached_tokens == turn.usage.prompt_tokens_details.cached_tokens

    messages = [dict(role="user", content=asks("Naislet")), dict(role="assistant", content=answer.strip())]
    messages.append(dict(role="user", content=asks("Velmora")))
    later = client.chat.completions.create(model="small", messages=messages, max_tokens=12, **opens)
    assert str(FACTS["Velmora"]) in later.choices[0].message.content

    said = client.responses.create(model="small", input=f"{TEXT}\n\n{asks('Naislet')}", max_output_tokens=12)
    assert str(FACTS["Naislet"]) in said.output_text
    events = client.responses.create(model="small", input="Once", max_output_tokens=3, stream=True)
    assert [event.type for event in events][-1] == "response.completed"
    written = client.completions.create(model="small", prompt=f"{TEXT}\n\n{asks('Naislet')}\nAnswer:", max_tokens=12)
    assert str(FACTS["Naislet"]) in written.choices[0].text

    with pytest.raises(openai.BadRequestError, match="budget"):
        server.ask("Who?", extra_body=dict(kvevict=dict(budget=-1)))
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.chat.completions.create(model="other", messages=messages)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()

    assert server.end() in (0, -signal.SIGTERM)
    log = "".join(server.lines)
    assert "Naislet" not in log and "baker" not in log  # no prompt, no answer
    assert all(json.loads(line) for line in log.splitlines() if line.startswith("{"))


def test_a_server_that_is_killed(process, tmp_path):
    options = ("--budget", "256", "--store", str(tmp_path / "store"), "--share")
    server = process(*options)
    server.client.post("/kvevict/texts", body=dict(name="text", text=TEXT), cast_to=object)
    opens = dict(extra_body=dict(kvevict=dict(text="text")))
    before = server.ask(asks("Orshan"), **opens)
    long = threading.Thread(target=_ignored, args=(server.ask, TEXT * 3))
    long.start()
    assert server.end(signal.SIGKILL) == -signal.SIGKILL
    long.join()
    (tmp_path / "store" / "prefixes" / ".kvevict-left").mkdir()  # what it was writing

    again = process(*options)
    after = again.ask(asks("Orshan"), **opens)
    assert after.choices == before.choices
    assert after.usage.prompt_tokens_details.cached_tokens == before.usage.prompt_tokens_details.cached_tokens > 500
    assert not list(tmp_path.rglob(".kvevict-*"))
    other = subprocess.run(
        [sys.executable, "-m", "kvevict", "serve", "--port", "0", "--store", str(tmp_path / "store")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert other.returncode == 2 and "another server has it" in other.stderr


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


def test_langchain(process):
    pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    from langchain_openai import ChatOpenAI

    server = process("--policy", "take", "--budget", "256")
    chat = ChatOpenAI(model="small", base_url=str(server.client.base_url), api_key="key", max_tokens=12, max_retries=0)
    said = chat.invoke(f"{TEXT}\n\n{asks('Orshan')}")
    assert str(FACTS["Orshan"]) in said.content and said.usage_metadata["output_tokens"] == 12
    assert "".join(part.content for part in chat.stream(f"{TEXT}\n\n{asks('Orshan')}")) == said.content
    later = chat.invoke([("user", TEXT), ("assistant", "Yes?"), ("user", asks("Velmora"))])
    assert str(FACTS["Velmora"]) in later.content
    with pytest.raises(openai.BadRequestError, match="n must be 1"):
        chat.invoke("Once", n=2)


def test_transformers_chat(process):
    """The client that `transformers chat` has, with what it sends."""
    from huggingface_hub import InferenceClient
    from transformers import GenerationConfig

    server = process("--policy", "take", "--budget", "256")
    url = str(server.client.base_url).rstrip("/")
    client, config = InferenceClient(base_url=url, api_key="key"), GenerationConfig(do_sample=False, max_new_tokens=12)
    chat = [dict(role="user", content=f"{TEXT}\n\n{asks('Orshan')}")]
    extra = dict(generation_config=config.to_json_string(), model="small")
    parts = client.chat_completion(chat, stream=True, model="small", extra_body=extra)
    assert str(FACTS["Orshan"]) in "".join(part.choices[0].delta.content or "" for part in parts)
