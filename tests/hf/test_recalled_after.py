"""Recall with `recall_after`: an answer's first tokens attend to all slots; then their rows choose the turn's slots."""

import copy
import dataclasses

import pytest
import torch
import zoo
from recalling import OTHERS, SNAPKV, Heard, decoded
from tiny import byte_tokenizer, model, prompt, relative, shared

import kvevict
from kvevict.answering.answer import continued, rows_of
from kvevict.answering.batch import Batch, Pools
from kvevict.engine.memory.layer import EvictionLayer
from kvevict.models.compat import CACHE, cache_of
from kvevict.models.families import find_decoder
from kvevict.policy import kv
from kvevict.policy.building import build

N, WINDOW = 5, 16  # the answer's first tokens, and the prompt's last rows that choose with theirs
TOKENS = 5, 9, 2, 40, 17
AFTER = SNAPKV | dict(recall_after=N)

pytestmark = pytest.mark.usefixtures("no_grad")


def kept(cache):
    own = [layer for layer in cache.layers if isinstance(layer, EvictionLayer)]
    return [[[head.tolist() for head in row] for row in layer.positions()] for layer in own]


def asked(model, cache, turn, tokens=TOKENS):
    """The logits of a turn's last token and of those of an answer."""
    first = model(turn, **{CACHE: cache}, logits_to_keep=1, use_cache=True).logits
    each = [decoded(model, cache, (token,)).logits for token in tokens]
    return torch.cat([first, *each], 1)


def over_all(model, cache, turn, tokens=TOKENS):
    """The same over the slots of all tokens."""
    with kvevict.evicting(model, **SNAPKV | dict(budget=4096)):
        return asked(model, cache.recalled(), turn, tokens)


@pytest.fixture(scope="module")
def read():
    """What the layers attend with while a text is read, and its cache."""
    with torch.no_grad(), kvevict.evicting(shared(), **AFTER), Heard() as heard:
        return heard, shared()(prompt(1, 150)["input_ids"], logits_to_keep=1).past_key_values


@pytest.mark.parametrize("length, seed", [(20, 1), (9, 1), (20, 3), (1, 2)])
def test_rows_of_an_answer_choose_from_all_tokens(length, seed, read):
    """The best of all tokens by these rows and the turn's last ones, in float64; until then all are attended to."""
    model, (before, text), turn = shared(), read, prompt(1, max(length, 2), seed=seed)["input_ids"]
    length, total = turn.shape[1], 150 + turn.shape[1] + N
    cache = text.fork()
    lost = [set(range(150)) - set(text.tiers.kept(at).positions()[0][0].tolist()) for at in range(len(text.layers))]
    with kvevict.evicting(model, **AFTER), Heard() as heard:
        logits = asked(model, cache, turn)
    assert torch.equal(logits, over_all(model, text, turn))
    back = 0
    for at, layer in enumerate(cache.layers):
        rows = min(WINDOW, length) + N
        q, k = heard.all(at, 0)[0, :, -rows:].double(), torch.cat([before.all(at, 1), heard.all(at, 1)], 2)[0].double()
        k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
        hidden = torch.arange(total) > torch.arange(total - rows, total)[:, None]
        weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        number = weights.sum(1).unflatten(0, (2, -1)).mean(1)
        number[:, -SNAPKV["window"] - N :] = torch.inf
        for h in range(2):
            now = set(layer.positions()[0][h].tolist())
            best = number[h].topk(24 + N)
            assert len(now) == 24 + N
            assert now == set(best.indices.tolist()) or number[h, list(now)].min() >= best.values.min() - 1e-6
            back += len(now & lost[at])
    assert back > 10


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_answer_that_ends_before_has_what_its_prompt_chose(count, read):
    """When the next turn begins, when another policy decodes, or when it joins others; no token is lost."""
    model, (_, text) = shared(), read
    turn, more, tokens = prompt(1, 20, seed=1)["input_ids"], prompt(1, 9, seed=2)["input_ids"], TOKENS[:count]
    with kvevict.evicting(model, **SNAPKV):
        plain = text.fork()
        asked(model, plain, turn, tokens)
    with kvevict.evicting(model, **AFTER):
        caches = [text.fork() for _ in range(4)]
        for cache in caches:
            asked(model, cache, turn, tokens)
            assert cache.tiers.awaits
        one, other, joined, last = caches
        batch = Batch(model, ["other"], text.fork())
        batch.add("this", joined)
        assert not batch.cache.tiers.awaits and kept(batch.remove("this")) == kept(plain)
        every = last.recalled()
        asked(model, one, more)
        assert kvevict.report(one)["recalled"] is not None
    with kvevict.evicting(model, **SNAPKV | dict(budget=4096)):
        want = asked(model, every, more)
    with kvevict.evicting(model, **AFTER):
        assert torch.equal(asked(model, last, more), want)
    with kvevict.evicting(model, **SNAPKV | dict(kernel=3)):
        decoded(model, other, (7,))
        decoded(model, plain, (7,))
    assert kept(other) == kept(plain)


