"""Where the rows of a chunk observe themselves, one op attends and measures: the same slots and scores as two ops."""

import pytest
import tiny
import torch
from caches import held

import kvevict
from kvevict.engine.measure.quantities.attention import AttentionWeight
from kvevict.engine.measure.quantities.repetition import RepeatedAttention
from kvevict.engine.read import layer


def read(policy, prompts, monkeypatch, apart=False, **model):
    """(the cache, logits, how many layers of chunks one op has measured) of a prompt read by chunks of 70."""
    counted = []
    if apart:
        monkeypatch.setattr(layer, "_measured", lambda call: False)
    for kind in (AttentionWeight, RepeatedAttention):
        own = vars(kind)["attend"]

        def attend(self, rows, step, op, own=own):
            found = own(self, rows, step, op)
            counted.append(found is not None)
            return found

        monkeypatch.setattr(kind, "attend", attend)
    net = tiny.model(**model)
    kvevict.patch(net, policy, budget=40, chunk_size=70)
    with torch.no_grad():
        out = net(**prompts, use_cache=True)
    monkeypatch.undo()
    return out.past_key_values, out.logits, sum(counted)


CASES = [
    ("h2o", {}, True), ("h2o", dict(family="gpt_oss"), True), ("h2o", dict(dtype=torch.bfloat16), True),
    ("h2o", dict(family="gemma2"), True), ("kvzip", {}, True), ("read-twice", dict(family="qwen3"), True),
    ("kvzip", dict(dtype=torch.bfloat16), True), ("kvzip+", {}, False), ("snapkv", {}, False), ("tova", {}, False),
    ("take", {}, False),
]  # fmt: skip


@pytest.mark.parametrize("policy, model, fuses", CASES)
@pytest.mark.parametrize("pad", [(0,), (0, 90)])
def test_same_slots(policy, model, fuses, pad, monkeypatch):
    """Bit by bit, with padding, too: kvzip's rows of a batch with padding are not the last ones, so no op fits them."""
    prompts = tiny.prompt(len(pad), 230, pad=pad)
    cache, logits, count = read(policy, prompts, monkeypatch, **model)
    other, others, none = read(policy, prompts, monkeypatch, apart=True, **model)
    assert torch.equal(logits, others)
    for mine, its in zip(held(cache), held(other), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)
    assert none == 0 and (count > 0) == fuses


def test_whatever_torch_makes_by_default():
    """torch's default dtype, which a model of 16 bits may have left, changes no slot: a probe's average is fp32."""
    net, ids = tiny.model(dtype=torch.bfloat16), torch.arange(2, 200)[None] % 97
    kvevict.patch(net, "take", budget=40, chunk_size=70)
    kept = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            with torch.no_grad():
                net(ids, use_cache=True, logits_to_keep=1)
        finally:
            torch.set_default_dtype(torch.float32)
        kept.append(kvevict.report(net, positions=True)["positions"])
    assert kept[0] == kept[1]
