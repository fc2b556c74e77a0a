"""Which choices exclude each other, and why: one table (METHODS sections 1, 4 and 5)."""


def _waits(policy):
    return policy.warmup_layers not in (None, 1)


RULES = (
    (lambda p: p.shared and p.heads.ragged,
     "one selection shared by a layer's heads needs heads='equal'; or let each choose for itself: per_head=True"),
    (lambda p: p.layers.measures and p.n_reuse > 1,
     "this layer budget needs every layer's error, and with n_reuse > 1 only a group's first layer scores: n_reuse=1"),
    (lambda p: p.layers.measures and _waits(p),
     "this layer budget needs every layer's error, and layers that wait do not score: warmup_layers=None"),
    (lambda p: p.layers.measures and p.score.ordinal,
     "this layer budget sums scores to an error, and these only rank slots: take scores that are attention"),
    (lambda p: p.error.refines and p.score.ordinal,
     "an output error takes scores as weights, and these only rank slots: take scores that are attention"),
    (lambda p: p.error.refines and p.score.shared,
     "an output error is each head's own, and this score is one for the layer: per_head=True"),
    (lambda p: p.score.held and p.schedule == "chunk",
     "a draft needs the whole prompt, so nothing can be evicted before: schedule='prompt' (chunk_size then only bounds "
     "the activations)"),
    (lambda p: p.error.outputs and (p.score.carries or p.score.length or p.score.held),
     "each='row' needs the attention of a window or of the last row, and this score has other rows: each='pooled'"),
    (lambda p: p.n_reuse > 1 and p.warmup_layers is not None,
     "layers that wait already take another layer's slots: n_reuse=1 or warmup_layers=None"),
)  # fmt: skip


def check(policy) -> None:
    """Raise ValueError, with the reason, for choices that cannot go together."""
    for excluded, reason in RULES:
        if excluded(policy):
            raise ValueError(reason)
