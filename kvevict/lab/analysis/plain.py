"""The sizes of a model with Llama's layout, from its config.json alone: without Transformers, and without a model.

Any other model `read` leaves to `kvevict.lab.analysis.shape`, with all of Transformers' checks.
"""

from dataclasses import dataclass
from pathlib import Path

from ...policy.checks import one_of, parsed
from .shape import ELEMENT, Shape


@dataclass(frozen=True)
class Layout:
    """How a model type differs from Llama. Optional biases are there where the config's option says so.

    qkv_bias   queries, keys and values always have a bias
    options    bool options that give a bias: "attention_bias" (queries, keys, values, output), "mlp_bias"
    norms      queries and keys have a norm per head
    switch     a sliding window counts for nothing where use_sliding_window is false
    needs      keys without which the config does not say how large the model is
    """

    qkv_bias: bool = False
    options: tuple = ()
    norms: bool = False
    switch: bool = False
    needs: tuple = ("num_key_value_heads",)


LAYOUTS = {
    "llama": Layout(options=("attention_bias", "mlp_bias"), needs=()),
    "mistral": Layout(needs=("num_key_value_heads", "sliding_window")),  # with one by default
    "qwen2": Layout(qkv_bias=True, switch=True),
    "qwen3": Layout(options=("attention_bias",), norms=True, switch=True, needs=("num_key_value_heads", "head_dim")),
}
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
# Keys of other layouts, where they are not false.
OTHERS = (
    "_attn_implementation", "alibi", "attention_chunk_size", "attn_implementation", "auto_map", "is_encoder_decoder",
    "kv_lora_rank", "moe_intermediate_size", "num_experts", "num_kv_shared_layers", "per_layer_config",
    "quantization_config", "use_bidirectional_attention", "use_sliding_window",
)  # fmt: skip
WIDEST = 512  # dimensions of a head; the kernels take multiples of 8
# Kinds of rotary frequencies that do not depend on a prompt's length, with the numbers that they need.
ROTARY = {
    "default": (), "linear": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}  # fmt: skip


def read(name: str, dtype: str = "auto") -> tuple | None:
    """(`Shape`, context in tokens) of a model's folder or config.json, as `shape_of` says it; None: Transformers has to
    tell."""
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = parsed(file.read_bytes()) if file.suffix == ".json" else None
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    layout = LAYOUTS.get(str(config.get("model_type")))
    if layout is None or not _is_plain(config, layout):
        return None
    return _shape(config, layout, dtype), config["max_position_embeddings"]


def _is_plain(config, layout) -> bool:
    """Whether a config says all that the sizes depend on, and nothing of another layout."""
    windowed = config.get("sliding_window") is not None and not (layout.switch and "use_sliding_window" in config)
    if windowed or any(config.get(key) for key in OTHERS) or config.get("is_causal") is False:
        return False
    if any(key not in config for key in layout.needs) or not all(_is_size(config.get(key)) for key in SIZES):
        return False
    if not all(isinstance(config.get(key, False), bool) for key in (*layout.options, "tie_word_embeddings")):
        return False
    types, pad = config.get("layer_types"), config.get("pad_token_id")
    if types is not None and types != ["full_attention"] * config["num_hidden_layers"]:
        return False
    if pad is not None and not (type(pad) is int and 0 <= pad < config["vocab_size"]):
        return False
    heads, kv_heads, head_dim = _heads(config)
    if not (_is_size(kv_heads) and _is_size(head_dim) and config.get("hidden_act", "silu") == "silu"):
        return False
    fit = config["hidden_size"] % heads == 0 and heads % kv_heads == 0 and head_dim % 8 == 0 and head_dim <= WIDEST
    return fit and all(_is_rotary(config.get(key)) for key in ("rope_scaling", "rope_parameters"))


def _is_size(value) -> bool:
    return type(value) is int and 0 < value < 2**31  # Transformers refuses larger ones, with its error


def _is_rotary(rope) -> bool:
    if rope is None:
        return True
    needs = ROTARY.get(str(rope.get("rope_type", rope.get("type", "default")))) if isinstance(rope, dict) else None
    return needs is not None and all(type(rope.get(key)) in (int, float) for key in needs)


def _heads(config) -> tuple:
    """(query heads, kv heads, width of a head)."""
    heads = config["num_attention_heads"]
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    kv_heads = heads if kv_heads is None else kv_heads
    return heads, kv_heads, config["hidden_size"] // heads if head_dim is None else head_dim


def _shape(config, layout, dtype) -> Shape:
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    one_of("dtype", dtype, ELEMENT)
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads, head_dim = _heads(config)
    queries, keys, head = heads * head_dim, kv_heads * head_dim, config["vocab_size"] * hidden
    products = layers * hidden * (2 * queries + 2 * keys + 3 * inner)
    more = 2 * hidden + 2 * head_dim * layout.norms  # norms of a layer, and biases
    attention_bias = "attention_bias" in layout.options and config.get("attention_bias", False)
    more += (queries + 2 * keys) * (layout.qkv_bias or attention_bias) + hidden * attention_bias
    more += (2 * inner + hidden) * ("mlp_bias" in layout.options and config.get("mlp_bias", False))
    in_layers, tied = products + layers * more, config.get("tie_word_embeddings", False)
    return Shape(
        hidden=hidden, mlp=3 * inner, heads=heads, kv_heads=kv_heads, head_dim=head_dim, windows=(None,) * layers,
        products=products, layer_weights=in_layers, head_weights=head,
        weights=in_layers + hidden + head * (1 if tied else 2), element=ELEMENT[dtype],
    )  # fmt: skip
