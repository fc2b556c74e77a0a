"""Whatever stops a call of a patched model, wherever: the cache is then as it was or refused, and nothing stays set.

An exception is raised where a call, of Python or of C, begins in a file of this package or of Transformers: from there
it takes the way that an error, a lack of memory or Ctrl-C takes. It is not raised in place of a C object's `__exit__`,
where Python handles no signal, and where it would leave a lock held. The places are drawn (tests/lib/fuzzing.py).
"""

import copy
import os
import random
import sys
import threading

import pytest
import tiny
import torch
from fuzzing import SEED, count
from transformers import DynamicCache
from zoo import build

import kvevict
from kvevict.engine.memory.layer import HALF_READ

OURS = tuple(os.path.dirname(__import__(name).__file__) for name in ("kvevict", "transformers"))
CASES = [
    ("llama", "take", dict(budget=16, probe=6, chunk_size=16)), ("llama", "snapkv", dict(budget=12, window=4)),
    ("llama", "h2o", dict(budget=12, chunk_size=16)), ("llama", "laq", dict(budget=12, n_d=3)),
    ("llama", "edie+tada", dict(budget=12, window=4)),
    ("llama", "take+caote", dict(budget=16, probe=6, chunk_size=16, decode=True, interval=1)),
    ("gemma2", "adakv", dict(budget=12, window=4)), ("gemma2", "tova", dict(budget=12, chunk_size=16)),
    ("gemma2", "cake", dict(budget=12, window=4)), ("qwen3_next", "take", dict(budget=16, probe=6, chunk_size=16)),
]  # fmt: skip


class Injected(BaseException):
    """Neither an Exception nor Ctrl-C, so that no handler catches it."""


class At:
    """Inside, the call number `at` in our own files or in Transformers' does not begin; None: they are counted."""

    def __init__(self, at=None):
        self.at, self.count = at, 0

    def __enter__(self):
        sys.setprofile(self.note)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def note(self, frame, event, argument):
        ends = event == "c_call" and argument.__name__ == "__exit__"
        if event in ("call", "c_call") and not ends and frame.f_code.co_filename.startswith(OURS):
            self.count += 1
            if self.count - 1 == self.at:
                sys.setprofile(None)
                raise Injected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("family, policy, options", CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_wherever(family, policy, options):
    net, other = build(family), kvevict.patch(tiny.shared("llama", seed=3), "snapkv", budget=10, window=4)
    kvevict.patch(net, policy, **options)
    ids, then = tiny.prompt(2, 40)["input_ids"], torch.tensor([[5], [7]])
    others = other(ids).logits
    kinds = {"read": (ids, None)}
    cache = DynamicCache(config=net.config)
    want = {"read": net(ids, past_key_values=cache).logits}
    kinds["token"] = then, copy.deepcopy(cache)
    kinds["turn"] = ids[:, :20], copy.deepcopy(cache)
    for kind in ("token", "turn"):
        want[kind] = net(kinds[kind][0], past_key_values=copy.deepcopy(kinds[kind][1])).logits
    draw, tried = random.Random(SEED), dict.fromkeys(kinds, 0)
    for kind, (tokens, before) in kinds.items():
        fresh = lambda: DynamicCache(config=net.config) if before is None else copy.deepcopy(before)  # noqa: E731, B023
        cache = fresh()
        with torch.no_grad(), At() as all_of_it:
            net.forward(tokens, past_key_values=cache)
        places = list(range(all_of_it.count))
        draw.shuffle(places)
        refused = 0
        for place in places:
            cache = fresh()
            try:
                with torch.no_grad(), At(place):
                    net.forward(tokens, past_key_values=cache)
                continue  # it was raised in the end of a generator, where Python lets nothing out
            except Injected:
                pass
            where = f"KVEVICT_SEED={SEED}: {kind}, call {place} of {len(places)}"
            try:
                got = net(tokens, past_key_values=cache).logits
            except ValueError as error:
                assert str(error) == HALF_READ, where
                refused += 1
            else:
                assert torch.equal(got, want[kind]), where
            tried[kind] += 1
            if refused and tried[kind] >= count(12):
                break
        assert refused, where
        assert torch.equal(net(tokens, past_key_values=fresh()).logits, want[kind]), where
    assert torch.equal(other(ids).logits, others)
    another = threading.Thread(target=kvevict.unpatch, args=(other,), daemon=True)
    another.start()
    another.join(60)
    assert not another.is_alive(), f"KVEVICT_SEED={SEED}: a lock is still held"
    print(f"KVEVICT_SEED={SEED}", policy, family, tried)
