"""Recall with `recall_drafts`: rows that are drafted over the slots of all tokens choose a turn's slots."""

import dataclasses

import pytest
import torch
import zoo
from recalling import OTHERS, SNAPKV, Heard, decoded
from tiny import byte_tokenizer, model, prompt, shared

import kvevict
from kvevict.answer import continued, rows_of
from kvevict.compat import CACHE, cache_of
from kvevict.engine.slots.cache import EvictionLayer
from kvevict.families import find_decoder
from kvevict.policy.rows.drafted import end_tokens

N, WINDOW = 5, 16  # drafted tokens, and the prompt's last rows that observe with them
END = 63
DRAFTS = SNAPKV | dict(recall_drafts=N)

pytestmark = pytest.mark.usefixtures("no_grad")


def kept(cache):
    own = [layer for layer in cache.layers if isinstance(layer, EvictionLayer)]
    return [[[head.tolist() for head in row] for row in layer.positions()] for layer in own]


def written(model, cache, turn):
    """The logits after a turn [1, S] over all slots, and the N tokens that follow greedily."""
    with kvevict.evicting(model, **DRAFTS | dict(budget=4096, recall_drafts=0)):
        logits = out = model(turn, **{CACHE: cache}, logits_to_keep=1).logits
        drafts = []
        for _ in range(N):
            drafts.append(out[0, -1].argmax().item())
            out = model(torch.tensor([drafts[-1:]]), **{CACHE: cache}).logits
    return logits, drafts


@pytest.fixture
def ends(monkeypatch):
    """A token that the shared model writes often ends its answers."""
    monkeypatch.setattr(shared().generation_config, "eos_token_id", END)


@pytest.mark.parametrize("turn, seed, count", [(20, 1, 1), (9, 1, 1), (20, 3, 2), (20, 7, 1), (20, 4, N)])
def test_drafted_rows_choose_from_all_tokens(turn, seed, count, ends):
    """The best of all tokens by the drafted rows and the turn's last ones, in float64; the drafts are what the model
    writes greedily over all slots, before an end of sequence."""
    model, total = shared(), 150 + turn
    ids, more = prompt(1, 150)["input_ids"], prompt(1, turn, seed=seed)["input_ids"]
    with kvevict.evicting(model, **DRAFTS):
        with Heard() as before:
            cache = model(ids, logits_to_keep=1).past_key_values
        lost = [set(range(150)) - set(layer.positions()[0][0].tolist()) for layer in cache.layers]
        every = cache.recalled()
    with Heard() as free:
        expected, drafts = written(model, every, more)
    assert count == max(1, [*drafts, END].index(END))
    with kvevict.evicting(model, **DRAFTS), Heard() as heard:
        assert torch.equal(model(more, **{CACHE: cache}, logits_to_keep=1).logits, expected)
    back = 0
    for at, layer in enumerate(cache.layers):
        assert len(heard.calls[at]) == 1 + count
        own, drafted = heard.calls[at][0], torch.cat([call[0] for call in heard.calls[at][1:]], 2)
        alone = torch.cat([call[0] for call in free.calls[at][1 : 1 + count]], 2)
        torch.testing.assert_close(drafted, alone, rtol=1e-4, atol=1e-5)
        window = min(WINDOW, turn)
        q = torch.cat([own[0][:, :, -window:], drafted], 2)[0].double()
        k = torch.cat([before.all(at, 1)[:, :, :150], own[1]], 2)[0].double()  # without that read's drafts
        k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
        sees = torch.arange(total) <= torch.tensor([*range(total - window, total), *[total] * count])[:, None]
        weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~sees, -torch.inf).softmax(-1)
        number = weights.sum(1).unflatten(0, (2, -1)).mean(1)
        number[:, -SNAPKV["window"] :] = torch.inf
        for h in range(2):
            now = set(layer.positions()[0][h].tolist())
            best = number[h].topk(24)
            assert len(now) == 24
            assert now == set(best.indices.tolist()) or number[h, list(now)].min() >= best.values.min() - 1e-6
            back += len(now & lost[at])
    assert back > 10


