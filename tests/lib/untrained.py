"""Gates and adapters that nobody trained."""

import json
from itertools import pairwise

import safetensors.torch
import torch

from kvevict.engine.measure import gates
from kvevict.engine.measure.moments import model_of
from kvevict.models import families
from kvevict.train.lookahead import Adapter


def written(folder, made, kind="linear", seed=0):
    """A folder of random gates for a model; the gates' logarithms differ by about 1."""
    generator = torch.Generator().manual_seed(seed)
    decoder = families.find_decoder(made)
    heads, wide = families.slot_heads(decoder.config), decoder.config.hidden_size
    sizes = [wide, 5, heads] if kind == "mlp" else [wide, heads]

    def affine(inputs, outputs):
        weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        return weight, torch.randn(outputs, generator=generator) - 3

    layers = {i: tuple(affine(*pair) for pair in pairwise(sizes)) for i in families.evicting(decoder.config)}
    about = dict(kind=kind, base=model_of(decoder)) | (dict(inner=5) if kind == "mlp" else {})
    gates.Gates(layers, about).save(folder)
    return str(folder)


def published(folder, made, kind="linear", dtype=torch.bfloat16, seed=0):
    """A folder in the layout of KVzap's published gates, for a model with slots of kv heads in every layer. Returns
    them as torch modules, one per layer, as KVzap applies them."""
    config, inner = families.find_decoder(made).config, 5 if kind == "mlp" else None
    sizes = dict(input_dim=config.hidden_size, output_dim=config.num_key_value_heads, hidden_dim=inner)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)

        def module():
            last = torch.nn.Linear(inner or sizes["input_dim"], sizes["output_dim"])
            first = (torch.nn.Linear(sizes["input_dim"], inner), torch.nn.GELU()) if inner else ()
            return torch.nn.Sequential(*first, last) if inner else last

        layers = torch.nn.ModuleList(module() for _ in range(config.num_hidden_layers)).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    about = sizes | dict(model_type="kvzap", architectures=["KVzapModel"], n_modules=len(layers), dtype=str(dtype)[6:])
    (folder / "config.json").write_text(json.dumps(about, indent=2))
    tensors = {f"layers.{name}": x for name, x in layers.state_dict().items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return layers


def adapter(model, tokens=6, seed=0, **options):
    """One that is not zero."""
    torch.manual_seed(seed)
    made = Adapter(model, tokens=tokens, rank=2, **options)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    return made
