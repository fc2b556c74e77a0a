"""Questions that are asked at once are answered as each alone, in the order in which they were given."""

import copy

import pytest
import tiny
import torch
import zoo
from caches import held, same

import kvevict
from kvevict.engine.memory.layer import EvictionLayer

CONTEXT = "The harbour opens at seven and the lantern is lit at nine; nobody in the town knows why. " * 2
QUESTIONS = ["When?", "Why is the lantern lit?", "?", "Who knows it?", "When?", "Where is that?"]
OPTIONS = dict(policy="snapkv", budget=30, window=4)
# family -> how its questions come together: of any length, of the same, or none
TOGETHER = {
    "llama": "any", "mixtral": "any", "deepseek_v3": "any", "gpt2": "any", "gemma3": "same", "gpt_oss": "same",
    "llama4_text": "same", "qwen3_next": "none", "falcon_h1": "none", "qwen2_5_vl": "none",
}  # fmt: skip


def rows_of(net):
    """Rows of each call of a model, of more than a token, as they come."""
    rows = []

    def note(module, args, kwargs):
        ids = args[0] if args else kwargs["input_ids"]
        if ids.shape[1] > 1:
            rows.append(len(ids))

    net.register_forward_pre_hook(note, with_kwargs=True)
    return rows


def stored(cache):
    """Tensors of the layers that are evicted from."""
    own = [layer for layer in cache.layers if isinstance(layer, EvictionLayer)]
    return [[layer.keys, layer.values, torch.tensor(cache.sequence.seen), layer.len.clone()] for layer in own]


@pytest.fixture(params=TOGETHER)
def family(request):
    return request.param


@pytest.fixture
def net(family):
    if family in tiny.FAMILIES:
        return tiny.model(family, vocab_size=259)
    try:
        made = zoo.model(family)
        made.generation_config.eos_token_id = None
        return kvevict.unpatch(kvevict.patch(made, "snapkv", budget=64))
    except Exception as error:
        if tiny.VERSION >= (5, 23):
            raise
        pytest.skip(f"{type(error).__name__}: {error}")


@pytest.mark.slow
@pytest.mark.drawn(3)
def test_answers_are_those_of_one_at_a_time(net, family):
    tokenizer = tiny.byte_tokenizer()
    cache = kvevict.read(net, tokenizer, CONTEXT, **OPTIONS)
    before = stored(cache)
    asked = dict(max_new_tokens=10)
    want = kvevict.answer(net, tokenizer, cache, QUESTIONS, batch_size=1, **asked)
    assert want[0] == want[4]
    rows = rows_of(net)
    for size in (3, 8):
        assert kvevict.answer(net, tokenizer, cache, QUESTIONS, batch_size=size, **asked) == want
    calls = dict(any=[3, 3, 6], same=[1, 2, 1, 1, 1] * 2, none=[1] * 12)[TOGETHER[family]]
    assert rows == calls
    assert same(stored(cache), before)
    drawn = [
        kvevict.answer(net, tokenizer, cache, QUESTIONS, batch_size=size, temperature=2.0, **asked) for size in (1, 4)
    ]
    assert drawn[0] == drawn[1] != want


def test_rows_end_apart():
    """At tokens that end an answer, at the end of a line or at the last token; the other rows go on."""
    net, tokenizer = tiny.model(vocab_size=259), tiny.byte_tokenizer()
    cache = kvevict.read(net, tokenizer, CONTEXT, **OPTIONS)
    before = held(cache)
    drawn = dict(max_new_tokens=25, temperature=0.1)
    fewer = False
    for more in (dict(one_line=True), {}):
        net.generation_config.eos_token_id = list(range(0, 256, 9))
        rows: list = []
        layer = net.model.layers[0]
        handle = layer.register_forward_pre_hook(lambda module, args, rows=rows: rows.append(len(args[0])))
        for seed in range(2):
            options = drawn | more | dict(sampling_seed=seed)
            want = kvevict.answer(net, tokenizer, cache, QUESTIONS, batch_size=1, **options)
            rows.clear()
            assert kvevict.answer(net, tokenizer, cache, QUESTIONS, batch_size=8, **options) == want
            assert rows == sorted(rows, reverse=True)
            fewer |= rows[-1] < 6
        handle.remove()
    assert fewer
    assert same(held(cache), before)


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_numbers_of_questions(count, size):
    net, tokenizer = tiny.model(vocab_size=259), tiny.byte_tokenizer()
    want = [
        kvevict.answer(net, tokenizer, CONTEXT, [each], max_new_tokens=6, **OPTIONS)[0] for each in QUESTIONS[:count]
    ]
    pipe = kvevict.Pipeline(net, tokenizer, **OPTIONS)
    assert pipe(CONTEXT, questions=QUESTIONS[:count], max_new_tokens=6, batch_size=size) == dict(answers=want)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, None, "8"])
def test_a_wrong_batch_size(wrong):
    net, tokenizer = tiny.model(vocab_size=259), tiny.byte_tokenizer()
    with pytest.raises((ValueError, TypeError), match="batch_size"):
        kvevict.answer(net, tokenizer, CONTEXT, QUESTIONS, batch_size=wrong, **OPTIONS)


def test_rows_share_what_was_kept():
    """Repeated, padded, decoded and thinned out, a fork copies nothing of its prefix; all that looks at its slots sees
    those of a copy that shares nothing."""
    net = kvevict.patch(tiny.model(), "adakv", budget=200, window=4, decode=False)
    with torch.no_grad():
        cache = net(tiny.prompt(1, 60)["input_ids"], logits_to_keep=1).past_key_values
        before, fork, plain = held(cache), cache.fork(), copy.deepcopy(cache)
        asked = tiny.prompt(4, 9, 2, pad=(0, 3, 5, 0))
        mask = torch.cat([torch.ones(4, 60, dtype=torch.long), asked["attention_mask"]], 1)
        for way in (fork, plain):
            way.batch_select_indices(torch.zeros(4, dtype=torch.long))
            net(asked["input_ids"], attention_mask=mask, past_key_values=way)
            way.batch_select_indices(torch.tensor([2, 0, 1]))
        for step in range(80):
            ids = torch.tensor([[step], [step + 1], [step + 2]])
            outs = [net(ids, past_key_values=way).logits for way in (fork, plain)]
            assert tiny.relative(*outs) < 1e-5
        for layer, other, first in zip(fork.layers, plain.layers, cache.layers, strict=True):
            assert layer.storage.prefix.k is first.storage.prefix.k
            assert layer.counts.tolist() == other.counts.tolist() == layer.len.tolist()
            assert torch.equal(layer.keys, other.keys)
            for mine, its in zip(layer.positions(), other.positions(), strict=True):
                assert all(map(torch.equal, mine, its))
        for way in (fork, plain):
            way.crop(-3)
            way.reorder_cache(torch.tensor([1, 1, 0]))
        assert tiny.relative(*(net(ids, past_key_values=way).logits for way in (fork, plain))) < 1e-5
    assert same(held(cache), before)
