"""A host of `kvevict.vllm.state` without vLLM: it reads requests in steps of any length."""

import copy
import itertools
import random

import ref
import torch
from policy_cases import CHUNK
from transformers import AttentionInterface

from kvevict.policy.kv import KINDS
from kvevict.vllm.layers import Layers
from kvevict.vllm.options import VllmOptions, policy_of
from kvevict.vllm.questions import NONE
from kvevict.vllm.shape import StateShape
from kvevict.vllm.state import States


def cache(shape, blocks, rubbish=range(250)):
    """A layer's cache of so many blocks, in which bytes of earlier requests lie."""
    planes = torch.randint(rubbish.start, rubbish.stop, (2, blocks, shape.plane_bytes), dtype=torch.uint8)
    return planes.view(shape.dtype).transpose(0, 1).unsqueeze(2)


class Host:
    """Requests of a model, each in a block of its own, read in steps. vLLM's block 0, which has no request, comes
    before those of the tests."""

    def __init__(self, made, policy, budget, dtype=torch.float32, blocks=3, kv="model", stored_as="model", **chosen):
        """stored_as: the kind to whose numbers every key and value is rounded before the states get it."""
        self.stored_as, self.centres, self.copies, self.positions = KINDS[stored_as], {}, NONE, None
        given = dict(policy=policy, budget=budget) | chosen
        config = made.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        options = VllmOptions(policy_of(given, CHUNK), CHUNK, heads // kv_heads, kv)
        self.shape, self.made = StateShape(kv_heads, config.head_dim, dtype, options), copy.deepcopy(made).to(dtype)
        attention = dict(scale=self.made.model.layers[0].self_attn.scaling, softcap=0.0, sinks=None)
        caches = [cache(self.shape, blocks + 1) for _ in range(config.num_hidden_layers)]
        self.layers = Layers([States(each, self.shape, i, attention) for i, each in enumerate(caches)], blocks)
        self.layers.kept.random_(250)  # earlier requests' counts
        AttentionInterface.register("states", lambda module, q, k, v, _, scaling, **kwargs: (
            self.attend(module.layer_idx, *(x[0].transpose(0, 1) for x in (q, k, v))), None
        ))  # fmt: skip
        self.made.config._attn_implementation_internal = "states"

    def attend(self, layer, q, k, v):
        if any(self.stored_as):
            k, v = self.rounded(layer, k, v)
        states = self.layers.states[layer]
        if self.singles is not None:
            return states.decode(q, k, v, self.singles)[None]
        return states.read(q, k, v, self.block, self.before[0], self.copies)[None]

    def rounded(self, layer, k, v):
        """The numbers that rows of the kind stand for by the float64 reference; a head's centre is its first key."""
        if self.before[0] == 0:
            self.centres[layer] = k[0].double()
        centres = [[centre, 0.0] for centre in self.centres[layer]]
        return [
            torch.stack([
                ref.unpacked(ref.packed(x[:, h], kind, centre[i]), x.shape[2], kind, centre[i]).to(x.dtype)
                for h, centre in enumerate(centres)
            ], 1)
            for i, (x, kind) in enumerate(zip((k, v), self.stored_as, strict=True))
        ]  # fmt: skip

    def described(self, blocks, before, rows):
        """The description of a step's requests if each has one row, for which their next periods are begun; None."""
        if len(blocks) < rows:
            return None
        blocks = [block + 1 for block in blocks]
        for block, tokens in zip(blocks, before, strict=True):
            if self.shape.options.ends(tokens):
                self.layers.begin(block, tokens, self.copies)
        return self.layers.singles(torch.tensor(blocks).int(), torch.tensor(before).int() + 1, blocks)

    @torch.no_grad()
    def step(self, ids, blocks, before):
        """Logits of a step: of rows of one request, or of a row of each of several."""
        self.before, self.singles, self.block = before, self.described(blocks, before, len(ids)), blocks[0] + 1
        positions = torch.tensor(before) if len(blocks) > 1 else before[0] + torch.arange(len(ids))
        positions = positions if self.positions is None else self.positions[positions]
        return self.made(ids[None], position_ids=positions[None], use_cache=False).logits[0]

    def read(self, ids, cuts, block=0):
        """The logits [T, V] of a text that is read in steps which end at `cuts`."""
        cuts = [0, *cuts, len(ids)]
        return torch.cat([self.step(ids[a:b], [block], [a]) for a, b in itertools.pairwise(cuts) if a < b])

    def kept(self, count, block=0):
        """The slots of the request in a block, which has read `count` tokens and gets no more."""
        found, block = [], block + 1
        if self.shape.options.ends(count):
            self.layers.begin(block, count, self.copies)
        for states in self.layers.states:
            stored = states.stored(block, count, self.copies)
            found.append([stored.pos[rows].tolist() for _, _, rows in stored.segments()])
        return found


def drawn(length):
    """Ends of steps: of any length, of one token, or of several periods."""
    ends, at = [], 0
    while at < length:
        at += random.choice([1, 1, 2, random.randint(1, CHUNK), 2 * CHUNK + 3])
        ends.append(at)
    return ends[:-1]
