"""How the tokens of an answer are chosen, as a request's fields say."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, SequenceBiasLogitsProcessor

from ..answering.writing import sent

LENGTHS = "max_completion_tokens", "max_tokens"  # the first of these fields that a request has counts
LONG = 1024  # most tokens of an answer, unless a request or the model's configuration says another number
ZERO = 0.01  # a temperature below it draws nothing
LEAST = -9999.0  # the least logarithm of a probability: JSON has no infinite numbers


@dataclass(frozen=True)
class Decoding:
    """How a request wants its answers' tokens chosen.

    changes    fields of the model's `GenerationConfig` and their values
    frequency  penalty of a token for each time that it was written
    presence   penalty of a token that was written at all
    top        number of alternatives beside each token's probability; None: no probabilities
    """

    changes: dict = field(default_factory=dict)
    frequency: float = 0.0
    presence: float = 0.0
    top: int | None = None

    @classmethod
    def of(cls, body: dict[str, Any], said: dict[str, Any]) -> "Decoding":
        """Read the fields of a checked body. said: the changes that its `generation_config` asks for."""
        changes = said | {name: body[name] for name in ("top_p", "top_k", "min_p") if name in body}
        changes |= next((dict(max_new_tokens=body[name]) for name in LENGTHS if name in body), {})
        if "temperature" in body:
            drawn = body["temperature"] >= ZERO
            changes |= dict(do_sample=drawn, temperature=float(body["temperature"]) if drawn else 1.0)
        if body.get("logit_bias"):
            changes["sequence_bias"] = {(int(token),): float(bias) for token, bias in body["logit_bias"].items()}
        asked = body.get("logprobs", False)
        top = None if asked is False else body.get("top_logprobs", 0) if asked is True else asked
        return cls(changes, body.get("frequency_penalty", 0.0), body.get("presence_penalty", 0.0), top)

    def config(self, of_model: Any) -> Any:
        """Return the model's configuration with the changes. Without a `top_k` tokens are drawn from all."""
        config = copy.deepcopy(of_model)
        config.max_new_tokens = max(config.max_new_tokens or 0, LONG)
        for name, value in self.changes.items():
            setattr(config, name, value)
        if config.do_sample:
            config.top_k = config.top_k or 0  # Transformers' default is 50
        return config

    def processors(self, start: int) -> LogitsProcessorList:
        """Make Transformers' processors. start: number of the prompt's tokens, which are not penalised."""
        made: list = [] if self.top is None else [Probabilities(self.top)]
        if self.frequency or self.presence:
            made.append(Penalties(start, self.frequency, self.presence))
        return LogitsProcessorList(made)


class Penalties(LogitsProcessor):
    """OpenAI's penalties, which are subtracted from a token's logit."""

    def __init__(self, start: int, frequency: float, presence: float) -> None:
        self.start, self.frequency, self.presence = start, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        written = input_ids[:, self.start :]
        counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Probabilities(LogitsProcessor):
    """Logarithms of the next token's probabilities, after `logit_bias`, before a temperature and penalties."""

    def __init__(self, top: int) -> None:
        self.top = top

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.logs = torch.log_softmax(scores[0].float(), -1).clamp_min(LEAST)
        return scores

    def of(self, token: int) -> tuple[float, dict[int, float]]:
        """Return a token's log-prob, and {token: log-prob} of the likeliest tokens."""
        logs, ids = self.logs.topk(self.top)
        return self.logs[token].item(), dict(zip(ids.tolist(), logs.tolist()))


FIRST = SequenceBiasLogitsProcessor, Probabilities


class Chooser:
    """Chooses the tokens of one answer.

    prompt      ids of the prompt, which at most `most` tokens of the answer follow
    processors  Transformers' `LogitsProcessorList`
    noise       the generator of the draws, on the CPU; None: the likeliest token is taken
    """

    def __init__(
        self, prompt: list[int], most: int, processors: LogitsProcessorList, noise: torch.Generator | None
    ) -> None:
        processors.sort(key=lambda each: type(each) not in FIRST)  # Transformers' own penalties stand before ours
        self.processors, self.noise = processors, noise
        self.probabilities = next((each for each in processors if isinstance(each, Probabilities)), None)
        self._ids: Any = torch.tensor([prompt + [0] * most])
        self._length = len(prompt)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        scores = logits[None].float()
        if self.processors:
            self._ids = self._ids.to(scores.device)  # once: scores stay on one device
            scores = self.processors(self._ids[:, : self._length], scores)
        if self.noise is None:
            token = scores[0].argmax()
        else:  # as torch.multinomial, which waits for a GPU
            noise = torch.empty(scores.shape[1]).exponential_(generator=self.noise)
            token = (scores[0].softmax(-1) / sent(noise, scores.device)).argmax()
        if self.processors:
            self._ids[0, self._length] = token
        self._length += 1
        return token

    def likely(self, token: int) -> tuple[float, dict[int, float]] | None:
        """Return `Probabilities.of` the newest token; None: the request does not ask for probabilities."""
        return None if self.probabilities is None else self.probabilities.of(token)
