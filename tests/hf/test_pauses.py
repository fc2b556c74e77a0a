"""The model may be called before any layer of a read, in a hook: neither call changes the other. A driver's pause is
there too."""

from contextvars import Context

import pytest
import torch
import zoo
from caches import ids
from tiny import shared
from transformers import DynamicCache

import kvevict
from kvevict.context import current, within
from kvevict.engine.hook.forward import reading
from kvevict.engine.memory.layer import EvictionLayer
from kvevict.engine.read.budgets import places
from kvevict.models import families
from kvevict.models.compat import CACHE, cache_of

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
    hooks: list = []
    try:
        prompts = ids(1, 50, 1), ids(1, 37, 2)
        alone = [read(net, prompt) for prompt in prompts]
        others: list = []
        inside: list = []

        def before(*args):
            if not inside:
                inside.append(True)
                others.append(Context().run(read, net, prompts[1]))
                inside.clear()

        hooks = [layer.register_forward_pre_hook(before) for layer in families.layers_of(families.find_decoder(net))]
        between = read(net, prompts[0])
    finally:
        for hook in hooks:
            hook.remove()
        kvevict.unpatch(net)
    assert len(others) > 1
    for found, (held, logits) in zip([between, *others], [alone[0], *[alone[1]] * len(others)]):
        assert found[0] == held and torch.equal(found[1], logits)


@pytest.mark.parametrize("family, policy", CASES)
def test_calls_between_the_layers_of_a_read(family, policy):
    paused(shared(family), policy, POLICIES[policy])


@pytest.mark.parametrize("name, kind", [pytest.param(*each, id=each[0]) for each in zoo.types() if each[0] in OTHERS])
def test_calls_between_the_layers_of_other_models(name, kind):
    paused(zoo.make(name, kind), "take+edie", POLICIES["take+edie"])


@pytest.mark.parametrize("family, policy", CASES[:5])
def test_a_prompt_that_a_driver_reads(family, policy):
    """Chunk by chunk, beside another one: slots and logits as of the model's call."""
    net = shared(family)
    kvevict.patch(net, policy, tokenizer=False, **POLICIES[policy])
    try:
        prompts = [ids(1, 50, 1), ids(1, 37, 2)]
        alone = [read(net, prompt) for prompt in prompts]
        caches = [DynamicCache(config=net.config) for _ in prompts]
        turns = [(Context(), reading(net, *each)) for each in zip(prompts, caches, strict=True)]
        outputs: dict = {}
        while len(outputs) < 2:
            for at, (inside, steps) in enumerate(turns):
                try:
                    inside.run(next, steps)
                except StopIteration as end:
                    outputs.setdefault(at, end.value)
        for at, (held, logits) in enumerate(alone):
            assert [places(layer, False) for layer in caches[at].layers if isinstance(layer, EvictionLayer)] == held
            assert cache_of(outputs[at]) is caches[at] and torch.equal(outputs[at].logits[:, -1], logits[0])
            with torch.no_grad():
                more = net(prompts[at][:, :1], **{CACHE: caches[at]}, use_cache=True)
            assert torch.equal(more.logits[:, -1], logits[1])
    finally:
        kvevict.unpatch(net)


@pytest.mark.parametrize(
    "policy, schedule", [("read-twice", "chunk"), ("read-twice", "prompt"), ("take+edie", "chunk")]
)
def test_appended_rows_count_from_the_start(policy, schedule):
    net, options, widths = shared("llama"), dict(POLICIES[policy], schedule=schedule), {}
    if policy == "read-twice":
        options["rows"] = kvevict.ROWS["repeat"](part=16)
    kvevict.patch(net, policy, tokenizer=False, **options)

    def pause():
        widths[current().chunk] = current().positions.shape[1]

    try:
        with within(pause=pause):
            steps = list(reading(net, ids(1, 50, 1), DynamicCache(config=net.config)))
    finally:
        kvevict.unpatch(net)
    read = list(widths.values())
    assert len(read) >= 4 and sum(read) >= (100 if policy == "read-twice" else 51)
    assert [step.positions.shape[1] for step in steps] == read[:-1]
    assert [step.ahead for step in steps] == [sum(read[at:]) for at in range(1, len(read))]
