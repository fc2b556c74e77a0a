"""`kvevict statistics` writes the file of `expected:stats=FILE`, from the command line."""

import json

import pytest
import tiny
import torch

import kvevict
from kvevict.cli import main


def run(capsys, *argv):
    """A command's last line."""
    assert main(list(argv)) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_from_a_text_to_an_answer(tmp_path, capsys):
    """The file gives the same choice as from Python, and another than the queries of the text."""
    folder, made = tiny.save(tmp_path / "model")
    file, stats = tmp_path / "text", str(tmp_path / "stats")
    text = "".join(f"Line {i} is about {i * i % 97}.\n" for i in range(40))
    file.write_text(text)
    sizes = "--length", "120", "--limit", "400"
    found = run(capsys, "statistics", "--model", folder, "--data", str(file), "--out", stats, *sizes)
    assert found == dict(command="statistics", model=folder, out=stats, tokens=400)
    ask = "generate", "--model", folder, "--file", str(file), "--max-new-tokens", "4", "--budget", "40", "Which line?"
    ids = torch.tensor([tiny.byte_tokenizer()(text + "\n\nWhich line?")["input_ids"]])
    kept = []
    for options in (dict(stats=stats), {}):
        name = f"expected:stats={stats}" if options else "expected"
        kept.append(run(capsys, *ask, "--policy", name)["runs"][name]["report"]["kept"])
        with kvevict.evicting(made, "expected", budget=40, **options), torch.no_grad():
            made(ids, logits_to_keep=1)
            assert kvevict.report(made)["kept"] == kept[-1]
    assert kept[0] != kept[1] and {sum(layer[0]) for each in kept for layer in each} == {80}


@pytest.mark.parametrize("other, said", [
    (dict(family="qwen3"), "is of another model: its model_type is 'llama', this model's 'qwen3'"),
    (dict(seed=1), "is of another model: its weights are"),
], ids=str)  # fmt: skip
def test_a_file_of_another_model_is_refused(other, said, tmp_path, capsys):
    """By its name, before the text is read."""
    folder, stats = tiny.save(tmp_path / "model")[0], tmp_path / "stats"
    (tmp_path / "text").write_text("A text that one model reads for another. " * 20)
    words = "--data", str(tmp_path / "text"), "--out", str(stats)
    assert main(["statistics", "--model", folder, "--data", "nothing", "--out", str(stats)]) == 2
    assert "--data nothing: No such file" in capsys.readouterr().err
    run(capsys, "statistics", "--model", folder, *words, "--length", "100", "--limit", "200")
    another = tiny.save(tmp_path / "other", **other)[0]
    asked = "--policy", f"expected:stats={stats}", "--budget", "40", "--max-new-tokens", "2", "What?"
    assert main(["generate", "--model", another, "--file", str(tmp_path / "text"), *asked]) == 2
    error = capsys.readouterr().err
    assert f"stats: {str(stats)!r} {said}" in error and "give a file that `kvevict statistics` wrote" in error
