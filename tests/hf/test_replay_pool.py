"""Recordings of decoded tokens that all sequences of a pool share, whichever sequences decode together."""

import contextlib
from unittest import mock

import pytest
import tiny
import torch
from caches import held, ids, kept

import kvevict
from kvevict.answering.batch import Batch, Pools
from kvevict.engine.memory.joining import part
from kvevict.engine.record import recordings
from kvevict.engine.record.calls import PATIENCE
from kvevict.models.families import find_decoder
from kvevict.policy.run import Run

pytestmark = pytest.mark.usefixtures("no_grad")
TOKENS = 13
PATIENCE = PATIENCE["cpu"]
LENGTHS = (60, 23, 41, 90, 33)
CASES = {
    "snapkv": dict(budget=20, window=4), "adakv": dict(budget=20, window=4), "keydiff": dict(budget=20),
    "knorm": dict(budget=20), "take+edie": dict(budget=24, probe=6, chunk_size=16),
}  # fmt: skip


def read(net, pools, length, seed):
    return net(ids(1, length, seed), past_key_values=pools and pools.cache(), logits_to_keep=1).past_key_values


def shared(pools):
    return next(iter(pools.of.values())).__dict__.get("recordings", ())


def decoded(net, cache, tokens):
    rows = len(cache.sequence.seen)
    each = [net(ids(rows, 1, 50 + token), past_key_values=cache).logits[:, -1] for token in range(tokens)]
    return torch.stack(each)


@pytest.mark.parametrize("kv", ["model", "int8", "k8v4"])
@pytest.mark.parametrize("name", CASES)
def test_sequences_share_a_recording(name, kv, replayed):
    """The first one is recorded; the others, of other lengths, and a fork of stored slots are replayed at once."""
    net, results = tiny.model(), []
    for compiled in (False, True):
        with kvevict.evicting(net, name, kv=kv, compiled=compiled, tokenizer=False, **CASES[name]):
            pools = Pools(find_decoder(net), 8192)
            caches = [read(net, pools, length, seed) for seed, length in enumerate(LENGTHS)]
            forks = [caches[0].fork(), caches[3].fork()]
            found = [decoded(net, cache, TOKENS) for cache in (*caches, *forks)]
            results.append((found, [kept(cache) for cache in (*caches, *forks)]))
    for want, got in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(want, got)
    assert results[0][1] == results[1][1]
    assert len(shared(pools)) == 2  # with slots in a prefix, and without
    assert len(replayed) == 7 * TOKENS - 2 - 2 * (PATIENCE + 1)  # the first two are watched


class Joining:
    """Sequences of one pool that join and leave a batch, and each alone in a pool of its own."""

    def __init__(self, net, rows=8192):
        self.net, self.pools, self.batch, self.twins = net, Pools(find_decoder(net), rows), Batch(net), {}

    def join(self, name, length, seed):
        self.batch.add(name, read(self.net, self.pools, length, seed))
        with mock.patch.object(Run, "records", lambda *_: False):
            self.twins[name] = read(self.net, None, length, seed)

    def step(self, tokens=1):
        """Decode tokens; each sequence's logits are near those that it has alone, unrecorded."""
        for token in range(tokens):
            rows = self.batch.rows
            got = self.batch.step([9 + token + 3 * at for at in range(len(rows))])
            for at, name in enumerate(rows):
                with mock.patch.object(Run, "records", lambda *_: False):
                    want = self.net(torch.tensor([[9 + token + 3 * at]]), past_key_values=self.twins[name]).logits[
                        :, -1
                    ]
                torch.testing.assert_close(got[at : at + 1], want, rtol=0, atol=2e-5)

    def check(self):
        """The slots of every sequence are those that it has alone."""
        for at, name in enumerate(self.batch.rows):
            for mine, own in zip(held(part(self.batch.cache, [at])), held(self.twins[name]), strict=True):
                for x, y in zip(mine, own, strict=True):
                    torch.testing.assert_close(x, y, rtol=0, atol=2e-5)


def test_batches_are_padded_to_sizes_that_are_recorded(monkeypatch, replayed):
    """On a GPU steps are recorded for 1, 2, 4, 8 and 16 rows: padding changes no row, and no slot of another one."""
    monkeypatch.setitem(recordings.SIZES, "cpu", (1, 2, 4))
    net = tiny.model()
    with kvevict.evicting(net, "snapkv", budget=20, window=4, compiled=True, tokenizer=False):
        many = Joining(net)
        for at, length in enumerate(LENGTHS[:3]):
            many.join(at, length, at)
        many.step(2 + PATIENCE + 5)  # three rows by the recording for four
        many.join(3, LENGTHS[3], 3)
        many.step(5)
        assert len(shared(many.pools)) == 1 and len(replayed) == 4 + 5
        many.batch.keep([1, 3, 2])
        many.step(5)
        assert len(shared(many.pools)) == 1 and len(replayed) == 4 + 5 + 5
        many.join(4, LENGTHS[4], 4)
        many.join(5, LENGTHS[0], 5)  # five rows: as many as there are
        many.step(PATIENCE + 3)
        many.check()
        assert [each.places.size for each in shared(many.pools)] == [4, 5] and len(replayed) == 4 + 5 + 5 + 2


def test_a_pool_without_room_for_padding(monkeypatch, replayed):
    """The step is recorded for the rows that there are."""
    monkeypatch.setitem(recordings.SIZES, "cpu", (1, 4))
    net = tiny.model()
    with kvevict.evicting(net, "snapkv", budget=20, window=4, compiled=True, tokenizer=False):
        many = Joining(net, rows=2 * 2 * (60 + 64 + 20 + 64))
        many.join(0, 60, 0), many.join(1, 41, 1)
        for pool in many.pools.of.values():
            monkeypatch.setattr(pool, "lend", lambda rows, like: None)
        many.step(2 + PATIENCE + 4)
        many.check()
        assert [each.places.size for each in shared(many.pools)] == [2] and len(replayed) == 3


def test_threads_do_not_share_a_recording_at_once(replayed):
    """A sequence that decodes while another thread replays is decoded without the recording."""
    net, texts = tiny.model(), []
    with kvevict.evicting(net, "snapkv", budget=20, window=4, compiled=True, tokenizer=False):
        for busy in (False, True):
            pools = Pools(find_decoder(net), 8192)
            first, second = (read(net, pools, length, length) for length in (60, 41))
            decoded(net, first, TOKENS)
            (recording,), count = shared(pools), len(replayed)
            with recording.lock if busy else contextlib.nullcontext():
                texts.append(decoded(net, second, TOKENS))
            assert len(replayed) - count == (0 if busy else TOKENS)
    assert torch.equal(*texts)


def test_few_recordings_stay(monkeypatch):
    monkeypatch.setattr(recordings, "MOST", 2)
    net = tiny.model()
    with kvevict.evicting(net, "snapkv", budget=20, window=4, compiled=True, tokenizer=False):
        many = Joining(net)
        for at in range(4):
            many.join(at, 30, at)
            many.step(2)
        assert [each.places.size for each in shared(many.pools)] == [3, 4]
