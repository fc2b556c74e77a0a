"""Chooses an answer's tokens as the sampling fields of its request ask."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, SequenceBiasLogitsProcessor

from ..answering.writing import sent
from .errors import Json

LENGTHS = "max_completion_tokens", "max_tokens"  # the first one counts if a request has both
LONG = 1024  # most tokens of an answer, unless the request or the model's configuration sets another number
ZERO = 0.01  # lower temperatures mean greedy decoding
LEAST = -9999.0  # reported in place of lower log-probabilities: JSON has no infinite numbers


@dataclass(frozen=True)
class Decoding:
    """The sampling parameters of a request."""

    changes: Json = field(default_factory=dict)  # entries to replace in the model's `GenerationConfig`
    frequency: float = 0.0  # subtracted from a token's logit for each time that the answer has the token
    presence: float = 0.0  # subtracted once from the logit of each token that the answer has
    top: int | None = None  # number of likeliest tokens to report with each token; None: no log-probabilities

    @classmethod
    def of(cls, body: Json, config: Json) -> "Decoding":
        """Read the sampling parameters in a checked body. config: the entries of its field `generation_config` that the
        server uses."""
        changes = config | {name: body[name] for name in ("top_p", "top_k", "min_p") if name in body}
        changes |= next((dict(max_new_tokens=body[name]) for name in LENGTHS if name in body), {})
        if "temperature" in body:
            drawn = body["temperature"] >= ZERO
            changes |= dict(do_sample=drawn, temperature=float(body["temperature"]) if drawn else 1.0)
        if body.get("logit_bias"):
            changes["sequence_bias"] = {(int(token),): float(bias) for token, bias in body["logit_bias"].items()}
        asked = body.get("logprobs", False)
        top = None if asked is False else body.get("top_logprobs", 0) if asked is True else asked
        return cls(changes, body.get("frequency_penalty", 0.0), body.get("presence_penalty", 0.0), top)

    def config(self, of_model: GenerationConfig) -> GenerationConfig:
        """Return a copy of the model's `GenerationConfig` with this request's changes. If neither sets `top_k`, every
        token can be drawn."""
        config = copy.deepcopy(of_model)
        config.max_new_tokens = max(config.max_new_tokens or 0, LONG)
        for name, value in self.changes.items():
            setattr(config, name, value)
        if config.do_sample:
            config.top_k = config.top_k or 0  # 0: all tokens; Transformers' default is 50
        return config

    def processors(self, start: int) -> LogitsProcessorList:
        """Make the logits processors that Transformers lacks. start: number of the prompt's tokens, for which there is
        no penalty."""
        made: list[LogitsProcessor] = [] if self.top is None else [Probabilities(self.top)]
        if self.frequency or self.presence:
            made.append(Penalties(start, self.frequency, self.presence))
        return LogitsProcessorList(made)


class Penalties(LogitsProcessor):
    """Subtracts OpenAI's frequency and presence penalties from the logits of the answer's tokens, the ids from index
    `start` on."""

    def __init__(self, start: int, frequency: float, presence: float) -> None:
        self.start, self.frequency, self.presence = start, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        written = input_ids[:, self.start :]
        counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Probabilities(LogitsProcessor):
    """Keeps the next token's log-probabilities, after `logit_bias` and before temperature and penalties. It does not
    change the scores."""

    def __init__(self, top: int) -> None:
        self.top = top

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.logs = torch.log_softmax(scores[0].float(), -1).clamp_min(LEAST)
        return scores

    def of(self, token: int) -> tuple[float, dict[int, float]]:
        """Return a token's log-probability, and {token: log-probability} of the `top` likeliest tokens."""
        logs, ids = self.logs.topk(self.top)
        return self.logs[token].item(), dict(zip(ids.tolist(), logs.tolist()))


FIRST = SequenceBiasLogitsProcessor, Probabilities  # types of processors that run before all others


class TokenChooser:
    """Chooses the tokens of one answer from the model's logits.

    prompt      ids of the prompt
    most        most tokens of the answer
    processors  Transformers' logits processors
    noise       random generator on the CPU with which tokens are drawn; None: the likeliest token is chosen
    """

    def __init__(
        self, prompt: list[int], most: int, processors: LogitsProcessorList, noise: torch.Generator | None
    ) -> None:
        processors.sort(key=lambda each: type(each) not in FIRST)
        self.processors, self.noise = processors, noise
        self.probabilities = next((each for each in processors if isinstance(each, Probabilities)), None)
        self._ids: Any = torch.tensor([prompt + [0] * most])  # [1, prompt + most] ids of prompt and answer
        self._length = len(prompt)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        scores = logits[None].float()
        if self.processors:
            self._ids = self._ids.to(scores.device)  # copies only the first time: all scores are on one device
            scores = self.processors(self._ids[:, : self._length], scores)
        if self.noise is None:
            token = scores[0].argmax()
        else:  # the distribution is torch.multinomial's, which would wait for the GPU
            noise = torch.empty(scores.shape[1]).exponential_(generator=self.noise)
            token = (scores[0].softmax(-1) / sent(noise, scores.device)).argmax()
        if self.processors:
            self._ids[0, self._length] = token
        self._length += 1
        return token

    @contextlib.contextmanager
    def drafting(self) -> Iterator[None]:
        """A context whose tokens are chosen again after it."""
        length, noise = self._length, self.noise
        if noise is not None:
            self.noise = torch.Generator()
            self.noise.set_state(noise.get_state())
        try:
            yield
        finally:
            self._length, self.noise = length, noise

    def likely(self, token: int) -> tuple[float, dict[int, float]] | None:
        """Return (the newest token's log-probability, {token: log-probability} of the likeliest tokens); None if the
        request does not ask for probabilities."""
        return None if self.probabilities is None else self.probabilities.of(token)