def test_a_first_cut_in_place():
    """Slots of a conversation that fitted until now are cut in place, beside the counts of decoded tokens."""
    model, more = shared(), prompt(1, 30, seed=1)["input_ids"]
    found = []
    for options in (SNAPKV, AFTER):
        with kvevict.evicting(model, **options):
            cache = model(prompt(1, 24)["input_ids"], logits_to_keep=1, use_cache=True).past_key_values
            decoded(model, cache, TOKENS[:2])
            asked(model, cache, more, TOKENS[:1])
            cache.tiers.settle()
            found.append(kept(cache))
    assert found[0] == found[1] and {len(head) for layer in found[1] for head in layer[0]} == {25}


@pytest.mark.parametrize("kind", [None, "int8"])
@pytest.mark.parametrize("name", ["take+edie", "adakv", "chunkkv", "cake", "snapkv"])
def test_questions_of_different_lengths_are_as_alone(name, kind):
    """Rows of a batch, padded at the left; each layer has as many slots as without `recall_after`."""
    model, ids = shared(), prompt(1, 150)["input_ids"]
    turns = [prompt(1, n, seed=n)["input_ids"][0].tolist() for n in (9, 40, 23)]
    options = dict(policy=name, budget=48, chunk_size=64, recall=True, recall_kv=kind, tokenizer=False)
    with kvevict.evicting(model, **options, recall_after=N):
        cache = model(ids, logits_to_keep=1).past_key_values
        batch = rows_of(cache, len(turns))
        logits = continued(model, batch, turns)
        fork = cache.fork()
        asked(model, fork, torch.tensor(turns[:1]), TOKENS[:2])
        assert all(layer.storage.prefix is not None for layer in fork.layers)  # read where the archive lies
        steps = Batch(model, [*turns], batch)
        rows = torch.cat([logits, *(steps.step([token] * 3)[:, None] for token in TOKENS)], 1)
        for row, turn in enumerate(turns):
            alone = cache.fork()
            torch.testing.assert_close(rows[row], asked(model, alone, torch.tensor([turn]))[0], rtol=1e-4, atol=1e-4)
            assert [layer[row] for layer in kept(batch)] == [layer[0] for layer in kept(alone)]
            with kvevict.evicting(model, **options, recall_after=0):
                plain = cache.fork()
                asked(model, plain, torch.tensor([turn]))
            counts = [[layer.counts.sum() for layer in each.layers] for each in (plain, alone)]
            assert counts[0] == counts[1] and kept(plain) != kept(alone)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("name", ["snapkv", "take+edie", "int8", "adakv"])
def test_answers_join_others_and_choose_as_alone(name, pooled):
    """Questions about one text join a batch one after the other, while some answers attend to all slots and some have
    chosen; rows leave in another order."""
    model, most = shared(), 2e-2 if name == "int8" else 1e-4
    options = dict(budget=48, chunk_size=64, recall=True, recall_after=N, tokenizer=False)
    options |= dict(policy="snapkv", kv="int8") if name == "int8" else dict(policy=name)
    with kvevict.evicting(model, **options):
        pools = Pools(find_decoder(model), 8192) if pooled else None
        cache = {} if pools is None else {CACHE: pools.cache()}
        text = model(prompt(1, 150)["input_ids"], **cache, logits_to_keep=1).past_key_values
        batch, alone, joins = Batch(model), {}, {0: 0, 2: 1, 4: 2, 9: 3}
        for step in range(18):
            if step in joins:
                row, mine = joins[step], text.fork()
                model(prompt(1, 12 + row, seed=row + 1)["input_ids"], **{CACHE: mine}, logits_to_keep=1)
                mine.tiers.end()  # as the server does: no turn follows
                assert mine.tiers.awaits
                alone[row] = copy.deepcopy(mine)
                batch.add(row, mine)
            if step == 14:
                left = batch.remove(1)
                assert kept(left) == kept(alone[1])
            tokens = [5 + step + 7 * row for row in batch.rows]
            for row, token, logits in zip(batch.rows, tokens, batch.step(tokens), strict=True):
                assert relative(logits, decoded(model, alone[row], (token,)).logits[0, -1]) < most
            since, each = batch.cache.tiers.since.tolist(), [alone[row].tiers.since.tolist() for row in batch.rows]
            assert since == ([one[0] if one else -1 for one in each] if any(each) else [])
        assert kept(batch.cache) == [
            [row for one in layers for row in one] for layers in zip(*(kept(alone[row]) for row in batch.rows))
        ]
        assert all(layer.storage.prefix is None for layer in batch.cache.layers)  # the text's memory may be free


