"""Trains gates (METHODS section 9): the loop, its settings and its checkpoint."""

import hashlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ...cautions import bar
from ...engine.measure.gates import Gates
from ...engine.measure.moments import model_of
from ...engine.memory import ranks
from ...models import families, trial
from ...models.families import base_model, context_of, find_decoder
from ...models.refusals import check_model
from ...patch import is_patched
from ...policy.checks import at_least_0, count, one_of
from .. import checkpoint
from ..processes import Processes
from ..targets import LABELS
from .labels import SKIP, each_layer, pieces
from .measure import measure

CHECKPOINT = "checkpoint.pt"  # file of process 0; process N > 0 writes "checkpoint.N.pt"
MINUTE = 60  # seconds between checkpoints
LENGTH, LIMIT = 1500, 30_000  # default limits: tokens of one piece, and of all pieces


def train(
    model: Any, texts: str | Path | Iterable[object], out: str | os.PathLike, *, tokenizer: Any = None,
    label: str = "kvzip", length: int = LENGTH, limit: int = LIMIT, held_out: int | None = None, ridge: float = 0.01,
    progress: bool = True,
) -> Gates:  # fmt: skip
    """Fit linear gates for `model` on `texts`, and save them in the folder `out`. Returns the `Gates`.

    texts     a text file's path, or an iterable of texts or of 1-D token ids
    label     policy whose scores the gates learn, "kvzip" or "kvzip+"; each piece is read twice to compute them
    length    most tokens of a piece; half of the model's context if that is less
    limit     most tokens of all pieces together; if the texts have more, pieces are taken evenly from all texts
    held_out  number of last pieces to validate on instead of training (None: an eighth of all); `Gates.about` then has
              R^2, recall and Kendall's tau on these pieces
    ridge     share of each input's variance that is added to the variance (ridge regression)

    Several processes (`accelerate launch`) share the pieces: each process calls this function, and the first process
    validates and writes. If an interrupted training is called again, it continues from its last checkpoint, which is at
    most a minute old. Raises ValueError for texts that are too short, for a model that is patched, split over processes
    or of an unsupported type, and for a checkpoint that is damaged or has other settings; OSError if `out` cannot be
    written.
    """
    one_of("label", label, LABELS)
    count("length", length, SKIP + 2)
    count("limit", limit, 2)
    at_least_0("ridge", ridge)
    if held_out is not None:
        count("held_out", held_out, 0)
    settings = dict(label=label, length=length, limit=limit, held_out=held_out, ridge=ridge)
    decoder, folder = find_decoder(model), Path(out)
    check_model(model)
    if is_patched(decoder):
        raise ValueError("the model is patched: call kvevict.unpatch(model) before training")
    if ranks.of(base_model(model)).size > 1:
        raise ValueError("the model is split over processes (tensor parallel): load it in one to train its gates")
    context = context_of(decoder.config) or 2 * length
    known = pieces(texts, tokenizer, min(length, context // 2), limit, decoder.config.vocab_size)
    last = held_out
    if last is None:
        last = -(-len(known) // 8) if len(known) > 1 else 0
    if last >= len(known):
        raise ValueError(f"held_out={last} leaves nothing to train on of {len(known)} pieces; give more text")
    processes = Processes()
    if processes.size > len(known) - last:
        raise ValueError(f"{processes.size} processes share {len(known) - last} pieces: give more text, or start fewer")
    folder.mkdir(parents=True, exist_ok=True)
    processes.join()
    with trial.quiet(model):
        first = processes.rank == 0
        run = GateTraining(model, known[: len(known) - last], folder, settings, processes)
        made = run.go(progress and first)
        if first and last:
            held = known[len(known) - last :]
            made.about["held_out"] = measure(model, label, held, made, progress)
        if first:
            made.save(folder)
        made.about = processes.broadcast(made.about)
    run.checkpoint.unlink(missing_ok=True)
    return made


class Fit:
    """A ridge regression in closed form, computed from sums of products in float64. ridge: share of each input's
    variance that is added to the variance."""

    def __init__(self, ridge: float) -> None:
        self.ridge = ridge
        self.products: Any = None  # float64 [1 + E, 1 + E + heads]: sums over samples of (1, x) times (1, x, y)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add T samples: inputs x [T, E] and labels y [T, heads]."""
        rows = torch.cat([torch.ones_like(x[:, :1]), x, y], 1).double()
        product = torch.cat([torch.ones_like(x[:, :1]), x], 1).double().T @ rows
        self.products = product if self.products is None else self.products.add_(product)

    def affine(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Solve the regression. Returns (weight [heads, E], bias [heads]) in fp32."""
        own = len(self.products)
        mean = self.products[0] / self.products[0, 0]
        centred = self.products[1:] / self.products[0, 0] - mean[1:own, None] * mean
        covariance, both = centred[:, 1:own], centred[:, own:]
        variance = covariance.diagonal()
        most = variance.max().clamp_min(1e-30)
        weight = torch.linalg.solve(covariance + torch.diag(self.ridge * variance + 1e-9 * most), both)
        return weight.T.float(), (mean[own:] - mean[1:own] @ weight).float()


class GateTraining:
    """A training of gates, from the start or from a checkpoint with the same settings, model and texts."""

    def __init__(self, model: torch.nn.Module, known: list, folder: Path, settings: dict, processes: Processes) -> None:
        self.model, self.decoder, self.processes = model, find_decoder(model), processes
        self.pieces, self.tokens, self.count = known[processes.rank :: processes.size], sum(map(len, known)), len(known)
        number = f".{processes.rank}" if processes.rank else ""
        self.checkpoint = (folder / CHECKPOINT).with_suffix(f"{number}.pt")
        self.fits = {index: Fit(settings["ridge"]) for index in families.evicting(self.decoder.config)}
        digest = hashlib.sha256(repr([ids.tolist() for ids in known]).encode()).hexdigest()[:16]
        self.about = settings | dict(data=digest, base=model_of(self.decoder), processes=processes.size)
        self.done = 0

    def go(self, progress: bool) -> Gates:
        self._resume()
        saved, first = time.monotonic(), self.done
        for ids in bar(self.pieces[first:], "training", "piece", progress):
            each_layer(self.model, self.about["label"], ids, lambda i, x, y: self.fits[i].add(x, y))
            self.done += 1
            if time.monotonic() - saved >= MINUTE and self.done < len(self.pieces):
                self._save()
                saved = time.monotonic()
        if self.processes.size > 1:
            for fit in self.fits.values():
                fit.products = self.processes.sum(fit.products)
        about = {name: self.about[name] for name in ("label", "length", "ridge", "base")}
        layers = {index: (fit.affine(),) for index, fit in self.fits.items()}
        return Gates(layers, about | dict(kind="linear", tokens=self.tokens, pieces=self.count))

    def _save(self) -> None:
        fits = {index: fit.products for index, fit in self.fits.items()}
        checkpoint.save(self.checkpoint, self.about, done=self.done, fits=fits)

    def _resume(self) -> None:
        if state := checkpoint.load(self.checkpoint, self.about, families.device_of(self.decoder)):
            for index, fit in self.fits.items():
                fit.products = state["fits"][index]
            self.done = state["done"]
