"""The cost of trained gates: their training (`kvevict.gates.train`), their bytes, and each token that is read."""

import dataclasses
from typing import Any

from ...engine.measure.gates import inner_of
from ...engine.measure.quantities.gate import Gate
from ...gates.amount import LENGTH, LIMIT, SKIP, held_out_of
from ...policy.checks import PLENTY
from ...policy.policy import build
from .cost import Hardware, plan
from .shape import Shape

DOUBLE, FLOAT = 8, 4  # bytes


def gates(shape: Shape, folder: str | None, hardware: Hardware, context: int | None) -> dict[str, Any]:
    """Of gates for a model of this shape: `bytes`, `flops_per_token` that is read, and that as a `share` of the token's
    products with weights. folder: of the gates, where they are there; else linear ones. `training`: of linear gates on
    as many tokens as it takes by default, by a text that has them, in pieces within half of `context`:

    tokens, pieces         that are read; an eighth of the pieces is held out
    flops                  of reading each piece twice
    flops64                in float64: sums of products, and one solution per layer
    sums_bytes             of the sums, which are there throughout
    peak_bytes             with weights, a piece's slots and activations
    seconds
    """
    layers, inner = shape.windows.count(None), inner_of(folder)
    wide, narrow = shape.hidden, shape.kv_heads
    numbers = inner * (wide + 1) + narrow * (inner + 1) if inner else narrow * (wide + 1)
    per_token = layers * Gate(folder).flops(shape, 1, 0)
    return dict(
        bytes=FLOAT * layers * numbers, flops_per_token=per_token, share=per_token / (2 * shape.products),
        training=_training(shape, hardware, min(LENGTH, context // 2) if context else LENGTH),
    )  # fmt: skip


def _training(shape, hardware, length):
    pieces, layers, wide = max(1, LIMIT // length), shape.windows.count(None), shape.hidden + 1
    read = plan(
        dataclasses.replace(shape, head_weights=0),  # no logits are made
        build("kvzip", budget=PLENTY, chunk_size=length, layers="uniform"), length, hardware=hardware, new_tokens=0,
    )  # fmt: skip
    columns, trained = wide + shape.kv_heads, (pieces - held_out_of(pieces)) * (length - SKIP)
    sums = 2 * trained * wide * columns
    solved = 2 * shape.hidden**3 // 3 + 2 * shape.hidden**2 * shape.kv_heads
    double, held = layers * (sums + solved), DOUBLE * layers * wide * columns
    return dict(
        tokens=pieces * length, pieces=pieces, flops=pieces * sum(read["flops"].values()), flops64=double,
        sums_bytes=held, peak_bytes=read["peak_bytes"] + held,
        seconds=pieces * read["seconds"] + double / (hardware.tflops64 * 1e12 * hardware.efficiency),
    )  # fmt: skip
