"""A read may pause before any of its layers, and the model be called there: neither call changes the other."""

from contextvars import Context

import pytest
import torch
import zoo
from caches import ids
from tiny import shared

import kvevict
from kvevict.compat import CACHE, cache_of
from kvevict.context import within
from kvevict.engine.read.budgets import places
from kvevict.engine.slots.cache import EvictionLayer
from kvevict.engine.watch.watcher import Watcher

OTHERS = ("deepseek_v3", "falcon_h1", "lfm2", "qwen3_next")  # latents, states
POLICIES = {
    "take+edie": dict(budget=12, probe=4, chunk_size=16),
    "read-twice": dict(budget=12, chunk_size=16),
    "h2o": dict(budget=12, chunk_size=16),
    "snapkv": dict(budget=12, window=4),
    "laq": dict(budget=12, window=4),
    "fastkv": dict(budget=12, window=4),  # not with sliding windows
}
CASES = [("llama", name) for name in POLICIES] + [
    (name, p) for name in ("gemma3", "gpt_oss") for p in list(POLICIES)[:4]
]


class Pauses(Watcher):
    """Reads another prompt, and decodes a token after it, before every layer of a read."""

    def __init__(self, net, prompt):
        self.net, self.prompt, self.found = net, prompt, []

    def layer(self, step):
        self.found.append(Context().run(read, self.net, self.prompt))


@torch.no_grad()
def read(net, prompt):
    """(places of all slots, logits of the last token and of the one after it)"""
    out = net(prompt, logits_to_keep=1, use_cache=True)
    cache = cache_of(out)
    held = [places(layer, False) for layer in cache.layers if isinstance(layer, EvictionLayer)]
    more = net(prompt[:, :1], **{CACHE: cache}, use_cache=True)
    return held, torch.stack([out.logits[:, -1], more.logits[:, -1]])


def paused(net, policy, options):
    kvevict.patch(net, policy, tokenizer=False, **options)
    try:
        prompts = ids(1, 50, 1), ids(1, 37, 2)
        alone = [read(net, prompt) for prompt in prompts]
        pauses = Pauses(net, prompts[1])
        with within(watchers=(pauses,)):
            between = read(net, prompts[0])
    finally:
        kvevict.unpatch(net)
    assert len(pauses.found) > 1
    for found, (held, logits) in zip([between, *pauses.found], [alone[0], *[alone[1]] * len(pauses.found)]):
        assert found[0] == held and torch.equal(found[1], logits)


@pytest.mark.parametrize("family, policy", CASES)
def test_calls_between_the_layers_of_a_read(family, policy):
    paused(shared(family), policy, POLICIES[policy])


@pytest.mark.parametrize("name, kind", [pytest.param(*each, id=each[0]) for each in zoo.types() if each[0] in OTHERS])
def test_calls_between_the_layers_of_other_models(name, kind):
    paused(zoo.make(name, kind), "take+edie", POLICIES["take+edie"])


class Counts(Watcher):
    """Rows of each chunk, as `chunk` and as the model gets them, and the tokens left."""

    def __init__(self):
        self.counted, self.left, self.widths = [], [], {}

    def layer(self, step):
        self.widths[step.chunk] = step.positions.shape[1]

    def chunk(self, rows, left):
        self.counted.append(rows)
        self.left.append(left)


@pytest.mark.parametrize(
    "policy, schedule", [("read-twice", "chunk"), ("read-twice", "prompt"), ("take+edie", "chunk")]
)
def test_appended_rows_count_from_the_start(policy, schedule):
    net, counts, options = shared("llama"), Counts(), dict(POLICIES[policy], schedule=schedule)
    if policy == "read-twice":
        options["rows"] = kvevict.ROWS["repeat"]((1, 2), part=16)
    kvevict.patch(net, policy, tokenizer=False, **options)
    try:
        with within(watchers=(counts,)), torch.no_grad():
            net(ids(1, 50, 1), logits_to_keep=1, use_cache=True)
    finally:
        kvevict.unpatch(net)
    read = list(counts.widths.values())
    assert len(read) >= 4 and sum(read) > (100 if policy == "read-twice" else 50)
    assert counts.counted == [0, *read[:-1]] and counts.left == [sum(read[at:]) for at in range(len(read))]
