"""Which recording decodes a token. A cache with slots of its own has one recording; sequences whose slots lie in a pool
share those of the pool, one for each number of batch rows."""

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

from ...models.compat import CACHE
from ..read.step import Step
from . import obstacles
from .obstacles import Inputs
from .places import Places, pool_of
from .replay import Replay, ends, is_bound, storages_of

# Device type -> numbers of batch rows that steps over a pool are recorded for; other steps are padded to the next one
SIZES = {"cuda": (1, 2, 4, 8, 16)}
MOST = 8  # number of recordings over a pool
WATCHES = 16  # attempts to record a policy that evicts while decoding, each on a new cache or after slots have moved


def decoded(step: Step, run: Callable[..., ModelOutput], **inputs: Any) -> ModelOutput:
    """The decoder's output for a decoded token, by its forward `run` or, if possible, by a replay."""
    if step.plan.replays is None and (reason := obstacles.of_plan(step)):
        obstacles.refuse(step, reason)
    step.meter.unrecorded = step.plan.unrecorded
    if step.plan.replays is False or not step.cache.table.groups:
        return run(**inputs)
    own = {name: x for name, x in inputs.items() if x is not step.cache}
    if reason := obstacles.of_call(step, own):
        obstacles.tell(step, reason)
        return run(**inputs)
    replay = _recording(step, own)
    if replay is None or not replay.lock.acquire(blocking=False):  # another thread decodes other sequences by it
        return run(**inputs)
    try:
        return replay.step(step, lambda inputs: run(**inputs, **{CACHE: step.cache}), own)
    finally:
        replay.lock.release()


def _recording(step: Step, inputs: Inputs) -> Replay | None:
    """Return the recording for a step: the cache's last one, one of its pool, or a new one. None: there can be none
    now, or ever."""
    kept, plan = step.cache.__dict__, step.plan
    if "replay" in kept and kept["replay"].goes_on(step, inputs):
        return kept["replay"]
    storages = storages_of(step)
    if any(storage.table != step.cache.table.number for storage in storages):
        return None
    pool = None if is_bound(plan) else pool_of(storages)
    shared = deque[Replay](maxlen=1) if pool is None else pool.__dict__.setdefault("recordings", deque(maxlen=MOST))
    size = None if pool is None else _padded(step, inputs)
    known = [*([kept["replay"]] if "replay" in kept else []), *shared]
    found = next((each for each in known if each.serves(step, inputs, storages, {len(step.positions), size})), None)
    if found is None:
        plan.watches += plan.replays is None and step.chooser is not None
        if plan.watches > WATCHES:
            obstacles.refuse(step, "the policy moves slots to other places with every token")
            return None
        found = Replay(step, inputs, Places.of(storages, size))
        shared.append(found)
    kept["replay"] = found
    return found


def _padded(step: Step, inputs: Inputs) -> int | None:
    """Return the number of batch rows to which a step over a pool is padded; None if it is recorded for its own rows:
    there are more than any of `SIZES`, or slots are chosen after the token."""
    rows, sizes = len(step.positions), SIZES.get(step.positions.device.type, ())
    size = next((size for size in sizes if size >= rows > 1), None)
    if size is None or ends(step):
        return None
    of_rows = all(x.shape[:1] in ((1,), (rows,)) for x in inputs.values() if isinstance(x, Tensor))
    return size if of_rows else None
