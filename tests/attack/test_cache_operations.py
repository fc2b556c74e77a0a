"""Random sequences of operations on a cache, under every policy that needs a model alone. Each operation gives the same
bits as on a twin that stores every head's slots and numbers densely, or is refused and changes nothing.

The twin gets a call's stored rows, scores and choices, and moves and joins them independently.
"""

import copy
from functools import cache as cached
from unittest import mock

import pytest
import tiny
import torch
from fuzzing import expect, fuzz, policy_of

import kvevict
from kvevict.engine import cut
from kvevict.engine.hook import attention
from kvevict.engine.memory.layer import HALF_READ, EvictionLayer
from kvevict.engine.memory.sequence import Sequence
from kvevict.engine.read import choosers
from kvevict.engine.read import layer as read_layer

NEEDS_MORE = ("lookahead", "gate", "speckv")  # trained rows, gates, another model
CARRIES = {
    f"snapkv {carry}": ("snapkv", dict(carry=carry, pool="none") | more)
    for carry, more in (("max", {}), ("keep", {}), ("sum", dict(decode=True, interval=2)))
} | {
    "adakv max": ("adakv", dict(carry="max", decode=True, interval=2)),
    "adakv keep": ("adakv", dict(carry="keep")),
    "kvzip max": ("kvzip", dict(carry="max")),
    "h2o, prompts only": ("h2o", dict(decode=False)),
    "h2o ada": ("h2o", dict(heads="ada")),
    "knorm keep, prompt kept": ("knorm", dict(carry="keep", decode=True, interval=2, keep_prompt=True)),
}  # fmt: skip
NAMES = [*(name for name in kvevict.policies() if name not in NEEDS_MORE), *CARRIES]
BUDGETS = (14, 0.5, 4096)
TOLD = dict(append=EvictionLayer, keep=EvictionLayer, decode=EvictionLayer)
pytestmark = pytest.mark.usefixtures("no_grad")


@cached
def model():
    return tiny.model(num_hidden_layers=2)


@cached
def policy(name, budget):
    preset, options = CARRIES.get(name, (name, {}))
    more = dict(ids=(5, 6, 7)) if name == "oracle" else dict(tsp_len=24, sink=2, c=3)
    more |= dict(score=tiny.short_parts(4)) if name == "lagkv" else {}
    more |= dict(tsp=None) if budget == 4096 else {}
    return policy_of(preset, options | more | dict(budget=budget, chunk_size=16))


class Log:
    """Inside, records a call's changes of layers: [(layer, operation, arguments)]."""

    def __enter__(self):
        self.events, self.now, self.patches = [], None, []
        for name, owner in TOLD.items():
            self._replace(owner, name, lambda layer, *given, what=name: self.events.append((layer, what, given)))
        self._replace(Sequence, "advance", lambda it: self.events.append((it, "advance", it.coming)))
        self._replace(choosers, "numbers", lambda call: self._at(call.layer))
        self._replace(attention, "attend", lambda seen, *_: self._at(seen.layer))
        self._replace(read_layer, "carry_newest", lambda layer, x: self.events.append((layer, "newest", (x,))))
        for module in (cut, choosers):
            self._replace(module, "join", lambda how, new, _: self.events.append((self.now, "join", (how, new))))
        return self

    def __exit__(self, *error):
        for patch in self.patches:
            patch.stop()

    def _at(self, layer):
        self.now = layer

    def _replace(self, owner, name, note):
        before = getattr(owner, name)

        def told(*given, **options):
            note(*given)
            return before(*given, **options)

        self.patches.append(mock.patch.object(owner, name, told))
        self.patches[-1].start()


def cat(a, b):
    return tuple(torch.cat(pair) for pair in zip(a, b, strict=True))


class Head:
    """Slots of a head: (keys, values, positions, numbers), NaN where there is no number."""

    def __init__(self, slots):
        self.slots, self.pending = slots, None  # the slots' numbers after the new rows are stored

    def join(self, how, new):
        old = torch.full_like(new, torch.nan)
        old[: len(self.slots[3])] = self.slots[3]
        if how == "none":
            self.pending = torch.full_like(new, torch.nan)
        else:
            both = dict(sum=old + new, max=torch.where(old > new, old, new), keep=old)[how]
            self.pending = torch.where(old.isnan(), new, both)

    def settle(self):
        if self.pending is not None:
            self.slots = *self.slots[:3], self.pending[: len(self.slots[2])]
            self.pending = None

    def extend(self, k, v, pos):
        self.slots = cat(self.slots, (k, v, pos, torch.full((len(pos),), torch.nan)))

    def take(self, index):
        self.slots = tuple(x[index] for x in self.slots)


