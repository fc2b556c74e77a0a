"""Finds the smallest budget with which a model answers a user's prompts as with the full cache, and a bound on the
share of different answers that holds for further prompts drawn likewise (docs/methods.md section 16)."""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from ..asking import prompts as asking
from ..asking.prompts import Tokenizer, rendered
from ..cautions import refresh_seconds
from ..models.families import context_of, device_of, find_decoder, unwrapped
from ..models.weights import fingerprint
from ..patch import evicting, slot_bytes
from ..policy.building import Chosen, choose
from ..policy.checks import PLENTY, count, fraction, parsed
from ..policy.text import DEFAULT
from ..store.files import decoded, write

BUDGETS = (4096, 2048, 1024, 512, 256, 128)
Prompt = str | list[dict[str, Any]]  # a text, or a list of messages


def bound(differing: int, prompts: int, confidence: float) -> float:
    """Return an upper confidence bound for the share of prompts whose answers differ, if `differing` of `prompts` did:
    the end of the exact one-sided interval of Clopper and Pearson (1934)."""
    low, high = differing / prompts, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        chances = (math.comb(prompts, k) * middle**k * (1 - middle) ** (prompts - k) for k in range(differing + 1))
        low, high = (middle, high) if sum(chances) > 1 - confidence else (low, middle)
    return high


def allowed(prompts: int, agree: float, confidence: float) -> int:
    """Return the largest number of differing answers with which the `bound` is at most 1 - agree. Raises ValueError if
    even 0 differing answers are too many, and then names how many prompts are enough; and for a promise of 1."""
    if 1 in (agree, confidence):
        raise ValueError("no number of prompts promises all answers or is certain: give agree and confidence below 1")
    most = next((d for d in range(prompts) if bound(d, prompts, confidence) > 1 - agree + 1e-12), prompts) - 1
    if most < 0:
        least = math.ceil(math.log(1 - confidence) / math.log(agree))
        raise ValueError(
            f"{prompts} prompts are too few to promise agree={agree:g} with a confidence of {confidence:g}: give "
            f"{least} or more, or ask for less"
        )
    return most


def candidates_of(policies: Sequence[str], kinds: Sequence[str], confidence: float) -> tuple[list, float]:
    """Return every pair (policy, kind of slots), and the confidence at which each of them is tested, so that
    `confidence` holds for all together."""
    pairs = list(dict.fromkeys(itertools.product(policies, kinds)))
    return pairs, 1 - (1 - confidence) / max(1, len(pairs))


@dataclass(frozen=True)
class Tried:
    """The result of one setting that `calibrate` tried."""

    policy: str
    kv: str
    budget: int
    chunk_size: int | None  # tokens read at once; None: the whole prompt
    slots_bytes: int  # bytes of a sequence's slots in all layers that evict
    differing: int  # prompts whose answers differ; counting stops when they are too many
    agreed: float | None  # lower bound of the share of equal answers; None: too many differ


@dataclass(frozen=True)
class Calibration:
    """The result of `kvevict.calibrate`. `found` is the setting of fewest bytes among those with a promised agreement
    (`agreed` is not None), or None."""

    agree: float
    confidence: float
    prompts: int
    max_new_tokens: int
    tried: list[Tried]

    @property
    def found(self) -> Tried | None:
        promised = [each for each in self.tried if each.agreed is not None]
        return min(promised, key=lambda each: each.slots_bytes, default=None)

    def save(self, path: str | os.PathLike) -> None:
        """Write the setting `found`, for `kvevict.patch(model, "calibrated.json")`. Raises ValueError if there is
        none."""
        found = self.found
        if found is None:
            raise ValueError("no budget was found, so there is nothing to save")
        said = dict(policy=found.policy, budget=found.budget, kv=found.kv, chunk_size=found.chunk_size)
        said |= dict(calibration=asdict(self))
        write(path, json.dumps(said, indent=1).encode())


