"""FLOPs and bytes of a chunk, of a draft and of a decoded token, by stage: dicts of (FLOPs, bytes moved).

FLOPs are those of matrix products (a multiply and an add are two), and CAOTE's; norms, softmax, pooling, ranking and
diagnostics are left out. Bytes are the least possible: weights once per pass, a layer's slots once per pass and once
per scoring pass, kept slots read and written; activations are taken to stay on the chip.

linear     matrix products with weights, of the prompt's rows
attention  attention of those rows
probe      appended rows: both
evict      scoring, and moving kept slots
refine     output errors made of the scores (CAOTE)
draft      tokens that the model drafts for itself: their passes, and the cut of the copy that they read
"""

from collections.abc import Iterator
from typing import Any

from ...engine.measure import quantities
from ...engine.read.schedule import follows, overfull, waits
from ...policy.policy import Policy
from ...policy.rows import Part
from ...policy.rows.window import FirstWindow
from .shape import Shape
from .slots import Taken


def pairs(rows: int, seen: int, window: int | None = None, causal: bool = True) -> int:
    """(row, key) pairs of one head: row t of a chunk sees `seen` earlier keys and the chunk's rows 0..t (all of them,
    when not causal), but at most the last `window` keys."""
    most = seen + rows if window is None else window
    if not causal:
        return rows * min(seen + rows, most)
    growing = min(rows, max(0, most - seen))  # rows before the window is full
    return growing * seen + growing * (growing + 1) // 2 + (rows - growing) * most


