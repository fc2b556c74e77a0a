"""Measures one run of one case: how the prompt is read, and how the question is answered.

In a perplexity case the tokens of the continuation are scored, in a fidelity case those of the response that the full
run wrote. One model call scores them all, and evicts nothing. Only perplexity in mode `known` under a policy that
evicts while decoding differs: the tokens are decoded one by one, and slots are evicted as in `generate`.
"""

import copy
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from transformers import Cache

from ...answering.answer import continued, rows_of
from ...answering.writing import drawn, written
from ...asking.prompts import Tokenizer, frame, ids_of
from ...asking.question import observing
from ...asking.tokens import find
from ...context import within
from ...engine.memory.cache import EvictionCache
from ...models.compat import CACHE, cache_of
from ...models.families import context_of, device_of, find_decoder
from ...patch import evicting, slot_bytes
from ...policy.building import Chosen
from ...policy.policy import Policy
from ...policy.text import parse_policy
from ...report import report
from ..analysis.run import EncodedPrompt
from .following import decoded, followed, nats
from .metrics import METRICS
from .results import Line
from .runs import FULL, KEEP_ALL, RunSpec, options_of, policy_for
from .tasks import FIDELITY, PERPLEXITY, Case


@dataclass
class AskedCase:
    """A case, and what its runs share, while they are measured."""

    case: Case
    prompt: EncodedPrompt
    seed: int = 0
    temperature: float | None = None  # sampling temperature, with equal noise in all runs; None: the likeliest token
    response: list[int] | None = None  # ids that the full run generated; None before the full run
    finds: bool = False  # whether the question is found as `kvevict.patch` finds it; else the task or the rows tell it
    logits: Tensor | None = None  # fidelity: the full cache's logits [R, vocabulary], which predict the response

    def scored(self, run: RunSpec) -> list[int] | None:
        """Return the ids that a run scores; None if the run generates an answer."""
        return self.response if self.case.metric == FIDELITY and run != FULL else self.prompt.answer

    def chooser(self) -> Callable[[Tensor], Tensor]:
        """Return a function from logits [vocabulary] to the next token: the likeliest, or one drawn with noise that all
        runs of the case share."""
        temperature, key = self.temperature, "/".join(map(str, (self.case.task, self.case.id, self.seed)))
        noise = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        return torch.argmax if temperature is None else lambda row: drawn(row, noise, temperature)


def encode(model: Module, tokenizer: Tokenizer, case: Case) -> EncodedPrompt:
    """Encode a case, in the tokenizer's chat template if it has one, unless the case's tag `chat` is False."""
    asked, chat = case.question.removesuffix(case.opening), case.tags.get("chat") is not False
    head, question = frame(tokenizer, asked, case.opening, chat, case.system)
    answer = ids_of(tokenizer, case.answers[0]) if case.metric == PERPLEXITY else None
    context = head + ids_of(tokenizer, case.context)
    said = find(tokenizer, context + question, case.said) if case.said else None
    prompt = EncodedPrompt(context, question, answer, said)
    tokens, new = len(prompt.context) + len(question), case.new_tokens if answer is None else len(answer)
    limit = context_of(find_decoder(model).config)
    if limit is not None and tokens + new > limit:
        raise ValueError(
            f"case {case.id} takes {tokens} tokens and {new} new ones, the model's context is {limit}; give smaller "
            "--lengths"
        )
    return prompt


@dataclass
class ReadResult:
    """The result of a run's read, before a question is asked."""

    out: Any  # the model's output, with the last token's logits and the cache
    held: dict  # fields of the result's line, from `measured` or `measured_all`
    chosen: Chosen | None  # the policy and how it is run; None: the unpatched model read
    options: dict | None  # the policy's options, for the result's line
    seconds: float  # how long the read took


@torch.no_grad()
def read(model: Module, tokenizer: Tokenizer, asked: AskedCase, run: RunSpec, alone: bool = True) -> ReadResult:
    """Read a case's context under a run's policy or, with alone=False, context and question in one call."""
    prompt, scored = asked.prompt, asked.scored(run)
    ids, later = (prompt.context, prompt.question) if alone else (prompt.context + prompt.question, [])
    chosen, options, finds = None, None, False
    observes: AbstractContextManager = nullcontext()
    if run != FULL:
        named = parse_policy(run.policy)[1]
        following = later + ((asked.response or []) if scored is None else scored)
        chosen = policy_for(run, len(ids), following, asked.case.task, model).with_tokenizer(tokenizer)
        finds, probes = asked.finds and not alone, "probe" in options_of(chosen.policy) and "probe" not in named
        if prompt.said is not None and not (alone or finds) and probes:
            observes = observing(prompt.said)
        options = named | options_of(chosen.policy)
        options.pop("ids", None)
    with _patched(model, chosen, tokenizer if finds else False), observes, within(asks=not alone):
        start = now(model)
        out = model(as_row(model, ids), use_cache=True, logits_to_keep=1)
        seconds = now(model) - start
        held = measured_all(cache_of(out)) if chosen is None else measured(model)
    return ReadResult(out, held, chosen, options, seconds)


