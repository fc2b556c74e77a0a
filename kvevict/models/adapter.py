"""The trained part of LookaheadKV (eviction by learned lookahead rows): the embeddings of these rows, and a low-rank
adapter (LoRA) that is applied to these rows only."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..context import context, within
from ..policy.checks import at_least_0, count, parsed
from ..store import sealed
from . import experts, families
from .weights import differ, fingerprint

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SETS = {"all": TARGETS, "qv": ("q_proj", "v_proj"), "none": ()}  # the variants of table 5 of the LookaheadKV paper
FORMAT, VERSION = "kvevict lookahead", 2
WEIGHTS, CONFIG = "adapter_model.safetensors", "config.json"
# In the file: the name of the embeddings, and the prefix of each LoRA's name (PEFT's for a causal model's decoder)
EMBEDDINGS, PREFIX = "lookahead_embeddings", "base_model.model.model."
# Fields of a model's config that must be equal in the model that an adapter was trained on and the one that uses it
BASE = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip


class LoRA(nn.Module):
    """A low-rank map of x [.., inputs] to scale * B A x [.., outputs]. B, and so the result, is 0 before training."""

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float, device: torch.device) -> None:
        super().__init__()
        self.lora_A = nn.Linear(inputs, rank, bias=False, device=device, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, outputs, bias=False, device=device, dtype=torch.float32)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * self.scale


class Adapter(nn.Module):
    """Learned embeddings of `tokens` lookahead rows, and a LoRA of a decoder's linear layers that is active for these
    rows only.

    model    the loaded model that the adapter is for (a causal model, its decoder, or either under PEFT); it is not
             changed
    tokens   number of lookahead rows n_la
    rank     rank of the LoRA
    alpha    the LoRA's output is multiplied by alpha / rank
    targets  the linear layers with a LoRA: "all", "qv", "none" (embeddings only), or names among q_proj, k_proj,
             v_proj, o_proj, gate_proj, up_proj, down_proj. If a family of models fuses some of these layers, the parts
             of the fused layer keep these names. Experts of a mixture have no LoRA.

    Linear layers after the keys of the last evicting layer cannot change a score and have no LoRA (METHODS section 6).
    Parameters are float32, on the model's device. Raises ValueError or TypeError for options that do not fit.
    """

    def __init__(
        self, model: Any, tokens: int = 32, rank: int = 8, alpha: float = 32, targets: str | Iterable[str] = "all"
    ) -> None:
        super().__init__()
        decoder = _decoder(model)
        count("tokens", tokens, 1)
        count("rank", rank, 1)
        at_least_0("alpha", alpha, positive=True)
        self.tokens, self.rank, self.alpha, self.targets = tokens, rank, alpha, targets_of(targets)
        self.base, self.weights = base_of(decoder), fingerprint(decoder)
        embedding = decoder.get_input_embeddings()
        device = families.device_of(embedding)
        self.layers = nn.ModuleDict()
        for path, inputs, outputs in sizes(decoder, self.targets):
            index, block, name = path
            layer = _inner(_inner(self.layers, str(index)), block)
            layer[name] = LoRA(inputs, outputs, rank, alpha / rank, device)
        with torch.no_grad():  # the learned embeddings start as those of random tokens
            ids = torch.randint(embedding.weight.shape[0], (tokens,), device=device)
            self.embeddings = nn.Parameter(embedding(ids).detach().clone().float())

    @contextlib.contextmanager
    def on(self, decoder: Any) -> Iterator["Adapter"]:
        """Apply the LoRA to the last `tokens` rows of every call of the decoder in this block and thread. In these
        calls a mixture's experts are called separately for the last rows and for the others (experts.py)."""
        token = object()
        hooks = [
            module.register_forward_hook(_Add(token, parts, self.tokens)) for module, parts in self._places(decoder)
        ]
        hooks += experts.hooks(decoder, self.tokens, lambda: context().adapter is token)
        try:
            with within(adapter=token):
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def _places(self, decoder: Any) -> Iterator[tuple[nn.Module, list]]:
        """Yield (linear module, [(first output, LoRA), ..]) for every linear module with a LoRA. The outputs of a LoRA
        are added to the module's outputs from `first output` on; a module of fused layers may have several LoRAs."""
        layers: Any = self.layers
        for index, blocks in layers.items():
            for block, own in blocks.items():
                for module, pieces in linears(decoder.layers[int(index)], block):
                    parts = [(start, own[name]) for name, start, _ in pieces if name in own]
                    if parts:
                        yield module, parts

    def check(self, model: Any) -> None:
        """Raise ValueError, naming the difference, if the adapter was made for a model of other sizes or weights."""
        _check(self.base, self.weights, _decoder(model))

    def save(self, folder: str | Path, dtype: torch.dtype | None = None, **about: object) -> None:
        """Write the adapter to a folder: adapter_model.safetensors, in which the LoRA has PEFT's names, and
        config.json, which has a checksum of both. Each file is written completely or not at all. dtype: dtype of the
        saved tensors (None: unchanged); about: further fields of config.json. Raises OSError if the files cannot be
        written."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            _name_in_file(name): value.detach().to("cpu", dtype or value.dtype).contiguous()
            for name, value in self.state_dict().items()
        }
        config = dict(format=FORMAT, version=VERSION, tokens=self.tokens, rank=self.rank, alpha=self.alpha)
        config |= dict(targets=list(self.targets), base=self.base, weights=self.weights, **about)
        sealed.write_pair(folder / WEIGHTS, folder / CONFIG, tensors, config)


class _Add:
    """Forward hook of a linear module: in the last `rows` rows, add to the module's output what its LoRAs compute from
    its input."""

    def __init__(self, token: object, parts: list, rows: int) -> None:
        self.token, self.parts, self.rows = token, parts, rows

    def __call__(self, module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        if context().adapter is not self.token:
            return
        x, last = args[0][..., -self.rows :, :], output[..., -self.rows :, :]
        for start, lora in self.parts:
            delta = lora(x)
            last[..., start : start + delta.shape[-1]] += delta.to(output.dtype)


def load(folder: str | Path, model: Any) -> Adapter:
    """Read the adapter that `Adapter.save` wrote to a folder, without running code of the folder, and put it on the
    model's device. Raises ValueError if the folder has no adapter, if the adapter is damaged, or, naming the
    difference, if it is another model's."""
    folder, config = Path(folder), config_of(folder)
    try:
        tensors = sealed.tensors_of_pair(folder / WEIGHTS, folder / CONFIG)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"adapter {str(folder)!r}: {WEIGHTS} is missing or damaged ({error}); train or copy it anew"
        ) from error
    _check(config["base"], config["weights"], _decoder(model))
    made = Adapter(model, config["tokens"], config["rank"], config["alpha"], tuple(config["targets"]))
    made.weights = config["weights"]
    wanted = {_name_in_file(name): name for name in made.state_dict()}
    sizes = {name: tuple(made.state_dict()[own].shape) for name, own in wanted.items()}
    for name in sizes | tensors:
        found = tuple(tensors[name].shape) if name in tensors else None
        if sizes.get(name) != found:
            raise ValueError(
                f"adapter {str(folder)!r}: tensor {name} is {found or 'missing'}, its {CONFIG} wants "
                f"{sizes.get(name) or 'none'}; train or copy it anew"
            )
    made.load_state_dict({own: tensors[name].float() for name, own in wanted.items()})
    return made


