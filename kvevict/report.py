"""What the last read of a patched model kept and cost."""

import copy
import threading

from .compat import STATE
from .patch import find_decoder, is_patched


def report(model, positions: bool = False) -> dict:
    """What the last read of this thread (of any thread, where this one read nothing) kept and cost: a plain dict.

    seen               valid tokens per batch row, of this and earlier turns
    kept               [layer][row][kv head] slots stored when the read ended; None for layers that do not evict
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
    decoder = find_decoder(model)
    if not is_patched(decoder):
        raise ValueError("the model is not patched; call kvevict.patch(model, policy, budget=...) first")
    state = getattr(decoder, STATE)
    own = state.meters.get(threading.current_thread())
    meter = own if own is not None and own.report is not None else state.last_meter
    if meter.report is None:
        raise ValueError(
            "nothing was read yet; call model.generate(...) or model(...) first"
            + (" (in training mode the model runs unpatched: call model.eval())" if decoder.training else "")
        )
    result = copy.deepcopy({key: value for key, value in meter.report.items() if positions or key != "positions"})
    if positions:
        result["positions"] = [
            None if layer is None else [[head.tolist() for head in row] for row in layer]
            for layer in result["positions"]
        ]
    return result | {"seconds": dict(meter.seconds)}
