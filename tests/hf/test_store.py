"""A compressed cache on disk: goes on as the live one, and a bad file is one clear error."""

import copy
import json
import os
from dataclasses import dataclass

import numpy as np
import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import prompt, shared
from transformers import DynamicCache

import kvevict
from kvevict.policy.building import build, choose
from kvevict.policy.kv import KINDS
from kvevict.store import sealed

CASES = {
    "snapkv": ("llama", "snapkv", dict(budget=10, window=4)),
    "h2o": ("llama", "h2o", dict(budget=10)),  # carried scores, evicts while decoding
    "take": ("llama", "take", dict(budget=10, probe=6, chunk_size=16, decode=True, interval=2)),
    "prompt kept": ("llama", "adakv", dict(budget=10, window=4, decode=True, interval=1, keep_prompt=True)),
    "keeps all": ("llama", "tova", dict(budget=4096)),
    "sliding": ("gemma3", "h2o", dict(budget=10)),
    "sliding take": ("gpt_oss", "take", dict(budget=10, probe=6, chunk_size=16)),
}


def read(model, inputs):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    return cache


@pytest.mark.parametrize("policy", [
    ("kvzip", dict(budget=16)), ("read-once", dict(budget=0.5)), ("snapkv", dict(budget=16, window=4, carry="max")),
    ("adakv", dict(budget=16, window=4, carry="keep", chunk_size=16)), ("compactor", dict(budget=16)),
    ("h2o", dict(budget=16, decode=False)),
], ids=lambda policy: policy[0])  # fmt: skip
@pytest.mark.parametrize("new", [2, 8])
@torch.no_grad()
def test_after_an_answer_where_slots_carry_numbers(policy, new, tmp_path):
    """Saved with an answer, loaded, and asked again: as the live cache."""
    model, inputs, (name, options) = shared(), prompt(1, 60), policy
    with kvevict.evicting(model, name, **options):
        cache = read(model, inputs)
        for token in range(new - 1):
            model(torch.tensor([[5 + token]]), past_key_values=cache)
        kvevict.save_cache(cache, tmp_path / "cache")
        turn, logits = prompt(1, 30, seed=2)["input_ids"], []
        for each in (cache, kvevict.load_cache(tmp_path / "cache", model)):
            logits.append(model(turn, past_key_values=each).logits)
        assert torch.equal(*logits)


def test_a_file_that_could_not_be_loaded_is_not_written(tmp_path):
    """The file before stays."""
    model = shared()
    with kvevict.evicting(model, "h2o", budget=10):
        cache = read(model, prompt(2, 40))
    kvevict.save_cache(cache, tmp_path / "cache")
    data = (tmp_path / "cache").read_bytes()
    for name, value, said in (
        ("carry", cache.layers[1].carry[:, :1], "layer 1: carry is torch.float32"), ("budget", None, "budget"),
        ("prompt", np.full((2, 2), 99), "layer 1: prompt counts more slots"),
    ):  # fmt: skip
        broken = copy.deepcopy(cache)
        setattr(broken.layers[1], name, value)
        with pytest.raises(ValueError, match="cannot be saved") as error:
            kvevict.save_cache(broken, tmp_path / "cache")
        assert said in str(error.value)
        assert (tmp_path / "cache").read_bytes() == data and os.listdir(tmp_path) == ["cache"]