def config_of(folder: str | Path) -> dict[str, Any]:
    """Read the fields of config.json in the folder of a saved adapter. Raises ValueError if the file is not an
    adapter's config."""
    path = Path(folder) / CONFIG
    try:
        config = parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"adapter {str(folder)!r} is not the folder of a lookahead adapter: {error}; give a trained one"
        ) from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f"{path} is not the config of a {FORMAT} adapter; give a folder that has one")
    if config.get("version") != VERSION:
        raise ValueError(
            f"{path} is of version {config.get('version')!r} of a {FORMAT} adapter, this kvevict reads version "
            f"{VERSION}; train it anew"
        )
    missing = {"tokens", "rank", "alpha", "targets", "base", "weights"} - config.keys()
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}; train or copy the adapter anew")
    if not isinstance(config["base"], dict):
        raise ValueError(f"{path}: base must be an object, got {config['base']!r}; train or copy the adapter anew")
    count(f"{path}: tokens", config["tokens"], 1)
    return config


def bundled() -> str:
    """Return the folder of the adapter that comes with the package, for its small model (`kvevict.small_llama()`)."""
    return str(Path(__file__).with_name("small_llama_lookahead"))


def targets_of(targets: str | Iterable[str]) -> tuple[str, ...]:
    """Return `targets`, an option of `Adapter`, as names of linear layers in the order of TARGETS."""
    names = SETS.get(targets) if isinstance(targets, str) else tuple(targets)
    if names is None or not set(names) <= set(TARGETS):
        raise ValueError(f"targets must be one of {', '.join(SETS)}, or names of {', '.join(TARGETS)}, got {targets!r}")
    return tuple(name for name in TARGETS if name in names)


