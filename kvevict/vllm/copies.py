"""Tells the attention backend which of a step's requests have copies of a question in their prompts:
`--logits-processors kvevict.vllm.copies:RequestCopies`.

vLLM gives a backend no data of a request. It does give them to logits processors, in the same process and by the
request's index in the batch, before the backend's metadata are built. So this one keeps the copies and leaves all
logits as they are. It is no entry point, since vLLM's second model runner refuses to start with one of this interface.
"""

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from . import questions
from .questions import COPIES, Copies

OF_CONFIG: dict[str, dict[int, Copies]] = {}  # by the id of a `VllmConfig`: the copies by the request's index


class RequestCopies(LogitsProcessor):
    """Keeps the copies of the requests in a batch."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.copies = OF_CONFIG.setdefault(vllm_config.instance_id, {})

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for a question that is not a text; the server answers 400."""
        questions.check(sampling_params.extra_args)

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.copies, batch_update, lambda params, *_: _copies(params))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def _copies(params: SamplingParams) -> Copies | None:
    given = (params.extra_args or {}).get(COPIES)
    return None if given is None else Copies(*given)
