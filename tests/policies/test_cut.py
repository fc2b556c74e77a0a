"""`kvevict.engine.cut` alone, as a second host calls it: an attention function that stores each layer's slots itself
and cuts them after every chunk, without a call, step or chooser of the engine. It keeps what the float64 oracle and the
engine keep, and computes the same logits."""

import copy
import itertools

import numpy as np
import pytest
import torch
from policy_cases import BUDGET, CHUNK, model, ours, tokens, truth
from transformers import AttentionInterface

from kvevict.engine.cut import cut, protected
from kvevict.engine.memory.ranks import ALONE
from kvevict.engine.memory.stored import Stored
from kvevict.ops import _ops
from kvevict.policy.building import build
from kvevict.policy.inputs import need
from kvevict.policy.seen.rows import CallRows, Chunk, LayerRows, Observation, Observers
from kvevict.policy.seen.slots import KV, Heads, Slots

CASES = {
    "streaming": {}, "knorm": {}, "keydiff, ada": dict(heads="ada"), "snapkv": dict(window=4), "adakv": dict(window=4),
    "take, window": dict(rows="window", window=4, warmup_layers=None), "snapkv+caote": dict(window=4),
    "edie": dict(window=4), "edie, equal": dict(window=5, heads="equal", weight="i>w"), "h2o": {},
    "h2o, flat": dict(heads="flat"), "vatp": dict(sink=2), "tova": {}, "chunkkv": dict(window=4, c=5),
    "chunkkv, whole runs": dict(window=4, c=4, exact=False, per_head=True, heads="ada"),
    "snapkv, by layer": dict(window=4, select_by_layer=((0, 2, "chunk"),)),
    "adakv, critical": dict(window=4, refine="critical"),
}  # fmt: skip
ROWS = [[3 * CHUNK], [3 * CHUNK]]


def held(heads):
    """The slots [b][h] -> (k [n, D], v [n, D], pos [n]) of a layer as ops and quantities read them."""
    counts = np.array([[len(pos) for _, _, pos in row] for row in heads])
    starts = (counts.cumsum() - counts.ravel()).reshape(counts.shape)
    flat = [torch.cat(parts) for parts in zip(*itertools.chain(*heads), strict=True)]
    sizes = dict(offset=torch.tensor(starts), len=torch.tensor(counts, dtype=torch.int32), counts=counts, starts=starts)
    return Stored(*flat, **sizes, like=flat[0][:0])


class Host:
    """The layers' slots, between the chunks of a batch without padding."""

    def __init__(self, policy, last):
        self.policy, self.last, self.heads, self.carried = policy, last, {}, {}

    def attend(self, module, q, k, v, scale):
        """Attend over [stored | new], then keep BUDGET slots of each head on average: out [B, T, H, D]."""
        index, policy, (B, Hkv, T, _) = module.layer_idx, self.policy, k.shape
        none = [[(k[0, 0, :0], v[0, 0, :0], torch.empty(0, dtype=torch.int32))] * Hkv] * B
        stored, options = held(self.heads.get(index, none)), dict(scale=scale, softcap=0.0, sinks=None)
        first, positions = torch.zeros(B, dtype=torch.int32), (self.start + torch.arange(T).int()).expand(B, -1)
        out, lse = _ops.attend(q, stored, k, v, first, **options)
        chunk = Chunk(self.start, self.start + T, self.start + T == self.last, 0)
        call = CallRows(positions=positions.contiguous(), first=first, padding=np.zeros(B, int), chunk=chunk)
        rows = LayerRows(call, np.full(B, BUDGET), None, q, out, lse)
        counts = stored.counts + T
        ends = protected(policy, policy.rows, index, rows, counts.max(1))
        kv = KV(stored, k, v, first, options)
        slots = Slots(index, Heads(ALONE, Hkv), counts, ends, call.positions, stored, kv)
        choice = cut(
            policy, slots, policy.rows.observe(rows, None) if policy.rows.most else None, np.full(B, BUDGET * Hkv),
            order=index, carried=self.carried.get(index),
            given={need("output_weight"): module.o_proj.weight.T.unflatten(0, (q.shape[1], -1))},
        )  # fmt: skip
        self.carried[index], self.heads[index] = choice.carried, [[None] * Hkv for _ in range(B)]
        for b, h, own in stored.segments():
            each = zip((stored.k, stored.v, stored.pos), (k[b, h], v[b, h], positions[b]), strict=True)
            at = choice.index[b, h, : choice.keep[b, h]].long()
            self.heads[index][b][h] = tuple(torch.cat([old[own], new])[at] for old, new in each)
        return out

    @torch.no_grad()
    def read(self, made, ids):
        """The logits [B, T, V] of a prompt, read chunk by chunk."""
        AttentionInterface.register("second host", lambda module, q, k, v, _, scaling, **kwargs: (
            self.attend(module, q, k, v, scaling), None
        ))  # fmt: skip
        made = copy.deepcopy(made)
        made.config._attn_implementation_internal = "second host"
        logits = []
        for self.start in range(0, ids.shape[1], CHUNK):
            at = self.start + torch.arange(CHUNK)[None]
            logits.append(made(ids[:, at[0]], position_ids=at, use_cache=False).logits)
        return torch.cat(logits, 1)


@pytest.mark.parametrize("name", CASES)
def test_a_second_host_keeps_what_the_engine_and_the_oracle_keep(name):
    preset, chosen = name.split(",")[0], CASES[name] | dict(budget=BUDGET, chunk_size=CHUNK)
    seed, (want,) = truth(model(), preset, ROWS, **chosen)
    host = Host(build(preset, **chosen), ROWS[0][0])
    logits = host.read(model(), torch.stack([row for (row,) in tokens(ROWS, seed)]))
    (engine,) = ours(model(), preset, ROWS, seed, **chosen)
    for b, (theirs, positions) in enumerate(want):
        assert [[pos.tolist() for _, _, pos in layer[b]] for layer in host.heads.values()] == positions == engine[b][1]
        torch.testing.assert_close(logits[b].double(), theirs, rtol=0, atol=1e-5 * theirs.abs().max().item())
    cuts = [len(pos) for layer in host.heads.values() for row in layer for *_, pos in row]
    assert sum(cuts) <= BUDGET * len(cuts) < CHUNK * 3 * len(cuts)


def test_what_a_policy_needs_is_asked_for():
    """Without rows that observe, or an input, `cut` says what to give."""
    none, n = torch.zeros(1, dtype=torch.int32), 6
    q, k, v = torch.randn(3, 1, 1, n, 8).unbind()
    stored = held([[(k[0, 0, :0], v[0, 0, :0], none[:0])]])
    kv = KV(stored, k, v, none, dict(scale=1.0, softcap=0.0, sinks=None))
    position = torch.arange(n, dtype=torch.int32)[None]
    slots = Slots(0, Heads(ALONE, 1), np.array([[n]]), (none, none), position, stored, kv)
    best = cut(build("knorm", budget=3), slots, None, np.array([3])).index
    assert best.tolist() == [[sorted(k[0, 0].norm(dim=1).argsort()[:3].tolist())]]
    with pytest.raises(ValueError, match="quantity 'attention' is measured by rows that observe: give an Observation"):
        cut(build("snapkv", window=1, budget=3), slots, None, np.array([3]))
    rows = Observation((Observers(q[:, :, -1:], none, none + n, True),))
    with pytest.raises(ValueError, match="quantity 'output_norm' needs the input 'output_weight': pass it in `given`"):
        cut(build("snapkv", window=1, refine="critical", budget=3), slots, rows, np.array([3]))
