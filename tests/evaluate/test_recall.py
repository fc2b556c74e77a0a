"""The tasks of made-up facts: a case is within its length, and its answer can be found by following its words; and
`perplexity`."""

import random
import re

import pytest
from transformers import AutoTokenizer

import kvevict
from kvevict.lab.evaluate.metrics import METRICS
from kvevict.lab.evaluate.tasks import TASKS, TaskSettings
from kvevict.lab.evaluate.tasks.recall import held_out

SAID = re.compile(r"The (\w+) of (\w+) is (that of )?(\w+)\.")
FACTS = {"needle": 4, "facts": 8, "multivalue": 8, "tracking": 8}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(kvevict.small_llama())


def cases(tokenizer, task, length=600, count=6, seed=5):
    return list(TASKS[task](TaskSettings(tokenizer, length, count, seed, depths=(0.0, 0.5))))


def found(context, relation, name):
    """The values that the text gives the name, through the names it refers to."""
    said = [fact[2:] for fact in SAID.findall(context) if fact[:2] == (relation, name)]
    return [value for link, what in said for value in (found(context, relation, what) if link else [what])]


@pytest.mark.parametrize("task", FACTS)
def test_facts_in_text(tokenizer, task):
    for case in cases(tokenizer, task):
        assert 540 < len(tokenizer(case.context + case.question)["input_ids"]) <= 600
        said = SAID.findall(case.context)
        assert len(said) == FACTS[task] and all(held_out(name) for _, name, _, _ in said)
        relation, name = re.search(r"the (\w+) of (\w+)\?", case.question.replace("s of", " of")).groups()
        values = found(case.context, relation, name)
        assert METRICS[case.metric](" " + ", ".join(values), case.answers) == 1
        assert len(values) == case.tags.get("values", 1) and max(map(len, values)) == 6
        others = [v for _, _, link, v in said if not link and v not in values]
        assert others and METRICS[case.metric](" " + others[0], case.answers) == 0


def test_a_chain_may_be_answered_step_by_step(tokenizer):
    """Each step a statement of the text; the first goes on where the question ends."""
    for case in cases(tokenizer, "tracking"):
        steps = case.question.split("Answer: ")[1] + " " + case.answers[0] + "."
        links = SAID.findall(steps)
        assert steps == " ".join(f"The {r} of {a} is {link}{b}." for r, a, link, b in links)
        assert set(links) <= set(SAID.findall(case.context)) and len(links) == case.tags["hops"] + 1
        assert [b for _, _, _, b in links[:-1]] == [a for _, a, _, _ in links[1:]]
        assert METRICS[case.metric](" " + case.answers[0] + ".\n", case.answers) == 1


def test_lines(tokenizer):
    for case in cases(tokenizer, "keyvalue"):
        assert 580 < len(tokenizer(case.context + case.question)["input_ids"]) <= 600
        lines = dict(line.split(": ") for line in case.context.splitlines())
        assert len(lines) == case.tags["facts"] > 40 and all(map(held_out, lines))
        assert (lines[re.search(r"has (\w+)\?", case.question)[1]],) == case.answers


@pytest.mark.parametrize("task", [*FACTS, "keyvalue"])
def test_cases_depend_on_the_seed_alone(tokenizer, task):
    first = cases(tokenizer, task, count=2)
    assert first == cases(tokenizer, task, count=2) != cases(tokenizer, task, count=2, seed=6)


class Words:
    """A tokenizer of which every word with the white space before it is a token."""

    def __init__(self):
        self.ids = {}

    def __call__(self, text, add_special_tokens=True, **kwargs):
        assert not add_special_tokens  # a prompt's pieces are counted; the runner adds what is special
        return {"input_ids": [self.ids.setdefault(w, len(self.ids)) for w in re.findall(r"\s*\S+|\s+$", text)]}


def test_perplexity(tmp_path):
    """The answer goes on where the context ends."""
    rng = random.Random(3)
    book = " ".join(f"Sentence {i} has {' '.join('many' for _ in range(rng.randint(1, 9)))} words." for i in range(900))
    (tmp_path / "book.txt").write_text(book)
    settings = TaskSettings(Words(), 300, 4, haystack=tmp_path / "book.txt")
    for case in TASKS["perplexity"](settings):
        (answer,) = case.answers
        assert case.question == "" and answer.startswith(" Sentence")
        assert case.context + answer in f"{book} {book}"
        assert 285 < settings.tokens(case.context) <= 300
        assert 240 < case.new_tokens == settings.tokens(answer) < 275
