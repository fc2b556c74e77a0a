import functools
from dataclasses import dataclass
from typing import ClassVar

import torch

from . import SCORES
from .laq import Drafted


@SCORES.add("speckv")
@dataclass(frozen=True)
class SpecKV(Drafted):
    """SpecKV (Galim et al. 2025): tokens drafted by a smaller model read along behind every chunk and score it.

    draft_model   a loaded Transformers model with the same tokenizer, which is only run; or its folder or hub id
    """

    reduce: str = "max"
    draft_model: object = None
    behind: ClassVar[bool] = True

    @property
    def length(self):
        return self.n_d

    def __deepcopy__(self, memo):  # a copy of the patched model drafts with the same model
        return self

    def check(self, policy):
        super().check(policy)
        if not isinstance(self.draft_model, (str, torch.nn.Module, type(None))):
            raise TypeError(
                f"draft_model must be a loaded Transformers model, its folder or its hub id, got {self.draft_model!r}"
            )

    def ready(self):
        if self.draft_model is None:
            raise ValueError("speckv needs a smaller model: draft_model=, a loaded one, its folder or its hub id")
        model = self.model()
        if getattr(model, "get_output_embeddings", lambda: None)() is None:
            raise ValueError(
                f"draft_model, a {type(model).__name__}, makes no logits: load it with AutoModelForCausalLM"
            )
        if model.training:
            raise ValueError("draft_model is in training mode, where drafts are random: call draft_model.eval()")

    def model(self):
        return load(self.draft_model) if isinstance(self.draft_model, str) else self.draft_model

    def prepare(self, call, prompt):
        model = self.model()
        if call.ids is None:
            raise ValueError("speckv drafts from token ids: pass input_ids, not inputs_embeds")
        if call.columns:
            raise ValueError(
                "speckv drafts from the whole conversation, and a follow-up turn brings its own tokens only: read all "
                "of it into a new cache, or choose another policy"
            )
        if any(module is call.decoder for module in model.modules()):
            raise ValueError("draft_model is the patched model itself: give a smaller one, or choose laq")
        known, ids = model.get_input_embeddings().num_embeddings, call.ids[:, :prompt]
        if int(ids.max()) >= known:
            raise ValueError(
                f"the prompt has token id {int(ids.max())}, draft_model knows {known}: it must share the tokenizer"
            )
        with call.patch.clock("draft"):
            return follow(model, ids, call.first, self.n_d, call.decoder.get_input_embeddings().num_embeddings)


@functools.lru_cache(maxsize=1)
def load(name: str):
    """A causal language model in eval mode from a folder or a hub id; the last one stays loaded."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
    except (OSError, ValueError) as error:
        raise ValueError(f"draft_model={name!r} cannot be loaded: {error}") from error


def follow(model, ids, first, count: int, vocabulary: int):
    """How `model` goes on greedily: ids [B, count] below `vocabulary`. ids [B, N], of row b first[b] are padding."""
    device, cache, drafted = ids.device, None, []
    ids, first = ids.to(model.device), first.to(model.device)
    padded = bool((first > 0).any())
    mask = (torch.arange(ids.shape[1], device=model.device) >= first[:, None]).long()
    while len(drafted) < count:
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        out = model(
            input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, logits_to_keep=1,
            **(dict(attention_mask=mask, position_ids=positions) if padded else {}),
        )  # fmt: skip
        cache, ids = out.past_key_values, out.logits[:, -1:, :vocabulary].argmax(-1)
        drafted.append(ids)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
    return torch.cat(drafted, 1).to(device)
