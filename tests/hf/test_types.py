"""Model types, each built tiny and compared with the unpatched model: `kvevict/known.tsv` has the results.

KVEVICT_TYPES=all compares every type that the installed Transformers has, KVEVICT_TYPES=write writes the table.
"""

import copy
import os

import judge
import pytest
import tiny
import torch
import transformers
import zoo

import kvevict
from kvevict.models import families, known, rotary, trial
from kvevict.models.compat import VERSION

WHICH = os.environ.get("KVEVICT_TYPES", "sample")
SAMPLE = ("smollm3", "gemma3", "qwen3_next", "falcon_h1", "lfm2", "llama4_text", "gpt2", "phi", "opt", "jamba",
          "deepseek_v3")  # fmt: skip
TYPES = [(name, kind) for name, kind in zoo.types() if WHICH != "sample" or name in SAMPLE]
RIGHT = (known.EQUAL, known.LIMITED)
LINES = {line.name: line for line in known.table()}


@pytest.mark.parametrize("name, kind", TYPES, ids=[name for name, _ in TYPES])
@pytest.mark.drawn(3)
def test_table(name, kind):
    """The table is true. A type that is not in it may be wrong, but then it is refused when it is patched."""
    line, wanted = judge.judge(name, kind), LINES.get(name)
    if WHICH == "write":
        write(line)
    elif wanted is None or line.verdict == known.UNTRIED:
        return
    elif known.is_verified(name, line.decoder) or not wanted.since:
        assert (line.decoder, line.verdict) == (wanted.decoder, wanted.verdict), line.note


def write(line):
    """Put a line into the table. For a run without workers (-n 0). On an older version of Transformers than the line's
    there is only to say that the type is right there too."""
    known.table.cache_clear()
    lines = {each.name: each for each in known.table()}
    before, here = lines.get(line.name), ".".join(map(str, VERSION))
    alike = before is not None and before.since and (before.decoder, before.verdict) == (line.decoder, line.verdict)
    if alike and known.version(before.since) < VERSION:
        here = before.since
    older = before is not None and before.since and known.version(before.since) > VERSION
    if older and not alike:
        return
    lines[line.name] = (before if older else line)._replace(since=here if line.verdict in RIGHT else "")
    rows = sorted("\t".join(" ".join(field.split()) for field in each) for each in lines.values())
    known.FILE.write_text("\n".join(["\t".join(known.Type._fields), *rows]) + "\n", encoding="utf-8")


@pytest.fixture
def unknown(monkeypatch):
    """No type is known."""
    monkeypatch.setattr(known, "is_verified", lambda *names: False)
    monkeypatch.setattr(known, "refused", lambda *names: None)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unknown_and_right(unknown, family, dtype):
    """It is patched, and training mode is as it was."""
    model = tiny.model(family, dtype).train()
    kvevict.patch(model, "snapkv", budget=64)
    assert model.training
    kvevict.unpatch(model.eval())


class Foreign(transformers.models.llama.modeling_llama.LlamaAttention):
    """Remote code under a known type's name: it does not show its attention."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states, *args, **kwargs)


class Counting(torch.nn.Module):
    """Remote code in a known type's layer: the output depends on how many tokens a call has."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return self.mlp(x) * (1 + 1e-2 * x.shape[1])


@pytest.mark.parametrize("part, reason", [
    ("self_attn", "no single module that calls"), ("mlp", "output in two calls differs from that in one"),
])  # fmt: skip
def test_remote_code_is_looked_at(part, reason):
    """Under any type's name; a refused model is unchanged."""
    model = tiny.model("llama")
    if part == "mlp":
        model.model.layers[1].mlp = Counting(model.model.layers[1].mlp)
    else:
        model.model.layers[1].self_attn.__class__ = Foreign
    configs = [layer.self_attn.config for layer in model.model.layers]
    with pytest.raises(ValueError, match=reason):
        kvevict.patch(model, "snapkv", budget=64)
    assert all(layer.self_attn.config is config for layer, config in zip(model.model.layers, configs))
    assert "forward" not in model.model.__dict__


