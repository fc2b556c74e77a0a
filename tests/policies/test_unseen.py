"""Appended rows that do not see the question before a text: their attention against a dense one in float64, and the
families whose attention differs."""

import types

import pytest
import torch
import zoo

import kvevict
from kvevict.engine.measure.unseen import attend, observe
from kvevict.engine.memory.ranks import Ranks
from kvevict.engine.read.step import Step
from kvevict.ops import _ops
from kvevict.policy.rows import AppendedRows
from kvevict.policy.seen.slots import Heads, Slots

B, H, HKV, D, S, P = 3, 6, 2, 16, 9, 4


def dense(q, k, v, seen, scale, softcap, sink):
    """softmax of q [P, D] over k [n, D] where `seen` [P, n], with a sink's logit."""
    x = q @ k.T * scale
    x = softcap * torch.tanh(x / softcap) if softcap else x
    x = torch.cat([x.masked_fill(~seen, -torch.inf), sink.expand(len(q), 1)], 1)
    return x.softmax(1)[:, :-1] @ v, x.logsumexp(1)


def truths(q, k, v, held, positions, first, unseen, sees, scale, softcap, sinks):
    """(row, head, `dense` of the last P queries in float64). sees [B, P, new]: the new slots that are not too late."""
    for b in range(B - 1):  # the last row is padding alone
        for h in range(H):
            start, stored = int(held.offset[b, h // 3]), int(held.len[b, h // 3])
            at = slice(start, start + stored)
            keys, values = (torch.cat([x[at], new[b, h // 3]]).double() for x, new in ((held.k, k), (held.v, v)))
            where = torch.cat([held.pos[at].long(), positions[b]])
            seen = ((where < unseen[0]) | (where >= unseen[1])).expand(P, -1).clone()
            seen[:, stored:] &= sees[b] & (torch.arange(len(where) - stored) >= first[b])
            sink = torch.tensor(-torch.inf) if sinks is None else sinks[h]
            yield b, h, dense(q[b, h, -P:].double(), keys, values, seen, scale, softcap, sink.double())


FORMS = pytest.mark.parametrize("softcap, sinks", [(0.0, False), (3.0, False), (0.0, True)])
DTYPES = pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])


@FORMS
@DTYPES
def test_against_a_dense_attention(dtype, near, softcap, sinks):
    """Ragged heads, left padding; the question in stored slots, in the chunk, over both, after both, nowhere."""
    torch.manual_seed(11)
    first, began = torch.tensor([0, 2, 9], dtype=torch.int32), torch.tensor([20, 20, 0])
    counts = torch.tensor([[5, 7], [0, 3], [0, 0]], dtype=torch.int32)
    offset = (counts.flatten().cumsum(0) - counts.flatten()).view(B, HKV)
    stored = int(counts.sum())
    pos = torch.cat([torch.randperm(20)[:n].sort().values for n in counts.flatten().tolist()]).to(torch.int32)
    positions = (began - first)[:, None] + torch.arange(S + P)
    q, k, v = (torch.randn(B, heads, S + P, D).to(dtype) for heads in (H, HKV, HKV))
    held = _ops.Held(torch.randn(stored, D).to(dtype), torch.randn(stored, D).to(dtype), pos, offset, counts)
    options = dict(scale=0.3, softcap=softcap, sinks=torch.randn(H) if sinks else None)
    sees = torch.ones(P, S + P).tril(S).bool().expand(B, -1, -1)
    for unseen in ((3, 12), (22, 25), (15, 23), (40, 44), (7, 7)):
        spans = torch.tensor([unseen] * B, dtype=torch.int32)
        step = Step(
            plan=None, decoder=None, cache=None, meter=None, inputs={}, positions=positions.to(torch.int32),
            first=first, padding=first.numpy(), chunk=types.SimpleNamespace(appended=P),
            extra=AppendedRows(None, None, unseen=spans),
        )  # fmt: skip
        rest = _ops.attend(q, held, k, v, first, **options)
        out, lse = attend(step, q, k, v, held, int(counts.max()), options)
        assert torch.equal(out[:, :S], rest[0][:, :S]) and torch.equal(lse[:, :, :S], rest[1][:, :, :S])
        for b, h, (want, total) in truths(q, k, v, held, positions, first, unseen, sees, **options):
            torch.testing.assert_close(out[b, -P:, h].double(), want, rtol=0, atol=near)
            torch.testing.assert_close(lse[b, h, -P:].double(), total, rtol=0, atol=near)
        assert not out.isnan().any()


@FORMS
@DTYPES
def test_observers_against_a_dense_attention(dtype, near, softcap, sinks):
    """Queries later than all slots. They do not see the new ones from `stop` on either."""
    torch.manual_seed(12)
    first, began, stop = torch.tensor([0, 2, 9], dtype=torch.int32), torch.tensor([20, 20, 0]), torch.tensor([9, 6, 9])
    counts = torch.tensor([[5, 7], [0, 3], [0, 0]], dtype=torch.int32)
    offset = (counts.flatten().cumsum(0) - counts.flatten()).view(B, HKV)
    pos = torch.cat([torch.randperm(20)[:n].sort().values for n in counts.flatten().tolist()]).to(torch.int32)
    positions = (began - first)[:, None] + torch.arange(S)
    q, k, v = (torch.randn(B, heads, rows, D).to(dtype) for heads, rows in ((H, P), (HKV, S), (HKV, S)))
    held = _ops.Held(torch.randn(len(pos), D).to(dtype), torch.randn(len(pos), D).to(dtype), pos, offset, counts)
    options = dict(scale=0.3, softcap=softcap, sinks=torch.randn(H) if sinks else None)
    sees = (torch.arange(S) < stop[:, None])[:, None].expand(-1, P, -1)
    kv = types.SimpleNamespace(k=k, v=v, stored=held, first=first, options=options)
    heads = Heads(Ranks(), HKV)
    slots = Slots(0, heads, (counts + (S - first)[:, None]).numpy(), (first, first), positions.int(), held, kv)
    for unseen in ((3, 12), (22, 24), (15, 23), (27, 29), (40, 44), (7, 7)):
        part = types.SimpleNamespace(q=q, stop=stop, unseen=torch.tensor([unseen] * B))
        out, lse = observe(part, slots)
        for b, h, (want, total) in truths(q, k, v, held, positions, first, unseen, sees, **options):
            torch.testing.assert_close(out[b, :, h].double(), want, rtol=0, atol=near)
            torch.testing.assert_close(lse[b, h].double(), total, rtol=0, atol=near)
        assert not out.isnan().any()


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma3n_text", "gemma2", "gpt_oss"])
def test_families(kind):
    """Latents, shared slots, a softcap, sinks: the question is kept whole, and rows of a batch are as alone."""
    torch.manual_seed(0)
    model = zoo.model(kind)
    ids = torch.randint(3, 90, (2, 48))
    options = dict(budget=24, chunk_size=16, kernel=5, probe=4)

    def read(rows, spans):
        with torch.no_grad(), kvevict.evicting(model, "take+edie", **options), kvevict.observing(spans):
            logits = model(rows, use_cache=True, logits_to_keep=1).logits
            return logits, kvevict.report(model, positions=True)["positions"]

    logits, kept = read(ids, [(4, 9), (2, 7)])
    for b, span in enumerate(((4, 9), (2, 7))):
        assert all({*range(*span)} <= {*head} for layer in kept if layer for head in layer[b])
        alone, positions = read(ids[b : b + 1], span)
        assert [layer and layer[b : b + 1] for layer in kept] == positions
        torch.testing.assert_close(logits[b], alone[0], rtol=0, atol=1e-4 * float(alone.abs().max()))
