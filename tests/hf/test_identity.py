"""A cache belongs to what computed it: fields of a configuration that move logits are compared, the others are few."""

import copy
import gc
import os
import pickle

import pytest
import torch
import zoo
from tiny import model, prompt, relative
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig

import kvevict
from kvevict.answering.batch import Batch
from kvevict.models import known
from kvevict.models.weights import SILENT, settings

DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
LONG = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 16, long_factor=[1.5] * 16,
            original_max_position_embeddings=32)  # fmt: skip
CASES = {
    "llama": {}, "dynamic rope": dict(type="llama", max_position_embeddings=32, rope_parameters=DYNAMIC),
    "long rope": dict(type="phi3", original_max_position_embeddings=32, max_position_embeddings=64,
                      rope_parameters=LONG, sliding_window=None),
    "qwen2": {}, "qwen3": {}, "gemma2": {}, "gemma3_text": {}, "mixtral": {}, "qwen2_moe": {}, "deepseek_v3": {},
    "granite": {}, "cohere": {}, "gpt_oss": {}, "dbrx": {},
}  # fmt: skip
IDS = prompt(1, 48)["input_ids"]


def config_of(case):
    changes = dict(CASES[case])
    config = zoo.config_of(changes.pop("type", case))
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def made(config, state=None):
    net = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").float().eval()
    if state is None:
        zoo.settle(net, 0)
    else:
        net.load_state_dict(state)
    return net


@torch.no_grad()
def logits(net):
    return net(IDS).logits


def others(value):
    """Other values for a field."""
    return [each for each in _others(value) if each != value]


def _others(value):
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, max(1, value - 1), 1]
    if isinstance(value, float):
        return [1.5 * value + 0.25, value / 2]
    if isinstance(value, str):
        return ["gelu", "relu", "other"]
    if isinstance(value, (list, tuple)) and value:
        return [value[::-1], *([each, *value[1:]] for each in others(value[0]))]
    if isinstance(value, dict):
        return [value | {name: each} for name in value for each in others(value[name])]
    if isinstance(value, PreTrainedConfig):
        counting = [(name, held) for name, held in vars(value).items() if name not in SILENT]
        return [changed(value, name, each) for name, held in counting for each in others(held)]
    return [True, 2, 0.5, [1], "gelu"] if value is None else []


def changed(config, name, value):
    config = copy.deepcopy(config)
    vars(config)[name] = value
    return config


def twins(net, name):
    """Models of the same weights with other values of a field, where these make one with logits."""
    for other in others(vars(net.config)[name]):
        try:
            twin = made(changed(net.config, name, other), net.state_dict())
            logits(twin)
        except Exception:  # an impossible value, other shapes
            continue
        yield twin


@pytest.mark.drawn(3)
@pytest.mark.quick(case="dynamic rope")
@pytest.mark.parametrize("case", CASES)
def test_a_field_that_moves_logits_is_compared(case, tmp_path):
    """Where a changed field moves logits, the file is refused by the field's name; no other field moves them."""
    net = made(config_of(case))
    want, moving = logits(net), set()
    with kvevict.evicting(net, "streaming", budget=1000, decode=False, tokenizer=False), torch.no_grad():
        kvevict.save_cache(kvevict.models.compat.cache_of(net(IDS, use_cache=True)), tmp_path / "cache")
    for name in vars(net.config):
        for twin in twins(net, name):
            moves = relative(logits(twin), want) > 1e-5
            if name in SILENT:
                assert not moves, name
                kvevict.load_cache(tmp_path / "cache", twin)
                break
            with pytest.raises(ValueError, match=f"written for another model: .*its ({name}|weights|layers)"):
                kvevict.load_cache(tmp_path / "cache", twin)
            if moves:
                moving.add(name)
                break
    assert len(moving) >= 3, moving  # dbrx has three, as most of its numbers are in configurations within it


