"""Runs conversations: the cases about one text are the turns of a chat, one after the other on one cache.

A run reads every turn under its policy, as `generate` does with the cache of the earlier turns. In mode `known` the
first turn is the text and a question; in modes `later` and `other` the text is read alone first. The model's own
answers stay in the history. The run `full` is the unpatched model with Transformers' cache.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from transformers import DynamicCache

from ...answering.writing import ends_of
from ...asking.prompts import Tokenizer, ids_of, turns_frame
from ...models.compat import CACHE
from ...models.families import base_model, context_of, find_decoder
from ...patch import evicting
from .ask import AskedCase, as_row, forked, judged, measured, measured_all, now, write
from .results import Line
from .runs import FULL, KEEP_ALL, RunSpec, policy_for


@torch.no_grad()
def converse(model: Any, tokenizer: Tokenizer, asked: list[AskedCase], run: RunSpec) -> Iterator[Line]:
    """Yield, for each turn, the fields of its result line without the key. read_seconds is the time until the turn's
    first token; for the first turn it includes reading the text, if the text is read alone. decode_seconds is the time
    of the answer's other tokens. Slots and bytes are counted once the turn was read."""
    head, ends, between = turns_frame(tokenizer)
    context, plain = ids_of(tokenizer, asked[0].case.context), not tokenizer.chat_template
    texts = [f"\n\nQuestion: {each.case.question.strip()}" if plain else each.case.question for each in asked]
    questions = [ids_of(tokenizer, text) for text in texts]
    most = len(head + context) + sum(len(q + ends + between) for q in questions) + sum(e.case.new_tokens for e in asked)
    limit = context_of(find_decoder(model).config)
    if limit is not None and most > limit:
        raise ValueError(f"the turns of {asked[0].case.id} take up to {most} tokens, the model's context is {limit}")
    chosen = None
    if run != FULL:
        chosen = policy_for(run, len(context), (), asked[0].case.task, model).with_tokenizer(tokenizer)
    cache, stop, new = DynamicCache(config=model.config), ends_of(model, tokenizer), head + context
    other = run.mode == "other"
    with nullcontext() if chosen is None else evicting(model, chosen, tokenizer=tokenizer):
        seconds = 0.0
        if other or run.mode == "later":
            start = now(model)
            base_model(model)(as_row(model, new), **{CACHE: cache}, use_cache=True, logits_to_keep=1)
            seconds, new = now(model) - start, []
        for each, question in zip(asked, questions, strict=True):
            new = new + question + ends
            here = forked(cache) if other else cache
            with evicting(model, KEEP_ALL, tokenizer=False) if other else nullcontext():
                start = now(model)
                out = model(as_row(model, new), **{CACHE: here}, use_cache=True, logits_to_keep=1)
                line: dict = dict(prompt_tokens=len(new), read_seconds=now(model) - start + seconds)
                line |= measured_all(here) if chosen is None else measured(model)
                start = now(model)
                said = write(model, tokenizer, out.logits, here, [each])[0]
            text = tokenizer.decode(said, skip_special_tokens=True)
            yield line | dict(prediction=text, decode_seconds=now(model) - start) | judged(text, each.case)
            if other:
                model(as_row(model, new), **{CACHE: cache}, use_cache=True, logits_to_keep=1)
            unread = [*(said[:-1] if other else ()), *(() if said[-1] in stop else said[-1:])]
            new, seconds = unread + between, 0.0
