"""`kvevict.vllm.state` without vLLM: a host that reads a request in steps of any length. Its slots and logits are those
of the Transformers engine that reads chunks of a period and evicts every period of decoded tokens (METHODS 14)."""

import copy
import itertools
import random
from types import SimpleNamespace

import pytest
import ref
import torch
from policy_cases import BUDGET, CHUNK, model, ours, tokens, truth
from transformers import AttentionInterface

from kvevict.policy.kv import KINDS
from kvevict.vllm.options import VllmOptions, check, policy_of
from kvevict.vllm.shape import StateShape
from kvevict.vllm.state import States, last_of

PROMPT = 3 * CHUNK
CASES = {
    "snapkv": dict(window=4),
    "snapkv, as long as the period": dict(window=CHUNK),
    "snapkv+caote": dict(window=5),
    "adakv": dict(window=4),
    "edie": dict(window=4),
    "edie, equal": dict(window=5, heads="equal", weight="i>w"),
    "edie-exact": dict(window=4),
    "paasvn": dict(window=4),
    "chunkkv": dict(window=4, c=4),
    "chunkkv, whole runs": dict(window=4, c=4, exact=False, per_head=True, heads="ada"),
    "streaming": {},
    "tova": {},
    "knorm": {},
    "keydiff": {},
    "random": {},
}
# A probe is not appended here, as the engine's is while decoding.
DECODED = {"take": dict(probe=4, warmup_layers=None), "take+edie": dict(probe=5, kernel=5)}


