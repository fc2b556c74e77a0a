"""What costs answers is not silent: a text for later questions, one beyond the context, a turn on an evicted cache."""

import types
import warnings

import pytest
import tiny
import torch
import transformers
import zoo

import kvevict
import kvevict.cautions
from kvevict.lab.commands import room
from kvevict.models.families import context_of

TEXT = "The harbour opens at seven and the lantern is lit at nine; nobody in the town knows why. " * 3
ROOM = 400  # positions of `short`


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No warning was given before."""
    monkeypatch.setattr(kvevict.cautions, "_given", set())


@pytest.fixture(scope="module")
def short():
    return tiny.model(vocab_size=259, bos_token_id=None, pad_token_id=None, max_position_embeddings=ROOM)


def told(function):
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        function()
    return [str(each.message) for each in found]


def row(text, batch=1):
    ids = torch.tensor([tiny.byte_tokenizer()(text)["input_ids"]] * batch)
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids))


def kept(net, policy=None, **options):
    cache = kvevict.read(net, tiny.byte_tokenizer(), TEXT, policy, **options)
    return [layer.positions() for layer in cache.layers], [layer.storage.kinds for layer in cache.layers]


def same(one, other):
    return one[1] == other[1] and all(
        torch.equal(a, b) for x, y in zip(one[0], other[0], strict=True) for r, s in zip(x, y) for a, b in zip(r, s)
    )


def test_a_warning_shows_the_callers_line(net):
    """One comes from within the model's call, one from within generate."""
    with warnings.catch_warnings(record=True) as found, kvevict.evicting(net, "take+edie", budget=60):
        warnings.simplefilter("always")
        net.generate(**row(TEXT * 5), max_new_tokens=1)
    assert [str(each.message).split()[0] for each in found] == ["the", "4.5%"]
    assert {each.filename for each in found} == {__file__}


@pytest.mark.parametrize("policy", ["take+edie", "snapkv", "laq", "h2o", "streaming"])
def test_a_patched_model_reads_for_later_questions(net, policy):
    """Its policy is not for these, so only its budget and its kind of slots count."""
    want = kept(net, "read-twice", budget=90, kv="int8")
    with kvevict.evicting(net, policy, budget=90, kv="int8", decode=False):
        assert same(kept(net), want)
        assert same(kept(net, kv="model", budget=60), kept(net, "read-twice", budget=60))
        assert kvevict.Pipeline(net, tiny.byte_tokenizer()).read(TEXT).sequence.policy.rows.repeats
    for name in (policy, "keydiff"):  # a named one reads
        named = kept(net, name, budget=60)
        with kvevict.evicting(net, policy, budget=90, kv="int8"):
            assert same(kept(net, name, budget=60), named)


@pytest.mark.parametrize("policy", ["keydiff", "compactor", "kvzip", "expected"])
def test_a_policy_for_later_questions_reads_where_it_is_the_models(net, policy):
    want, less = kept(net, policy, budget=90), kept(net, policy, budget=60)
    with kvevict.evicting(net, policy, budget=90):
        assert same(kept(net), want) and same(kept(net, budget=60), less)


def test_little_of_a_text_is_told(net):
    """By `read`, under any policy, and by `generate` under one for later questions; once for a budget."""
    tokenizer, inputs = tiny.byte_tokenizer(), row(TEXT)
    said = "22.5% of the 267 tokens are kept, and answers about the rest are often wrong: give more slots"
    for policy in (None, "snapkv"):
        kvevict.cautions._given.clear()
        assert said in told(lambda policy=policy: kvevict.read(net, tokenizer, TEXT, policy, budget=60))[0]
        assert not told(lambda policy=policy: kvevict.read(net, tokenizer, TEXT, policy, budget=60))
        assert not told(lambda policy=policy: kvevict.read(net, tokenizer, TEXT, policy, budget=0.25))
    for policy, warns in dict(keydiff=True, kvzip=True, snapkv=False, streaming=False).items():
        kvevict.cautions._given.clear()
        with kvevict.evicting(net, policy, budget=60, tokenizer=False):
            found = told(lambda: net.generate(**inputs, max_new_tokens=2))
            assert (said in "".join(found)) == warns == bool(found)
            assert not told(lambda: net.generate(**inputs, max_new_tokens=2))
    with kvevict.evicting(net, "keydiff", budget=90):
        assert not told(lambda: net.generate(**inputs, max_new_tokens=2))


