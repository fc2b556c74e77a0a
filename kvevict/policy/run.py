"""The options of how a machine runs a policy: where slots are stored, in how many bits, and what is shown meanwhile."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .checks import flag, one_of
from .kv import KINDS

# option of `patch` and other functions -> the field of `Run` that it sets. `recall` is also a field of `Policy`.
OPTIONS = {
    "kv": "kv", "recall": "archive", "recall_kv": "archive_kv", "compiled": "compiled", "progress": "progress",
    "diagnose": "diagnose",
}  # fmt: skip
AUTO = ("cuda",)  # device types on which compiled="auto" records decoded tokens


@dataclass(frozen=True)
class Run:
    """How this machine runs a policy. `OPTIONS` names the option that sets each field.

    kv          how stored slots are represented (methods.md section 11): "model": in the model's dtype; "int8": in 8
                bits per number; "k8v4": keys in 8 bits, values in 4; "int4": in 4 bits. A layer whose logits have an
                expected error above 1 takes more bits for its keys
    archive     where the archive of a policy with recall=True is stored. True: in the memory of the model's device.
                "memory": in the host's memory, which is pinned if the model is on a GPU, and the GPU copies one layer
                at a time; for a model on a CPU, as True. A folder's path: in files of that folder, mapped into the
                host's memory ("./memory" is a folder)
    archive_kv  with recall=True: how the archive's slots are represented, with the names of `kv`, which must then be
                "model": the slots that a turn chooses from the archive are unpacked. None: as in `kv`
    compiled    True: the operations of a decoded token are recorded once, on a GPU as a CUDA graph, and replayed
                without Python; a call that cannot be recorded runs as with False, with one warning that says why.
                "auto": as True, but without the warning, on a GPU, where recorded tokens were measured faster; as False
                on a CPU, and for policies that evict while decoding
    progress    show a progress bar while a prompt is read
    diagnose    measure for `kvevict.report` how much of the observing rows' attention every eviction of a read loses;
                takes about a tenth more time
    """

    kv: str = "model"
    archive: bool | str = True
    archive_kv: str | None = None
    compiled: bool | str = "auto"
    progress: bool = False
    diagnose: bool = False

    def __post_init__(self) -> None:
        one_of("kv", self.kv, KINDS)
        if self.archive is not True and (not isinstance(self.archive, str) or not self.archive):
            raise TypeError(f"recall must be True, False, 'memory' or a folder's path as text, got {self.archive!r}")
        for name in ("progress", "diagnose"):
            flag(name, getattr(self, name))
        if self.compiled != "auto":
            flag("compiled", self.compiled)
        if self.archive_kv is not None:
            one_of("recall_kv", self.archive_kv, KINDS)
            if self.kv != "model":
                raise ValueError(
                    f"recall_kv={self.archive_kv!r}: with kv={self.kv!r} the archive is as the slots; leave it out"
                )

    def is_near(self, device: str) -> bool:
        """Return whether the archive is in the memory of a device; `device` is its type, such as "cuda"."""
        return self.archive is True or (self.archive == "memory" and device == "cpu")

    def records(self, device: str, evicts: bool) -> bool:
        """Return whether decoded tokens are to be recorded. device: type of the model's device, such as "cuda"; evicts:
        whether slots are evicted while decoding, for which recording was not measured on a GPU yet."""
        return device in AUTO and not evicts if self.compiled == "auto" else bool(self.compiled)


def apart(options: dict[str, Any]) -> tuple[dict[str, object], dict[str, Any]]:
    """Split options of `patch`, or the fields of a policy that an older version wrote as JSON, into (options of a
    policy, fields of a `Run`)."""
    policy = {name: value for name, value in options.items() if name not in OPTIONS}
    run = {OPTIONS[name]: value for name, value in options.items() if name in OPTIONS}
    if "archive" in run:
        place = run["archive"]
        policy["recall"] = place is not False
        run["archive"] = place is False or (os.path.abspath(place) if isinstance(place, os.PathLike) else place)
    return policy, run


def differences(run: Run) -> dict[str, object]:
    """Return {option: value} of the fields of a run that differ from their defaults."""
    return {name: getattr(run, each) for name, each in OPTIONS.items() if getattr(run, each) != getattr(Run, each)}


def refuse(names: Iterable[str]) -> None:
    """Raise TypeError if one of these names of a `Policy`'s arguments is an option of a `Run`."""
    for name in names:
        if name in OPTIONS and name != "recall":
            raise TypeError(
                f"{name} is not part of a Policy but of how a machine runs it: give it beside the policy, as in "
                f"kvevict.patch(model, policy, {name}=...)"
            )
