"""What is done to one case: a run, and the numbers it gives.

A run is `full`, the unpatched model, or a policy at a budget, the prompt read whole or in chunks, with the question
known or not:

    aware      context and question are one prompt, read under the policy, which also evicts while decoding if it does
    agnostic   the context alone is read under the policy; then the question is appended to what was kept and the
               answer is decoded, and neither evicts nor is evicted: the budget is the context's. (An ordinary follow-up
               turn would be read like a prompt and evict again, this time knowing the question.)

The continuation of a perplexity case is scored in one call that evicts nothing either.
"""

import dataclasses
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from ..analysis.run import Prompt, frame, ids_of, line_ended, observe
from ..commands import parse_policy
from ..patch import evicting, patch
from ..policy.policy import Policy, build
from ..report import report
from .metrics import METRICS

MODES = ("aware", "agnostic")
PERPLEXITY = "perplexity"  # the metric of cases whose score is the mean negative log likelihood of answers[0], in nats
WHOLE = 2**30  # a chunk size that no prompt reaches
KEEP_ALL = Policy(score="knorm", budget=2**30)
OBSERVERS = ("window", "probe", "recent")  # options that count slots, so that a small budget needs small ones


@dataclass(frozen=True)
class Run:
    """What is done to a case. chunk_size None reads the prompt whole; mode is one of MODES, None for `full`."""

    policy: str  # NAME or NAME:OPTION=VALUE,...
    budget: int | float | None = None
    chunk_size: int | None = None
    mode: str | None = None


FULL = Run("full")


def encode(model, tokenizer, case) -> Prompt:
    """The case's ids, in the tokenizer's chat template if it has one, unless the case's tag `chat` is False."""

    asked, chat = case.question.removesuffix(case.opening), case.tags.get("chat") is not False
    head, question, tail = frame(tokenizer, asked, case.opening, chat)
    answer = ids_of(tokenizer, case.answers[0]) if case.metric == PERPLEXITY else None
    prompt = Prompt(head + ids_of(tokenizer, case.context), question, tail, answer)
    tokens, new = len(prompt.context) + len(question), case.new_tokens if answer is None else len(answer)
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and tokens + new > limit:
        raise ValueError(
            f"case {case.id} takes {tokens} tokens and {new} new ones, the model's context is {limit}; give smaller "
            "--lengths"
        )
    return prompt


def observers(policy) -> dict:
    """The options of a policy's rows and score that count slots, and their values: windows, probes, recent slots."""
    values = {name: value for name, value in options_of(policy).items() if name in OBSERVERS}
    return {option: size for option, size in values.items() if isinstance(size, int)}


def options_of(policy) -> dict:
    """The options of a policy's rows and score."""
    parts = policy.rows, policy.score
    return {f.name: getattr(part, f.name) for part in parts for f in dataclasses.fields(part)}


