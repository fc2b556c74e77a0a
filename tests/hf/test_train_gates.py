"""Training of gates: the fits, and the files that a run writes."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from policy_cases import VOCAB, model

import kvevict
from kvevict import cli
from kvevict.models.loading import load_model
from kvevict.store import sealed
from kvevict.train import checkpoint
from kvevict.train.gates import labels, measure, training

TEXTS = [(torch.randperm(VOCAB - 3, generator=torch.Generator().manual_seed(i)) + 3)[:130] for i in range(3)]
FAST = dict(length=48, progress=False)


def test_labels_are_the_numbers_of_kvzip():
    """Those that slots carry when a text is read in one pass, as one part, and repeated."""
    made, ids, found = model(), TEXTS[0][:48], {}
    inputs = []
    made.model.layers[2].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: inputs.append(kwargs["hidden_states"]), with_kwargs=True
    )
    labels.each_layer(made, "kvzip", ids, lambda index, x, y: found.update({index: (x, y)}))
    with kvevict.evicting(made, "kvzip", budget=80, schedule="prompt"), torch.no_grad():
        cache = made(ids[None], use_cache=True).past_key_values
    made.model.layers[2].self_attn._forward_pre_hooks.clear()
    assert list(found) == [0, 1, 2, 3]
    for layer, (x, y) in zip(cache.layers, found.values(), strict=True):
        assert x.shape == (44, 64) and y.shape == (44, 2)
        torch.testing.assert_close(y, layer.carry[0, :, 4:48].T.log(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[2][0], inputs[0][0, 4:48], rtol=0, atol=1e-5)


RIDGE = 0.3


def test_ridge_is_the_minimum():
    """Of squared errors and ridge times squared weights in deviations: its gradient is 0, in pieces or at once."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(200, 7, generator=generator) * torch.logspace(-1, 2, 7) + 5
    y = torch.randn(200, 3, generator=generator) + x[:, :3] / 10
    whole, parted = (training.Fit(RIDGE) for _ in range(2))
    whole.add(x, y)
    for rows in (slice(0, 1), slice(1, 90), slice(90, 200)):
        parted.add(x[rows], y[rows])
    weight, bias = whole.affine()
    for one, other in zip(*(fit.affine() for fit in (whole, parted)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    w, b = weight.double().requires_grad_(), bias.double().requires_grad_()
    variance = x.double().var(0, correction=0)
    loss = (x.double() @ w.T + b - y).square().mean(0).sum() + RIDGE * (variance * w.square()).sum()
    loss.backward()
    # Weights were rounded to float32: the gradient is that error times the second derivative.
    bound = 2.0**-22 * (x.double().square().mean() * weight.abs().sum() + y.abs().max()).item() * 7
    assert w.grad.abs().max() < bound * x.abs().max() and b.grad.abs().max() < bound


@pytest.mark.quick
def test_learns_saves_and_evicts(tmp_path):
    made = model()
    gates = kvevict.gates.train(made, TEXTS, tmp_path / "gates", held_out=2, **FAST)
    config = json.loads((tmp_path / "gates" / "config.json").read_text())
    assert config["kind"] == "linear" and config["pieces"] == 7  # of 44, 43 and 43 tokens a text
    assert config["tokens"] == 2 * len(TEXTS[0]) + 44 and config["held_out"]["tokens"] == 2 * 43
    held = config["held_out"]
    assert held["r2"] <= 1 and held["r2_by_head"] <= 1 and set(held["recall"]) == {"0.125", "0.25", "0.5"}
    assert -1 <= held["tau"] <= 1
    again = kvevict.gates.load(tmp_path / "gates", made)
    for layer, affines in gates.layers.items():
        for one, other in zip(affines, again.layers[layer], strict=True):
            assert all(map(torch.equal, one, other))
    with kvevict.evicting(made, "gate", gates=tmp_path / "gates", budget=80, chunk_size=20), torch.no_grad():
        made(TEXTS[0][None], use_cache=True)
        assert sum(map(sum, kvevict.report(made)["kept"][0])) <= 4 * 2 * 80
    assert sorted(path.name for path in (tmp_path / "gates").iterdir()) == ["config.json", "gates.safetensors"]


def test_goes_on_where_it_was(tmp_path, monkeypatch):
    """Ended after a checkpoint and a piece more: the same bits as in one go."""
    made = model()
    whole = kvevict.gates.train(made, TEXTS, tmp_path / "a", **FAST)
    monkeypatch.setattr(training, "MINUTE", 0)
    real, read = training.each_layer, []
    monkeypatch.setattr(training, "each_layer", lambda *a: read.append(0) or (real(*a) if len(read) < 5 else 1 / 0))
    with pytest.raises(ZeroDivisionError):
        kvevict.gates.train(made, TEXTS, tmp_path / "b", **FAST)
    monkeypatch.setattr(training, "each_layer", lambda *a: read.append(0) or real(*a))
    with pytest.raises(ValueError, match=r"a training with ridge=0\.01"):
        kvevict.gates.train(made, TEXTS, tmp_path / "b", ridge=0.5, **FAST)
    with pytest.raises(ValueError, match="a training with data="):
        kvevict.gates.train(made, TEXTS[1:], tmp_path / "b", **FAST)
    parted = kvevict.gates.train(made, TEXTS, tmp_path / "b", **FAST)
    assert len(read) == 5 + 3
    for layer, affines in whole.layers.items():
        for one, other in zip(affines, parted.layers[layer], strict=True):
            assert all(map(torch.equal, one, other))


def each_process(folder):
    """Both processes run this: a training that leaves checkpoints and fails, and one that continues from them."""
    made, rank, read, real = model(), os.environ["RANK"], [], training.each_layer
    training.MINUTE = 0
    training.each_layer = lambda *a: read.append(0) or (real(*a) if len(read) < 3 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kvevict.gates.train(made, TEXTS, folder, **FAST)
    training.each_layer = lambda *a: read.append(0) or real(*a)
    gates = kvevict.gates.train(made, TEXTS, folder, **FAST)
    assert len(read) == {"0": 3 + 2, "1": 3 + 1}[rank]  # of 4 and 3 pieces
    return gates


SCRIPT = """
import sys
sys.path[:0] = ["tests/lib", "tests/hf"]
import torch
torch.set_num_threads(1)
import test_train_gates
gates = test_train_gates.each_process(sys.argv[1])
assert gates.about["held_out"]["tokens"] and gates.about["pieces"] == 7
"""


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    """To the rounding of sums in float64; interrupted and gone on with, in the process group that there is then."""
    made = model()
    one = kvevict.gates.train(made, TEXTS, tmp_path / "one", **FAST)
    script, root = tmp_path / "script.py", Path(tiny.__file__).parents[2]
    script.write_text(SCRIPT)
    env = os.environ | dict(PYTHONPATH=f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", OMP_NUM_THREADS="1")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run([*launch, script, tmp_path / "two"], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    two = kvevict.gates.load(tmp_path / "two", made)
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["config.json", "gates.safetensors"]
    for layer, affines in one.layers.items():
        for x, y in zip(*(pair[0] for pair in (affines, two.layers[layer])), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert two.about["held_out"]["r2"] == pytest.approx(one.about["held_out"]["r2"], abs=1e-4)
    assert two.about["tokens"] == one.about["tokens"]


def test_a_damaged_checkpoint_and_a_full_disk(tmp_path, monkeypatch):
    made, write = model(), checkpoint.write
    (tmp_path / "checkpoint.pt").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"(?s)is damaged.*remove it"):
        kvevict.gates.train(made, TEXTS, tmp_path, **FAST)
    (tmp_path / "checkpoint.pt").unlink()
    monkeypatch.setattr(training, "MINUTE", 0)
    count: list = []

    def full(path, data):
        if len(count) == 2:
            raise OSError(28, "No space left on device")
        count.append(0)
        write(path, data)

    monkeypatch.setattr(checkpoint, "write", full)
    with pytest.raises(OSError, match="No space"):
        kvevict.gates.train(made, TEXTS, tmp_path, **FAST)
    assert torch.load(io.BytesIO((tmp_path / "checkpoint.pt").read_bytes()), weights_only=True)["done"] == 2
    assert "_kvevict" not in made.model.__dict__


class Harm:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was run",))


def test_a_checkpoint_that_is_another_pickle(tmp_path):
    torch.save(dict(done=1, about={}, fits=Harm()), tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"(?s)is damaged.*remove it"):
        kvevict.gates.train(model(), TEXTS, tmp_path, **FAST)


@pytest.mark.parametrize("file", ["gates.safetensors", "config.json"])
def test_a_disk_that_is_full_at_the_end(file, tmp_path, monkeypatch, capsys):
    """The checkpoint is still there, and the same command continues from it; the command reports the error."""
    folder, _ = tiny.save(tmp_path / "model")
    data, out = tmp_path / "text", tmp_path / "out"
    data.write_text("It rained all day. " * 20)
    arguments = f"train --kind gates --model {folder} --data {data} --out {out} --length 90".split()
    monkeypatch.setattr(training, "MINUTE", 0)
    write = sealed.write_bytes

    def full(path, data):
        if path.name == file:
            raise OSError(28, "No space left on device")
        write(path, data)

    with monkeypatch.context() as disk:
        disk.setattr(sealed, "write_bytes", full)
        assert cli.main(arguments) == 2
    assert "No space left" in capsys.readouterr().err
    done = torch.load(out / "checkpoint.pt", weights_only=True)["done"]
    real, read = training.each_layer, []
    monkeypatch.setattr(training, "each_layer", lambda *a: read.append(0) or real(*a))
    assert cli.main(arguments) == 0
    config = json.loads((out / "config.json").read_text())
    assert len(read) == config["pieces"] - done == 1
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "gates.safetensors"]
    kvevict.gates.load(out, load_model(folder, "float32", "cpu")[0])


@pytest.mark.parametrize("given, text", [
    (dict(texts=[]), "texts hold no piece of more than 5 tokens"),
    (dict(texts=[torch.arange(1), torch.arange(0)]), "texts hold no piece"),
    (dict(texts=["", "a"], tokenizer=True), "texts hold no piece"), (dict(texts=["a text"]), "give a tokenizer"),
    (dict(texts="a text" * 999), "give \\[text\\] for one text"), (dict(texts=[torch.arange(500)]), f"below {VOCAB}"),
    (dict(texts=[torch.zeros(20)]), "1-D token ids"), (dict(held_out=9), "leaves nothing to train on of 9 pieces"),
    (dict(label="snapkv"), "unknown label 'snapkv'"), (dict(length=5), "length must be at least 6"),
    (dict(ridge=-1), "ridge must be"), (dict(held_out=7, WORLD_SIZE="3"), "3 processes share 2 pieces"),
])  # fmt: skip
def test_refused(given, text, tmp_path, monkeypatch):
    if "WORLD_SIZE" in given:
        monkeypatch.setenv("WORLD_SIZE", given.pop("WORLD_SIZE"))
    if "tokenizer" in given:
        given |= dict(tokenizer=tiny.byte_tokenizer())
    with pytest.raises(ValueError, match=text):
        kvevict.gates.train(model(), **dict(texts=TEXTS, out=tmp_path) | FAST | given)
    assert not list(tmp_path.iterdir())


def test_a_patched_model_is_refused(tmp_path):
    with kvevict.evicting(model(), "snapkv", budget=80), pytest.raises(ValueError, match="unpatch"):
        kvevict.gates.train(model(), TEXTS, tmp_path, **FAST)


def test_r2_by_hand():
    """1 - squared errors / squared distances from the mean."""
    y, guess = torch.tensor([[1.0, 2, 3, 6]]), torch.tensor([[2.0, 2, 3, 5]])
    parts = torch.stack([torch.ones_like(y), y, y.square(), (y - guess).square()]).sum(2)
    assert measure._r2(*parts).item() == pytest.approx(1 - 2 / 14)


def test_the_bundled_model_has_gates():
    made, _ = load_model(kvevict.small_llama(), "float32", "cpu")
    with kvevict.evicting(made, "gate", budget=80, chunk_size=64), torch.no_grad():
        made(torch.arange(5, 305)[None], use_cache=True)
        assert sum(sum(map(sum, rows)) for rows in kvevict.report(made)["kept"]) == 4 * 4 * 80


def test_command(tmp_path, capsys):
    folder, _ = tiny.save(tmp_path / "model")
    data, out = tmp_path / "book.txt", str(tmp_path / "out")
    data.write_text(" ".join(f"It was the year {year}, and it rained." for year in range(1800, 1830)))
    arguments = ["train", "--kind", "gates", "--model", folder, "--data", str(data), "--out", out, "--length", "90"]
    assert cli.main(arguments) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["out"] == out and told["held_out"]["r2"] <= 1
    assert cli.main(["generate", "--model", folder, "--file", str(data), "--budget", "80", "--policy",
                     f"gate:gates={out}", "--max-new-tokens", "2", "When?"]) == 0  # fmt: skip
    assert cli.main([*arguments, "--steps", "3"]) == 2
    assert "--steps is not of --kind gates" in capsys.readouterr().err
