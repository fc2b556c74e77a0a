"""Tasks that read a downloaded benchmark, on small benchmarks made here; on the real ones where these are at hand."""

import json
import random
import re
from pathlib import Path

import pytest

from kvevict.lab.evaluate.metrics import METRICS
from kvevict.lab.evaluate.tasks import TASKS, Settings

SHARED = Path(__file__).parent / "../../../shared/data"


class Words:
    """A tokenizer of which every word with the white space before it is a token."""

    def __init__(self):
        self.ids = {}

    def __call__(self, text, add_special_tokens=True, **kwargs):
        assert not add_special_tokens  # a prompt's pieces are counted; the runner adds what is special
        return {"input_ids": [self.ids.setdefault(w, len(self.ids)) for w in re.findall(r"\s*\S+|\s+$", text)]}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", "utf-8")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """One folder per benchmark, in the official layouts."""
    root, rng = tmp_path_factory.mktemp("data"), random.Random(7)
    for count in (3, 20, 50):
        rows = [(f"w{i}-x", rng.randint(1, 50000)) for i in range(count)]
        record = "".join(f"line {name}: REGISTER_CONTENT is <{number}>\n" for name, number in rows)
        prompts = [
            {"prompt": f"Remember.\n\n{record}\nNow the record is over. Say line {n}? ", "expected_number": number}
            for n, number in rows
        ]
        write(root / f"longeval/lines/testcases/{count}_lines.jsonl", prompts)
        topics = [f"the topic {i}" for i in range(count)]
        talk = f"Talk. {' '.join(topics)} Now the record ends. First?"
        write(root / f"longeval/topics/{count}_topics.jsonl", [{"prompt": talk, "topics": topics}] * 7)
    return root


def settings(data=None, length=200, cases=4, **kwargs):
    return Settings(Words(), length, cases, data=data, **kwargs)


ALL = ["longeval/lines", "longeval/topics", "perplexity"]


@pytest.mark.parametrize("name, own", [*((name, False) for name in ALL), ("longeval/lines", True)])
def test_cases(name, own, data):
    """Cases depend on settings and number alone, fit the length, and their right answer scores 1."""
    data = None if own else data
    few, many = (list(TASKS[name](settings(data, cases=cases))) for cases in (3, 6))
    assert len(few) == 3 and len(many) == 6
    assert few == many[:3]
    assert len({case.id for case in many}) == 6
    assert list(TASKS[name](settings(data, cases=6, seed=1))) != many
    for case in many:
        assert case.task == name
        assert case.tags["length"] == 200
        assert settings().tokens(case.context + case.question) <= 200
        if name != "perplexity":
            assert METRICS[case.metric](case.answers[0], case.answers) == 1
            assert METRICS[case.metric]("nothing of that kind", case.answers) < 1


def test_missing(tmp_path):
    with pytest.raises(ValueError, match=rf"(?s)data: longeval/topics.*\*_topics\.jsonl.*{re.escape(str(tmp_path))}"):
        list(TASKS["longeval/topics"](settings(tmp_path)))
    with pytest.raises(ValueError, match=r"data: longeval/topics.*give the folder.*\*_topics\.jsonl"):
        list(TASKS["longeval/topics"](settings()))


def test_empty(tmp_path):
    write(tmp_path / "9_topics.jsonl", [])
    with pytest.raises(ValueError, match="longeval/topics found no records"):
        list(TASKS["longeval/topics"](settings(tmp_path)))


@pytest.mark.parametrize("name", ["longeval/lines", "longeval/topics"])
def test_too_short(name, data):
    with pytest.raises(ValueError, match="length: "):
        list(TASKS[name](settings(data, length=7)))


def test_longeval_takes_the_largest_that_fits(data):
    # a line is 5 words; before the lines is 1, after them are 8 and a blank: 20 lines take 110 tokens, 50 take 260
    for length, count in ((109, 3), (110, 20), (259, 20), (260, 50)):
        for case in TASKS["longeval/lines"](settings(data / "longeval", length=length)):
            assert case.tags["lines"] == count
            assert case.context.count("REGISTER") == count
            name = re.match(r"\nNow the record is over. Say line (.*)\? $", case.question)[1]
            assert f"line {name}: REGISTER_CONTENT is <{case.answers[0]}>\n" in case.context
    case = next(TASKS["longeval/topics"](settings(data, length=80)))
    assert (case.answers, case.tags["topics"]) == (("the topic 0",), 20)
    assert case.question == " Now the record ends. First?"


def test_longeval_of_another_format(tmp_path):
    write(tmp_path / "5_lines.jsonl", [{"prompt": "What is it?", "expected_number": 5}])
    with pytest.raises(ValueError, match="lacks 'Now the record is over'"):
        list(TASKS["longeval/lines"](settings(tmp_path)))


@pytest.mark.parametrize("length", [40, 333, 3000])
def test_longeval_made_up(length):
    places = set()
    for case in TASKS["longeval/lines"](settings(length=length, cases=5)):
        names = re.findall(r"^line (.*): REGISTER_CONTENT is <\d+>$", case.context, re.M)
        assert len(set(names)) == len(names) == case.tags["lines"]
        asked = case.question.split("\n")[-1]
        assert re.findall(re.escape(asked) + r"(\d+)>", case.context) == [case.answers[0]]
        places.add(names.index(re.match("line (.*):", asked)[1]) / len(names))
        assert settings().tokens(case.context + case.question) > length - 5  # one line more, of 5 words, does not fit
    assert length < 100 or len(places) > 3


def test_perplexity(tmp_path):
    """The answer goes on where the context ends."""
    rng = random.Random(3)
    book = " ".join(f"Sentence {i} has {' '.join('many' for _ in range(rng.randint(1, 9)))} words." for i in range(900))
    (tmp_path / "book.txt").write_text(book)
    for case in TASKS["perplexity"](settings(length=300, haystack=tmp_path / "book.txt")):
        (answer,) = case.answers
        assert case.question == "" and answer.startswith(" Sentence")
        assert case.context + answer in f"{book} {book}"
        assert 285 < settings().tokens(case.context) <= 300
        assert 240 < case.new_tokens == settings().tokens(answer) < 275


def test_perplexity_of_documents(tmp_path):
    """Each case is one document that is long enough, cut in two between words."""
    texts = [" ".join(f"\n{name}{i}" for i in range(n)) for name, n in dict(a=90, b=100, c=101, d=500, e=200).items()]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    task, chosen = TASKS["perplexity/documents"], settings(length=100, cases=3, haystack=tmp_path / "texts.jsonl")
    scored = {}
    for case in task(chosen):
        (answer,) = case.answers
        (text,) = [t for t in texts if t.startswith(case.context + answer)]
        assert settings().tokens(case.context) == 100 and case.question == ""
        scored[text[1]] = settings().tokens(answer)
        assert case.new_tokens == scored[text[1]]
    assert scored == dict(c=1, d=256, e=100)
    with pytest.raises(ValueError, match=r"cases: .* has 3 documents of more than 100 tokens, not 4"):
        list(task(settings(length=100, cases=4, haystack=tmp_path / "texts.jsonl")))
    with pytest.raises(ValueError, match=r"haystack: .* give a \.jsonl"):
        list(task(settings()))


@pytest.fixture(scope="module")
def real():
    transformers = pytest.importorskip("transformers")
    file = SHARED / "tokenizers/smollm2-135m/tokenizer.json"
    if not file.exists() or not (SHARED / "eval").exists():
        pytest.skip("needs ../shared/data")
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))


@pytest.mark.parametrize(
    "name, length, want",
    [
        ("longeval/lines", 9000, {"lines": 400}),
        ("longeval/topics", 4000, {"topics": 5}),
    ],
)
def test_real(name, length, want, real):
    cases = list(TASKS[name](Settings(real, length, 5, data=SHARED / "eval")))
    assert len(cases) == 5
    for case in cases:
        assert want.items() <= case.tags.items()
        tokens = len(real(case.context + case.question, add_special_tokens=False)["input_ids"])
        assert 0.6 * length < tokens <= length
        assert METRICS[case.metric](f" {case.answers[0]}", case.answers) == 1
