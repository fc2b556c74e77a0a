"""Installing and removing eviction: the parts that change, those that do not, and the report."""

import os

import pytest
import tiny
import torch
from tiny import generate, prompt, shared, snapshot

import kvevict

TAKE = dict(budget=16, probe=6, chunk_size=16)
MIXED = pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])


@MIXED
@pytest.mark.parametrize("policy, options", [("take", TAKE), ("h2o", dict(budget=16, chunk_size=40))])
def test_unpatch_gives_back_the_same_objects(family, policy, options):
    model, inputs = tiny.model(family), prompt(2, 50, pad=(0, 9))
    logits, before, config = model(**inputs).logits, snapshot(model), model.config.to_json_string()
    weights = {name: weight.data_ptr() for name, weight in model.state_dict().items()}
    assert kvevict.patch(model, policy, **options) is model
    assert snapshot(model) != before
    assert {name: weight.data_ptr() for name, weight in model.state_dict().items()} == weights
    assert model.config.to_json_string() == config
    generate(model, inputs)
    assert kvevict.unpatch(model) is model
    assert snapshot(model) == before
    assert torch.equal(model(**inputs).logits, logits)
    assert kvevict.unpatch(model) is model
    assert snapshot(model) == before


def test_patching_twice_replaces():
    model, inputs = tiny.model(), prompt(1, 50)
    plain, before = generate(model, inputs), snapshot(model)
    kvevict.patch(model, "take", **TAKE)
    kvevict.patch(model, "snapkv", budget=12, window=4)
    got = generate(model, inputs)
    assert kvevict.report(model)["kept"] == [[[12, 12]]] * 4
    with kvevict.evicting(tiny.model(), "snapkv", budget=12, window=4) as other:
        assert torch.equal(generate(other, inputs), got)
    kvevict.unpatch(model)
    assert snapshot(model) == before
    assert torch.equal(generate(model, inputs), plain)


def test_a_refused_replacement_changes_nothing():
    model, inputs = tiny.model(), prompt(1, 50)
    kvevict.patch(model, "snapkv", budget=12, window=4)
    generate(model, inputs)
    before = snapshot(model)
    layers = dict(policy="take", budget=9, warmup_layers=5, probe=4)
    for bad in (dict(policy="snap", budget=12), dict(policy="snapkv", budget=0), layers):
        with pytest.raises(ValueError):
            kvevict.patch(model, **bad)
        assert snapshot(model) == before
    assert kvevict.report(model)["kept"] == [[[12, 12]]] * 4


def test_evicting_restores():
    model, inputs = tiny.model(), prompt(1, 50)
    before = snapshot(model)
    with kvevict.evicting(model, "take", **TAKE) as inside:
        assert inside is model
        generate(model, inputs)
        assert kvevict.report(model)["kept"] == [[[16, 16]]] * 4
    assert snapshot(model) == before
    with pytest.raises(KeyError), kvevict.evicting(model, "take", **TAKE):
        raise KeyError
    assert snapshot(model) == before


def test_evicting_inside_a_patched_model():
    """The outer patch is back afterwards, its last report too."""
    model, inputs = tiny.model(), prompt(1, 50)
    before = snapshot(model)
    kvevict.patch(model, "take", **TAKE)
    want = generate(model, inputs)
    report = kvevict.report(model)
    for fails in (False, True):
        try:
            with kvevict.evicting(model, "snapkv", budget=12, window=4), kvevict.evicting(model, "h2o", budget=8):
                generate(model, inputs)
                assert kvevict.report(model)["kept"] == [[[8, 8]]] * 4
                if fails:
                    raise KeyError
        except KeyError:
            pass
        assert kvevict.report(model) == report
        assert torch.equal(generate(model, inputs), want)
        report = kvevict.report(model)
    kvevict.unpatch(model)
    assert snapshot(model) == before


def test_unpatched_inside_evicting():
    model = tiny.model()
    before = snapshot(model)
    with kvevict.evicting(model, "take", **TAKE):
        kvevict.unpatch(model)
    assert snapshot(model) == before


@MIXED
def test_save_pretrained(family, tmp_path):
    """A patched model writes the same files as the unpatched one."""
    model = tiny.model(family)
    model.save_pretrained(tmp_path / "plain")
    kvevict.patch(model, "take", **TAKE)
    generate(model, prompt(1, 50))
    model.save_pretrained(tmp_path / "patched")
    files = sorted(os.listdir(tmp_path / "plain"))
    assert files == sorted(os.listdir(tmp_path / "patched"))
    for name in files:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "patched" / name).read_bytes()
    again = type(model).from_pretrained(tmp_path / "patched")
    assert again.get_decoder().layers[1].self_attn.config._attn_implementation != "kvevict"


