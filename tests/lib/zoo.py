"""Tiny random models of every model type that Transformers has, from their configs alone: no download."""

import copy
import dataclasses
import inspect

import pytest
import tiny
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING

HID, INTER, LAYERS, HEADS, KV, DIM, VOCAB, EXPERTS = 128, 96, 4, 4, 2, 32, 300, 4

# Field name -> tiny value, applied where the config class has the field (of text configs).
TEXT = dict(
    vocab_size=VOCAB, hidden_size=HID, intermediate_size=INTER, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    num_key_value_heads=KV, head_dim=DIM, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    # other names
    n_embd=HID, n_layer=LAYERS, n_head=HEADS, n_positions=1024, n_ctx=1024, n_inner=INTER, d_model=HID, n_layers=LAYERS,
    n_heads=HEADS, dim=HID, ffn_dim=INTER, d_ff=INTER, dff=INTER, num_layers=LAYERS, num_heads=HEADS, max_seq_len=1024,
    decoder_layers=LAYERS, decoder_attention_heads=HEADS, decoder_ffn_dim=INTER, encoder_layers=LAYERS,
    encoder_attention_heads=HEADS, encoder_ffn_dim=INTER, num_encoder_layers=LAYERS, num_decoder_layers=LAYERS,
    num_encoder_attention_heads=HEADS, num_decoder_attention_heads=HEADS, attention_heads=HEADS, ffn_hidden_size=INTER,
    embedding_size=HID, input_embedding_size=HID, output_embedding_size=HID, emb_dim=HID, d_inner=INTER, d_head=DIM,
    dim_ff=INTER, dim_head=DIM, rotary_dim=16, kv_channels=DIM, type_vocab_size=2,
    original_max_position_embeddings=1024,
    context_length=1024, max_target_positions=1024, kv_heads=KV, lru_width=HID, num_global_key_value_heads=KV,
    global_head_dim=DIM,
    # mixtures
    num_experts=EXPERTS, num_local_experts=EXPERTS, n_routed_experts=EXPERTS, moe_num_experts=EXPERTS,
    num_experts_per_tok=2, num_experts_per_token=2, moe_topk=2, moe_k=2, top_k_experts=2, moe_top_k=2, n_group=1,
    topk_group=1, moe_intermediate_size=64, expert_ffn_hidden_size=64, first_k_dense_replace=1, n_shared_experts=1,
    num_shared_experts=1, moe_num_shared_experts=1, shared_expert_intermediate_size=64,
    shared_experts_intermediate_size=64, shared_intermediate_size=64, moe_shared_expert_intermediate_size=64,
    dense_intermediate_size=INTER, intermediate_size_mlp=INTER, num_dense_layers=1, moe_latent_size=None,
    num_nextn_predict_layers=0, num_mtp_layers=0, mtp_num_hidden_layers=0, zero_expert_num=0, moe_layer_start_index=1,
    # MLA
    q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, o_lora_rank=32,
    o_groups=2, index_head_dim=32, index_n_heads=4, index_topk=16, index_block_size=8, index_topk_blocks=2,
    index_local_blocks=1, indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=32, indexer_budget=16,
    indexer_compress_ratio=4,
    # linear attention, mamba, conv
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    linear_num_heads=4, linear_head_dim=16, mamba_d_state=16, mamba_n_heads=8, mamba_d_head=32, mamba_num_heads=8,
    mamba_head_dim=32, mamba_n_groups=1, mamba_ngroups=1, n_groups=1, n_mamba_heads=2, mamba_d_ssm=256, mamba_dt_rank=8,
    mamba_expand=2, ssm_state_size=16, state_size=16, time_step_rank=8, mamba_headdim=32, chunk_size=16,
    mamba_chunk_size=16, use_mamba_kernels=False, expand=2,
    # per-layer inputs, others
    vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=16, laurel_rank=8, altup_num_inputs=2,
    attention_window_size=12, window_size=12, attention_chunk_size=16, keep_window_size=16, block_size=16,
    d_rel=8, rel_extent=64, router_hidden_size=32, gated_norm_rank=8, adapter_rank=8, sliding_window_size=12,
    swa_num_attention_heads=HEADS, swa_num_key_value_heads=KV, swa_head_dim=DIM, mlp_dim=INTER,
    hidden_dropout=0.0, attention_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, embedding_dropout=0.0,
    decoder_layerdrop=0.0, encoder_layerdrop=0.0, initializer_range=0.05,
)  # fmt: skip
# Vision and audio: text prompts never run them; only their depth is cut.
OTHER = dict(
    num_hidden_layers=1, depth=1, num_layers=1, n_layers=1, encoder_layers=1, decoder_layers=1, layers=1,
    num_layers_per_block=1, num_encoder_layers=1, num_decoder_layers=1, vision_layers=1, hidden_layers=1, n_layer=1,
    num_global_layers=1,
)  # fmt: skip