def test_a_batch_where_some_have_chosen_is_settled():
    """A row with an archive joins: the answer that still attends to all slots has what its prompt chose."""
    model, turn = shared(), prompt(1, 20, seed=1)["input_ids"]
    with kvevict.evicting(model, **AFTER):
        text = model(prompt(1, 150)["input_ids"], logits_to_keep=1).past_key_values
        batch, caches = Batch(model), [text.fork() for _ in range(3)]
        for cache in caches:
            model(turn, **{CACHE: cache}, logits_to_keep=1)
        for cache in caches[:2]:
            cache.tiers.end()
        twin, chosen = (copy.deepcopy(cache) for cache in caches[:2])
        batch.add("chosen", caches[1])
        for token in TOKENS:
            batch.step([token])
            decoded(model, chosen, (token,))
        batch.add("awaits", caches[0])
        batch.step([3, 4])
        decoded(model, chosen, (3,))
        decoded(model, twin, (4,))
        assert batch.cache.tiers.since.tolist() == [-1, 1]
        batch.add("archive", caches[2])
        assert not batch.cache.tiers.awaits
        twin.tiers.settle()
        for row, one in (("awaits", twin), ("chosen", chosen)):
            assert kept(batch.remove(row)) == kept(one)


def test_forks_copies_beams_and_crops_go_on_alike(read):
    model, (_, text), turn = shared(), read, prompt(1, 20, seed=1)["input_ids"]
    with kvevict.evicting(model, **AFTER):
        cache = text.fork()
        want = asked(model, cache, turn)[:, -3:]
        begun = text.fork()
        asked(model, begun, turn, TOKENS[:2])
        others = [begun.fork(), copy.deepcopy(begun), begun.fork(), begun.fork()]
        others[2].batch_repeat_interleave(2)
        others[2].reorder_cache(torch.tensor([1, 0]))
        decoded(model, others[3], (1, 2))
        others[3].crop(-2)
        for each in (begun, *others):
            got = torch.cat([decoded(model, each, (token,)).logits for token in TOKENS[2:]], 1)
            assert relative(got[:1], want) < 1e-5
            assert [layer[0] for layer in kept(each)] == [layer[0] for layer in kept(cache)]
        cache.crop(-N)  # the answer's tokens are all there
        assert {len(head) for layer in kept(cache) for row in layer for head in row} == {24}
        assert decoded(model, cache, TOKENS).logits.isfinite().all()


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_files(kind, tmp_path):
    """A file has all tokens' slots, an answer's too; a turn after it chooses as one after a cache in memory."""
    model, turn = shared(), prompt(1, 20, seed=1)["input_ids"]
    with kvevict.evicting(model, **AFTER, recall_kv=kind):
        text = model(prompt(1, 150)["input_ids"], logits_to_keep=1).past_key_values
        cache = text.fork()
        asked(model, cache, turn, TOKENS[:2])
        for each in (text, cache):
            kvevict.save_cache(each, tmp_path / "cache")
            loaded = kvevict.load_cache(tmp_path / "cache", model)
            assert loaded.layers[0].counts.tolist() == [[each.get_seq_length()] * 2]
            mine = each.fork()
            assert torch.equal(asked(model, loaded, turn), asked(model, mine, turn))
            assert kept(loaded) == kept(mine)
            assert {layer.storage.kinds for layer in loaded.layers} == {kv.KINDS["model"]}


def test_a_prompt_that_is_known():
    """Its answer attends to all; and a text that loses nothing waits for none."""
    model, ids = shared(), prompt(1, 150)["input_ids"]
    with kvevict.evicting(model, **AFTER):
        tokens = model.generate(ids, max_new_tokens=N, do_sample=False)
        cache = model(ids, logits_to_keep=1, use_cache=True).past_key_values
        whole = over_all(model, cache.recalled(), ids[:, :2])
        assert whole.isfinite().all()
        every, written = cache.recalled(), [tokens[0, 150].item()]
    with kvevict.evicting(model, **SNAPKV | dict(budget=4096)):
        for _ in range(N - 1):
            written.append(decoded(model, every, written[-1:]).logits[0, -1].argmax().item())
    assert written == tokens[0, 150:].tolist()
    with kvevict.evicting(model, **AFTER):
        assert not model(ids[:, :20], logits_to_keep=1, use_cache=True).past_key_values.tiers.awaits


