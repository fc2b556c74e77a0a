"""The task `instructions`: rules that code can check, in a system prompt."""

import random

import pytest
import templates
import tiny

from kvevict.asking.prompts import frame
from kvevict.lab.evaluate.ask import encode
from kvevict.lab.evaluate.metrics import METRICS
from kvevict.lab.evaluate.tasks import TASKS, TaskSettings
from kvevict.lab.evaluate.tasks.instructions import FEWEST, MOST, RULES, drawn, system_of

LONG = "word " * 26


def chat():
    words = tiny.byte_tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    words.chat_template = templates.QWEN
    return words


@pytest.mark.parametrize("rule, obeyed, broken", [
    ("capitals", "THE LAMP, AT 9.", "The LAMP."), ("capitals", "A", "9."), ("begin:Lamp", "lamp: at nine", "At a lamp"),
    ("end:lamp", "At the Lamp.", "The lamp is lit"), ("digits", "at nine", "at 9"), ("comma", "It is.", "It, is"),
    ("short", LONG[:-5], LONG), ("mention:lamp", "A (lamp) here", "Lamps"), ("quoted", '"It is."', '"It" is'),
])  # fmt: skip
def test_a_rule(rule, obeyed, broken):
    assert METRICS["rules"](obeyed, (rule,)) == 1 and METRICS["rules"](broken, (rule,)) == 0


def test_the_share_of_the_rules():
    assert METRICS["rules"]("The lamp.", ("comma", "capitals", "end:lamp", "begin:lamp")) == 0.5
    assert METRICS["rules"](" \n", ("comma", "digits", "short")) == 0


def test_rules_are_drawn_and_written():
    seen = set()
    for seed in range(60):
        rules = drawn(random.Random(seed))
        names = [rule.partition(":")[0] for rule in rules]
        assert FEWEST <= len(rules) == len({*names}) <= MOST
        system = system_of(rules)
        assert all(rule.partition(":")[2] in system for rule in rules) and "{word}" not in system
        seen |= {*names}
    assert seen == RULES.keys()


def test_cases_have_a_system_prompt_the_text_and_a_question():
    words = chat()
    cases = list(TASKS.find("instructions")(TaskSettings(words, 3000, 3)))
    assert len({case.id for case in cases}) == 3 == len({case.system for case in cases})
    for case in cases:
        assert words(case.system + case.context + case.question)["input_ids"].__len__() <= 3000
        net = tiny.model(vocab_size=len(words), bos_token_id=None, pad_token_id=None)
        prompt = words.decode(encode(net, words, case).context)
        assert prompt.index(case.system) < prompt.index(case.context[:40])
        assert case.said in case.question


@pytest.mark.parametrize("words", [tiny.byte_tokenizer, chat])
def test_the_place_of_a_system_prompt(words):
    words = words()
    head, after = frame(words, "Why?", system="Be brief.")
    assert "Be brief." in words.decode(head) and "Be brief." not in words.decode(after)
    assert frame(words, "Why?", system="") == frame(words, "Why?")
