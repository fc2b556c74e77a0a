"""Gates against the oracle and by hand; their folder."""

import copy
import json

import pytest
import tiny
import torch
import zoo
from choices import GATES
from policy_cases import BUDGET, CHUNK, VOCAB, compare, model, tokens
from untrained import written

import kvevict
from kvevict.answering.answer import unasked
from kvevict.models.families import find_decoder
from kvevict.policy.building import build
from kvevict.store import sealed

CHUNKED = dict(budget=BUDGET, chunk_size=CHUNK, recent=2)


@pytest.fixture
def options(tmp_path):
    def chosen(name, made=None, kind="linear", **more):
        folder = written(tmp_path / "gates", made or model(), kind)
        return name.split(",")[0], dict(gates=folder) | CHUNKED | GATES[name] | more

    return chosen


@pytest.mark.quick(name="gate, few kept")
@pytest.mark.parametrize("name", GATES)
def test_chunks_turns_and_padding(name, options):
    """A token has one number: in whatever chunk it is read, decoded, in a row with padding, in a later turn."""
    policy, chosen = options(name)
    compare(model(), policy, [[61, *[1] * 5]], **chosen)
    compare(model(), policy, [[41, 1, 1, 14, 1], [26, 1, 1, 14, 1], [2, 1, 1, 14, 1]], **chosen)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize("size", [None, 7])
def test_one_cut_at_the_prompt_s_end(kind, size, options):
    policy, chosen = options("gate", kind=kind, schedule="prompt", chunk_size=size)
    compare(model(), policy, [[53, 1, 20, 1]], **chosen)


@pytest.mark.parametrize("more", [dict(), dict(layers="uniform"), dict(budget=BUDGET)], ids=str)
def test_threshold(more, options):
    """In place of a budget, or within one: heads keep as many slots as the text has that are worth it."""
    policy, chosen = options("gate", **dict(budget=None, threshold=0.05, keep_last=3) | more)
    results = compare(model(), policy, [[61, 1, 14], [33, 1, 14]], **chosen)
    assert len({len(head) for layer in results[-1][0][1] for head in layer}) > 1


@pytest.mark.parametrize("heads", [1, 4])
def test_groups_of(heads, options):
    made = model(num_key_value_heads=heads)
    policy, chosen = options("gate", made)
    compare(made, policy, [[39]], **chosen)


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma3", "gpt_oss"])
def test_other_families(family, options):
    policy, chosen = options("gate", model(family))
    compare(model(family), policy, [[40, 1, 1]], **chosen)


@pytest.mark.parametrize("name", ["gate, per layer", "gate, per head", "gate, wait", "gate, reuse"])
def test_decoding(name, options):
    """Decoded tokens compete with the prompt's, by their numbers."""
    policy, chosen = options(name, decode=True, interval=3)
    compare(model(), policy, [[29, *[1] * 9, 20, *[1] * 4], [12, *[1] * 9, 20, *[1] * 4]], **chosen)
    compare(model(), policy, [[1, *[1] * 24]], **chosen)


def test_decoding_keeps_what_one_ranking_chose(options):
    """Layers hold different numbers of the prompt's slots; each has a separate budget for decoded tokens."""
    policy, chosen = options("gate", decode=True, interval=3, keep_prompt=True)
    compare(model(), policy, [[29, *[1] * 19, 20, *[1] * 19], [12, *[1] * 19, 20, *[1] * 19]], **chosen)


def numbers(made, ids, **chosen):
    """[layer] the numbers carried by the slots of one read of ids [N]."""
    with kvevict.evicting(made, "gate", **chosen), torch.no_grad():
        return [layer.carry for layer in made(ids[None], use_cache=True).past_key_values.layers]


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "falcon_h1", "gemma3n_text"])
@torch.no_grad()
def test_latents_states_windows_and_shared_layers(kind, tmp_path):
    """Every slot that is kept has its number, and the budget is exact."""
    made = zoo.latent() if kind == "deepseek_v3" else zoo.model(kind)
    ids, folder = torch.randint(3, 90, (2, 50), generator=torch.Generator().manual_seed(0)), tmp_path / "gates"
    with kvevict.evicting(made, "gate", gates=written(folder, made), **CHUNKED):
        cache = made(ids, use_cache=True).past_key_values
        cache = made(ids[:, :1], past_key_values=cache).past_key_values
    layers = [layer for layer in cache.layers if hasattr(layer, "carry")]
    slots = sum(int(layer.len[0].sum()) for layer in layers)
    assert slots == (BUDGET + 1) * sum(layer.len.shape[1] for layer in layers)
    for layer in layers:
        stored = torch.arange(layer.carry.shape[2]) < layer.len[..., None]
        assert not layer.carry[stored].isnan().any() and layer.carry.shape[2] == layer.longest()