class Host:
    """Requests of a model, each in a block of its own, read in steps."""

    def __init__(self, made, policy, budget, dtype=torch.float32, blocks=3, kv="model", stored_as="model", **chosen):
        """stored_as: the kind to whose numbers every key and value is rounded before the states get it."""
        self.stored_as, self.centres = KINDS[stored_as], {}
        given = dict(policy=policy, budget=budget) | chosen
        config = made.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        options = VllmOptions(policy_of(given, CHUNK), CHUNK, heads // kv_heads, kv)
        self.shape, self.caches = StateShape(kv_heads, config.head_dim, dtype, options), {}
        self.made, self.blocks, self.layers = copy.deepcopy(made).to(dtype), blocks, {}
        AttentionInterface.register("states", lambda module, q, k, v, _, scaling, **kwargs: (
            self.attend(module.layer_idx, *(x[0].transpose(0, 1) for x in (q, k, v)), scaling), None
        ))  # fmt: skip
        self.made.config._attn_implementation_internal = "states"

    def attend(self, layer, q, k, v, scale):
        if layer not in self.layers:  # rubbish of earlier requests lies in the blocks
            shape = self.blocks, 2, 1, self.shape.plane_bytes // self.shape.dtype.itemsize
            cache = torch.randint(0, 250, (2, self.blocks, self.shape.plane_bytes), dtype=torch.uint8)
            cache = cache.view(self.shape.dtype).transpose(0, 1).view(shape)
            self.layers[layer] = States(cache, self.shape, layer, dict(scale=scale, softcap=0.0, sinks=None))
        states, blocks, before = self.layers[layer], self.at, self.before
        if any(self.stored_as):
            k, v = self.rounded(layer, k, v)
        if len(blocks) == len(q) and min(before) > 0:
            last = last_of(self.shape.options, blocks, before)
            return states.decode(q, k, v, torch.tensor(blocks), torch.tensor(before), last)[None]
        return states.read(q, k, v, blocks[0], before[0])[None]

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

    @torch.no_grad()
    def step(self, ids, blocks, before):
        """Logits of a step: of rows of one request, or of a row of each of several."""
        self.at, self.before = blocks, before
        positions = torch.tensor(before) if len(blocks) > 1 else before[0] + torch.arange(len(ids))
        return self.made(ids[None], position_ids=positions[None], use_cache=False).logits[0]

    def read(self, ids, cuts, block=0):
        """The logits [T, V] of a text that is read in steps which end at `cuts`."""
        cuts = [0, *cuts, len(ids)]
        return torch.cat([self.step(ids[a:b], [block], [a]) for a, b in itertools.pairwise(cuts) if a < b])

    def kept(self, count, block=0):
        found = []
        for states in self.layers.values():
            stored = states.stored(block, count)
            found.append([stored.pos[rows].tolist() for _, _, rows in stored.segments()])
        return found


def drawn(length):
    """Ends of steps: of any length, of one token, or of several periods."""
    ends, at = [], 0
    while at < length:
        at += random.choice([1, 1, 2, random.randint(1, CHUNK), 2 * CHUNK + 3])
        ends.append(at)
    return ends[:-1]


@pytest.mark.parametrize("name", [*CASES, *DECODED])
def test_slots_and_logits_are_the_engines_whatever_the_steps(name):
    preset, decoded = name.split(",")[0], name in DECODED
    budget, prompt = (CHUNK, CHUNK) if decoded else (BUDGET, PROMPT)
    chosen = (CASES | DECODED)[name]
    rows = [[prompt, *[1] * (2 * CHUNK + 3)]]
    if "whole runs" in name:  # the engine waits with a cut while decoding until the layer is full, which it is not
        rows = [[prompt, CHUNK, CHUNK]]
    schedule = dict(budget=budget, chunk_size=CHUNK, decode=True, interval=CHUNK)
    seed = 0 if preset == "random" else truth(model(), preset, rows, **chosen, **schedule)[0]
    engine = ours(model(), preset, rows, seed, **chosen, **schedule)
    want = torch.cat([call[0][0] for call in engine])
    ids = torch.cat(tokens(rows, seed)[0])
    host = Host(model(), preset, budget, **chosen)
    for block in range(3):  # each block is used again
        logits = host.read(ids, drawn(len(ids)), block)
        torch.testing.assert_close(logits, want, rtol=0, atol=2e-5 * want.abs().max().item())
        assert host.kept(len(ids), block) == engine[-1][0][1]
        host.read(ids[: CHUNK + 5].flip(0), [3], block)  # another request


def test_requests_that_decode_together_are_as_alone():
    """Three requests of unequal lengths decode in one step across their periods' ends."""
    host, lengths = Host(model(), "edie", BUDGET, window=4), [PROMPT + 1, CHUNK + 7, 5]
    texts = [torch.cat(tokens([[n + 30]], seed)[0]) for seed, n in enumerate(lengths)]
    alone = [host.read(text, [n, *range(n + 1, n + 30)], 0) for text, n in zip(texts, lengths, strict=True)]
    slots = [host.read(text, [], 0) is None or host.kept(len(text)) for text in texts]
    for block, (text, n) in enumerate(zip(texts, lengths, strict=True)):
        host.read(text[:n], [], block)
    together = []
    for at in range(30):
        ids = torch.stack([text[n + at] for text, n in zip(texts, lengths, strict=True)])
        together.append(host.step(ids, [0, 1, 2], [n + at for n in lengths]))
    for block, (n, own) in enumerate(zip(lengths, alone, strict=True)):
        torch.testing.assert_close(torch.stack(together)[:, block], own[n:], rtol=0, atol=1e-4)
        assert host.kept(n + 30, block) == slots[block]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_state_holds_rows_in_16_bits(dtype):
    ids = torch.cat(tokens([[PROMPT]], 0)[0])
    host = Host(model(), "snapkv", BUDGET, dtype, window=4)
    assert host.read(ids, drawn(PROMPT)).isfinite().all()
    assert host.shape.plane_bytes % 4 == 0
    assert [len(head) for layer in host.kept(PROMPT) for head in layer] == [BUDGET] * 8


@pytest.mark.parametrize("kind", ["int8", "k8v4", "int4"])
@pytest.mark.parametrize("name", ["snapkv", "edie", "chunkkv", "snapkv+caote", "streaming", "keydiff"])
def test_packed_slots_are_the_numbers_that_they_stand_for(name, kind):
    """A state with packed rows is near one with rows as computed that gets the packed rows' numbers, by the float64
    reference, whatever the steps of both; in a block that another request has used."""
    ids, chosen = torch.cat(tokens([[PROMPT + CHUNK]], 3)[0]), CASES[name]
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


def test_everything_is_kept_where_it_fits():
    ids = torch.cat(tokens([[PROMPT]], 0)[0])
    with torch.no_grad():
        want = model()(ids[None]).logits[0]
    for policy in ("edie", "snapkv"):
        host = Host(model(), policy, PROMPT, window=4)
        torch.testing.assert_close(host.read(ids, drawn(PROMPT)), want, rtol=0, atol=2e-5 * want.abs().max().item())
        assert host.kept(PROMPT) == [[[*range(PROMPT)]] * 2] * 4


@pytest.mark.parametrize(("kind", "slots", "state"), [
    ("model", 23_592_960, 25_313_280), ("int8", 12_533_760, 14_255_520), ("k8v4", 9_584_640, 12_558_240),
    ("int4", 6_635_520, 8_357_040),
])  # fmt: skip
def test_a_state_has_little_beside_its_slots(kind, slots, state):
    """Bytes of a request: SmolLM2-135M's shape (30 layers, 9 heads on 3, 64) in bf16, 512 + 512 slots."""
    options = VllmOptions(policy_of(dict(policy="snapkv", budget=512), 512), 512, 3, kind)
    shape = StateShape(3, 64, torch.bfloat16, options)
    assert (30 * shape.rows * sum(shape.row_bytes), 60 * shape.plane_bytes) == (slots, state)


@pytest.mark.parametrize(("given", "said"), [
    (dict(policy="take"), "layers do not wait for each other: give 'take:warmup_layers=none'"),
    (dict(policy="take:warmup_layers=3,probe=8"), "give 'take:probe=8,warmup_layers=none'"),
    (dict(policy="take", warmup_layers=3), "give 'take:warmup_layers=none'"),
    (dict(policy="edie+tada"), "part of a state has the same size: give 'edie\\+tada:layers=uniform'"),
    (dict(policy="fastkv"), "read the same tokens: give 'fastkv:tsp=none'"),
    (dict(policy="h2o"), "no numbers of slots: give snapkv, edie"),
    (dict(policy="read-twice"), "give snapkv, edie"),
    (dict(policy="expected"), "more than a layer's slots and rows: give snapkv"),
    (dict(policy="laq"), "not a text's last ones: give 'laq:rows=window'"),
    (dict(policy="snapkv", recall=True), "no constant size: give 'snapkv:recall=False'"),
    (dict(policy="snapkv", n_reuse=2), "give 'snapkv:n_reuse=1'"),
    (dict(policy="take:probe=(3,9),warmup_layers=none"), "give 'take:warmup_layers=None,probe=32'"),
    (dict(policy="snapkv", budget=0.5), "give budget as a number of slots"),
    (dict(policy="snapkv", budget=32), "always keeps 32 slots of each head"),
    (dict(policy="snapkv", kv="int8"), "kv is not an option here"),
    (dict(policy="snapkv", interval=3), "interval is not an option here"),
    (dict(policy="snapkv", window=100), "period=64 is less than the 100 rows that observe"),
    (dict(policy="snapkv", windw=9), "did you mean 'window'"),
    (dict(policy="snapkw"), "did you mean 'snapkv'"),
])  # fmt: skip
def test_what_cannot_work_is_refused_by_name(given, said):
    with pytest.raises(ValueError, match=said):
        policy_of(dict(budget=512) | given, 64)


def test_the_budget_that_nobody_named():
    """4,096 slots, or as many as the model's context has tokens."""
    assert policy_of(dict(policy="snapkv"), 64).budget == 4096
    assert policy_of(dict(policy="snapkv"), 64, 900).budget == 900
    assert policy_of(dict(policy="snapkv:budget=70"), 64, 900).budget == 70
    assert policy_of(dict(policy="snapkv", budget=80), 64, 900).budget == 80


@pytest.mark.parametrize(("changes", "said"), [
    (dict(use_mla=True), "latents"),
    (dict(is_hybrid=True), "layers with a state"),
    (dict(runner_type="pooling"), "decoders that generate"),
    (dict(speculative_config=1), "leave --speculative-config out"),
    (dict(kv_transfer_config=1), "leave --kv-transfer-config out"),
    (dict(world_size=2), "leave parallel sizes at 1"),
    (dict(cache_dtype="fp8"), "leave --kv-cache-dtype out"),
])  # fmt: skip
def test_models_and_configurations_are_refused(changes, said):
    config = SimpleNamespace(
        use_mla=False, is_hybrid=False, is_attention_free=False, is_encoder_decoder=False, runner_type="generate",
        speculative_config=None, kv_transfer_config=None, world_size=1, decode_context_parallel_size=1,
        cache_dtype="auto",
    )  # fmt: skip
    config.model_config = config.parallel_config = config.cache_config = config
    check(config)
    vars(config).update(changes)
    with pytest.raises(ValueError, match=said):
        check(config)