def base_of(decoder: Any) -> dict[str, Any]:
    """Return the facts about a decoder's config that an adapter depends on: the fields `BASE`, with the head
    dimension that its attention uses."""
    found = {name: getattr(decoder.config, name, None) for name in BASE}
    return found | dict(head_dim=decoder.layers[0].self_attn.head_dim)


def _check(base: dict[str, Any], weights: Any, decoder: Any) -> None:
    for field, value in base_of(decoder).items():
        if base.get(field) != value:
            raise ValueError(
                f"this lookahead adapter is for another model: its {field} is {base.get(field)!r}, this model's is "
                f"{value!r}; give the adapter that was trained on this model, or train one"
            )
    own = fingerprint(decoder)
    if differ(weights, own):
        raise ValueError(
            f"this lookahead adapter is for another model: the weights that it was trained on are {weights!r}, this "
            f"model's {own!r}; give the adapter that was trained on these weights (with the same PEFT adapters on), or "
            "train one"
        )


def sizes(decoder: Any, targets: Iterable[str]) -> Iterator[tuple[tuple, int, int]]:
    """Yield ((layer, block, name), number of inputs, number of outputs) of every linear layer named in `targets` whose
    output can change a score."""
    last = max(i for i, kind in enumerate(families.layer_kinds(decoder.config)) if kind == families.FULL_ATTENTION)
    for index in range(last + 1):
        for block in ("self_attn", "mlp"):
            for module, pieces in linears(decoder.layers[index], block):
                for name, _, outputs in pieces:
                    if name in targets and (index < last or name in ("q_proj", "k_proj")):
                        yield (index, block, name), module.in_features, outputs


def linears(layer: nn.Module, block: str) -> Iterator[tuple[Any, list]]:
    """Yield (linear module, its pieces [(name, first output, number of outputs), ..]) for a block of a decoder layer. A
    module in which a family of models fuses several linear layers has one piece for each of them."""
    parent = getattr(layer, block)
    if hasattr(parent, "qkv_proj"):
        config, dim = parent.config, parent.head_dim
        q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
        yield parent.qkv_proj, [("q_proj", 0, q), ("k_proj", q, kv), ("v_proj", q + kv, kv)]
    if hasattr(parent, "gate_up_proj"):
        half = parent.gate_up_proj.out_features // 2
        yield parent.gate_up_proj, [("gate_proj", 0, half), ("up_proj", half, half)]
    for name in TARGETS:
        if hasattr(parent, name):
            module = getattr(parent, name)
            yield module, [(name, 0, module.out_features)]


def _decoder(model: Any) -> Any:
    decoder = families.find_decoder(model)
    if not all(hasattr(layer, "self_attn") and hasattr(layer, "mlp") for layer in families.layers_of(decoder)):
        raise ValueError(
            f"a lookahead adapter needs layers of `self_attn` and `mlp`, which {type(decoder).__name__} does not have: "
            "choose another policy"
        )
    return decoder


def _inner(modules: nn.ModuleDict, name: str) -> Any:
    if name not in modules:
        modules[name] = nn.ModuleDict()
    return modules[name]


def _name_in_file(name: str) -> str:
    return EMBEDDINGS if name == "embeddings" else PREFIX + name
