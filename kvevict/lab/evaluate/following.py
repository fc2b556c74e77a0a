"""Reads given tokens after a prompt, and returns the logits that predict these tokens.

Arguments: `logits` [B, 1, vocabulary] predict the first token of each text; `cache` holds the prompt of each row, and
the texts are appended to it; `texts` has the ids of each row's text. Results: for each row, the fp32 logits
[R, vocabulary] that predict the R ids of its text.
"""

import torch
from torch import Tensor
from torch.nn import Module

from ...answering.answer import continued
from ...engine.memory.cache import EvictionCache
from ...models.compat import CACHE


def followed(model: Module, logits: Tensor, cache: EvictionCache, texts: list[list[int]]) -> list[Tensor]:
    """Read all tokens in one call, as the next part of a prompt."""
    further = [ids[:-1] for ids in texts]
    rows = continued(model, cache, further, 0) if any(further) else logits[:, :0]
    each = zip(logits, rows, further, strict=True)
    return [torch.cat([last[-1:], row[len(row) - len(more) :]]).float() for last, row, more in each]


def decoded(model: Module, logits: Tensor, cache: EvictionCache, texts: list[list[int]]) -> list[Tensor]:
    """Read the tokens one by one, as `generate` does: a policy that evicts while decoding does so. All texts have equal
    lengths."""
    found = [logits[:, -1]]
    for column in torch.tensor(texts, device=logits.device)[:, :-1].split(1, 1):
        found.append(model(column, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits[:, -1])
    return list(torch.stack(found, 1).float())


def nats(logits: Tensor, ids: list[int]) -> float:
    """Compute the mean negative log likelihood of ids, in nats, by the logits [R, vocabulary] that predict them."""
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids, device=logits.device)))
