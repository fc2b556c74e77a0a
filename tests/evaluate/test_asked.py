"""Tasks about the question's place: the cases, and that with --observe asked the question's tokens alone observe."""

import itertools
from contextlib import nullcontext

import pytest
import tiny
from transformers import AutoTokenizer

import kvevict
from kvevict.lab.analysis import run as analysis
from kvevict.lab.evaluate import ask
from kvevict.lab.evaluate.tasks import TASKS, Settings
from kvevict.lab.evaluate.tasks.asked import PLACES
from kvevict.policy import build


@pytest.fixture(scope="module")
def words():
    return AutoTokenizer.from_pretrained(kvevict.small_llama())


@pytest.mark.parametrize("name", ["asked", "asked/opened", "asked/numbers"])
def test_cases(words, name):
    """Each text has its facts once; the question stands where its place says, and all places come in turn."""
    texts = 16 if name == "asked/numbers" else 4
    cases = list(TASKS[name](Settings(words, 1000, texts, seed=5)))
    assert cases == list(TASKS[name](Settings(words, 1000, texts, seed=5)))
    assert len({case.id for case in cases}) == len(cases) == (texts if name == "asked/numbers" else 8 * texts)
    placed = {(case.tags["place"], case.tags["kind"]) for case in cases}
    assert placed == set(itertools.product(PLACES, {case.tags["kind"] for case in cases}))
    tails = {place: [] for place in PLACES}
    for case in cases:
        prompt = case.context + case.question
        assert prompt.count(case.said) == 1 and (
            case.context.count(case.answers[0]) == 1 or case.tags["kind"] == "places"
        )
        assert len(words(prompt)["input_ids"]) <= 1000
        first = case.tags["place"] == "first"
        assert (case.said in case.context[:200]) == first == (case.said not in case.question)
        assert prompt.endswith(case.opening) and bool(case.opening) == (name == "asked/opened")
        rest = prompt.removesuffix(case.opening)
        tails[case.tags["place"]].append(len(words(rest[rest.index(case.said) + len(case.said) :])["input_ids"]))
    assert max(tails["last"]) <= 4 and min(tails["before"]) >= 30 and min(tails["long"]) >= 30  # "\nAnswer:"


def test_one_place(words):
    for place in PLACES:
        cases = list(TASKS[f"asked/{place}"](Settings(words, 900, 1)))
        assert len(cases) == 8 and {case.tags["place"] for case in cases} == {place}


def test_a_chat_template_has_the_user_ask():
    """ "Answer:" opens nothing there, but the words of a fact may."""
    for case in TASKS["asked"](Settings(tiny.chat_tokenizer(), 6000, 1)):
        assert not (case.context + case.question).endswith("Answer:") and not case.opening
    for case in TASKS["asked/opened"](Settings(tiny.chat_tokenizer(), 6000, 1)):
        glue = "" if case.opening.endswith('"') else " "
        assert case.opening + glue + case.answers[0] in case.context
        assert case.question.endswith(case.opening) and "Answer:" not in case.question


def spans(rows):
    return [each.spans for each in rows.questions]


@pytest.mark.parametrize("make", [tiny.byte_tokenizer, tiny.chat_tokenizer])
def test_what_asks_observes(make):
    """`observe="asked"` is the span of the question's tokens, for rows that are a probe."""
    tok, net = make(), tiny.model(vocab_size=260, max_position_embeddings=8000)
    for case in TASKS["asked"](Settings(tok, 6000, 1)):
        prompt = ask.encode(net, tok, case)
        start, stop = prompt.observed("asked")
        assert tok.decode((prompt.context + prompt.question)[start:stop]) == case.said
    plain = analysis.encode(tok, "Some text.", "Why not?", opening="So")
    start, stop = plain.observed("asked")
    assert tok.decode((plain.context + plain.question)[start:stop]).strip() == "Why not?"
    for policy, options in (("take", {}), ("take", dict(probe=9)), ("snapkv", {}), ("take", dict(append=False))):
        chosen = build(policy, budget=100, chunk_size=64, **options)
        rows = analysis.observe(chosen, (7, 12), 500, options).rows
        observes = policy == "take" and not options
        assert spans(rows) == [((7, 12),)] if observes else rows == chosen.rows
    assert spans(analysis.observe(build("take", budget=40, chunk_size=64), (5, 90), 500).rows) == [((70, 90),)]


def test_a_run_that_observes_what_asks():
    """It keeps the same slots as `kvevict.observing`."""
    tok, net = tiny.byte_tokenizer(), tiny.model(vocab_size=260, max_position_embeddings=8000)
    case = next(case for case in TASKS["asked"](Settings(tok, 1500, 1)) if case.tags["place"] == "before")
    prompt, held = ask.encode(net, tok, case), []
    for observe, told in ("asked", nullcontext()), (None, kvevict.observing(prompt.said)):
        with told:
            one = ask.Run("take+edie", 200, 512, "aware")
            reading = ask.read(net, tok, ask.Asked(case, prompt, observe=observe), one, alone=False)
        held.append(reading.held["kept"])
    assert len(prompt.context + prompt.question) <= 1500
    assert held[0] == held[1]
