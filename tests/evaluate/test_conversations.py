"""Conversations about a text, and later questions of a policy that recalls."""

import itertools
import json
from unittest import mock

import pytest
import tiny
import torch
from transformers import DynamicCache

import kvevict
from kvevict.asking.prompts import until_line_end
from kvevict.lab.evaluate import ask
from kvevict.lab.evaluate.results import read
from kvevict.lab.evaluate.run import Evaluation, evaluate
from kvevict.lab.evaluate.tasks import TASKS, TaskSettings, turns
from kvevict.models.compat import CACHE

RECALLS = "snapkv:window=4,recall=true"
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"


def chat_tokenizer():
    made = tiny.byte_tokenizer()
    made.chat_template = CHAT
    return made


@pytest.fixture(scope="module", autouse=True)
def short_answers():
    with mock.patch.object(turns, "ROOM", 0):
        yield


@pytest.mark.parametrize("name", ["turns", "turns/paraphrased"])
def test_cases(name):
    """Eight questions, one of them twice in turns 5 and 10; none has the answer's opening."""
    cases = list(TASKS.find(name)(TaskSettings(chat_tokenizer(), 5000, 2)))
    texts = [list(group) for _, group in itertools.groupby(cases, lambda case: case.context)]
    assert [len(text) for text in texts] == [10, 10]
    for text in texts:
        asked = [case.question for case in text]
        assert [case.turn for case in text] == [case.tags["turn"] for case in text] == [*range(1, 11)]
        assert len(set(asked)) == 8 and asked[4] in asked[:4] and asked[9] in asked[:9]
        assert [case.tags["again"] for case in text] == [turn in (5, 10) for turn in range(1, 11)]
        for case in text:
            assert case.question.endswith("?") and not case.opening and "Answer:" not in case.question
            assert case.answers[0] in case.context
    assert len({case.id for case in cases}) == 20


def test_broad_and_narrow_questions():
    """Turns 3, 6 and 9 ask for both facts of two kinds, the others for one fact; turns 5 and 10 repeat a question."""
    cases = list(TASKS.find("turns/mixed")(TaskSettings(chat_tokenizer(), 5000, 1)))
    wanted = {3: 4, 6: 4, 9: 4}
    for case in cases:
        same = [other for other in cases[: case.turn - 1] if other.question == case.question]
        assert bool(same) == (case.turn in (5, 10)) == case.tags["again"]
        count = len(same[0].answers) if same else wanted.get(case.turn, 1)
        assert len(case.answers) == count and case.tags["asks"] == ("narrow" if count == 1 else "broad")
        assert case.one_line == (count == 1) and case.metric == "contains_all"
        assert all(answer in case.context for answer in case.answers)


def test_texts_with_too_few_questions(tmp_path):
    asked = [dict(Q=f"Who {n}?", A="he", S="It rained.") for n in range(7)]
    record = dict(input="It rained. " * 50, qa_pairs=str(asked))
    (tmp_path / "shortdep_qa.jsonl").write_text(json.dumps(record) + "\n")
    settings = TaskSettings(chat_tokenizer(), 300, 1, data=tmp_path)
    with pytest.raises(ValueError, match="--lengths 300: no text of turns/loogle has 8 questions then; give more"):
        list(TASKS.find("turns/loogle")(settings))


def lines_of(path, policies, net, tok, **changes):
    plan = dict(budgets=(64,), chunk_sizes=(512,), modes=("known", "later", "other"), cases=1) | changes
    evaluate(net, tok, Evaluation(("turns",), (2400,), policies, **plan), path)
    return read(path)[1]


@pytest.fixture(scope="module", params=[tiny.byte_tokenizer, chat_tokenizer], ids=["plain", "chat"])
def lines(request, tmp_path_factory):
    tok, net = request.param(), tiny.model(vocab_size=260, max_position_embeddings=8000)
    path = tmp_path_factory.mktemp("turns") / "r"
    return tok, net, path, lines_of(path, ("snapkv:window=4", RECALLS), net, tok)


def of(lines, policy, mode=None):
    return [line for line in lines if (line["policy"], line["mode"]) == (policy, mode)]