# Vision encoders with outputs as wide as the text's hidden states.
SIGHT = dict(out_hidden_size=HID, hidden_size=64, num_heads=2, intermediate_size=64)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HYBRID = ["linear_attention", "full_attention"] * 2
MIXED = ["sliding_attention", "full_attention"] * 2


def mrope(*sections, **more):
    return ROPE | {"mrope_section": list(sections)} | more


# Further and changed arguments of types' configs. Published windows as long as the context are left out.
EXTRA = {
    "mistral": dict(sliding_window=None), "mixtral": dict(sliding_window=None), "starcoder2": dict(sliding_window=None),
    "phi3": dict(sliding_window=262144), "phimoe": dict(sliding_window=131072),
    "ministral": dict(layer_types=MIXED, sliding_window=12), "qwen2": dict(use_sliding_window=False),
    "bamba": dict(attn_layer_indices=[1, 3]),
    "dbrx": dict(attn_config=dict(kv_n_heads=2, rope_theta=10000.0, clip_qkv=8.0),
                 ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2)),
    "cohere_compass_text": dict(rope_parameters={"full_attention": ROPE, "sliding_attention": ROPE}),
    "cohere_compass": dict(text_config=dict(rope_parameters={"full_attention": ROPE, "sliding_attention": ROPE})),
    "granitemoehybrid": dict(layer_types=HYBRID, position_embedding_type="rope"),
    "gemma3n_text": dict(intermediate_size=[96] * 4, num_kv_shared_layers=2, layer_types=MIXED,
                         activation_sparsity_pattern=[0.0] * 4),
    "gemma4_text": dict(num_hidden_layers=6, layer_types=[*MIXED, "sliding_attention", "full_attention"],
                        num_kv_shared_layers=4),
    "gemma4": dict(text_config=dict(attention_k_eq_v=True, num_global_key_value_heads=1)),
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "lfm2_vl": dict(text_config=dict(layer_types=["conv", "full_attention"] * 2)),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1),
    "longcat_flash": dict(head_dim=16),
    "mistral4": dict(head_dim=32),
    "mistral_large4": dict(text_config=dict(head_dim=16)),
    "qwen2_vl": dict(text_config=dict(rope_parameters=mrope(4, 6, 6))),
    "qwen2_5_vl": dict(text_config=dict(rope_parameters=mrope(4, 6, 6))),
    "qwen2_5_omni_thinker": dict(vision_start_token_id=8, text_config=dict(rope_parameters=mrope(4, 6, 6))),
    "qwen3_omni_moe_thinker": dict(vision_start_token_id=8),
    "step3p7": dict(text_config=dict(sliding_window=12)),
    "molmo2": dict(adapter_config=dict(vision_feature_layer=[0, 1]), vision_config=dict(num_hidden_layers=2)),
    "muse_spark": dict(audio_config=dict(num_hidden_layers=4)),
    "nemotron_h_omni": dict(audio_config=None),
    "reformer": dict(axial_pos_embds_dim=(64, 64), axial_pos_shape=(16, 32)),
    "mamba2": dict(num_heads=8, head_dim=32),
    "zaya": dict(num_experts_per_tok=1, sliding_window=12, layer_types=["hybrid_sliding", "hybrid"] * 2),
    "ernie4_5_vl_moe": dict(text_config=dict(moe_intermediate_size=[64, 64], rope_parameters=mrope(6, 6, 4))),
    "hunyuan_vl": dict(text_config=dict(rope_parameters=ROPE | {"mrope_section": [4, 4, 4, 4]})),
    "glm4v": dict(text_config=dict(rope_parameters=mrope(4, 6, 6))),
    "glm46v": dict(text_config=dict(rope_parameters=mrope(4, 6, 6))),
    "glmga": dict(text_config=dict(rope_parameters=mrope(4, 6, 6))),
    "glm_ocr": dict(text_config=dict(rope_parameters=mrope(4, 6, 6))),
    "glm4v_moe": dict(text_config=dict(rope_parameters=mrope(2, 3, 3, partial_rotary_factor=0.5))),
    "paddleocr_vl": dict(text_config=dict(rope_parameters=mrope(4, 6, 6))),
    "deepseek_ocr2": dict(text_config=dict(mlp_layer_types=["dense", "sparse", "sparse", "sparse"])),
    "granite4_vision": dict(deepstack_layer_map=[], spatial_target_layers=[], downsample_rate="4/8"),
    "evolla": dict(use_cache=True),
    "laguna": dict(num_attention_heads_per_layer=[8, 4] * 2, layer_types=MIXED, sliding_window=12),
    "chameleon": dict(vocabulary_map={"<image>": 5}),
    "emu3": dict(vocabulary_map={"<image>": 5, "<|extra_200|>": 6}),
    "glm5_next": dict(text_config=dict(qk_rope_head_dim=0)),
    "granite_docling": dict(vision_config=dict(out_hidden_size=128)),
    "inkling2": dict(vision_config=dict(text_hidden_size=128)),
}  # fmt: skip


