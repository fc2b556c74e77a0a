"""One run of one case, and its numbers.

The continuation of a perplexity case is scored in one call that does not evict either. So is the response of a fidelity
case; the full run writes it.
"""

import copy
import time
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ...answering.answer import continued, rows_of
from ...answering.writing import drawn, written
from ...asking.prompts import frame, ids_of
from ...asking.question import observing
from ...asking.tokens import find
from ...context import within
from ...models.compat import CACHE, cache_of
from ...models.families import context_of, device_of, find_decoder
from ...patch import evicting, slot_bytes
from ...policy.building import Chosen
from ...policy.policy import Policy
from ...policy.text import parse_policy
from ...policy.tokenizer import told
from ...report import report
from ..analysis.run import Prompt
from .metrics import METRICS
from .runs import FULL, KEEP_ALL, Run, options_of, policy_for
from .tasks import FIDELITY, PERPLEXITY, Case


@dataclass
class Asked:
    """A case while its runs are measured.

    temperature  tokens are sampled, with the same noise in all runs; None: the likeliest token is taken
    response     ids that the full run generated; None before it did
    logits       [R, vocabulary] of the full cache, for each of the response's tokens; for fidelity, once needed
    """

    case: Case
    prompt: Prompt
    seed: int = 0
    temperature: float | None = None
    response: list | None = None
    logits: torch.Tensor | None = None

    def scored(self, run: Run) -> list[int] | None:
        """Ids that a run scores; None: it generates."""
        return self.response if self.case.metric == FIDELITY and run != FULL else self.prompt.answer

    def chooser(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function from logits [vocabulary] to the next token."""
        key = "/".join(map(str, (self.case.task, self.case.id, self.seed)))
        noise = torch.Generator().manual_seed(zlib.crc32(key.encode()))

        def choose(row: torch.Tensor) -> torch.Tensor:
            return row.argmax() if self.temperature is None else drawn(row, noise, self.temperature)

        return choose


def encode(model: Any, tokenizer: Any, case: Case) -> Prompt:
    """The case's ids, in the tokenizer's chat template if it has one, unless the case's tag `chat` is False."""
    asked, chat = case.question.removesuffix(case.opening), case.tags.get("chat") is not False
    head, question = frame(tokenizer, asked, case.opening, chat)
    answer = ids_of(tokenizer, case.answers[0]) if case.metric == PERPLEXITY else None
    context = head + ids_of(tokenizer, case.context)
    said = find(tokenizer, context + question, case.said) if case.said else None
    prompt = Prompt(context, question, answer, said)
    tokens, new = len(prompt.context) + len(question), case.new_tokens if answer is None else len(answer)
    limit = context_of(find_decoder(model).config)
    if limit is not None and tokens + new > limit:
        raise ValueError(
            f"case {case.id} takes {tokens} tokens and {new} new ones, the model's context is {limit}; give smaller "
            "--lengths"
        )
    return prompt


@dataclass
class Reading:
    """The result of a run's read, before a question is asked.

    out          the model's output, with the last token's logits and the cache
    held         `measured`, or `measured_all`, once the text was read
    chosen       the policy and its run; None: the unpatched model
    options      the policy's options, for the line
    seconds      of the read
    """

    out: Any
    held: dict
    chosen: Chosen | None
    options: dict | None
    seconds: float


@torch.no_grad()
def read(model: Any, tokenizer: Any, asked: Asked, run: Run, alone: bool = True) -> Reading:
    """A run's read of a case's context or, with alone=False, of context and question in one call."""
    prompt, scored = asked.prompt, asked.scored(run)
    ids, later = (prompt.context, prompt.question) if alone else (prompt.context + prompt.question, [])
    chosen = options = None
    observes: Any = nullcontext()
    if run != FULL:
        named = parse_policy(run.policy)[1]
        following = later + ((asked.response or []) if scored is None else scored)
        policy, how = policy_for(run, len(ids), following, asked.case.task, model)
        chosen = Chosen(told(policy, tokenizer), how)
        if prompt.said is not None and not alone and "probe" in options_of(chosen.policy) and "probe" not in named:
            observes = observing(prompt.said)
        options = named | options_of(chosen.policy)
        options.pop("ids", None)
    with _patched(model, chosen), observes, within(asks=not alone):
        start = now(model)
        out = model(as_row(model, ids), use_cache=True, logits_to_keep=1)
        seconds = now(model) - start
        held = measured_all(cache_of(out)) if chosen is None else measured(model)
    return Reading(out, held, chosen, options, seconds)


@torch.no_grad()
def ask(model: Any, tokenizer: Any, asked: Asked, run: Run, text: Reading | None = None) -> dict[str, Any]:
    """One run of one case. Returns the fields of its line beside the key. text: the run's `read` of the case's context,
    to ask a fork of; None: the case is read here.

    Seconds are those of reading (with an appended question) and of decoding. For a fork, read_seconds are the text's,
    ask_seconds those of question and answer, and ask_bytes the bytes added to the cache. kept ([layer][kv head] slots,
    None for sliding-window layers) and cache_bytes are those after the read under the policy. nats: the mean negative
    log likelihood of a token of the right answer, if the case asks for it.
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
            asked.logits = _follow(model, full.logits, cache_of(full), scored or [])
    later, keeping = alone or scored is not None, None if chosen is None else KEEP_ALL
    before, start = 0 if text is None else _bytes(cache), now(model)
    with _asking(model, tokenizer, chosen) if later else _patched(model, chosen):
        if alone and prompt.question:
            out = model(as_row(model, prompt.question), **{CACHE: cache}, logits_to_keep=1)
        asking = now(model) - start
        if case.likelihood:
            with _patched(model, keeping):
                answer = ids_of(tokenizer, f" {case.answers[0]}")
                result["nats"] = _nats(_follow(model, out.logits, forked(cache), answer), answer)
        start = now(model)
        if scored is None:
            tokens = write(model, tokenizer, out.logits, cache, [asked])[0]
            written = tokenizer.decode(tokens, skip_special_tokens=True)
            result |= dict(prediction=written) | judged(written, case)
        else:
            result |= dict(prediction="") | _compared(asked, _follow(model, out.logits, cache, scored), scored)
        decoding = now(model) - start
    if chosen is None:
        result["response"] = tokens if scored is None else []
    if text is not None:
        result |= dict(ask_seconds=asking + decoding, ask_bytes=_bytes(cache) - before)
        asking = decoding = 0.0
    return result | dict(read_seconds=own.seconds + asking, decode_seconds=decoding, **own.held)


@torch.no_grad()
def ask_together(model: Any, tokenizer: Any, asked: list[Asked], run: Run, text: Reading) -> list[dict[str, Any]]:
    """`ask` of several cases about one text, none of which scores given tokens, as rows of one batch: the fields of
    their lines. Numbers are those of `ask` up to rounding; each case's seconds are an equal share of the batch's."""
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
        told = tokenizer.decode(tokens, skip_special_tokens=True)
        added = each_slot * (len(questions[at]) + len(tokens) - 1)
        line: dict = dict(prompt_tokens=len(asked[at].prompt.context) + len(questions[at]), options=text.options)
        line |= {} if nats is None else dict(nats=nats[at])
        line |= dict(prediction=told) | judged(told, case) | dict(ask_seconds=seconds / len(asked), ask_bytes=added)
        lines.append(line | dict(read_seconds=text.seconds, decode_seconds=0.0, **text.held))
    return lines


def _likelihoods(model: torch.nn.Module, tokenizer: Any, logits: torch.Tensor, cache: Any, cases: list) -> list:
    """The `nats` of each case's right answer after its row of a cache. logits: those of the rows' last tokens."""
    answers = [ids_of(tokenizer, f" {case.answers[0]}") for case in cases]
    further = [answer[:-1] for answer in answers]
    rows = continued(model, cache.fork(), further, 0) if any(further) else logits[:, :0]
    each = ((last[-1:], row[row.shape[0] - len(more) :]) for last, row, more in zip(logits, rows, further, strict=True))
    return [_nats(torch.cat(parts).float(), answer) for parts, answer in zip(each, answers, strict=True)]


def _asking(model: torch.nn.Module, tokenizer: Any, chosen: Chosen | None) -> Any:
    """A context manager that patches a model for a question after a text that was read under `chosen`."""
    if chosen is not None and chosen.policy.recall:
        return evicting(model, chosen, tokenizer=tokenizer)  # finds the question's tokens, as `kvevict.answer` does
    return _patched(model, None if chosen is None else KEEP_ALL)


def _patched(model: torch.nn.Module, chosen: Chosen | Policy | None) -> Any:
    """A context manager that patches a model with a policy; None: that leaves it unchanged."""
    return nullcontext() if chosen is None else evicting(model, chosen, tokenizer=False)


def forked(cache: Any) -> Any:
    """A separate cache that begins as another: kept slots are shared, an unpatched model's are copied."""
    return cache.fork() if hasattr(cache, "fork") else copy.deepcopy(cache)


def _bytes(cache: Any) -> int:
    """The bytes of the slots in a cache's full-attention layers."""
    own = [layer for layer in cache.layers if not layer.is_sliding]
    return sum(l.chosen.live_bytes() if hasattr(l, "chosen") else l.keys.nbytes + l.values.nbytes for l in own)


def judged(text: str, case: Case) -> dict:
    return (
        dict(score=0.0, same=1.0) if case.metric == FIDELITY else dict(score=METRICS[case.metric](text, case.answers))
    )


def _compared(asked: Asked, logits: torch.Tensor, ids: list) -> dict:
    """The mean negative log likelihood of ids by logits [R, vocabulary], in nats. Of fidelity: the mean KL divergence
    from the full cache's distributions to the logits', in nats, and the share of equal first choices."""
    if asked.case.metric == PERPLEXITY:
        return dict(score=_nats(logits, ids))
    full, own = asked.logits.log_softmax(1), logits.log_softmax(1)
    divergence = (full.exp() * (full - own)).sum(1).mean()
    return dict(score=float(divergence), same=float((full.argmax(1) == own.argmax(1)).float().mean()))


def _nats(logits: torch.Tensor, ids: list) -> float:
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids, device=logits.device)))


