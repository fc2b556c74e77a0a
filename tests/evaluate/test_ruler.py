"""The haystack and RULER's tasks: a case's answers are computed again from its text alone. Seeds are new every run."""

import json
import lzma
import os
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvevict.lab.evaluate.haystack import haystack, insert, sentences
from kvevict.lab.evaluate.metrics import METRICS
from kvevict.lab.evaluate.tasks import TASKS, TaskSettings

SHARED = os.path.join(os.path.dirname(__file__), "../../../shared/data")

# keys, values of a key, keys asked for, and how keys and values look: the columns of RULER's synthetic.yaml
WORD, NUMBER, UUID = r"[\w-]+", r"[1-9]\d{6}", r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
NEEDLES = {
    "niah_single_1": (1, 1, 1, WORD, NUMBER), "niah_single_2": (1, 1, 1, WORD, NUMBER),
    "niah_single_3": (1, 1, 1, WORD, UUID), "niah_multikey_1": (4, 1, 1, WORD, NUMBER),
    "niah_multikey_2": (None, 1, 1, WORD, NUMBER), "niah_multikey_3": (None, 1, 1, UUID, UUID),
    "niah_multivalue": (1, 4, 1, WORD, NUMBER), "niah_multiquery": (4, 1, 4, WORD, NUMBER),
}  # fmt: skip
TOKENS = {**dict.fromkeys(NEEDLES, 128), "vt": 30, "cwe": 120, "fwe": 50}  # to generate


def by_words():
    """A tokenizer that is always there: a token per word or mark."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module", params=["words", "smollm2-135m", "minimind-6400"])
def tokenizer(request):
    if request.param == "words":
        return by_words()
    path = os.path.join(SHARED, "tokenizers", request.param)
    if not os.path.isdir(path):
        pytest.skip("needs ../shared/data/tokenizers")
    return AutoTokenizer.from_pretrained(path)


@pytest.fixture
def settings(tokenizer):
    seed = random.randrange(10**9)
    print("seed", seed)  # pytest shows it when the test fails
    return TaskSettings(tokenizer, length=1024, cases=2, seed=seed)


def cases(name, settings):
    return list(TASKS["ruler/" + name](settings))


def test_eleven():
    assert {f"ruler/{name}" for name in TOKENS} == {name for name in TASKS if name.startswith("ruler/")}


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.drawn(12)
def test_lengths(name, settings):
    """The prompt and the generated tokens fill the length, up to less than one more unit."""
    for length in (1024, random.randint(1024, 6000)):
        for case in cases(name, replace(settings, length=length, cases=2)):
            used = settings.tokens(case.context + case.question) + TOKENS[name]
            needed = sum(settings.tokens(f" {answer}") for answer in case.answers)
            assert min(needed + 1, TOKENS[name]) <= case.new_tokens <= TOKENS[name]
            assert case.tags == {"length": length} and case.opening and case.question.endswith(case.opening)
            assert used <= length
            assert used > length - (130 if name == "niah_multikey_3" else 80)


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.drawn(12)
def test_repeatable(name, settings):
    """A case depends on the settings and its number, not on how many are asked for; and on the seed."""
    first, again = cases(name, settings), cases(name, replace(settings, cases=4))
    assert first == again[:2] and len(again) == 4
    assert len({case.id for case in again}) == len({case.context + case.question for case in again}) == 4
    assert all(case.id.startswith(case.task + "/") and case.task == "ruler/" + name for case in again)
    other = cases(name, replace(settings, seed=settings.seed + 1))
    assert not {case.context for case in first} & {case.context for case in other}


@pytest.mark.parametrize("name", TOKENS)
def test_metric(name, settings):
    for case in cases(name, settings):
        score = METRICS[case.metric]
        assert score("It is " + ", ".join(case.answers).upper(), case.answers) == 1
        assert score("?", case.answers) == 0
        if name != "cwe":  # there one answer may be a part of another, as "cart" of "cartwheel"
            assert score(case.answers[0], case.answers) == 1 / len(case.answers)


@pytest.mark.parametrize("name", NEEDLES)
def test_needles(name, settings):
    """Needles of the kinds and numbers that the task's name promises; every asked value, once, and no other."""
    keys, values, queries, key, value = NEEDLES[name]
    kind = "number" if value == NUMBER else "uuid"
    for case in cases(name, settings):
        found = re.findall(rf"One of the special magic {kind}s for ({key}) is: ({value})\.", case.context)
        assert len(found) == case.context.count("One of the special magic")
        per_key = Counter(k for k, _ in found)
        assert set(per_key.values()) == {values} and len(per_key) == (keys or len(found))
        assert keys or len(found) > 5
        assert len({v for _, v in found}) == len(found)
        named = case.question.split(" for ")[1].split(" mentioned")[0].replace(" and ", " ")
        asked = re.findall(r"-?\b[\w-]+\b", named)
        assert len(set(asked)) == queries and set(asked) <= set(per_key)
        assert Counter(case.answers) == Counter(v for k, v in found if k in asked)
        assert all(case.context.count(answer) == 1 for answer in case.answers)
        plural = queries * values > 1
        assert case.question.endswith(" are" if plural else " is") and (f"{kind}s for" in case.question) == plural


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_2"])
def test_depths(name):
    """Needles lie everywhere. 150 uniform depths miss an end by 0.15 once in 10^10 runs."""
    settings = TaskSettings(by_words(), length=512, cases=150, seed=random.randrange(10**9))
    made, opening = cases(name, settings), "A special magic number is hidden within the following text."
    at = [case.context.index(case.answers[0]) / len(case.context) for case in made]
    start = len(opening) * 2.5 / len(made[0].context)
    assert min(at) < start + 0.15 and max(at) > 0.85
    assert abs(sum(at) / len(at) - (1 + start) / 2) < 0.15


