"""Every short example runs, uses the public API only, and says what it ought to."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import kvevict

ROOT = Path(__file__).parents[2]
SAYS = {
    "first_steps": "take+edie: The code of Naislet is 364735 (7% of 1787 tokens' slots, 512 KiB)",
    "chat": "is 364735 (right; attends to 100% of the slots)\nof the file: The code of Quorrin is 558240",
    "own_score": "{'rows': 'probe', 'chunk_size': 128} kept [64, 64, 64, 64]",
    "batch_eval": "4 of 4 right",
    "lookahead_tokens": "[[64, 64, 64, 64]]",
}

RECIPES = ("documents", "batch", "report")
CODES = {"Naislet": 364735, "Breamuth": 906112, "Quorrin": 558240}
PIECE = dict(documents=3, batch=1, report=4)  # lines of the last piece of the file
SAID = dict(documents=2, batch=2, report=1)  # lines that the second run prints


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name == "first_steps" else pytest.mark.nightly) for name in SAYS
])  # fmt: skip
def test_runs(name, tmp_path):
    if name == "batch_eval":
        pytest.importorskip("accelerate")
    said = run(name, tmp_path)
    assert SAYS[name] in said
    assert "wrong" not in said


def run(name, folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, ROOT / f"examples/{name}.py", *arguments], cwd=folder, env=environment, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_goes_on(name, tmp_path):
    """Subprocesses: each recipe runs whole, then again from a file that lacks its last piece."""
    filler = "The baker counted the boats in the harbour and went home before it rained. " * 12
    texts = {each: f"{filler}The code of {each} is {code}. {filler}" for each, code in CODES.items()}
    usual = ["--max-new-tokens", "10", "--budget", "128", "--out", "out.jsonl"]
    if name == "documents":
        (tmp_path / "texts").mkdir()
        for each, text in texts.items():
            (tmp_path / f"texts/{each}.txt").write_text(text)
        (tmp_path / "asked.txt").write_text("".join(f"What is the code of {each}?\n" for each in CODES))
        usual += ["--documents", "texts", "--questions", "asked.txt"]
    elif name == "batch":
        prompts = [f"{texts[each]}\n\nQuestion: What is the code of {each}?\nAnswer:" for each in CODES]
        lines = [json.dumps(dict(prompt=prompt)) for prompt in prompts]
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
        usual += ["--prompts", "prompts.jsonl", "--batch-size", "2"]
    else:
        (tmp_path / "text.txt").write_text("".join(texts.values()))
        (tmp_path / "parts.txt").write_text("".join(f"What is the code of {each}?\n" for each in CODES))
        usual += ["--text", "text.txt", "--parts", "parts.txt"]
    run(name, tmp_path, *usual)
    out = tmp_path / "out.jsonl"
    whole = out.read_text()
    if name == "batch":
        assert all(str(code) in whole for code in CODES.values())
    pieces = whole.splitlines(keepends=True)
    out.write_text("".join(pieces[: -PIECE[name]]))
    said = run(name, tmp_path, *usual)
    assert out.read_text() == whole
    assert len(said.splitlines()) == SAID[name]


@pytest.mark.parametrize("name", [*SAYS, *RECIPES])
def test_public_and_short(name):
    source = (ROOT / f"examples/{name}.py").read_text()
    assert 20 <= len(source.splitlines()) <= (60 if name in RECIPES else 40)
    imported = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    ours = [alias.name for node in imported for alias in node.names if alias.name.split(".")[0] == "kvevict"]
    ours += [node.module for node in imported if isinstance(node, ast.ImportFrom) and "kvevict" in node.module]
    assert ours == ["kvevict"]


@pytest.mark.parametrize("chat", [True, False])
def test_prompts_to_train_on(chat, tmp_path):
    """Four kinds in turn. A text with questions is read from its start, and one of them asked; a fact's answer, the
    sentence that is asked about and a continued text are in the texts."""
    model = shutil.copytree(kvevict.small_llama(), tmp_path / "model")
    if chat:
        turn = "<{{ message.role }}>{{ message.content }}\n"
        (model / "chat_template.jinja").write_text(f"{{% for message in messages %}}{turn}{{% endfor %}}<assistant>")
    story = " ".join(f"The baker counted {number} boats." for number in range(200))
    lines = [dict(text=story), dict(text="In May we met. " * 30, questions=["When did we meet?", "Who met?"])]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    usual = ["--model", str(model), "--texts", "texts.jsonl", "--count", "40", "--words", "20", "60"]
    run("lookahead_data", tmp_path, *usual, "--out", "prompts.jsonl")
    tokenizer, found = AutoTokenizer.from_pretrained(model), set()
    made = [json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(made) == 40
    for number, ids in enumerate(made):
        said = tokenizer.decode(ids, skip_special_tokens=True)
        if number % 4 == 0:
            assert said.strip() in story + lines[1]["text"] and 20 <= len(said.split()) <= 60
            continue
        passage, asked = re.fullmatch(r"(?:<user>)?(.+)\n\n(.+)", said.strip(), re.S).groups()
        question, opening = re.fullmatch(r"(.+)\n(?:<assistant>|Answer:)(.*)", asked, re.S).groups()
        if number % 4 == 1:
            assert re.fullmatch(r'Which sentence of the text follows "(.+)"\?', question)[1] in passage
        elif number % 4 == 2:
            found.add((passage.startswith("In May"), question in lines[1]["questions"]))
        else:
            fact = re.fullmatch(r"What is (\w+'s \w+)\?", question)[1]
            assert f"{fact} is " in passage and opening.strip() in (f"{fact} is", "")
    assert found == {(True, True), (False, False)}
