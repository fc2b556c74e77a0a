"""How far an answer under recall attends: to all slots by default, where the archive is near and small
(`kvevict.policy.reach`)."""

from contextlib import contextmanager

import pytest
import templates
import torch
import zoo
from recalling import OTHERS, ours, padded
from tiny import byte_tokenizer, model, prompt, relative, shared

import kvevict
from kvevict.engine.hook.installed import plan_of
from kvevict.lab.analysis.shape import shape_of
from kvevict.models.compat import CACHE
from kvevict.models.families import find_decoder
from kvevict.policy.building import build
from kvevict.policy.reach import Sizes, reach, sizes_of

RECALLS = dict(policy="snapkv", budget=24, window=4, recall=True)  # reads the tests' prompts in one chunk
TURNS = (150, 20, 31)  # lengths of the turns of a chat, in tokens
NEW = 70  # number of tokens of an answer
MEBIBYTE = 2**20

pytestmark = pytest.mark.usefixtures("no_grad")


def written(net, lengths=TURNS, new=NEW):
    """The tokens of a chat whose turns carry the cache, each with a greedy answer."""
    cache, ids = None, torch.zeros(1, 0, dtype=torch.long)
    for seed, length in enumerate(lengths):
        ids = torch.cat([ids, prompt(1, length, seed=seed)["input_ids"]], 1)
        more = {} if cache is None else dict(past_key_values=cache)
        out = net.generate(ids, **more, max_new_tokens=new, do_sample=False, return_dict_in_generate=True)
        ids, cache = out.sequences, out.past_key_values
    return ids, cache


@contextmanager
def limited(net, tokens, **options):
    """Inside, the model's policy attends to all slots of at most `tokens` tokens."""
    with kvevict.evicting(net, **RECALLS | options):
        plan = plan_of(find_decoder(net))
        plan.sizes = Sizes(plan.sizes.slot, tokens * plan.sizes.slot)
        yield plan


@pytest.mark.quick
def test_every_token_of_a_chat_is_the_full_caches():
    """Greedy answers of 70 tokens in three turns, each of which is longer than the budget."""
    net = shared()
    want, _ = written(net)
    with kvevict.evicting(net, **RECALLS):
        got, cache = written(net)
    assert torch.equal(got, want)
    with kvevict.evicting(net, **RECALLS, recall_after=16):
        assert not torch.equal(written(net)[0], want)
    assert kvevict.report(cache)["kept_share"] == [1.0]


def test_chat_and_answers_are_the_full_caches():
    words, net = byte_tokenizer(), model(vocab_size=258, bos_token_id=None, pad_token_id=None)
    words.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    words.chat_template = templates.QWEN
    turns, new = ("Tell me about the rain, the sea and the boats. ", "Why?", "And then?"), dict(max_new_tokens=NEW)
    texts, questions = ("The rain fell, and the boats went out. " * 3, ["Who went?", "What fell?", "Why, then?"])
    said = []
    for options in (dict(budget=40, window=4), dict(budget=4096, window=4)):
        chat = kvevict.Chat(net, words, "snapkv", **options)
        answers = [chat.ask(turn, **new, do_sample=False) for turn in turns]
        cache = kvevict.read(net, words, texts, "snapkv", recall=True, **options)
        said.append([*answers, *kvevict.answer(net, words, cache, questions, **new, batch_size=2)])
        assert kvevict.report(chat.cache)["reach"][0].startswith("all slots: ")
    assert said[0] == said[1]
    assert kvevict.report(cache)["reach"][0].startswith("all slots: ")


