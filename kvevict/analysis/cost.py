"""What reading a prompt costs, from a model's config, a policy and two hardware numbers: no weights needed.

Slots follow the policy chunk by chunk and are exact: `cache_bytes` and `peak_cache_bytes` are `kvevict.report`'s after
such a read (layers that share by what a prompt measures are taken as uniform, and only what is left at the end is
exact). FLOPs are those of matrix products (a multiply and an add are two); norms, softmax, pooling and ranking are
left out. Bytes moved are the least that is possible: weights once per chunk, a layer's slots once per chunk and once
per scoring pass, kept slots read and written; activations are taken to stay on the chip. Each stage of each chunk takes
the longer of FLOPs / rate and bytes / rate. Memory leaves out masks, "eager" attention's matrices, and free room.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..engine import propagate
from ..policy.checks import count
from ..policy.layers import layer_slots
from ..policy.policy import Policy
from ..policy.scores.laq import Drafted
from .shape import Shape


@dataclass(frozen=True)
class Hardware:
    """Peak TFLOP/s (10^12), memory GB/s (10^9), and the share of both that is reached. Default: an H100 SXM, bf16."""

    tflops: float = 989.0
    bandwidth: float = 3350.0
    efficiency: float = 0.7

    def __post_init__(self):
        for name, most in (("tflops", float("inf")), ("bandwidth", float("inf")), ("efficiency", 1)):
            if not 0 < getattr(self, name) <= most:
                wanted = "a positive number" if most > 1 else "a number in (0, 1]"
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)}")

    def seconds(self, flops: float, moved: float) -> float:
        return max(flops / (self.tflops * 1e12), moved / (self.bandwidth * 1e9)) / self.efficiency


def pairs(rows: int, seen: int, window: int | None = None, causal: bool = True) -> int:
    """(row, key) pairs of one head: row t of a chunk sees `seen` earlier keys and the chunk's rows 0..t (all of them,
    when not causal), but at most the last `window` keys."""
    most = seen + rows if window is None else window
    if not causal:
        return rows * min(seen + rows, most)
    growing = min(rows, max(0, most - seen))  # rows before the window is full
    return growing * seen + growing * (growing + 1) // 2 + (rows - growing) * most


@dataclass(frozen=True)
class Chunk:
    """One chunk of a read. Slots are per kv head; lists have an entry per full-attention layer."""

    start: int  # tokens read before
    rows: int
    probe: int  # rows that read along and are not stored
    observers: int  # rows of the probe, which score; in the last chunk they may be the prompt's own. 0: no probe
    last: bool
    stored: list  # slots before
    kept: list  # slots after
    scored: list  # whether the layer chooses for itself here
    peak: int  # most slots alive at once, summed over layers
    read: list  # the chunk's rows that get to the layer


def chunks(policy: Policy, tokens: int, layer_count: int, kv_heads: int = 1) -> Iterator[Chunk]:
    """How a prompt of `tokens` tokens is read into `layer_count` evicting layers: `prefill.Call.read` and
    `evict.after_chunk`, with counts in place of tensors.

    How a layer's slots are split over its heads does not change their sum, so a head stands for the layer's average.
    A selection that leaves some of the budget unused (chunk, exact=False) is planned as if it used it.
    """
    relaxed, waiting = policy.warmup_slots(tokens), policy.waiting_layers(layer_count)
    probe, inside = probe_rows(policy, tokens), policy.score.span is None and not policy.score.behind
    tsp = propagate.layer_of(policy, layer_count, layer_count)
    kept, start = [0] * layer_count, 0
    size = policy.chunk_size or tokens
    for end in range((tokens - 1) % size + 1, tokens + 1, size):  # the remainder goes first
        last, rows, stored, held = end == tokens, end - start, list(kept), []
        scored, alive, peak = [False] * layer_count, sum(kept), 0
        read = [min(rows, propagate.limit(policy, tsp, layer)) for layer in range(layer_count)]
        evicts, n_all = last or policy.schedule == "chunk", [n + r for n, r in zip(kept, read, strict=True)]
        targets = _split(policy, kv_heads, tokens, n_all)
        cascades = policy.layers.cascades and evicts and sum(targets) < sum(n_all)
        for layer in range(layer_count):
            peak = max(peak, alive + (len(held) + 1) * read[layer])
            if cascades:
                parts = _split(policy, kv_heads, tokens, n_all, [float(other <= layer) for other in range(layer_count)])
                spare = int(layer < layer_count - 1)
                kept[: layer + 1] = [min(x + spare, n) for x, n in zip(parts[: layer + 1], n_all, strict=False)]
                scored[layer], alive = True, sum(kept)
                continue
            slots = n = n_all[layer]
            if evicts:
                delayed = policy.warmup_layers is not None and layer < waiting and not last
                slots = min(n, relaxed if delayed else targets[layer])
            held.append(layer)
            if layer < waiting - 1 and slots < n:
                continue
            scored[layer] = (slots < n and layer % policy.n_reuse == 0) or (layer == tsp and read[-1] < rows)
            for other in held:
                kept[other] = slots if slots < n else stored[other] + read[other]
                alive += kept[other] - stored[other]
            held = []
        along = 0 if last and inside else probe
        yield Chunk(start, rows, along, probe, last, stored, list(kept), scored, peak, read)
        start = end


def _split(policy, kv_heads, tokens, alive, measured=None) -> list:
    """`layer_slots` per kv head, of layers that have `alive` slots per head."""
    most = (torch.tensor(alive, dtype=torch.double, device="cpu")[:, None] * kv_heads).round()
    slots = layer_slots(policy, len(alive), kv_heads, [tokens], most, [measured])[:, 0].tolist()
    return [n / kv_heads if n % kv_heads else n // kv_heads for n in slots]


def probe_rows(policy: Policy, tokens: int) -> int:
    """Rows of the probe that reads every chunk, as `prefill.Call._new_read` counts them; 0 without one."""
    score = policy.score
    if not score.length or not score.append or tokens <= policy.slots(tokens):
        return 0
    return score.length if score.span or score.behind else min(tokens // 2, score.length)


def work(shape: Shape, policy: Policy, chunk: Chunk, batch: int = 1, causal: bool = True) -> dict:
    """(FLOPs, bytes moved) of every stage of one chunk: "linear" and "attention" of the prompt's own rows, "probe" of
    the rows that only read along, "evict" for scoring and moving slots."""
    linear = 2 * shape.products * batch
    head = shape.head_weights if chunk.last else 0  # logits of the last row
    pair = 4 * shape.head_dim * shape.heads * batch  # q.k, and a.v
    seen = iter(zip(chunk.stored, chunk.read, strict=True))
    before = [(*next(seen), None) if w is None else (chunk.start, chunk.rows, w) for w in shape.windows]
    attended = sum(pairs(rows, n, w, causal) for n, rows, w in before)
    probed = sum(pairs(chunk.probe, n + rows, w, causal) for n, rows, w in before)
    read = sum((n if w is None else min(n, w - 1)) + rows for n, rows, w in before)
    entered = sum(rows for _, rows, _ in before)
    scored, scanned, stored = 0, 0, 0
    for n, rows, kept, chooses in zip(chunk.stored, chunk.read, chunk.kept, chunk.scored, strict=True):
        own, passes = score_pairs(policy, chunk, n, rows, chooses, causal)
        scored += own * passes
        scanned += (n + rows) * passes
        stored += kept if kept < n + rows else rows
    stored += sum(min(chunk.rows, w - 1) for w in shape.windows if w is not None)
    slot = shape.slot_bytes * batch
    return {
        "linear": (linear * entered // len(before) + 2 * head * batch, (shape.layer_weights + head) * shape.element),
        "attention": (pair * attended, slot * read),
        "probe": (linear * chunk.probe + pair * probed, 0),
        "evict": (pair // 2 * scored, slot // 2 * scanned + 2 * slot * stored),
    }


def score_pairs(policy: Policy, chunk: Chunk, stored: int, read: int, chooses: bool, causal: bool) -> tuple:
    """(row, slot) pairs of one scoring pass over a layer that reads `read` rows, and the number of passes."""
    score, n = policy.score, stored + read
    if score.carries:  # every row adds to the sums, whether or not slots are evicted now
        return pairs(read, stored, causal=causal), 1
    if not chooses:
        return 0, 0
    if chunk.observers:  # averaged over chunks they have no log-sum-exp yet: a pass for it, and one for the sums
        return chunk.observers * (n if chunk.probe else n - chunk.observers), 1 if score.behind else 2
    rows = min(read, score.rows or int(score.last_row))
    passes = score.passes + policy.error.outputs + policy.layers.passes(policy)
    return pairs(rows, n - rows, causal=causal), passes * (rows > 0)


def plan(shape: Shape, policy: Policy | None, tokens: int, *, batch=1, hardware=Hardware(), causal=True) -> dict:
    """What it costs to read a prompt of `tokens` tokens in each of `batch` rows; policy None: the unpatched model.

    causal=False counts every (row, key) pair of a chunk, as several papers do.

    flops, moved         per stage of `work`: FLOPs, bytes
    cache_bytes, peak_cache_bytes    of full-attention layers, after the prompt and at most, as `kvevict.report`
    sliding_bytes        of sliding-window layers after the prompt
    weight_bytes, activation_bytes   of the model; of the widest chunk in one layer
    peak_bytes           the sum of weights, slots at most, sliding windows and activations
    seconds              to the first token
    """
    count("tokens", tokens, 1)
    count("batch", batch, 1)
    policy = policy or Policy(score="random", budget=tokens)  # nothing to evict
    if isinstance(policy.score, Drafted):
        raise ValueError("the costs of drafting are not planned: plan snapkv, which laq and speckv add a draft to")
    policy.score.ready()
    policy.check_layers(shape.windows.count(None))
    propagate.layer_of(policy, shape.windows.count(None), len(shape.windows))  # or an error
    flops, moved, seconds, peak, widest = Counter(), Counter(), 0.0, 0, 0
    for chunk in chunks(policy, tokens, shape.windows.count(None), shape.kv_heads):
        for stage, (operations, traffic) in work(shape, policy, chunk, batch, causal).items():
            flops[stage] += operations
            moved[stage] += traffic
            seconds += hardware.seconds(operations, traffic)
        peak, widest = max(peak, chunk.peak), max(widest, chunk.rows + chunk.probe)
    slot, row = shape.slot_bytes * batch, shape.row_bytes * batch
    if chunk.start:  # the previous chunk's last hidden state waits for the next one's
        row += shape.element * shape.hidden * batch
    result = dict(
        flops=dict(flops), moved=dict(moved), cache_bytes=round(slot * sum(chunk.kept)),
        peak_cache_bytes=round(slot * peak),
        sliding_bytes=slot * sum(min(tokens, w - 1) for w in shape.windows if w is not None),
        weight_bytes=shape.element * shape.weights, activation_bytes=row * widest,
    )  # fmt: skip
    peaks = ("weight_bytes", "peak_cache_bytes", "sliding_bytes", "activation_bytes")
    return result | dict(peak_bytes=sum(result[name] for name in peaks), seconds=seconds)
