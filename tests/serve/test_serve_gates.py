"""Gates that a server has trained beside it, and the texts that were read before it had them."""

import contextlib
import fcntl
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import zoo
from process import folder, openai, process  # noqa: F401
from serving import FACTS, FILLER, TEXT, Client, asks, cached, model, said, server, unpatched  # noqa: F401
from untrained import written

import kvevict
from kvevict.cli import main
from kvevict.engine.measure import gates as own
from kvevict.serve import gates
from kvevict.serve.gates import Gates

OPENS = dict(kvevict=dict(text="text"))
BEGINS, USED, FAILED = "the training of gates begins", "gates are used", "gates cannot be had"


@pytest.fixture(scope="module")
def bare(folder):  # noqa: F811
    """The model without its gates."""
    shutil.rmtree(folder / "kvevict_gates")
    return folder


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A text of three pieces."""
    file = tmp_path_factory.mktemp("book") / "book.txt"
    file.write_text(TEXT * 4)
    return str(file)


def logged(server, *sentences):
    """The log line that has one of the sentences, once it is there."""
    for _ in range(3000):
        for line in list(server.lines):
            if any(sentence in line for sentence in sentences):
                return line
        time.sleep(0.05)
    raise AssertionError("".join(server.lines))


def state(server):
    text = server.client.with_options(base_url=server.url).get("/metrics", cast_to=str)
    [found] = [line for line in text.splitlines() if line.startswith("kvevict_gates{") and line.endswith(" 1.0")]
    return found.split('"')[1]


def free(place) -> bool:
    """Whether no process has the folder's lock, within a minute."""
    with open(place / "gates.lock", "w") as lock:
        for _ in range(600):
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(0.1)
    return False


@pytest.mark.slow
def test_the_first_start_trains_and_the_second_uses(bare, book, process, tmp_path):  # noqa: F811
    """A text that was read before is still used, in the second server, too."""
    place = tmp_path / "gates"
    options = ("--gates", str(place), "--gates-data", book, "--store", str(tmp_path / "store"), "--budget", "256")
    first = process(*options)
    first.store(TEXT)
    begins = logged(first, BEGINS, FAILED)
    assert all(f'"{fact}": ' in begins for fact in ("parameters", "bytes", "peak_bytes", "seconds")), begins
    assert '"parameters": 4112, "bytes": 16448' in begins  # 4 layers, 4 heads, 256 inputs and a constant
    assert USED in logged(first, USED, FAILED) and state(first) == "used"
    asked = dict(extra_body=OPENS)
    tokens = first.ask(asks("Orshan"), **asked).usage.prompt_tokens_details.cached_tokens
    assert tokens > 500 and free(place)
    assert first.end() in (0, -signal.SIGTERM)

    second = process(*options)
    assert USED in logged(second, BEGINS, USED, FAILED)
    answer = second.ask(asks("Orshan"), **asked)
    assert answer.usage.prompt_tokens_details.cached_tokens == tokens
    kvevict.gates.load(place, model())


@pytest.mark.slow
def test_servers_that_end_before_their_training(bare, book, process, tmp_path):  # noqa: F811
    """The training ends with each and leaves no gates; the next server has them trained."""
    place = tmp_path / "gates"
    for how in (signal.SIGTERM, signal.SIGKILL):
        server = process("--gates", str(place))
        logged(server, BEGINS)
        while state(server) != "training":
            time.sleep(0.05)
        server.end(how)
        assert free(place) and not gates.there(place)
    (place / ".kvevict-left").mkdir()
    last = process("--gates", str(place), "--gates-data", book)
    assert USED in logged(last, USED, FAILED)
    assert not list(place.glob(".kvevict-*"))


class Beside:
    """A server, as its gates see it."""

    def __init__(self):
        self.server = server(unasked="kvzip")

    def begin(self, made):
        made.begin(self.server)
        return self

    def becomes(self, state):
        for _ in range(1200):
            if f'kvevict_gates{{kvevict_gates="{state}"}} 1.0' in self.text():
                return True
            time.sleep(0.05)
        return False

    def text(self):
        return self.server.metrics.text(self.server.scheduler, self.server.prefixes, []).decode()


def of(place, data=None, made=None, name=None):
    return Gates(made or model(), str(place), data, None, name or kvevict.small_llama(), "auto", "cpu")


