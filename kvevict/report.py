"""Reports the slots and costs of a patched model's last read."""

import copy
from typing import Any

from transformers.cache_utils import Cache

from .engine.hook.installed import plan_of
from .models.families import find_decoder


def report(source: Any, positions: bool = False) -> dict[str, Any]:
    """Return the slots and costs of a read, as a plain dict.

    source   a patched model, for the last read of this thread or asyncio task, or of any one if this one has not read;
             or a cache (`past_key_values`, or the result of `kvevict.read`), for the last read into it or into the
             cache it was forked from, by any thread and under that read's policy

    seen               valid tokens per batch row, of this and earlier turns
    kept               [layer][row][kv head] slots stored when the read ended; None for layers that do not evict
    kept_share         per batch row, slots over the tokens seen, of all layers that evict; with a threshold it depends
                       on the text
    cache_bytes        live KV bytes at the read's end: all slots' keys and values, scales included
    full_cache_bytes   KV bytes of all tokens seen, as they are computed
    bits               [layer] bits of a number of stored keys and values; None for layers that do not evict
    wider_keys         layers that keep more bits for keys than the policy's kv: the expected error of a logit was above
                       1, or a run with another kv filled the cache
    padded_bytes       KV bytes if every head of a layer were padded to the longest
    peak_cache_bytes   the most live KV bytes at any moment of the read, the chunk in flight included
    archive_bytes      bytes of the archive that recall=True chooses from
    archive_in         where the archive lies: a device such as "cuda:0", "cpu" for the host's memory, or "files"; None
                       without an archive
    recalled           [layer][row][kv head] kept slots that had been evicted before this read, and came back with
                       recall=True; None where none could come back
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
    meter = getattr(source, "meter", None) if isinstance(source, Cache) else _of_model(source)
    if meter is None:
        raise ValueError(
            "no patched model has read anything into this cache, or it was loaded, pickled or copied since: report on "
            "the cache that was read"
        )
    result = copy.deepcopy({key: value for key, value in meter.report.items() if positions or key != "positions"})
    result["recalled"] = meter.recalled()
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
