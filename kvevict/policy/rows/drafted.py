"""Rows that observe with tokens after the prompt: given tokens, or drafted tokens."""

import functools
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ...models import families
from ...models.compat import CACHE, cache_of
from ...models.loading import pretrained
from ..checks import count, flag
from ..inputs import CallRows, LayerRows, Observation, OwnPolicy, PromptCall, PromptRead
from . import ROWS, AppendedRows, Rows


@ROWS.add("given")
@dataclass(frozen=True)
class Given(Rows):
    """Given tokens that will follow the prompt observe, as the true response does in LookaheadKV's eq. 2.

    ids   token ids, the same for every row of a batch. They are appended to every chunk, at the positions after the
          prompt; each attends to those before it, and none is stored
    """

    ids: tuple[int, ...] = ()
    needs_question: ClassVar[bool] = True

    @property
    def most(self) -> int:
        return len(self.ids)

    decoded = most

    def ready(self, decoder: Any) -> None:
        if not self.ids:
            raise ValueError(
                "rows='given' needs ids=(...), token ids that will follow the prompt (for oracle: the response)"
            )

    def check(self, policy: OwnPolicy) -> None:
        ids = self.ids
        if not isinstance(ids, tuple) or not all(isinstance(i, numbers.Integral) and int(i) >= 0 for i in ids):
            raise ValueError(f"ids must be a tuple of token ids that follow the prompt, got {self.ids!r}")

    def with_response(self, response: Sequence[int]) -> Rows:
        return self if self.ids else Given(tuple(response))

    def appended(self, tokens: int, rows: int, last: bool) -> int:
        return len(self.ids)

    def prepare(self, arguments: PromptCall, read: PromptRead) -> AppendedRows | None:
        if not read.evicts:
            return None
        largest, known = max(self.ids), arguments.decoder.config.vocab_size
        if largest >= known:
            raise ValueError(f"ids hold token id {largest}, and the model knows ids below {known}")
        return after(arguments, read, torch.tensor(self.ids, device=arguments.device).expand(arguments.batch, -1))

    def observe(self, call: LayerRows, past: object) -> Observation:
        return call.appended_rows()


def after(arguments: PromptCall, read: PromptRead, ids: torch.Tensor) -> AppendedRows:
    """Return appended rows with token ids [B, p] at the p positions right after the prompt."""
    at = arguments.positions()[:, read.prompt - 1 : read.prompt] + 1 + torch.arange(ids.shape[1], device=ids.device)
    return AppendedRows(arguments.embedded(ids), at)


