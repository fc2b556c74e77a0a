"""Answers many questions about one context. The context is read once, with eviction, and each question continues a fork
of its cache."""

import inspect
import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from .. import cautions
from ..asking import prompts
from ..asking.prompts import Tokenizer, frame, ids_of
from ..context import within
from ..engine.hook.installed import plan_of, using
from ..engine.measure import gates
from ..engine.memory.cache import EvictionCache
from ..engine.memory.layer import EvictionLayer
from ..models import families, rotary
from ..models.compat import CACHE, cache_of
from ..models.families import base_model, device_of, find_decoder, unwrapped
from ..patch import evicting
from ..policy.building import Chosen, build, choose
from ..policy.checks import PLENTY, count
from ..policy.policy import Policy
from ..policy.run import Run
from ..policy.text import DEFAULT
from ..store.resuming import Reading
from .writing import Sampling, written

KEEPS = Policy(score="streaming", budget=PLENTY, decode=False)  # keeps the slots of all tokens
SHORTEST = 16  # fewest tokens to which `within_positions` shortens a chunk that is repeated


def unasked(decoder: torch.nn.Module) -> str:
    """Return the name of the default policy for a text whose questions come later: the best one measured
    (docs/results.md)."""
    return "gate" if gates.fit(decoder) else "read-twice"


def read(
    model: Any, tokenizer: Any, context: str, policy: str | Policy | None = None, *,
    file: str | os.PathLike | None = None, **options: Any,
) -> EvictionCache:  # fmt: skip
    """Read a text with a policy. Returns the cache of the kept slots, for `answer`, `save_cache` or `cache.fork()`.

    model             as `kvevict.patch` takes it
    context           the text; if the tokenizer has a chat template, the text opens the user's turn
    policy, options   as `kvevict.patch` takes them. Without a policy: the patched model's, if it has recall=True or is
                      for questions that come later (unlike take+edie, snapkv, h2o, ...); else, with recall=True,
                      "take+edie"; else "gate", if gates were trained for the model (in its folder, or named for it
                      before); else "read-twice", in chunks that can be repeated within the model's positions. Budget
                      and kv are by default a patched model's, if it has a policy. With recall=True each question
                      attends to all tokens
    file              with recall=True: the file that the cache is written to, as by `save_cache`. During the read every
                      chunk is written to a part in the folder FILE.parts. A call with an equal text, model and policy
                      loads the file, or goes on after the parts that a killed process left. If the text begins with the
                      file's text and is longer, only the rest is read. Raises ValueError for a file of another text,
                      model or policy, and OSError if the folder cannot be written to or another process reads into it

    The model is left as it was. Raises ValueError for an empty text, one that is longer than the model's context, or
    a model in training mode. Warns, once per budget, if less than a quarter of a text is kept.
    """
    if not isinstance(context, str):
        raise TypeError(f"context must be a text, got {type(context).__name__}")
    prompts.check(tokenizer)
    body = ids_of(tokenizer, context)
    if not body:
        raise ValueError("context is empty: give a text to read")
    head, _ = frame(tokenizer, "")
    inner = unwrapped(model)  # a PEFT model puts its learned tokens before the text
    ids = torch.tensor([head + body], device=device_of(inner))
    check_can_answer(model, ids.shape[1], "the text")

    def forward(past: EvictionCache | None, at: int) -> EvictionCache:
        return cache_of(
            inner(input_ids=ids[:, at:], logits_to_keep=1, use_cache=True, return_dict=True, **{CACHE: past})
        )

    with _patched(model, tokenizer, policy, options, ids.shape[1]), torch.no_grad(), within(asks=False):
        if file is None:
            cache = forward(None, 0)
        else:
            plan = plan_of(find_decoder(model))
            cache = Reading(file, model, plan.policy, plan.run, head + body).cache(forward)
    cautions.of_share(cache.meter, cache.sequence.policy, "later")
    return cache


