"""Conversations: the cases about one text are the turns of a chat, one after the other on one cache.

A run reads every turn under its policy, as plain `generate` with a cache that is carried along does. Mode `known`: the
first question ends the text's turn and is read with it; mode `later`: the text is read alone before. The model's own
answers stay in the history. `full` is the unpatched model on a plain cache.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from transformers import DynamicCache

from ...compat import CACHE
from ...families import base_model, context_of, find_decoder
from ...patch import evicting
from ...policy.tokenizer import told
from ...prompts import MARK, ids_of, rendered
from ...report import report
from ...writing import ends_of
from .ask import FULL, Asked, Run, as_row, judged, measured, measured_all, now, policy_for, write


def framed(tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """Ids before the first user's turn, after a user's turn, and between an answer and the next user's turn. Raises
    ValueError for a chat template that refuses two turns or changes them."""
    if not tokenizer.chat_template:
        return tokenizer("")["input_ids"], ids_of(tokenizer, "\nAnswer:"), ids_of(tokenizer, "\n")
    asked = [dict(role=role, content=MARK) for role in ("user", "assistant", "user")]
    parts = rendered(tokenizer, asked, "two turns").split(MARK)
    if len(parts) != 4:
        raise ValueError("the tokenizer's chat template does not give each turn's text once; set another chat_template")
    head, ends, between, _ = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts)
    return head, ends, between


@torch.no_grad()
def converse(model: Any, tokenizer: Any, asked: list[Asked], run: Run) -> Iterator[dict[str, Any]]:
    """Yield the fields of each turn's line beside the key. Seconds are those to the turn's first token (read_seconds;
    of mode `later` the text's own reading is in the first turn's) and of the answer's other tokens; kept and
    cache_bytes those after the turn was read, archive_bytes of recall."""
    head, ends, between = framed(tokenizer)
    context, plain = ids_of(tokenizer, asked[0].case.context), not tokenizer.chat_template
    questions = [ids_of(tokenizer, _question(each.case.question, plain)) for each in asked]
    most = len(head + context) + sum(len(q + ends + between) for q in questions) + sum(e.case.new_tokens for e in asked)
    limit = context_of(find_decoder(model).config)
    if limit is not None and most > limit:
        raise ValueError(f"the turns of {asked[0].case.id} take up to {most} tokens, the model's context is {limit}")
    policy = None if run == FULL else told(policy_for(run, len(context), (), asked[0].case.task, model), tokenizer)
    cache, stop, new = DynamicCache(config=model.config), ends_of(model, tokenizer), head + context
    patched = nullcontext() if policy is None else evicting(model, policy, tokenizer=tokenizer)
    with patched:
        seconds = 0.0
        if run.mode == "later":
            start = now(model)
            base_model(model)(as_row(model, new), **{CACHE: cache}, use_cache=True, logits_to_keep=1)
            seconds, new = now(model) - start, []
        for each, question in zip(asked, questions, strict=True):
            new = new + question + ends
            start = now(model)
            out = model(as_row(model, new), **{CACHE: cache}, use_cache=True, logits_to_keep=1)
            line: dict = dict(prompt_tokens=len(new), read_seconds=now(model) - start + seconds)
            line |= measured_all(cache) if policy is None else measured(model)
            line |= {} if policy is None else dict(archive_bytes=report(model)["archive_bytes"])
            start = now(model)
            said = write(model, tokenizer, out.logits, cache, [each])[0]
            text = tokenizer.decode(said, skip_special_tokens=True)
            line |= dict(prediction=text, decode_seconds=now(model) - start) | judged(text, each.case)
            yield line
            new, seconds = [*(() if said[-1] in stop else said[-1:]), *between], 0.0


def _question(text: str, plain: bool) -> str:
    return f"\n\nQuestion: {text.strip()}" if plain else text
