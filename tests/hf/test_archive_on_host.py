"""Archives in the host's memory, of layers on another device: here on the CPU, too, with the copies of two memories."""

import contextlib
import copy
import weakref

import pytest
import torch
import zoo
from recalling import OTHERS, POLICIES, SNAPKV, decoded, every, ours, padded
from tiny import prompt, shared
from transformers import DynamicCache

import kvevict
from kvevict.answering.batch import Batch, Pools
from kvevict.engine.memory import host
from kvevict.engine.memory.joining import join
from kvevict.engine.memory.rows import Apart
from kvevict.engine.memory.storage import Storage
from kvevict.engine.memory.tiers import Tiers
from kvevict.engine.read.budgets import places
from kvevict.models.compat import CACHE, cache_of
from kvevict.models.families import find_decoder

pytestmark = pytest.mark.usefixtures("no_grad")
POLICIES = POLICIES | {
    "k8v4": SNAPKV | dict(kv="k8v4"),
    "int4": SNAPKV | dict(kv="int4"),
    "pool": POLICIES["laq"] | dict(policy="defensive", chunk_size=32, layers="pool", heads="flat", recall_after=0),
    "diagnosed": POLICIES["take+edie"] | dict(policy="take+caote", diagnose=True),  # looked at when they are cut
}


class Copies:
    """Counts the copies "on the device": all that were made, and the most at once."""

    def __init__(self, monkeypatch):
        self.made, self.most = [], 0
        real = Storage._copied

        def copied(far, capacity):
            coming = real(far, capacity)
            self.made.append(weakref.ref(coming._slots.k))
            self.most = max(self.most, sum(each() is not None for each in self.made))
            return coming

        monkeypatch.setattr(Storage, "_copied", copied)


@pytest.fixture
def copies(monkeypatch):
    monkeypatch.setattr(host, "is_away", lambda device: True)
    return Copies(monkeypatch)


def bits(archive):
    """k, v, pos of every slot in a layer's archive, by row and head."""
    rows, heads = map(range, archive.total_counts.shape)
    each = [archive.places(b, h) for b in rows for h in heads]
    return [torch.cat([getattr(one, name)[at] for place in each for one, at in place]) for name in ("k", "v", "pos")]


def same(one, other):
    """The first one's archives lie on the host; the kept slots and the archives are those of the other, bit by bit."""
    for mine, theirs in zip(ours(one), ours(other), strict=True):
        assert not mine.storage.on_host
        assert places(mine, False) == places(theirs, False)
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
    for mine, theirs in zip(every(one), every(other), strict=True):
        assert mine.on_host and not theirs.on_host
        assert all(map(torch.equal, bits(mine), bits(theirs)))


def both(options):
    """The options with the archive on the "device", and on the host."""
    return options, options | dict(recall="memory")


def over_chosen(monkeypatch):
    """Let an answer's first tokens attend to chosen slots alone, as they do where the archive lies on the host."""
    monkeypatch.setattr(Tiers, "_put_aside", lambda tiers, index, asked: asked)


def conversation(model, options, turn=40, rows=1):
    """The logits of a text, and of turns on it and on a fork; both caches."""
    outs = []
    with kvevict.evicting(model, **options):
        cache = cache_of(model(prompt(rows, 90)["input_ids"], logits_to_keep=1, use_cache=True))
        fork = cache.fork()
        for seed, each in enumerate([cache, fork, cache, fork, cache], 1):
            asked = prompt(rows, turn, seed=seed)["input_ids"]
            outs.append(model(asked, **{CACHE: each}, logits_to_keep=1, use_cache=True).logits)
            outs.append(decoded(model, each).logits)
    return torch.cat(outs), cache, fork


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.drawn(8)
def test_as_on_the_device(name, dtype, copies, monkeypatch):
    """A layer has a copy while it attends, and the next one has; nothing else has any."""
    over_chosen(monkeypatch)
    model = copy.deepcopy(shared()).to(dtype)
    found = [conversation(model, options, 70) for options in both(POLICIES[name])]
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(found[1][1:], found[0][1:], strict=True):
        same(one, other)
    assert len(copies.made) >= 20 and all(copied() is None for copied in copies.made)
    assert copies.most <= 2 or name == "cake"
    assert [kvevict.report(cache)["archive_in"] for _, _, cache in found] == ["cpu", "cpu"]


