"""Finds the sizes of a model that determine its costs, from its config alone: the model is built on the meta device."""

from dataclasses import dataclass
from typing import Any

import torch

from ...models import families, known, rotary
from ...policy.checks import one_of
from ...policy.kv import slot_bytes

ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of one number


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. Weights are counted in numbers, not bytes."""

    hidden: int
    mlp: int  # most activations of one token in an MLP: gate, up, product, inputs gathered by a mixture
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # each layer's sliding window in tokens; None: full attention
    products: int  # weights of all matrices that a token is multiplied with; of experts, only the chosen
    layer_weights: int  # weights of all layers
    head_weights: int  # weights of the output matrix, which makes the logits
    weights: int  # weights of the whole model; shared weights count once
    element: int  # bytes of a number: a weight, an activation, a component of a key or value
    rope_depends_on_length: bool = False  # rotary frequencies change with the prompt's length
    kv: str = "model"  # how slots are represented (`kvevict.policy.kv.KINDS`)

    @property
    def new_bytes(self) -> int:
        """Bytes of one token's key and value in the model's dtype, before they are stored, in all kv heads of one
        layer."""
        return 2 * self.element * self.head_dim * self.kv_heads

    @property
    def slot_bytes(self) -> int:
        """Bytes of one stored slot, scales included, in all kv heads of one layer."""
        return self.kv_heads * slot_bytes(self.kv, self.head_dim, self.element)

    @property
    def row_bytes(self) -> int:
        """Most bytes that one token's activations take at a time in a Transformers layer: embedding, layer input,
        residual and its norm, rotary cosine and sine, position, and the larger of MLP and rotary embedding of
        queries."""
        attention = (4 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.element * (4 * self.hidden + 2 * self.head_dim + max(self.mlp, attention)) + 8


def shape_of(config: Any, dtype: str = "auto") -> Shape:
    """Return the shape of the text decoder of a Transformers config. dtype="auto" takes the config's dtype, or bfloat16
    if the config has none. Raises ValueError for a model that `kvevict.patch` refuses by its config."""
    whole, config = config, config.get_text_config(decoder=True)
    if dtype == "auto":
        dtype = str(config.dtype or torch.bfloat16).removeprefix("torch.")
    one_of("dtype", dtype, ELEMENT)
    reasons = families.reasons(config)
    kinds = [] if reasons else families.layer_kinds(config)
    if {families.STATE, families.FULL_ATTENTION_AND_STATE, families.NOTHING} & set(kinds):
        reasons = ["it has layers with a state, or without keys and values: their costs are unknown"]
    if reasons:
        raise ValueError(f"model_type {config.model_type!r} cannot be planned: {'; '.join(reasons)}")
    try:
        return _measured(config, (whole.model_type, config.model_type), kinds, dtype)
    except ValueError:
        raise
    except Exception as error:  # a config's numbers may contradict each other
        raise ValueError(
            f"model_type {config.model_type!r} cannot be planned: no model can be made of its config ({error!r})"
        ) from None


def _measured(config: Any, names: tuple, kinds: list, dtype: str) -> Shape:
    """Return the shape of a text decoder's config. `names` are the model's two types, whole and decoder, in
    `kvevict.models.known`; `kinds` are the kinds of its layers."""
    from transformers import AutoModelForCausalLM

    from ...models.refusals import check_model

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    check_model(model)
    decoder = families.find_decoder(model)
    if reason := families.is_transformers(decoder) and known.refused(*names):
        raise ValueError(f"model_type {names[0]!r} cannot be planned, as it cannot be patched: {reason}")
    layers = families.layers_of(decoder)
    matrices = {n: w for n, w in layers.named_parameters() if w.ndim > 1 and not n.endswith("bias")}
    mixture = any(w.ndim == 3 for w in matrices.values())  # the experts share weights [experts, in, out]
    taken = config.num_experts_per_tok if mixture else 1
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    own = kinds.index(families.FULL_ATTENTION)
    fused = any("gate_up" in name for name in matrices)  # one tensor holds gate and up, so gate lives as long as up
    return Shape(
        hidden=config.hidden_size,
        mlp=taken * ((4 if fused else 3) * inner + (config.hidden_size if mixture else 0)),
        heads=config.num_attention_heads,
        kv_heads=families.heads(config)[1],
        head_dim=families.head_dim(families.attention_of(layers[own], own), config),
        windows=tuple(config.sliding_window if kind == families.SLIDING else None for kind in kinds),
        products=sum(w.numel() * taken // len(w) if w.ndim == 3 else w.numel() for w in matrices.values()),
        layer_weights=sum(w.numel() for w in layers.parameters()),
        head_weights=model.get_output_embeddings().weight.numel(),
        weights=sum(w.numel() for w in model.parameters()),
        element=ELEMENT[dtype],
        rope_depends_on_length=rotary.rope_depends_on_length(decoder),
    )