def _follow(model: torch.nn.Module, logits: torch.Tensor, cache: Any, ids: list) -> torch.Tensor:
    """fp32 logits [R, vocabulary] of each of the ids after a cache. logits: those of the cache's last token."""
    rows = [logits[0, -1:]]
    if len(ids) > 1:
        rows.append(model(as_row(model, ids[:-1]), **{CACHE: cache}).logits[0])
    return torch.cat(rows).float()


def now(model: torch.nn.Module) -> float:
    """Seconds, read once the model's device has finished its work."""
    device = device_of(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def as_row(model: torch.nn.Module, ids: list) -> torch.Tensor:
    return torch.tensor([ids], device=device_of(model))


def write(model: torch.nn.Module, tokenizer: Any, logits: torch.Tensor, cache: Any, asked: list) -> list:
    """Ids of each case's answer, drawn with the noise that all runs of the case have, or the likeliest. The cases end
    with a line, or none of them does."""
    most = [each.case.new_tokens for each in asked]
    choosers = [each.chooser() for each in asked]
    return written(model, tokenizer, logits, cache, most, choosers, asked[0].case.one_line)


def measured(model: torch.nn.Module) -> dict:
    """What a patched model's last read left, as fields of a line. recalled_bytes: of the slots that came back."""
    seen = report(model)
    kept, back = ([layer and layer[0] for layer in seen[key] or ()] for key in ("kept", "recalled"))
    slots, recalled = (sum(sum(heads) for heads in layers if heads) for layers in (kept, back))
    sizes = {key: seen[key] for key in ("cache_bytes", "peak_cache_bytes", "archive_bytes")}
    return dict(kept=kept, **sizes, recalled_bytes=sizes["cache_bytes"] * recalled // slots)


def measured_all(cache: Any) -> dict:
    """`Reading.held` of an unpatched model's cache; as in a report, only full-attention layers count."""
    own = [None if layer.is_sliding else layer for layer in cache.layers]
    live = _bytes(cache)
    kept = [None if layer is None else [layer.keys.shape[2]] * layer.keys.shape[1] for layer in own]
    return dict(kept=kept, cache_bytes=live, peak_cache_bytes=live)
