"""`--model FILE.gguf`: the commands on a tiny Llama that is written here."""

import json

import pytest
import tiny
import torch

from kvevict.cli import main
from kvevict.models.loading import load_model

SHAPE = dict(head_dim=16)  # of hidden_size / heads: what Transformers' loader reads of a Llama


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, tiny.save_gguf(path, **SHAPE)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_the_file_is_the_model(file, dtype):
    path, made = file
    loaded, tokenizer = load_model(str(path), dtype)
    assert loaded.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32) and not loaded.training
    assert tokenizer("ab", add_special_tokens=False)["input_ids"] == tiny.byte_tokenizer()("ab")["input_ids"]
    ids = tiny.prompt()["input_ids"]
    with torch.no_grad():
        want = made.to(loaded.dtype)(ids).logits
        assert tiny.relative(loaded(ids).logits, want) < (0.05 if dtype == "bfloat16" else 1e-5)
        made.to(torch.float32)


@pytest.mark.parametrize("words", [
    "generate --file TEXT --budget 64 Why?",
    "eval --tasks facts --lengths 700 --cases 1 --policies snapkv --mode known --out OUT", "plan --tokens 1000",
])  # fmt: skip
def test_every_command(file, words, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Some text. " * 40)
    places = {"OUT": str(tmp_path / "out"), "TEXT": str(text)}
    assert main([places.get(word, word) for word in words.split()] + ["--model", str(file[0])]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["command"] == words.split()[0]


def test_as_a_draft_model(file, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Some text. " * 40)
    words = f"generate --file {text} --budget 100 --model {file[0]} Why? --policy speckv:draft_model={file[0]}"
    assert main(words.split()) == 0


@pytest.mark.parametrize("command", ["plan", "generate --file TEXT Why?"])
def test_files_that_cannot_be_loaded(command, tmp_path, capsys):
    text = tmp_path / "TEXT"
    text.write_text("Some text.")
    strange, broken = tmp_path / "strange.gguf", tmp_path / "broken.gguf"
    tiny.save_gguf(strange, "rwkv7", **SHAPE)
    broken.write_bytes(b"no model at all")
    for path, said in ((strange, "architecture rwkv7"), (broken, ""), (tmp_path / "none.gguf", "does not exist")):
        assert main([*command.replace("TEXT", str(text)).split(), "--model", str(path)]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert str(path) in error and said in error and "folder" in error
