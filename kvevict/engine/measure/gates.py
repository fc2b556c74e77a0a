"""Trained gates (METHODS section 9): they predict, from the input of a layer's attention block, how much each kv head
will need a token's slot. A folder holds them."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from ...models import families
from ...policy.checks import parsed
from ...store import sealed
from ..memory.ranks import Ranks
from .moments import other_model

FORMAT, VERSION = "kvevict gates", 1
WEIGHTS, CONFIG = "gates.safetensors", "config.json"
BESIDE = "kvevict_gates"  # the folder of a model's gates, inside the model's folder
AGAIN = "give a folder that `kvevict train --kind gates` wrote for this model"
KINDS = {"linear": 1, "mlp": 2}  # kind of gate -> number of affine maps in a layer
_loaded: WeakKeyDictionary = WeakKeyDictionary()  # decoder -> (folder, Gates)
_named: WeakKeyDictionary = WeakKeyDictionary()  # decoder -> the folder that a policy last named


@dataclass
class Gates:
    """Gates of a model, by decoder layer.

    layers   {layer: ((weight [outputs, inputs], bias [outputs]), ..)} fp32: one affine map ("linear"), or two with GELU
             between them ("mlp"). The last one's outputs are logarithms of scores, one per kv head
    about    entries of config.json: `kind`, the base model, how the gates were trained, and measurements
    """

    layers: dict
    about: dict

    def logs(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Logarithms of the tokens' scores, fp32 [B, T, heads], from the inputs x [B, T, E] of a layer's attention."""
        first, *rest = self.layers[layer]
        x = F.linear(x.float(), *first)
        for affine in rest:
            x = F.linear(F.gelu(x), *affine)
        return x

    def numbers(self, layer: int, ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
        """The tokens' scores in this rank's kv heads, fp32 [B, Hkv, T], from the inputs x [B, T, E] of a layer's
        attention. The layer's gates move to x's device."""
        self.layers[layer] = tuple(tuple(each.to(x.device) for each in affine) for affine in self.layers[layer])
        return ranks.mine(self.logs(layer, x).exp().transpose(1, 2))

    def save(self, folder: str | os.PathLike) -> None:
        """Write gates.safetensors and config.json to a folder. Raises OSError if they cannot be written."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for layer, affines in self.layers.items():
            for number, (weight, bias) in enumerate(affines):
                tensors[f"{layer}.{number}.weight"] = weight.cpu().contiguous()
                tensors[f"{layer}.{number}.bias"] = bias.cpu().contiguous()
        facts = dict(format=FORMAT, version=VERSION) | self.about
        sealed.write_pair(folder / WEIGHTS, folder / CONFIG, tensors, facts)


def load(folder: str | Path, model: Any) -> Gates:
    """The gates in a folder that `kvevict.gates.train` wrote for this model. No code of the folder is run. Raises
    ValueError for a folder without gates, for damaged ones, and for another model's (naming the difference)."""
    decoder, name = families.find_decoder(model), repr(os.fspath(folder))
    config = _config(Path(folder), name)
    if other := other_model(config["base"], decoder):
        raise ValueError(f"gates: {name} is of another model: {other}; {AGAIN}")
    try:
        tensors = sealed.tensors_of_pair(Path(folder) / WEIGHTS, Path(folder) / CONFIG)
    except (OSError, ValueError) as error:
        raise ValueError(f"gates: {WEIGHTS} in {name} is missing or damaged ({error}); {AGAIN}") from None
    wide, narrow, count = decoder.config.hidden_size, config.get("inner"), KINDS[config["kind"]]
    sizes = [wide, *[narrow] * (count - 1), families.slot_heads(decoder.config)]
    layers = {}
    for layer in families.evicting(decoder.config):
        affines = []
        for number in range(count):
            pair = [tensors.get(f"{layer}.{number}.{part}") for part in ("weight", "bias")]
            wanted = [(torch.float32, (sizes[number + 1], sizes[number])), (torch.float32, (sizes[number + 1],))]
            if [None if x is None else (x.dtype, tuple(x.shape)) for x in pair] != wanted:
                raise ValueError(f"gates: {name} is damaged: its tensors of layer {layer} do not fit; {AGAIN}")
            affines.append(tuple(pair))
        layers[layer] = tuple(affines)
    return Gates(layers, {key: value for key, value in config.items() if key not in ("format", "version", sealed.NAME)})


def loaded(folder: str | None, decoder: torch.nn.Module, anew: bool = False) -> Gates:
    """`load` gates once for a decoder, or anew, since the folder may hold others now. folder None: the one that `own`
    finds, which is the last one named here, if any was."""
    known = None if anew else _loaded.get(decoder)
    if known is None or known[0] != folder:
        found = own(decoder) if folder is None else folder
        if found is None:
            raise ValueError(
                "gates is missing: the folder of gates that were trained on this model, which `kvevict train --kind "
                f"gates` makes; it may also lie in the model's folder, as {BESIDE}"
            )
        known = _loaded[decoder] = folder, load(found, decoder)
        if folder is not None:
            _named[decoder] = folder
    return known[1]


def own(decoder: Any) -> Path | None:
    """The folder of a model's gates: the last one named by a policy, or the one in the model's folder; None: no
    folder."""
    named = _named.get(decoder)
    if named is not None and (Path(named) / CONFIG).is_file():
        return Path(named)
    name = getattr(decoder.config, "_name_or_path", "")
    return Path(name) / BESIDE if name and (Path(name) / BESIDE / CONFIG).is_file() else None


def fit(decoder: torch.nn.Module) -> bool:
    """Whether `own` finds gates trained on the decoder's present weights. Raises ValueError for a damaged folder."""
    folder = own(decoder)
    return folder is not None and not other_model(_config(folder, repr(os.fspath(folder)))["base"], decoder)


def _config(folder: Path, name: str) -> dict[str, Any]:
    """The checked content of a folder's config.json. name: the folder in error messages."""
    try:
        config = parsed((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"gates: {name} is not a folder of gates ({error}); {AGAIN}") from None
    if not isinstance(config, dict) or config.get("format") != FORMAT or config.get("version") != VERSION:
        raise ValueError(f"gates: {CONFIG} in {name} is not of {FORMAT}, version {VERSION}; {AGAIN}")
    kind = config.get("kind")
    whole = isinstance(config.get("base"), dict) and isinstance(kind, str) and kind in KINDS
    if not whole or (kind == "mlp" and not isinstance(config.get("inner"), int)):
        raise ValueError(f"gates: {CONFIG} in {name} lacks its kind, sizes or base model; {AGAIN}")
    return config
