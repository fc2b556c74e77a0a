"""Computes the cost of reading a prompt and of decoding after it, from a model's config, a policy and two hardware
numbers, without weights.

The number of slots follows the policy chunk by chunk (slots.py), so `cache_bytes` and `peak_cache_bytes` equal those of
`kvevict.report`. There are two exceptions. Layer budgets that measure the prompt count as uniform, or as in TADA's
history of this process; with them only `cache_bytes` is exact. A threshold keeps slots by the text; its largest number
of slots counts.

FLOPs are those of matrix products (a multiply and an add are two). Bytes are the least possible: weights and a layer's
slots are moved once per pass, and activations stay on the chip. Each stage of each chunk and of each decoded token
takes the longer of FLOPs / rate and bytes / rate. Scoring counts in every layer that evicts or adds scores up, though
one that takes another's choice does not score, and blocks of rows (compactor) count as if they saw all slots. Left out
are moving slots, scoring while decoding, a smaller model's drafts, norms, softmax, masks, "eager" attention's matrices
and free slots.
"""

import bisect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...engine.measure import quantities
from ...engine.read.plan import tsp_of
from ...engine.read.schedule import overfull
from ...policy.checks import at_least_0, count
from ...policy.inputs import as_needs
from ...policy.kv import POSITION
from ...policy.policy import Policy
from ...policy.run import Run
from .shape import Shape
from .slots import Layers, Taken

UNPATCHED = "unpatched"  # name of the unpatched model's run


@dataclass(frozen=True)
class Hardware:
    """Peak compute in TFLOP/s (10^12), memory bandwidth in GB/s (10^9), and the share of both that a model reaches. The
    default peaks are an H100 SXM's, in bf16."""

    tflops: float = 989.0
    bandwidth: float = 3350.0
    efficiency: float = 0.7

    def __post_init__(self) -> None:
        for name in ("tflops", "bandwidth"):
            at_least_0(name, getattr(self, name), positive=True)
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency must be a number in (0, 1], got {self.efficiency}")

    def seconds(self, flops: float, moved: float) -> float:
        return max(flops / (self.tflops * 1e12), moved / (self.bandwidth * 1e9)) / self.efficiency


class Bill:
    """Sums of FLOPs, moved bytes and seconds over stages of work."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware, self.flops, self.moved, self.seconds = hardware, Counter(), Counter(), 0.0

    def add(self, stages: dict) -> float:
        """Add stages {name: (FLOPs, moved bytes)}, and return the seconds that they take."""
        taken = sum(self.hardware.seconds(*costs) for costs in stages.values())
        for stage, (operations, traffic) in stages.items():
            self.flops[stage] += operations
            self.moved[stage] += traffic
        self.seconds += taken
        return taken


def plan(
    shape: Shape, policy: Policy | None, tokens: int, *, batch: int = 1, hardware: Hardware = Hardware(),
    causal: bool = True, new_tokens: int = 256, run: Run | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Compute the cost of reading a prompt of `tokens` tokens in each of `batch` rows and of decoding `new_tokens`
    more. With policy=None the cost is the unpatched model's. `run` is how the policy is run. causal=False counts every
    (row, key) pair of a chunk, as several papers do. The result has:

    flops, moved         FLOPs and bytes of each stage: "linear", the products of the prompt's rows with weights;
                         "attention" of the prompt's rows; "appended", products and attention of the rows that are
                         appended to chunks; "scoring" of slots and their refinement (CAOTE); "drafts" of the model
                         itself (LAQ), decoded over the slots of the budget
    cache_bytes, peak_cache_bytes    bytes of full-attention layers after the prompt, and the most at any time, as in
                                     `kvevict.report`
    archive_bytes        with recall: bytes of the archive, positions included, after the `new_tokens`
    sliding_bytes        bytes of sliding-window layers after the prompt
    weight_bytes, activation_bytes   bytes of the model, and of the widest chunk's activations in one layer
    peak_bytes           the sum of peak slots, weights, sliding windows and activations
    seconds              time to the first token
    decode               costs of the new tokens: `first` and `last`, each of one token (its flops, moved bytes and
                         tokens_per_second, as means over the tokens from one eviction to the next); `flops`, `moved`
                         and `seconds` of all new tokens; and `cache_bytes` after the last
    """
    for name, number, least in (("tokens", tokens, 1), ("batch", batch, 1), ("new_tokens", new_tokens, 0)):
        count(name, number, least)
    policy, run = policy or Policy(score="random", budget=tokens), run or Run()  # a budget of all tokens evicts nothing
    _check(shape, policy)
    shape = replace(shape, kv=run.kv)
    sizes = shape.slot_bytes * batch, shape.new_bytes * batch
    layers, bill = Layers(policy, tokens, shape.windows.count(None), shape.kv_heads, sizes), Bill(hardware)
    (slot, new), peak, widest, chunks = sizes, 0.0, 0, 0
    for taken in layers.chunks():
        bill.add(work(shape, taken, batch, causal))
        bill.add({"scoring": _scoring(shape, policy, taken, batch)})
        peak, widest = max(peak, taken.peak), max(widest, taken.chunk.rows + taken.chunk.appended)
        chunks += 1
    if policy.rows.needs_full_prompt and layers.cuts:
        bill.add({"drafts": _drafts(shape, policy, layers, tokens, batch)})
    row = shape.row_bytes * batch
    if chunks > 1:  # a chunk's last hidden state is held while the next chunk is read
        row += shape.element * shape.hidden * batch
    result = dict(
        flops=dict(bill.flops), moved=dict(bill.moved), cache_bytes=round(slot * sum(layers.kept)),
        peak_cache_bytes=round(peak),
        sliding_bytes=new * sum(min(tokens, w - 1) for w in shape.windows if w is not None),
        weight_bytes=shape.element * shape.weights, activation_bytes=row * widest,
    )  # fmt: skip
    peaks = ("weight_bytes", "peak_cache_bytes", "sliding_bytes", "activation_bytes")
    decode = _decode(shape, policy, layers, tokens, new_tokens, batch, hardware)
    archived = (replace(shape, kv=run.archive_kv or run.kv).slot_bytes + POSITION * shape.kv_heads) * batch
    result |= dict(archive_bytes=archived * layers.count * (tokens + new_tokens)) if policy.recall else {}
    return result | dict(peak_bytes=sum(result[name] for name in peaks), seconds=bill.seconds, decode=decode)


