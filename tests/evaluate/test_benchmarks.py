"""Tasks that read a downloaded benchmark, on small benchmarks made here; on the real ones where these are at hand."""

import hashlib
import json
import random
import re
import zipfile
from pathlib import Path

import pytest

from kvevict.evaluate.data import read_jsonl
from kvevict.evaluate.metrics import METRICS
from kvevict.evaluate.tasks import TASKS, Settings, longbench
from kvevict.evaluate.tasks.babi import stories

SHARED = Path(__file__).parent / "../../../shared/data"


class Words:
    """A tokenizer of which every word with the white space before it is a token, and decoding loses nothing."""

    def __init__(self):
        self.ids = {}

    def __call__(self, text, add_special_tokens=True, **kwargs):
        assert not add_special_tokens  # a prompt's pieces are counted; the runner adds what is special
        return {"input_ids": [self.ids.setdefault(w, len(self.ids)) for w in re.findall(r"\s*\S+|\s+$", text)]}

    def decode(self, ids, skip_special_tokens=False):
        words = list(self.ids)
        return "".join(words[i] for i in ids)


TEMPLATES = {
    "hotpotqa": "Read.\n{context}\n\nQuestion: {input}\nAnswer:",
    "triviaqa": "Read.\n{context}\n\n{input}",
    "trec": "Examples {{x}}.\n{context}\n{input}",
    "lcc": "Complete. \n{context}Next line of code:\n",
    "passage_count": "{input}: count.\n{context}\nThe final answer is: ",
}
CLASSES = ["City", "Food", "Other city", "Date"]


def prose(rng, words):
    return " ".join(rng.choice(["red", "{blue}", "green.", "one", "two\n", "three"]) for _ in range(words))


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", "utf-8")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """One folder per benchmark, in the official layouts."""
    root, rng = tmp_path_factory.mktemp("data"), random.Random(7)
    write(root / "longbench/dataset2prompt.json", [TEMPLATES])
    write(root / "longbench/dataset2maxlen.json", [dict.fromkeys(TEMPLATES, 8)])
    for name in TEMPLATES:
        classes, answers = (CLASSES, CLASSES) if name == "trec" else (None, ["11", "5"])
        records = [
            {"input": f"Ask {i}?", "context": prose(rng, rng.randint(20, 90)), "answers": [answers[i % len(answers)]]}
            for i in range(9)
        ]
        write(root / f"longbench/{name}.jsonl", [record | {"all_classes": classes} for record in records])
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
    for task, mark in ((1, "|"), (8, "\t")):
        for part in ("train", "test"):
            write(root / f"babi/en/qa{task}_name_{part}.txt", [row for _ in range(9) for row in story(rng, mark)])
    for part, count in (("train", 60), ("test", 9)):
        sums = [(rng.randint(1000, 9999), rng.randint(1, 99)) for _ in range(count)]
        problems = [{"question": f"{part} {a} + {b}?", "answer": f"It is <<{a}>>.\n#### {a + b:,}"} for a, b in sums]
        write(root / f"gsm8k/{part}.jsonl", problems)
    return root


def story(rng, mark):
    places = rng.sample(["hall", "garden", "office", "attic"], 4)
    return [
        f"1 Ann{rng.randint(0, 999)} went to the {places[0]}.",
        f"2 Bob took the {places[1]} key.",
        f"3 Where is Ann? {mark}{places[0]}{mark}1",
        f"4 Ann went to the {places[2]}.",
        f"5 Ann has a {places[3]} key.",
        f"6 Where is Ann?{mark}{places[2]},{places[3]}{mark}4 5",
    ]


def settings(data=None, length=200, cases=4, **kwargs):
    return Settings(Words(), length, cases, data=data, **kwargs)


ALL = [
    *(f"longbench/{name}" for name in TEMPLATES),
    "longeval/lines", "longeval/topics", "babi/qa1", "babi/qa8", "gsm8k", "perplexity",
]  # fmt: skip


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


def test_every_dataset_is_registered():
    assert len([name for name in TASKS if name.startswith("longbench/")]) == 21
    assert len([name for name in TASKS if name.startswith("babi/")]) == 20
    for name in longbench.METRIC.values():
        assert name in METRICS


@pytest.mark.parametrize("name", TEMPLATES)
def test_longbench_prompt(name, data):
    """Context and question are the official prompt, cut where the context ends."""
    records = read_jsonl(data / f"longbench/{name}.jsonl")
    cases = list(TASKS[f"longbench/{name}"](settings(data / "longbench", cases=99)))
    assert sorted(case.id for case in cases) == sorted(f"longbench/{name}/200/{i}" for i in range(9))
    for case in cases:
        record = records[int(case.id.rsplit("/", 1)[1])]
        assert case.context + case.question == TEMPLATES[name].format(**record)
        assert case.context.endswith(record["context"])
        assert case.tags.get("chat", True) == (name not in ("triviaqa", "trec", "lcc"))
        assert case.new_tokens == 8
        if name == "trec":
            assert case.answers[0] == record["answers"][0] and sorted(case.answers) == sorted(CLASSES)
        else:
            assert case.answers == tuple(record["answers"])


@pytest.mark.parametrize("length", [28, 29, 61])
def test_longbench_truncation(length, data):
    """The first and the last half of length - new tokens, of a prompt that is longer."""
    records, cut = read_jsonl(data / "longbench/hotpotqa.jsonl"), 0
    for case in TASKS["longbench/hotpotqa"](settings(data, length=length, cases=9)):
        whole = TEMPLATES["hotpotqa"].format(**records[int(case.id.rsplit("/", 1)[1])])
        words, half = re.findall(r"\s*\S+", whole), (length - 8) // 2
        if len(words) > length - 8:
            words, cut = words[:half] + words[-half:], cut + 1
        assert case.context + case.question == "".join(words)
        assert case.question.startswith("\n\nQuestion: Ask ") and case.question.endswith("?\nAnswer:")
    assert cut >= 5


def test_longbench_question_longer_than_half():
    context, question = longbench.truncate(Words(), "a b c d", " e f g h i j", 6)
    assert (context, question) == ("a b c", " h i j")


def test_longbench_download(data, tmp_path, monkeypatch):
    """Without a folder: records from the hub's archive, templates from the repository, of pinned commits."""
    assert re.fullmatch(r"https://.*/[0-9a-f]{40}/LongBench/config/", longbench.CONFIG)
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.write(data / "longbench/trec.jsonl", "data/trec.jsonl")
    asked = []

    def hub(*args, **kwargs):
        asked.append((args, kwargs))
        return str(tmp_path / "data.zip")

    longbench.download.cache_clear()
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(longbench, "CONFIG", (data / "longbench").as_uri() + "/")
    pinned = longbench.SHA256
    monkeypatch.setattr(longbench, "SHA256", {
        name: hashlib.sha256((data / "longbench" / name).read_bytes()).hexdigest() for name in pinned
    })  # fmt: skip
    task = TASKS["longbench/trec"]
    assert list(task(settings())) == list(task(settings(data)))
    assert list(task(settings(cases=2))) == list(task(settings(data, cases=2)))
    revision = "4a90f81c8db79f60c15f77dcd207a1099038c775"
    assert asked == [(("THUDM/LongBench", "data.zip"), {"repo_type": "dataset", "revision": revision})]
    longbench.download.cache_clear()
    monkeypatch.setattr(longbench, "SHA256", pinned)
    with pytest.raises(ValueError, match=r"data: .*dataset2prompt.json is not the file that is pinned.*give a folder"):
        list(task(settings()))
    monkeypatch.setattr(longbench, "CONFIG", tmp_path.as_uri() + "/")
    with pytest.raises(ValueError, match=r"could not be downloaded.*dataset2prompt.json") as error:
        list(task(settings()))
    assert "data.zip" in str(error.value)


