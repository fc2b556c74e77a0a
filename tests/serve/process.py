"""`kvevict serve` as a process, with OpenAI's client of it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import zlib

import pytest
from serving import FILLER, TEMPLATE, asks

import kvevict

openai = pytest.importorskip("openai", reason="the openai package is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The bundled model with a chat template, which has tools."""
    made = tmp_path_factory.mktemp("model") / "small"
    shutil.copytree(kvevict.small_llama(), made)
    (made / "chat_template.jinja").write_text("{% if tools %}{{ tools | tojson }}\n\n{% endif %}" + TEMPLATE)
    return made


class Process:
    def __init__(self, folder, *options, key="key", files=None, first=""):
        """files: that the process may open at most; first: Python that it runs before it serves."""
        code = f"{first}\nimport sys\nfrom kvevict.cli import main\nsys.exit(main())"
        command = [sys.executable, "-c", code, "serve", str(folder), "--port", "0", "--chunk-size", "256"]
        own = dict(KVEVICT_API_KEY=key, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        if files is not None:
            command = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", *command]
        self.process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=os.environ | own)
        self.lines = []
        for line in self.process.stderr:
            self.lines.append(line)
            if '"ready"' in line:
                said, self.lines = json.loads(line), []  # what Transformers said while it loaded is gone
                self.url, self.page = f"http://127.0.0.1:{said['port']}", said["page"]
                break
        else:
            raise AssertionError("".join(self.lines))
        threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True).start()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300)

    def store(self, text, name="text"):
        return self.client.post("/kvevict/texts", body=dict(name=name, text=text), cast_to=object)

    def ask(self, question, **more):
        messages = [dict(role="user", content=question)]
        return self.client.chat.completions.create(model="small", messages=messages, max_tokens=12, **more)

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def process(folder):
    """Starts servers."""
    started = []

    def start(*options, **more):
        started.append(Process(folder, *options, **more))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait(60)


def stores_texts(server, stored, who) -> None:
    """Store one text after the other, and ask each."""
    for at in range(100):
        name, code = f"text {who} {at}", 100_000 + zlib.crc32(f"{who} {at}".encode()) % 900_000
        text = f"{FILLER * 4}The code of Naislet is {code}. {FILLER * 4}"
        try:
            server.client.post("/kvevict/texts", body=dict(name=name, text=text), cast_to=object)
            stored[name] = code
            asked_of(server, name)
        except openai.OpenAIError:
            return


def asked_of(server, name):
    return server.ask(asks("Naislet"), extra_body=dict(kvevict=dict(text=name)))
