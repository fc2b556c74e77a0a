"""Gates that read texts for many requests: those of a folder, or trained for it by another process while requests
are served."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import families
from ..commands import check_folder
from ..engine.measure.gates import CONFIG, loaded
from ..families import base_model, device_of, find_decoder
from ..lab.analysis.cost import Hardware
from ..lab.analysis.gates import gates as costs
from ..lab.analysis.shape import shape_of
from ..patch import evicting
from ..policy.checks import PLENTY
from ..policy.policy import build
from ..policy.text import parse_policy
from .log import LOG

if TYPE_CHECKING:
    from .server import Server

GATE, TWICE = "gate", "read-twice"
ROWS = 512  # of the products that are timed
PROCESS = 1 << 30  # bytes of Python, PyTorch and the validation: 0.92 GiB measured of SmolLM2-135M


def check(folder: str | None, data: str | None, unasked: str | None) -> None:
    """Raise ValueError for options that cannot be obeyed, before a model is loaded."""
    if folder is None:
        if data is not None:
            raise ValueError("--gates-data is of the training that --gates begins: give --gates FOLDER, too")
        return
    pair(unasked)
    if data is not None and not Path(data).is_file():
        raise ValueError(f"--gates-data {data} does not exist; give a text")
    if not there(folder):
        check_folder("--gates", folder)
        if data is None and importlib.util.find_spec("pydoc_data") is None:
            raise ValueError(
                "--gates trains on Python's documentation, which this Python lacks: give --gates-data FILE"
            )


def pair(unasked: str | None) -> tuple:
    """(the policy with gates, the one without) that `--unasked` asks for, as texts."""
    name, options = (GATE, {}) if unasked is None else parse_policy(unasked)
    if name not in (GATE, TWICE) or "gates" in options:
        raise ValueError(
            f"--unasked {unasked} and --gates: gates are of the policy gate, and read-twice comes before them; give "
            "one of these without gates=, or leave --unasked out"
        )
    return (unasked or GATE, TWICE) if name == GATE else (GATE, unasked)


def there(folder: str | os.PathLike) -> bool:
    """Whether a folder has gates. Their config is written last."""
    return (Path(folder) / CONFIG).is_file()


class Gates:
    """Of one server.

    model    loaded, not yet patched; name, dtype, device: as it was loaded, for the process that trains
    policy   reads with the gates, before: without; `pair`'s texts

    Raises ValueError for gates of another model, and as `trainable`.
    """

    def __init__(self, model, folder: str, data: str | None, unasked: str | None, name, dtype: str, device):
        self.model, self.folder, self.data = model, Path(folder).absolute(), data
        self.policy, self.before = pair(unasked)
        self.there = there(self.folder)
        self._arguments = ["--kind", "gates", "--model", os.fspath(name), "--dtype", dtype]
        self._arguments += [] if device is None else ["--device", device]
        self._changing, self._ended = threading.Lock(), False
        self._process: subprocess.Popen | None = None
        if self.there:
            self._name()
        else:
            trainable(model)
            self.cost = cost(model)  # now: while its configuration is tried, torch's default dtype is another one

    @property
    def reads(self) -> str:
        """The policy that reads shared texts at first."""
        return self.policy if self.there else self.before

    @property
    def older(self) -> str | None:
        """The policy that may have read prefixes of the store before."""
        return self.before if self.there else None

    def begin(self, server: Server) -> None:
        """Train gates for a server that begins to answer, where there are none."""
        if self.there:
            self._used(server)
        else:
            threading.Thread(target=self._run, args=(server,), name="kvevict gates", daemon=True).start()

    def end(self) -> None:
        """End the training. The next server of the folder goes on from its last checkpoint."""
        with self._changing:
            self._ended = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    # -- in a thread ------------------------------------------------------------------------------------------------

    def _run(self, server) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._alone(server) as lock:
                if not there(self.folder):
                    self._train(server, lock)
            server.scheduler.submit(self._name).result()
            server.policies = replace(server.policies, unasked=self.policy, older=self.before)
            self.there = True
            self._used(server)
        except Exception as error:
            if not self._ended:
                server.metrics.gates.state("failed")
                LOG.error("gates cannot be had", extra={"facts": {"reason": str(error), "policy": self.before}})

    @contextlib.contextmanager
    def _alone(self, server):
        """Inside, no other server trains in the folder. Yields the lock. The training process holds it, too: nobody
        trains before that has ended."""
        with open(os.open(self.folder / "gates.lock", os.O_WRONLY | os.O_CREAT, 0o600), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                server.metrics.gates.state("waiting")
                LOG.info("another server trains the gates", extra={"facts": {"folder": str(self.folder)}})
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield lock.fileno()

    def _train(self, server, lock: int) -> None:
        """Raises ValueError with the process's last words where it fails."""
        for left in self.folder.glob(".kvevict-*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        free = free_bytes(device_of(self.model))
        if self.cost.get("peak_bytes", 0) > free:
            raise ValueError(
                f"the training takes {self.cost['peak_bytes']} bytes of memory, of which {free} are free: free more, "
                f"or train them elsewhere (kvevict train --kind gates) and copy them to {self.folder}"
            )
        facts = dict(folder=str(self.folder), text=self.data or "Python's documentation") | self.cost
        LOG.info("the training of gates begins", extra={"facts": facts})
        arguments = [*self._arguments, "--data", self.data or "-", "--out", str(self.folder)]
        began = time.monotonic()
        with self._changing:
            if self._ended:
                raise ValueError("the server ends")
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "kvevict.serve.trainer", *arguments], stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", pass_fds=[lock],
                start_new_session=True,  # Ctrl-C is for the server
            )  # fmt: skip
        server.metrics.gates.state("training")
        said = process.stderr.read().split("\n")
        if process.wait():
            words = [line for line in said if line.strip() and process.returncode > 0]
            raise ValueError(words[-1] if words else f"the process ended with status {process.returncode}")
        LOG.info("the training of gates ended", extra={"facts": dict(seconds=round(time.monotonic() - began, 1))})

    def _name(self) -> None:
        """From now on the policy gate has these."""
        decoder = find_decoder(self.model)
        kinds = families.layer_kinds(decoder.config)
        loaded(os.fspath(self.folder), decoder, [i for i, kind in enumerate(kinds) if kind in families.EVICTS])

    def _used(self, server) -> None:
        server.metrics.gates.state("used")
        LOG.info("gates are used", extra={"facts": {"folder": str(self.folder), "policy": self.policy}})