@pytest.mark.parametrize("options", [{}, dict(do_sample=True, temperature=0.7), dict(num_beams=3)])
@pytest.mark.parametrize("compiled", [False, True])
def test_generate(options, compiled):
    """Tokens are those of a cache that lost nothing, as long as the first ones; recorded ones follow."""
    model, ids, found = shared(), prompt(2, 90)["input_ids"], []
    for policy in (AFTER | dict(compiled=compiled), SNAPKV | dict(budget=4096)):
        with kvevict.evicting(model, **policy | dict(chunk_size=None)):
            torch.manual_seed(0)
            found.append(model.generate(ids, max_new_tokens=N + 9, eos_token_id=None, **options)[:, 90:])
    assert torch.equal(found[0][:, :N], found[1][:, :N]) or options == dict(num_beams=3)
    assert found[0].shape == (2, N + 9)


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_recorded_tokens_follow(kind):
    """And are those of an answer that is not recorded."""
    made, ids, found = model(), prompt(1, 90)["input_ids"], []  # one without hooks
    for compiled in (False, True):
        with kvevict.evicting(made, **AFTER | dict(compiled=compiled, recall_kv=kind)):
            found.append(made.generate(ids, max_new_tokens=N + 25, eos_token_id=None, do_sample=False)[0, 90:])
            assert (kvevict.report(made)["replayed"] > 10) == compiled
    assert torch.equal(*found)


@pytest.mark.parametrize("name, kind", [pytest.param(*each, id=each[0]) for each in zoo.types() if each[0] in OTHERS])
def test_other_models(name, kind):
    """Windows, states and latents beside or in place of slots."""
    model, counts = zoo.make(name, kind), []
    ids, turn = prompt(1, 90)["input_ids"], prompt(1, 20, seed=1)["input_ids"]
    for options in (SNAPKV, AFTER):
        with kvevict.evicting(model, **options):
            cache = cache_of(model(ids, logits_to_keep=1, use_cache=True))
            every = asked(model, cache.recalled(), turn, ())
            logits = asked(model, cache, turn)
            assert relative(logits[:, :1], every) < 1e-4 and logits.isfinite().all()
            counts.append([[list(map(len, row)) for row in layer] for layer in kept(cache)])
    assert counts[0] == counts[1]


def test_a_text_that_is_asked_later_awaits_no_answer():
    net, tokenizer = model(vocab_size=259, bos_token_id=None, pad_token_id=None), byte_tokenizer()
    cache = kvevict.read(net, tokenizer, "The lantern is lit at nine. " * 20, **AFTER)
    assert not cache.tiers.awaits and cache.layers[0].counts.tolist() == [[24, 24]]
    with kvevict.evicting(net, **AFTER):
        more = cache.fork()
        net(torch.tensor([tokenizer("When is it lit?").input_ids]), **{CACHE: more})
    assert more.tiers.awaits


def test_refusals():
    for options, kind, said in (
        (dict(recall_after=4), ValueError, "recall=True too"),
        (dict(recall_after=-1, recall=True), ValueError, "recall_after"),
        (dict(recall_after=1.5, recall=True), TypeError, "recall_after"),
        (dict(recall_after=4, recall=True, policy="laq"), ValueError, "recall_after=4: .*drafts"),
        (dict(recall_after=4, recall=True, policy="take"), ValueError, "recall_after=4: layers take another layer's"),
        (dict(recall_after=4, recall=True, decode=True), ValueError, "recall_after=4: with decode=True"),
    ):
        with pytest.raises(kind, match=said):
            build(**dict(policy="snapkv", budget=64) | options)


def test_the_default():
    """Of a policy that is changed, too."""
    for options, after in (
        (dict(recall=True), 16), (dict(recall=True, policy="take+edie"), 16), (dict(), 0),
        (dict(recall=True, policy="laq"), 0), (dict(recall=True, policy="take"), 0),
        (dict(recall=True, decode=True), 0), (dict(recall=True, recall_after=3), 3),
    ):  # fmt: skip
        assert build(**dict(policy="snapkv", budget=64) | options).answered == after
    assert dataclasses.replace(build("snapkv", budget=16, window=4), recall=True).answered == 16
