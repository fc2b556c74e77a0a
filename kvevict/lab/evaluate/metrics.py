"""Scores of an answer. METRICS: name -> function(prediction, answers) -> a number in [0, 1].

The best of the accepted answers counts, except where the answers are parts ("contains_all"). "f1_line" is SQuAD's F1 of
the first line. The conventions of "contains_any" and "contains_all" are those of RULER (arXiv 2404.06654). "perplexity"
is not a function of texts and is computed where the model is.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ...policy.registry import Registry

METRICS = Registry("metric")


def best(name: str) -> Callable[[Callable[[str, str], float]], Callable[[str, str], float]]:
    """Register a score(prediction, answer) as the best over all answers."""

    def register(score: Any) -> Any:
        def over_answers(prediction: str, answers: tuple) -> float:
            return float(max((score(prediction, answer) for answer in answers), default=0))

        METRICS.add(name)(over_answers)
        return score

    return register


@best("exact")
def exact(prediction: str, answer: str) -> bool:
    """True if the prediction starts with the answer, stripped, and no word goes on after it."""
    return re.match(re.escape(answer.strip()) + r"(?!\w)", prediction.strip()) is not None


@best("contains_any")
def contains(prediction: str, answer: str) -> bool:
    return answer.lower() in prediction.lower()


@METRICS.add("contains_all")
def contains_all(prediction: str, answers: Sequence[str]) -> float:
    """The share of the answers that occur."""
    return sum(contains(prediction, answer) for answer in answers) / len(answers)


@best("f1_line")
def f1_line(prediction: str, answer: str) -> float:
    """F1 over the lower-case words, without punctuation and articles (SQuAD's), of the first line that is not empty."""

    def words(text: str) -> Any:
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    said, right = words(prediction.lstrip("\n").split("\n")[0]), words(answer)
    common = (Counter(said) & Counter(right)).total()
    return 2 * common / (len(said) + len(right)) if common else 0.0