@pytest.mark.parametrize(
    "name, file",
    [
        ("longbench/qasper", "qasper.jsonl"),
        ("longeval/topics", "*_topics.jsonl"),
        ("babi/qa3", "qa3_*_train.txt"),
        ("gsm8k", "train.jsonl"),
    ],
)
def test_missing(name, file, tmp_path):
    with pytest.raises(ValueError, match=f"(?s)data: {name}.*{re.escape(file)}.*{re.escape(str(tmp_path))}"):
        list(TASKS[name](settings(tmp_path)))
    if not name.startswith("longbench"):
        with pytest.raises(ValueError, match=rf"data: {name}.*give the folder.*{re.escape(file)}"):
            list(TASKS[name](settings()))


def test_missing_template(data, tmp_path):
    for name in ("hotpotqa.jsonl", "dataset2prompt.json", "dataset2maxlen.json"):
        write(tmp_path / name.replace("hotpotqa", "qasper"), [(data / "longbench" / name).read_text("utf-8")])
    with pytest.raises(ValueError, match="lacks qasper"):
        list(TASKS["longbench/qasper"](settings(tmp_path)))


def test_empty(tmp_path):
    write(tmp_path / "train.jsonl", [])
    write(tmp_path / "test.jsonl", [])
    with pytest.raises(ValueError, match="gsm8k found no records"):
        list(TASKS["gsm8k"](settings(tmp_path)))


@pytest.mark.parametrize("name", ["longbench/hotpotqa", "longeval/lines", "longeval/topics", "babi/qa1", "gsm8k"])
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


