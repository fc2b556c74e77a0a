"""Recall: every token's slots go to an archive, and a further turn chooses its slots anew from all of them."""

import copy
from itertools import chain
from unittest import mock

import pytest
import torch
import zoo
from recalling import IN_8_BITS, OTHERS, PACKED, POLICIES, SNAPKV, Heard, decoded, every, ours, padded
from tiny import prompt, relative, shared
from transformers import DynamicCache

import kvevict
from kvevict.answering.batch import Batch, Pools
from kvevict.engine.hook import attention as hook
from kvevict.engine.memory.joining import join
from kvevict.engine.memory.stateful import tensors_of
from kvevict.engine.memory.storage import Storage
from kvevict.engine.read.budgets import places
from kvevict.lab.analysis.cost import plan
from kvevict.lab.analysis.shape import shape_of
from kvevict.models.compat import CACHE, cache_of
from kvevict.models.families import find_decoder
from kvevict.policy import kv
from kvevict.policy.building import choose
from kvevict.store import sealed

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize("name", POLICIES)
def test_the_archive_has_every_token(name):
    """As the chunk computed it, bit by bit where it is not packed; decoded tokens when the next turn begins."""
    model = shared()
    with kvevict.evicting(model, **POLICIES[name]), Heard() as heard:
        cache = model(prompt(2, 90)["input_ids"], logits_to_keep=1).past_key_values
        decoded(model, cache)
        model(prompt(2, 40, seed=1)["input_ids"], **{CACHE: cache}, logits_to_keep=1)
        decoded(model, cache)
        model(prompt(2, 5, seed=2)["input_ids"], **{CACHE: cache}, logits_to_keep=1)
    total = 90 + 3 + 40 + 3 + 5
    for at, archive in enumerate(every(cache)):
        archive = archive.gathered()
        assert archive.total_counts.tolist() == archive.len.tolist() == [[total] * 2] * 2
        assert all(head.tolist() == list(range(total)) for row in archive.positions() for head in row)
        if name == "laq":  # drafted rows were heard, too
            continue
        for part, got in ((1, archive.dense("k")), (2, archive.dense("v"))):
            want = heard.all(at, part)
            assert torch.equal(got, want) if name not in PACKED else relative(got, want) < 0.02
        assert sum(int(cache.tiers.kept(at).total_counts.sum()) for at in range(4)) <= 4 * 2 * 2 * (24 + 6)


@pytest.mark.parametrize("kind", [None, "int8", "k8v4", "int4"])
def test_a_turn_keeps_what_its_rows_choose_from_all_tokens(kind):
    """The best of all tokens by the turn's last rows, in float64, where most of them had been evicted. Those of an
    archive of few bits have the numbers that it holds, and are slots as computed from there on."""
    model = shared()
    with kvevict.evicting(model, **SNAPKV, recall_kv=kind):
        with Heard() as before:
            cache = model(prompt(1, 150)["input_ids"], logits_to_keep=1).past_key_values
        lost = [set(range(150)) - set(layer.positions()[0][0].tolist()) for layer in cache.layers]
        with Heard() as turn:
            model(prompt(1, 20, seed=1)["input_ids"], **{CACHE: cache}, logits_to_keep=1)
    back = 0
    for at, layer in enumerate(cache.layers):
        q = turn.all(at, 0)[0, :, -4:].double()
        k = torch.cat([before.all(at, 1), turn.all(at, 1)], 2)[0].double()
        if kind is not None:
            archive = every(cache)[at]
            assert archive.kinds == kv.KINDS[kind] and layer.storage.kinds == kv.KINDS["model"]
            for name in "kv":
                held, whole = layer.storage.dense(name)[0], archive.dense(name)[0]
                for h in range(2):
                    pos = layer.positions()[0][h].long()
                    assert relative(held[h, pos < 150], whole[h, pos[pos < 150]]) < 1e-6
                    assert torch.equal(
                        held[h, pos >= 150], turn.all(at, "qkv".index(name))[0, h, pos[pos >= 150] - 150]
                    )
            k[:, :150] = archive.dense("k")[0, :, :150].double()
        k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
        hidden = torch.arange(170) > torch.arange(166, 170)[:, None]
        weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        number = weights.sum(1).unflatten(0, (2, -1)).mean(1)
        number[:, -4:] = torch.inf
        for h in range(2):
            kept = set(layer.positions()[0][h].tolist())
            best = number[h].topk(24)
            assert kept == set(best.indices.tolist()) or number[h, list(kept)].min() >= best.values.min() - 1e-6
            back += len(kept & lost[at])
    assert back > 20