def test_drafts_follow_the_prompt_where_a_question_is_appended():
    """A question that is not at the turn's end observes in rows after it, which are not stored."""
    model, turn = shared(), prompt(1, 20, seed=1)["input_ids"]
    options = dict(policy="take+edie", budget=40, probe=(0, 6), chunk_size=64, recall=True, tokenizer=False)
    with kvevict.evicting(model, **options, recall_drafts=N):
        cache = model(prompt(1, 150)["input_ids"], logits_to_keep=1).past_key_values
        every = cache.recalled()
    with Heard() as free:
        written(model, every, turn)
    with kvevict.evicting(model, **options, recall_drafts=N), Heard() as heard:
        model(turn, **{CACHE: cache}, logits_to_keep=1)
    for at in range(4):
        drafted, alone = (torch.cat([call[0] for call in calls[at][1:]], 2) for calls in (heard.calls, free.calls))
        torch.testing.assert_close(drafted, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, dict(budget=40, recall_slots=20)], ids=["", "recall_slots"])
def test_a_loaded_cache_drafts(options, tmp_path):
    """Its layers have the slots of all tokens until a turn chooses as it does from a cache in memory."""
    model, turn = shared(), prompt(1, 20, seed=1)["input_ids"]
    with kvevict.evicting(model, **DRAFTS | options):
        cache = model(prompt(1, 150)["input_ids"], logits_to_keep=1).past_key_values
        kvevict.save_cache(cache, tmp_path / "cache")
        both = [cache, kvevict.load_cache(tmp_path / "cache", model)]
        for each in both:
            model(turn, **{CACHE: each}, logits_to_keep=1)
    assert kept(both[0]) == kept(both[1])


@pytest.mark.parametrize("name", ["take+edie", "adakv", "chunkkv", "cake", "snapkv"])
def test_questions_of_different_lengths_are_as_alone(name):
    """Rows of a batch, padded at the left; each layer has as many slots as without drafts, and decoding goes on."""
    model, ids = shared(), prompt(1, 150)["input_ids"]
    turns = [prompt(1, n, seed=n)["input_ids"][0].tolist() for n in (9, 40, 23)]
    options = dict(policy=name, budget=48, chunk_size=64, recall=True, tokenizer=False)
    with kvevict.evicting(model, **options, recall_drafts=N):
        cache = model(ids, logits_to_keep=1).past_key_values
        alone = as_alone(model, cache, turns)
    with kvevict.evicting(model, **options, recall_drafts=0):
        for turn, drafted in zip(turns, alone, strict=True):
            plain = cache.fork()
            model(torch.tensor([turn]), **{CACHE: plain}, logits_to_keep=1)
            counts = [layer.counts.sum() for layer in plain.layers], [layer.counts.sum() for layer in drafted.layers]
            assert counts[0] == counts[1] and kept(plain) != kept(drafted)
            assert plain.sequence.columns == drafted.sequence.columns
            decoded(model, drafted)


def test_drafts_of_a_batch_end_apart(ends):
    model, turns = (
        shared(),
        [prompt(1, n, seed=seed)["input_ids"][0].tolist() for n, seed in ((9, 0), (40, 8), (23, 2))],
    )
    with kvevict.evicting(model, **DRAFTS):
        cache = model(prompt(1, 150)["input_ids"], logits_to_keep=1).past_key_values
        counts = [max(1, [*written(model, cache.recalled(), torch.tensor([t]))[1], END].index(END)) for t in turns]
        assert counts == [1, 3, N]
        as_alone(model, cache, turns)


def as_alone(model, cache, turns):
    """Forks of a cache, each after its turn, whose slots are those of the turns in one batch."""
    batch, alone = rows_of(cache, len(turns)), []
    logits = continued(model, batch, turns)
    for row, turn in enumerate(turns):
        alone.append(cache.fork())
        out = model(torch.tensor([turn]), **{CACHE: alone[-1]}, logits_to_keep=1).logits
        torch.testing.assert_close(logits[row, -1], out[0, -1], rtol=1e-4, atol=1e-4)
        assert [layer[row] for layer in kept(batch)] == [layer[0] for layer in kept(alone[-1])]
    return alone


def test_a_prompt_that_is_known_drafts_at_its_end():
    """Read in chunks; and a text that loses nothing drafts nothing."""
    model, found = shared(), []
    for drafts in (0, N):
        with kvevict.evicting(model, **SNAPKV | dict(recall_drafts=drafts)), Heard() as heard:
            found.append(kept(cache_of(model(prompt(2, 150)["input_ids"], logits_to_keep=1, use_cache=True))))
            calls = len(heard.calls[0])
        assert calls == 5 + drafts
    assert found[0] != found[1]
    with kvevict.evicting(model, **DRAFTS), Heard() as heard:
        model(prompt(2, 20)["input_ids"], logits_to_keep=1)
    assert len(heard.calls[0]) == 1


