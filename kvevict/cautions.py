"""Shows a progress bar while a call runs, and warns, once per cause, when answers are likely to be wrong."""

import sys
import warnings
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

from .models.families import context_of

T = TypeVar("T")
# When the question is known (`Policy.question`) -> share of the slots with which most answers were measured to be those
# of the full cache (docs/usage.md, Which budget?). Below it a call warns.
ENOUGH = {"known": 1 / 16, "later": 1 / 4}
LIBRARIES = ("kvevict", "transformers", "torch", "peft", "accelerate", "contextlib")
_given: set[Hashable] = set()


def once(key: Hashable, text: str) -> None:
    """Issue the warning `text`, unless a warning with this key was issued before. It shows the line of the nearest
    caller outside of these `LIBRARIES`."""
    if key not in _given:
        _given.add(key)
        frame, level = sys._getframe(1), 2
        while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
            frame, level = frame.f_back, level + 1
        warnings.warn(text, stacklevel=level)


def of_share(meter: Any, policy: Any, asked: str) -> None:
    """Warn, once per budget, if a read kept a smaller share of its slots than is `ENOUGH` for what is asked of it.
    asked: when the question is known, one of the values of `Policy.question`. With recall nothing is lost, and a cache
    that was loaded has no meter."""
    if policy.recall:
        return
    kept, tokens = min(zip(meter.report["kept_share"], meter.report["seen"], strict=True))
    if kept >= ENOUGH.get(asked, 0):
        return
    told = {
        "later": "answers about the rest are often wrong: give more slots (budget=0.5 keeps half), or recall=True, "
        "with which each question chooses from all tokens",
        "known": f"with less than 1/16 more answers are wrong: give more slots (budget={-(-tokens // 16)} or more), or "
        "recall=True, with which the answer chooses from all tokens",
    }
    once(("share", policy.budget), f"{kept:.1%} of the {tokens} tokens are kept, and {told[asked]}")


def of_later_questions(question: str, recalls: bool) -> None:
    """Warn, once, of a policy for known questions that reads a text without its questions and does not recall. The
    arguments are the policy's `question` and `recall`."""
    if question == "known" and not recalls:
        once(
            "later",
            "a Pipeline's questions come after its text, and this policy keeps what a question in the prompt attends "
            "to: give recall=True, with which each question chooses from all tokens, or leave the policy out",
        )


def of_prompt(policy: Any, cache: Any, config: Any, seen: list[int]) -> None:
    """Warn of a prompt that is longer than the model's context, of recall=True with decode=True, and of a cache whose
    slots were chosen for an earlier question. `seen` is the number of tokens of each row, those in the cache
    included."""
    context = context_of(config)
    if context is not None and max(seen) > context:
        once(
            ("context", context),
            f"the {max(seen)} tokens are more than the model's context of {context}, and answers are often wrong: "
            "shorten the prompt",
        )
    if policy.recall and policy.decode:
        once(
            "decode",
            "recall=True with decode=True: while an answer is written, few decoded rows choose from all tokens, and "
            "facts that the question had found are lost: give decode=False",
        )
    before, meter = cache.sequence.policy, cache.meter
    if before is None or meter is None or (policy.recall and before.recall):
        return
    asked = before.question == policy.question == "known"
    if not (asked or policy.recall):
        return
    kept = min(meter.report["kept_share"])
    if kept < 1:
        once(
            ("turn", before.budget),
            f"{kept:.0%} of the tokens in past_key_values are kept, and "
            + ("were chosen for an earlier question" if asked else "recall does not bring the others back")
            + ": answers about the rest are often wrong. Read the whole chat again, without past_key_values, or patch "
            "with recall=True before its first turn",
        )


def of_question(found: Sequence[Any]) -> None:
    """Warn, once per reason, that no question was found in a prompt. found: the question of each batch row, as
    `kvevict.policy.rows.Found`."""
    for each in found:
        if each.missing:
            tokenizer = "" if each.text else "give kvevict.patch the tokenizer=, or "
            once(
                ("question", each.missing),
                f"{each.missing}, so the prompt's last {each.tokens} tokens choose the slots in a question's place: "
                f"{tokenizer}name the question with kvevict.observing, or, where there is none, take a policy without "
                "(paasvn); tokenizer=False goes on without this warning",
            )


def of_scores(tokens: int) -> None:
    """Warn that the logits of all `tokens` tokens of a text were computed before any of its slots was evicted."""
    warnings.warn(
        f"these are logits of {tokens} tokens that were read before anything was evicted from them: to score a text "
        "under eviction read its first part into a cache and pass the rest, or evict after each chunk "
        "(schedule='chunk') with a chunk_size below its length; logits_to_keep=1 is enough to read",
        stacklevel=3,
    )


def of_norms(layers: list[int]) -> None:
    """Warn of layers with keys or values whose norm exceeds 65504, the largest float16 number: their 4-bit slots may
    not hold them."""
    if layers:
        once(
            "norms",
            f"layers {', '.join(map(str, layers))} have keys or values of a norm above 65504, which 4 bits may not "
            "hold (then the answers are NaN): read the text with kv='int8', or recall_kv='int8' for an archive",
        )


def refresh_seconds() -> float:
    """Return the least seconds between two states of a progress bar: a log gets a line each half minute."""
    return 0.1 if sys.stderr.isatty() else 30


def bar(items: Sequence[T], what: str, unit: str, show: bool) -> Iterable[T]:
    """Return the items to iterate over, wrapped in a progress bar if `show` is true and there are at least two."""
    if not show or len(items) < 2:
        return items
    from tqdm import tqdm

    return tqdm(items, desc=what, unit=unit)
