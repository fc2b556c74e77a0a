"""KVzap's published gates, converted: their numbers, and what is refused."""

import json
import math
import pickle

import pytest
import safetensors.torch
import tiny
import torch
from policy_cases import model, tokens
from untrained import published

import kvevict
from kvevict import cli


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_slots_carry_what_kvzap_foretells(kind, family, tmp_path):
    """exp of its modules' outputs, of the inputs of attention blocks, in float64; layers with a window have none."""
    made, ids, inputs = model(family), tokens([[50]], 3)[0][0], {}
    layers = published(tmp_path / "kvzap", made, kind).double()
    got = kvevict.gates.convert(tmp_path / "kvzap", made, tmp_path / "gates")
    assert got.about["kind"] == kind and got.about["label"] == "kvzip+"

    def note(module, args, kwargs):
        inputs[module.layer_idx] = kwargs["hidden_states"][0].double()

    hooks = [each.self_attn.register_forward_pre_hook(note, with_kwargs=True) for each in made.model.layers]
    with kvevict.evicting(made, "gate", gates=tmp_path / "gates", budget=80), torch.no_grad():
        cache = made(ids[None], use_cache=True).past_key_values
        expected = [layers[i](x).exp().T.float() for i, x in sorted(inputs.items())]
    for hook in hooks:
        hook.remove()
    carried = {i: layer.carry[0] for i, layer in enumerate(cache.layers) if hasattr(layer, "carry")}
    assert list(carried) == ([1, 3] if family == "gemma3" else [0, 1, 2, 3])
    for i, numbers in carried.items():
        # A logarithm is a sum of 64 products whose sizes add up to less than 16: so much is it off, and exp relatively.
        torch.testing.assert_close(numbers, expected[i], rtol=2.0**-24 * 64 * 16, atol=0)


def test_a_threshold_is_of_the_number_not_its_logarithm(tmp_path):
    """KVzap's threshold of -0.2 is exp(-0.2) here."""
    made, ids = model(), tokens([[50]], 3)[0][0]
    layers = published(tmp_path / "kvzap", made, dtype=torch.float32)
    kvevict.gates.convert(tmp_path / "kvzap", made, tmp_path / "gates")
    seen = []
    hook = made.model.layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["hidden_states"][0]), with_kwargs=True
    )
    chosen = dict(gates=tmp_path / "gates", budget=None, threshold=math.exp(-0.2), sink=0, recent=0, keep_last=1)
    with kvevict.evicting(made, "gate", **chosen), torch.no_grad():
        made(ids[None], use_cache=True)
        kept, logs = kvevict.report(made)["kept"][1][0], layers[1](seen[0][:-1])
    hook.remove()
    assert (logs + 0.2).abs().min() > 1e-4 and kept == [1 + n for n in (logs >= -0.2).sum(0).tolist()]


def test_command(tmp_path, capsys):
    folder, made = tiny.save(tmp_path / "model")
    published(tmp_path / "kvzap", made, "mlp")
    out = str(tmp_path / "gates")
    assert cli.main(["convert", "--model", folder, "--source", str(tmp_path / "kvzap"), "--out", out]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["layers"] == 4
    text = tmp_path / "text"
    text.write_text("It rained. " * 20)
    assert cli.main(["generate", "--model", folder, "--file", str(text), "--budget", "80", "--policy",
                     f"gate:gates={out}", "--max-new-tokens", "2", "When?"]) == 0  # fmt: skip
    assert cli.main(["convert", "--model", folder, "--source", out, "--out", str(tmp_path / "other")]) == 2
    assert "is not KVzap's" in capsys.readouterr().err


def config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights(folder, **changes):
    """None removes a tensor."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path) | changes
    safetensors.torch.save_file({k: x for k, x in tensors.items() if x is not None}, path)


def only_a_pickle(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"layers.0.weight": torch.zeros(2, 64)}, folder / "pytorch_model.bin")


class Harm:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was read",))


REFUSED = [
    (lambda folder: config(folder, model_type="llama"), "is not KVzap's"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json .* is damaged"),
    (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    (only_a_pickle, "has no model.safetensors.*no pickle"),
    (lambda folder: (folder / "model.safetensors").write_bytes(pickle.dumps(Harm())), "no safetensors"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08" * 300), "no safetensors"),
    (lambda folder: config(folder, input_dim=128), "another model: its input_dim is 128, .* hidden size is 64"),
    (lambda folder: config(folder, output_dim=4), "another model: its output_dim is 4, .* kv heads is 2"),
    (lambda folder: config(folder, n_modules=36), "another model: its n_modules is 36, .* layers is 4"),
    (lambda folder: config(folder, hidden_dim=5), r"layers\.0\.0\.weight is missing"),
    (lambda folder: config(folder, hidden_dim="5"), "hidden_dim must be a size or null"),
    (lambda folder: weights(folder, **{"layers.3.bias": None}), r"layers\.3\.bias is missing"),
    (lambda folder: weights(folder, **{"layers.2.weight": torch.zeros(2, 65)}), r"layers\.2\.weight is .*\[2, 65\]"),
    (lambda folder: weights(folder, **{"layers.2.bias": torch.zeros(2, dtype=torch.int32)}), "int32"),
    (lambda folder: weights(folder, **{"layers.1.bias": torch.full((2,), torch.nan)}), r"layers\.1\.bias"),
]  # fmt: skip


@pytest.mark.parametrize("damage, text", REFUSED, ids=[text for _, text in REFUSED])
def test_refused(damage, text, tmp_path):
    published(tmp_path / "kvzap", model())
    damage(tmp_path / "kvzap")
    with pytest.raises(ValueError, match=text):
        kvevict.gates.convert(tmp_path / "kvzap", model(), tmp_path / "gates")
    assert not (tmp_path / "gates").exists()


def test_a_source_that_is_not_there_or_is_the_target(tmp_path):
    for source in ("nobody/KVzap-mlp-of-nothing", tmp_path / "nothing", "a b", ""):
        with pytest.raises(ValueError, match=r"is not a folder, and the hub|has no config\.json"):
            kvevict.gates.convert(source, model(), tmp_path / "gates")
    published(tmp_path / "kvzap", model())
    with pytest.raises(ValueError, match="give another"):
        kvevict.gates.convert(tmp_path / "kvzap", model(), tmp_path / "kvzap")
