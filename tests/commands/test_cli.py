"""The command line: its list, a closed pipe, how a policy is written, the bundled model, `kvevict generate`."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from tiny import byte_tokenizer, generate, save

import kvevict
from kvevict.cli import COMMANDS, main
from kvevict.commands import grid, options_of
from kvevict.policy.building import choose
from kvevict.policy.text import parse_policy


@pytest.mark.quick
def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    for name, function in COMMANDS.items():
        assert f"{name} {function.__doc__}" in [" ".join(line.split()) for line in lines]


def test_a_reader_that_leaves():
    pipes, command = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE), [sys.executable, "-m", "kvevict", "policies"]
    child = subprocess.Popen(command, **pipes, text=True)
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait() == 1


@pytest.mark.parametrize(("words", "code"), [
    ("policies >&-", 0), ("policies --json >&-", 0), ("--version >&-", 0), ("policies --nothing 2>&-", 2),
])  # fmt: skip
def test_a_stream_that_is_closed(words, code):
    """What is printed there is lost, and nothing else changes."""
    run = subprocess.run(f"{sys.executable} -m kvevict {words}", shell=True, capture_output=True)
    assert (run.returncode, run.stdout, run.stderr) == (code, b"", b"")


@pytest.mark.parametrize("text, want", [
    ("take", ("take", {})),
    ("edie-exact:alpha=0.3", ("edie-exact", dict(alpha=0.3))),
    ("take:probe=[0, 32],alpha=0.3", ("take", dict(probe=(0, 32), alpha=0.3))),
    ("take:alpha=1,probe=[-9,-1]", ("take", dict(alpha=1, probe=(-9, -1)))),
    ("oracle:response=[5,6],x=[],y=[7]", ("oracle", dict(response=(5, 6), x=(), y=(7,)))),
    ("take:warmup-budget=90,decode=true,warmup_layers=null",
     ("take", dict(warmup_budget=90, decode=True, warmup_layers=None))),
    ("edie+tada:task=7", ("edie+tada", dict(task="7"))),
])  # fmt: skip
def test_policies_by_hand(text, want):
    assert parse_policy(text) == want


@pytest.mark.parametrize("text", ["take:", "take:probe", "take:probe=8,"])
def test_mistakes_in_policies(text):
    with pytest.raises(ValueError, match=r"NAME\[:OPTION=VALUE"):
        parse_policy(text)


def test_options_read_back():
    """The printed options of a policy make the same policy again."""
    chosen = choose(
        "take", budget=70, probe=(3, 9), ema_alpha=0.3, warmup_layers=2, layers="pyramid", kv="int8",
        recall="memory",
    )  # fmt: skip
    policy = chosen.policy
    options = eval(f"dict({options_of(chosen)})")
    assert choose("take", **options) == chosen
    assert options.keys() == {
        "kv", *(f.name for part in (policy, policy.rows, policy.score, policy.layers) for f in dataclasses.fields(part))
    }  # fmt: skip
    assert "budget=70" in options_of(chosen) and "budget=70" not in options_of(chosen, "budget")


def test_grid_by_hand():
    assert grid([("", "a", "bcd"), ("wide", "1", "2")]) == "      a  bcd\nwide  1    2"
    assert grid([("x", "a"), ("wide", "b")], left=2) == "x     a\nwide  b"


@pytest.mark.parametrize("words", [
    "demo", "bench", "plan", "generate --file FILE What?", "inspect --file FILE What?",
    "eval --tasks facts --policies take --out OUT",
])  # fmt: skip
def test_the_bundled_model_is_the_default(words, tmp_path, monkeypatch, capsys):
    missing = mock.Mock(side_effect=FileNotFoundError("no model.safetensors"))
    monkeypatch.setattr("kvevict.models.loading.small_llama", missing)
    (tmp_path / "text").write_text("a")
    words = words.replace("FILE", str(tmp_path / "text")).replace("OUT", str(tmp_path / "out"))
    assert main(words.split()) == 2
    assert "no model.safetensors" in capsys.readouterr().err


@pytest.mark.quick
def test_generate(tmp_path, capsys):
    """Answers are those of `model.generate`; slots and bytes follow from the sizes: 4 layers, 2 kv heads of 32."""
    folder, model = save(tmp_path / "model")
    (tmp_path / "text").write_text("What is kept of this? " * 200)
    words = ["generate", "--model", folder, "--file", str(tmp_path / "text"), "--max-new-tokens", "5", "--compare"]
    name = "streaming:sink=2,decode=false"
    assert main([*words, "--policy", name, "--budget", "700", "--chunk-size", "1000", "--limit", "2000", "Who?"]) == 0
    *lines, last = capsys.readouterr().out.strip().splitlines()
    runs = json.loads(last)["runs"]
    question = "\n\nWho?"
    text = ("What is kept of this? " * 200)[: 2000 - len(question)] + question
    ids = torch.tensor([byte_tokenizer()(text)["input_ids"]])
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert runs["unpatched"]["answer"] == byte_tokenizer().decode(generate(model, inputs, 5)[0])
    with kvevict.evicting(model, "streaming", budget=700, chunk_size=1000, sink=2, decode=False):
        assert runs[name]["answer"] == byte_tokenizer().decode(generate(model, inputs, 5)[0])
    rows = {line.split()[0]: line.split()[1:3] for line in lines if line.startswith(("unpatched", name))}
    sizes = {"unpatched": 2000, name: 700}
    assert rows == {key: [str(n), f"{2 * 4 * 32 * 2 * 4 * n / 2**20:.2f}"] for key, n in sizes.items()}


@pytest.mark.parametrize("name, argv", [
    ("generate", ["--file", "FILE", "who?"]), ("inspect", ["--file", "FILE", "who?"]),
    ("diagnose", ["--file", "FILE", "who?"]), ("diagnose", []),
])  # fmt: skip
def test_an_answer_longer_than_the_context(name, argv, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("words " * 50)
    folder, _ = save(tmp_path / "model")
    argv = [str(text) if word == "FILE" else word for word in argv]
    assert main([name, "--model", folder, "--max-new-tokens", "4096", "--limit", "100", *argv]) == 2
    assert "--max-new-tokens 4096: the model's context is 4096 tokens; give at most 4095" in capsys.readouterr().err


def test_a_limit_beyond_the_context_is_the_context(tmp_path, capsys):
    folder, _ = save(tmp_path / "model", max_position_embeddings=200)
    text = tmp_path / "text"
    text.write_text("words " * 50)
    words = ["generate", "--model", folder, "--limit", "300", "--max-new-tokens", "20", "--budget", "90"]
    assert main([*words, "--file", str(text), "who?"]) == 0
    out = capsys.readouterr()
    assert out.out.startswith("180 prompt tokens") and "(limit: 180)" in out.err


def test_an_opened_answer_ends_with_its_line(tmp_path, capsys):
    facts = "The code of Naislet is 364735. " * 9
    text = tmp_path / "text"
    text.write_text(facts)
    words = ["generate", "--file", str(text), "--opening", "Answer: The code of Naislet is", "--budget", "200"]
    assert main([*words, "Question: What is the code of Naislet?"]) == 0
    assert capsys.readouterr().out.splitlines()[-2].startswith("[take+edie] 364735")


def test_a_span_of_the_prompt_observes(tmp_path, capsys):
    """In brackets or parentheses; the warm-up works although it is shorter than the span."""
    text = tmp_path / "text"
    text.write_text("The code of Naislet is 364735. " * 9)
    for span in ("[-40,-10]", "(-40,-10)"):
        words = ["generate", "--file", str(text), "--policy", f"take+edie:probe={span}", "--budget", "90", "Who?"]
        assert main(words) == 0
    assert parse_policy("take:probe=(0, 32)") == ("take", {"probe": (0, 32)})


@pytest.mark.parametrize("words, said", [
    (["generate", "Who?", "--file", "/none"], "--file /none: No such file"),
    (["generate", "Who?", "--file", "README.md", "--model", "./none"], "there is no folder ./none; give the folder"),
    (["inspect", "Who?", "--file", "README.md", "--out", "/none/a.html"], "--out /none/a.html: there is no folder"),
    (["plot", "--kind", "budget", "--policies", "take", "r.jsonl"], "name it before --policies"),
    (["demo", "--out", "/proc/x"], "--out /proc/x: "),
    (["demo", "--out", "README.md/x"], "README.md is not a folder"),
    (["demo", "--policies", "speckv"], "policy speckv: the smaller model that drafts is missing; write speckv:draft_m"),
    (["generate", "Who?", "--file", "README.md", "--policy", "oracle"], "it needs to know the right answer"),
    (["inspect", "Who?", "--file", "README.md", "--out", "docs"], "--out docs: it is a folder; give a file"),
    (["train", "--data", "nope.jsonl", "--out", "out"], "--data nope.jsonl does not exist"),
    (["statistics", "--data", "README.md", "--out", "/nope/q"], "--out /nope/q: there is no folder /nope"),
    (["eval", "--tasks", "facts", "--policies", "take", "--out", "/nope/r.jsonl"], "there is no folder /nope"),
    (["eval", "--tasks", "foo"], "unknown task 'foo'; known: asked, "),
    (["eval", "--tasks", "fact"], "unknown task 'fact'; did you mean 'facts'? known: asked, "),
    (["eval", "--protocol", "taek"], "known: "),
    (["plan", "--model", "docs"], "the folder docs has no config.json, so it is not a model"),
    (["generate", "Who?", "--file", "README.md", "--model", "docs"], "the folder docs has no config.json"),
])  # fmt: skip
def test_mistakes_name_the_argument(words, said, capsys, monkeypatch):
    """Before a model is loaded, and nothing is left over."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    before = set(Path().iterdir())
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert set(Path().iterdir()) == before