def test_a_smaller_share_than_was_measured_is_told(net):
    """With a known question 1/16, once for a budget; nothing is lost with recall, and a text that goes on was not
    measured."""
    inputs = row(TEXT * 2)
    said = (
        "6.2% of the 534 tokens are kept, and with less than 1/16 more answers are wrong: give more slots (budget=34 "
    )
    for policy, options, warns in (
        ("snapkv:window=8", dict(budget=33), True), ("snapkv:window=8", dict(budget=34), False),
        ("take+edie:probe=8", dict(budget=33), True), ("snapkv:window=8", dict(budget=33, recall=True), False),
        ("streaming", dict(budget=33), False),
    ):  # fmt: skip
        kvevict.cautions._given.clear()
        with kvevict.evicting(net, policy, tokenizer=False, **options):
            found = told(lambda: net.generate(**inputs, max_new_tokens=2))
            assert [said in each for each in found] == [True] * warns
            assert not told(lambda: net.generate(**inputs, max_new_tokens=2))


def test_a_pipeline_s_questions_come_later(net):
    """A policy for known questions is told of once, unless it recalls."""

    def made(*policy, **options):
        return told(lambda: kvevict.Pipeline(net, tiny.byte_tokenizer(), *policy, budget=90, **options))

    for policy in ("keydiff", "kvzip", None):
        assert not made(policy)
    assert not made("snapkv", recall=True) and not made(recall=True)
    assert made("snapkv")[0].startswith("a Pipeline's questions come after its text") and not made("take+edie")


def test_a_text_beyond_the_context(short):
    """Nothing of it is read."""
    tokenizer, calls = tiny.byte_tokenizer(), []
    hook = short.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    pipe = kvevict.Pipeline(short, tokenizer, "snapkv", budget=60)
    for ask in (
        lambda text: kvevict.read(short, tokenizer, text, "snapkv", budget=60),
        lambda text: kvevict.read(short, tokenizer, text, budget=60),
        lambda text: kvevict.answer(short, tokenizer, text, ["Why?"], "snapkv", budget=60),
        lambda text: pipe(text, "Why?"),
    ):
        with pytest.raises(ValueError, match=f"the text: {ROOM} tokens, and the model's context is {ROOM}"):
            ask("x" * ROOM)
    assert not calls
    hook.remove()
    cache = kvevict.read(short, tokenizer, "x" * (ROOM - 10), "snapkv", budget=60)
    assert len(kvevict.answer(short, tokenizer, cache, ["Why?"], max_new_tokens=1)) == 1
    with pytest.raises(ValueError, match=f"the text and a question: {ROOM + 2} tokens"):
        kvevict.answer(short, tokenizer, cache, ["Why?", "x" * 10])


def test_a_prompt_beyond_the_context(short):
    """Transformers says so in its log; the turns of a cache count together."""
    with kvevict.evicting(short, "snapkv", budget=60):
        long = row("x" * (ROOM + 1))
        said = f"the {ROOM + 1} tokens are more than the model's context of {ROOM}, and answers are often wrong"
        assert not told(lambda: short(**row("x" * ROOM), logits_to_keep=1))
        assert said in told(lambda: short.generate(**long, max_new_tokens=2))[0]
        assert not told(lambda: short.generate(**long, max_new_tokens=2))
        kvevict.cautions._given.clear()
        with torch.no_grad():
            cache = short(**row("x" * (ROOM - 9)), logits_to_keep=1).past_key_values
        assert said in "".join(told(lambda: short(row("x" * 10)["input_ids"], past_key_values=cache)))


@pytest.mark.parametrize("rope, context", [
    (dict(rope_type="default"), 100), (dict(rope_type="dynamic", factor=4.0), 400),
    (dict(rope_type="linear", factor=2.0), 200), (None, 100),
    (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=100), 400),
    (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=25), 100),
    (dict(rope_type="longrope", original_max_position_embeddings=25, long_factor=[1.0]), 100),
    (dict(full_attention=dict(rope_type="linear", factor=8.0), sliding_attention=dict(rope_type="default")), 800),
])  # fmt: skip
def test_what_the_context_is(rope, context):
    assert context_of(types.SimpleNamespace(max_position_embeddings=100, rope_parameters=rope)) == context
    assert context_of(types.SimpleNamespace(rope_parameters=rope)) is None