class Bypassing(transformers.LlamaForCausalLM):
    """Remote code that does not call the decoder that it names."""

    def forward(self, input_ids, **kwargs):
        out = self.twin[0](input_ids, **kwargs)
        return transformers.modeling_outputs.CausalLMOutputWithPast(
            logits=self.lm_head(out.last_hidden_state), past_key_values=out.past_key_values
        )


def test_a_decoder_that_is_not_called_is_refused(unknown):
    model = tiny.model("llama")
    model.twin, model.__class__ = [copy.deepcopy(model.model)], Bypassing
    with pytest.raises(ValueError, match="its cache is not filled by its text decoder"):
        kvevict.patch(model, "snapkv", budget=64)


def test_chunks_that_differ_are_refused(unknown):
    """Jamba starts its state anew with every call, patched or not."""
    model = zoo.make("jamba", "JambaForCausalLM")
    with pytest.raises(ValueError, match="the unpatched model's output in two calls differs"):
        kvevict.patch(model, "snapkv", budget=64)
    assert "forward" not in model.model.__dict__


def test_positions_that_differ_are_refused(unknown, monkeypatch):
    """OPT counts a padded row's tokens, unlike the others."""
    model = zoo.make("opt", "OPTForCausalLM")
    kvevict.patch(model, "snapkv", budget=64)
    kvevict.unpatch(model)
    monkeypatch.setattr(families, "counts_tokens", lambda decoder: False)
    with pytest.raises(ValueError, match="chunks change its output by"):
        kvevict.patch(model, "snapkv", budget=64)


def test_layers_without_rope():
    """They are found not to rotate; the others are found to rotate."""
    model = zoo.make("smollm3", "SmolLM3ForCausalLM")
    wanted = {index: bool(rope) for index, rope in enumerate(model.config.no_rope_layers)}
    assert trial.rotating(model, model.model) == wanted
    assert set(wanted.values()) == {True, False}


def test_unknown_rotation_is_refused(monkeypatch):
    """Rows and scores that rotate queries or keys raise; all else works."""
    model = tiny.model("llama")
    monkeypatch.setattr(rotary, "rotate", lambda decoder, module, x, *positions: x)
    for options in (dict(policy="take"), dict(policy="expected")):
        with pytest.raises(ValueError, match=r"ema_alpha=0\.0"):
            kvevict.patch(model, budget=64, chunk_size=64, **options)
    kvevict.patch(model, "take", budget=64, chunk_size=64, ema_alpha=0.0)


def test_parallel_blocks_have_no_middle():
    """Where attention and MLP read the same, TADA cannot compare between them; it can around the layer."""
    model = zoo.make("phi", "PhiForCausalLM")
    with pytest.raises(ValueError, match="cd='layer'"):
        kvevict.patch(model, "edie+tada", budget=64)
    kvevict.patch(model, "edie+tada", budget=64, layers=kvevict.LAYERS["tada"](cd="layer"))


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
def test_after_attention(family):
    """For families with known names: the norm before the MLP, or the MLP itself."""
    model = tiny.model(family)
    name = {"llama": "post_attention_layernorm", "gemma2": "pre_feedforward_layernorm", "olmo2": "mlp"}[family]
    order = [i for i, kind in enumerate(families.layer_kinds(model.config)) if kind == families.FULL_ATTENTION]
    assert trial.after_attention(model, model.model) == dict.fromkeys(order, name)