def policy_for(run: Run, tokens: int, response, task: str = "eval") -> Policy:
    """The policy of a run that reads `tokens` tokens under it. What it remembers of a `task` (TADA) is the run's own,
    and lasts as long as the process.

    Windows, probes and recent slots that the run does not name are at most half the budget. Rows that may know the
    response (the oracle's) are told the ids that follow, and then the prompt is read whole: rows of a response that
    have not seen what is yet to be read show nothing.
    """
    name, given = parse_policy(run.policy)
    if {"budget", "chunk_size"} & given.keys():
        raise ValueError(f"policy {run.policy!r}: give budget and chunk_size by --budgets and --chunk-size")
    whole = build(name, budget=2**30, **given)
    slots = run.budget if isinstance(run.budget, int) else math.ceil(run.budget * tokens)
    options = {option: min(size, max(1, slots // 2)) for option, size in observers(whole).items()}
    chunk, rows = run.chunk_size or WHOLE, whole.rows.told(response)
    if rows is not whole.rows:
        options["rows"], chunk = rows, WHOLE
    if hasattr(whole.layers, "task"):
        options["task"] = "/".join(map(str, (task, *dataclasses.astuple(run))))
    return build(name, budget=run.budget, chunk_size=chunk, **options | given)


@torch.no_grad()
def ask(model, tokenizer, case, prompt: Prompt, run: Run, response, observed=None) -> dict:
    """One run of one case: what its line says beyond the key.

    response    ids that the full run generated, which an oracle may look at
    observed    which rows windows and probes are, as `Prompt.observed` takes it; None, and where the context is read
                alone, which does not end with the question: the policy's own
    Seconds are those of reading (an appended question too) and of decoding. kept ([layer][kv head] slots, None for
    sliding-window layers) and cache_bytes are what is held after the read under the policy.
    """
    agnostic, scored = run.mode == "agnostic", prompt.answer is not None
    first, later = (prompt.context, prompt.question) if agnostic else (prompt.context + prompt.question, [])
    result = dict(prompt_tokens=len(prompt.context) + len(prompt.question))
    policy = None
    if run != FULL:
        policy = policy_for(run, len(first), later + (prompt.answer if scored else response), case.task)
        named = parse_policy(run.policy)[1]
        if observed is not None and not agnostic:
            policy = observe(policy, prompt.observed(observed), len(first), named)
        result["options"] = options_of(policy) | named
        result["options"].pop("ids", None)
    with nullcontext() if policy is None else evicting(model, policy):
        start = _now(model)
        out = model(_row(model, first), use_cache=True, logits_to_keep=1)
        read_seconds = _now(model) - start
        cache = out.past_key_values
        held = _held_by_all(cache) if policy is None else _held(model)
        if policy is not None and (agnostic or scored):
            patch(model, KEEP_ALL)
        start = _now(model)
        if later:
            out = model(_row(model, later), past_key_values=cache, logits_to_keep=1)
        read_seconds += _now(model) - start
        start = _now(model)
        if scored:
            result |= dict(prediction="", score=_loss(model, out.logits[0, -1:], cache, prompt.answer))
        else:
            tokens = _greedy(model, tokenizer, out.logits, cache, case)
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            result |= dict(prediction=text, score=METRICS[case.metric](text, case.answers))
    if policy is None:
        result["response"] = [] if scored else tokens
    return result | dict(read_seconds=read_seconds, decode_seconds=_now(model) - start, **held)


def _now(model) -> float:
    """Seconds, read when the model's device has done all that it was given."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def _row(model, ids):
    return torch.tensor([ids], device=model.device)


def _greedy(model, tokenizer, logits, cache, case) -> list:
    """Ids up to and with the first end-of-sequence token, or the end of a case's one line."""
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    tokens = [int(logits[0, -1].argmax())]
    while len(tokens) < case.new_tokens and tokens[-1] not in ends:
        if case.one_line and line_ended(tokenizer, tokens):
            break
        logits = model(_row(model, tokens[-1:]), past_key_values=cache).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def _loss(model, first, cache, answer) -> float:
    """Mean negative log likelihood of `answer` in nats; `first` [1, vocabulary] are the logits of its first token."""
    rows = [first]
    if len(answer) > 1:
        rows.append(model(_row(model, answer[:-1]), past_key_values=cache).logits[0])
    return float(torch.nn.functional.cross_entropy(torch.cat(rows).float(), _row(model, answer)[0]))


def _held(model) -> dict:
    seen = report(model)
    kept = [None if layer is None else layer[0] for layer in seen["kept"]]
    return dict(kept=kept, cache_bytes=seen["cache_bytes"], peak_cache_bytes=seen["peak_cache_bytes"])


def _held_by_all(cache) -> dict:
    """What an unpatched model's cache holds; as in a report, its full-attention layers are counted."""
    own = [None if layer.is_sliding else layer for layer in cache.layers]
    live = sum(layer.keys.nbytes + layer.values.nbytes for layer in own if layer is not None)
    kept = [None if layer is None else [layer.keys.shape[2]] * layer.keys.shape[1] for layer in own]
    return dict(kept=kept, cache_bytes=live, peak_cache_bytes=live)