@torch.no_grad()
def ask(model: Module, tokenizer: Tokenizer, asked: AskedCase, run: RunSpec, text: ReadResult | None = None) -> Line:
    """Measure one run of one case. Returns the fields of the result's line without the key. If `text` is given, the
    run's `read` of the case's context, the question is asked of a fork of that cache; with None the case is read here.
    Among the fields are:

    read_seconds, decode_seconds   time of reading, with a question that follows the text, and of decoding
    ask_seconds, ask_bytes         of a fork: seconds of question and answer, and the bytes that they add to the cache;
                                   read_seconds is then the time of reading the text
    kept, cache_bytes              slots [layer][kv head] (None for sliding-window layers), and their bytes, after the
                                   read under the policy
    nats                           mean negative log likelihood of the right answer's tokens, if the case wants it
    """
    case, prompt, scored = asked.case, asked.prompt, asked.scored(run)
    alone = run.mode == "later" or text is not None
    own = text or read(model, tokenizer, asked, run, alone)
    result: dict = dict(prompt_tokens=len(prompt.context) + len(prompt.question))
    chosen, out, cache = own.chosen, own.out, cache_of(own.out) if text is None else forked(cache_of(text.out))
    if chosen is not None:
        result["options"] = own.options
        if case.metric == FIDELITY and asked.logits is None:
            full = model(as_row(model, prompt.context + prompt.question), use_cache=True, logits_to_keep=1)
            (asked.logits,) = followed(model, full.logits, cache_of(full), [scored or []])
    keeping = None if chosen is None else KEEP_ALL
    evicts = chosen is not None and chosen.policy.decode and case.metric == PERPLEXITY and not alone
    later = alone or (scored is not None and not evicts)
    before, start = 0 if text is None else _bytes(cache), now(model)
    with _asking(model, tokenizer, chosen) if later else _patched(model, chosen):
        if alone and prompt.question:
            out = model(as_row(model, prompt.question), **{CACHE: cache}, logits_to_keep=1)
        asking = now(model) - start
        if case.likelihood:
            with _patched(model, keeping):
                result["nats"] = _likelihoods(model, tokenizer, out.logits, cache, [case])[0]
        start = now(model)
        if scored is None:
            tokens = write(model, tokenizer, out.logits, cache, [asked])[0]
            written = tokenizer.decode(tokens, skip_special_tokens=True)
            result |= dict(prediction=written) | judged(written, case)
        else:
            follows = decoded if evicts else followed
            result |= dict(prediction="") | _compared(asked, follows(model, out.logits, cache, [scored])[0], scored)
        decoding = now(model) - start
    if chosen is None:
        result["response"] = tokens if scored is None else []
    if text is not None:
        result |= dict(ask_seconds=asking + decoding, ask_bytes=_bytes(cache) - before)
        asking = decoding = 0.0
    return result | dict(read_seconds=own.seconds + asking, decode_seconds=decoding, **own.held)


@torch.no_grad()
def ask_together(
    model: Module, tokenizer: Tokenizer, asked: list[AskedCase], run: RunSpec, text: ReadResult
) -> list[Line]:
    """Do what `ask` does for several cases about one text, as rows of one batch. Every case generates its answer; none
    scores given tokens. Numbers equal those of `ask` up to rounding; each case's seconds are an equal share of the
    batch's."""
    cases, questions = [each.case for each in asked], [each.prompt.question for each in asked]
    cache, start = rows_of(cache_of(text.out), len(asked)), now(model)
    with _asking(model, tokenizer, text.chosen):
        logits = continued(model, cache, questions)
        seconds = now(model) - start
        with _patched(model, KEEP_ALL):
            nats = _likelihoods(model, tokenizer, logits, cache, cases) if cases[0].likelihood else None
        start = now(model)
        answers = write(model, tokenizer, logits, cache, asked)
        seconds += now(model) - start
    each_slot, lines = slot_bytes(model, text.chosen.run.kv), []
    for at, (case, tokens) in enumerate(zip(cases, answers, strict=True)):
        answer = tokenizer.decode(tokens, skip_special_tokens=True)
        added = each_slot * (len(questions[at]) + len(tokens) - 1)
        line: dict = dict(prompt_tokens=len(asked[at].prompt.context) + len(questions[at]), options=text.options)
        line |= {} if nats is None else dict(nats=nats[at])
        line |= dict(prediction=answer) | judged(answer, case) | dict(ask_seconds=seconds / len(asked), ask_bytes=added)
        lines.append(line | dict(read_seconds=text.seconds, decode_seconds=0.0, **text.held))
    return lines