def solved(text, value):
    """Variables that a reader of the assignments, in their order, finds to have the value."""
    known = {}
    for name, source in re.findall(r"^VAR ([A-Z]+) = (VAR [A-Z]+|\d+)", text, re.M):
        assert name not in known
        known[name] = known[source[4:]] if source.startswith("VAR ") else source
    return [name for name in known if known[name] == value]


def test_vt(settings):
    for length in (1024, 4096):
        for case in cases("vt", replace(settings, length=length)):
            example, text = case.context.split("\n\nMemorize and track")
            value = re.search(r"assigned the value (\d{5}) in the text", case.question)[1]
            assert solved(text, value) == list(case.answers) and len(case.answers) == 5
            assert all(len(name) == 5 for name in case.answers) and text.count(value) == 1
            assert not re.search(r"^VAR.*\nVAR", case.context, re.M)  # a line of noise after each
            known, said = re.search(r"assigned the value (\d{5}), they are:  (.*)", example).groups()
            assert solved(example, known) == said.split() and known != value
            if length == 4096:  # as in RULER: up to 500 tokens without the solution
                assert 420 < settings.tokens(example[: -len(said)]) <= 502


def listed(text):
    """Words of "1. word 2. word ...", numbered without a gap."""
    found = re.findall(r"(\d+)\. (.+?)(?= \d+\. |\n|$)", text)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return Counter(word for _, word in found)


@pytest.mark.parametrize(("length", "often", "rarely", "size"), [(1024, 6, 1, 20), (4096, 30, 3, 40)])
def test_cwe(length, often, rarely, size, settings):
    for case in cases("cwe", replace(settings, length=length)):
        head, example, text = case.context.split("Below is a numbered list of words.")
        counts, top = listed(text), set(case.answers)
        assert not head and len(top) == 10 and set(counts.values()) == {often, rarely}
        assert top == {word for word in counts if counts[word] == often}
        numbered, said = example.split(" in the list are: ")
        shown = listed(numbered.split("Question:")[0])
        assert {word for word, _ in shown.most_common(10)} == set(listed(said.strip())) and len(shown) == size
        assert not set(shown) & set(counts)


def test_fwe(settings):
    """At any length the three are truly the most frequent, and RULER's counts n / (ζ(2) k^2) come out."""
    for length in [4096, *range(140 + random.randrange(5), 340, 5), *random.sample(range(340, 1500), 5)]:
        try:
            (case,) = cases("fwe", replace(settings, length=length, cases=1))
        except ValueError as short:
            assert length < 450 and "give at least" in str(short)
            continue
        counts = Counter(case.context.split("coded words. ")[1].split())
        (dots, most_often), *ranks = counts.most_common()
        assert dots == "..." and {word for word, _ in ranks[:3]} == set(case.answers)
        assert len(ranks) < 4 or ranks[2][1] > ranks[3][1]
        assert all(len(word) == 6 for word, _ in ranks)
        if length == 4096:
            for k, (_, count) in enumerate(ranks[:3], 2):
                assert abs(count - most_often / k**2) <= 1.25