def answer(
    model: Any, tokenizer: Any, context: str | EvictionCache, questions: Iterable[str],
    policy: str | Policy | None = None, *, max_new_tokens: int = 64, one_line: bool = False,
    temperature: float | None = None, top_p: float = 1.0, sampling_seed: int = 0, batch_size: int = 8, **options: Any,
) -> list[str]:  # fmt: skip
    """Answer questions about a context that is read once. Returns a list of texts.

    model             as `kvevict.patch` takes it; of its generation_config only the tokens that end an answer are used
    context           a text, or a cache from `read`, from `load_cache` or from a patched model (`past_key_values`). A
                      cache is not changed
    questions         a list of texts, answered independently of each other. Each follows the context after two line
                      ends; in a chat template it ends the user's turn
    policy, options   as `read` takes them; refused if the context is a cache
    max_new_tokens    most tokens of an answer
    one_line          whether an answer ends with its first line, as suits a model that is not tuned to chat
    temperature       None: greedy. Else each token is drawn from softmax(logits / temperature), restricted to the
                      fewest likeliest tokens with a total probability of top_p; a question gets equal answers with
                      equal sampling_seeds
    batch_size        most questions asked at once; each takes the memory of its tokens and its answer's. Latents (MLA)
                      and sliding windows of the context are copied for each question, everything else is shared. With a
                      sliding window, or rotary frequencies that depend on the length, only questions of equal length
                      share a batch. With a state in a layer, or positions of several axes, each question is asked alone

    All questions share the context's kept slots. All tokens of a question and its answer are kept after them. But if
    the context was read with recall=True, each question attends to all tokens, and its answer as far as `recall_slots`
    says (`kvevict.policy.Policy`).
    Raises ValueError or TypeError for a context or questions that cannot be used.
    """
    count("max_new_tokens", max_new_tokens, 1)
    count("batch_size", batch_size, 1)
    prompts.check(tokenizer)
    sampling = Sampling(temperature, top_p, sampling_seed)
    asked = [] if isinstance(questions, str) else list(questions)
    if isinstance(questions, str) or not all(isinstance(question, str) for question in asked):
        raise TypeError("questions must be a list of texts; for one, write [question]")
    if isinstance(context, str):
        context = read(model, tokenizer, context, policy, **options)
    elif policy is not None or options:
        given = ", ".join((["policy"] if policy is not None else []) + list(options))
        raise ValueError(
            f"{given}: the context is a cache, which was read with a policy; give a policy's options to kvevict.read, "
            "and to generate otherwise, call model.generate(past_key_values=cache.fork(), ...)"
        )
    elif not isinstance(context, EvictionCache):
        raise TypeError(f"context must be a text or a cache that a patched model filled, got {type(context).__name__}")
    ids = [frame(tokenizer, f"\n\n{question}")[1] for question in asked]
    check_can_answer(model, context.get_seq_length() + max(map(len, ids), default=0), "the text and a question")
    by, run = context.sequence.policy, context.sequence.run
    recalls = by is not None and by.recall
    asks = Chosen(by, run) if recalls else Chosen(KEEPS, Run(compiled=run.compiled))
    with evicting(model, asks, tokenizer=tokenizer if recalls else None):
        answers, inner = [""] * len(ids), base_model(model)
        for batch in together(model, context, list(map(len, ids)), batch_size):
            fork, here = rows_of(context, len(batch)), [ids[at] for at in batch]
            logits = continued(inner, fork, here)
            choosers, most = list(map(sampling.chooser, here)), [max_new_tokens] * len(here)
            tokens = written(inner, tokenizer, logits, fork, most, choosers, one_line, context.meter)
            for at, each in zip(batch, tokens, strict=True):
                text = tokenizer.decode(each, skip_special_tokens=True).strip()
                answers[at] = text.partition("\n")[0] if one_line else text
        return answers


class Pipeline:
    """Answers questions about contexts, and is called as Transformers' pipelines are:

    pipe = kvevict.Pipeline(model, tokenizer, budget=512)
    pipe(context, question="Who is the captain?")["answer"]
    pipe(context, questions=["Who?", "Where?"])["answers"]

    policy and options are as `kvevict.read` takes them and are checked at once; a warning tells of a policy for known
    questions without recall. A call takes `context` (a text or a cache) and batch_size=, max_new_tokens=, ... as
    `kvevict.answer` does.
    """

    def __init__(self, model: Any, tokenizer: Any, policy: str | Policy | None = None, **options: Any) -> None:
        self.model, self.tokenizer, self.policy, self.options = model, tokenizer, policy, options
        chosen = _chosen(find_decoder(model), policy, options).policy
        cautions.of_later_questions(chosen.question, chosen.recall)

    def __call__(
        self, context: str | EvictionCache, question: str | None = None, *, questions: Iterable[str] | None = None,
        max_new_tokens: int = 64, one_line: bool = False, temperature: float | None = None, top_p: float = 1.0,
        sampling_seed: int = 0, batch_size: int = 8,
    ) -> dict[str, Any]:  # fmt: skip
        if (question is None) == (questions is None):
            raise ValueError("give either question, a text, or questions, a list of texts")
        asked: Any = [question] if questions is None else questions
        policy, options = (self.policy, self.options) if isinstance(context, str) else (None, {})
        answers = answer(
            self.model, self.tokenizer, context, asked, policy, max_new_tokens=max_new_tokens, one_line=one_line,
            temperature=temperature, top_p=top_p, sampling_seed=sampling_seed, batch_size=batch_size, **options,
        )  # fmt: skip
        return dict(answer=answers[0]) if questions is None else dict(answers=answers)

    def read(self, context: str) -> EvictionCache:
        """Read a text, and return its cache, which can be asked several times or saved."""
        return read(self.model, self.tokenizer, context, self.policy, **self.options)


