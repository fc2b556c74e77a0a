"""Answers whose tokens are looked at once the next step is under way, as on a GPU: the same tokens and caches."""

import functools
from unittest import mock

import pytest
import tiny
import torch

import kvevict
from kvevict.answering import writing
from kvevict.answering.answer import continued, rows_of
from kvevict.answering.batch import Batch
from kvevict.answering.writing import Sampling, written
from kvevict.engine.record.calls import Calls
from kvevict.models.compat import cache_of
from kvevict.serve.sampling import Decoding, TokenChooser

pytestmark = pytest.mark.usefixtures("no_grad")
TEXT = "The river is long, and the town beside it is old. " * 5
QUESTIONS = [list(b"How long?"), list(b"Which river is it?"), list(b"Why?")]
MOST, GREEDY = 14, Sampling()


@functools.cache
def own(family="llama"):
    return tiny.model(family, vocab_size=256)


@pytest.fixture
def steps():
    """The number of rows of each step that is launched."""
    launched, step = [], Batch.step
    with mock.patch.object(Batch, "step", lambda self, tokens: launched.append(len(tokens)) or step(self, tokens)):
        yield launched


def state(cache):
    """All that a caller sees of a cache."""
    sequence, slots = cache.sequence, []
    for layer in cache.layers:
        heads = [[each.tolist() for each in row] for row in layer.positions()]
        slots.append((heads, layer.keys.tolist(), layer.values.tolist(), layer.counts.tolist()))
    following = None if sequence.next_position is None else sequence.next_position.tolist()
    return slots, sequence.columns, sequence.seen.tolist(), sequence.removable, cache.tiers.columns, following


def both(work, policy="snapkv", family="llama", **options):
    """The results of work(model, tokenizer, cache) where tokens are looked at at once, and late."""
    model, results = own(family), []
    for devices in ((), ("cpu",)):
        options = dict(budget=48, compiled=True) | options
        with kvevict.evicting(model, policy, **options), mock.patch.object(writing, "LATE", {*devices}):
            cache = cache_of(model(torch.tensor([list(TEXT.encode())]), use_cache=True, logits_to_keep=1))
            results.append(work(model, tiny.byte_tokenizer(), cache))
    return results


def ending(model, *tokens):
    return mock.patch.object(model.generation_config, "eos_token_id", list(tokens))


