"""A table of the choices of a policy that exclude each other, with the reasons (METHODS sections 1, 4 and 5)."""

from typing import TYPE_CHECKING

from .heads import Flat
from .inputs import as_needs
from .parts import PARTS, written
from .rows.window import All, NoRows, Window
from .run import Run

if TYPE_CHECKING:
    from .policy import Policy


def _waits(policy: "Policy") -> bool:
    return policy.warmup_layers not in (None, 1)


def _needs(policy: "Policy", *quantities: str) -> bool:
    """Return whether the policy's score needs one of the named quantities."""
    return any(each.name in quantities for each in as_needs(policy.score.needs))


RULES = (
    (lambda p: type(p.rows) is NoRows and type(p.score.rows) is not NoRows,
     "this score is computed from queries' attention, and rows='none' has no queries: give rows='window', 'probe' or "
     "others"),
    (lambda p: p.shared and p.heads.ragged,
     "one selection shared by a layer's heads needs heads='equal'; or let each choose for itself: per_head=True"),
    (lambda p: (p.layers.measures or p.layers.cascades) and p.n_reuse > 1,
     "this layer budget measures every layer, and with n_reuse > 1 only a group's first layer scores: n_reuse=1"),
    (lambda p: (p.layers.measures or p.layers.cascades) and _waits(p),
     "this layer budget measures every layer, and layers that wait do not score: warmup_layers=None"),
    (lambda p: p.layers.cascades and (p.rows.most in (0, 1) or p.carry != "none" or p.score.ordinal),
     "this layer budget measures how attention varies over the observing rows, which this score or its rows do not "
     "show: take snapkv, cake, edie or another score of attention with 2 rows or more"),
    (lambda p: p.layers.measures and p.score.ordinal,
     "this layer budget sums scores to an error, and these only rank slots: take a score of attention"),
    (lambda p: (p.refine.refines or p.refine.picks) and p.score.ordinal,
     "a refinement takes scores as weights, and these only rank slots: take a score of attention"),
    (lambda p: (p.refine.refines or p.refine.picks) and p.score.shared,
     "a refinement differs by head, and this score is one for the layer: per_head=True"),
    (lambda p: p.carry in ("sum", "max") and p.score.ordinal,
     "these scores only rank the slots of one chunk, so those of two chunks cannot be summed or compared: "
     "carry='none'"),
    (lambda p: p.carry != "none" and p.score.per_query_head,
     "these scores are pooled for each query head, and carried ones are of kv heads: carry='none'"),
    (lambda p: p.rows.needs_full_prompt and p.schedule == "chunk",
     "a draft needs the whole prompt, so nothing can be evicted before it: schedule='prompt' (chunk_size then only "
     "bounds the activations)"),
    (lambda p: p.rows.needs_full_prompt and p.carry != "none",
     "these scores are sums over every chunk, and a draft comes once, after the whole prompt: take rows='given'"),
    (lambda p: p.rows.needs_full_prompt and p.tsp is not None,
     "layer tsp chooses the tokens to propagate when it is read, and a draft comes after all layers: tsp=None"),
    (lambda p: p.layers.pools and not p.score.comparable,
     "one ranking of all layers needs scores that compare between them, and these do not: take kvzip or "
     "defensive, or layers='uniform'"),
    (lambda p: p.layers.pools and type(p.heads) is not Flat,
     "one ranking of all layers is one of all their heads: heads='flat'"),
    (lambda p: p.layers.pools and (p.select.run > 1 or p.select_by_layer),
     "one ranking of all layers takes slots one by one: select='token'"),
    (lambda p: p.layers.pools and p.refine.refines,
     "one ranking of all layers needs scores that compare between them, and output errors do not: refine='none'"),
    (lambda p: (p.layers.pools or p.threshold is not None) and (p.n_reuse > 1 or _waits(p)),
     "a threshold, or one ranking of all layers, needs every layer's own scores: n_reuse=1 and warmup_layers=None"),
    (lambda p: p.layers.pools and p.decode and not p.keep_prompt,
     "while decoding layers are cut one by one, and one ranking needs them all: decode=False, layers='uniform', or "
     "keep_prompt=True, which cuts what was decoded alone"),
    (lambda p: p.threshold is not None and (not p.score.comparable or p.score.ordinal),
     "a threshold is one number for all layers and chunks, and these scores have another scale in each: take kvzip or "
     "expected, or a budget"),
    (lambda p: p.threshold is not None and not p.heads.ragged,
     "heads keep as many slots as score above a threshold, which differ from head to head: heads='flat' or 'ada'"),
    (lambda p: (p.threshold is not None or p.refine.picks) and any(select.run > 1 for select in p.selections),
     "a threshold, or refine='critical', takes slots one by one, so runs would not stay whole: select='token'"),
    (lambda p: p.threshold is not None and (p.refine.refines or p.refine.picks),
     "a threshold is one of scores, and refined ones are others: refine='none'"),
    (lambda p: p.threshold is not None and (p.layers.cascades or p.layers.measures),
     "this layer budget splits a number of slots, and a threshold leaves that to the text: layers='uniform' or 'pool'"),
    (lambda p: p.threshold is not None and p.decode,
     "while decoding a layer is cut when it passes its budget, and a threshold says nothing of its size: decode=False"),
    (lambda p: p.layers.cascades and p.rows.repeats and p.score.largest and p.schedule == "prompt",
     "this layer budget measures the observing rows of one call, and a prompt is repeated in parts: give a chunk_size, "
     "or layers='uniform'"),
    (lambda p: p.rows.repeats and (p.tsp is not None or p.layers.measures),
     "the rows that repeat a chunk are not its last tokens, which these need: tsp=None, and another layer budget"),
    (lambda p: _needs(p, "repetition", "repeated_output") and not p.rows.repeats,
     "this score is of rows that repeat the chunk: rows='repeat'"),
    (lambda p: _needs(p, "repetition", "repeated_output") and p.decode,
     "decoded tokens are not read again, so their worth is not known: decode=False"),
    (lambda p: _needs(p, "expected_attention", "trigonometric") and p.rows.needs_full_prompt,
     "a draft comes after all layers, and these statistics are of every row when its layer is read: rows='none'"),
    (lambda p: _needs(p, "gate") and p.rows.repeats,
     "a token has its number when it is first read, so nothing is to be read again: rows='none'"),
    (lambda p: _needs(p, "gate") and p.carry != "keep",
     "a token's number is made when it is read, and its slots carry it: carry='keep'"),
    (lambda p: _needs(p, "lag", "leverage") and p.carry != "keep",
     "these numbers are of a text's parts as they were read, and a part that was cut is none: carry='keep'"),
    (lambda p: _needs(p, "lag") and p.tsp is not None,
     "layers after tsp do not read all tokens, so their parts are never whole: tsp=None"),
    (lambda p: _needs(p, "block_attention") and type(p.rows) is not All,
     "attention in blocks is that of the chunk's own rows: rows='all'"),
    (lambda p: _needs(p, "block_attention") and p.decode,
     "decoded tokens do not make a block, so their worth is not known before the next prompt: decode=False"),
    (lambda p: _needs(p, "products") and type(p.rows) is not Window,
     "products q k are of a window's rows: rows='window'"),
    (lambda p: p.recall and type(p.rows) is NoRows,
     "recall=True: a turn's observing rows choose the slots, and rows='none' has none: take take+edie or snapkv"),
    (lambda p: p.recall and p.carry != "none",
     "recall=True: slots that come back have lost the number that they carried: take take+edie or snapkv, or "
     "carry='none'"),
    (lambda p: p.recall and p.tsp is not None,
     "recall=True: layers after tsp do not read all tokens, so their archive lacks some: tsp=None"),
    (lambda p: p.recall and p.keep_prompt,
     "recall=True: a turn chooses from all tokens, and keep_prompt keeps those of the last one: keep_prompt=False"),
    (lambda p: p.n_reuse > 1 and p.tsp is not None,
     "layers after tsp read other tokens, and with n_reuse > 1 layer tsp need not score: n_reuse=1 or tsp=None"),
    (lambda p: p.n_reuse > 1 and p.warmup_layers is not None,
     "layers that wait already take another layer's slots: n_reuse=1 or warmup_layers=None"),
)  # fmt: skip
RULES_OF_RUNS = (
    (lambda p, run: p.layers.cascades and run.diagnose,
     "this layer budget evicts from layers again when their observing rows are gone: diagnose=False"),
    (lambda p, run: p.rows.needs_full_prompt and run.diagnose,
     "drafted rows come after the chunk's, which diagnostics observe: diagnose=False"),
    (lambda p, run: run.archive_kv is not None and not p.recall,
     "recall_kv is about recall: give recall=True too, or leave it out"),
)  # fmt: skip


def check(policy: "Policy", *run: Run) -> None:
    """Raise ValueError, with the reason, if choices of the policy exclude each other or, if a `Run` is given, exclude a
    choice of the run."""
    for excluded, reason in RULES_OF_RUNS if run else RULES:
        if excluded(policy, *run):
            parts = ", ".join(written(kind, getattr(policy, kind)) for kind in PARTS)
            raise ValueError(f"{reason} (the policy has {parts})")