@MIXED
@pytest.mark.parametrize("policy", ["take", "h2o", "snapkv"])
def test_report(family, policy):
    options = dict(take=TAKE, h2o=dict(budget=10), snapkv=dict(budget=0.5, window=4))[policy]
    model, inputs = shared(family), prompt(2, 50, pad=(0, 9))
    with kvevict.evicting(model, policy, **options):
        out = model.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        report, full = kvevict.report(model), kvevict.report(model, positions=True)
    assert set(report) == {
        "seen", "kept", "kept_share", "cache_bytes", "padded_bytes", "peak_cache_bytes", "overhead_bytes",
        "full_cache_bytes", "archive_bytes", "archive_in", "recalled", "bits", "wider_keys", "seconds", "replayed",
        "not_recorded", "question", "stored", "reach", "checked",
    }  # fmt: skip
    assert set(full) == {*report, "positions"}
    assert {key: full[key] for key in report} == report
    assert report["seen"] == [50, 41]
    want = {"take": [16, 16], "h2o": [10, 10], "snapkv": [25, 21]}[policy]
    slides = family != "llama"
    assert report["kept"] == [None if slides and layer % 2 == 0 else [[n, n] for n in want] for layer in range(4)]
    now = [n if policy == "h2o" else n + 3 for n in want]  # h2o evicts while decoding
    assert report["stored"] == [None if slides and layer % 2 == 0 else [[n, n] for n in now] for layer in range(4)]
    slots = sum(n for layer in report["kept"] for row in layer or () for n in row)
    width = 4 * model.get_decoder().layers[0].self_attn.head_dim
    assert report["cache_bytes"] == 2 * width * slots
    assert report["peak_cache_bytes"] >= max(report["cache_bytes"], 2 * width * 2 * (50 + 41))  # a layer reads all or Z
    assert report["overhead_bytes"] > 0
    assert {"read", "attend"} <= set(report["seconds"])
    assert all(type(stage) is str and type(took) is float and took >= 0 for stage, took in report["seconds"].items())
    assert report["seconds"]["read"] >= report["seconds"]["attend"]
    for index in range(4):
        if report["kept"][index] is None:
            assert full["positions"][index] is None
            continue
        for row, last in enumerate((50, 41)):
            for head in range(2):
                kept = full["positions"][index][row][head]
                assert type(kept) is list and all(type(position) is int for position in kept)
                assert kept == sorted(set(kept)) and kept[0] >= 0 and kept[-1] < last
                assert len(kept) == report["kept"][index][row][head]
    assert out.past_key_values.get_seq_length() == 53


def test_report_is_a_copy():
    model = shared()
    with kvevict.evicting(model, "h2o", budget=10):
        generate(model, prompt(1, 50))
        first = kvevict.report(model, positions=True)
        first["kept"][0][0][0] = first["seen"][0] = first["positions"][0][0][0][0] = 99
        first["seconds"].clear()
        second = kvevict.report(model, positions=True)
        assert second["kept"][0][0][0] == 10
        assert second["seen"] == [50]
        assert 99 not in second["positions"][0][0][0]
        assert second["seconds"]


def test_report_is_about_the_last_read():
    model = shared()
    with kvevict.evicting(model, "h2o", budget=10):
        for length in (50, 30, 7):
            generate(model, prompt(1, length))
            assert kvevict.report(model)["seen"] == [length]
            assert kvevict.report(model)["kept"] == [[[min(10, length)] * 2]] * 4


def test_peak_is_bounded():
    """The most live bytes while a long prompt is read follow from the budget and the chunk, not from the prompt."""
    model, row = shared(), 2 * 4 * 32 * 2  # bytes of a token in one layer
    peaks = {}
    for length in (200, 400):
        with kvevict.evicting(model, "snapkv", budget=20, window=4, chunk_size=32):
            model(prompt(1, length)["input_ids"])
            peaks[length] = kvevict.report(model)["peak_cache_bytes"]
    assert peaks[200] == peaks[400] == row * (4 * 20 + 32)
    with kvevict.evicting(model, "take", budget=20, probe=4, chunk_size=32, warmup_budget=40):
        model(prompt(1, 400)["input_ids"])
        peak = kvevict.report(model)["peak_cache_bytes"]
    assert row * (2 * 40 + 2 * 20 + 32) <= peak <= row * (2 * 40 + 2 * 20 + 2 * 32)  # two layers wait


def test_no_report():
    model = tiny.model()
    with pytest.raises(ValueError, match="not patched"):
        kvevict.report(model)
    kvevict.patch(model, "take", **TAKE)
    with pytest.raises(ValueError, match="nothing was read"):
        kvevict.report(model)
    model.train()(prompt(1, 40)["input_ids"])  # training is not reading
    with pytest.raises(ValueError, match="nothing was read"):
        kvevict.report(model)
    kvevict.unpatch(model)
    with pytest.raises(ValueError, match="not patched"):
        kvevict.report(model)
    with pytest.raises(TypeError, match="str"):
        kvevict.report("gpt2")
