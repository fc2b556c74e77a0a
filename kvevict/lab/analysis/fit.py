"""Computes the memory that a prompt and its answer take, and the memory of this machine."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from ...engine.memory.storage import ROOM_TO_REPLAY
from ...models.loading import place
from ...policy.building import Chosen
from ...policy.kv import POSITION
from .cost import plan
from .shape import Shape

CGROUP = Path("/sys/fs/cgroup/memory.max")  # the limit of a container's memory


@dataclass(frozen=True)
class Need:
    """The bytes that a prompt and its answer take at most: `parts` on the model's device, and, of an archive in the
    host's memory or in files, `elsewhere`."""

    parts: dict[str, int]
    elsewhere: int = 0

    @property
    def device(self) -> int:
        return sum(self.parts.values())


def needed(
    shape: Shape, chosen: Chosen, tokens: int, *, batch: int = 1, new_tokens: int = 256, on_cpu: bool = False
) -> Need:
    """Compute the memory for reading a prompt of `tokens` tokens in each of `batch` rows and writing `new_tokens` more,
    with a further question where the policy recalls.

    Beside the slots, with their positions, count the new keys and values of a chunk, a copy of one layer's slots while
    they move, and free room: an eighth where nothing is evicted, else the rows that recorded tokens are given. An
    archive counts once, with a copy of one layer while that layer attends; elsewhere (recall="memory" on a GPU, or a
    folder) the device has two layers of it. Left out are drafts, scores and what the driver takes."""
    policy, run = chosen
    layers, kept = shape.windows.count(None), replace(shape, kv=run.kv)
    options = dict(batch=batch, new_tokens=new_tokens, run=run)
    got = plan(shape, policy, tokens, **options)  # type: ignore[arg-type]  # mypy joins the options' types
    slots = max(got["peak_cache_bytes"], got["decode"]["cache_bytes"])
    if policy.recall_slots is not None:
        slots = max(slots, plan(shape, policy.recalling, tokens, **options)["decode"]["cache_bytes"])  # type: ignore
    rows = batch * layers
    grows = got["cache_bytes"] >= kept.slot_bytes * rows * tokens
    room = slots // 8 if grows else kept.slot_bytes * rows * ROOM_TO_REPLAY
    parts = {
        "weights": got["weight_bytes"],
        "slots and a chunk's": slots + slots * POSITION * shape.kv_heads // kept.slot_bytes,
        "room and moves": room + max(got["cache_bytes"], slots if grows else 0) // layers,
        "sliding windows": got["sliding_bytes"],
        "activations of a chunk": got["activation_bytes"],
    }
    archive, elsewhere = got.get("archive_bytes", 0), 0
    if run.archive is True or (on_cpu and run.archive == "memory"):
        parts["archive"] = archive + archive // layers
    else:
        parts["archive"], elsewhere = min(archive, 2 * archive // layers), archive
    return Need({name: size for name, size in parts.items() if size}, elsewhere)


def own_memory(device: str | None = None) -> tuple[int, str, bool]:
    """Return (bytes of memory, a name, whether it is the host's) of a device; None: of this machine's GPU, if there is
    one and the build has kernels for it, else of the host, within the limit of its container."""
    import torch

    where = place(device)
    if where.startswith("cuda"):
        about = torch.cuda.get_device_properties(where)
        return about.total_memory, about.name, False
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP.read_text().strip() if CGROUP.is_file() else ""
    return min(most, int(limit)) if limit.isdigit() else most, "this machine", True
