from dataclasses import dataclass

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
    behind = True

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
        if self.model().training:
            raise ValueError("draft_model is in training mode, where drafts are random: call draft_model.eval()")

    def model(self):
        from ..draft import load

        return load(self.draft_model) if isinstance(self.draft_model, str) else self.draft_model

    def prepare(self, call, prompt):
        from ..draft import follow

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
        return follow(model, ids, call.first, self.n_d, call.decoder.get_input_embeddings().num_embeddings)