def work(
    shape: Shape, policy: Policy, taken: Taken, batch: int = 1, causal: bool = True
) -> dict[str, tuple[float, ...]]:
    """The work of one chunk, a `kvevict.lab.analysis.slots.Taken`."""
    chunk, linear = taken.chunk, 2 * shape.products * batch
    head = shape.head_weights if chunk.last else 0  # logits of the last row
    pair, slot = _pair(shape, batch), shape.slot_bytes * batch  # q.k and a.v of a row; a layer's key and value
    new = shape.new_bytes * batch
    seen = iter(zip(taken.stored, taken.read, strict=True))
    before = [(*next(seen), None) if w is None else (chunk.start, chunk.rows, w) for w in shape.windows]
    attended = sum(pairs(rows, n, w, causal) for n, rows, w in before)
    probed = sum(pairs(chunk.appended, n + rows, w, causal) for n, rows, w in before)
    read = sum(new * (rows + min(n, w - 1)) if w is not None else slot * n + new * rows for n, rows, w in before)
    entered = sum(rows for _, rows, _ in before)
    needed = quantities.of_policy(policy)
    passes, scans = sum(each.passes() for each in needed), sum(each.scans() for each in needed)
    outputs = any(each.outputs for each in needed)
    stored = sum(min(chunk.rows, w - 1) for w in shape.windows if w is not None)
    evict, refine = (0, 0), (0, 0)
    for old, rows, kept, chooses, parts in zip(taken.stored, taken.read, taken.kept, taken.scored, taken.parts):
        n = old + rows
        own = len(chunk.again or ())
        looked = max((each.looks_at(n, own) for each in needed if each.passes()), default=n)
        parts = [part._replace(slots=min(part.slots, looked)) for part in parts]
        array = (shape.slot_bytes * old + shape.new_bytes * rows) / 2 / max(n, 1)  # bytes of a slot's key or value
        evict = _sum(evict, _observed(shape, looked, parts, passes, outputs, causal, array))
        again = sum(each.attended(own or rows, old, chunk.appended) for each in needed) if parts else 0
        evict = _sum(evict, (_pair(shape, 1) * again, array * n * scans * chooses))
        evict = _sum(evict, (_products(shape, needed, rows, n if parts or chooses else 0), 0))
        evict = _sum(evict, (chooses * sum(each.flops(shape, rows, n) for each in needed), 0))
        # TADA's error uses unpooled scores, refined separately.
        refined = _refined(shape, policy, n, array)
        refine = _sum(refine, (x * chooses * (1 + policy.layers.measures) for x in refined))
        stored += kept if kept < n else rows
    return {
        "linear": (linear * entered // len(before) + 2 * head * batch, (shape.layer_weights + head) * shape.element),
        "attention": (pair * attended, read),
        "probe": (linear * chunk.appended + pair * probed, 0),
        "evict": (batch * evict[0], batch * evict[1] + 2 * slot * stored),
        "refine": tuple(batch * x for x in refine),
        "draft": _drafted(shape, policy, taken, batch) if taken.draft else (0, 0),
    }


def _pair(shape, batch) -> int:
    return 4 * shape.head_dim * shape.heads * batch


def _products(shape, needed, rows, slots) -> int:
    return 2 * shape.head_dim**2 * shape.heads * sum(each.products(rows, slots) for each in needed)


def _sum(a, b) -> tuple:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _observed(shape, n, parts, passes, outputs, causal=True, array=None) -> tuple:
    """Scoring passes over a layer of n slots, with keys of `array` bytes (None: of stored slots). If the layer's
    attention did not leave the observers' log-sum-exp, each pass needs another one for it. If outputs are needed too,
    attention is computed once more and leaves both."""
    flops = moved = 0
    for part in parts:
        seen = pairs(part.rows, part.slots - part.rows, causal=causal) if part.causal else part.rows * part.slots
        times = passes if part.attended else passes + 2 if outputs else 2 * passes
        flops, moved = flops + seen * times, moved + n * times
    return _pair(shape, 1) // 2 * flops, (shape.slot_bytes / 2 if array is None else array) * moved


def _refined(shape, policy, n, array=None) -> tuple:
    refine, array = policy.refine, shape.slot_bytes / 2 if array is None else array
    return shape.head_dim * shape.kv_heads * n * refine.flops(), array * n * refine.scans()


def _drafted(shape, policy, taken, batch) -> tuple:
    """LAQ: SnapKV's cut of a copy, n_d tokens decoded over it and, with `draft_keys`, attention to all slots."""
    rows, n_d, pair, slot = policy.rows, policy.rows.n_d, _pair(shape, batch), shape.slot_bytes * batch
    linear, weights = _linear(shape, batch)
    flops, moved = n_d * linear, n_d * weights
    for old, read, cut in zip(taken.stored, taken.read, taken.draft, strict=True):
        n, window = old + read, min(read, FirstWindow.window, max(1, int(cut) // 2))  # as the first cut has it
        first = _observed(shape, n, [Part(window, n, True, True)], 1, False)  # one pass of attention weights
        flops += batch * first[0] + pair * pairs(n_d, cut)
        moved += batch * first[1] + 2 * slot * cut + slot * pairs(n_d, cut)
        if rows.draft_keys:
            flops, moved = flops + pair * pairs(n_d, n), moved + slot * (n + n_d)
    for window in (w for w in shape.windows if w is not None):
        seen = pairs(n_d, taken.chunk.end, window)
        flops, moved = flops + pair * seen, moved + shape.new_bytes * batch * seen
    return flops, moved


def _linear(shape, batch) -> tuple:
    """Matrix products of one token, its logits among them. Of a mixture only the chosen experts' weights are read."""
    weights = min(shape.layer_weights, shape.products * batch) + shape.head_weights
    return 2 * batch * (shape.products + shape.head_weights), shape.element * weights


def decoding(
    shape: Shape, policy: Policy, slots: list[Any], budgets: list[Any], seen: int, count: int, batch: int = 1
) -> Iterator[tuple[dict[str, tuple[float, ...]], list[Any]]]:
    """Yields (stages, slots per kv head of each layer after it) of each of `count` tokens decoded after `seen`."""
    pair, slot, layers = _pair(shape, batch), shape.slot_bytes * batch, len(slots)
    rows, needed = policy.rows, quantities.of_policy(policy)
    passes = sum(each.passes(known=rows.newest or policy.carry == "sum") for each in needed)
    scans = sum(each.scans() for each in needed)
    for number in range(1, count + 1):
        slots = [n + 1 for n in slots]
        windows = sum(min(seen + number, w) for w in shape.windows if w is not None)
        moved, evict, refine = len(shape.windows), (0, 0), (0, 0)
        attended, left, alive = sum(slots) + windows, list(slots), sum(slots)
        for layer, (n, budget) in enumerate(zip(slots, budgets, strict=True)):
            if not overfull(policy, n, budget):
                continue
            moved, left[layer] = moved + budget, budget
            if follows(policy, layer) or waits(policy, layer, layers):
                continue
            observers = 1 if rows.newest else min(rows.decoded, number)
            parts = [Part(observers, n, True, rows.newest)] if observers else []
            evict = _sum(evict, _observed(shape, n, parts, passes, False))
            evict = _sum(evict, (_products(shape, needed, 0, n), shape.slot_bytes / 2 * n * scans))
            evict = _sum(evict, (sum(each.flops(shape, 0, n) for each in needed), shape.slot_bytes / 2 * n * scans))
            refine = _sum(refine, _refined(shape, policy, n))
        slots = left
        yield (
            {
                "linear": _linear(shape, batch),
                "attention": (pair * attended, slot * alive + shape.new_bytes * batch * windows),
                "evict": (batch * evict[0], batch * evict[1] + 2 * slot * moved),
                "refine": tuple(batch * x for x in refine),
            },
            slots,
        )