@ROWS.add("drafted")
@dataclass(frozen=True)
class Drafted(Rows):
    """Tokens drafted after the prompt observe, and so do the prompt's last rows, whose slots are kept.

    n_d          number of drafted tokens. Drafts are greedy and go on after an end-of-sequence token, since they only
                 observe
    window       number of the prompt's last rows that observe, too
    draft_keys   True: the softmax of the drafted rows spans the prompt's slots and those of the drafted tokens; False:
                 the prompt's slots only
    draft_model  "self": once the whole prompt was read, the model drafts over a copy of its cache from which SnapKV has
                 evicted (LAQ, kvevict/engine/methods/draft.py). Or a smaller model with the same tokenizer (a loaded
                 model, its folder or its hub id), whose draft is appended to every chunk (SpecKV)
    """

    n_d: int = 8
    window: int = 8
    draft_keys: bool = False
    draft_model: object = "self"

    @property
    def needs_full_prompt(self) -> bool:
        return isinstance(self.draft_model, str) and self.draft_model == "self"

    @property
    def most(self) -> int:
        return self.n_d + self.window

    @property
    def decoded(self) -> int:
        return self.window or self.n_d

    protected = decoded

    def check(self, policy: OwnPolicy) -> None:
        count("n_d", self.n_d, 1)
        count("window", self.window, 0)
        flag("draft_keys", self.draft_keys)
        if not isinstance(families.unwrapped(self.draft_model), (str, torch.nn.Module, type(None))):
            raise TypeError(
                "draft_model must be 'self', a loaded Transformers model, its folder or its hub id, got "
                f"{self.draft_model!r}"
            )

    def ready(self, decoder: Any) -> None:
        if self.needs_full_prompt:
            return
        if self.draft_model is None:
            raise ValueError("speckv needs a smaller model: draft_model=, a loaded one, its folder or its hub id")
        model = self.model()
        if _head(model) is None:
            raise ValueError(
                f"draft_model, a {type(model).__name__}, makes no logits: load it with AutoModelForCausalLM"
            )
        if model.training:
            raise ValueError("draft_model is in training mode, where drafts are random: call draft_model.eval()")

    def model(self) -> Any:
        return load(self.draft_model) if isinstance(self.draft_model, str) else families.unwrapped(self.draft_model)

    def appended(self, tokens: int, rows: int, last: bool) -> int:
        return 0 if self.needs_full_prompt else self.n_d

    def prepare(self, arguments: PromptCall, read: PromptRead) -> AppendedRows | None:
        if not read.evicts:
            return None
        if self.needs_full_prompt:
            head(arguments.top)
            return None
        model = self.model()
        if arguments.ids is None:
            raise ValueError("speckv drafts from token ids: pass input_ids, not inputs_embeds")
        if arguments.columns:
            raise ValueError(
                "speckv drafts from the whole conversation, and a follow-up turn brings its own tokens only: read all "
                "of it into a new cache, or choose another policy"
            )
        if any(module is arguments.decoder for module in model.modules()):
            raise ValueError("draft_model is the patched model itself: give a smaller one, or choose laq")
        known, ids = model.get_input_embeddings().num_embeddings, arguments.ids[:, : read.prompt]
        if int(ids.max()) >= known:
            raise ValueError(
                f"the prompt has token id {int(ids.max())}, draft_model knows {known}: it must share the tokenizer"
            )
        vocabulary = arguments.decoder.get_input_embeddings().num_embeddings
        return after(arguments, read, follow(model, ids, arguments.first, self.n_d, vocabulary))

    def observe(self, call: LayerRows, past: object) -> Observation:
        drafted = call.drafted_rows if self.needs_full_prompt else call.appended_rows
        rows = drafted(own=self.draft_keys)
        return rows + call.chunk(self.window) if self.window else rows

    def observing(self, rows: CallRows) -> np.ndarray:  # "self" drafts after this call: not counted
        return np.minimum(rows.appended + self.window, rows.tokens)

    def protect(self, call: LayerRows) -> int:
        return self.decoded if call.decoding else self.window


def head(top: Any) -> torch.nn.Module:
    """Return the output embeddings of the model `top`, which map the decoder's last hidden state to logits. Raises
    ValueError for a model without them."""
    if (found := _head(top)) is None:
        raise ValueError(
            "laq drafts tokens, which needs the model's output embeddings: patch and call the causal language model, "
            "not its decoder, or choose another policy"
        )
    return found


def _head(model: Any) -> torch.nn.Module | None:
    return getattr(model, "get_output_embeddings", lambda: None)()


def end_tokens(top: object) -> list[int]:
    """Return the ids of the end-of-sequence tokens in a model's generation config."""
    ends = getattr(getattr(top, "generation_config", None), "eos_token_id", None)
    return [] if ends is None else torch.as_tensor(ends).flatten().tolist()


@functools.lru_cache(maxsize=1)
def load(name: str) -> Any:
    """Load a causal language model in eval mode from its folder or hub id. The last model loaded stays in memory."""
    from transformers import AutoModelForCausalLM

    try:
        return pretrained(AutoModelForCausalLM, name, dtype="auto").eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"draft_model={name!r} cannot be loaded: {error}") from error


def follow(model: Any, ids: torch.Tensor, first: torch.Tensor, count: int, vocabulary: int) -> torch.Tensor:
    """Return the model's greedy continuation of ids [B, N], `count` tokens per row: ids [B, count], all below
    `vocabulary`. The first first[b] tokens of row b are padding."""
    device, cache, drafted, here = ids.device, None, [], families.device_of(model)
    ids, first = ids.to(here), first.to(here)
    padded = bool((first > 0).any())
    mask = (torch.arange(ids.shape[1], device=here) >= first[:, None]).long()
    while len(drafted) < count:
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        out = model(
            input_ids=ids, **{CACHE: cache}, use_cache=True, return_dict=True, logits_to_keep=1,
            **(dict(attention_mask=mask, position_ids=positions) if padded else {}),
        )  # fmt: skip
        cache, ids = cache_of(out), out.logits[:, -1:, :vocabulary].argmax(-1)
        drafted.append(ids)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return torch.cat(drafted, 1).to(device)