def _likelihoods(model: Module, tokenizer: Tokenizer, logits: Tensor, cache: Cache, cases: list[Case]) -> list[float]:
    """Compute, for each case, the mean negative log likelihood in nats of the right answer, read after the case's row
    of `cache`. The cache's last tokens have the logits `logits`; the cache is not changed."""
    answers = [ids_of(tokenizer, f" {case.answers[0]}") for case in cases]
    rows = followed(model, logits, forked(cache), answers)
    return [nats(row, answer) for row, answer in zip(rows, answers, strict=True)]


def _asking(model: Module, tokenizer: Tokenizer, chosen: Chosen | None) -> AbstractContextManager:
    """Return a context manager that patches a model for a question after a text that was read under `chosen` (None: by
    the unpatched model)."""
    if chosen is not None and chosen.policy.recall:
        return evicting(model, chosen, tokenizer=tokenizer)  # for a probe to find the question, as in `answer`
    return _patched(model, None if chosen is None else KEEP_ALL)


def _patched(
    model: Module, chosen: Chosen | Policy | None, tokenizer: Tokenizer | Literal[False] = False
) -> AbstractContextManager:
    """Return a context manager that patches a model with a policy, which finds a question by the tokenizer, if there is
    one; with None it leaves the model unchanged."""
    return nullcontext() if chosen is None else evicting(model, chosen, tokenizer=tokenizer)


def forked(cache: Cache) -> Any:
    """Return a cache that continues from the tokens of `cache` and leaves `cache` as it is. Kept slots are shared; an
    unpatched model's cache is copied."""
    return cache.fork() if hasattr(cache, "fork") else copy.deepcopy(cache)


def _bytes(cache: Cache) -> int:
    """Sum the bytes of the slots in a cache's full-attention layers."""
    if isinstance(cache, EvictionCache):
        return sum(cache.tiers.kept(index).live_bytes() for index in cache.tiers.layers)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if not layer.is_sliding)


def judged(text: str, case: Case) -> dict:
    if case.metric == FIDELITY:
        return dict(score=0.0, same=1.0)
    return dict(score=METRICS[case.metric](text, case.answers, *([case.classes] if case.classes else [])))


def _compared(asked: AskedCase, logits: Tensor, ids: list) -> dict:
    """Return the score of ids by the logits [R, vocabulary] that predict them: their mean negative log likelihood in
    nats. In a fidelity case, return the mean KL divergence in nats from the full cache's next-token distributions, and
    `same`, the share of tokens for which both have the same likeliest token."""
    if asked.case.metric == PERPLEXITY:
        return dict(score=nats(logits, ids))
    full, own = asked.logits.log_softmax(1), logits.log_softmax(1)
    divergence = (full.exp() * (full - own)).sum(1).mean()
    return dict(score=float(divergence), same=float((full.argmax(1) == own.argmax(1)).float().mean()))


def now(model: Module) -> float:
    """Wait until the model's device has finished its work, and return the time in seconds."""
    device = device_of(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def as_row(model: Module, ids: list) -> Tensor:
    return torch.tensor([ids], device=device_of(model))


def write(model: Module, tokenizer: Tokenizer, logits: Tensor, cache: Cache, asked: list[AskedCase]) -> list:
    """Write each case's answer after its row of a cache. Returns a list of ids per case. Either all cases are
    `one_line`, or none is."""
    most, choosers = [each.case.new_tokens for each in asked], [each.chooser() for each in asked]
    return written(model, tokenizer, logits, cache, most, choosers, asked[0].case.one_line)


def measured(model: Module) -> dict:
    """Return the fields of a result's line that describe a patched model's last read. recalled_bytes are the bytes of
    the kept slots that had been evicted before."""
    seen = report(model)
    kept, back = ([layer and layer[0] for layer in seen[key] or ()] for key in ("kept", "recalled"))
    slots, recalled = (sum(sum(heads) for heads in layers if heads) for layers in (kept, back))
    sizes = {key: seen[key] for key in ("cache_bytes", "peak_cache_bytes", "archive_bytes")}
    return dict(kept=kept, **sizes, recalled_bytes=sizes["cache_bytes"] * recalled // slots)


def measured_all(cache: Cache) -> dict:
    """Return the fields of `measured` for an unpatched model's cache. As in a report, only full-attention layers
    count."""
    kept = [None if l.is_sliding else [l.keys.shape[2]] * l.keys.shape[1] for l in cache.layers]
    live = _bytes(cache)
    return dict(kept=kept, cache_bytes=live, peak_cache_bytes=live)