class Twin:
    """The content of a layer."""

    def __init__(self, heads, columns=0, removable=0):
        self.heads, self.columns, self.removable = heads, columns, removable
        self.cut, self.stored = False, 0  # in the running step: slots were evicted, columns stored

    def copy(self):
        return self.rows(range(len(self.heads)))

    def rows(self, chosen):
        return Twin([[Head(head.slots) for head in self.heads[row]] for row in chosen], self.columns, self.removable)

    def each(self):
        return ((b, h, head) for b, row in enumerate(self.heads) for h, head in enumerate(row))

    def advance(self, columns, tokens):
        whole = not self.cut and self.stored == columns
        self.columns, self.removable = self.columns + columns, self.removable + columns if whole else 0
        self.cut, self.stored = False, 0

    def append(self, k, v, pos, first, padding):
        for b, h, head in self.each():
            head.extend(k[b, h], v[b, h], pos[b])
            head.settle()
        self.stored = k.shape[2]

    def decode(self, q, k, v, pos, *module):
        for b, h, head in self.each():
            head.extend(k[b, h], v[b, h], pos[b])
        self.stored = 1

    def keep(self, index, keep, *new):
        for b, h, head in self.each():
            if new:
                k, v, pos, _ = new
                head.extend(k[b, h], v[b, h], pos[b])
            head.settle()
            head.take(index[b, h, : int(keep[b, h])].long())
        self.cut, self.removable = True, 0

    def join(self, how, new):
        for b, h, head in self.each():
            head.join(how, new[b, h if new.shape[1] > 1 else 0])

    def newest(self, numbers):
        for b, h, head in self.each():
            head.slots = *head.slots[:3], torch.cat([head.slots[3][:-1], numbers[b, h]])

    def crop(self, count):
        for *_, head in self.each():
            head.take(slice(0, max(0, len(head.slots[2]) - count)))
        self.columns, self.removable = self.columns - count, self.removable - count


class Pair:
    """A cache and its twin."""

    def __init__(self, cache, twins):
        self.cache, self.twins = cache, twins

    rows = property(lambda self: len(self.twins[0].heads))

    def copied(self, cache):
        return Pair(cache, [twin.copy() for twin in self.twins])

    def check(self):
        assert self.cache.get_seq_length() == self.twins[0].columns and not self.cache.sequence.half_read
        assert self.cache.sequence.removable == min(twin.removable for twin in self.twins)
        for layer, twin in zip(self.cache.layers, self.twins, strict=True):
            slots, carry = layer.storage.gathered(), layer.carry
            assert slots.counts.tolist() == slots.len.tolist() == layer.len.tolist()
            assert carry is None or carry.shape[-1] <= layer.longest()
            for b, h, at in slots.segments():
                k, v, pos, numbers = twin.heads[b][h].slots
                assert torch.equal(slots.pos[at], pos)
                assert torch.equal(slots.k[at], k) and torch.equal(slots.v[at], v)
                mine = numbers.new_empty(0) if carry is None else carry[b, h]
                assert mine[len(pos) :].isnan().all()
                wide = torch.full_like(numbers, torch.nan)
                wide[: len(mine)] = mine[: len(pos)]
                assert torch.equal(wide.isnan(), numbers.isnan())
                assert torch.equal(wide.nan_to_num(), numbers.nan_to_num())

    def call(self, ids, **options):
        """The model's call with new ids [B, N]; False: it was refused."""
        with Log() as log:
            try:
                out = model()(ids, past_key_values=self.cache, **dict(logits_to_keep=1) | options)
            except ValueError as error:
                assert str(error) != HALF_READ
                return False
        assert not out.logits.isnan().any()
        of = {id(layer): twin for layer, twin in zip(self.cache.layers, self.twins, strict=True)}
        for owner, what, given in log.events:
            if id(owner) in of:  # not a draft's
                getattr(of[id(owner)], what)(*given)
            elif owner is self.cache.sequence:
                for twin in self.twins:
                    twin.advance(*given)
        for twin in self.twins:
            twin.cut = False  # by slots that wait until tokens were drafted
            for *_, head in twin.each():
                head.settle()
        return True


