"""Metrics: cases worked by hand, and the published packages' numbers where these are installed."""

import random

import pytest

from kvevict.evaluate.metrics import METRICS

WORKED = [
    ("exact", "  42, says the text", ["42"], 1),
    ("exact", "421", ["42"], 0),  # no word boundary after 42
    ("exact", "It is 42", ["42"], 0),
    ("exact", "no idea", ["yes", " no\n"], 1),  # the better of two answers, stripped
    ("exact", "a+b!", ["a+b"], 1),  # no pattern of its own
    ("contains_any", "It is the RED one", ["blue", "red"], 1),
    ("contains_any", "It is green", ["blue", "red"], 0),
    ("contains_all", "12 and 34", ["34", "12", "56", "78"], 2 / 4),
    # "the" and the marks go: {quick, fox} and {quick, brown, fox, red}: 2 common, 2 * 2 / (2 + 4)
    ("f1", "The quick fox!", ["a quick, brown fox: red"], 2 / 3),
    ("f1", "no no", ["no"], 2 / 3),  # words count as often as they occur: 1 common, 2 / (2 + 1)
    ("f1", "the", ["a"], 0),  # nothing is left
    ("f1", "x", ["y", "x"], 1),
    ("f1", "red\nblue", ["red"], 2 / 3),
    ("f1_line", "\n\nred\nblue", ["red"], 1),  # the first line that is not empty
    # LCS "a c d": 3 of 4 distinct words said, 3 of 3 right
    ("rouge_l", "a b c d", ["a c d"], 2 * 0.75 / 1.75),
    # two sentences each. Common words {a, b} and {c} by sentence pairs; 4 distinct words said, 3 right
    ("rouge_l", "c x. a b", ["a b. c"], 2 * 0.75 / 1.75),
    ("rouge_l", "a a a a", ["a"], 1),  # distinct words
    ("rouge_l", "", ["a"], 0),
    ("rouge_l", "...", ["a"], 0),
    ("rouge_l_line", "a c d\nx y z", ["a c d"], 1),
    ("classification", "Animal", ["Animal", "Plant", "City"], 1),
    ("classification", "Animal or Plant", ["Animal", "Plant", "City"], 1 / 2),
    ("classification", "Plant", ["Animal", "Plant", "City"], 0),
    ("classification", "\nOther city\nPlant", ["Other city", "city", "Plant"], 1),  # a part of its name; another line
    ("retrieval", "Paragraph 3, not Paragraph 4 or 33", ["Paragraph 3"], 1 / 3),
    ("retrieval", "none", ["Paragraph 3"], 0),
    ("retrieval_zh", "段落7", ["段落7"], 1),
    ("count", "There are 12 of 15", ["15"], 1 / 2),
    ("count", "015", ["15"], 0),
    # the fence and the comment are not code. "x = 1" and "x = 2": 4 of 5 characters in one block, 2 * 4 / 10
    ("code_sim", "\n```python\n# one\nx = 1\ny", ["x = 2"], 0.8),
    ("code_sim", "abc", ["abd"], 0.67),  # 2 * 2 / 6, in whole per cent
    ("code_sim", "// only a comment", ["x"], 0),
    ("accuracy_number", "so 3 + 4 = 7\n#### 7\n\nQuestion: 9", ["7"], 1),
    ("accuracy_number", "3 cost $1,234.50.", ["1234.5"], 1),  # the last number, its full stop and comma aside
    ("accuracy_number", "#### 8 and 7", ["7"], 0),
    ("accuracy_number", "-5", ["5"], 0),
    ("accuracy_number", "#### none, 1,000", ["1,000"], 1),
    ("accuracy_number", "no number", ["7"], 0),
    ("longeval", "The <REGISTER_CONTENT> in line 9 is <02416>.", ["2416"], 1),
    ("longeval", "2416 or 17", ["2416"], 0),
    ("longeval", "I forgot", ["2416"], 0),
    ("only_label", " The Kitchen. Or the garden", ["kitchen", "garden", "office"], 1),  # first sentence
    ("only_label", "kitchen\n\nQuestion: garden?", ["kitchen", "garden", "office"], 1),  # first line
    ("only_label", "kitchen or garden", ["kitchen", "garden", "office"], 0),
    ("only_label", "milk and apple", ["apple,milk", "football", "nothing"], 1),
    ("only_label", "milk", ["apple,milk", "football", "nothing"], 0),
    ("only_label", "w then s", ["s,w", "e,n"], 0),  # a path is one label
]