def asked(model, tokenizer, cache, questions=QUESTIONS[:1], sampling=GREEDY, most=MOST, **options):
    """Answers after a fork of a cache, and the state that they leave."""
    fork = rows_of(cache, len(questions))
    logits = continued(model, fork, questions)
    choosers = [sampling.chooser(each) for each in questions]
    said = written(model, tokenizer, logits, fork, [most] * len(questions), choosers, **options)
    return said, state(fork)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(2.0, 0.9, 1)], ids=["greedy", "drawn"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("options", [{}, dict(kv="int8"), dict(recall=True)], ids=["", "int8", "recall"])
def test_ends_anywhere(rows, sampling, options):
    """At the first token, in the middle, at none before the last; rows end at different tokens."""

    def work(model, tokenizer, cache):
        results = [asked(model, tokenizer, cache, QUESTIONS[:rows], sampling)]
        for at in (0, 1, MOST // 2, MOST - 1):
            with ending(model, results[0][0][-1][at]):
                results.append(asked(model, tokenizer, cache, QUESTIONS[:rows], sampling))
        return [*results, state(cache)]

    now, late = both(work, **options)
    assert now == late
    assert {1, MOST} <= {len(row) for said, _ in now[:-1] for row in said}


def test_a_step_in_vain_for_each_end(steps):
    """A step is launched too often where a token ends an answer, never where `most` does."""

    def work(model, tokenizer, cache):
        steps.clear()
        said, _ = asked(model, tokenizer, cache, QUESTIONS[:2])
        counts = [[*steps]]
        with ending(model, said[1][3]):
            steps.clear()
            asked(model, tokenizer, cache, QUESTIONS[1:2])
            counts.append([*steps])
        return counts

    now, late = both(work)
    assert now[0] == late[0] == [2] * (MOST - 1)
    assert late[1] == [*now[1], 1]


def test_lengths_of_each_row():
    def work(model, tokenizer, cache):
        fork = rows_of(cache, 3)
        logits = continued(model, fork, QUESTIONS)
        return written(model, tokenizer, logits, fork, [1, 5, 9], [GREEDY.chooser()] * 3), state(fork)

    now, late = both(work)
    assert now == late
    assert [*map(len, now[0])] == [1, 5, 9]


def test_lines_end():
    now, late = both(lambda *given: asked(*given, questions=QUESTIONS, sampling=Sampling(3.0), most=90, one_line=True))
    assert now == late
    assert min(map(len, now[0])) < 90


def test_turns():
    """Several on one cache: each ends by itself."""

    def work(model, tokenizer, cache):
        results = []
        for question in QUESTIONS:
            logits = continued(model, cache, [question])
            said = written(model, tokenizer, logits, cache.fork(), [MOST], [GREEDY.chooser()])[0]
            with ending(model, said[5]):
                results.append(written(model, tokenizer, logits, cache, [MOST], [GREEDY.chooser()]))
            results.append(state(cache))
        return results

    now, late = both(work)
    assert now == late


def test_answers():
    def work(model, tokenizer, cache):
        return [
            kvevict.answer(model, tokenizer, cache, ["How?", "Why is it so?", "Who?"], max_new_tokens=20, **each)
            for each in ({}, dict(temperature=2.0), dict(batch_size=1))
        ]

    assert len({str(each) for each in both(work)}) == 1


@pytest.mark.parametrize("policy, family, options", [
    ("h2o", "llama", {}), ("snapkv", "llama", dict(decode=True, window=16)), ("snapkv", "gemma3", {}),
    ("snapkv", "llama", dict(compiled=False)),
])  # fmt: skip
def test_steps_that_cannot_be_taken_back(policy, family, options, steps):
    """Then the host looks at each token before the next step."""

    def work(model, tokenizer, cache):
        steps.clear()
        logits = continued(model, cache, QUESTIONS[:1])
        said = written(model, tokenizer, logits, cache, [MOST], [GREEDY.chooser()])
        return said, cache.sequence.columns, [*steps]

    now, late = both(work, policy, family, **options)
    assert now == late


def test_sequences_join_and_leave():
    """A sequence joins a batch whose tokens the host does not know yet; another is taken out."""

    def work(model, tokenizer, cache):
        def answer(question):
            fork = cache.fork()
            logits = continued(model, fork, [question])
            each = writing.Answer(GREEDY.chooser(), lambda ids: len(ids) == MOST or ids[-1] in ends, MOST)
            each.take(logits[0, -1])
            return each, fork

        ends = []
        batch, answers = Batch(model), [answer(each) for each in QUESTIONS]
        batch.add(*answers[0])
        for at in range(40):
            if at in (3, 5):
                batch.add(*answers[at // 2])
            if batch.rows:
                writing.step(batch)
        return [each.ids for each, _ in answers]

    now, late = both(work)
    assert now == late
    assert [*map(len, now)] == [MOST] * 3


ASKED = [{}, dict(frequency_penalty=0.7, presence_penalty=0.3), dict(logit_bias={"5": 2.0}, top_k=20, min_p=0.01)]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_no_choice_reads_a_number(asked, temperature):
    """The host of a GPU would wait for it. Draws are those of torch.multinomial, by a generator of each answer."""
    model, made = own(), []
    decoding = Decoding.of(dict(asked, temperature=temperature, top_p=0.9), {})
    config, ids = decoding.config(model.generation_config), torch.tensor([QUESTIONS[0]])
    model.generate(
        ids, generation_config=config, logits_processor=decoding.processors(3),
        custom_generate=lambda model, input_ids, logits_processor, **others: made.append(logits_processor) or input_ids,
    )  # fmt: skip
    noise = torch.Generator().manual_seed(3) if config.do_sample else None
    choose, want = TokenChooser(QUESTIONS[0], 9, made[0], noise), torch.Generator().manual_seed(3)
    for step in range(9):
        logits = torch.randn(256, generator=torch.Generator().manual_seed(step))
        ids = choose._ids[:, : choose._length].clone()
        with Calls() as calls:
            token = choose(logits)
        assert calls.reads is None
        scores = made[0](ids, logits[None])
        chosen = torch.multinomial(scores.softmax(-1), 1, generator=want) if noise else scores.argmax()
        assert int(token) == int(chosen)


def test_no_draw_reads_a_number():
    for sampling in (GREEDY, Sampling(0.7), Sampling(1.5, 0.8)):
        with Calls() as calls:
            sampling.chooser()(torch.randn(50))
        assert calls.reads is None