def test_the_context_of_a_model_around_its_decoder():
    """The configuration of the decoder has it, not that of the whole model."""
    net = zoo.make("gemma3", "Gemma3ForConditionalGeneration")
    assert room(net, 24) == context_of(net.config.text_config) - 24
    with pytest.raises(ValueError, match="the model's context is"):
        kvevict.read(net, tiny.byte_tokenizer(), "x" * 10000, "snapkv", budget=60)


def test_a_rope_that_is_longer_than_its_first_training():
    rope = dict(rope_type="dynamic", factor=4.0, rope_theta=10000.0)
    net = tiny.model(
        vocab_size=259, bos_token_id=None, pad_token_id=None, max_position_embeddings=100, rope_parameters=rope
    )
    for policy in ("snapkv", None):
        assert kvevict.answer(net, tiny.byte_tokenizer(), TEXT, ["Why?"], policy, budget=90, max_new_tokens=2)
    with pytest.raises(ValueError, match="the model's context is 400"):
        kvevict.read(net, tiny.byte_tokenizer(), TEXT * 2, "snapkv", budget=90)


@pytest.mark.parametrize("policy", ["snapkv", "keydiff"])
def test_a_turn_that_recalls_too_late(net, policy):
    """An archive that begins after slots were evicted lacks these, whichever question they were chosen for."""
    with torch.no_grad():
        cache = transformers.DynamicCache(config=net.config)
        with kvevict.evicting(net, policy, budget=60):
            net(row(f"{TEXT}Why?")["input_ids"], past_key_values=cache)
        with kvevict.evicting(net, "snapkv", budget=60, recall=True):
            (found,) = told(lambda: net(row("When is it lit?")["input_ids"], past_key_values=cache))
            assert "recall=True before its first turn" in found
            assert not told(lambda: net(row("Why?")["input_ids"], past_key_values=cache))


@pytest.mark.parametrize("policy, budget, warns", [
    ("snapkv", 60, True), ("take+edie", 60, True), ("snapkv", 4000, False), ("read-twice", 90, False),
])  # fmt: skip
def test_a_turn_after_slots_that_were_chosen_for_another_question(net, policy, budget, warns):
    """Once; decoded tokens are no turn, and a forked cache is as the one it is from."""
    with kvevict.evicting(net, policy, budget=budget, tokenizer=False), torch.no_grad():
        cache = transformers.DynamicCache(config=net.config)
        first = row(f"{TEXT}Why?")["input_ids"]
        assert not told(lambda: net.generate(first, past_key_values=cache, max_new_tokens=3))
        turn = torch.cat([first, row("When is it lit?" * 2)["input_ids"]], 1)
        found = told(lambda: net.generate(turn, past_key_values=cache.fork(), max_new_tokens=3))
        share = f"{min(kvevict.report(net)['kept_share']):.0%}"[:1]
        assert [each[0] == share and "chosen for an earlier question" in each for each in found] == [True] * warns
        assert not told(lambda: net.generate(turn, past_key_values=cache.fork(), max_new_tokens=3))


@pytest.mark.parametrize("decode, recall, warns", [(True, True, True), (True, False, False), (False, True, False)])
def test_few_rows_that_choose_from_all_tokens_while_decoding(net, decode, recall, warns):
    options = dict(budget=60, decode=decode, recall=recall, recall_after=0 if recall else None)
    with kvevict.evicting(net, "snapkv", **options), torch.no_grad():
        found = told(lambda: net(row(TEXT)["input_ids"], use_cache=True, logits_to_keep=1))
        assert ["give decode=False" in each for each in found] == [True] * warns
        assert not told(lambda: net(row(TEXT)["input_ids"], use_cache=True, logits_to_keep=1))


def test_answers_about_a_cache_are_not_turns(net):
    """Who reads a text with a policy that needs the question named it."""
    cache = kvevict.read(net, tiny.byte_tokenizer(), TEXT, "snapkv", budget=90)
    with kvevict.evicting(net, "snapkv", budget=90):
        assert not told(lambda: kvevict.answer(net, tiny.byte_tokenizer(), cache, ["Why?"], max_new_tokens=2))


def test_the_caches_name_is_passed_on_as_transformers_has_it(net):
    with kvevict.evicting(net, "snapkv", budget=4000), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        cache, inputs = transformers.DynamicCache(config=net.config), row(TEXT)
        net.generate(**inputs, past_key_values=cache, max_new_tokens=2)
        net(row("x")["input_ids"], past_key_values=cache)
        net.model(row("x")["input_ids"], past_key_values=cache)