@pytest.mark.parametrize("family", ["phi3", "mistral"])
def test_window_as_long_as_the_context(family):
    """It counts as full attention: every layer evicts, and nothing differs."""
    model, inputs = tiny.model(family, sliding_window=4096), tiny.prompt(2, 50, pad=(0, 9))
    tokens = inputs["attention_mask"].bool()
    want = model(**inputs).logits[tokens]
    with kvevict.evicting(model, "snapkv", budget=10, window=4), torch.no_grad():
        model(**inputs)
        assert kvevict.report(model)["kept"] == [[[10, 10]] * 2] * 4
    with kvevict.evicting(model, "snapkv", budget=100, chunk_size=7), torch.no_grad():
        assert tiny.relative(model(**inputs).logits[tokens], want) < 1e-4


def test_values_narrower_than_keys(monkeypatch):
    """As in the full-size MiMo-V2-Flash: stored values are as wide as the keys."""
    wide = dict(head_dim=48, v_head_dim=32, swa_head_dim=48, swa_v_head_dim=32)
    monkeypatch.setitem(zoo.EXTRA, "mimo_v2_flash", wide)
    if "mimo_v2_flash" not in dict(zoo.types()):
        pytest.skip("this version of Transformers does not have it")
    line = judge.judge("mimo_v2_flash", "MiMoV2FlashForCausalLM")
    assert line.verdict == known.EQUAL, line.note


HYBRIDS = [("qwen3_next", "Qwen3NextForCausalLM"), ("falcon_h1", "FalconH1ForCausalLM"), ("lfm2", "Lfm2ForCausalLM")]


@pytest.mark.parametrize("name, kind", HYBRIDS)
def test_padding_longer_than_a_chunk(name, kind):
    """It enters no state, though Transformers masks a first call's only."""
    model, inputs = zoo.make(name, kind), tiny.prompt(2, 50, pad=(0, 23))
    tokens = inputs["attention_mask"].bool()
    with torch.no_grad():
        want = model(**inputs).logits[tokens]
        for policy, options in (("snapkv", {}), ("take", dict(probe=3))):
            with kvevict.evicting(model, policy, budget=49, chunk_size=7, **options):
                assert tiny.relative(model(**inputs).logits[tokens], want) < 1e-4


@pytest.mark.parametrize("name, kind", HYBRIDS)
def test_what_a_state_forbids(name, kind, tmp_path):
    model, inputs = zoo.make(name, kind), tiny.prompt(1, 40)
    with pytest.raises(ValueError, match="tsp=None"):
        kvevict.patch(model, "fastkv", budget=20)
    kvevict.patch(model, "snapkv", budget=20, window=4)
    with pytest.raises(ValueError, match=r"without an assistant|stateful"):
        model.generate(**inputs, max_new_tokens=4, prompt_lookup_num_tokens=3)
    with torch.no_grad():
        cache = model(**inputs).past_key_values
    with pytest.raises(ValueError, match="keeps a recurrent state"):
        kvevict.save_cache(cache, tmp_path / "cache.safetensors")


def test_gemma3_reads_text_and_refuses_pictures():
    """Its wrapper makes the masks; tokens of a picture see each other, in chunks they would not."""
    model = zoo.make("gemma3", "Gemma3ForConditionalGeneration")
    inputs = tiny.prompt(2, 50, pad=(0, 9))
    kinds = torch.zeros_like(inputs["input_ids"])
    with torch.no_grad(), kvevict.evicting(model, "snapkv", budget=20, window=4, chunk_size=16):
        assert model(**inputs, token_type_ids=kinds).logits.isfinite().all()
        kinds[:, 20:30] = 1
        with pytest.raises(ValueError, match="see later ones"):
            model(**inputs, token_type_ids=kinds)


SEES = dict(image_token_id=290, vision_start_token_id=291, vision_end_token_id=292, video_token_id=293)
EYES = {
    "qwen2_5_vl": dict(out_hidden_size=128, hidden_size=64, num_heads=2, intermediate_size=64,
                       fullatt_block_indexes=[0]),
    "qwen3_vl": dict(out_hidden_size=128, hidden_size=64, num_heads=2, intermediate_size=64,
                     deepstack_visual_indexes=[0]),
}  # fmt: skip