@pytest.mark.parametrize("name", POLICIES)
def test_with_room_for_all_tokens_nothing_changes(name):
    """Nor does a turn over the archive, where the slots before it were few, attend to anything but all of them."""
    model, ids, turn = shared(), prompt(1, 90)["input_ids"], prompt(1, 20, seed=1)["input_ids"]
    options, found = POLICIES[name] | dict(budget=4096), []
    for recall in (True, False):
        without = {} if recall else dict(recall=False, recall_after=0, recall_kv=None)
        with kvevict.evicting(model, **options | without):
            cache = model(ids, logits_to_keep=1).past_key_values
            decoded(model, cache)
            out = model(turn, **{CACHE: cache}, logits_to_keep=1).logits
            found.append(torch.cat([out, decoded(model, cache).logits]))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["snapkv", "one pass", "ada", "take+edie", IN_8_BITS])
def test_a_turn_chooses_fewer_slots_than_the_reading_kept(name):
    """A turn under `recall_slots` keeps what it keeps under a policy with that budget, after the same reading."""
    model, text, turn = shared(), prompt(1, 90)["input_ids"], prompt(1, 20, seed=1)["input_ids"]
    options = POLICIES[name] | dict(budget=40)
    with kvevict.evicting(model, **options):
        one = model(text, logits_to_keep=1).past_key_values
    assert sum(int(layer.counts.sum()) for layer in one.layers) == 4 * 2 * 40
    two = one.fork()
    for cache, asked in ((one, dict(recall_slots=16)), (two, dict(budget=16))):
        with kvevict.evicting(model, **options | asked):
            model(turn, **{CACHE: cache}, logits_to_keep=1)
            decoded(model, cache)
    assert sum(int(layer.counts.sum()) for layer in one.layers) == 4 * 2 * (16 + 3)
    assert [places(layer, False) for layer in one.layers] == [places(layer, False) for layer in two.layers]


def test_a_text_that_fits_is_not_cut_to_the_slots_of_a_turn():
    model = shared()
    with kvevict.evicting(model, **SNAPKV | dict(budget=40), recall_slots=16):
        cache = model(prompt(1, 35)["input_ids"], logits_to_keep=1).past_key_values
    assert [layer.counts.tolist() for layer in cache.layers] == [[[35, 35]]] * 4


def test_a_turn_keeps_more_slots_than_the_reading():
    """Read within the budget, asked with every slot: turns are those of a cache that has lost nothing."""
    model, every = shared(), dict(recall_slots=1.0, recall_after=3)
    with kvevict.evicting(model, **SNAPKV | every):
        one = model(prompt(1, 90)["input_ids"], logits_to_keep=1).past_key_values
    two = one.fork()
    for seed in (1, 2):
        turn, out = prompt(1, 20, seed=seed)["input_ids"], []
        for cache, options in ((one, every), (two, dict(budget=4096))):
            with kvevict.evicting(model, **SNAPKV | options):
                logits = model(turn, **{CACHE: cache}, logits_to_keep=1).logits
                out.append(torch.cat([logits, decoded(model, cache).logits]))
            assert [layer.counts.tolist() for layer in cache.layers] == [[[90 + 23 * seed] * 2]] * 4
        assert torch.equal(*out)
    with kvevict.evicting(model, **SNAPKV, recall_slots=100):
        model(turn, **{CACHE: one}, logits_to_keep=1)
    assert [layer.counts.tolist() for layer in one.layers] == [[[100, 100]]] * 4