@pytest.mark.quick(case="take")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pads", [(0,), (0, 5, 17)])
@pytest.mark.parametrize("decoded", [0, 5])
@pytest.mark.drawn(14)
def test_goes_on_as_the_live_cache(case, pads, decoded, tmp_path):
    """The same tokens from the loaded cache as from the live one, in another process' model, twice."""
    family, policy, options = CASES[case]
    model, inputs = shared(family), prompt(len(pads), 40, pad=pads)
    mask = torch.cat([inputs["attention_mask"], torch.ones(len(pads), decoded + 7, dtype=torch.long)], 1)
    with kvevict.evicting(model, policy, **options):
        cache = read(model, inputs)
        for token in range(decoded):
            with torch.no_grad():
                model(
                    torch.full((len(pads), 1), 5 + token), attention_mask=mask[:, : 41 + token], past_key_values=cache
                )
        kvevict.save_cache(cache, tmp_path / "cache")
        question = prompt(len(pads), 7, seed=3)["input_ids"]
        ask = dict(inputs=question, attention_mask=mask, max_new_tokens=12, do_sample=False)
        want = model.generate(**ask, past_key_values=copy.deepcopy(cache))
    assert os.listdir(tmp_path) == ["cache"]
    other = tiny.model(family)
    kvevict.patch(other, policy, **options)
    for _ in range(2):
        loaded = kvevict.load_cache(tmp_path / "cache", other)
        assert loaded.get_seq_length() == 40 + decoded
        for a, b in zip(cache.layers, loaded.layers, strict=True):
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)
        assert torch.equal(other.generate(**ask, past_key_values=loaded), want)


def test_size_is_what_is_kept(tmp_path):
    model = shared()
    with kvevict.evicting(model, "snapkv", budget=10, window=4):
        kvevict.save_cache(read(model, prompt(1, 400)), tmp_path / "cache")
        live = kvevict.report(model)["cache_bytes"]
    assert live < os.path.getsize(tmp_path / "cache") < 1.5 * live + 4096


def test_loads_into_an_unpatched_model_but_does_not_run_there(tmp_path):
    model = tiny.model()
    with kvevict.evicting(model, "snapkv", budget=10, window=4):
        kvevict.save_cache(read(model, prompt(1, 40)), tmp_path / "cache")
    cache = kvevict.load_cache(tmp_path / "cache", model)
    with pytest.raises(RuntimeError, match=r"kvevict\.patch"):
        model(torch.tensor([[5]]), past_key_values=cache)


