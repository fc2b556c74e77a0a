"""Measures the mean and covariance of a model's queries on a text, for the score `expected` (Expected Attention)."""

import os
from typing import Any

import torch

from ..cautions import bar
from ..engine.hook import installed
from ..engine.measure import moments
from ..engine.measure.rope import Rope
from ..models import families, trial
from ..models.families import base_model, find_decoder
from ..models.refusals import check_model
from ..patch import is_patched
from ..policy.checks import count

SINK = 4  # number of first tokens of a part whose queries are not measured


def measure_queries(
    model: Any, ids: list[int] | torch.Tensor, path: str | os.PathLike, *, length: int = 1000, progress: bool = False
) -> dict[str, Any]:
    """Measure the mean and covariance of a model's queries before rotary embedding, and write them to `path`
    (safetensors), for `kvevict.patch(model, "expected", stats=path)`. Returns the file's metadata about model and text.

    model    loaded model that is not patched, all of it in this process
    ids      token ids of a text, 1-D
    length   number of tokens that are read at once; the first 4 of them are not measured

    Raises ValueError or TypeError for ids or a model that cannot be measured, OSError if the file cannot be written.
    """
    decoder = find_decoder(model)
    check_model(model)
    if is_patched(decoder):
        raise ValueError("queries are measured of the model as it is: call kvevict.unpatch(model) first")
    count("length", length, SINK + 1)
    ids = torch.as_tensor(ids)
    if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"ids must be token ids, a list or a 1-D tensor of integers, got {ids.dtype} {list(ids.shape)}")
    if len(ids) <= SINK:
        raise ValueError(f"ids hold {len(ids)} tokens; give a text of at least {SINK + 1} tokens, better 100,000")
    known = decoder.config.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= known:
        raise ValueError(f"ids must be below {known}, the model's vocabulary, and not negative, got {int(ids.max())}")
    top, found = base_model(model), {}
    rotates = trial.rotating(top, decoder)

    def note(module: Any, query: torch.Tensor, key: torch.Tensor) -> None:
        index, positions = module.layer_idx, torch.arange(query.shape[2], device=query.device)[None]
        rope = Rope(decoder, module, rotates[index])
        found[index] = moments.accumulated(found.get(index), rope, query, positions, positions >= SINK)

    with trial.quiet(top), installed.overheard(top, decoder, note):
        for part in bar(ids.split(length), "measuring", "part", progress):
            decoder(input_ids=part[None].to(families.device_of(decoder)), use_cache=False)
    about = dict(tokens=len(ids), length=length)
    moments.save(path, decoder, {index: each[0].cpu() for index, each in found.items()}, **about)
    return moments.model_of(decoder) | about