def types() -> list:
    """(type, class of the model) of all that make text, alphabetically. (Pi0 makes movements.) No model is imported."""
    classes = {name: kind if isinstance(kind, str) else kind[0] for name, kind in [*SEEING.items(), *CAUSAL.items()]}
    known = {*dir(transformers)}
    return sorted((name, kind) for name, kind in classes.items() if kind in known and name != "pi0")


def make(name, kind, seed=0):
    """A tiny random model of a type in eval mode, with peaked attention."""
    config = config_of(name)
    cls = getattr(transformers, kind)
    if cls.config_class is not None and not isinstance(config, cls.config_class):
        text = config.get_text_config(decoder=True)
        config = text if isinstance(text, cls.config_class) else config
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    torch.manual_seed(seed)
    try:
        model = cls._from_config(copy.deepcopy(config), attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product" not in str(error):
            raise
        model = cls._from_config(copy.deepcopy(config), attn_implementation="eager")
    settle(model.to(torch.float32).eval(), seed)
    return model


def config_of(name):
    return _tiny(CONFIG_MAPPING[name], EXTRA.get(name, {}), "")


@torch.no_grad()
def settle(model, seed):
    """Finite weights, peaked attention, norms and sinks that matter, no end of sequence."""
    torch.manual_seed(seed + 1)
    for name, weight in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if not weight.isfinite().all() or weight.abs().max() > 1e3:
            weight.normal_(0, 0.05)
        if "sink" in last:
            weight.normal_()
        elif weight.ndim == 1 and "norm" in name and last == "weight":
            weight.mul_(0.5 + torch.rand_like(weight)).add_(0.05 * torch.randn_like(weight))
        elif weight.ndim > 1 and last == "weight" and _attends(name):
            weight.mul_(3)
        elif weight.ndim > 1 and weight.shape[0] >= VOCAB and weight.std() < 0.2:
            weight.mul_(4)  # embeddings
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.eos_token_id, generation.pad_token_id = None, 0
        generation.max_length, generation.min_length = None, None


def _attends(name) -> bool:
    other = ("vision", "visual", "audio", "image", "norm", "conv", "linear_attn", "mamba")
    return any(word in name for word in ("attn", "attention", "mixer")) and not any(word in name for word in other)


def _fields(cls) -> dict:
    """Names of a config class's fields with their defaults, None among them."""
    if dataclasses.is_dataclass(cls):
        return {f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(cls)}
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {p.name: None if p.default is p.empty else p.default for p in parameters if p.name not in ("self", "kwargs")}


def _tiny(cls, extra, role):
    """A tiny instance of a config class, its sub-configs too. role: the name that it has in another."""
    fields, subs = _fields(cls), _sub_configs(cls)
    made = {key: _sub(sub, init, extra.get(key, {}), key) for key, (sub, init) in subs.items()
            if extra.get(key, {}) is not None}  # fmt: skip
    own = {key: value for key, value in extra.items() if key not in subs}
    text = "vocab_size" in fields or "vocab_size" in getattr(cls, "attribute_map", {})
    if any(word in cls.model_type + role for word in ("vision", "audio", "vq", "speech")):
        text = False
    if text and not {"text_config", "thinker_config", "llm_config", "decoder_config"} & set(subs):
        return cls(**made, **_text(cls) | own)
    shallow = {key: value for key, value in OTHER.items() if isinstance(fields.get(key), int)}
    if "out_hidden_size" in fields:
        shallow |= {key: value for key, value in SIGHT.items() if key in fields}
    if role == "":
        special = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        shallow |= {key: value for key, value in special.items() if key in fields}
    return cls(**made, **shallow | own)


def _sub_configs(cls) -> dict:
    """Sub-configs by name: (class, arguments). Raises ValueError if an older version of Transformers does not name
    them: with their defaults they would have full size."""
    found, specs = {}, getattr(cls, "sub_configs_defaults", None)
    if specs is None:
        classes = getattr(cls, "sub_configs", None) or {}
        if AutoConfig in classes.values():
            raise ValueError(f"this version of Transformers does not say what the parts of {cls.__name__} are")
        return {key: (sub, {}) for key, sub in classes.items()}
    for key, spec in specs.items():
        if isinstance(spec.config_class, type) and issubclass(spec.config_class, PreTrainedConfig):
            found[key] = spec.config_class, dict(spec.init_kwargs or {})
        elif spec.model_type:
            found[key] = CONFIG_MAPPING[spec.model_type], dict(spec.init_kwargs or {})
    return found


def _sub(cls, init, own, role):
    sizes = {k: v for k, v in init.items() if k not in TEXT and k not in OTHER and not isinstance(v, (list, tuple))}
    return _tiny(cls, sizes | own, role)


def _text(cls) -> dict:
    """Keywords that make `cls` a tiny text config."""
    fields, names = _fields(cls), getattr(cls, "attribute_map", {})
    made = {key: value for key, value in TEXT.items() if key in fields}
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if names.get(name) in fields:
            made.setdefault(names[name], TEXT[name])
    depth = next((name for name in DEPTHS if name in fields), names.get("num_hidden_layers"))
    if depth:
        made[depth] = LAYERS
    try:
        published = cls()
    except Exception:  # some classes have no defaults that go together
        published = None
    if published is not None:
        made = _like(published, made, fields, depth)
    for name in list(made):
        mapped = names.get(name, name)
        if (mapped != name and mapped in made) or any(
            isinstance(getattr(cls, n, None), property) for n in (name, mapped)
        ):
            del made[name]
    if made.get("kv_lora_rank") and "num_key_value_heads" in made:
        made["num_key_value_heads"] = HEADS
    return made


def _like(published, made, fields, depth) -> dict:
    """The keywords with the class' defaults: kinds of layers, windows, rotation, disabled parts."""
    count = getattr(published, "num_hidden_layers", None) or 0
    lists = {k: v for k, v in vars(published).items() if isinstance(v, (list, tuple)) and not k.startswith("_")}
    lists = {k: list(v) for k, v in lists.items() if count > 4 and len(v) == count and k not in SOURCES}
    kinds = [len(set(map(str, v))) for k, v in lists.items() if k in KINDS]
    layers = max([LAYERS, *(2 * n for n in kinds if n > 2)])
    if depth:
        made[depth] = layers
    for key, values in lists.items():
        different = list({str(v): v for v in values}.values())
        made[key] = (different * layers)[:layers] if len(different) > 1 else values[:1] * layers
    for key in OFF:
        if key in made and made[key] is not None and getattr(published, key, 0) is None:
            del made[key]
    if getattr(published, "sliding_window", None) and "sliding_window" in fields:
        typed = "layer_types" in fields or isinstance(getattr(type(published), "layer_types", None), property)
        made["sliding_window"] = 12 if typed else None
    if "swa_window_size" in fields:
        made["swa_window_size"] = 12
    rope = getattr(published, "rope_parameters", None)
    if rope and (all(isinstance(v, dict) for v in rope.values())
                 or not set(rope) & set(getattr(published, "layer_types", None) or ())):  # fmt: skip
        made["rope_parameters"] = _rope(copy.deepcopy(rope))
    return made


DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
KINDS = ("layer_types", "layers_block_type", "block_types", "_layers_block_type", "attention_layers")
SOURCES = ("id2label", "kv_source_layers", "ple_layer_ids")
OFF = ("q_lora_rank", "moe_intermediate_size", "sliding_window", "num_experts", "n_inner", "top_k_experts",
       "kv_lora_rank", "moe_latent_size", "d_inner", "num_global_key_value_heads", "attention_chunk_size",
       "swa_head_dim")  # fmt: skip


def _rope(rope):
    """Factors for each dimension are of the published head size."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {key: _rope(value) if isinstance(value, dict) else value for key, value in rope.items()}
    if rope.get("mrope_section"):
        rope["mrope_section"] = [4, 6, 6]
    if rope.get("rope_type") == "longrope":
        size = int(DIM * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["short_factor"], rope["long_factor"] = [1.0] * size, [1.5] * size
    return rope


def model(name):
    """`make` of a model type, or the test is skipped."""
    found = dict(types())
    if name not in found:
        pytest.skip(f"this version of Transformers has no {name}")
    return make(name, found[name])


def latent():
    """A model whose cache has latents (MLA), or the test is skipped."""
    made = model("deepseek_v3")
    if not hasattr(made.model.layers[0].self_attn, "expand_kv"):
        pytest.skip("this version of Transformers caches no latents")
    return made


def build(family):
    if family != "qwen3_next":
        return tiny.model(family)
    if tiny.VERSION == (5, 4):
        pytest.skip("Qwen3-Next is refused there")
    return make("qwen3_next", "Qwen3NextForCausalLM")