@pytest.mark.parametrize("name, kind", [pytest.param(*each, id=each[0]) for each in zoo.types() if each[0] in OTHERS])
@pytest.mark.parametrize("after", [0, 3])
def test_other_models(after, name, kind, copies, monkeypatch):
    model = zoo.make(name, kind)
    over_chosen(monkeypatch)
    found = [conversation(model, options) for options in both(SNAPKV | dict(recall_after=after))]
    assert torch.equal(found[0][0], found[1][0])
    same(found[1][1], found[0][1])
    assert copies.made and copies.most <= 2


@pytest.mark.parametrize("name", ["snapkv", "take+edie", "int8", "decode"])
def test_forks_copies_rows_crops_and_beams(name, copies):
    model, turn, found = shared(), prompt(1, 20, seed=1)["input_ids"], []
    for options in both(POLICIES[name]):
        with kvevict.evicting(model, **options):
            cache = model(prompt(1, 120)["input_ids"], logits_to_keep=1).past_key_values
            if not name.startswith("decode"):
                decoded(model, cache)
                cache.crop(-2)
            forks = [cache.fork(), copy.deepcopy(cache), cache.fork().fork(), cache.fork(), cache]
            forks[3].batch_repeat_interleave(2)
            forks[3].batch_select_indices(torch.tensor([1, 0]))
            for fork in forks:
                asked = turn.expand(len(fork.sequence.seen), -1)
                for _ in range(2):
                    model(asked, **{CACHE: fork}, logits_to_keep=1)
                    if not name.startswith("decode"):
                        fork.activate_past_recording()
                        model(asked[:, :4], **{CACHE: fork}, logits_to_keep=4)  # candidates
                        fork.crop(-2)
                        fork.record_past = False
                    decoded(model, fork)
            found.append(forks)
            asked = dict(num_beams=3, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
            found[-1].append(model.generate(turn, **asked, **{CACHE: DynamicCache()}).past_key_values)
    for other, one in zip(*found, strict=True):
        same(one, other)
    assert copies.most <= 2


@pytest.mark.parametrize("name", ["snapkv", "take+edie", "k8v4", "decode", "ada", "after"])
def test_rows_of_different_lengths(name, copies, monkeypatch):
    model, found = shared(), []
    over_chosen(monkeypatch)
    for options in both(POLICIES[name]):
        ids, mask = padded([prompt(1, n, seed=n)["input_ids"][0] for n in (90, 61)])
        with kvevict.evicting(model, **options):
            cache = model(ids, attention_mask=mask, logits_to_keep=1).past_key_values
            for seed in (1, 2):
                more, after = padded([prompt(1, n, seed=n + seed)["input_ids"][0] for n in (20, 17)])
                mask = torch.cat([mask, after], 1)
                model(more, attention_mask=mask, **{CACHE: cache}, logits_to_keep=1)
        found.append(cache)
    same(found[1], found[0])
    assert copies.made and copies.most <= 2


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("name", ["snapkv", "int8", "decode", "after"])
def test_rows_that_decode_together(name, pooled, copies, monkeypatch):
    """They join and leave; one goes on alone, and the joined cache itself reads a turn."""
    over_chosen(monkeypatch)
    model, turn, found = shared(), prompt(1, 20, seed=1)["input_ids"], []
    for options in both(POLICIES[name]):
        with kvevict.evicting(model, **options):
            pools = Pools(find_decoder(model), 8192) if pooled else None
            batch, caches = Batch(model), []
            for length in (120, 61, 90):
                cache = {} if pools is None else {CACHE: pools.cache()}
                text = prompt(1, length, seed=length)["input_ids"]
                caches.append(model(text, **cache, logits_to_keep=1).past_key_values.fork())
                model(turn[:, :9], **{CACHE: caches[-1]}, logits_to_keep=1)
                decoded(model, caches[-1], [4] * 4)  # the window of "decode" is full
            for row, cache in enumerate(caches):
                batch.add(row, cache)
                outs = [batch.step([5 + row] * len(batch.rows)) for _ in range(7)]
            left = [batch.remove(row) for row in (1, 0, 2)]
            outs += [model(turn, **{CACHE: cache}, logits_to_keep=1).logits for cache in left]
            whole = join([cache.fork() for cache in left])
            assert isinstance(every(whole)[0], Apart)
            at = whole.sequence.next_position[:, None] + torch.arange(20)
            outs.append(model(turn.expand(3, -1), **{CACHE: whole}, position_ids=at, logits_to_keep=1).logits)
        found.append((outs[-1], [*left, whole]))
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(found[1][1], found[0][1], strict=True):
        same(one, other)


@pytest.mark.parametrize("place", [True, "memory", "folder"])
@pytest.mark.parametrize("name", ["snapkv", "int4", "take+edie"])
def test_files(name, place, copies, tmp_path):
    """Caches that were saved from the host's memory, without a copy on the device, and loaded there."""
    model, turn, options = shared(), prompt(1, 20, seed=1)["input_ids"], POLICIES[name]
    where = options | dict(recall=str(tmp_path) if place == "folder" else place)
    with kvevict.evicting(model, **options):
        cache = model(prompt(2, 120)["input_ids"], logits_to_keep=1).past_key_values.fork()
        decoded(model, cache)
        model(turn.expand(2, -1), **{CACHE: cache}, logits_to_keep=1)
        want = copy.deepcopy(cache)
        for _ in range(2):
            logits = model(turn.expand(2, -1), **{CACHE: want}, logits_to_keep=1).logits
    with kvevict.evicting(model, **where):
        mine = model(prompt(2, 120)["input_ids"], logits_to_keep=1).past_key_values.fork()
        decoded(model, mine)
        model(turn.expand(2, -1), **{CACHE: mine}, logits_to_keep=1)
        made = len(copies.made)
        kvevict.save_cache(mine, tmp_path / "file")
        kvevict.save_cache(cache, tmp_path / "other")
        loaded = kvevict.load_cache(tmp_path / "file", model)
        for layer in loaded.layers:
            assert layer.storage.far and not layer.storage.counts.any()
        assert len(copies.made) == made
        forks = [loaded.fork(), loaded, copy.deepcopy(loaded)]
        for fork in forks:
            for _ in range(2):
                got = model(turn.expand(2, -1), **{CACHE: fork}, logits_to_keep=1).logits
            assert (got - logits).abs().max() < 1e-4
            for one, other in zip(fork.layers, want.layers, strict=True):
                assert places(one, False) == places(other, False)
            for one, other in zip(every(fork), every(want), strict=True):
                assert all(map(torch.equal, bits(one), bits(other)))
                assert one.on_host == (place is not True)
    assert copies.most <= 2
    alone = kvevict.load_cache(tmp_path / "file", model)
    with kvevict.evicting(model, **options | dict(recall=False)):
        decoded(model, alone, (5,))  # over all slots, which then lie on the device
    assert not any(layer.storage.far for layer in alone.layers)
    alone.crop(-1)
    with kvevict.evicting(model, **options):
        model(turn.expand(2, -1), **{CACHE: alone}, logits_to_keep=1)


def test_a_text_longer_than_a_chunk_is_asked(copies):
    """The turn has several chunks, and a policy that cuts at the end attends to all slots in each."""
    model, found = shared(), []
    for options in both(SNAPKV | dict(schedule="prompt")):
        found.append(conversation(model, options, 100))
    assert torch.equal(found[0][0], found[1][0])
    same(found[1][1], found[0][1])
    assert copies.most <= 2


def test_slots_of_a_plain_cache(copies):
    """Read before patching, then packed: the archive begins with them, as on the device."""
    model, found = copy.deepcopy(shared()), []
    for options in both(SNAPKV | dict(kv="int8")):
        cache = DynamicCache()
        model(prompt(1, 60)["input_ids"], **{CACHE: cache})
        with kvevict.evicting(model, **options):
            for seed in (1, 2, 3):
                out = model(prompt(1, 50, seed=seed)["input_ids"], **{CACHE: cache}, logits_to_keep=1)
        found.append((out.logits, cache))
    assert torch.equal(found[0][0], found[1][0])
    same(found[1][1], found[0][1])


def test_where_it_is_the_same_memory(tmp_path):
    """On a CPU "memory" is as True: nothing is copied. A folder of that name is meant by a path."""
    model = shared()
    one, other = (conversation(model, options) for options in both(SNAPKV))
    assert torch.equal(one[0], other[0]) and not every(other[1])[0].on_host
    with pytest.raises(ValueError, match=r"recall='\./memory': no file can be made there .*'memory'"):
        kvevict.patch(model, **SNAPKV | dict(recall="./memory"))


class Late:
    """A stream whose copies are made only when something waits for them: for an event of it, or for all."""

    def __init__(self, *device):
        self.queue: list = []

    def wait_stream(self, other):
        """Nothing is queued on the other stream: it is the CPU."""

    def wait_event(self, event):
        stream, stop = event
        while stream.done < stop:
            to, rows = stream.queue[stream.done]
            to.copy_(rows)
            stream.queue[stream.done] = None
            stream.done += 1

    done = 0

    def record_event(self):
        return self, len(self.queue)

    def synchronize(self):
        self.wait_event(self.record_event())


@pytest.mark.parametrize("name", ["snapkv", "take+edie", "int8", "laq", "decode", "ada", "after"])
def test_nothing_is_read_before_it_is_there(name, copies, monkeypatch):
    """On a GPU the copies are made while the model goes on. Here they are made as late as they may be."""
    over_chosen(monkeypatch)
    want, *caches = conversation(shared(), POLICIES[name], 70, 2)
    late, here = Late(), Late()
    monkeypatch.setattr(host, "_has_streams", lambda device: True)
    monkeypatch.setattr(host, "_streams", {torch.device("cpu"): late})
    monkeypatch.setattr(host, "_copy", lambda into, source: late.queue.extend(host._pairs(into, source)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    got, *others = conversation(shared(), POLICIES[name] | dict(recall="memory"), 70, 2)
    assert torch.equal(got, want)
    assert late.queue and late.done == len(late.queue)
    for one, other in zip(others, caches, strict=True):
        same(one, other)


def test_a_turn_under_another_place(copies, tmp_path):
    """The archive moves to where it is to lie from then on, with every bit, and so does one that joins others."""
    model, found = shared(), []
    for places_of in ([True] * 4, [True, "memory", True, "memory"]):
        cache = DynamicCache()
        for seed, place in enumerate(places_of):
            with kvevict.evicting(model, **SNAPKV | dict(recall=place)):
                out = model(prompt(1, 60, seed=seed)["input_ids"], **{CACHE: cache}, logits_to_keep=1)
                decoded(model, cache)
            assert all(archive.on_host == (place == "memory") for archive in every(cache))
        found.append((out.logits, cache))
    assert torch.equal(found[0][0], found[1][0])
    same(found[1][1], found[0][1])
    kvevict.save_cache(found[1][1], tmp_path / "file")
    for order in (1, -1):
        loaded = kvevict.load_cache(tmp_path / "file", model)
        whole = join([found[1][1].fork(), loaded][::order])
        assert all(one.on_host for archive in every(whole) for one in archive.each)