def test_two_servers_train_once(tmp_path, monkeypatch):
    """The second waits for the first, then has its gates."""
    monkeypatch.setattr(subprocess, "Popen", None)
    with open(tmp_path / "gates.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = of(tmp_path)
        beside = Beside().begin(made)
        assert made.reads == "read-twice" and beside.becomes("waiting")
        shutil.copytree(Path(kvevict.small_llama()) / "kvevict_gates", tmp_path, dirs_exist_ok=True)
    assert beside.becomes("used")
    assert (beside.server.policies.unasked, beside.server.policies.older) == ("gate", "read-twice")


@pytest.mark.slow
def test_a_training_that_fails(tmp_path, caplog):
    """The server goes on, and its log says why."""
    (tmp_path / "short").write_text("Once.")
    beside = Beside().begin(of(tmp_path / "gates", str(tmp_path / "short")))
    with caplog.at_level("INFO", "kvevict.serve"):
        assert beside.becomes("failed")
    assert "texts hold no piece" in caplog.records[-1].facts["reason"]
    assert beside.server.policies.unasked == "kvzip" and free(tmp_path / "gates")


def test_a_training_that_memory_does_not_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(gates, "free_bytes", lambda device: 1 << 20)
    assert Beside().begin(of(tmp_path)).becomes("failed")


def test_what_was_read_before_is_used():
    """As long as reading on costs less than reading anew with the gates."""
    client = Client(server(unasked="kvzip"))
    client.store()
    before = client.server.policies
    tokens = cached(client.chat(asks("Orshan"), **OPENS))
    client.server.policies = replace(before, unasked="gate", older="kvzip")
    again = client.chat(asks("Naislet"), **OPENS)
    assert cached(again) == tokens > 500 and str(FACTS["Naislet"]) in said(again)
    asked = dict(kvevict=dict(text="text", policy="gate"))
    assert [cached(client.chat(asks("Orshan"), **asked)) for _ in range(2)] == [0, tokens]  # nothing was read so
    client.store("other", FILLER * 40)
    for policy, want in (("gate", True), ("kvzip", False)):
        asked = dict(kvevict=dict(text="other", policy=policy))
        assert (cached(client.chat(asks("Orshan"), **asked)) > 500) == want, policy


def test_a_short_beginning_that_was_read_before():
    """A long text after it is read with the gates, not as it was."""
    system = dict(role="system", content=FILLER * 20)

    def ask(client, text, name):
        turns = [system, dict(role="user", content=text), dict(role="assistant", content="Yes."),
                 dict(role="user", content=asks(name))]  # fmt: skip
        return client.post("/v1/chat/completions", messages=turns, max_tokens=4)

    client, seen = Client(server(unasked="kvzip", share="auto", share_budget=0.5, context=4096)), []
    prepare = client.server.manager.prepare
    client.server.manager.prepare = lambda call, tokenizer: (prepare(call, tokenizer), seen.append(call))[0]
    for _ in range(2):
        ask(client, FILLER * 3, "Orshan")
    before = client.server.policies
    client.server.policies = replace(before, unasked="gate", older="kvzip")
    for text in (FILLER * 3, FILLER * 60, FILLER * 60):
        ask(client, text, "Orshan")
    old, new = before.reader().policy, client.server.policies.reader().policy
    assert [call.reader.policy for call in seen] == [old] * 3 + [new] * 2


@pytest.mark.parametrize("argv, sentence", [
    (["--gates", "FOLDER", "--unasked", "kvzip"], "--unasked kvzip and --gates: gates are of the policy gate"),
    (["--gates", "FOLDER", "--unasked", "gate:gates=x"], "without gates="),
    (["--gates", "/dev/null/gates"], "--gates /dev/null/gates: /dev/null is not a folder"),
    (["--gates", "FOLDER", "--gates-data", "/nowhere"], "--gates-data /nowhere does not exist"),
    (["--gates-data", "/nowhere"], "give --gates FOLDER, too"),
    (["--gates", "OTHER"], "is of another model: its heads is [4, 2]"),
])  # fmt: skip
def test_mistakes(argv, sentence, tmp_path, capsys):
    written(tmp_path / "other", tiny.model(num_hidden_layers=4))
    places = dict(FOLDER=str(tmp_path / "gates"), OTHER=str(tmp_path / "other"))
    assert main(["serve", "--port", "0", *[places.get(each, each) for each in argv]]) == 2
    [error] = [line for line in capsys.readouterr().err.splitlines() if "kvevict serve:" in line]
    assert sentence in error
    assert not (tmp_path / "gates").exists()


def test_a_model_that_has_no_gates(tmp_path):
    with pytest.raises(ValueError, match=r"no gates can be trained for this model: .*ALiBi"):
        of(tmp_path, made=zoo.make("bloom", "BloomForCausalLM"))


def test_other_gates_read_anew(tmp_path, monkeypatch):
    """A stored prefix belongs to the gates that read it."""
    client = Client(server(tmp_path, unasked="gate"))
    client.store()
    assert cached(client.chat(asks("Orshan"), **OPENS)) > 500
    place = Path(written(tmp_path / "gates", model()))
    monkeypatch.setattr(own, "own", lambda decoder: place)
    assert cached(client.chat(asks("Orshan"), **OPENS)) == 0
