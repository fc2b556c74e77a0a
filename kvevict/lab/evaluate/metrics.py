"""Scores answers: METRICS maps a metric's name to a function(prediction, answers) -> a number in [0, 1].

The score is that of the accepted answer that fits best. For "contains_all" the answers are parts, and the score is the
share of the parts that the prediction has. "contains_any" and "contains_all" follow RULER (arXiv 2404.06654). ask.py
computes "perplexity" and "fidelity", which need logits.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from ...policy.registry import Registry

METRICS = Registry("metric")
Score = Callable[[str, str], float]  # (prediction, one answer) -> how well the prediction fits the answer


def best(name: str) -> Callable[[Score], Score]:
    """Return a decorator that registers a metric under `name`: the decorated score's best value over all answers."""

    def register(score: Score) -> Score:
        def over_answers(prediction: str, answers: tuple) -> float:
            return float(max((score(prediction, answer) for answer in answers), default=0))

        METRICS.add(name)(over_answers)
        return score

    return register


@best("exact")
def exact(prediction: str, answer: str) -> bool:
    """Return whether the prediction starts with the answer, both stripped, and no letter or digit follows it."""
    return re.match(re.escape(answer.strip()) + r"(?!\w)", prediction.strip()) is not None


@best("contains_any")
def contains(prediction: str, answer: str) -> bool:
    return answer.lower() in prediction.lower()


@METRICS.add("contains_all")
def contains_all(prediction: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that occur in the prediction."""
    return sum(contains(prediction, answer) for answer in answers) / len(answers)


@best("f1_line")
def f1_line(prediction: str, answer: str) -> float:
    """Compute SQuAD's F1 of the prediction's first line that is not empty, over lower-case words without punctuation
    and articles."""

    def words(text: str) -> list[str]:
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    said, right = words(prediction.lstrip("\n").split("\n")[0]), words(answer)
    common = (Counter(said) & Counter(right)).total()
    return 2 * common / (len(said) + len(right)) if common else 0.0