def largest_batch(shape: Shape, policy: Policy | None, tokens: int, memory: int, run: Run | None = None) -> int:
    """Return the largest batch of prompts of `tokens` tokens whose peak, with the weights, is at most `memory` bytes; 0
    if one prompt is too much."""
    read = partial(plan, shape, policy, tokens, new_tokens=0, run=run)
    return largest(lambda batch: read(batch=batch)["peak_bytes"] <= memory)


def largest(fits: Callable[[int], bool]) -> int:
    """Return the largest batch that fits; 0 if a batch of 1 does not."""
    if not fits(1):
        return 0
    most = 1
    while fits(2 * most):
        most *= 2
    return most + bisect.bisect_left(range(most + 1, 2 * most), True, key=lambda batch: not fits(batch))


def _check(shape: Shape, policy: Policy) -> None:
    """Raise ValueError if a model of this shape cannot run the policy, or if the policy lacks an argument."""
    if not policy.rows.n_d or policy.rows.needs_full_prompt:
        policy.rows.ready(None)
    policy.check_layers(shape.windows.count(None))
    quantities.rotates(policy, shape.rope_depends_on_length)  # raises ValueError for a score that cannot rotate
    tsp_of(policy, not any(shape.windows), len(shape.windows))  # raises ValueError where the layers do not allow it


def pairs(rows: int, seen: int, window: int | None = None, causal: bool = True) -> int:
    """Count the (row, key) pairs of one head in a chunk of `rows` rows. Row t sees `seen` earlier keys and the chunk's
    rows 0..t (all of the chunk's rows, if not causal), but at most the last `window` keys."""
    most = seen + rows if window is None else window
    if not causal:
        return rows * min(seen + rows, most)
    growing = min(rows, max(0, most - seen))  # number of rows that the window does not limit
    return growing * seen + growing * (growing + 1) // 2 + (rows - growing) * most


