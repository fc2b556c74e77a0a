"""One process for long: memory stays flat, and threads do not meet. Nightly: memory also holds what other tests of the
process left, and few calls show no leak. KVEVICT_FUZZ=100 makes 10,000 calls of generate and half a million of ops."""

import gc
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch
from fuzzing import SEED, count

import kvevict
from kvevict.ops import _ops

pytestmark = pytest.mark.nightly
POLICIES = [
    ("take", dict(budget=18, probe=6, chunk_size=16)), ("snapkv", dict(budget=12, window=4)),
    ("h2o", dict(budget=12, chunk_size=16)), ("edie", dict(budget=14, window=4)),
    ("chunkkv", dict(budget=14, window=4)), ("laq", dict(budget=12, n_d=3)), ("tova", dict(budget=12, chunk_size=20)),
    ("cake", dict(budget=12, window=4)),
]  # fmt: skip


def resident() -> float:
    """MiB of memory that this process has."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def flat(work, calls) -> list:
    """Memory after a tenth of its calls of work(n), in the middle and at the end."""
    sizes = []
    for n in range(calls):
        work(n)
        if n + 1 in (calls // 10, calls // 2, calls):
            sizes.append(round(resident(), 1))
    print(f"KVEVICT_SEED={SEED}: {calls} calls, MiB after a tenth, in the middle, at the end: {sizes}")
    return sizes


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux' /proc")
def test_generate():
    draw, nets = random.Random(SEED), [tiny.model("llama"), tiny.model("gemma2")]

    def work(n):
        if n % 10 == 0:
            policy, options = draw.choice(POLICIES)
            kvevict.patch(nets[n // 10 % 2], policy, **options)
        net, batch = nets[n // 10 % 2], draw.randint(1, 4)
        length = draw.randint(1, 120)
        inputs = tiny.prompt(batch, length, seed=n, pad=(0, length // 3))
        tiny.generate(net, inputs, new=draw.randint(1, 6), num_beams=draw.choice([1, 1, 1, 2]))

    start, _, end = flat(work, count(100))
    assert end < start + 24, f"KVEVICT_SEED={SEED}"  # the allocator's own slack; a leaked cache of each would be more


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux' /proc")
def test_ops():
    torch.manual_seed(SEED % 2**31)
    counts = dict(dtype=torch.int32)
    n = torch.tensor([[9, 5]], **counts)
    first, q, k = torch.zeros(1, **counts), torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16)
    rows, score = torch.randn(14, 16), torch.rand(1, 2, 12)
    held = _ops.Held(rows, rows, offset=torch.tensor([[0, 9]]), len=n)

    def work(number):
        _ops.attend(q, held, k, k, first, scale=0.25)
        _ops.select(score, n + 3, n, first, first, 9)

    start, _, end = flat(work, count(5000))
    assert end < start + 8, f"KVEVICT_SEED={SEED}"


def test_threads():
    """Four threads on two models: tokens and reports as alone."""
    nets = [kvevict.patch(tiny.model(seed=seed), *policy[:1], **policy[1]) for seed, policy in enumerate(POLICIES[:2])]
    inputs = [tiny.prompt(batch, length, seed=batch) for batch, length in ((1, 50), (3, 33), (2, 80), (1, 7))]
    want = {}
    for which, net in enumerate(nets):
        for number, each in enumerate(inputs):
            want[which, number] = tiny.generate(net, each).tolist(), kvevict.report(net)["kept"]

    def work(thread):
        draw = random.Random(SEED + thread)
        for _ in range(count(10)):
            which, number = draw.randrange(2), draw.randrange(len(inputs))
            got = tiny.generate(nets[which], inputs[number]).tolist(), kvevict.report(nets[which])["kept"]
            assert got == want[which, number], f"KVEVICT_SEED={SEED}"

    with ThreadPoolExecutor(4) as threads:
        [*threads.map(work, range(4))]
