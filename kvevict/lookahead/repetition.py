"""A target of ours for lookahead rows (METHODS section 9): the text's own repetition, for questions not known yet."""

from ..repeated import numbers
from .passes import Truth, truth


def repeated(decoder, prompt, response) -> Truth:
    """The prompt's keys and values, and as target the numbers of `kvzip+` of ids [N], in proportion to their sum per kv
    head, which each query head of the group is to attend to. The response, ids [0], does not enter."""
    found = truth(decoder, prompt, response)
    heads = decoder.config.num_attention_heads

    def take(index, score):
        share = score / score.sum(-1, keepdim=True)
        found.target[index] = share.repeat_interleave(heads // len(share), 0)[None].contiguous()

    numbers(decoder, "kvzip+", prompt, take)
    return found