@torch.no_grad()
def test_a_live_cache_after_a_change_in_place(tmp_path):
    """It is refused while a field that counts has another value, and is not saved."""
    net = model()
    with kvevict.evicting(net, "h2o", budget=20):
        cache, before = net(IDS).past_key_values, net.config.rms_norm_eps
        net.config.pad_token_id, net.config._name_or_path, net.config.use_cache = 5, "elsewhere", False
        cache = net(IDS[:, :4], past_key_values=cache, use_cache=True).past_key_values
        net.config.rms_norm_eps = 0.5
        with pytest.raises(ValueError, match=f"its rms_norm_eps is {before}, this model's 0.5"):
            net(IDS[:, :4], past_key_values=cache, use_cache=True)
        with pytest.raises(ValueError, match="filled by a model whose configuration was another: its rms_norm_eps"):
            kvevict.save_cache(cache, tmp_path / "cache")
        net.config.rms_norm_eps = before
        net.config.rope_parameters["rope_theta"] = 5.0
        with pytest.raises(ValueError, match="its rope_parameters is "):
            net(IDS[:, :4], past_key_values=cache, use_cache=True)
        net.config.rope_parameters["rope_theta"] = 10000.0
        net(IDS[:, :4], past_key_values=cache, use_cache=True)
        twin = model(rms_norm_eps=0.5)
        with kvevict.evicting(twin, "h2o", budget=20), pytest.raises(ValueError, match="another model: its rms_norm"):
            twin(IDS[:, :4], past_key_values=cache)