def work(shape: Shape, taken: Taken, batch: int = 1, causal: bool = True) -> dict[str, tuple[float, ...]]:
    """Return {stage: (FLOPs, bytes moved)} of one chunk."""
    chunk, linear = taken.chunk, 2 * shape.products * batch
    head = shape.head_weights if chunk.last else 0  # weights that make the logits of the last row
    pair, slot, new = _pair_flops(shape, batch), shape.slot_bytes * batch, shape.new_bytes * batch
    seen = iter(zip(taken.stored, taken.read, strict=True))
    layers = [(*next(seen), None) if w is None else (chunk.start, chunk.rows, w) for w in shape.windows]
    attended = sum(pairs(rows, n, w, causal) for n, rows, w in layers)
    appended = sum(pairs(chunk.appended, n + rows, w, causal) for n, rows, w in layers)
    read = sum(new * (rows + min(n, w - 1)) if w is not None else slot * n + new * rows for n, rows, w in layers)
    entered = sum(rows for _, rows, _ in layers)
    return {
        "linear": (linear * entered // len(layers) + 2 * head * batch, (shape.layer_weights + head) * shape.element),
        "attention": (pair * attended, read),
        "appended": (linear * chunk.appended + pair * appended, 0),
    }


def _pair_flops(shape: Shape, batch: int) -> int:
    """Count the FLOPs of q.k and of a.v (attention weight times value) for one row and one key in every query head."""
    return 4 * shape.head_dim * shape.heads * batch


def _scoring(shape: Shape, policy: Policy, taken: Taken, batch: int) -> tuple[float, float]:
    """Return (FLOPs, bytes moved) of scoring slots after a chunk: the observing rows' products with keys, for errors of
    the output those with values, too, and of a refinement the mean of the values and the distances from it."""
    most, appended, seen, slots = policy.rows.most, taken.chunk.appended, 0.0, 0.0
    for stored, read, kept in zip(taken.stored, taken.read, taken.kept, strict=True):
        if kept < stored + read or policy.carry == "sum":
            rows = min(appended or read, read + appended if most is None else most)
            seen += rows * (stored + read) if appended else pairs(rows, stored + read - rows)
            slots += stored + read
    errors = any(need.name == "output_error" for need in as_needs(policy.score.needs))
    refines, products = policy.refine.refines, _pair_flops(shape, batch) / 2 * (1 + errors)
    flops = products * seen + refines * 5 * shape.head_dim * shape.kv_heads * batch * slots
    return flops, shape.slot_bytes * batch * slots * ((most != 0) + errors + refines) / 2


def _drafts(shape: Shape, policy: Policy, layers: Layers, tokens: int, batch: int) -> tuple[float, float]:
    """Return (FLOPs, bytes moved) of writing the policy's draft tokens over the slots that the budget leaves."""
    flops = moved = 0.0
    linear = 2 * batch * (shape.products + shape.head_weights)
    weights = shape.element * (min(shape.layer_weights, shape.products * batch) + shape.head_weights)
    for number in range(1, policy.rows.n_d + 1):
        windows = sum(min(tokens + number, w) for w in shape.windows if w is not None)
        slots = sum(layers.kept) + layers.count * number
        flops += linear + _pair_flops(shape, batch) * (slots + windows)
        moved += weights + batch * (shape.slot_bytes * slots + shape.new_bytes * windows)
    return flops, moved


def _decode(
    shape: Shape, policy: Policy, layers: Layers, seen: int, new_tokens: int, batch: int, hardware: Hardware
) -> dict:
    bill, each, slots, budgets = Bill(hardware), [], layers.kept, layers.budgets
    if policy.keep_prompt:
        budgets = [kept + budget for kept, budget in zip(slots, budgets, strict=True)]
    slot = shape.slot_bytes * batch
    # A mixture of experts reads only the weights of the chosen experts.
    weights = min(shape.layer_weights, shape.products * batch) + shape.head_weights
    linear = 2 * batch * (shape.products + shape.head_weights), shape.element * weights
    for number in range(1, new_tokens + 1):
        slots = [n + 1 for n in slots]
        windows = sum(min(seen + number, w) for w in shape.windows if w is not None)
        attended, moved = sum(slots) + windows, slot * sum(slots) + shape.new_bytes * batch * windows
        stages = {"linear": linear, "attention": (_pair_flops(shape, batch) * attended, moved)}
        each.append((*map(sum, zip(*stages.values())), bill.add(stages)))
        slots = [budget if overfull(policy, n, budget) else n for n, budget in zip(slots, budgets, strict=True)]
    interval: Any = policy.interval if policy.decode else 1
    return dict(
        tokens=new_tokens, first=_mean(each[:interval], batch), last=_mean(each[-interval:], batch),
        flops=sum(bill.flops.values()), moved=sum(bill.moved.values()), seconds=bill.seconds,
        cache_bytes=round(slot * sum(slots)),
    )  # fmt: skip


def _mean(each: list, batch: int) -> dict | None:
    """Average the (FLOPs, bytes, seconds) of steps in which each row of a batch decodes a token."""
    if not each:
        return None
    flops, moved, seconds = (sum(column) / len(each) for column in zip(*each))
    return dict(flops=flops, moved=moved, tokens_per_second=batch / seconds)
