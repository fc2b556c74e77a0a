"""`kvevict.vllm.state` without vLLM: a host that reads a request in steps of any length. Its slots and logits are those
of the Transformers engine that reads chunks of a period and evicts every period of decoded tokens (METHODS 14)."""

from types import SimpleNamespace

import pytest
import torch
from policy_cases import BUDGET, CHUNK, model, ours, tokens, truth
from states_host import Host, drawn

from kvevict.engine.record.calls import Calls
from kvevict.vllm.layers import Layers
from kvevict.vllm.options import SCHEDULER, check, policy_of
from kvevict.vllm.state import States

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
    "h2o": {},
    "h2o+caote": {},
    "vatp": dict(sink=3),
    "knorm": {},
    "keydiff": {},
    "random": {},
}
COMPETING = {"adakv", "edie", "edie-exact", "paasvn", "chunkkv", "chunkkv, whole runs"}
# A probe is not appended here, as the engine's is while decoding.
DECODED = {"take": dict(probe=4, warmup_layers=None), "take+edie": dict(probe=5, kernel=5, warmup_layers=None)}


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


@pytest.mark.parametrize("name", [*CASES, *DECODED])
def test_no_step_waits_for_the_device(name, monkeypatch):
    """A step of decoded tokens reads no number from a tensor. Where all heads keep equally many slots the host knows
    their number, and reads none while a prompt is read or slots are evicted either."""
    host = Host(model(), name.split(",")[0], BUDGET, **(CASES | DECODED)[name])
    length, reads = PROMPT + 2 * CHUNK + 3, {}
    for owner, verb in (States, "read"), (States, "begin"), (States, "decode"), (Layers, "singles"):
        inner = getattr(owner, verb)

        def noted(*args, inner=inner, verb=verb):
            with Calls() as calls:
                out = inner(*args)
            reads.setdefault(verb, set()).add(calls.reads)
            return out

        monkeypatch.setattr(owner, verb, noted)
    ids = torch.cat(tokens([[length]], 0)[0])
    host.read(ids, [CHUNK - 3, PROMPT, *range(PROMPT + 1, length)])
    assert reads["decode"] == reads["singles"] == {None}
    assert (reads["read"] == reads["begin"] == {None}) == (name not in COMPETING)


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


def test_everything_is_kept_where_it_fits():
    ids = torch.cat(tokens([[PROMPT]], 0)[0])
    with torch.no_grad():
        want = model()(ids[None]).logits[0]
    for policy in ("edie", "snapkv"):
        host = Host(model(), policy, PROMPT, window=4)
        torch.testing.assert_close(host.read(ids, drawn(PROMPT)), want, rtol=0, atol=2e-5 * want.abs().max().item())
        assert host.kept(PROMPT) == [[[*range(PROMPT)]] * 2] * 4


@pytest.mark.parametrize(("given", "said"), [
    (dict(policy="take"), "layers do not wait for each other: give 'take:warmup_layers=none'"),
    (dict(policy="take:warmup_layers=3,probe=8"), "give 'take:probe=8,warmup_layers=none'"),
    (dict(policy="take", warmup_layers=3), "give 'take:warmup_layers=none'"),
    (dict(policy="edie+tada"), "part of a state has the same size: give 'edie\\+tada:layers=uniform'"),
    (dict(policy="fastkv"), "read the same tokens: give 'fastkv:tsp=none'"),
    (dict(policy="snapkv:carry=max"), "no numbers of slots but sums of attention: give 'snapkv:carry=none'"),
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
    (dict(use_ubatching=True), "leave --enable-dbo and --ubatch-size out"),
    (dict(pipeline_parallel_size=2), "leave these parallel sizes at 1"),
    (dict(tensor_parallel_size=2), "leave --tensor-parallel-size at 1, or give a policy without"),
    (dict(cache_dtype="fp8"), "leave --kv-cache-dtype out"),
    (dict(scheduler_cls=SCHEDULER), "needs --logits-processors kvevict.vllm.copies:RequestCopies"),
    (dict(scheduler_cls=SCHEDULER, use_v2_model_runner=True), "set VLLM_USE_V2_MODEL_RUNNER=0"),
])  # fmt: skip
def test_models_and_configurations_are_refused(changes, said):
    config = SimpleNamespace(
        use_mla=False, is_hybrid=False, is_attention_free=False, is_encoder_decoder=False, runner_type="generate",
        speculative_config=None, kv_transfer_config=None, pipeline_parallel_size=1, use_ubatching=False,
        tensor_parallel_size=1, decode_context_parallel_size=1,
        cache_dtype="auto", scheduler_cls=None, logits_processors=None, use_v2_model_runner=False,
    )  # fmt: skip
    config.model_config = config.parallel_config = config.cache_config = config.scheduler_config = config
    competing, equal = (policy_of(dict(policy=name), 64) for name in ("edie", "take+edie"))
    check(config, competing)
    vars(config).update(changes)
    with pytest.raises(ValueError, match=said):
        check(config, competing)
    if "tensor_parallel_size" in changes:
        check(config, equal)