def test_a_turn_follows_the_model_s_own_answers(lines):
    """Each answer is that to the whole conversation so far, read anew by the unpatched model."""
    tok, net, _, found = lines
    cases = list(TASKS["turns"](TaskSettings(tok, 2400, 1)))
    history = []
    for case, line in zip(cases[:3], of(found, "full")[:3], strict=True):
        if tok.chat_template:
            history.append(dict(role="user", content=(case.context if not history else "") + case.question))
            ids = tok.apply_chat_template(history, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            history.append(f"{'' if history else case.context}\n\nQuestion: {case.question.strip()}\nAnswer:")
            ids = tok("".join(history))["input_ids"]
        asked = dict(max_new_tokens=case.new_tokens, do_sample=False, pad_token_id=0)
        out = net.generate(torch.tensor([ids]), stopping_criteria=until_line_end(tok, len(ids)), **asked)
        said = tok.decode(out[0, len(ids) :], skip_special_tokens=True)
        assert line["prediction"] == said
        history.append(dict(role="assistant", content=said) if tok.chat_template else f"{said}\n")


def test_turns_are_read_under_the_policy(lines):
    """Slots stay within the budget and the turns' tokens; with recall an archive has all tokens."""
    _, _, _, found = lines
    slot = 2 * 2 * 32 * 4 * 4  # bytes in four layers
    for mode in ("known", "later"):
        forgets, recalls = of(found, "snapkv:window=4", mode), of(found, RECALLS, mode)
        assert len(forgets) == len(recalls) == 10
        assert all(line["cache_bytes"] == 64 * slot for line in recalls + forgets)
        assert all(line["archive_bytes"] == 0 for line in forgets)
        seen = [line["prompt_tokens"] for line in recalls]
        assert recalls[0]["archive_bytes"] >= sum(seen[:1]) * slot
        assert recalls[-1]["archive_bytes"] >= sum(seen) * slot
        assert seen[0] > 1800 if mode == "known" else seen[0] < 200


def test_the_control_asks_of_the_slots_of_the_turn_before(lines):
    """The slots are the budget's, chosen before the turn, and the turn's own tokens; none came back for it."""
    _, _, _, found = lines
    control = of(found, RECALLS, "other")
    assert len(control) == 10
    for line in control:
        assert line["cache_bytes"] == (64 + line["prompt_tokens"]) * 2 * 2 * 32 * 4 * 4
        assert line["recalled_bytes"] == line["archive_bytes"] == 0


def test_bytes_that_came_back(lines):
    """Of whole slots of a head; the first turn is read in chunks, and its last one recalls, too."""
    _, _, _, found = lines
    back = [line["recalled_bytes"] for line in of(found, RECALLS, "known")]
    assert min(back) > 0 and all(each % (2 * 32 * 4) == 0 for each in back)
    assert not any(line["recalled_bytes"] for line in of(found, "snapkv:window=4", "known"))


def test_only_turns_have_a_control(tmp_path):
    net = tiny.model(vocab_size=260, max_position_embeddings=8000)
    with pytest.raises(ValueError, match="--mode other: many has no turns; give --tasks turns"):
        evaluate(
            net, chat_tokenizer(), Evaluation(("many",), (2400,), ("snapkv",), (64,), modes=("other",)), tmp_path / "r"
        )


def test_with_room_for_all_a_policy_answers_as_the_full_cache(tmp_path):
    tok, net = chat_tokenizer(), tiny.model(vocab_size=260, max_position_embeddings=8000)
    found = lines_of(tmp_path / "r", ("snapkv", RECALLS), net, tok, budgets=(10**6,), modes=("known", "other"))
    full = [line["prediction"] for line in of(found, "full")]
    for policy, mode in itertools.product(("snapkv", RECALLS), ("known", "other")):
        assert [line["prediction"] for line in of(found, policy, mode)] == full


def test_a_cut_file_is_completed(lines, tmp_path):
    tok, net, path, found = lines
    text = path.read_bytes()
    again = tmp_path / "r"
    again.write_bytes(text[: len(text) // 2])
    assert sorted(map(str, map(timeless, lines_of(again, ("snapkv:window=4", RECALLS), net, tok)))) == sorted(
        map(str, map(timeless, found))
    )


def timeless(line):
    return {key: value for key, value in line.items() if not key.endswith("_seconds")}


def test_a_conversation_that_is_too_long(tmp_path):
    net = tiny.model(vocab_size=260, max_position_embeddings=2600)
    with pytest.raises(ValueError, match=r"the turns of .* take up to \d+ tokens, the model's context is 2600"):
        lines_of(tmp_path / "r", ("snapkv",), net, chat_tokenizer())


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_later_question_recalls(tmp_path, batch_size):
    """As `kvevict.answer` answers it, after one read of the text."""
    tok, net = chat_tokenizer(), tiny.model(vocab_size=260, max_position_embeddings=8000)
    plan = Evaluation(("many",), (2400,), ("take+edie:recall=true",), (128,), (512,), ("later",), cases=1)
    evaluate(net, tok, plan, tmp_path / "r", batch_size=batch_size)
    cases = list(TASKS["many"](TaskSettings(tok, 2400, 1)))
    lines = {line["id"]: line for line in read(tmp_path / "r")[1] if line["policy"] != "full"}
    prompt = ask.encode(net, tok, cases[0])
    with torch.no_grad(), kvevict.evicting(net, "take+edie", budget=128, chunk_size=512, recall=True, tokenizer=tok):
        cache = DynamicCache(config=net.config)
        net(torch.tensor([prompt.context]), **{CACHE: cache}, logits_to_keep=1)
        for case in cases[:3]:
            question, fork, ids = ask.encode(net, tok, case).question, cache.fork(), []
            logits = net(torch.tensor([question]), **{CACHE: fork}, logits_to_keep=1).logits
            assert int(fork.tiers.every[0].total_counts[0, 0]) == len(prompt.context + question)
            while len(ids) < case.new_tokens and "\n" not in tok.decode(ids, skip_special_tokens=True).lstrip():
                ids.append(int(logits[0, -1].argmax()))
                if ids[-1] == tok.eos_token_id:
                    break
                logits = net(torch.tensor([ids[-1:]]), **{CACHE: fork}, logits_to_keep=1).logits
            assert lines[case.id]["prediction"] == tok.decode(ids, skip_special_tokens=True)
