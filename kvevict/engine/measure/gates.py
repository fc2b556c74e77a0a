"""Trained gates (KVzap, METHODS section 9): small networks that predict, from the input of a layer's attention block,
how much each kv head will need a token's slot. A model's gates are stored in a folder."""

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
BESIDE = "kvevict_gates"  # name, inside a model's folder, of the folder with the model's gates
AGAIN = "give a folder that `kvevict train --kind gates` wrote for this model"
KINDS = {"linear": 1, "mlp": 2}  # kind of gate -> number of affine maps in a layer's gate
_loaded: WeakKeyDictionary = WeakKeyDictionary()  # decoder -> (folder, Gates)
_named: WeakKeyDictionary = WeakKeyDictionary()  # decoder -> the last folder that a policy named


@dataclass
class Gates:
    """The gates of a model, one for each decoder layer that evicts.

    layers   {layer: ((weight [outputs, inputs], bias [outputs]), ..)} fp32: one affine map ("linear"), or two with GELU
             between them ("mlp"). The last map's outputs are the logarithms of a token's scores, one per kv head
    about    entries of config.json: `kind`, the base model, how the gates were trained, and measurements
    """

    layers: dict
    about: dict

    def logs(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """Compute the logarithms of the tokens' scores, fp32 [B, T, kv heads], from the input x [B, T, E] of a layer's
        attention block."""
        first, *rest = self.layers[layer]
        x = F.linear(x.float(), *first)
        for affine in rest:
            x = F.linear(F.gelu(x), *affine)
        return x

    def numbers(self, layer: int, ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
        """Compute the tokens' scores in this rank's kv heads, fp32 [B, Hkv, T], from the input x [B, T, E] of a layer's
        attention block. This moves the layer's gates to x's device."""
        self.layers[layer] = tuple(tuple(each.to(x.device) for each in affine) for affine in self.layers[layer])
        return ranks.mine(self.logs(layer, x).exp().transpose(1, 2))

    def save(self, folder: str | os.PathLike) -> None:
        """Write the gates to a folder, as gates.safetensors and config.json. Raises OSError if that fails."""
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
    """Read the gates that `kvevict.gates.train` wrote to a folder for this model, without running code of the folder.
    Raises ValueError if the folder has no gates, if they are damaged, or, naming the difference, if they are another
    model's."""
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
    """Return a decoder's gates, which are read from the folder once, or again with `anew`, as its files may have
    changed. With folder=None `own` finds the folder; it prefers the last folder that was passed here."""
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
    """The folder of a model's gates: the last folder that a policy named, or else `BESIDE` in the model's folder;
    None: neither exists."""
    named = _named.get(decoder)
    if named is not None and (Path(named) / CONFIG).is_file():
        return Path(named)
    name = getattr(decoder.config, "_name_or_path", "")
    return Path(name) / BESIDE if name and (Path(name) / BESIDE / CONFIG).is_file() else None


def fit(decoder: torch.nn.Module) -> bool:
    """Whether the folder that `own` finds has gates for the decoder's present weights. Raises ValueError for a damaged
    folder."""
    folder = own(decoder)
    return folder is not None and not other_model(_config(folder, repr(os.fspath(folder)))["base"], decoder)


def _config(folder: Path, name: str) -> dict[str, Any]:
    """Read and check a folder's config.json. name: the folder's name in error messages."""
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