def test_saving_a_foreign_or_empty_cache(tmp_path):
    model, plain = shared(), DynamicCache(config=shared().config)
    model(prompt(1, 10)["input_ids"], past_key_values=plain)
    for cache in (plain, DynamicCache(config=model.config), DynamicCache()):
        with pytest.raises(ValueError, match="not filled by kvevict"):
            kvevict.save_cache(cache, tmp_path / "cache")
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Family -> the path of a good file, batch 2."""
    folder, paths = tmp_path_factory.mktemp("caches"), {}
    for family in ("llama", "gemma3"):
        model = shared(family)
        with kvevict.evicting(model, "h2o", budget=10):
            kvevict.save_cache(read(model, prompt(2, 40, pad=(0, 9))), folder / family)
        paths[family] = folder / family
    return paths


def refused(path, model=None):
    with pytest.raises(ValueError) as error:
        kvevict.load_cache(path, model or shared())
    assert str(path) in str(error.value)
    return str(error.value)


def test_foreign_files(tmp_path):
    save_file({"weight": torch.ones(3)}, tmp_path / "other")
    assert "save_cache" in refused(tmp_path / "other")
    save_file({"weight": torch.ones(3)}, tmp_path / "other", metadata={"format": "pt"})
    assert "save_cache" in refused(tmp_path / "other")
    save_file({"weight": torch.ones(3)}, tmp_path / "other", metadata={"format": "kvevict-cache-1", "layers": "{oh"})
    refused(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        kvevict.load_cache(tmp_path / "missing", shared())
    with pytest.raises((ValueError, OSError)):
        kvevict.load_cache(tmp_path, shared())


def test_other_models(saved):
    for changes in (
        dict(num_hidden_layers=3), dict(num_hidden_layers=5), dict(head_dim=64), dict(num_key_value_heads=4),
        dict(num_key_value_heads=1), dict(dtype=torch.bfloat16),
    ):  # fmt: skip
        refused(saved["llama"], tiny.model(**changes))
    refused(saved["llama"], shared("gemma3"))
    refused(saved["gemma3"], shared("llama"))
    refused(saved["gemma3"], tiny.model("gemma3", sliding_window=16))
    refused(saved["gemma3"], tiny.model("gemma3", layer_types=["full_attention", "sliding_attention"] * 2))
    kvevict.load_cache(saved["llama"], shared("llama"))
    kvevict.load_cache(saved["gemma3"], shared("gemma3"))


def test_models_of_other_weights(saved, tmp_path):
    """A twin of a few other weights anywhere, and a LoRA that is on: in both directions, from files and live."""
    peft = pytest.importorskip("peft")
    ids, own = prompt(2, 40)["input_ids"], shared()
    twin = tiny.model()
    with torch.no_grad():
        for weight in twin.model.parameters():
            weight.mul_(1 + 2**-7)  # at least one step of bfloat16
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(tiny.model(), config).eval()
    for other in (twin, tuned):
        said = refused(saved["llama"], other)
        assert "written for another model: its weights are 'bfloat16 " in said
        with kvevict.evicting(own, "h2o", budget=10), torch.no_grad():
            cache = read(own, prompt(2, 40))
        kvevict.patch(other, "h2o", budget=10)
        before = copy.deepcopy(cache)
        with pytest.raises(ValueError, match="filled by another model"), torch.no_grad():
            other(ids[:, :1], past_key_values=cache)
        for one, same in zip(cache.layers, before.layers, strict=True):
            assert torch.equal(one.len, same.len) and one.get_seq_length() == same.get_seq_length()
        kvevict.save_cache(read(other, prompt(2, 40)), tmp_path / "others")
        assert "weights" in refused(tmp_path / "others")
        kvevict.load_cache(tmp_path / "others", other)
    with tuned.disable_adapter():
        kvevict.load_cache(saved["llama"], tuned)
        kvevict.save_cache(read(tuned, prompt(2, 40)), tmp_path / "base")
    kvevict.load_cache(tmp_path / "base", own)
    kvevict.load_cache(saved["llama"], tiny.model())  # of the same seed


def test_weights_that_changed_since_are_not_named(tmp_path):
    """A cache is not saved later, as the present weights did not read it; a file's cache keeps the file's."""
    model = tiny.model()
    with kvevict.evicting(model, "h2o", budget=10):
        cache, other = read(model, prompt(1, 40)), read(model, prompt(1, 40))
    kvevict.save_cache(other, tmp_path / "cache")
    loaded = kvevict.load_cache(tmp_path / "cache", model)
    with torch.no_grad():
        model.model.norm.weight.view(-1)[20] += 1  # one number
    with pytest.raises(ValueError, match="weights were written to since: save it while that model has the weights"):
        kvevict.save_cache(cache, tmp_path / "later")
    for index, each in enumerate((other, loaded)):
        kvevict.save_cache(each, tmp_path / f"{index}")
        kvevict.load_cache(tmp_path / f"{index}", shared())
        assert "its weights are" in refused(tmp_path / f"{index}", model)


def test_what_a_file_says(saved):
    with safe_open(saved["llama"], framework="pt") as file:
        said = json.loads(file.metadata()["cache"])
    assert said["kvevict"] == kvevict.__version__
    assert kvevict.Policy.from_json(said["policy"]) == build("h2o", budget=10)
    assert kvevict.load_cache(saved["llama"], shared()).sequence.policy == build("h2o", budget=10)


@pytest.mark.parametrize("run", [
    dict(kv="int8"), dict(recall=True, recall_kv="k8v4", compiled=True, diagnose=True), dict(recall="memory"),
])  # fmt: skip
def test_how_a_cache_was_read(run, tmp_path):
    """Beside its policy, which files of an older version have it in."""
    model, (policy, own) = shared(), choose("snapkv", budget=16, window=4, **run)
    with kvevict.evicting(model, "snapkv", budget=16, window=4, **run):
        kvevict.save_cache(read(model, prompt(1, 60)), tmp_path / "cache")
    with safe_open(tmp_path / "cache", framework="pt") as file:
        meta = file.metadata()
    common = json.loads(meta["cache"])
    del common["run"]
    old = dict(kv="model", recall_kv=None, progress=False, diagnose=False, compiled=False) | run
    common["policy"] = json.dumps(json.loads(common["policy"]) | old)
    sealed.write(tmp_path / "old", load_file(tmp_path / "cache"), meta | dict(cache=json.dumps(common)))
    for name in ("cache", "old"):
        loaded = kvevict.load_cache(tmp_path / name, model)
        assert (loaded.sequence.policy, loaded.sequence.run) == (policy, own)
        assert loaded.layers[0].kinds == KINDS[own.kv]


@dataclass(frozen=True)
class Own(kvevict.Score):
    rows = kvevict.ROWS["window"](4)
    needs = ("attention",)


def test_a_policy_that_is_not_known_here(tmp_path, monkeypatch):
    """As where the module of an own score is not imported: a warning names the score; all slots are there."""
    model, inputs = shared(), prompt(1, 40)
    monkeypatch.setitem(kvevict.SCORES, "own", Own)
    with kvevict.evicting(model, "snapkv", score="own", budget=10, recall=True):
        cache = read(model, inputs)
    kvevict.save_cache(cache, tmp_path / "cache")
    assert kvevict.load_cache(tmp_path / "cache", model).sequence.policy == cache.sequence.policy
    monkeypatch.delitem(kvevict.SCORES, "own")
    with pytest.warns(UserWarning, match="unknown score 'own'; .* answers attend to all.* import the module"):
        loaded = kvevict.load_cache(tmp_path / "cache", model)
    assert loaded.sequence.policy is None and loaded.layers[0].counts.tolist() == [[40, 40]]
    with pytest.warns(UserWarning, match="cannot name the cache's policy .*Own.* is not registered"):
        kvevict.save_cache(cache, tmp_path / "other")


def test_another_version(saved, tmp_path):
    with safe_open(saved["llama"], framework="pt") as file:
        sealed.write(tmp_path / "old", load_file(saved["llama"]), file.metadata() | dict(format="kvevict-cache-4"))
    assert "another version of kvevict" in refused(tmp_path / "old")


def test_a_number_that_changed(saved, tmp_path):
    """Only the checksum tells; who does not want it looked at gets the number."""
    data = bytearray(saved["llama"].read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    data[header + json.loads(data[8:header])["3.k"]["data_offsets"][0]] ^= 1
    (tmp_path / "bit").write_bytes(data)
    assert "checksum" in refused(tmp_path / "bit")
    kvevict.load_cache(tmp_path / "bit", shared(), verify=False)


def at(tensors, name, index, value):
    tensors[name] = tensors[name].clone()
    tensors[name][index] = value


def one_row(tensors, layer):
    """Cut a layer to its first batch row, all counts right."""
    slots = int(tensors[f"{layer}.len"][0].sum())
    for name in [name for name in tensors if name.startswith(f"{layer}.")]:
        rows = slots if name.split(".")[1] in ("k", "v", "pos") else 1
        tensors[name] = tensors[name][:rows].clone()


CHANGED = {  # lie -> a tensor, and what is made of it
    "one head too long": ("0.len", lambda x: x + torch.tensor([[1, 0], [0, 0]], dtype=x.dtype)),
    "negative count, right sum": ("0.len", lambda x: x + torch.tensor([[-99, 99], [0, 0]], dtype=x.dtype)),
    "counts as floats": ("0.len", torch.Tensor.float), "counts as int64": ("0.len", torch.Tensor.long),
    "flat counts": ("0.len", torch.Tensor.flatten), "huge count": ("0.len", lambda x: x + 2**30),
    "fewer keys": ("2.k", lambda x: x[:-1].clone()), "fewer values": ("2.v", lambda x: x[:-1].clone()),
    "other values' dtype": ("2.v", torch.Tensor.half), "fewer positions": ("2.pos", lambda x: x[:-1].clone()),
    "positions as int64": ("2.pos", torch.Tensor.long), "positions that descend": ("2.pos", lambda x: x.flip(0)),
    "two positions swapped in the last head": ("3.pos", lambda x: torch.cat([x[:-2], x[-2:].flip(0)])),
    "two heads' positions swapped at their border": ("1.pos", lambda x: torch.cat([x[:9], x[9:11].flip(0), x[11:]])),
    "float positions": ("2.pos", torch.Tensor.float), "float seen": ("0.seen", torch.Tensor.float),
    "seen of three rows": ("0.seen", lambda x: torch.cat([x, x[:1]])), "float budget": ("0.budget", torch.Tensor.float),
    "budget of three rows": ("0.budget", lambda x: torch.cat([x, x[:1]])),
    "scores of another shape": ("0.carry", lambda x: x[:, :1].clone()),
    "scores of another dtype": ("0.carry", torch.Tensor.long),
    "scores too short": ("0.carry", lambda x: x[..., :3].clone()),
}  # fmt: skip
LIES = {  # of the tensors and of the facts
    "a missing tensor": lambda t, f: t.pop("1.k"), "a missing count": lambda t, f: t.pop("0.len"),
    "a missing budget": lambda t, f: t.pop("0.budget"), "a negative position": lambda t, f: at(t, "2.pos", 0, -1),
    "a position that was not read": lambda t, f: at(t, "2.pos", -1, 40),
    "a position beyond int32's middle": lambda t, f: at(t, "2.pos", -1, 2**31 - 1),
    "two equal positions": lambda t, f: at(t, "2.pos", 1, t["2.pos"][0]),
    "ties as text, two equal positions": lambda t, f: (at(t, "2.pos", 1, t["2.pos"][0]), f[2].update(ties="yes")),
    "an end below the tokens": lambda t, f: f[2].update(end=39), "no end": lambda t, f: f[2].pop("end"),
    "an end as text": lambda t, f: f[2].update(end="40"), "other batches in two layers": lambda t, f: one_row(t, 1),
    "queries of another shape": lambda t, f: t.update({"0.decode_queries": torch.ones(1, 3, 2, 8)}),
    "no columns": lambda t, f: f[0].pop("columns"), "columns as text": lambda t, f: f[0].update(columns="many"),
    "negative columns": lambda t, f: f[0].update(columns=-5), "a layer less": lambda t, f: f.pop(),
    "columns that differ": lambda t, f: f[1].update(columns=400),
    "fewer columns than tokens": lambda t, f: f[0].update(columns=3),
    "facts are numbers": lambda t, f: f.__setitem__(0, 7),
}  # fmt: skip


@pytest.mark.parametrize("lie", [*LIES, *CHANGED])
def test_counts_that_lie(saved, tmp_path, lie):
    tensors = load_file(saved["llama"])
    with safe_open(saved["llama"], framework="pt") as file:
        meta = file.metadata()
    facts = json.loads(meta["layers"])
    if lie in LIES:
        LIES[lie](tensors, facts)
    else:
        name, edit = CHANGED[lie]
        tensors[name] = edit(tensors[name])
    sealed.write(tmp_path / "lie", tensors, meta | {"layers": json.dumps(facts)})
    data = (tmp_path / "lie").read_bytes()
    refused(tmp_path / "lie")
    assert (tmp_path / "lie").read_bytes() == data and os.listdir(tmp_path) == ["lie"]
    kvevict.load_cache(saved["llama"], shared())


def test_a_refused_file_changes_nothing(saved, tmp_path):
    """The patched model continues with its cache, and its report is unchanged."""
    tensors, model = load_file(saved["llama"]), shared()
    at(tensors, "3.pos", -1, 40)
    with safe_open(saved["llama"], framework="pt") as file:
        sealed.write(tmp_path / "lie", tensors, file.metadata())
    with kvevict.evicting(model, "h2o", budget=10), torch.no_grad():
        cache = read(model, prompt(2, 40, pad=(0, 9)))
        report, twin = kvevict.report(model, positions=True), copy.deepcopy(cache)
        assert "layer 3: pos has positions that are not in 0 .. 39" in refused(tmp_path / "lie", model)
        assert kvevict.report(model, positions=True) == report
        for one, other in zip(cache.layers, twin.layers, strict=True):
            assert torch.equal(one.len, other.len)
            for _, _, slots in one.segments():  # memory beyond a head's slots was never written
                assert torch.equal(one.k[slots], other.k[slots]) and torch.equal(one.pos[slots], other.pos[slots])
        mask, ids = torch.ones(2, 41, dtype=torch.long), torch.tensor([[5], [6]])
        mask[1, :9] = 0
        logits = [model(ids, attention_mask=mask, past_key_values=each).logits for each in (cache, twin)]
        assert torch.equal(*logits)


@torch.no_grad()
def test_positions_of_the_caller(tmp_path):
    """Positions beyond the text's length, and equal ones, are saved and loaded; descending ones cannot be saved."""
    model, ids = tiny.model(), prompt(1, 40)["input_ids"]
    far = torch.arange(40)[None] * 3
    tied = torch.arange(40)[None].clamp_max(30)
    with kvevict.evicting(model, "h2o", budget=10):
        for positions in (far, tied):
            cache = model(ids, position_ids=positions, use_cache=True).past_key_values
            kvevict.save_cache(cache, tmp_path / "cache")
            loaded = kvevict.load_cache(tmp_path / "cache", model)
            for one, other in zip(cache.layers, loaded.layers, strict=True):
                assert [head.tolist() for row in one.positions() for head in row] == [
                    head.tolist() for row in other.positions() for head in row
                ]
        cache = model(ids, position_ids=far.flip(1), use_cache=True).past_key_values
        with pytest.raises(ValueError, match="layer 0 has positions that do not ascend"):
            kvevict.save_cache(cache, tmp_path / "other")
    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.parametrize("lie", [
    None, [], "{", 7, dict(packed=None), dict(packed=[[0]]), dict(packed=[[3, 2]]), dict(packed=[[0, 41]]),
    dict(packed=[[-1, 3]]), dict(packed=[[0.5, 3]]), dict(next_position=[1]), dict(next_position=[1, 2, 3]),
    dict(next_position=[1, -2]), dict(next_position=[1, "2"]), dict(next_position=7), dict(next_position=[1, 1e400]),
    dict(next_position=[40, 41]), dict(policy=7), dict(policy={}),
], ids=str)  # fmt: skip
def test_facts_of_the_cache_that_lie(saved, tmp_path, lie):
    with safe_open(saved["llama"], framework="pt") as file:
        meta = file.metadata()
    right = json.loads(meta["cache"]) | dict(packed=[[0, 40]], next_position=[40, 31])
    meta["cache"] = json.dumps(right)
    sealed.write(tmp_path / "right", load_file(saved["llama"]), meta)
    kvevict.load_cache(tmp_path / "right", shared())
    if lie is None:
        del meta["cache"]
    else:
        meta["cache"] = lie if isinstance(lie, str) else json.dumps(right | lie if isinstance(lie, dict) else lie)
    sealed.write(tmp_path / "lie", load_file(saved["llama"]), meta)
    refused(tmp_path / "lie")


@pytest.mark.parametrize("name, edit", [
    ("0.keys", lambda x: x[:1].clone()), ("0.keys", lambda x: x[:, :, :3].clone()), ("0.values", lambda x: x.half()),
    ("0.keys", lambda x: x.flatten()), ("0.keys", None),
])  # fmt: skip
def test_sliding_layers_that_lie(saved, tmp_path, name, edit):
    tensors = load_file(saved["gemma3"])
    with safe_open(saved["gemma3"], framework="pt") as file:
        meta = file.metadata()
    if edit is None:
        del tensors[name]
    else:
        tensors[name] = edit(tensors[name])
    sealed.write(tmp_path / "lie", tensors, meta)
    refused(tmp_path / "lie", shared("gemma3"))