@pytest.mark.parametrize("name, prediction, answers, want", WORKED)
def test_worked(name, prediction, answers, want):
    got = METRICS[name](prediction, tuple(answers))
    assert isinstance(got, float)
    assert got == pytest.approx(want, abs=1e-8)


def test_chinese():
    pytest.importorskip("jieba")
    # jieba cuts 我/来到/北京 and 我/在/北京; 。 and blanks go: 2 common, 2 * 2 / (3 + 3)
    assert METRICS["f1_zh"]("我来到 北京。", ("我在北京",)) == pytest.approx(2 / 3)
    # the same words, LCS 我 北京; nothing is dropped and 。 is a word: 2 of 4 and 2 of 3
    assert METRICS["rouge_l_zh"]("我来到北京。", ("我在北京",)) == pytest.approx(4 / 7)


def test_chinese_without_jieba(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jieba", None)
    for name in ("f1_zh", "rouge_l_zh"):
        with pytest.raises(ValueError, match=r"pip install 'kvevict\[zh\]'"):
            METRICS[name]("北京", ("北京",))


def test_unknown_name():
    with pytest.raises(ValueError, match="rouge_l"):
        METRICS.find("rogue_l")


WORDS = [
    "the", "a", "of", "cat", "Cat", "dog.", "dog,", ".", "..", "...", "x", "x.y", "it's", "12", "3.5", "'", "é", "北京",
    "上海。", "我",
]  # fmt: skip
BLANK = ["", "\n", "\n\n", "\t"]


def text(rng, most=30):
    """Random words with stops, blank sentences and line ends; now and then one thing alone or nothing."""
    words = rng.choices(WORDS + BLANK, k=rng.choice([0, 1, 2, rng.randint(3, most)]))
    return rng.choice(["", " ", "\n", "."]) + rng.choice([" ", "  ", ". "]).join(words)


def pairs(seed, count=300, **kwargs):
    rng = random.Random(seed)
    for _ in range(count):
        one, other = text(rng, **kwargs), text(rng, **kwargs)
        yield one, rng.choice([other, one, one + other, other + " " + one, one[::2]])


def rouge_f(prediction, answer):
    """What LongBench takes from the package."""
    try:
        return pytest.importorskip("rouge").Rouge().get_scores(prediction, answer)[0]["rouge-l"]["f"]
    except ValueError:  # no sentence in one of them
        return 0.0


def test_rouge_package():
    for prediction, answer in pairs(1):
        assert METRICS["rouge_l"](prediction, (answer,)) == rouge_f(prediction, answer), (prediction, answer)


def test_rouge_package_zh():
    jieba = pytest.importorskip("jieba")
    for prediction, answer in pairs(2):
        want = rouge_f(" ".join(jieba.cut(prediction)), " ".join(jieba.cut(answer)))
        assert METRICS["rouge_l_zh"](prediction, (answer,)) == want, (prediction, answer)


def test_fuzzywuzzy_package():
    fuzz = pytest.importorskip("fuzzywuzzy.fuzz")
    if fuzz.SequenceMatcher.__module__ != "difflib":
        pytest.skip("python-Levenshtein is installed: fuzzywuzzy uses another similarity")
    for prediction, answer in pairs(3, most=80):
        code = prediction.replace("\n", " ")
        assert METRICS["code_sim"](code, (answer,)) == fuzz.ratio(code, answer) / 100, (code, answer)
