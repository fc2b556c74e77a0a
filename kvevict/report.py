"""Reports the slots and costs of a patched model's last read."""

import copy
from typing import Any

from transformers.cache_utils import Cache

from .engine.hook.installed import plan_of
from .engine.memory.layer import EvictionLayer
from .models.families import find_decoder


def report(source: Any, positions: bool = False) -> dict[str, Any]:
    """Return the slots and costs of a read, as a plain dict.

    source   a patched model, for the last read of this thread or asyncio task, or of any one if this one has not read;
             or a cache (`past_key_values`, or the result of `kvevict.read`), for the last read into it or into the
             cache it was forked from, by any thread and under that read's policy

    seen               valid tokens per batch row, of this and earlier turns
    question           per batch row what chose the slots: `text`, None where there is no tokenizer; `tokens`, their
                       number; `found`: "named" (by kvevict.observing or a command), "template" (in the last user's
                       turn), "prompt" (there is no chat template) or "last tokens" (no question was found, and the
                       prompt's last tokens stand for it). None under a policy that looks for no question
    kept               [layer][row][kv head] slots stored when the read ended; None for layers that do not evict
    stored             the same of now, with the slots of tokens decoded since the read; of a model's dropped cache, of
                       its last token
    kept_share         per batch row, slots over the tokens seen, of all layers that evict; with a threshold it depends
                       on the text
    cache_bytes        live KV bytes at the read's end: all slots' keys and values, scales included
    full_cache_bytes   KV bytes of all tokens seen, as they are computed
    bits               [layer] bits of a number of stored keys and values; None for layers that do not evict
    wider_keys         layers that keep more bits for keys than the policy's kv: the expected error of a logit was above
                       1, or a run with another kv filled the cache
    padded_bytes       KV bytes if every head of a layer were padded to the longest
    peak_cache_bytes   the most live KV bytes at any moment of the read, the chunk in flight included
    archive_bytes      bytes of the slots, positions included, of the archive of recall=True; slots that a layer shares
                       with it count in cache_bytes, too
    archive_in         where the archive lies: a device such as "cuda:0", "cpu" for the host's memory, a folder, a
                       cache's file, or several of these; None without an archive
    recalled           [layer][row][kv head] kept slots that had been evicted before this read, and came back from
                       `archive_in` with recall=True; None where none could come back
    reach              [row] with recall=True: whether an answer attends to all slots or to chosen ones, and the rule
                       that decided (`recall_slots`); else None
    checked            with recall_check, since the read: `tokens`, the number of drafted tokens that were checked,
                       `replaced`, how many of them were replaced, and `calls`, the number of calls over all slots; of a
                       text's cache, those of the answers about it. None without
    overhead_bytes     bytes of free room, positions and carried scores
    seconds            per stage: read (all), attend, evict (choosing and moving slots; score, select, compact and
                       diagnose are its parts), draft (laq, speckv), recall (slots put back before the choice), and
                       decode (since the read). On a GPU only read is the time of the work; the others are the host's
                       time to launch it
    replayed           tokens decoded since the read without Python (`compiled`)
    not_recorded       why the last decoded token could not be recorded; None: it could, or it was not to be
    positions          [layer][row][kv head] ascending original positions of the slots, with positions=True
    diagnostics        with the policy's diagnose=True, [layer][row] each: evictions (number of chunks that lost slots
                       at their end) and means over these chunks: joint_error (CAOTE eq. 24), output_error (relative to
                       the output) and recall (share of the attention on kept slots), all by the observing rows'
                       attention to the slots alive before the eviction. The rows are the policy's, at most the last 64;
                       without rows, as in `h2o` and `streaming`, the chunk's last. If a prompt is repeated in parts,
                       the rows are those of the last part, and a batch row without tokens there gets NaN
    """
    held = isinstance(source, Cache)
    meter = getattr(source, "meter", None) if held else _of_model(source)
    if meter is None:
        raise ValueError(
            "no patched model has read anything into this cache, or it was loaded, pickled or copied since: report on "
            "the cache that was read"
        )
    result = copy.deepcopy({key: value for key, value in meter.report.items() if positions or key != "positions"})
    result["recalled"] = meter.recalled()
    result["question"] = [dict(text=each.text, tokens=each.tokens, found=each.how) for each in meter.question] or None
    result["checked"] = (
        dict(tokens=meter.checked, replaced=meter.replaced, calls=meter.checks) if meter.checks else None
    )
    own = [layer.counts for layer in source.layers if isinstance(layer, EvictionLayer)] if held else meter.stored
    counts = iter(own)
    result["stored"] = [heads and (next(counts).tolist() if own else [*heads]) for heads in result["kept"]]
    if positions:
        result["positions"] = [
            None if layer is None else [[head.tolist() for head in row] for row in layer]
            for layer in result["positions"]
        ]
    return result | {"seconds": dict(meter.seconds), "replayed": meter.replayed, "not_recorded": meter.unrecorded}


def _of_model(model: Any) -> Any:
    decoder = find_decoder(model)
    plan = plan_of(decoder)
    if plan is None:
        raise ValueError("the model is not patched; call kvevict.patch(model, policy, budget=...) first")
    meter = plan.meter()
    if meter.report is None:
        raise ValueError(
            "nothing was read yet; call model.generate(...) or model(...) first"
            + (" (in training mode the model runs unpatched: call model.eval())" if decoder.training else "")
        )
    return meter
