"""Packed slots (kv=) beside what else a model and a call may be: head dimensions, kinds of decoders, weights elsewhere,
beams, assistants, padding, turns, numbers that are not finite. An oracle for all: the unpatched model on a cache of the
numbers that the stored bytes stand for."""

import copy

import offload
import pytest
import tiny
import torch
import zoo
from tiny import prompt
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import kvevict
from kvevict.engine.memory.layer import EvictionLayer
from kvevict.engine.memory.stateful import StatefulLayer
from kvevict.policy.kv import KINDS

PACKED = ("int8", "k8v4", "int4")
ALL = dict(budget=4096, decode=False, tokenizer=False)
CUT = dict(budget=24, window=4, chunk_size=32, tokenizer=False)


def plain(cache, config):
    """A cache of Transformers' own with the numbers that the bytes stand for."""
    made = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, EvictionLayer):
            made.layers[index] = copy.deepcopy(layer.state) if isinstance(layer, StatefulLayer) else DynamicLayer()
            made.layers[index].update(layer.keys, layer.values)
        else:
            made.layers[index] = copy.deepcopy(layer)
    return made


def against_the_oracle(model, kind, turns=(40, 33, 1, 20)):
    """Logits of further turns; a decoded token between two of them is packed, too. Returns the layers that evict."""
    ids, cache, start = prompt(1, sum(turns))["input_ids"], None, 0
    for turn in turns:
        rows = ids[:, start : start + turn]
        before = None if cache is None or turn == 1 else plain(cache, model.config)  # decode reads its row as packed
        with kvevict.evicting(model, "streaming", kv=kind, **ALL), torch.no_grad():
            out = model(rows, past_key_values=cache)
        cache, start = out.past_key_values, start + turn
        if before is not None:
            with torch.no_grad():
                assert tiny.relative(out.logits, model(rows, past_key_values=before).logits) < 1e-4
    layers = [layer for layer in cache.layers if isinstance(layer, EvictionLayer)]
    assert all(layer.longest() == sum(turns) for layer in layers)
    return layers


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("dim", [8, 24, 80, 96])
def test_head_dimensions(kind, dim):
    """24, 80 and 96 are not powers of two: the Hadamard transform goes by blocks."""
    layers = against_the_oracle(tiny.model(head_dim=dim), kind)
    assert [layer.storage.kinds for layer in layers] == [KINDS[kind]] * 4


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss", "qwen2", "phi3"])
def test_windows_softcaps_and_sinks(kind, family):
    """Sliding layers have Transformers' cache and store nothing packed."""
    layers = against_the_oracle(tiny.model(family), kind)
    assert len(layers) == (2 if family in ("gemma2", "gemma3", "gpt_oss") else 4)
    assert all(layer.storage.kinds == KINDS[kind] for layer in layers)


@pytest.mark.parametrize("kind", ["k8v4", "int4"])
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "gemma4_text", "llama4_text", "smollm3", "gpt2"])
def test_other_decoders(kind, name):
    """With states, shared layers, chunked attention, without rotation."""
    found = dict(zoo.types())
    if name not in found or tiny.VERSION < (5, 23):
        pytest.skip("this version of Transformers does not have it, or in another form")
    layers = against_the_oracle(zoo.make(name, found[name]), kind)
    assert layers and all(layer.k.dtype == torch.uint8 for layer in layers)


@pytest.mark.parametrize("offload", [offload.cpu, offload.disk, offload.both])
def test_offloaded_weights(offload, tmp_path):
    """Tokens, and the stored bytes, are those of the model in memory."""
    model, away, inputs = tiny.model(), tiny.model(), prompt(2, 70, pad=(0, 40))
    offload(away, tmp_path / "weights")
    found = []
    for each in (model, away):
        with kvevict.evicting(each, "snapkv", kv="k8v4", **CUT):
            found.append(each.generate(**inputs, max_new_tokens=6, do_sample=False, return_dict_in_generate=True))
    want, got = found
    assert torch.equal(got.sequences, want.sequences)
    for one, other in zip(want.past_key_values.layers, got.past_key_values.layers, strict=True):
        assert same_bytes(one.storage, other.storage)


def same_bytes(one, other):
    return all(
        torch.equal(getattr(one, name)[a], getattr(other, name)[b])
        for (_, _, a), (_, _, b) in zip(one.segments(), other.segments(), strict=True)
        for name in ("k", "v", "pos")
    )


