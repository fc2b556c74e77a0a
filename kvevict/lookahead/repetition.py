"""Our target for lookahead rows (METHODS section 9): a repetition of the text, for questions not known yet."""

from typing import Any

import torch

from ..repeated import numbers
from .passes import Truth, truth


def repeated(decoder: Any, prompt: torch.Tensor, response: torch.Tensor) -> Truth:
    """The prompt's keys and values. The target of each query head is its kv head's numbers of `kvzip+` for the prompt's
    ids [N], divided by their sum. The response, ids [0], is not used."""
    found = truth(decoder, prompt, response)
    heads = decoder.config.num_attention_heads

    def take(index, score):
        share = score / score.sum(-1, keepdim=True)
        found.target[index] = share.repeat_interleave(heads // len(share), 0)[None].contiguous()

    numbers(decoder, "kvzip+", prompt, take)
    return found