@pytest.mark.parametrize("name", [name for name in TOKENS if name != "fwe"])
def test_too_short(name, settings):
    with pytest.raises(ValueError, match=r"^length: ") as error:
        cases(name, replace(settings, length=TOKENS[name] + 40))
    if "at least" in str(error.value):  # and that is enough, a token less is not
        least = int(re.search(r"at least (\d+)", str(error.value))[1])
        assert cases(name, replace(settings, length=least, cases=1))
        with pytest.raises(ValueError, match=r"^length: "):
            cases(name, replace(settings, length=least - 1, cases=1))


# The haystack


def test_passage(settings):
    """Within the tokens and nearly as long, facts once each and in the depths' order, sentences that do not repeat."""
    rng, facts = random.Random(settings.seed), {0.9: "Fact C is 31.", 0.0: "Fact A is 11.", 0.5: "Fact B is 21."}
    for tokens in (100, 1000, rng.randint(2000, 9000)):
        text = haystack(settings).passage(rng, tokens, settings, facts, before="Read:\n", after="\nAnswer:")
        assert tokens - 60 < settings.tokens(f"Read:\n{text}\nAnswer:") <= tokens
        assert text.startswith("Fact A is 11. ") and re.findall("Fact [A-Z] is [123]1[.]", text) == [
            *sorted(facts.values())
        ]
        plain = re.sub(r"Fact [A-Z] is \d+\. ?", "", text)
        parts = sentences(plain)
        assert not re.search(r"\d|[{}]", plain) and len(set(parts)) > 0.98 * len(parts)
        assert all(part[0] in '"' or part[0].isupper() for part in parts)
    middle = text.index("Fact B") / len(text)
    assert 0.45 < middle < 0.55


def test_insert():
    text = "One two.  Three four!\nFive six? Seven eight."
    assert sentences(text) == ["One two.", "Three four!", "Five six?", "Seven eight."]
    parts = ['He said "No."', "Mr. A met Dr. B.", "3.5 is more"]
    assert sentences(" ".join(parts)) == parts
    assert [len(part.split()) for part in sentences("word " * 200)] == [80, 80, 40]
    assert insert(text, {1: "Z.", 0: "A.", 0.55: "M."}) == "A. One two. Three four! M. Five six? Seven eight. Z."
    assert insert("", {0.3: "A.", 0.4: "B."}) == "A. B."
    with pytest.raises(ValueError, match=r"depth 1\.5"):
        insert(text, {1.5: "A."})


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".jsonl.xz"])
def test_haystack_file(suffix, tmp_path, settings):
    """Passages are pieces of the file's documents, from anywhere, and go on with the next and then the first one."""
    books = [[f"Book {b} says {n}." for n in range(40)] for b in range(1 if suffix == ".txt" else 3)]
    texts = ["\n\u2028".join(" ".join(book[i : i + 7]) for i in range(0, 40, 7)) for book in books]
    content = (
        texts[0] if suffix == ".txt" else "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    )
    path = tmp_path / f"hay{suffix}"
    path.write_bytes(lzma.compress(content.encode()) if suffix.endswith("xz") else content.encode())
    settings, everything = replace(settings, haystack=path), " ".join(line for book in books for line in book)
    starts = set()
    for seed in range(20):
        text = haystack(settings).passage(random.Random(seed), 700, settings)
        assert text in " ".join([everything] * 8)
        starts.add(text[:14])
    assert len(starts) > 8
    (case,) = cases("niah_single_2", replace(settings, cases=1))
    assert len(re.findall(r"Book \d says \d+\.", case.context)) > 30


def test_haystack_file_errors(tmp_path, settings):
    bad = {
        "a.jsonl": b'{"words": "x"}',
        "b.jsonl": b"x",
        "c.jsonl.xz": b"not xz",
        "d.txt": b" \n",
        "e.jsonl": b"[1]",
        "f.txt": b"\xff",
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    for name in [*bad, "missing.txt"]:
        with pytest.raises(ValueError, match=f"^haystack: .*{name}"):
            haystack(replace(settings, haystack=tmp_path / name))
