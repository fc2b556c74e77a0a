"""Scores of an answer. METRICS: name -> function(prediction, answers) -> a number in [0, 1].

The best of the accepted answers counts, except where the answers are parts ("contains_all") or classes
("classification", "only_label": the right one first, then the wrong ones). The conventions are the official scorers':

- f1, f1_zh, rouge_l, rouge_l_zh, classification, retrieval, count, code_sim: LongBench (arXiv 2308.14508). Its datasets
  that are scored on the first line alone have "f1_line" and "rouge_l_line"; "classification" always reads one line.
- contains_any, contains_all: RULER (arXiv 2404.06654). longeval: LongEval's lines.
- only_label: BABILong (arXiv 2406.10149), but an answer also ends with its line.
- accuracy_number: GSM8K (arXiv 2110.14168), but an answer that forgets the "####" is read too.

The names ending in _zh need jieba. "perplexity" is not a function of texts and is computed where the model is.
"""

import re
import string
from collections import Counter
from difflib import SequenceMatcher

from ..policy.checks import installed
from ..policy.registry import Registry

METRICS = Registry("metric")

# What LongBench drops from Chinese answers. Not every mark: 《 for one stays.
_PUNCTUATION_ZH = (
    "–—‘’‛“”„‟…‧、。〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿﹏"
    "！＂＃＄％＆＇（）＊＋，－／：；＜＝＞？＠［＼］＾＿｀｛｜｝～｟｠｡｢｣､"
)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def best(*names):
    """Register a score(prediction, answer) under the names, as the best over all answers."""

    def register(score):
        def over_answers(prediction, answers):
            return float(max((score(prediction, answer) for answer in answers), default=0))

        for name in names:
            METRICS.add(name)(over_answers)
        return score

    return register


def line(text: str) -> str:
    """The first line; newlines before it do not count."""
    return text.lstrip("\n").split("\n")[0]


@best("exact")
def exact(prediction, answer):
    """Whether the prediction starts with the answer, white space around both aside, and no word goes on after it."""
    return re.match(re.escape(answer.strip()) + r"(?!\w)", prediction.strip()) is not None


@best("contains_any")
def contains(prediction, answer):
    return answer.lower() in prediction.lower()


@METRICS.add("contains_all")
def contains_all(prediction, answers):
    """The share of the answers that occur."""
    return sum(contains(prediction, answer) for answer in answers) / len(answers)


def overlap(prediction: list[str], answer: list[str]) -> float:
    """F1 of two bags of words."""
    common = (Counter(prediction) & Counter(answer)).total()
    return 2 * common / (len(prediction) + len(answer)) if common else 0.0


@best("f1")
def f1(prediction, answer):
    """Over lower-case words without punctuation and articles (SQuAD's)."""

    def words(text):
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        return re.sub(r"\b(a|an|the)\b", " ", text).split()

    return overlap(words(prediction), words(answer))


@best("f1_line")
def f1_line(prediction, answer):
    return f1(line(prediction), answer)


def cut_zh(text: str) -> list[str]:
    """The words of a text that has no spaces between them."""
    installed("zh", "a metric of Chinese text", "jieba")
    import jieba

    return list(jieba.cut(text))


@best("f1_zh")
def f1_zh(prediction, answer):
    """Over jieba's words without punctuation and white space."""
    drop = {ord(c): None for c in string.punctuation + _PUNCTUATION_ZH}

    def words(text):
        bare = ("".join(word.lower().translate(drop).split()) for word in cut_zh(text))
        return [word for word in bare if word]

    return overlap(words(prediction), words(answer))


def common_words(x: list[str], y: list[str]) -> set[str]:
    """The words of a longest common subsequence; of several, the one that the `rouge` package finds."""
    length = [[0] * (len(y) + 1)]  # length[i][j]: of x[:i] and y[:j]
    for word in x:
        above, row = length[-1], [0]
        for j, other in enumerate(y):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        length.append(row)
    i, j, words = len(x), len(y), set()
    while i and j:
        if x[i - 1] == y[j - 1]:
            i, j = i - 1, j - 1
            words.add(x[i])
        elif length[i - 1][j] > length[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


@best("rouge_l")
def rouge_l(prediction, answer):
    """ROUGE-L F of the `rouge` package: sentences end at full stops, distinct words count, and those are common that
    are in the longest common subsequence of one of the answer's sentences and one of the prediction's.

    The package fails, which LongBench scores 0, when two sentences have about 1,000 words together; this does not."""
    said, right = ([" ".join(s.split()).split(" ") for s in t.split(".") if s] for t in (prediction, answer))
    if not said or not right:
        return 0.0
    common = len(set().union(*(common_words(r, s) for r in right for s in said)))
    precision, recall = common / len(set().union(*said)), common / len(set().union(*right))
    return 2 * precision * recall / (precision + recall + 1e-8)  # the package's, so that its digits agree


@best("rouge_l_line")
def rouge_l_line(prediction, answer):
    return rouge_l(line(prediction), answer)


@best("rouge_l_zh")
def rouge_l_zh(prediction, answer):
    """Over jieba's words."""
    return rouge_l(" ".join(cut_zh(prediction)), " ".join(cut_zh(answer)))


@METRICS.add("classification")
def classification(prediction, answers):
    """1 / (classes that the first line names) if the right one is among them. A class whose name is a part of the right
    one's is not counted."""
    right, *wrong = answers
    said = line(prediction)
    return 1 / (1 + sum(c in said and c not in right for c in wrong)) if right in said else 0.0


@best("retrieval", "retrieval_zh", "count")
def same_number(prediction, answer):
    """The share of the prediction's numbers that are the answer's first ("Paragraph 3", "段落3", "3")."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(re.findall(r"\d+", answer)[0]) / len(numbers) if numbers else 0.0


@best("code_sim")
def code_sim(prediction, answer):
    """Edit similarity in whole per cent of the first line without a comment or a code fence: `fuzzywuzzy.fuzz.ratio`,
    which is difflib's unless python-Levenshtein is installed too; LongBench's requirements do not list it."""
    lines = prediction.lstrip("\n").split("\n")
    code = next((text for text in lines if not any(mark in text for mark in ("`", "#", "//"))), "")
    if code == answer:
        return 1.0
    return round(100 * SequenceMatcher(None, code, answer).ratio()) / 100 if code and answer else 0.0


@best("accuracy_number")
def accuracy_number(prediction, answer):
    """Whether the number after the first "####", or else the last number, has the answer's value."""
    final = _NUMBER.findall(prediction.partition("####")[2])[:1] or _NUMBER.findall(prediction)[-1:]
    return [float(n.replace(",", "")) for n in final] == [float(answer.replace(",", ""))]


@best("longeval")
def longeval(prediction, answer):
    """Whether the last number is the answer."""
    return [int(n) for n in re.findall(r"\d+", prediction)[-1:]] == [int(answer)]


@METRICS.add("only_label")
def only_label(prediction, answers):
    """Whether the first sentence of the first line names the right label, or all of several ("milk,football"), and none
    of the wrong ones."""
    said = line(prediction.strip()).lower().split(".")[0]
    right, *wrong = answers
    return float(all(label.lower() in said for label in labels(right)) and not any(w.lower() in said for w in wrong))


def labels(answer: str) -> list[str]:
    """The labels of a bAbI answer: "milk,football" are two, a path such as "s,w" is one."""
    return answer.split(",") if len(answer) > 3 else [answer]
