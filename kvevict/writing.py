"""Text written token by token after what a cache holds, greedily or drawn, whatever the model's generation_config says
of beams, penalties and caches."""

from dataclasses import dataclass

import torch

from .compat import CACHE
from .families import device_of
from .policy.checks import at_least_0, count, fraction
from .prompts import line_ended


@dataclass(frozen=True)
class Sampling:
    """How each token is chosen.

    temperature  None: the likeliest token; else it is drawn from softmax(logits / temperature)
    top_p        of the fewest likeliest tokens whose probabilities reach that sum (nucleus sampling, Holtzman et al.
                 2020)
    seed         of the draws

    Raises ValueError or TypeError for numbers that cannot be.
    """

    temperature: float | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if self.temperature is not None:
            at_least_0("temperature", self.temperature, positive=True)
        fraction("top_p", self.top_p)
        if self.top_p == 0 or (self.temperature is None and self.top_p != 1):
            raise ValueError(f"top_p={self.top_p}: give one above 0, and a temperature, without which text is greedy")
        count("sampling_seed", self.seed, 0)

    def chooser(self):
        """A function of logits [vocabulary] that gives the next token, with draws of its own."""
        if self.temperature is None:
            return lambda row: int(row.argmax())
        noise = torch.Generator().manual_seed(self.seed)
        return lambda row: drawn(row, noise, self.temperature, self.top_p)


def drawn(row, noise, temperature, top_p=1.0) -> int:
    """A token drawn of logits [vocabulary] by Gumbel noise of a generator on the CPU; of equal logits, the same one."""
    row = row.float().cpu() / temperature
    if top_p < 1:
        chances, order = row.softmax(0).sort(descending=True)
        row[order[chances.cumsum(0) - chances >= top_p]] = float("-inf")
    return int((row - torch.rand(row.shape, generator=noise).log().neg().log()).argmax())


def ends_of(model, tokenizer) -> set:
    """The tokens that end what the model says."""
    ends = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}


@torch.no_grad()
def written(model, tokenizer, logits, cache, most: int, choosers, one_line=False, mask=None) -> list:
    """At most `most` ids after what each row of a cache holds, up to and with the first that ends them: a list of ids
    per row. A row that has ended leaves the cache.

    logits    of the cache's last token [B, T, vocabulary]
    choosers  a function per row, of logits [vocabulary], that gives the next token
    one_line  stop at the end of a line that is not empty
    mask      [B, tokens that the cache has seen], zeros at padding; None: no row has any
    """
    ends, here = ends_of(model, tokenizer), device_of(model)
    texts, rows = [[] for _ in choosers], list(range(len(choosers)))

    def goes_on(tokens):
        return len(tokens) < most and tokens[-1] not in ends and not (one_line and line_ended(tokenizer, tokens))

    while True:
        for row, last in zip(rows, logits[:, -1], strict=True):
            texts[row].append(choosers[row](last))
        left = [at for at, row in enumerate(rows) if goes_on(texts[row])]
        if not left:
            return texts
        if len(left) < len(rows):
            rows, chosen = [rows[at] for at in left], torch.tensor(left)
            cache.batch_select_indices(chosen)
            mask = None if mask is None else mask[chosen.to(mask.device)]
        ids = torch.tensor([texts[row][-1:] for row in rows], device=here)
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(ids)], 1)
        logits = model(ids, **{CACHE: cache}, **padding(mask, 1), use_cache=True, return_dict=True).logits


def padding(mask, tokens: int) -> dict:
    """What a model is to know of the padding in a mask [B, columns], of which the last `tokens` are new."""
    return {} if mask is None else dict(attention_mask=mask, position_ids=positions(mask)[:, -tokens:])


def positions(mask):
    """[B, columns] that a mask's tokens have: those of a row without its padding."""
    return (mask.cumsum(1) - 1).clamp_min(0)