@pytest.mark.parametrize("rows, protected, options", [(4, 4, {}), (1, 0, dict(window=None, rows="last"))])
def test_while_decoding_all_tokens_are_chosen_from(rows, protected, options):
    """With decode=True each eviction is among all tokens: the best by the last rows, in float64."""
    model, back = shared(), 0
    options = {name: value for name, value in (POLICIES["decode"] | options).items() if value is not None}
    with kvevict.evicting(model, **options), Heard() as heard:
        cache = model(prompt(1, 90)["input_ids"], logits_to_keep=1).past_key_values
        for step in range(9):
            before = [set(layer.positions()[0][0].tolist()) for layer in cache.layers]
            sizes = [layer.counts.copy() for layer in cache.layers]
            decoded(model, cache, [5 + 7 * step])
            for at, layer in enumerate(cache.layers):
                if (layer.counts > sizes[at]).all():
                    continue
                q = heard.all(at, 0)[0, :, -min(rows, step + 1) :].double()
                k = heard.all(at, 1)[0].double().repeat_interleave(2, 0)
                tokens = k.shape[1]
                hidden = torch.arange(tokens) > torch.arange(tokens - q.shape[1], tokens)[:, None]
                weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1)
                number = weights.sum(1).unflatten(0, (2, -1)).mean(1)
                number[:, tokens - protected :] = torch.inf
                for h in range(2):
                    now = layer.positions()[0][h].tolist()
                    assert len(now) == 24
                    assert number[h, now].min() >= number[h].topk(24).values.min() - 1e-6
                back += len(set(layer.positions()[0][0].tolist()) - before[at] - {tokens - 1})
    assert back > 5