@pytest.mark.parametrize("words, code", [("--help", 0), ("--version", 0), ("eval --help", 0), ("geenrate", 2)])
def test_arguments_are_read_before_torch_is_imported(words, code):
    program = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; from kvevict.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program, *words.split()], capture_output=True, text=True)
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize("words, terminal, table, line", [
    ("models llama", False, True, True), ("models llama", True, True, False),
    ("models llama --json", True, False, True), ("policies --json", False, False, True),
])  # fmt: skip
def test_a_json_line_where_a_program_reads_or_asks(words, terminal, table, line, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert main(words.split()) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert (bool(lines), last.startswith("{")) == (table, line)
    assert not line or json.loads(last)["command"] == words.split()[0]


@pytest.mark.parametrize("words, said", [
    ("plan", "kvevict plan: interrupted\n"),
    ("eval --tasks facts --policies take --out r.jsonl",
     "kvevict eval: interrupted; the same command goes on with what r.jsonl lacks\n"),
])  # fmt: skip
def test_ctrl_c_is_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("AutoConfig", "AutoModelForCausalLM"):
        monkeypatch.setattr(f"transformers.{name}.from_pretrained", mock.Mock(side_effect=KeyboardInterrupt))
    assert main(words.split()) == 130
    assert capsys.readouterr().err == said


def test_a_plan_within_and_beyond_the_context(capsys):
    """By default prompt and answer fill the model's context."""
    assert main(["plan"]) == 0
    out, err = capsys.readouterr()
    assert "1 x 1792 tokens" in out and not err
    assert main(["plan", "--tokens", "1793"]) == 0
    warning = "kvevict plan: warning: 1793 and 256 more tokens exceed the model's context of 2048"
    assert capsys.readouterr().err.startswith(warning)


def test_no_command_prints_the_commands(capsys):
    assert main([]) == 2
    assert "  demo  " in capsys.readouterr().err


@pytest.mark.parametrize("own, warned", [(False, True), (True, False)])
def test_the_bundled_model_is_told(own, warned, tmp_path, capsys):
    """Where it answers about a user's text."""
    (tmp_path / "text").write_text("The code of Naislet is 364735. " * 9)
    more = ["--model", save(tmp_path / "model")[0]] if own else []
    words = ["generate", "--file", str(tmp_path / "text"), "--budget", "90", "--max-new-tokens", "2", *more, "Who?"]
    assert main(words) == 0
    assert ("the bundled model finds" in capsys.readouterr().err) == warned


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"{kvevict.__version__}\n"