def seeing(name, kind, monkeypatch):
    """A tiny model, and a prompt of 60 tokens with a picture in columns 10 to 27."""
    monkeypatch.setitem(zoo.EXTRA, name, zoo.EXTRA.get(name, {}) | SEES | dict(vision_config=EYES[name]))
    model, generator = zoo.make(name, kind), torch.Generator().manual_seed(3)
    ids = torch.randint(20, 250, (1, 60), generator=generator)
    ids[0, 10:28] = torch.tensor([291, *[290] * 16, 292])
    vision = model.config.vision_config
    merge = vision.spatial_merge_size
    size = 3 * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(16 * merge**2, size, generator=generator)
    return model, dict(
        input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels,
        image_grid_thw=torch.tensor([[1, 4 * merge, 4 * merge]]), mm_token_type_ids=(ids == 290).long(),
    )  # fmt: skip


@pytest.mark.parametrize("name", EYES)
@pytest.mark.parametrize("policy, options", [
    ("snapkv", dict(chunk_size=7)), ("take", dict(chunk_size=13, probe=4)),
    ("take", dict(chunk_size=13, probe=(8, 14))),
])  # fmt: skip
def test_pictures(name, policy, options, monkeypatch):
    """Chunks cut through a picture, whose tokens may be appended: logits and tokens are the unpatched model's."""
    model, inputs = seeing(name, dict(zoo.types())[name], monkeypatch)
    with torch.no_grad():
        want, tokens = model(**inputs).logits, model.generate(**inputs, max_new_tokens=4, do_sample=False)
        blind = model(**{key: inputs[key] for key in ("input_ids", "attention_mask")}).logits
        with kvevict.evicting(model, policy, budget=59, **options):
            got = model(**inputs).logits
        with kvevict.evicting(model, policy, budget=100, **options):
            assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), tokens)
    assert tiny.relative(got, want) < 1e-4
    assert tiny.relative(blind, want) > 1e-2  # the picture matters


@pytest.mark.parametrize("name", EYES)
@pytest.mark.parametrize("pictures", [(1, 2), (2, 0)], ids=str)
def test_batch_whose_pictures_differ_in_number(name, pictures, monkeypatch):
    """Rows with so many pictures each, the second one left-padded: the tokens equal the unpatched model's, and a row
    keeps the same slots as alone."""
    model, one = seeing(name, dict(zoo.types())[name], monkeypatch)
    ids, padding = torch.randint(20, 250, (2, 60), generator=torch.Generator().manual_seed(4)), 7
    for row, count in enumerate(pictures):
        for at in (10, 38)[:count]:
            ids[row, at : at + 18] = one["input_ids"][0, 10:28]
    mask = torch.ones_like(ids)
    ids[1, :padding] = mask[1, :padding] = 0

    def inputs(count, *rows):
        seen = {name: one[name].repeat(count, 1) for name in ("pixel_values", "image_grid_thw")}
        given = dict(input_ids=ids, attention_mask=mask, mm_token_type_ids=(ids == 290).long())
        return {key: value[rows] for key, value in given.items()} | (seen if count else {})

    def generated(**inputs):
        return model.generate(**inputs, max_new_tokens=4, do_sample=False)[:, -4:]

    together = inputs(sum(pictures), slice(None))
    want = generated(**together)
    for policy, options in (("snapkv", dict(chunk_size=7)), ("take", dict(chunk_size=13, probe=4))):
        with kvevict.evicting(model, policy, budget=100, **options):
            assert torch.equal(generated(**together), want)
        with kvevict.evicting(model, policy, budget=40, **options):
            generated(**together)
            kept = kvevict.report(model, positions=True)["positions"]
            for row, count in enumerate(pictures):
                alone = inputs(count, slice(row, row + 1), slice(padding if row else 0, None))
                generated(**alone)
                for layer, mine in zip(kept, kvevict.report(model, positions=True)["positions"], strict=True):
                    assert layer is None if mine is None else mine[0] == layer[row]