def test_the_turn_itself_attends_to_all_tokens():
    """Its logits are those over the archive's keys and values, in float64."""
    model, ids, turn = shared(), prompt(1, 90)["input_ids"], prompt(1, 20, seed=1)["input_ids"]
    with kvevict.evicting(model, **SNAPKV), Heard() as heard:
        cache = model(ids, logits_to_keep=1).past_key_values
        outs = []
        attend = hook.attend

        def noted(seen):
            attend(seen)
            outs.append(seen)

        with mock.patch.object(hook, "attend", noted):
            model(turn, **{CACHE: cache}, logits_to_keep=1)
    for at, seen in enumerate(outs):
        q, k, v = (heard.all(at, part)[0].double() for part in range(3))
        q, k, v = q[:, -20:], *(x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        hidden = torch.arange(110) > torch.arange(90, 110)[:, None]
        want = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v
        assert relative(seen.out[0].transpose(0, 1).double(), want) < 1e-5


@pytest.mark.parametrize("name", POLICIES)
def test_forks_copies_rows_and_crops(name):
    """Each goes on as the cache itself would."""
    model, options, turn = shared(), POLICIES[name], prompt(1, 20, seed=1)["input_ids"]

    def asked(cache):
        out = model(turn, **{CACHE: cache}, logits_to_keep=1).logits
        held = [places(layer, False) for layer in cache.layers]
        return torch.cat([out, decoded(model, cache).logits], 1), held

    with kvevict.evicting(model, **options):
        cache = model(prompt(1, 120)["input_ids"], logits_to_keep=1).past_key_values
        if not name.startswith("decode"):
            decoded(model, cache)
            cache.crop(-2)
        forks = [cache.fork(), copy.deepcopy(cache), cache.fork().fork(), cache.fork()]
        forks[3].batch_repeat_interleave(2)
        forks[3].batch_select_indices(torch.tensor([1]))
        first = model(prompt(1, 9, seed=4)["input_ids"], **{CACHE: (other := cache.fork())}, logits_to_keep=1)
        decoded(model, other)
        other_turn = asked(other)
        want, held = asked(cache)
        for fork in forks:
            got, places_of = asked(fork)
            assert relative(got, want) < 1e-5 and (name in PACKED or places_of == held)
        alone = model(prompt(1, 120)["input_ids"], logits_to_keep=1).past_key_values
        if not name.startswith("decode"):
            decoded(model, alone, (5,))
        again = model(prompt(1, 9, seed=4)["input_ids"], **{CACHE: alone}, logits_to_keep=1)
        assert relative(again.logits, first.logits) < 1e-5
        decoded(model, alone)
        assert relative(asked(alone)[0], other_turn[0]) < 1e-5
        total = 120 + 9 + 3 + 20 + (3 if name.startswith("decode") else 1)
        assert all(archive.total_counts.tolist() == [[total] * 2] for archive in every(other))


@pytest.mark.parametrize("slots", [None, 16, 40, 1.0])
def test_rows_of_a_batch_are_as_alone(slots):
    model, options = shared(), SNAPKV | dict(recall_slots=slots)
    texts = [prompt(1, n, seed=n)["input_ids"][0] for n in (90, 61, 20, 3)]
    turns = [prompt(1, 20, seed=n)["input_ids"][0] for n in (1, 2, 3, 4)]

    with kvevict.evicting(model, **options):
        ids, mask = padded(texts)
        cache = model(ids, attention_mask=mask, logits_to_keep=1).past_key_values
        more, after = padded(turns)
        got = model(more, attention_mask=torch.cat([mask, after], 1), **{CACHE: cache}, logits_to_keep=1).logits
        for row, (text, turn) in enumerate(zip(texts, turns, strict=True)):
            alone = model(text[None], logits_to_keep=1).past_key_values
            want = model(turn[None], **{CACHE: alone}, logits_to_keep=1).logits
            assert relative(got[row], want[0]) < 1e-4
            for one, other in zip(every(cache), every(alone), strict=True):
                assert one.total_counts[row].tolist() == other.total_counts[0].tolist()
            for one, other in zip(cache.layers, alone.layers, strict=True):
                skipped = 90 - len(text)  # a caller who gives no position_ids counts columns of padding
                here, there = one.positions()[row], other.positions()[0]
                assert [(x - skipped).tolist() for x in here] == [x.tolist() for x in there]


@pytest.mark.parametrize("name, kind", [pytest.param(*each, id=each[0]) for each in zoo.types() if each[0] in OTHERS])
def test_other_models(name, kind):
    """Windows, states and latents beside or in place of slots: with room for all as without, and slots come back."""
    model = zoo.make(name, kind)
    ids, turn = prompt(1, 90)["input_ids"], prompt(1, 20, seed=1)["input_ids"]
    found = []
    for options in (dict(budget=4096), dict(budget=4096, recall=False), {}):
        with kvevict.evicting(model, **SNAPKV | options):
            cache = cache_of(model(ids, logits_to_keep=1, use_cache=True))
            kept = [set(layer.positions()[0][0].tolist()) for layer in ours(cache)]
            found.append(model(turn, **{CACHE: cache}, logits_to_keep=1, use_cache=True).logits)
    assert torch.equal(found[0], found[1])
    now = [set(layer.positions()[0][0].tolist()) & {*range(90)} for layer in ours(cache)]
    assert any(after - before for after, before in zip(now, kept, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_report_counts_what_came_back(family):
    model = shared(family)
    with kvevict.evicting(model, **SNAPKV):
        short = kvevict.report(model(**prompt(2, 20), logits_to_keep=1).past_key_values)
        assert short["recalled"] is None and "recall" not in short["seconds"]
        cache = model(**prompt(2, 90, pad=(0, 9)), logits_to_keep=1).past_key_values
        before = [layer.positions() for layer in ours(cache)]
        mask = torch.ones(2, 110, dtype=torch.long)
        mask[1, :9] = 0
        turn = prompt(2, 20, seed=1)["input_ids"]
        model(turn, attention_mask=mask, **{CACHE: cache}, logits_to_keep=1)
    report, lost = kvevict.report(cache), 0
    assert report["seconds"]["recall"] > 0
    found = [each for each in report["recalled"] if each is not None]
    assert len(found) == len(ours(cache)) and len(report["recalled"]) == len(cache.layers)
    for layer, had, counts in zip(ours(cache), before, found, strict=True):
        for row, heads in enumerate(layer.positions()):
            for head, now in enumerate(heads):
                old = {*range(90)} - {*had[row][head].tolist()}
                assert counts[row][head] == len(old & {*now.tolist()})
                lost += counts[row][head]
    assert lost > 0


@pytest.mark.parametrize("kind", ["model", "int8", "k8v4", "int4"])
def test_bytes_of_an_archive_of_few_bits(kind):
    """Those of `kvevict plan` for the text's slots."""
    model = shared()
    with kvevict.evicting(model, **SNAPKV, recall_kv=kind):
        cache = model(prompt(1, 96)["input_ids"], logits_to_keep=1).past_key_values
        policy, run = cache.sequence.policy, cache.sequence.run
    want = plan(shape_of(model.config, dtype="float32"), policy, 96, new_tokens=0, run=run)
    assert kvevict.report(cache)["archive_bytes"] == want["archive_bytes"]
    assert want["cache_bytes"] == 4 * 2 * 24 * 2 * 32 * 4


def test_a_turn_without_recall_ends_the_archive():
    model = shared()
    with kvevict.evicting(model, **SNAPKV):
        cache = model(prompt(1, 90)["input_ids"], logits_to_keep=1).past_key_values
        assert kvevict.report(cache)["archive_bytes"] >= 90 * 2 * 2 * 32 * 4 * 4
    with kvevict.evicting(model, **SNAPKV | dict(recall=False)):
        model(prompt(1, 20, seed=1)["input_ids"], **{CACHE: cache}, logits_to_keep=1)
        assert every(cache) == []
    with kvevict.evicting(model, **SNAPKV):
        model(prompt(1, 20, seed=2)["input_ids"], **{CACHE: cache}, logits_to_keep=1)
    assert [archive.total_counts.tolist() for archive in every(cache)] == [[[44, 44]]] * 4


def test_tokens_decoded_first_under_another_policy(tmp_path):
    """One that evicts while decoding: with recall it chooses from all tokens, and the archive goes on; without, the
    archive ends. A loaded cache is as one read under another policy."""
    model, turn = shared(), prompt(1, 20, seed=1)["input_ids"]
    with kvevict.evicting(model, **SNAPKV):
        cache = model(prompt(1, 120)["input_ids"], logits_to_keep=1).past_key_values
        decoded(model, cache)
        kvevict.save_cache(cache, tmp_path / "cache")
    forgets = cache.fork()
    with kvevict.evicting(model, **POLICIES["decode"]):
        for each in (cache, kvevict.load_cache(tmp_path / "cache", model)):
            decoded(model, each, [5, 6, 7, 8])
            assert all(layer.counts.max() <= 24 + 3 for layer in each.layers)
            model(turn, **{CACHE: each}, logits_to_keep=1)
            for archive in every(each):
                assert all(head.tolist() == [*range(147)] for row in archive.positions() for head in row)
    with kvevict.evicting(model, **POLICIES["decode"] | dict(recall=False)):
        decoded(model, forgets, [5, 6, 7, 8])
        assert every(forgets) == []


def test_refusals():
    for options, said in (
        (dict(policy="knorm"), "rows='none' has none: take take.edie or snapkv"),
        (dict(policy="h2o"), "carry='none'"), (dict(policy="fastkv"), "tsp=None"),
        (dict(policy="snapkv", window=4, decode=True, keep_prompt=True), "keep_prompt=False"),
        (dict(policy="kvzip"), "carry='none'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"recall=True: .*{said}"):
            choose(**options | dict(budget=24, recall=True))
    for wrong in (1, "", None):
        with pytest.raises(TypeError, match="recall must be"):
            choose("snapkv", budget=64, recall=wrong)
    for options, kind, said in (
        (dict(recall_slots=64), ValueError, "recall=True too"),
        (dict(recall_kv="int8"), ValueError, "recall=True too"),
        (dict(recall_kv="int8", recall=True, kv="int8"), ValueError, "the archive is as the slots; leave it out"),
        (dict(recall_kv="8", recall=True), ValueError, "recall_kv"),
        (dict(recall_slots=32, recall=True), ValueError, "recall_slots: budget=32 is too small"),
        (dict(recall_slots="1MiB", recall=True), TypeError, "recall_slots: bytes are for budget"),
        (dict(recall_slots=1.5, recall=True), ValueError, "recall_slots: budget=1.5 is not a fraction"),
    ):
        with pytest.raises(kind, match=said):
            choose("snapkv", budget=64, **options)


def same_archives(one, other, name, row=slice(None)):
    """The rows of a prompt bit by bit, those that were decoded beside others up to rounding."""
    for mine, theirs in zip(every(one), every(other), strict=True):
        mine, theirs = mine.gathered(), theirs.gathered()
        assert [[x.tolist() for x in each] for each in mine.positions()[row]] == [
            [x.tolist() for x in each] for each in theirs.positions()
        ]
        for part in ("k", "v"):
            got, want = mine.dense(part)[row], theirs.dense(part)
            assert relative(got[:, :, : want.shape[2]], want) < (0.02 if name in PACKED else 1e-5)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("name", ["snapkv", "take+edie", *PACKED, "ada", "decode"])
def test_rows_that_decode_together_have_their_own_archives(name, pooled):
    """Texts of different lengths, and two questions about one of them, join and leave in another order: each answer
    and archive is that of a sequence alone, and so is the turn after it."""
    model, turn = shared(), prompt(1, 20, seed=1)["input_ids"]
    most = 2e-3 if name in PACKED else 1e-4
    with kvevict.evicting(model, **POLICIES[name]):
        pools = Pools(find_decoder(model), 8192) if pooled else None
        batch, twins = Batch(model), {}
        texts = []
        for length in (120, 61):
            cache = {} if pools is None else {CACHE: pools.cache()}
            texts.append(model(prompt(1, length, seed=length)["input_ids"], **cache, logits_to_keep=1).past_key_values)
        caches = [texts[0].fork(), texts[1], texts[0].fork()]
        for row, cache in enumerate(caches):
            model(prompt(1, 9 + row, seed=row)["input_ids"], **{CACHE: cache}, logits_to_keep=1)
            decoded(model, cache, [4] * (row + 4))  # the window of "decode" is full
            twins[row] = copy.deepcopy(cache)
        order = {0: 2, 1: 0, 4: 1}
        for step in range(12):
            if step in order:
                batch.add(order[step], caches[order[step]])
            tokens = [5 + step + 20 * row for row in batch.rows]
            for row, token, got in zip(batch.rows, tokens, batch.step(tokens), strict=True):
                want = model(torch.tensor([[token]]), **{CACHE: twins[row]}).logits[0, -1]
                assert relative(got, want) < most
            if step == 8:
                left = batch.remove(0)
        for row in (0, 1, 2):
            cache = left if row == 0 else batch.remove(row)
            got, want = (model(turn, **{CACHE: each}, logits_to_keep=1).logits for each in (cache, twins[row]))
            assert relative(got, want) < most
            assert isinstance(every(cache)[0], Storage)
            same_archives(cache, twins[row], name)


def test_a_turn_of_rows_that_decoded_together():
    """The joined cache itself reads on: each row recalls from its archive."""
    model, turn = shared(), prompt(1, 20, seed=1)["input_ids"]
    with kvevict.evicting(model, **SNAPKV):
        caches = [model(prompt(1, n, seed=n)["input_ids"], logits_to_keep=1).past_key_values for n in (90, 61)]
        twins = list(map(copy.deepcopy, caches))
        whole = join(caches)
        decoded_with = dict(position_ids=whole.sequence.next_position[:, None])
        model(torch.tensor([[5], [6]]), **{CACHE: whole}, **decoded_with)
        places_of = whole.sequence.next_position[:, None] + torch.arange(20)
        got = model(turn.expand(2, -1), **{CACHE: whole}, position_ids=places_of, logits_to_keep=1).logits
        for row, twin in enumerate(twins):
            decoded(model, twin, [5 + row])
            assert relative(got[row], model(turn, **{CACHE: twin}, logits_to_keep=1).logits[0]) < 1e-4
            for mine, theirs in zip(every(whole), every(twin), strict=True):
                assert mine.total_counts[row].tolist() == theirs.total_counts[0].tolist()
            for mine, theirs in zip(whole.layers, twin.layers, strict=True):
                assert places(mine, False)[row] == places(theirs, False)[0]


def test_beams_share_the_archive():
    """They are reordered at each token; the rows of the text's archive are not copied, and the beams are as without."""
    model, ids, found = shared(), prompt(1, 90)["input_ids"], []
    for recall in (True, False):
        with kvevict.evicting(model, **SNAPKV | dict(budget=4096, recall=recall)):
            out = model.generate(ids, num_beams=3, max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
        found.append(out.sequences)
        assert len(every(out.past_key_values)) == (4 if recall else 0)
    assert torch.equal(*found)
    with kvevict.evicting(model, **SNAPKV):
        cache = model(ids, logits_to_keep=1).past_key_values
        before = [archive.k.data_ptr() for archive in every(cache)]
        cache.batch_repeat_interleave(3)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        assert [archive.prefix.k.data_ptr() for archive in every(cache)] == before


@pytest.mark.parametrize("name", ["snapkv", *PACKED, "decode"])
def test_saved_and_loaded(name, tmp_path):
    """A file has the slots of all tokens, and a turn after it is as after the cache in memory."""
    model, turn = shared(), prompt(1, 20, seed=1)["input_ids"]
    with kvevict.evicting(model, **POLICIES[name]):
        cache = model(prompt(1, 120)["input_ids"], logits_to_keep=1).past_key_values
        decoded(model, cache)
        kvevict.save_cache(cache, tmp_path / "cache")
        loaded = kvevict.load_cache(tmp_path / "cache", model)
        assert [layer.len.tolist() for layer in loaded.layers] == [[[123, 123]]] * 4
        one, two = loaded.fork(), loaded.fork()
        outs = [model(turn, **{CACHE: each}, logits_to_keep=1).logits for each in (cache, loaded, one)]
        more = [decoded(model, each).logits for each in (cache, loaded, one)]
        again = [model(turn, **{CACHE: each}, logits_to_keep=1).logits for each in (cache, loaded, one)]
        model(turn, **{CACHE: two}, logits_to_keep=1)
    for found in (outs, more, again):
        assert relative(found[1], found[0]) < 1e-5 and relative(found[2], found[0]) < 1e-5
    assert [places(layer, False) for layer in loaded.layers] == [places(layer, False) for layer in cache.layers]
    assert all(archive.total_counts.tolist() == [[143, 143]] for archive in every(two))


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("name", ["snapkv", *PACKED])
def test_an_archive_is_saved_from_where_it_lies(name, tokens, tmp_path):
    """That of a loaded cache, and of a fork and its original, to which a text and decoded tokens have come. The parts
    of the file are views of the cache's memory, but for decoded tokens that the archive has in other bits."""
    model, text, turn = shared(), prompt(1, 70, seed=1)["input_ids"], prompt(1, 20, seed=2)["input_ids"]
    with kvevict.evicting(model, **POLICIES[name]):
        cache = model(prompt(1, 120)["input_ids"], logits_to_keep=1).past_key_values
        kvevict.save_cache(cache, tmp_path / "first")
        for each in (kvevict.load_cache(tmp_path / "first", model), cache.fork(), cache):
            model(text, **{CACHE: each}, logits_to_keep=1)
            for token in range(tokens):
                model(torch.tensor([[token]]), **{CACHE: each})
            tensors = chain(each.tiers.tensors(), *map(tensors_of, each.layers))
            memory = {t.untyped_storage().data_ptr() for t in tensors}
            with mock.patch.object(sealed, "write", wraps=sealed.write) as write:
                kvevict.save_cache(each, tmp_path / "again")
            pieces = [x for x in write.call_args.args[1].values() if isinstance(x, sealed.Pieces)]
            copied = [part for x in pieces for part in x.each() if part.untyped_storage().data_ptr() not in memory]
            assert len(pieces) == 4 * 3
            assert sum(map(len, copied)) == (4 * 3 * 2 * tokens if name == IN_8_BITS else 0)
            loaded = kvevict.load_cache(tmp_path / "again", model)
            want, got = (model(turn, **{CACHE: x}, logits_to_keep=1).logits for x in (each, loaded))
            assert relative(got, want) < 1e-5


@pytest.mark.parametrize("kind", ["model", "int8"])
@pytest.mark.parametrize("chunk_size", [None, 32])
@pytest.mark.parametrize("pads", [(0,), (0, 20)])
def test_an_archive_has_no_surplus_room(kind, chunk_size, pads):
    """After a text, and after a further one that a fork reads."""
    model, new = shared(), prompt(len(pads), 70, seed=1)["input_ids"]
    with kvevict.evicting(model, **SNAPKV | dict(kv=kind, chunk_size=chunk_size)):
        cache = cache_of(model(**prompt(len(pads), 120, pad=pads), logits_to_keep=1, use_cache=True))
        fork = cache.fork()
        mask = torch.cat([prompt(len(pads), 120, pad=pads)["attention_mask"], torch.ones_like(new)], 1)
        model(new, attention_mask=mask, **{CACHE: fork}, logits_to_keep=1)
    for each, tokens in ((cache, 120), (fork, 190)):
        for archive in every(each):
            rows = sum(len(t) for t in archive.tensors() if t.dim() == 1)  # the slots' positions
            assert rows == archive.total_counts.sum() == 2 * (tokens * len(pads) - sum(pads))


def test_a_prompt_of_several_chunks_recalls_at_its_end():
    """Its last rows find what the chunks between had evicted."""
    model = shared()
    with kvevict.evicting(model, **SNAPKV):
        cache = DynamicCache(config=model.config)
        with Heard() as heard:
            model(prompt(1, 150)["input_ids"], **{CACHE: cache}, logits_to_keep=1)
        assert [archive.total_counts.tolist() for archive in every(cache)] == [[[150, 150]]] * 4
    assert len(heard.calls[0]) == 5
    with kvevict.evicting(model, **SNAPKV | dict(recall=False)):
        plain = model(prompt(1, 150)["input_ids"], logits_to_keep=1).past_key_values
    held = [[places(layer, False) for layer in each.layers] for each in (cache, plain)]
    assert held[0] != held[1]
