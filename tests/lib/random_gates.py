"""Gates that nobody trained."""

from itertools import pairwise

import torch

from kvevict import families
from kvevict.engine import gates
from kvevict.engine.moments import model_of


def written(folder, made, kind="linear", seed=0):
    """A folder of random gates for a model, whose logarithms differ by about 1."""
    generator = torch.Generator().manual_seed(seed)
    decoder = families.find_decoder(made)
    heads, wide = gates.outputs(decoder), decoder.config.hidden_size
    sizes = [wide, 5, heads] if kind == "mlp" else [wide, heads]

    def affine(inputs, outputs):
        weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        return weight, torch.randn(outputs, generator=generator) - 3

    order = [i for i, kind in enumerate(families.layer_kinds(decoder.config)) if kind in families.EVICTS]
    layers = {i: tuple(affine(*pair) for pair in pairwise(sizes)) for i in order}
    about = dict(kind=kind, base=model_of(decoder)) | (dict(inner=5) if kind == "mlp" else {})
    gates.Gates(layers, about).save(folder)
    return str(folder)