def test_tokens_that_upper_layers_do_not_read(options):
    """After layer tsp a layer has numbers of the tokens that it reads."""
    _, chosen = options("gate, per layer", tsp=1, tsp_len=8)
    with kvevict.evicting(model(), "gate", **chosen), torch.no_grad():
        cache = model()(tokens([[61]], 3)[0][0][None], use_cache=True, logits_to_keep=1).past_key_values
    assert all(layer.carry.shape[2] == layer.longest() for layer in cache.layers)


def test_a_folder_that_does_not_fit_is_refused(tmp_path):
    made, folder = copy.deepcopy(model()), tmp_path / "gates"  # no other test has named its gates
    for given, text in ((None, "gates is missing"), (folder, "is not a folder of gates")):
        with pytest.raises(ValueError, match=text):
            kvevict.patch(made, "gate", budget=80, gates=given)
    for text, damage in (
        ("is missing or damaged", lambda: (folder / "gates.safetensors").unlink()),
        ("is missing or damaged", lambda: shorten(folder / "gates.safetensors")),
        ("is missing or damaged", lambda: flip(folder / "gates.safetensors")),
        ("is missing or damaged", lambda: torch.save({"0.0.weight": 1}, folder / "gates.safetensors")),
        ("tensors of layer 0 do not fit", lambda: edit(folder, kind="mlp", inner=3)),
        ("lacks its kind", lambda: edit(folder, kind="mlp")),
        ("lacks its kind", lambda: edit(folder, kind=["linear"])),
        ("is not of kvevict gates, version 1", lambda: edit(folder, version=2)),
        ("is not a folder of gates", lambda: shorten(folder / "config.json")),
    ):
        written(folder, made)
        damage()
        with pytest.raises(ValueError, match=text):
            kvevict.patch(made, "gate", budget=80, gates=folder)
        assert "_kvevict" not in made.model.__dict__
    written(folder, made)
    for other, text in (
        (model("qwen3"), "another model: its model_type is 'llama', this model's 'qwen3'"),
        (model(num_hidden_layers=3), "another model: its layers are 4"),
        (tiny.model(vocab_size=VOCAB, seed=1), "another model: its weights are"),
    ):
        with pytest.raises(ValueError, match=text):
            kvevict.patch(other, "gate", budget=80, gates=folder)


def test_gates_in_the_model_s_folder(tmp_path):
    model().save_pretrained(tmp_path / "model")
    made = type(model()).from_pretrained(tmp_path / "model")
    written(tmp_path / "model" / "kvevict_gates", made)
    with kvevict.evicting(made, "gate", budget=80):
        pass


def test_gates_that_were_named_once(tmp_path):
    """From then on they are the model's default, as long as their folder exists."""
    made, ids = copy.deepcopy(model()), torch.randint(3, 90, (1, 50), generator=torch.Generator().manual_seed(0))
    folder, decoder = written(tmp_path / "gates", made), find_decoder(made)
    assert unasked(decoder) == "read-twice"
    want, got = numbers(made, ids[0], gates=folder, **CHUNKED), numbers(made, ids[0], **CHUNKED)
    assert unasked(decoder) == "gate"
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    (tmp_path / "gates" / "config.json").unlink()
    assert unasked(decoder) == "read-twice"
    with pytest.raises(ValueError, match="gates is missing"):
        kvevict.patch(made, "gate", budget=80)


def test_gates_of_other_weights_are_not_the_default(tmp_path):
    """Those beside a model are of its weights without an adapter."""
    peft = pytest.importorskip("peft")
    model().save_pretrained(tmp_path / "model")
    made = type(model()).from_pretrained(tmp_path / "model")
    written(tmp_path / "model" / "kvevict_gates", made)
    adapted = peft.get_peft_model(made, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    assert unasked(find_decoder(adapted)) == "read-twice"
    with pytest.raises(ValueError, match=r"its weights are '.*', this model's '"):
        kvevict.patch(adapted, "gate", budget=80)
    with adapted.disable_adapter():
        assert unasked(find_decoder(adapted)) == "gate"
    (tmp_path / "model" / "kvevict_gates" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not a folder of gates"):
        unasked(find_decoder(adapted))


def shorten(path):
    path.write_bytes(path.read_bytes()[:-40])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def edit(folder, **changes):
    weights, config = folder / "gates.safetensors", folder / "config.json"
    sealed.write_pair(
        weights, config, sealed.tensors_of_pair(weights, config), json.loads(config.read_text()) | changes
    )


def test_json(tmp_path):
    policy = build("gate", budget=80, gates=tmp_path)
    assert kvevict.Policy.from_json(policy.to_json()) == policy
