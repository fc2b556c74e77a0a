"""Runs of a model under several policies, beside the unpatched model."""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from ...engine.hook.installed import using
from ...models.families import base_model, find_decoder
from ...patch import evicting
from ...policy.building import Chosen, choose
from .cost import UNPATCHED
from .run import measure

# Largest difference of logits, relative to the largest logit: rounding of the dtype, summed in another order.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}


def slots(seen: dict) -> str:
    """Kept slots per kv head, the range over layers and heads, from the report of a batch of one row."""
    counts = [count for layer in seen["kept"] if layer is not None for count in layer[0]]
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least}..{most}"


def held(run: dict, seen: dict) -> tuple:
    """(slots per kv head, bytes) of the cache after a run of `measure`. seen: the report of any patched run of the same
    prompt, to compute the unpatched model's slots and bytes."""
    own = run.get("report")
    return (slots(own), own["cache_bytes"]) if own else (str(seen["seen"][0]), seen["full_cache_bytes"])


COSTS = ("slots/head", "KV MiB", "read s", "decode s", "peak growth MiB")


def costs(run: dict, slots: str, cache_bytes: int) -> list:
    """The texts of the columns `COSTS`."""
    seconds = [f"{run[key]:.2f}" for key in ("read_seconds", "decode_seconds")]
    return [slots, f"{cache_bytes / 2**20:.2f}", *seconds, f"{run['peak_bytes'] / 2**20:.1f}"]


def check(model: Any, ids: torch.Tensor, name: str, chosen: Chosen, max_new_tokens: int) -> None:
    """Generate greedily with a budget that holds everything, all layers reading all tokens, patched and not.

    Raises ValueError unless the logits agree to `TOLERANCE` as long as the tokens are the same. If two tokens are
    equally likely within rounding, either may come, and later tokens are not compared.
    """
    options = dict(
        attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    with using(base_model(model), find_decoder(model), None):  # so that one row's products are rounded alike
        want = model.generate(ids, **options)
    ample = choose(chosen, budget=ids.shape[1] + max_new_tokens, threshold=None, tsp=None, kv="model")
    with evicting(model, ample, tokenizer=False):
        got = model.generate(ids, **options)
    allowed = TOLERANCE[next(model.parameters()).dtype]
    for step, (a, b) in enumerate(zip(want.logits, got.logits)):
        error = float((a - b).abs().max() / a.abs().max())
        if not error <= allowed:
            raise ValueError(
                f"policy {name}: the logits of new token {step} are not the unpatched model's though "
                f"nothing was evicted (off by {error:.2g} of the largest, allowed is {allowed}); nothing was timed"
            )
        if int(a.argmax()) != int(b.argmax()):
            return


def alternate(
    model: Any,
    ids: torch.Tensor,
    policies: dict[str, Chosen],
    max_new_tokens: int,
    repeat: int,
    progress: Callable[[], Any] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Name -> medians of `repeat` runs of the model as it is and of each policy, interleaved so that a machine that
    slows down slows all of them: read_seconds, decode_tokens_per_second, peak_bytes, cache_bytes; and `slots`, kept per
    kv head."""
    runs = {name: [] for name in (UNPATCHED, *policies)}
    for _ in range(repeat):
        for name, made in runs.items():
            made.append(measure(model, None, ids, policies.get(name), max_new_tokens))
            progress()
    seen = next(made[0]["report"] for name, made in runs.items() if name != UNPATCHED)
    full = seen["full_cache_bytes"]
    return {name: medians(made, full) | dict(slots=held(made[0], seen)[0]) for name, made in runs.items()}


def medians(made: list, full: int) -> dict:
    def median(value: Any) -> float:
        return statistics.median(value(run) for run in made)

    return dict(
        read_seconds=median(lambda run: run["read_seconds"]),
        decode_tokens_per_second=median(lambda run: (run["new_tokens"] - 1) / run["decode_seconds"]),
        peak_bytes=median(lambda run: run["peak_bytes"]),
        cache_bytes=made[0]["report"]["cache_bytes"] if "report" in made[0] else full,
    )
