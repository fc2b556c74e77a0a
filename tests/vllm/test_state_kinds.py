"""States whose rows are packed in 8 or 4 bits, without vLLM."""

import itertools

import pytest
import torch
from policy_cases import BUDGET, CHUNK, model, ours, tokens
from states_host import Host, drawn

from kvevict.vllm.options import VllmOptions, policy_of
from kvevict.vllm.shape import StateShape

PROMPT = 3 * CHUNK
POLICIES = {
    "snapkv": dict(window=4), "edie": dict(window=4), "chunkkv": dict(window=4, c=4), "snapkv+caote": dict(window=5),
    "h2o": {}, "streaming": {}, "keydiff": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["int8", "k8v4", "int4"])
@pytest.mark.parametrize("name", POLICIES)
def test_packed_slots_are_the_numbers_that_they_stand_for(name, kind):
    """A state with packed rows is near one with rows as computed that gets the packed rows' numbers, by the float64
    reference, whatever the steps of both; in a block that another request has used."""
    ids, chosen = torch.cat(tokens([[PROMPT + CHUNK]], 3)[0]), POLICIES[name]
    host = Host(model(), name, BUDGET, kv=kind, **chosen)
    host.read(ids.flip(0), [], 1)
    logits = host.read(ids, drawn(len(ids)), 1)
    want = Host(model(), name, BUDGET, stored_as=kind, **chosen)
    known = want.read(ids, drawn(len(ids)), 1)
    plain = Host(model(), name, BUDGET, **chosen).read(ids, [], 1)
    # Where layers' inputs differ by an ulp, a number here and there is rounded to the next step.
    assert (logits - known).abs().mean() < 0.15 * (logits - plain).abs().mean()
    pairs = zip(itertools.chain(*host.kept(len(ids), 1)), itertools.chain(*want.kept(len(ids), 1)), strict=True)
    assert all(len({*mine} & {*own}) >= len(own) - 1 for mine, own in pairs)


@pytest.mark.parametrize("kind", ["int8", "k8v4"])
def test_packed_requests_that_decode_together_are_as_alone(kind):
    host, lengths = Host(model(), "edie", BUDGET, kv=kind, window=4), [PROMPT + 1, CHUNK + 7, 5]
    texts = [torch.cat(tokens([[n + 12]], seed)[0]) for seed, n in enumerate(lengths)]
    alone = [host.read(text, range(n, n + 12), 0) for text, n in zip(texts, lengths, strict=True)]
    for block, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        host.read(text[:n], [], block)
    for at in range(12):
        ids = torch.stack([text[n + at] for text, n in zip(texts, lengths, strict=True)])
        logits = host.step(ids, [0, 1, 2], [n + at for n in lengths])
        for row, n, own in zip(logits, lengths, alone, strict=True):
            torch.testing.assert_close(row, own[n + at], rtol=0, atol=1e-3)  # a number may round otherwise


def test_int8_states_are_near_the_engines():
    """The engine's chunks attend to their own rows before these are packed, and centre keys at a mean."""
    rows, chosen = [[PROMPT]], dict(window=4)
    schedule = dict(budget=BUDGET, chunk_size=CHUNK, decode=True, interval=CHUNK)
    engine = ours(model(), "snapkv", rows, 0, **chosen, **schedule)[-1][0]
    host = Host(model(), "snapkv", BUDGET, kv="int8", **chosen)
    logits = host.read(torch.cat(tokens(rows, 0)[0]), drawn(PROMPT))
    assert (logits - engine[0]).abs().max() < 0.02 * engine[0].abs().max()
    pairs = zip(itertools.chain(*host.kept(PROMPT)), itertools.chain(*engine[1]), strict=True)
    assert all(len({*mine} & {*own}) >= 0.9 * BUDGET for mine, own in pairs)


@pytest.mark.parametrize(("kind", "slots", "state"), [
    ("model", 23_592_960, 25_067_520), ("int8", 12_533_760, 14_255_520), ("k8v4", 9_584_640, 12_558_240),
    ("int4", 6_635_520, 8_357_040),
])  # fmt: skip
def test_a_state_has_little_beside_its_slots(kind, slots, state):
    """Bytes of a request: SmolLM2-135M's shape (30 layers, 9 heads on 3, 64) in bf16, 512 + 512 slots."""
    options = VllmOptions(policy_of(dict(policy="snapkv", budget=512), 512), 512, 3, kind)
    shape = StateShape(3, 64, torch.bfloat16, options)
    assert (30 * shape.rows * sum(shape.row_bytes), 60 * shape.plane_bytes) == (slots, state)