def tuned(net, seed=1, **options):
    """The model with a LoRA that is on."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    return peft.get_peft_model(net, config).eval()


def hotswap(net, folder):
    from peft.utils.hotswap import hotswap_adapter

    tuned(model(), seed=2).save_pretrained(folder)
    hotswap_adapter(net, str(folder), adapter_name="default")


def train(net, folder):
    step = torch.optim.SGD(net.parameters(), lr=0.1)
    with torch.enable_grad():
        net(IDS, labels=IDS, use_cache=False).loss.backward()
    step.step()


WAYS = {
    "hotswap": hotswap, "train": train,
    "data written to": lambda net, _: [weight.data.copy_(weight.data * 1.01) for weight in net.parameters()],
    "data set": lambda net, _: setattr(w := net.model.layers[1].mlp.up_proj.weight, "data", w.data * 1.01),
    "assigned": lambda net, _: net.load_state_dict(model(seed=1).state_dict(), assign=True),
    "swapped": lambda net, _: torch.utils.swap_tensors(
        net.model.norm.weight, torch.nn.Parameter(net.model.norm.weight.detach() * 2)),
    "from a vector": lambda net, _: vector_to_parameters(
        parameters_to_vector(net.parameters()).detach() * 1.01, net.parameters()),
    "through numpy": lambda net, _: net.model.layers[3].self_attn.k_proj.weight.detach().numpy().__imul__(1.01),
    "pruned": lambda net, _: prune.random_unstructured(net.model.layers[0].self_attn.v_proj, "weight", 0.5),
    "pruned for good": lambda net, _: prune.remove(
        prune.l1_unstructured(net.model.layers[0].self_attn.v_proj, "weight", 0.5), "weight"),
    "buffer set": lambda net, _: setattr(each := net.model.embed_tokens, "embed_scale", each.embed_scale * 2),
    "buffer written to": lambda net, _: net.model.embed_tokens.embed_scale.data.mul_(2),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_changed_weights(way, tmp_path):
    """Caches of the earlier ones are refused, in memory and from files; no file names the present ones as theirs."""
    net = tuned(model()) if way == "hotswap" else model("gemma3" if way.startswith("buffer") else "llama")
    kvevict.patch(net, "h2o", budget=20, decode=False)
    cache, saved = (net(IDS, logits_to_keep=1).past_key_values for _ in range(2))
    kvevict.save_cache(saved, tmp_path / "before")
    WAYS[way](net, tmp_path / "adapter")
    for each in (cache, cache.fork(), saved):
        with pytest.raises(ValueError, match="another model, whose weights were written to since: give the one that"):
            net(IDS[:, :4], past_key_values=each)
    for write in (lambda: kvevict.save_cache(cache, tmp_path / "after"), lambda: pickle.dumps(cache)):
        with pytest.raises(ValueError, match="a model whose weights were written to since: save it while that model"):
            write()
    assert not os.path.exists(tmp_path / "after")
    kvevict.save_cache(saved, tmp_path / "known")
    fresh = net(IDS, logits_to_keep=1).past_key_values
    if not way.startswith("buffer"):  # which no file of a model holds
        for name in ("before", "known"):
            with pytest.raises(ValueError, match="written for another model: its weights are"):
                kvevict.load_cache(tmp_path / name, net)
        batch = Batch(net)
        batch.add("old", cache)
        with pytest.raises(ValueError, match="two caches differ in their model"):
            batch.add("new", fresh)
    net(IDS[:, :4], past_key_values=fresh)


def off_and_on(net, dtype):
    with net.disable_adapter():
        net(IDS)


SAME = {
    "round trip": lambda net, dtype: net.double().to(dtype), "off and on": off_and_on,
    "same state": lambda net, _: net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True),
    "merged and back": lambda net, _: [(net.merge_adapter(), net.unmerge_adapter()) for _ in range(3)],
    "longer positions, which write the rotary buffers": lambda net, _: net(IDS.repeat(1, 4)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["32 bits", "16 bits"])
@pytest.mark.parametrize("way", SAME)
@torch.no_grad()
def test_unchanged_weights(way, dtype, tmp_path):
    """The cache is used and saved as if nothing had been done."""
    rope = dict(max_position_embeddings=64, rope_parameters=DYNAMIC) if "rotary" in way else {}
    net = model(dtype=dtype, **rope)
    if way in ("merged and back", "off and on"):
        net = tuned(net)
    kvevict.patch(net, "h2o", budget=20, decode=False)
    cache = net(IDS, logits_to_keep=1).past_key_values
    SAME[way](net, dtype)
    net(IDS[:, :4], past_key_values=cache.fork())
    kvevict.save_cache(cache, tmp_path / "cache")
    net(IDS[:, :4], past_key_values=kvevict.load_cache(tmp_path / "cache", net))


@torch.no_grad()
def test_merged_weights():
    """Those that read with an adapter merged are not those without it, though none is on."""
    net = tuned(model())
    kvevict.patch(net, "h2o", budget=20)
    net.merge_adapter()
    cache = net(IDS, logits_to_keep=1).past_key_values
    net.unmerge_adapter()
    with net.disable_adapter(), pytest.raises(ValueError, match="another model, whose weights were written to since"):
        net(IDS[:, :4], past_key_values=cache)


@torch.no_grad()
def test_a_model_that_is_gone(tmp_path):
    """Its cache is not saved, unless it was before; an equal model goes on with it, another one does not."""

    def read():
        net = kvevict.patch(model(), "h2o", budget=20)
        return [net(IDS, logits_to_keep=1).past_key_values for _ in range(2)]

    cache, other = read()
    gc.collect()
    for write in (lambda: kvevict.save_cache(cache, tmp_path / "cache"), lambda: pickle.dumps(cache)):
        with pytest.raises(ValueError, match="a model that is gone: save it while that model"):
            write()
    assert not os.listdir(tmp_path)
    with pytest.raises(ValueError, match="another model, whose weights were written to since"):
        kvevict.patch(model(seed=1), "h2o", budget=20)(IDS[:, :4], past_key_values=other)
    twin = kvevict.patch(model(), "h2o", budget=20)
    twin(IDS[:, :4], past_key_values=cache)
    kvevict.save_cache(cache, tmp_path / "cache")
    kvevict.load_cache(tmp_path / "cache", twin)


@torch.no_grad()
def test_the_scale_of_an_adapter(tmp_path):
    """LoRA's alpha counts as its weights do, in files and in memory."""
    net, other = (tuned(model(), lora_alpha=alpha) for alpha in (8, 16))
    for each in (net, other):
        kvevict.patch(each, "h2o", budget=20)
    cache = net(IDS).past_key_values
    kvevict.save_cache(cache, tmp_path / "cache")
    kvevict.load_cache(tmp_path / "cache", tuned(model(), lora_alpha=8))
    with pytest.raises(ValueError, match="its scaling is"):
        kvevict.load_cache(tmp_path / "cache", other)
    for module in net.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] = 4.0
    with pytest.raises(ValueError, match="its scaling is"):
        net(IDS[:, :4], past_key_values=cache)
    with other.disable_adapter(), net.disable_adapter():
        kvevict.save_cache(net(IDS).past_key_values, tmp_path / "base")
        kvevict.load_cache(tmp_path / "base", other)


@pytest.mark.drawn(10)
@pytest.mark.parametrize("name", [line.name for line in known.table() if line.verdict in (known.EQUAL, known.LIMITED)])
def test_a_configuration_that_was_saved(name, tmp_path):
    """It is the same one, wherever it lies, and with any dtype and attention."""
    try:
        config = zoo.config_of(name).get_text_config(decoder=True)
        config.save_pretrained(tmp_path)
        loaded = AutoConfig.from_pretrained(tmp_path, attn_implementation="eager")
    except Exception as error:
        pytest.skip(f"{type(error).__name__}: no tiny config of it, or none that can be saved")
    loaded.dtype = torch.float16
    assert settings(loaded) == settings(config)


def test_a_quantisers_settings():
    """They count, in any process alike."""
    config = AutoConfig.for_model("llama", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    assert " at 0x" not in settings(config)
    other = AutoConfig.for_model("llama", quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    assert settings(config) == settings(other) != settings(AutoConfig.for_model("llama"))
    other.quantization_config.bnb_4bit_quant_type = "nf4"
    assert settings(config) != settings(other)