@pytest.mark.parametrize("task", [1, 8])
def test_babi(task, data):
    """All facts before the question and none after it, in their order, in other text of the right length."""
    rows = (data / f"babi/en/qa{task}_name_test.txt").read_text("utf-8").splitlines()
    found = {2: 0, 4: 0}
    for case in TASKS[f"babi/qa{task}"](settings(data, cases=18)):
        place = int(case.id.rsplit("/", 1)[1])
        all_rows = rows[6 * (place // 2) :][: 6 if place % 2 else 3]  # two questions a story of six rows
        facts = [row[2:] for row in all_rows if "?" not in row]
        examples, text = case.context.split("Another story")
        assert examples.count("Answer: ") == 2
        at = [text.index(fact) for fact in facts]
        assert at == sorted(at) and len(re.findall("Ann|Bob", text)) == len(facts)
        assert case.question == "\n\nQuestion: Where is Ann?\nAnswer:"
        assert case.answers[0] == re.split(r"[|\t]", all_rows[-1])[1]
        right = case.answers[0].split(",")
        assert sorted([*right, *case.answers[1:]]) == ["attic", "garden", "hall", "office"]
        found[case.tags["facts"]] += 1
        assert 170 < settings().tokens(case.context + case.question) <= 200
    assert found == {2: 9, 4: 9}


def test_babi_places_are_random(data):
    depths = []
    for case in TASKS["babi/qa8"](settings(data, length=600, cases=18)):
        text = case.context.split("Another story")[1]
        depths += [match.start() / len(text) for match in re.finditer("Ann|Bob", text)]
    assert min(depths) < 0.3 and max(depths) > 0.7 and 0.35 < sum(depths) / len(depths) < 0.65


def test_gsm8k(data):
    """As many examples as fit: one more would not."""
    train = read_jsonl(data / "gsm8k/train.jsonl")
    test = read_jsonl(data / "gsm8k/test.jsonl")
    worked = {f"Question: {r['question']}\nAnswer: {r['answer']}" for r in train}
    cases = list(TASKS["gsm8k"](settings(data)))
    assert len({case.context for case in cases}) == 4  # each has examples of its own
    for case in cases:
        *shots, end = case.context.split("\n\n")
        assert end == "" and len(set(shots)) == len(shots) == case.tags["shots"] and worked.issuperset(shots)
        assert settings().tokens(case.context + case.question) > 200 - 11  # an example has 11 words
        record = test[int(case.id.rsplit("/", 1)[1])]
        assert case.question == f"Question: {record['question']}\nAnswer:"
        assert METRICS[case.metric](record["answer"], case.answers) == 1
    whole = next(TASKS["gsm8k"](settings(data, length=5000)))
    assert whole.tags["shots"] == 60


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


@pytest.mark.parametrize("name", ["multi_news", "multifieldqa_zh"])
@pytest.mark.parametrize("length", [1500, 1_000_000])
def test_real_longbench(name, length, real):
    folder = SHARED / "eval/longbench"
    template = json.loads((folder / "dataset2prompt.json").read_text("utf-8"))[name]
    new_tokens = json.loads((folder / "dataset2maxlen.json").read_text("utf-8"))[name]
    records = read_jsonl(folder / f"{name}.jsonl")
    limit, cut = length - new_tokens, 0
    for case in TASKS[f"longbench/{name}"](Settings(real, length, 10, data=folder)):
        record = records[int(case.id.rsplit("/", 1)[1])]
        prompt = template.format(**record)
        ids = real(prompt, add_special_tokens=False)["input_ids"]
        if len(ids) > limit:
            prompt, cut = real.decode(ids[: limit // 2]) + real.decode(ids[-(limit // 2) :]), cut + 1
        assert case.context + case.question == prompt
        assert record["input"] in case.question and case.question == template.split("{context}")[1].format(**record)
        assert case.answers == tuple(record["answers"])
    assert cut == 0 if length == 1_000_000 else cut > 3


@pytest.mark.parametrize(
    "name, length, want",
    [
        ("longeval/lines", 9000, {"lines": 400}),
        ("longeval/topics", 4000, {"topics": 5}),
        ("babi/qa1", 1024, {}),
        ("babi/qa19", 1024, {}),
        ("gsm8k", 4096, {}),
    ],
)
def test_real_others(name, length, want, real):
    cases = list(TASKS[name](Settings(real, length, 5, data=SHARED / "eval")))
    assert len(cases) == 5
    for case in cases:
        assert want.items() <= case.tags.items()
        tokens = len(real(case.context + case.question, add_special_tokens=False)["input_ids"])
        assert 0.6 * length < tokens <= length
        assert METRICS[case.metric](f" {case.answers[0]}", case.answers) == 1


@pytest.mark.parametrize("number", range(1, 21))
def test_real_babi(number, real):
    """Every file is read in full; each question has the answer that its row ends with."""
    folder = SHARED / "eval/babi"
    (path,) = (folder / "en").glob(f"qa{number}_*_test.txt")
    questions = sum("?" in row for row in path.read_text("utf-8").splitlines())
    cases = list(TASKS[f"babi/qa{number}"](Settings(Words(), 1500, 3, data=folder)))
    assert len(stories(path)) == questions == 1000
    for case in cases:
        facts, asked, answer = stories(path)[int(case.id.rsplit("/", 1)[1])]
        assert asked in case.question and case.answers[0] == answer and not any("?" in fact for fact in facts)
        assert all(fact in case.context for fact in facts)