@pytest.mark.parametrize("options", [
    {}, dict(chunk_size=32), dict(chunk_size=32, schedule="prompt"), dict(policy="take+edie", window=None, probe=4),
    dict(policy="cake"), dict(policy="adakv"), dict(policy="take", window=None, probe=4), dict(policy="laq"),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["model", "int8"])
def test_all_slots_are_those_of_recall_slots(kind, options):
    """Logits and slots, in every turn; policies that cannot choose with an answer's rows, too."""
    net, found = shared(), []
    options = RECALLS | dict(kv=kind, tokenizer=False) | options
    for slots in (None, 1.0):
        with kvevict.evicting(net, **{k: v for k, v in options.items() if v is not None}, recall_slots=slots):
            cache, outs = None, []
            for seed, length in enumerate(TURNS):
                more = {} if cache is None else {CACHE: cache}
                out = net(prompt(1, length, seed=seed)["input_ids"], **more, logits_to_keep=1)
                cache, outs = out.past_key_values, [*outs, out.logits]
                outs += [net(torch.tensor([[token]]), **{CACHE: cache}).logits for token in (5, 6, 7)]
        found.append(torch.cat(outs, 1))
        total = sum(TURNS) + 3 * len(TURNS)
        assert [layer.counts.tolist() for layer in cache.layers] == [[[total] * 2]] * 4
    assert relative(*found) < 1e-5


@pytest.mark.parametrize("name, kind", [pytest.param(*each, id=each[0]) for each in zoo.types() if each[0] in OTHERS])
def test_other_models(name, kind):
    """Windows, states and latents: what is read in one chunk is answered as if nothing was evicted."""
    net, found = zoo.make(name, kind), []
    for options in (RECALLS, RECALLS | dict(budget=4096, recall=False)):
        with kvevict.evicting(net, **options):
            out = net(prompt(1, 90)["input_ids"], logits_to_keep=1, use_cache=True)
            for token in range(5, 30):
                out = net(torch.tensor([[token]]), **{CACHE: out.past_key_values}, use_cache=True)
            found.append(out.logits)
            assert all(set(layer.counts.ravel().tolist()) == {115} for layer in ours(out.past_key_values))
    assert relative(*found) < 1e-5


def test_rows_of_a_batch_are_as_alone():
    """A row with a long text chooses slots, and a shorter one in its batch does not."""
    net, texts = shared(), [prompt(1, n, seed=n)["input_ids"][0] for n in (90, 61, 20)]
    with limited(net, 80, chunk_size=32):
        ids, mask = padded(texts)
        cache = net(ids, attention_mask=mask, logits_to_keep=1).past_key_values
        assert [why.split(":")[0] for why in kvevict.report(cache)["reach"]] == ["chosen slots"] + ["all slots"] * 2
        got = net.generate(ids, attention_mask=mask, max_new_tokens=40, do_sample=False)[:, 90:]
        for row, text in enumerate(texts):
            alone = net.generate(text[None], max_new_tokens=40, do_sample=False)
            assert torch.equal(got[row], alone[0, len(text) :])


def test_a_chat_chooses_once_it_is_too_long():
    net, held = shared(), []
    with limited(net, 189):
        for turns in (1, 2):
            _, cache = written(net, TURNS[:turns], 20)
            held.append(max(int(layer.counts.max()) for layer in cache.layers))
        assert kvevict.report(cache)["reach"][0].startswith("chosen slots: a token would read")
    assert held == [169, 24 + 19]


@pytest.mark.parametrize("lengths", [(150,), (100, 60), (10, 40)])
def test_slots_are_stored_once(lengths):
    """A layer's slots are the archive's own, but those written since."""
    net = shared()
    with kvevict.evicting(net, **RECALLS):
        cache = None
        for seed, length in enumerate(lengths):
            more = {} if cache is None else {CACHE: cache}
            cache = net(prompt(1, length, seed=seed)["input_ids"], **more, logits_to_keep=1).past_key_values
            net(torch.tensor([[5]]), **{CACHE: cache})
        for layer, archive in zip(cache.layers, cache.tiers.every.values(), strict=True):
            assert layer.storage.prefix.gathered().k.data_ptr() == archive.gathered().k.data_ptr()
            assert layer.storage.counts.tolist() == [[1, 1]]


def test_what_a_token_reads_equals_the_plans():
    """Of experts the chosen ones, and of an embedding a row."""
    for family in ("llama", "gemma3", "mixtral", "qwen3_moe"):
        net = model(family)
        decoder, shape = find_decoder(net), shape_of(net.config, "float32")
        sizes, layers = sizes_of(decoder, "model"), shape.windows.count(None)
        assert sizes.slot == layers * shape.slot_bytes
        weights = 4 * (min(shape.products, shape.layer_weights) + shape.head_weights)
        assert weights <= sizes.weights < 1.01 * weights, family


@pytest.mark.parametrize("options, near, tokens, every, why", [
    ({}, True, 4, True, "all slots: a token reads 4 MiB of the archive beside 4 of weights"),
    ({}, True, 5, False, "chosen slots: a token would read 5 MiB of the archive beside 4 of weights"),
    ({}, True, 12500, False, "chosen slots: a token would read 12,500 MiB of the archive beside 4 of weights"),
    ({}, False, 1, False, "chosen slots: the archive is not in the memory of the model's device"),
    (dict(recall_slots=1.0), True, 9, False, "all slots: recall_slots=1.0 was given"),
    (dict(recall_slots=99), True, 1, False, "chosen slots: recall_slots=99 was given"),
    (dict(recall_after=0), True, 1, False, "chosen slots: recall_after=0 was given"),
    (dict(decode=True), True, 1, False, "chosen slots: decode=True evicts while an answer is written"),
])  # fmt: skip
def test_the_rule(options, near, tokens, every, why):
    sizes = Sizes(MEBIBYTE, 4 * MEBIBYTE)
    assert reach(build("snapkv", budget=64, recall=True, **options), near, tokens, sizes) == (every, why)


@pytest.mark.parametrize("place, said", [(True, "all slots"), ("memory", "all slots"), ("files", "chosen slots")])
def test_the_archives_place(place, said, tmp_path):
    net, place = shared(), str(tmp_path) if place == "files" else place
    with kvevict.evicting(net, **RECALLS | dict(recall=place)):
        cache = net(prompt(1, 90)["input_ids"], logits_to_keep=1).past_key_values
    assert [why.split(":")[0] for why in kvevict.report(cache)["reach"]] == [said]
    with kvevict.evicting(net, **RECALLS | dict(recall=False)):
        cache = net(prompt(1, 90)["input_ids"], logits_to_keep=1).past_key_values
    assert kvevict.report(cache)["reach"] is None
