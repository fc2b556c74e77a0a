"""Runs of a model under several policies, next to the model as it is: what `bench`, `demo` and `inspect` share."""

import dataclasses
import statistics

import torch

from .patch import evicting, report
from .run import measure

UNPATCHED = "unpatched"
# Largest difference of logits, relative to the largest logit: rounding of the dtype, summed in another order.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}


def look(model, tokenizer, ids, policy, max_new_tokens) -> dict:
    """`kvevict.run.measure` of a policy, with the kept positions in its report."""
    with evicting(model, policy):
        run = measure(model, tokenizer, ids, None, max_new_tokens)
        return run | {"report": report(model, positions=True)}


def full_cache_bytes(seen: dict) -> int:
    """Bytes of the same layers' keys and values with nothing evicted, from the report of a batch of one row."""
    slots = [count for layer in seen["kept"] if layer is not None for count in layer[0]]
    return seen["cache_bytes"] // sum(slots) * seen["seen"][0] * len(slots)


def check(model, ids, name, policy, max_new_tokens) -> None:
    """Generate greedily with a budget that holds everything, patched and not.

    Raises ValueError unless the logits agree to `TOLERANCE` for as long as the tokens are the same. Where two tokens
    are equally likely within rounding, either may come, and what follows is not compared.
    """
    options = dict(
        attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    want = model.generate(ids, **options)
    with evicting(model, dataclasses.replace(policy, budget=ids.shape[1] + max_new_tokens)):
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


def alternate(model, ids, policies: dict, max_new_tokens, repeat, progress=lambda: None) -> dict:
    """Name -> medians of `repeat` runs of the model as it is and of each policy, taking turns so that a machine that
    slows down slows all of them: read_seconds, decode_tokens_per_second, peak_bytes, cache_bytes."""
    runs = {name: [] for name in (UNPATCHED, *policies)}
    for _ in range(repeat):
        for name, made in runs.items():
            made.append(measure(model, _NoText, ids, policies.get(name), max_new_tokens))
            progress()
    full = next(full_cache_bytes(made[0]["report"]) for name, made in runs.items() if name != UNPATCHED)
    return {name: medians(made, full) for name, made in runs.items()}


class _NoText:
    """A tokenizer for runs whose answer nobody reads: random weights have none."""

    @staticmethod
    def decode(ids, **options):
        return None


def medians(made: list, full: int) -> dict:
    def median(value):
        return statistics.median(value(run) for run in made)

    return dict(
        read_seconds=median(lambda run: run["read_seconds"]),
        decode_tokens_per_second=median(lambda run: (run["new_tokens"] - 1) / run["decode_seconds"]),
        peak_bytes=median(lambda run: run["peak_bytes"]),
        cache_bytes=made[0]["report"]["cache_bytes"] if "report" in made[0] else full,
    )