def calibrate(
    model: Any, tokenizer: Tokenizer, prompts: Iterable[Prompt], *, agree: float = 0.95, confidence: float = 0.95,
    policies: Sequence[str] = (DEFAULT,), budgets: Sequence[int] = BUDGETS, kinds: Sequence[str] = ("model",),
    chunk_size: int | None = None, max_new_tokens: int = 64, file: str | os.PathLike | None = None,
    progress: bool = False,
) -> Calibration:  # fmt: skip
    """Find the smallest budget with which at least a share `agree` of further prompts is answered with the full cache's
    text, word for word.

    model, tokenizer  as `kvevict.patch` takes them
    prompts           texts (each a user's turn, in the chat template if there is one), or lists of messages. They must
                      be drawn in the way in which later prompts will be
    agree, confidence the share of prompts, and the probability that the promise holds. With one candidate and .95 for
                      both, 59 prompts are enough if none of their answers differs
    policies, kinds   policies as texts, and kinds of slots (kv=); every pair is a candidate
    budgets           slots per kv head, tried from the largest on, until one cannot be promised
    max_new_tokens    most tokens of an answer; answers are greedy
    file              a file to which each answer is appended as a line; a later call with equal arguments reads the
                      answers instead of writing them again

    The full cache's answers are those of a cache that keeps all slots and is read in the same chunks. The budgets of
    each candidate are tested in a fixed sequence at the confidence 1 - (1 - confidence) / candidates, so that
    `confidence` holds for all candidates together. What is promised is agreement with the model's own full cache, not
    truth. Raises ValueError for too few prompts, an empty one, and one that is longer than the model's context.
    """
    asking.check(tokenizer)
    fraction("agree", agree)
    fraction("confidence", confidence)
    rows = [_ids(tokenizer, prompt, number) for number, prompt in enumerate(prompts, 1)]
    candidates, level = candidates_of(policies, kinds, confidence)
    most = allowed(len(rows), agree, level)
    steps = sorted({count("budgets", budget, 1) for budget in budgets}, reverse=True)
    chosen = {
        (name, kv, budget): choose(name, budget=budget, kv=kv, chunk_size=chunk_size)
        for name, kv in candidates for budget in steps
    }  # fmt: skip
    limit = context_of(find_decoder(model).config)
    for number, ids in enumerate(rows, 1):
        if limit is not None and len(ids) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {number} takes {len(ids)} tokens and {max_new_tokens} new ones, the model's context is "
                f"{limit}: leave it out, or give a smaller max_new_tokens"
            )
    answers = _Answers(model, tokenizer, max_new_tokens, chunk_size, file)
    tried = []
    total = len(rows) * len(chosen)
    with tqdm(total=total, unit="answer", disable=not progress, mininterval=refresh_seconds()) as bar:
        for name, kv in candidates:
            for budget in steps:
                setting, differing = chosen[name, kv, budget], 0
                for ids in rows:
                    differing += not answers.agree(ids, setting)
                    bar.update()
                    if differing > most:
                        break
                promised = differing <= most
                lower = 1 - bound(differing, len(rows), level) if promised else None
                size = slot_bytes(model, kv) * budget
                tried.append(Tried(name, kv, budget, setting.policy.chunk_size, size, differing, lower))
                if not promised:
                    break
    return Calibration(agree, confidence, len(rows), max_new_tokens, tried)


def _ids(tokenizer: Tokenizer, prompt: Prompt, number: int) -> list[int]:
    """Encode a prompt. Error messages name it by `number`, which counts from 1."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"prompt {number} is empty: give its text")
        if not tokenizer.chat_template:
            return tokenizer(prompt)["input_ids"]
    messages: Any = [dict(role="user", content=prompt)] if isinstance(prompt, str) else prompt
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages) or not messages:
        raise TypeError(f"prompt {number} must be a text or a list of messages, got {prompt!r}")
    text = rendered(tokenizer, messages, f"prompt {number}")
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def read_prompts(path: str | os.PathLike) -> list[Prompt]:
    """Read a file of JSON lines, each an object with `prompt` (a text) or `messages`. Raises ValueError for other
    lines."""
    found: list[Prompt] = []
    for number, line in enumerate(decoded(Path(path).read_bytes(), path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = parsed(line)
            found.append(fields["messages"] if "messages" in fields else fields["prompt"])
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f'{os.fsdecode(path)}, line {number}: give {{"prompt": TEXT}} or {{"messages": [...]}}'
            ) from None
    return found


class _Answers:
    """A model's greedy answers, which are also stored in a file of JSON lines if one is given."""

    def __init__(
        self, model: Any, tokenizer: Tokenizer, most: int, chunk_size: int | None, file: str | os.PathLike | None
    ) -> None:
        self.model, self.tokenizer, self.most, self.file = model, tokenizer, most, file
        self.full = choose("streaming", budget=PLENTY, chunk_size=chunk_size, decode=False)
        self.about = f"{fingerprint(model)} {most} {chunk_size}"
        self.known: dict[str, str] = {}
        if file is not None and os.path.exists(file):
            data = Path(file).read_bytes()
            complete = data[: data.rfind(b"\n") + 1]  # without a last line that a killed process did not finish
            os.truncate(file, len(complete))
            self.known.update(json.loads(line) for line in complete.splitlines())

    def agree(self, ids: list[int], setting: Chosen) -> bool:
        """Return whether the answer to a prompt under a setting equals the full cache's."""
        policy, run = setting
        holds_all = run.kv == "model" and policy.tsp is None and policy.slots(PLENTY) >= len(ids) + self.most
        return holds_all or self._of(ids, setting) == self._of(ids, self.full)

    def _of(self, ids: list[int], setting: Chosen) -> str:
        about = f"{self.about} {setting.policy.to_json()} {setting.run.kv} {ids}"
        key = hashlib.sha256(about.encode()).hexdigest()
        if key not in self.known:
            row = torch.tensor([ids], device=device_of(find_decoder(self.model)))
            with evicting(self.model, setting, tokenizer=self.tokenizer):
                output = unwrapped(self.model).generate(
                    row, attention_mask=torch.ones_like(row), max_new_tokens=self.most, do_sample=False, num_beams=1
                )
            self.known[key] = self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip()
            if self.file is not None:
                with open(self.file, "a", encoding="utf-8") as file:
                    file.write(json.dumps([key, self.known[key]]) + "\n")
        return self.known[key]
