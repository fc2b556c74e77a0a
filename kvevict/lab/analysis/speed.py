"""Compares runs of a model under several policies with runs of the unpatched model."""

from collections.abc import Callable
from statistics import median
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ...engine.hook.installed import using
from ...models.families import base_model, find_decoder
from ...patch import evicting
from ...policy.building import Chosen, choose
from .cost import UNPATCHED
from .run import measure

T = TypeVar("T")

# The largest allowed ratio of the patched model's distance from the exact logits to the unpatched model's distance.
# Both distances come from rounding in different orders of sums, so their ratio is that of the lengths of two random
# vectors. If these have as many independent components as tokens are decoded, the ratio exceeds 4 in one of 2,700
# models with 8 tokens, the smallest number.
ALLOWED = 4
DECODED = 32  # number of the prompt's last tokens that are decoded, at most half of the prompt


def slots(seen: dict) -> str:
    """Format the kept slots per kv head, as a range over layers and heads. `seen` is the report of a read of one
    row."""
    counts = [count for layer in seen["kept"] if layer is not None for count in layer[0]]
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least}..{most}"


def held(run: dict, seen: dict) -> tuple:
    """Return (slots per kv head, bytes) of the cache after a run of `measure`. For an unpatched run, whose result has
    no report, they come from `seen`, the report of any patched run of the same prompt."""
    own = run.get("report")
    return (slots(own), own["cache_bytes"]) if own else (str(seen["seen"][0]), seen["full_cache_bytes"])


COSTS = ("slots/head", "KV MiB", "read s", "decode s", "peak growth MiB")


def costs(run: dict, slots: str, cache_bytes: int) -> list:
    """Format the columns `COSTS` of a run of `measure`."""
    seconds = [f"{run[key]:.2f}" for key in ("read_seconds", "decode_seconds")]
    return [slots, f"{cache_bytes / 2**20:.2f}", *seconds, f"{run['peak_bytes'] / 2**20:.1f}"]


class Wide(TorchFunctionMode):
    """Lets a model with 16-bit weights compute in fp32, and one with fp32 weights in float64, where torch can. Each
    weight is cast when it is read."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        wide = torch.float64 if dtype == torch.float32 else torch.float32
        below = [each for each in (torch.bfloat16, torch.float16, torch.float32) if each != wide]
        self.wider, self.narrower = dict.fromkeys(below, wide), {wide: dtype}

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        given, name = (args, kwargs or {}), func.__name__
        if name in ("__get__", "__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__")):
            return func(*given[0], **given[1])  # an in-place operation keeps its tensor's dtype
        args, kwargs = _cast(given, self.wider)
        if name in ("float", "half", "bfloat16"):
            return args[0].to(_cast(getattr(torch, name), self.wider))
        try:
            return func(*args, **kwargs)
        except RuntimeError:  # torch has no grouped matrix product for float64
            args, kwargs = _cast(given, self.narrower)
            return func(*args, **kwargs)


def _cast(values: T, to: dict[torch.dtype, torch.dtype]) -> T:
    """Cast all tensors in nested values, and replace all dtypes, from the keys of `to` to its values."""

    def one(x: object) -> object:
        if isinstance(x, torch.Tensor):
            return x.to(to.get(x.dtype, x.dtype))
        return to.get(x, x) if isinstance(x, torch.dtype) else x

    return tree_map(one, values)


def check(model: Any, ids: torch.Tensor, policies: dict[str, Chosen]) -> None:
    """Check that nothing but eviction changes a model's logits: read ids [1, N] and decode their last tokens with a
    budget that holds all slots, where all layers read all tokens.

    Raises ValueError if a policy's logits are more than `ALLOWED` times as far from those of more exact arithmetic as
    the unpatched model's logits are.
    """
    count = min(DECODED, ids.shape[1] // 2)
    read, dtype = ids[:, :-count], next(model.parameters()).dtype
    with torch.no_grad(), Wide(dtype):
        exact = model(ids[:, :-1], logits_to_keep=count, use_cache=False).logits[0]

    def distance() -> float:
        logits = model.generate(
            read, attention_mask=torch.ones_like(read), max_new_tokens=count, do_sample=False, output_logits=True,
            return_dict_in_generate=True, prefix_allowed_tokens_fn=lambda _, before: [int(ids[0, len(before)])],
        ).logits  # fmt: skip
        return float((torch.cat(logits).to(exact) - exact).norm())

    with using(
        base_model(model), find_decoder(model), None
    ):  # the products of one row are then rounded as in a patched model
        want = distance()
    for name, chosen in policies.items():
        ample = choose(chosen, budget=ids.shape[1], threshold=None, tsp=None, kv="model")
        with evicting(model, ample, tokenizer=False):
            got = distance()
        if not got <= ALLOWED * want:
            raise ValueError(
                f"policy {name}: though nothing was evicted, the logits are {got / want:.2g} times as far from those "
                f"of more exact arithmetic as the unpatched model's (allowed is {ALLOWED}); nothing was timed"
            )


def alternate(
    model: Any, ids: torch.Tensor, policies: dict[str, Chosen], max_new_tokens: int, repeat: int,
    progress: Callable[[], Any] = lambda: None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Return {name: medians of `repeat` runs} for the unpatched model and each policy: read_seconds, token_seconds
    (of a step, in which each row of ids [B, N] decodes a token), decode_tokens_per_second (of all rows), peak_bytes,
    cache_bytes, and `slots`, the number kept per kv head. The runs of all names alternate, so that a machine that slows
    down slows all names."""
    runs = {name: [] for name in (UNPATCHED, *policies)}
    for _ in range(repeat):
        for name, made in runs.items():
            made.append(measure(model, None, ids, policies.get(name), max_new_tokens))
            progress()
    seen = next(made[0]["report"] for name, made in runs.items() if name != UNPATCHED)
    full = seen["full_cache_bytes"]
    rows = len(ids)
    return {name: medians(made, full, rows) | dict(slots=held(made[0], seen)[0]) for name, made in runs.items()}


def medians(made: list[dict[str, Any]], full: int, rows: int) -> dict[str, Any]:
    """Return the medians over `made`, runs of `measure` with `rows` rows; `full` is the number of bytes of the full
    cache."""
    step = median(run["decode_seconds"] / (run["new_tokens"] - 1) for run in made)
    return dict(
        read_seconds=median(run["read_seconds"] for run in made),
        token_seconds=step,
        decode_tokens_per_second=rows / step,
        peak_bytes=median(run["peak_bytes"] for run in made),
        cache_bytes=made[0]["report"]["cache_bytes"] if "report" in made[0] else full,
    )
