"""Every branch on the Transformers version, and the model families that are known to work."""

import inspect
import sys
import types

import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
if VERSION < (5, 4):
    raise ImportError(
        f"kvevict needs transformers >= 5.4, found {transformers.__version__}; run: pip install -U 'transformers>=5.4'"
    )

# crop(n) of a cache layer: up to 5.16 a positive n is the length to keep, later only "remove -n" is left.
CROP_TAKES_LENGTH = VERSION < (5, 17)

# Text decoders whose output was compared with the unpatched model's (tests/hf/test_models.py).
MODEL_TYPES = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe", "olmo2", "granite",
     "gpt_oss")
)  # fmt: skip

OWN, SLIDING = "full attention", "sliding window"


def layer_kinds(config) -> list:
    """What each decoder layer caches: OWN (we may evict), SLIDING (stays), or the name of a kind we refuse."""
    kinds = {DynamicLayer: OWN, DynamicSlidingWindowLayer: SLIDING}
    return [kinds.get(type(layer), type(layer).__name__) for layer in DynamicCache(config=config).layers]


def structural_reasons(config) -> list:
    """Why a model's attention or cache is of a kind that we cannot evict from; empty for those that we can."""
    reasons = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder model; only decoder-only models are supported")
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        reasons.append("its attention is bidirectional; only causal models are supported")
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        reasons.append("ALiBi adds a bias to attention that depends on distance")
    if getattr(config, "kv_lora_rank", None):
        reasons.append("its attention keeps latents shared by all heads (MLA), not keys and values")
    if getattr(config, "num_kv_shared_layers", 0):
        reasons.append("later layers read earlier layers' keys and values (shared KV)")
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    strange = set(types) - {"full_attention", "sliding_attention", "attention"}
    if not reasons:
        strange |= set(layer_kinds(config)) - {OWN, SLIDING}
    if strange:
        reasons.append(f"layers with linear attention, recurrent state or other caches ({', '.join(sorted(strange))})")
    return reasons


def mark_rollbacks(model) -> None:
    """Have assisted and prompt-lookup decoding say so on the cache: its calls bring candidates that may be taken back.
    (`activate_past_recording` comes before our layers are in the cache.)"""
    if hasattr(type(model), "_get_candidate_generator"):
        model._get_candidate_generator = types.MethodType(_get_candidate_generator, model)


def _get_candidate_generator(model, *args, **kwargs):
    cache = kwargs.get("model_kwargs", {}).get("past_key_values")
    if cache is not None:
        cache._kvevict_rollback = True
    return type(model)._get_candidate_generator(model, *args, **kwargs)


def may_roll_back(cache) -> bool:
    return getattr(cache, "_kvevict_rollback", False)


def base_attention(module, config):
    """The attention function that `module` would call without us, under its original config."""
    from transformers import AttentionInterface

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return AttentionInterface().get_interface(config._attn_implementation, eager)


def rotate(decoder, module, x, position_from, position_to):
    """Rotate x [B, H, p, D] by the angle between two positions [B]: R(to) R(from)^-1 x, with the model's own rotary
    frequencies and its own pairing of dimensions. fp32 in, fp32 out."""
    rotary = decoder.rotary_emb
    layer_type = ("full_attention",) if "layer_type" in inspect.signature(type(rotary).forward).parameters else ()
    cos, sin = rotary(x, torch.stack([position_from, position_to], 1).clamp_min(0), *layer_type)  # [B, 2, rotary]
    scale = cos[:, :1].square() + sin[:, :1].square()  # the square of the family's attention scaling
    turn_cos = (cos[:, 1:] * cos[:, :1] + sin[:, 1:] * sin[:, :1]) / scale
    turn_sin = (sin[:, 1:] * cos[:, :1] - cos[:, 1:] * sin[:, :1]) / scale
    return sys.modules[type(module).__module__].apply_rotary_pos_emb(x, x, turn_cos, turn_sin)[0]


def after_attention(layer):
    """The module of a decoder layer whose input is the residual stream with the attention block's output added."""
    if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma2 and 3 normalise what they add
        return layer.pre_feedforward_layernorm
    return layer.post_attention_layernorm if hasattr(layer, "input_layernorm") else layer.mlp  # OLMo2 too


def rope_depends_on_length(decoder) -> bool:
    """Whether the rotary frequencies depend on the longest position of the same call (longrope, dynamic NTK)."""
    kind = getattr(decoder.rotary_emb, "rope_type", "default")
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(k == "longrope" or "dynamic" in k for k in kinds)
