from dataclasses import dataclass

import torch

from ..checks import count, flag, one_of
from . import SCORES, Score, check_pool, pool


@dataclass(frozen=True)
class Drafted(Score):
    """Attention of drafted tokens' rows to the prompt, and of the prompt's last rows, whose own slots are kept.

    n_d         drafted tokens; drafts are greedy and go on past an end of sequence, since they only observe
    window      last rows of the prompt that observe too
    kernel, pool   pooling over slots
    reduce      "sum" over rows and mean over the group, or "max" over both
    draft_keys  the drafted rows' softmax spans the drafted slots too; False: the prompt's alone
    """

    n_d: int = 8
    window: int = 8
    kernel: int = 7
    pool: str = "max"
    reduce: str = "sum"
    draft_keys: bool = False

    @property
    def rows(self):  # while decoding nothing is drafted, and the last decoded rows observe
        return self.window or self.n_d

    def protect(self, view):
        return 0, self.rows if view.decoding else self.window

    def smallest_budget(self):
        return self.rows + 1

    def check(self, policy):
        count("n_d", self.n_d, 1)
        count("window", self.window, 0)
        check_pool(self.kernel, self.pool)
        one_of("reduce", self.reduce, ("sum", "max"))
        flag("draft_keys", self.draft_keys)

    def score(self, view):
        reduce = dict(reduce=self.reduce, group="max" if self.reduce == "max" else "mean")
        if view.decoding:
            return view.attention(rows=self.rows, **reduce)
        drafted = view.appended_attention(own=self.draft_keys, **reduce)
        if not self.window:
            return drafted
        prompt = view.attention(rows=self.window, **reduce)
        return torch.maximum(drafted, prompt) if self.reduce == "max" else drafted + prompt

    def pooled(self, view, score):
        return pool(score, view, self.kernel, self.pool)


@SCORES.add("laq")
@dataclass(frozen=True)
class Laq(Drafted):
    """Lookahead Q-Cache (Wang et al. 2025): tokens drafted from a snapkv-evicted copy of the cache score the prompt.

    They need the whole prompt first: a chunk_size only bounds the activations. `Drafted` has the options.
    """

    @property
    def held(self):  # SnapKV observes with 32
        return max(32, self.window)

    def prepare(self, call, prompt):
        head(call)


def head(call):
    """The module that makes logits of the decoder's last hidden state. Raises ValueError where there is none."""
    found = getattr(call.top, "get_output_embeddings", lambda: None)()
    if found is None:
        raise ValueError(
            "laq drafts tokens, which needs the model's output embeddings: patch and call the causal language model, "
            "not its decoder, or choose another policy"
        )
    return found
