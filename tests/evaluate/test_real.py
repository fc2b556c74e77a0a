"""What tokenizers of other models need: room for answers, one line, chat templates."""

import pytest
import torch
from tiny import byte_tokenizer, chat_tokenizer, scripted

from kvevict.asking.prompts import frame, line_ended
from kvevict.lab.analysis.run import encode, measure
from kvevict.lab.evaluate import ask
from kvevict.lab.evaluate.results import read
from kvevict.lab.evaluate.run import Evaluation, evaluate
from kvevict.lab.evaluate.tasks import MARGIN, TASKS, Case, TaskSettings
from kvevict.policy.building import choose

QUESTION, OPENING = "\n\nQuestion: What?\nAnswer: It is", "Answer: It is"
TAIL = "</user>\n<assistant>\n"


@TASKS.add("scripted")
def cases(settings):
    for i in range(settings.cases):
        how = 20, {}, OPENING, True
        yield Case("scripted", str(i), f"Text {i}, of some words.", QUESTION, ("42",), "exact", *how)


def case(**changes):
    return Case("toy", "0", " some text", QUESTION, ("42",), "exact", **dict(new_tokens=20, opening=OPENING) | changes)


@pytest.fixture(scope="module")
def net():
    return scripted("s 42.\nmore")


def test_the_opening_is_the_assistants(net):
    talker = chat_tokenizer()
    prompt = ask.encode(net, talker, case())
    assert talker.decode(prompt.context) == "<user> some text"
    assert talker.decode(prompt.question) == f"\n\nQuestion: What?{TAIL}{OPENING}"
    for plain in (ask.encode(net, byte_tokenizer(), case()), ask.encode(net, talker, case(tags={"chat": False}))):
        assert byte_tokenizer().decode(plain.context + plain.question) == " some text" + QUESTION


def test_a_free_question():
    talker = chat_tokenizer()
    prompt = encode(talker, "some text", "What <user>?", opening="It is")
    assert talker.decode(prompt.row("cpu")[0]) == f"<user>some text\n\nWhat <user>?{TAIL}It is"
    assert prompt.row("cpu")[0].tolist().count(256) == 1  # of the question's <user> every byte is a token
    plain = encode(byte_tokenizer(), "some text", "What?", opening="It is")
    assert byte_tokenizer().decode(plain.row("cpu")[0]) == "some text\n\nWhat?\nIt is"


@pytest.mark.parametrize("template", ["{{ raise_exception('a system turn is missing') }}", "{% if %}"])
def test_a_template_that_refuses_the_turn(template):
    talker = chat_tokenizer()
    talker.chat_template = template
    with pytest.raises(ValueError, match=r"chat template refuses a user's turn alone.*set another chat_template"):
        encode(talker, "some text", "What?")


@pytest.mark.parametrize("template", ["<user>", "{{ messages[0]['content'] }}{{ messages[0]['content'] }}"])
def test_a_template_that_loses_the_text(template):
    talker = chat_tokenizer()
    talker.chat_template = template
    with pytest.raises(ValueError, match="chat template does not give the user's text once; set another"):
        frame(talker, "What?")


def test_a_template_without_a_system_turn():
    talker, plain = chat_tokenizer(), chat_tokenizer()
    refuse = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    talker.chat_template = refuse + plain.chat_template
    assert frame(talker, "What?", OPENING) == frame(plain, "What?", OPENING)


@pytest.mark.parametrize("task", ["needle", "facts", "multivalue", "tracking", "keyvalue", "ruler/niah_single_1"])
def test_the_right_answer_has_room(task):
    settings = TaskSettings(byte_tokenizer(), 3000, 2)
    for made in TASKS[task](settings):
        sizes = [len(answer) + 1 + MARGIN for answer in made.answers]  # a token per letter, and the space before it
        assert made.new_tokens == (sum(sizes) if made.metric == "contains_all" else max(sizes))
        assert made.opening and made.question.endswith(made.opening) and made.one_line


def test_answers_stop_at_the_line_end(net, tmp_path):
    plan = Evaluation(("scripted",), (40,), ("streaming",), (16,), cases=2)
    evaluate(net, chat_tokenizer(), plan, tmp_path / "r")
    lines = read(tmp_path / "r")[1]
    assert [line["prediction"] for line in lines] == [" 42.\n"] * 6
    assert [line["score"] for line in lines] == [1] * 6
    assert len(lines[0]["response"]) == 5


@pytest.mark.parametrize("one_line", [True, False])
@pytest.mark.parametrize("policy", [None, choose("streaming", budget=16)])
def test_measured_answers_stop_too(net, policy, one_line):
    ids = torch.tensor([byte_tokenizer()("s 42.\nThis is"[6:] * 9)["input_ids"]])
    found = measure(net, byte_tokenizer(), ids, policy, 9, one_line=one_line)
    assert found["answer"] == " 42.\n" + ("" if one_line else "more")


def test_empty_lines_do_not_end_an_answer():
    assert not line_ended(byte_tokenizer(), byte_tokenizer()("\n\n 42")["input_ids"])
    assert line_ended(byte_tokenizer(), byte_tokenizer()("\n\n 42\n")["input_ids"])