@pytest.mark.parametrize("name, kind", [pytest.param(*each, id=each[0]) for each in zoo.types() if each[0] in OTHERS])
def test_other_models(name, kind):
    """Windows, states and latents beside or in place of slots: the turn's logits are as without drafts, and slots come
    back."""
    model = zoo.make(name, kind)
    ids, turn, found = prompt(1, 90)["input_ids"], prompt(1, 20, seed=1)["input_ids"], []
    for options in (SNAPKV, DRAFTS):
        with kvevict.evicting(model, **options):
            cache = cache_of(model(ids, logits_to_keep=1, use_cache=True))
            out = model(turn, **{CACHE: cache}, logits_to_keep=1, use_cache=True).logits
            found.append((out, kept(cache), model(turn[:, :1], **{CACHE: cache}, use_cache=True).logits))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] != found[1][1] and found[1][2].isfinite().all()
    assert [list(map(len, layer[0])) for layer in found[0][1]] == [list(map(len, layer[0])) for layer in found[1][1]]


def test_a_text_that_is_asked_later_drafts_nothing():
    net, tokenizer = model(vocab_size=259, bos_token_id=None, pad_token_id=None), byte_tokenizer()
    with Heard() as heard:
        cache = kvevict.read(net, tokenizer, "The lantern is lit at nine. " * 20, **DRAFTS)
    assert len(heard.calls[0]) == -(-560 // 32)
    with Heard() as heard:
        kvevict.answer(net, tokenizer, cache, ["When is the lantern lit?"], max_new_tokens=1)
    assert len(heard.calls[0]) == 1 + N


def test_a_decoder_without_a_head_drafts_nothing():
    decoder = find_decoder(shared())
    with kvevict.evicting(decoder, **DRAFTS), Heard() as heard:
        decoder(prompt(1, 150)["input_ids"])
    assert len(heard.calls[0]) == 5


def test_the_tokens_that_end_a_draft(monkeypatch):
    """In each form that Transformers takes."""
    for given, found in ((None, []), (7, [7]), ([7, 8], [7, 8]), ((7, 8), [7, 8]), (torch.tensor([7, 8]), [7, 8])):
        monkeypatch.setattr(shared().generation_config, "eos_token_id", given)
        assert end_tokens(shared()) == found


def test_refusals():
    for options, kind, said in (
        (dict(recall_drafts=4), ValueError, "recall=True too"),
        (dict(recall_drafts=-1, recall=True), ValueError, "recall_drafts"),
        (dict(recall_drafts=1.5, recall=True), TypeError, "recall_drafts"),
        (dict(recall_drafts=4, recall=True, policy="laq"), ValueError, "drafts, or repeats the prompt, already"),
        (dict(recall_drafts=4, recall=True, policy="take"), ValueError, "take another layer's slots"),
        (dict(recall_drafts=4, recall=True, budget=16, window=4), ValueError, "too small"),
    ):
        with pytest.raises(kind, match=said):
            kvevict.policy.build(**dict(policy="snapkv", budget=64) | options)


def test_policies_that_can_draft_do():
    for options, drafts in (
        (dict(recall=True), 8), (dict(recall=True, policy="take+edie"), 8), (dict(), 0),
        (dict(recall=True, policy="laq"), 0), (dict(recall=True, policy="take"), 0),
        (dict(recall=True, window=4, budget=16), 0),
    ):  # fmt: skip
        assert drafted(kvevict.policy.build(**dict(policy="snapkv", budget=64) | options)) == drafts


def test_a_policy_that_is_changed_drafts_if_it_then_can():
    """As one that was made so."""
    bare = kvevict.policy.build("snapkv", budget=16, window=4)
    few = dataclasses.replace(bare, recall=True)
    assert [drafted(bare), drafted(few), drafted(kvevict.policy.build(few, budget=64))] == [0, 0, 8]
    assert drafted(kvevict.policy.build("snapkv", budget="20KiB", window=4, recall=True).in_slots(1024)) == 8
    assert drafted(kvevict.policy.build("snapkv", budget="16KiB", window=4, recall=True).in_slots(1024)) == 0


def drafted(policy):
    return policy.redrafting.rows.n_d if policy.redrafting else 0
