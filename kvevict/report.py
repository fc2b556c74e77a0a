"""What the last read of a patched model kept and cost."""

import copy

from transformers.cache_utils import Cache

from .engine.hook.installed import patch_of
from .families import find_decoder


def report(source, positions: bool = False) -> dict:
    """What a read kept and cost: a plain dict.

    source   a patched model: the last read of this thread or asyncio task; of any, where this one read nothing. Or a
             cache (`past_key_values`, what `kvevict.read` gives): the last read into it or into what it was forked
             from, whoever read that and whichever policy the model has now

    seen               valid tokens per batch row, of this and earlier turns
    kept               [layer][row][kv head] slots stored when the read ended; None for layers that do not evict
    kept_share         per batch row, slots of all those layers and heads over the tokens seen in each: with a threshold
                       it follows the text
    cache_bytes        live KV bytes then: 2 * bytes * head_dim * slots
    padded_bytes       what those would be if every head of a layer were padded to its longest
    peak_cache_bytes   the most live KV bytes at any moment of the read, the chunk in flight included
    overhead_bytes     what is allocated beyond: free room, positions, carried scores
    seconds            per stage: read (all), attend, evict (choosing and moving slots, of which score, select,
                       compact and diagnose are parts), draft (laq, speckv); decode since then. On a GPU
                       only read is the time of the work: the others are what the host takes to launch it
    positions          [layer][row][kv head] ascending original positions of the slots, with positions=True
    diagnostics        with the policy's diagnose=True, [layer][row] each: evictions, how many chunks' ends took slots,
                       and means over those: joint_error (CAOTE eq. 24) and output_error (relative to the output) of
                       the observing rows' attention, recall: the share of their attention on slots that were kept.
                       The rows are those that the policy scores by, at most the last 64 (of `h2o`, `streaming` and
                       what has no rows of its own: the chunk's last; of a prompt that is repeated in parts, the last
                       part's, and NaN for a row without tokens in that); the slots, those alive before the eviction
    """
    meter = _of_cache(source) if isinstance(source, Cache) else _of_model(source)
    result = copy.deepcopy({key: value for key, value in meter.report.items() if positions or key != "positions"})
    if positions:
        result["positions"] = [
            None if layer is None else [[head.tolist() for head in row] for row in layer]
            for layer in result["positions"]
        ]
    return result | {"seconds": dict(meter.seconds)}


def _of_cache(cache):
    meter = getattr(cache, "meter", None)
    if meter is None:
        raise ValueError(
            "no patched model has read anything into this cache, or it was loaded, pickled or copied since: report on "
            "the cache that was read"
        )
    return meter


def _of_model(model):
    decoder = find_decoder(model)
    patch = patch_of(decoder)
    if patch is None:
        raise ValueError("the model is not patched; call kvevict.patch(model, policy, budget=...) first")
    meter = patch.meter()
    if meter.report is None:
        raise ValueError(
            "nothing was read yet; call model.generate(...) or model(...) first"
            + (" (in training mode the model runs unpatched: call model.eval())" if decoder.training else "")
        )
    return meter
