"""Trains LookaheadKV's adapter (METHODS section 6; LookaheadKV, table 16): the loop, its log and its checkpoints."""

import contextlib
import hashlib
import json
import math
import os
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...models.adapter import Adapter, targets_of
from ...models.families import base_model, context_of, device_of, find_decoder
from ...patch import is_patched
from ...policy.checks import at_least_0, count, installed, one_of
from ...store.files import write
from .. import checkpoint
from .data import Limits, Pair, StoredResponses, pairs
from .passes import loss, repeated, truth
from .validation import similarity

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
TARGETS = {"response": truth, "repeat": repeated}
WARMUP, BETAS, CLIP = 0.02, (0.9, 0.95), 1.0  # table 16: share of steps, Adam's betas, largest gradient norm
LR = {"qwen2": 2e-4, "qwen3": 2e-4, "qwen3_moe": 2e-4}  # model type -> learning rate (table 16); 1e-3 for others


@dataclass(frozen=True)
class LookaheadSettings:
    """The settings that, together with the model and the data, determine the adapter. A training continues from its
    checkpoint only with the same settings; a finished training may also continue with more steps."""

    steps: int = 7600
    batch: int = 32
    lr: float = 1e-3
    tokens: int = 32
    rank: int = 8
    alpha: float = 32
    targets: tuple = ()
    target: str = "response"
    seed: int = 0

    def __post_init__(self) -> None:
        count("steps", self.steps, 1)
        count("batch", self.batch, 1)
        at_least_0("lr", self.lr, positive=True)
        one_of("target", self.target, TARGETS)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, which is counted from 0: a linear warmup, then a cosine to 0."""
        warm = max(1, round(WARMUP * self.steps))
        rest = max(1, self.steps - warm)
        return self.lr * min(1, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * max(0, step + 1 - warm) / rest))

    def chosen(self, step: int, known: int) -> list:
        """Return the indices of the pairs that a step trains on, of `known` pairs. Every epoch has another order."""
        found = []
        for place in range(step * self.batch, (step + 1) * self.batch):
            order = list(range(known))
            random.Random(f"{self.seed}/{place // known}").shuffle(order)
            found.append(order[place % known])
        return found


def train(
    model: Any, data: str | Path | Iterable[dict[str, Any]], out: str | os.PathLike, *, tokenizer: Any = None,
    steps: int = 7600, batch: int = 32, lr: float | None = None, tokens: int = 32, rank: int = 8, alpha: float = 32,
    targets: str | list[str] = "all", target: str = "response", seed: int = 0, max_prompt: int = 16384,
    max_response: int = 512, held_out: int = 0, validate_every: int = 100, save_every: int = 100, progress: bool = True,
) -> Adapter:  # fmt: skip
    """Train an adapter for `model` on `data`, and save it in the folder `out`. Returns the `Adapter`.

    data          a JSONL file or an iterable of dicts with `prompt` and optionally `response`, or with chat `messages`.
                  Prompt and response are text or lists of token ids; a missing response is generated greedily by the
                  model and stored in `out`
    steps, batch  number of optimizer steps, and number of pairs per step in all processes together (gradients are
                  accumulated, pair by pair)
    lr            highest learning rate: the rate rises to it linearly, then falls to 0 as a cosine; None: the paper's,
                  2e-4 for Qwen and 1e-3 for other models
    tokens, rank, alpha, targets   options of the `Adapter`
    seed          seed of the adapter's first weights and of the order of pairs
    target        scores that the rows learn: "response": the mean attention of the response's rows (as in the paper).
                  "repeat": the scores `kvzip+` of a prompt that is read twice, for texts without a known question;
                  responses are not needed, and a prompt has at most half of the model's context
    held_out      number of last pairs to validate on instead of training, every `validate_every` steps: loss, recall of
                  the best eighth of the prompt and Kendall's tau against the true scores
    save_every    steps between checkpoints. If an interrupted training is called again, it continues from its last
                  checkpoint; a finished training that is called with more `steps` continues from its end, at the
                  learning rates of a training with that many steps

    `out` gets log.jsonl (one line per step, with the loss), checkpoint.pt and the adapter. Start several processes with
    `accelerate launch`. Raises ValueError for pairs that cannot be trained on, for a checkpoint that is damaged or has
    other settings, and for a loss that is not finite (the last checkpoint stays); OSError if `out` cannot be written.
    """
    check_installed(held_out)
    decoder, folder = find_decoder(model), Path(out)
    if is_patched(decoder):
        raise ValueError("the model is patched: call kvevict.unpatch(model) before training")
    if lr is None:
        lr = LR.get(decoder.config.model_type, 1e-3)
    settings = LookaheadSettings(steps, batch, lr, tokens, rank, alpha, targets_of(targets), target, seed)
    for name, value in (("max_prompt", max_prompt), ("max_response", max_response), ("save_every", save_every),
                        ("validate_every", validate_every)):  # fmt: skip
        count(name, value, 1)
    count("held_out", held_out, 0)
    context = context_of(decoder.config) or 2**31
    limits = Limits(max_prompt, max_response, context)
    if target == "repeat":  # the prompt is read twice, without a response
        limits = Limits(min(max_prompt, context // 2), 2**31, 2**32)
    known = pairs(data, tokenizer, limits)
    if target == "repeat":
        known = [pair._replace(response=()) for pair in known]
    if held_out >= len(known):
        raise ValueError(f"held_out={held_out} leaves nothing to train on of {len(known)} pairs; give more pairs")
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    made = Adapter(model, tokens, rank, alpha, settings.targets)
    with _frozen(base_model(model)):
        run = LookaheadTraining(model, decoder, made, known, held_out, folder, settings, max_response)
        run.go(save_every, validate_every, progress)
    return made


class _Loss(torch.nn.Module):
    """Computes the loss of one pair. It is a module with the adapter's parameters, so that accelerate can synchronise
    their gradients between processes."""

    decoder: torch.nn.Module

    def __init__(self, decoder: torch.nn.Module, adapter: Adapter, target: str) -> None:
        super().__init__()
        self.adapter, self.first_pass = adapter, TARGETS[target]
        object.__setattr__(self, "decoder", decoder)  # not a submodule: its weights are frozen

    def forward(self, prompt: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
        return loss(self.decoder, self.adapter, self.first_pass(self.decoder, prompt, response))


class LookaheadTraining:
    """A training of an adapter, from the start or from the checkpoint in the folder."""

    def __init__(
        self, model: torch.nn.Module, decoder: Any, adapter: Adapter, known: list, held_out: int, folder: Path,
        settings: LookaheadSettings, most: int,
    ) -> None:  # fmt: skip
        from accelerate import Accelerator

        self.decoder, self.adapter, self.folder, self.settings = decoder, adapter, folder, settings
        self.accelerator = Accelerator(cpu=device_of(decoder.get_input_embeddings()).type == "cpu")
        self.pairs, self.held = known[: len(known) - held_out], known[len(known) - held_out :]
        self.responses = StoredResponses(model, folder, most, self.accelerator.process_index)
        self.module = self.accelerator.prepare_model(_Loss(decoder, adapter, settings.target))
        self.optimizer = torch.optim.Adam(adapter.parameters(), lr=settings.lr, betas=BETAS)
        digest = hashlib.sha256(repr([pair[1:] for pair in known]).encode()).hexdigest()[:16]
        about = dict(vars(settings), held_out=held_out, data=digest, weights=adapter.weights)
        self.about = json.loads(json.dumps(about))
        self.step = 0

    def go(self, save_every: int, validate_every: int, progress: bool) -> None:
        from tqdm import tqdm

        main = self.accelerator.is_main_process
        self._resume()
        with tqdm(total=self.settings.steps, initial=self.step, desc="training", unit="step",
                  disable=None if progress and main else True) as bar:  # fmt: skip
            while self.step < self.settings.steps:
                line = self._one()
                self.step += 1
                done = self.step == self.settings.steps
                if self.held and main and (done or self.step % validate_every == 0):
                    line |= {"valid": self._validate()}
                if main:
                    with open(self.folder / LOG, "a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")
                    if done or self.step % save_every == 0:
                        self._save()
                bar.set_postfix(loss=f"{line['loss']:.4f}")
                bar.update()
        if main:
            self.adapter.save(self.folder, target=self.settings.target)
        self.accelerator.wait_for_everyone()

    def _one(self) -> dict:
        """Make one optimizer step, and return its line for the log. Raises ValueError, before weights change, if the
        loss or the gradient's norm is not finite."""
        start, settings, accelerator = time.perf_counter(), self.settings, self.accelerator
        chosen, world = settings.chosen(self.step, len(self.pairs)), accelerator.num_processes
        own = chosen[accelerator.process_index :: world]
        total, tokens = torch.zeros((), device=accelerator.device), 0
        for number, index in enumerate(own, 1):
            with contextlib.nullcontext() if number == len(own) else accelerator.no_sync(self.module):
                each = self.module(*self._ids(self.pairs[index]))
                accelerator.backward(each * (world / settings.batch))
            total += each.detach()
            tokens += len(self.pairs[index].prompt)
        mean = (accelerator.reduce(total, "sum") / settings.batch).item()
        norm = torch.nn.utils.clip_grad_norm_(self.adapter.parameters(), CLIP).item()
        if not math.isfinite(mean + norm):
            self.optimizer.zero_grad()
            raise ValueError(
                f"the loss is {mean}, its gradient's norm {norm}, at step {self.step + 1} (pairs "
                f"{', '.join(self.pairs[i].name for i in chosen[:4])}, ..); the last checkpoint in {self.folder} is "
                "good: give a smaller lr, or drop those pairs"
            )
        rate = settings.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return dict(step=self.step + 1, loss=mean, lr=rate, grad_norm=norm, tokens=tokens,
                    seconds=round(time.perf_counter() - start, 3))  # fmt: skip

    def _ids(self, pair: Pair) -> list:
        device = device_of(self.decoder.get_input_embeddings())
        return [torch.tensor(ids, dtype=torch.long, device=device) for ids in (pair.prompt, self.responses.of(pair))]

    def _validate(self) -> dict:
        """Return the means over the held-out pairs of what `similarity` returns."""
        first_pass = TARGETS[self.settings.target]
        found = [
            similarity(self.decoder, self.adapter, first_pass(self.decoder, *self._ids(pair))) for pair in self.held
        ]
        return {name: sum(each[name] for each in found) / len(found) for name in found[0]}

    def _save(self) -> None:
        adapter, optimizer = self.adapter.state_dict(), self.optimizer.state_dict()
        checkpoint.save(self.folder / CHECKPOINT, self.about, step=self.step, adapter=adapter, optimizer=optimizer)

    def _resume(self) -> None:
        log = self.folder / LOG
        if state := checkpoint.load(self.folder / CHECKPOINT, self.about, self.accelerator.device):
            self.adapter.load_state_dict(state["adapter"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
            write(log, "".join(f"{line}\n" for line in lines[: self.step]))


def check_installed(held_out: int) -> None:
    """Raise ValueError if accelerate is not installed, or, with held-out pairs to validate on, scipy."""
    installed("train", "training a lookahead adapter", "accelerate", *(["scipy"] if held_out else []))


@contextlib.contextmanager
def _frozen(model: torch.nn.Module) -> Iterator[None]:
    """Inside the context, keep the model in eval mode, and let no weight of it require a gradient."""
    wanted, training = [p for p in model.parameters() if p.requires_grad], model.training
    model.eval()
    for weight in wanted:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in wanted:
            weight.requires_grad_(True)
        model.train(training)
