"""Tasks about the question's place: the cases, and that the question's tokens observe."""

import itertools
from contextlib import nullcontext

import pytest
import tiny
import torch

import kvevict
from kvevict.lab.evaluate import ask
from kvevict.lab.evaluate.tasks import TASKS, TaskSettings
from kvevict.lab.evaluate.tasks.asked import PLACES


@pytest.mark.parametrize("name", ["asked", "asked/opened"])
def test_cases(words, name):
    """Each text has its facts once; the question stands where its place says, and all places come in turn."""
    texts = 4
    cases = list(TASKS[name](TaskSettings(words, 1000, texts, seed=5)))
    assert cases == list(TASKS[name](TaskSettings(words, 1000, texts, seed=5)))
    assert len({case.id for case in cases}) == len(cases) == 8 * texts
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


def test_a_chat_template_has_the_user_ask():
    """ "Answer:" opens nothing there, but the words of a fact may."""
    for case in TASKS["asked"](TaskSettings(tiny.chat_tokenizer(), 6000, 1)):
        assert not (case.context + case.question).endswith("Answer:") and not case.opening
    for case in TASKS["asked/opened"](TaskSettings(tiny.chat_tokenizer(), 6000, 1)):
        glue = "" if case.opening.endswith('"') else " "
        assert case.opening + glue + case.answers[0] in case.context
        assert case.question.endswith(case.opening) and "Answer:" not in case.question


@pytest.mark.parametrize("make", [tiny.byte_tokenizer, tiny.chat_tokenizer])
def test_the_question_observes(make):
    """A run reads as within `kvevict.observing`, except where the policy names a probe or has none."""
    tok, net = make(), tiny.model(vocab_size=260, max_position_embeddings=8000)
    for case in TASKS["asked"](TaskSettings(tok, 6000, 1)):
        prompt = ask.encode(net, tok, case)
        start, stop = prompt.said
        assert tok.decode((prompt.context + prompt.question)[start:stop]) == case.said
    case = next(case for case in TASKS["asked"](TaskSettings(tok, 1500, 1)) if case.tags["place"] == "before")
    prompt = ask.encode(net, tok, case)
    for policy, options in ("take+edie", {}), ("take+edie", dict(probe=9)), ("snapkv", {}):
        run = ask.RunSpec(f"{policy}:probe=9" if options else policy, 200, 512, "known")
        got = ask.read(net, tok, ask.AskedCase(case, prompt), run, alone=False)
        told = kvevict.observing(prompt.said) if run.policy == "take+edie" else nullcontext()
        evicting = kvevict.evicting(net, policy, budget=200, chunk_size=512, tokenizer=False, **options)
        with evicting, told, torch.no_grad():
            want = net(prompt.row("cpu"), use_cache=True, logits_to_keep=1)
        assert torch.equal(got.out.logits, want.logits)