def _chosen(decoder: torch.nn.Module, policy: str | Policy | Chosen | None, options: dict, tokens: int = 0) -> Chosen:
    """Return the policy that reads a text of `tokens` tokens: the one given; or else the patched model's, if it recalls
    or is for questions that come later; or else the default for questions that come later."""
    own = plan_of(decoder)
    recalls = options.get("recall", own is not None and own.policy.recall)
    if policy is None and own is not None:
        if own.policy.recall if recalls else own.policy.question == "later":
            policy = Chosen(own.policy, own.run)
        else:
            options = dict(budget=own.policy.budget, kv=own.run.kv) | options
    if policy is None and recalls:
        policy = DEFAULT
    if policy is not None:
        return choose(policy, **options)
    name = unasked(decoder)
    try:
        chosen = choose(name, **options)
    except ValueError as error:
        raise ValueError(f"{error} (no policy for later questions is named or patched: {name} is taken)") from None
    if "chunk_size" in options:
        return chosen
    return chosen._replace(policy=within_positions(chosen.policy, decoder.config, tokens))


def _patched(
    model: torch.nn.Module, tokenizer: Tokenizer, policy: str | Policy | None, options: dict, tokens: int
) -> AbstractContextManager:
    """Return a context manager that patches the model with the policy that `_chosen` returns for a text of `tokens`
    tokens."""
    decoder = find_decoder(model)
    own, chosen = plan_of(decoder), _chosen(decoder, policy, options, tokens)
    if policy is None and own is not None and chosen == (own.policy, own.run):
        return using(base_model(model), decoder, own)
    return evicting(model, chosen.with_tokenizer(tokenizer), tokenizer=False)


def within_positions(policy: Policy, config: Any, tokens: int) -> Policy:
    """Return the policy with the chunks that it reads a second time shortened, so that their repetition, after a text
    of `tokens` tokens, fits the model's positions. With one cut at the end, the parts of the repeated prompt are
    shortened instead. The policy is returned unchanged if fewer than `SHORTEST` tokens fit."""
    context: Any = families.context_of(config)
    if not policy.rows.repeats or context is None:
        return policy
    room = context - tokens
    name, size = ("chunk_size", policy.chunk_size) if policy.schedule == "chunk" else ("part", policy.rows.part)
    return build(policy, **{name: room}) if SHORTEST <= room < size else policy


def check_can_answer(model: torch.nn.Module, tokens: int, what: str) -> None:
    """Raise ValueError for a model in training mode, and if `tokens` + 1 exceed the model's context."""
    decoder = find_decoder(model)
    if decoder.training:
        raise ValueError("in training mode the model runs unpatched: call model.eval()")
    context = families.context_of(decoder.config)
    if context is not None and tokens >= context:
        raise ValueError(
            f"{what}: {tokens} tokens, and the model's context is {context}, with the answer: give a shorter one"
        )


def together(model: torch.nn.Module, cache: EvictionCache, lengths: list[int], most: int) -> list[list[int]]:
    """Group questions, given their lengths in tokens, into batches of at most `most` questions that can share a copy of
    one cache. Returns lists of indices; a batch's questions are neighbours in length."""
    decoder = find_decoder(model)
    kinds, kept = set(families.layer_kinds(decoder.config)), [l for l in cache.layers if isinstance(l, EvictionLayer)]
    one = all(layer.counts is None or len(layer.counts) == 1 for layer in kept)
    if not one or rotary.axes(decoder) or not kinds <= {families.FULL_ATTENTION, families.SLIDING}:
        most = 1
    takes_positions = "position_ids" in inspect.signature(base_model(model).forward).parameters
    pads = kinds == {families.FULL_ATTENTION} and takes_positions and not rotary.rope_depends_on_length(decoder)
    batches: list = []
    for at in sorted(range(len(lengths)), key=lengths.__getitem__):
        last = batches[-1] if batches else []
        if last and len(last) < most and (pads or lengths[last[0]] == lengths[at]):
            last.append(at)
        else:
            batches.append([at])
    return batches


def rows_of(cache: EvictionCache, rows: int) -> EvictionCache:
    """Fork a cache of one row into a cache of `rows` equal rows."""
    fork = cache.fork()
    if rows > 1:
        fork.batch_select_indices(torch.zeros(rows, dtype=torch.long))
    return fork


@torch.no_grad()
def continued(model: torch.nn.Module, cache: EvictionCache, texts: list[list[int]], keep: int = 1) -> torch.Tensor:
    """Append a text, given as ids, to each row of a cache. Returns the logits [B, keep, vocabulary] of each text's last
    `keep` tokens; with keep=0 those of all tokens, where shorter texts are padded on the left."""
    longest, here = max(map(len, texts)), device_of(model)
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in texts], device=here)
    known: dict = dict(logits_to_keep=keep, use_cache=True, return_dict=True)
    padded = min(map(len, texts)) < longest
    if padded:
        new = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in texts], device=here)
        seen = cache.get_seq_length()
        following = cache.sequence.next_position
        first = seen if following is None else following[:, None]
        mask = torch.cat([new.new_ones(len(texts), seen), new], 1)
        known |= dict(attention_mask=mask, position_ids=(first + new.cumsum(1) - 1).clamp_min(0))
    logits = model(ids, **{CACHE: cache}, **known).logits
    if padded:
        cache.sequence.next_position = cache.sequence.positions(here)
    return logits