def trainable(model: Any) -> None:
    """Raise ValueError for a model without a way to train its gates."""
    try:
        with evicting(model, build("kvzip", budget=PLENTY, layers="uniform"), tokenizer=False):
            pass
    except ValueError as error:
        raise ValueError(f"--gates: no gates can be trained for this model: {error}") from None


def cost(model: Any) -> dict[str, Any]:
    """The costs of a training, for its log line: see `analysis.gates.gates`. seconds: by `Hardware.efficiency` of
    this machine's `rate`."""
    decoder, dtype = find_decoder(model), base_model(model).dtype
    try:
        shape = shape_of(model.config, str(dtype).removeprefix("torch."))
        context = getattr(decoder.config, "max_position_embeddings", None)
        rates = {name: rate(shape.hidden, each, device_of(model)) for name, each in
                 (("tflops", dtype), ("tflops64", torch.float64))}  # fmt: skip
        made = costs(shape, None, Hardware(bandwidth=float("inf"), **rates), context)
    except ValueError as error:
        return dict(cost=f"unknown: {error}")
    training = made["training"]
    return dict(parameters=made["bytes"] // 4, bytes=made["bytes"], tokens=training["tokens"],
                peak_bytes=training["peak_bytes"] + PROCESS, seconds=round(training["seconds"]))  # fmt: skip


def free_bytes(device: torch.device) -> float:
    """Of memory that a further process can have."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError):  # another system than Linux
        known = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2]
        return int(known.split()[0]) << 10
    return float("inf")


def rate(width: int, dtype: torch.dtype, device: torch.device) -> float:
    """TFLOP/s of a product of `ROWS` rows with a matrix [width, width], the best of three; on a CPU as it would be
    without other work there."""
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    x, weight = (torch.randn(rows, width, device=device).to(dtype) for rows in (ROWS, width))
    best = float("inf")
    for _ in range(3):
        began = clock()
        (x @ weight)[0, 0].item()  # waits for a GPU
        best = min(best, clock() - began)
    return 2 * ROWS * width * width / best / 1e12
