"""The README and docs: snippets run, generated pages are those of the code, links lead somewhere, lines are short."""

import argparse
import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvevict

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / "csrc/README.md", ROOT / "examples/small_llama/README.md"]
MADE = ("policies.md", "options.md", "commands.md", "models.md", "serve.md")
MEASURED = ("results.md", "performance.md", "cuda.md")  # their commands take from minutes to days
MARKS = {
    "": "runs", "hub": "needs the hub, or a model of the reader's", "install": "changes the environment",
    "long": "takes longer than a test may", "kvpress": "is another library's",
    "example": "runs in test_architecture.py",
}  # fmt: skip


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load(ROOT / "docs" / "generate.py")


def fences(page):
    """(language, mark, code) of every fenced block."""
    for info, code in re.findall(r"^```([^\n`]+)\n(.*?)^```$", page.read_text(), re.M | re.S):
        language, _, mark = info.partition(" ")
        yield language, mark, code


def names(pages):
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_marks(page):
    for language, mark, _ in fences(page):
        assert language in ("python", "sh", "text", "json", "yaml")
        assert mark in MARKS


def python(page, *marks):
    """The page's Python with one of the marks, as a reader types it."""
    return "\n".join(code for language, mark, code in fences(page) if language == "python" and mark in marks)


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_python_parses(page):
    """Each fence, those that no test runs too."""
    for language, _, code in fences(page):
        if language == "python":
            ast.parse(code)


CHAT = "{% for message in messages %}{{ message.content }}\nAnswer:{% endfor %}"


@pytest.mark.slow
def test_readme_snippets(tmp_path):
    """They find their facts. The bundled model with a chat template stands for the reader's."""
    shutil.copytree(kvevict.small_llama(), tmp_path / "theirs")
    (tmp_path / "theirs/chat_template.jinja").write_text(CHAT)
    code, named = re.subn(r"(?<=^name = ).*", "'theirs'", python(ROOT / "README.md", "", "hub"), flags=re.M)
    assert named == 1
    *lines, answers = run([sys.executable, "-c", code], tmp_path).splitlines()
    kept = lines.index("[[128, 128, 128, 128]]")
    assert lines[0] == lines[kept - 1] == " The code of Naislet is 364735"
    assert [re.search(r"\d{6}", said)[0] for said in ast.literal_eval(answers)] == ["364735", "118204"]


@pytest.mark.slow
def test_the_snippets_on_patch(tmp_path):
    """Those of usage.md up to the end of its part on `patch`; the others run each night."""
    page = tmp_path / "usage.md"
    before, patch, *_ = re.split(r"^(?=## )", (ROOT / "docs/usage.md").read_text(), flags=re.M)
    assert patch.startswith("## Patch\n")
    page.write_text(before + patch)
    run([sys.executable, "-c", python(page, "")], tmp_path)


WITH_PYTHON = [page for page in PAGES if page.name != "README.md" and python(page, "")]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("page", WITH_PYTHON, ids=names(WITH_PYTHON))
def test_python_snippets(page, tmp_path):
    """A page's snippets, one after the other as a reader types them, in a separate process. Nightly: half a minute."""
    run([sys.executable, "-c", python(page, "")], tmp_path)


SHELL = [
    (page, code) for page in PAGES if page.name not in MEASURED
    for language, mark, code in fences(page) if (language, mark) == ("sh", "")
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("page, code", SHELL, ids=[f"{page.relative_to(ROOT)}-{code[:30]}" for page, code in SHELL])
def test_shell_snippets(page, code, tmp_path):
    """In an empty folder with the examples; `kvevict` and `python` are this interpreter's. Nightly: the commands take a
    minute, and each has another test."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, command in (("python", ""), ("kvevict", " -m kvevict")):
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{command} "$@"\n')
        (tools / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run(["bash", "-euo", "pipefail", "-c", code], tmp_path, PATH=f"{tools}:{os.environ['PATH']}")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("command", [code for _, mark, code in fences(ROOT / "README.md") if mark == "install"])
def test_readme_commands(command, tmp_path):
    """Each is one line, and works as printed in a clean clone; of the tests one file is run."""
    assert command.count("\n") == 1 and " && " in command
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "clone"], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "KVEVICT"))}
    environment |= dict(PYTEST_ADDOPTS="-k test_layers")
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path / "clone", env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def run(command, folder, **environment):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_commands_exist(page):
    """Every `kvevict` command of a page is one that the parser takes, and every script of ours is there."""
    for language, _, code in fences(page):
        for line in code.replace("\\\n", " ").splitlines() if language == "sh" else ():
            words = [word for word in shlex.split(line, comments=True) if not re.match(r"\w+=", word)]
            if words and words[0].split("/")[-1] == "kvevict":
                taken(words[1], words[2:])
            for word in words:
                if re.match(r"(tests|examples|docs)/.*\.(py|sh)$", word):
                    assert (ROOT / word).is_file(), word


@pytest.mark.parametrize("line", generate.EXAMPLES.values())
def test_examples_of_commands(line):
    taken(*shlex.split(line)[1:2], shlex.split(line)[2:])


def taken(name, argv):
    parser = generate.parser_of(name)
    parser.error = lambda message: pytest.fail(f"kvevict {name} {argv}: {message}")
    argparse.ArgumentParser.parse_args(parser, argv)


@pytest.mark.parametrize("name", MADE)
def test_generated_pages(name):
    assert (ROOT / "docs" / name).read_text() == generate.PAGES[name](), "run: python docs/generate.py"


def test_every_choice_is_told():
    text = {name: (ROOT / "docs" / name).read_text() for name in MADE}
    from kvevict.cli import COMMANDS

    assert all(f"| `{name}` |" in text["policies.md"] for name in kvevict.policies())
    assert all(f"## `kvevict {name}`" in text["commands.md"] for name in COMMANDS)


def prose(page):
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S))


def anchors(page):
    heads = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("https://", "http://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 110
    assert [line for line in lines if len(line) > 120 and "](" not in line and " && " not in line] == []


PRESSES = """CriticalAdaKV CriticalKV CUR AdaKV Base Composed Scorer ExpectedAttention Knorm ObservedAttention Random
    RestoreKV SimLayerKV SnapKV StreamingLLM ThinK TOVA PerLayerCompression KeyRerotation Chunk DuoAttention ChunkKV
    QFilter PyramidKV Finch LagKV Block KeyDiff KVgrad KVzip ExpectedAttentionStats CAM Decoding
    CompressionRatioDecoding PrefillDecoding Compactor LeverageScore NonCausalAttn KVzap DMS FastKVzip KVCompose
    Merging Cap LUKV EntropyGatedChunkKV"""  # of kvpress 0.5.5


def test_every_press_has_a_line():
    rows = re.findall(r"^\| (`\w+Press.*?) \| (.*?) \|", (ROOT / "docs" / "migrating.md").read_text(), re.M)
    told = {name for press, _ in rows for name in re.findall(r"`(\w+)Press\b", press)}
    assert told == set(PRESSES.split())
    for _, here in rows:
        for name in re.findall(r"`([a-z0-9+/]+)`", here):
            assert name in kvevict.policies(), name
