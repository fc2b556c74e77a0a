"""The model `kvevict` of lm-evaluation-harness: lm-eval's `hf` model, patched.

    python -m kvevict.lm_eval --model kvevict --model_args pretrained=DIR,policy=take+edie,budget=512 --tasks TASK

This command is lm-eval's own, after the model `kvevict` was registered: lm-eval by itself finds only the models of its
package. In Python, `import kvevict.lm_eval` registers the model, so that
`lm_eval.simple_evaluate(model="kvevict", model_args=...)` finds it.
"""

import dataclasses
import difflib
import inspect
import itertools
from typing import Any

import torch

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError(f"{error}; run: pip install 'kvevict[lm-eval]'") from None
from tqdm import tqdm

from .answering.answer import KEEPS
from .engine.hook.installed import plan_of
from .models.compat import CACHE, cache_of
from .models.families import device_of
from .patch import evicting, find_decoder, patch
from .policy import peers
from .policy.checks import unknown
from .policy.parts import PARTS
from .policy.policy import Policy
from .policy.run import OPTIONS
from .policy.text import DEFAULT


@register_model("kvevict")
class KVEvict(HFLM):
    """lm-eval's `hf` model with eviction.

    policy, budget, chunk_size, and any option of the policy   as `kvevict.patch` takes them
    any other argument                                         as lm-eval's `hf` takes it

    The patched model generates answers. For log-likelihoods each context is read once, with eviction, and each of its
    continuations is scored after the kept slots. For rolling log-likelihoods (perplexity) each of lm-eval's windows of
    a text is read in chunks of `chunk_size` tokens, with an eviction after each; a token's likelihood is that given
    the tokens of its chunk so far and the kept slots. Raises ValueError for rolling log-likelihoods under a policy that
    reads a text in one pass, or whose slots are chosen by later tokens of the text.
    """

    rolls = False  # whether the texts of rolling log-likelihoods are scored

    def __init__(self, pretrained: Any, policy: Any = DEFAULT, budget: Any = None, **arguments: Any) -> None:
        names = option_names()
        options = {name: arguments.pop(name) for name in list(arguments) if name in names}
        peers.check(arguments)
        for name in arguments.keys() - inspect.signature(HFLM.__init__).parameters.keys():
            if difflib.get_close_matches(name, names):  # a name unlike any option is passed to the model's constructor
                raise ValueError(unknown("argument", name, names))
        super().__init__(pretrained, **arguments)
        patch(self.model, policy, budget=budget, tokenizer=self.tokenizer, **options)

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        plan = plan_of(find_decoder(self.model))
        policy = plan.policy if plan is not None else None
        size = 0 if policy is None else policy.chunk_size
        if policy is not None and (size is None or policy.schedule != "chunk"):
            raise ValueError(
                "rolling log-likelihoods under eviction need a policy that evicts after each chunk of a text: give "
                "chunk_size=128, or another number of tokens"
            )
        if policy is not None and not policy.rows.repeats and policy.rows.appended(2**20, size or 0, False):
            raise ValueError(
                f"rolling log-likelihoods: {type(policy.rows).__name__} rows know tokens after their chunk, which are "
                "to be scored; choose h2o, tova, snapkv or another policy that a chunk's own rows observe for"
            )
        self.rolls = True
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self.rolls = False

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, override_bs: object = None) -> list:
        """Return, for each request (texts, context ids, continuation ids), the continuation's log-likelihood and
        whether greedy decoding would write the continuation."""
        # A context that is too long loses its first tokens, as in lm-eval's `hf` model.
        contexts = [context[-max(self.max_length + 1 - len(continued), 1) :] for _, context, continued in requests]
        order = sorted(range(len(requests)), key=contexts.__getitem__)
        answers: list = [None] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        for context, group in itertools.groupby(order, key=contexts.__getitem__):
            if self.rolls:
                for at in group:
                    answers[at] = self._under_eviction(context, requests[at][2])
                    bar.update()
                continue
            read = self.model(self._row(context), logits_to_keep=1, use_cache=True)
            with evicting(self.model, KEEPS):
                for at in group:
                    answers[at] = self._scored(read, requests[at][2])
                    bar.update()
        bar.close()
        return answers

    def _scored(self, read: Any, continuation: list[int]) -> tuple[float, bool]:
        """Return the log-likelihood of a continuation, given as ids, and whether greedy decoding would write it. `read`
        is the model's output for the context."""
        truth, logits = self._row(continuation), read.logits
        if len(continuation) > 1:
            rest = self.model(truth[:, :-1], **{CACHE: cache_of(read).fork()}, use_cache=True).logits
            logits = torch.cat([logits, rest], 1)
        return self._likelihood(logits, truth)

    def _under_eviction(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Do what `_scored` does for a continuation that is read together with its context, in chunks."""
        wanted = len(continuation)
        read = self.model(self._row(context + continuation[:-1]), logits_to_keep=wanted, use_cache=True)
        return self._likelihood(read.logits, self._row(continuation))

    def _likelihood(self, logits: torch.Tensor, truth: torch.Tensor) -> tuple[float, bool]:
        """Return the log-likelihood of the ids truth [1, R] by the logits [1, R, vocabulary] that predict these, and
        whether greedy decoding would write all of them."""
        logprobs = torch.log_softmax(logits, -1, dtype=self.softmax_dtype)
        greedy = bool((logprobs.argmax(-1) == truth).all())
        return float(logprobs.gather(2, truth[..., None]).sum()), greedy

    def _row(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor([ids], device=device_of(self.model))


def option_names() -> set:
    """Return the names of all options of policies and of how they are run, except budget."""
    parts = [Policy, *(part for registry, _ in PARTS.values() for part in registry.values())]
    return {*OPTIONS, *(f.name for part in parts for f in dataclasses.fields(part) if f.init)} - {"budget"}


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