@pytest.mark.parametrize("kind", PACKED)
def test_padded_batch_is_each_row_alone(kind):
    """The last row is padding for two chunks: the same slots, around the same centre, and the same tokens."""
    model, pads = tiny.shared(), (0, 5, 17, 70)
    inputs = prompt(4, 100, pad=pads)
    ask = dict(max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
    with kvevict.evicting(model, "snapkv", kv=kind, **CUT):
        together = model.generate(**inputs, **ask)
        for row, pad in enumerate(pads):
            alone = model.generate(**{name: x[row : row + 1, pad:] for name, x in inputs.items()}, **ask)
            assert torch.equal(alone.sequences[0, -6:], together.sequences[row, -6:])
            assert tiny.relative(torch.stack(together.logits)[:, row], torch.stack(alone.logits)[:, 0]) < 0.02
            for one, all_rows in zip(alone.past_key_values.layers, together.past_key_values.layers, strict=True):
                assert same(one.positions()[0], all_rows.positions()[row])
                torch.testing.assert_close(one.centre[0], all_rows.centre[row], atol=1e-3, rtol=1e-3)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", PACKED)
def test_beams_after_eviction(kind):
    """The score of every beam is that of its tokens read one by one after the prompt."""
    model, inputs = tiny.shared(), prompt(1, 80)
    with kvevict.evicting(model, "snapkv", kv=kind, **CUT), torch.no_grad():
        tiny.three_beams(model, inputs)


@pytest.mark.skipif(tiny.VERSION < (5, 14), reason="may accept a candidate too many at the end")
@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("lookup", [True, False])
def test_assisted_decoding(kind, lookup):
    """Candidates that are taken back leave no slot. (Rows of one call see each other as computed, a decoded token's row
    is packed at once: so the tokens need not be greedy decoding's; each is the most likely one of a call as long.)"""
    model, ids = tiny.shared(), prompt(1, 20)["input_ids"].repeat(1, 3)
    helper = dict(prompt_lookup_num_tokens=4, eos_token_id=0) if lookup else dict(assistant_model=tiny.shared(seed=7))
    with kvevict.evicting(model, "snapkv", kv=kind, **CUT), torch.no_grad():
        out = model.generate(ids, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, **helper)
        tokens, cache = out.sequences[:, 60:], model(ids, logits_to_keep=1).past_key_values
        for layer, read in zip(out.past_key_values.layers, cache.layers, strict=True):
            stored = layer.positions()[0][0].tolist()
            assert stored == read.positions()[0][0].tolist() + list(range(60, layer.get_seq_length()))
            assert layer.get_seq_length() in (60 + tokens.shape[1] - 1, 60 + tokens.shape[1])
        want = model(tokens[:, :-1], past_key_values=cache).logits[0].log_softmax(-1)
    chosen = want.gather(1, tokens[0, 1:, None])[:, 0]
    assert (want.amax(1) - chosen).max() < {"int8": 0.05, "k8v4": 0.5, "int4": 1.0}[kind]


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite(kind, name, number):
    """As in the model's dtype: the logits are NaN, nothing else fails, and the next prompt is read well."""
    model, inputs = tiny.model(), prompt(1, 60)
    weight = getattr(model.model.layers[1].self_attn, name).weight
    with kvevict.evicting(model, "snapkv", kv=kind, **CUT), torch.no_grad():
        want = model(**inputs).logits
        good, weight[3, 5] = weight[3, 5].clone(), number
        cache = None
        for turn in (inputs["input_ids"], torch.tensor([[5]])):
            out = model(turn, past_key_values=cache)
            cache = out.past_key_values
            assert out.logits[0, -1].isnan().all()
        assert kvevict.report(cache)["wider_keys"] == ([1, 2, 3] if name == "k_proj" else [2, 3])
        weight[3, 5] = good
        assert torch.equal(model(**inputs).logits, want)


def test_latents_are_refused():
    found = dict(zoo.types())
    if "deepseek_v3" not in found or tiny.VERSION < (5, 23):
        pytest.skip("this version of Transformers does not have it, or in another form")
    with pytest.raises(ValueError, match="latent"):
        kvevict.patch(zoo.make("deepseek_v3", found["deepseek_v3"]), "snapkv", kv="int8", **CUT)