def ids(rng, rows, columns):
    return torch.tensor([[rng.randrange(3, 97) for _ in range(columns)] for _ in range(rows)])


@cached
def read(name, budget, rows):
    """A prompt of 24 tokens a row."""
    generator = torch.Generator().manual_seed(rows)
    with kvevict.evicting(model(), policy(name, budget)):
        cache = model()(torch.randint(3, 97, (rows, 4), generator=generator), logits_to_keep=1).past_key_values
        cache.reset()
        empty = torch.empty(0, 32), torch.empty(0, 32), torch.empty(0, dtype=torch.int32), torch.empty(0)
        pair = Pair(cache, [Twin([[Head(empty) for _ in range(2)] for _ in range(rows)]) for _ in range(2)])
        assert pair.call(torch.randint(3, 97, (rows, 24), generator=generator))
    pair.check()
    return pair


def turn(rng, pair, path):
    return pair.call(ids(rng, pair.rows, rng.randrange(2, 20)))


def decoded(rng, pair, path):
    done = [pair.call(ids(rng, pair.rows, 1)) for _ in range(rng.randrange(1, 5))]
    return all(done)


def candidates(rng, pair, path):
    """As assisted decoding reads them."""
    pair.cache.record_past, count = True, rng.randrange(2, 5)
    done = pair.call(ids(rng, pair.rows, count), logits_to_keep=count)
    pair.cache.record_past = False
    return done


def crop(rng, pair, path):
    count = rng.randrange(1, 6) if rng.random() < 0.8 else rng.randrange(1, 40)
    try:
        pair.cache.crop(-count)
    except ValueError as error:
        sums = pair.cache.sequence.policy.carry == "sum"
        assert "crop cannot remove" in str(error) and (sums or count > min(twin.removable for twin in pair.twins))
        return False
    for twin in pair.twins:
        twin.crop(count)
    return True


def fork(rng, pair, path):
    return pair.copied(pair.cache.fork())


def copied(rng, pair, path):
    return pair.copied(copy.deepcopy(pair.cache))


def select(rng, pair, path):
    rows = [rng.randrange(pair.rows) for _ in range(rng.randrange(1, 4))]
    getattr(pair.cache, rng.choice(("batch_select_indices", "reorder_cache")))(torch.tensor(rows))
    pair.twins = [twin.rows(rows) for twin in pair.twins]
    return True


def repeat(rng, pair, path):
    if pair.rows > 2:
        return False
    pair.cache.batch_repeat_interleave(2)
    pair.twins = [twin.rows([row // 2 for row in range(2 * len(twin.heads))]) for twin in pair.twins]
    return True


def saved(rng, pair, path):
    kvevict.save_cache(pair.cache, path)
    made = pair.copied(kvevict.load_cache(path, model()))
    assert made.cache.sequence.removable == 0
    for twin in made.twins:
        twin.removable = 0
    return made


OPERATIONS = (turn, decoded, decoded, candidates, crop, crop, fork, copied, select, repeat, saved)


@pytest.mark.slow
def test_every_operation_is_its_twins(tmp_path):
    outcomes = set()

    def case(rng):
        name, budget = rng.choice(NAMES), rng.choice(BUDGETS)
        base = read(name, budget, rng.randrange(1, 3))
        pairs = [base.copied(copy.deepcopy(base.cache))]
        with kvevict.evicting(model(), policy(name, budget)):
            for _ in range(rng.randrange(2, 7)):
                operation, pair = rng.choice(OPERATIONS), rng.choice(pairs)
                done = operation(rng, pair, tmp_path / "cache")
                if isinstance(done, Pair):
                    pairs = [*pairs, done][-3:]
                for each in pairs:
                    each.check()
                outcomes.add((operation.__name__, bool(done)))
        return name

    fuzz(case, cases=150)
    happened = {f"{name} {'done' if done else 'refused'}": 1 for name, done in outcomes}
    expect(happened, *(f"{each.__name__} done" for each in OPERATIONS), "crop refused", "candidates refused")
