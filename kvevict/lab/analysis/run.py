"""Runs a prompt, with the model patched or not, and measures time and memory."""

import ctypes
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from ...answering.answer import KEEPS, continued
from ...answering.writing import Sampling, written
from ...asking.prompts import Tokenizer, first_ids, frame, ids_of, until_line_end
from ...asking.question import LastTurn
from ...context import within
from ...models.compat import cache_of
from ...models.families import device_of
from ...patch import evicting
from ...policy.building import Chosen
from ...report import report


@dataclass(frozen=True)
class EncodedPrompt:
    """The token ids of a prompt, and of the continuation that is scored after it, if any."""

    context: list[int]
    question: list[int]  # all ids after the context: question, end of the chat template, opening of the answer
    answer: list[int] | None = None  # the continuation to score; None: the model writes one
    said: tuple[int, int] | None = None  # (start, stop) of the question's tokens in the prompt; None: unknown

    def row(self, device: str | torch.device) -> torch.Tensor:
        """Return the prompt's ids [1, N]."""
        return torch.tensor([self.context + self.question], device=device)


def encode(
    tokenizer: Tokenizer, text: str, question: str, limit: int | None = None, opening: str = ""
) -> EncodedPrompt:
    """Encode `text`, `question` and the answer's opening, in the tokenizer's chat template if it has one. If the prompt
    exceeds `limit` tokens, the end of the text is cut off; the question is never cut. Raises ValueError if no text is
    left."""
    head, question_ids = frame(tokenizer, f"\n\n{question}", f"\n{opening}" if opening else "")
    room = None if limit is None else limit - len(head) - len(question_ids)
    if room is not None and room < 1:
        taken = len(head) + len(question_ids)
        raise ValueError(
            f"a limit of {limit} tokens leaves none for the text; the question takes {taken}: give a higher limit"
        )
    body, complete = (ids_of(tokenizer, text), True) if room is None else first_ids(tokenizer, text, room)
    if not body:
        raise ValueError("the text is empty; give one with words")
    if not complete:
        print(f"the text is cut after its first {room} tokens (limit: {limit})", file=sys.stderr)
    return EncodedPrompt(head + body, question_ids)


def measure(
    model: Any, tokenizer: Any, ids: torch.Tensor, chosen: Chosen | None = None, max_new_tokens: int = 64,
    positions: bool = False, one_line: bool = False, question: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Generate greedily under a policy (chosen=None: unpatched), until a line ends if `one_line`. `question` is the
    request at the prompt's end: with rows="probe" its question scores the slots, as with `kvevict.patch(tokenizer=..)`.

    Returns a dict: answer (None without a tokenizer), new_tokens (their number), read_seconds (until the first token),
    decode_seconds, peak_bytes (peak memory above that in use before) and, if patched, the read's report, which has the
    kept positions if `positions`.
    """
    ids, timer = ids.to(device_of(model)), _Times()
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
    if one_line:
        inputs["stopping_criteria"] = until_line_end(tokenizer, ids.shape[1])

    model.generate(ids[:, :8], attention_mask=torch.ones_like(ids[:, :8]), max_new_tokens=2)  # warm up

    def generate() -> dict:
        before = _reset_peak(ids.device)
        start = time.perf_counter()
        out = model.generate(**inputs, streamer=timer)
        end = time.perf_counter()
        new = out[0, ids.shape[1] :]
        first = timer[1] if len(timer) > 1 else end
        return dict(
            answer=None if tokenizer is None else tokenizer.decode(new, skip_special_tokens=True), new_tokens=len(new),
            read_seconds=first - start, decode_seconds=end - first, peak_bytes=_peak(ids.device) - before,
        )  # fmt: skip

    if chosen is None:
        return generate()
    if tokenizer is not None:
        chosen = chosen.with_tokenizer(tokenizer)
    with evicting(model, chosen, tokenizer=False), within(question=LastTurn(tokenizer, question) if question else None):
        return generate() | {"report": report(model, positions=positions)}


def ask_each(
    model: torch.nn.Module, tokenizer: Tokenizer, ids: torch.Tensor, questions: list[list[int]], chosen: Chosen,
    max_new_tokens: int, one_line: bool,
) -> list[dict[str, Any]]:  # fmt: skip
    """Read a text, ids [1, N], without a question. Then ask each question, given as ids, of a fork of the cache, as
    `kvevict.answer` does. Returns a list of dicts, the first for the text and one for each question: answer ("" for the
    text) and report, with positions."""
    by, recalls = chosen.with_tokenizer(tokenizer), chosen.policy.recall
    with evicting(model, by, tokenizer=False), torch.no_grad(), within(asks=False):
        text = cache_of(model(ids, use_cache=True, logits_to_keep=1))
    made, choose = [dict(answer="", report=report(text, positions=True))], Sampling().chooser()
    with evicting(model, by if recalls else KEEPS, tokenizer=tokenizer if recalls else None):
        for question in questions:
            cache = text.fork()
            logits = continued(model, cache, [question])
            seen = report(cache, positions=True)
            said = written(model, tokenizer, logits, cache, [max_new_tokens], [choose], one_line)[0]
            made.append(dict(answer=tokenizer.decode(said, skip_special_tokens=True), report=seen))
    return made


class _Times(list[float]):
    """A streamer that lists the times at which `generate` handed it the prompt and then each new token."""

    def put(self, tokens: torch.Tensor) -> None:
        self.append(time.perf_counter())

    def end(self) -> None:
        pass


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def _reset_peak(device: torch.device) -> int:
    """Reset the peak memory of a GPU, or else of this process, and return the bytes in use now. For a process this
    works on Linux only; elsewhere the result is 0."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if not os.path.exists("/proc/self/clear_refs"):
        return 0
    ctypes.CDLL(None).malloc_trim(0)  # memory that an earlier run freed would hide this run's growth
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS:")


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM:") if os.path.exists("/proc/self/status") else 0
