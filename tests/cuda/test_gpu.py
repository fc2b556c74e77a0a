"""On a GPU: streams, CUDA graphs, several devices, and patched models. The ops' own tests check results there, too
(conftest.py)."""

import copy
import json
from dataclasses import replace

import helpers
import numpy as np
import pytest
import ref
import tiny
import torch
from helpers import Moved, held_of, same_bits
from problems import i32, problem
from recalling import every

import kvevict
from kvevict.answering import writing
from kvevict.answering.batch import Batch, Pools
from kvevict.answering.writing import Sampling
from kvevict.engine.memory import host
from kvevict.engine.memory.tiers import Tiers
from kvevict.models.families import find_decoder
from kvevict.ops import _ops as ops
from kvevict.policy.kv import KINDS
from kvevict.train.lookahead import Adapter, train
from kvevict.train.lookahead.passes import loss, truth

pytestmark = pytest.mark.skipif(not helpers.on_gpu(), reason="needs a GPU and a build with CUDA")


def made(device, seed=1, kv="model"):
    """A chunk of 33 on 2 x 2 heads with up to 300 slots, to be cut back to 60."""
    p = problem(seed, T=33, G=4, lens=[[300, 100], [60, 250]], first=[0, 5], room=40, dtype=torch.bfloat16)
    for name, kind in zip("kv", KINDS[kv], strict=True):
        if kind:
            p[f"held_{name}"] = ref.packed(p[f"held_{name}"].nan_to_num(), kind)
            p[f"held_{name}_kind"] = kind
    p |= {"n": p["held_len"] + 33 - p["first"][:, None], "keep": i32([[60, 60]] * 2), "ends": i32([4, 4])}
    moved = Moved(torch.device(device))
    return {name: moved(value) for name, value in p.items()}


def chunk(p):
    """The ops of a chunk and a decoded token; returns everything they return or write."""
    held, new, options = held_of(p), (p["k"], p["v"]), {"scale": p["scale"]}
    out, lse = ops.attend(p["q"], held, *new, p["first"], **options)
    rows = p["q"], p["row_first"], held, new[0], p["first"], torch.full_like(p["first"], 33), lse
    score = ops.score(*rows, reduce="sum", columns=333, **options)
    more = dict(row_first=p["row_first"], stop=rows[5], observers=33, causal=False, reduce="sum", columns=333)
    both = ops.attend_score(p["q"], held, *new, p["first"], **more, **options)
    assert all(map(same_bits, both, (out, lse, score)))
    decay = torch.ones(len(out), device=out.device) / 5
    average = ops.probe(p["q"], p["q"].float().contiguous(), decay)
    index = ops.select(score, p["n"], p["keep"], p["ends"], p["ends"], 60)
    ops.compact(held, *new, p["pos"], p["first"], index, p["keep"], held)
    token = [x[:, :, -1:] for x in (p["q"], *new)]
    pos = p["pos"][:, -1:].contiguous()
    decoded = ops.decode(*token, pos, replace(held, len=p["keep"]), columns=61, **options)
    return [out, lse, score, average, index, *decoded, held.k, held.v, held.pos]


def same(a, b):
    return all(same_bits(x.cpu(), y.cpu()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kv", KINDS)
def test_repeats_bit_for_bit(kv):
    assert same(chunk(made("cuda", kv=kv)), chunk(made("cuda", kv=kv)))


def test_current_stream():
    """On a side stream, after a wait that an op on another stream would not observe."""
    want, p = chunk(made("cuda")), made("cuda")
    k, side = p["k"].clone(), torch.cuda.Stream()
    p["k"].zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**8)
        p["k"].copy_(k)
        got = chunk(p)
    side.synchronize()
    assert same(got, want)


@pytest.mark.parametrize("kv", ["model", "k8v4"])
def test_graph(kv):
    """Captured once, replayed on other queries, keys and values."""
    p = made("cuda", kv=kv)
    chunk(made("cuda", kv=kv))  # the setup of the first call must not be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chunk(p)
    for seed in (1, 2, 3):
        want = made("cuda", kv=kv)
        for name in "qkv":
            want[name].copy_(made("cuda", seed)[name])
        for name in (*"qkv", "held_k", "held_v", "held_pos"):
            p[name].copy_(want[name])
        graph.replay()
        assert same(got, chunk(want))


HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not HOPPER, reason="needs compute capability 9.0")
@pytest.mark.parametrize("reduce, group", [("sum", "mean"), ("max", "none")])
@pytest.mark.parametrize("D, dtype", [(64, torch.bfloat16), (80, torch.float16), (128, torch.bfloat16)])
def test_score_by_wgmma(D, dtype, reduce, group, monkeypatch):
    """It is the kernel that runs, repeats bit for bit, and gives the other kernel's and the oracle's scores."""
    p = problem(3, B=2, Hkv=2, G=3, T=700, D=D, dtype=dtype, lens=[[900, 31], [0, 513]], first=[0, 9])
    p |= {"stop": i32([700, 690]), "row_first": i32([0, 5]), "columns": 1600, "lse": None, "causal": True}
    p |= {"reduce": reduce, "group": group}
    monkeypatch.setattr(helpers, "device", torch.device("cuda"))
    want = helpers.call(ops.score, p)
    monkeypatch.setenv("KVEVICT_WGMMA", "1")
    with torch.profiler.profile() as profile:
        got = helpers.call(ops.score, p)
    assert any("score_sm90_kernel" in event.key for event in profile.key_averages())
    assert same_bits(got, helpers.call(ops.score, p))
    helpers.close(got, helpers.call(ref.score, p), 2 * helpers.FP32)
    helpers.close(got, want.double(), 2 * helpers.FP32)


def test_more_heads_than_a_grid():
    """65,540 heads, where gridDim.y ends at 65,535: as on the CPU."""
    gen, results = torch.Generator().manual_seed(2), []
    q, k, v = (torch.randn(16385, 4, 2, 8, generator=gen) for _ in "qkv")
    slots, offset, zeros = torch.empty(0, 8), torch.zeros(16385, 4, dtype=torch.int64), i32([0] * 16385)
    held = slots, slots, None, offset, offset.int()
    for device in ("cpu", "cuda"):
        moved = Moved(torch.device(device))
        Q, K, V, Z = map(moved, (q, k, v, zeros))
        stored = ops.Held(*map(moved, held))
        out, lse = ops.attend(Q, stored, K, V, Z, scale=1.0)
        score = ops.score(Q, Z, stored, K, Z, Z + 2, lse, reduce="sum", columns=2, scale=1.0)
        results.append([x.cpu() for x in (out, lse, score, ops.norm(stored, K, Z, Z + 2, p=2, columns=2))])
    for mine, want in zip(*results[::-1], strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_device_than_the_current():
    assert same(chunk(made("cuda:1")), chunk(made("cuda:0")))


def test_tensors_on_two_devices():
    p = made("cuda")
    with pytest.raises(ValueError, match=r"held\.len is on cpu, the others on cuda"):
        chunk({**p, "held_len": p["held_len"].cpu()})


def moved_to(device, inputs):
    return {name: each.to(device) for name, each in inputs.items()}


def slots_of(cache):
    """{(layer, row, head, position)} that the cache holds."""
    heads = ((i, b, h, head) for i, layer in enumerate(cache.layers) for b, row in enumerate(layer.positions())
             for h, head in enumerate(row))  # fmt: skip
    return {(*at, position) for *at, head in heads for position in head.tolist()}


@pytest.mark.parametrize("kind", ["int8", "k8v4", "int4"])
def test_packed_slots_as_on_the_cpu(kind):
    """The same slots, of as many bytes, after an eviction that rounding does not change, and logits without NaN."""
    inputs, found = tiny.prompt(2, 150), []
    for device in ("cpu", "cuda"):
        model = kvevict.patch(tiny.model().to(device), "streaming", budget=48, chunk_size=40, kv=kind)
        with torch.no_grad():
            cache = model(**moved_to(device, inputs), use_cache=True).past_key_values
            logits = model(inputs["input_ids"][:, :1].to(device), past_key_values=cache).logits
        storages = [layer.storage for layer in cache.layers]
        found.append((slots_of(cache), [(each.k.shape, each.v.shape, each.kinds) for each in storages]))
        assert logits.isfinite().all()
    assert found[0] == found[1]


def adapter_of(model):
    """An adapter without zeros; before training half of a LoRA is zero."""
    torch.manual_seed(3)
    made = Adapter(model, tokens=4, rank=2)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return made


def options_of(preset, device):
    """What a preset needs beside a budget."""
    if preset == "lookahead":
        return dict(adapter=adapter_of(tiny.model()).to(device))
    if preset.startswith("speckv"):
        return dict(draft_model=tiny.model(num_hidden_layers=1, seed=1).to(device))
    return dict(ids=(5, 6, 7)) if preset == "oracle" else {}


PRESETS = sorted({*kvevict.policies()} - {"gate"})  # gates are trained


@pytest.mark.parametrize("chunk_size", [None, 256])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_keeps_the_slots_of_the_cpu(preset, chunk_size):
    """In fp32, but for numbers that the order of sums exchanges. A prompt of the batch is padded."""
    inputs, found = tiny.prompt(2, 700, pad=(0, 50)), []
    for device in ("cpu", "cuda"):
        model = tiny.model().to(device)
        chunks = {} if chunk_size is None else dict(chunk_size=chunk_size)
        kvevict.history("default").reset()  # TADA's
        kvevict.patch(model, preset, budget=300, **chunks, **options_of(preset, device))
        with torch.no_grad():
            output = model(**moved_to(device, inputs), logits_to_keep=1)
        found.append((slots_of(output.past_key_values), output.logits.cpu()))
    (want, logits), (mine, own_logits) = found
    assert len(mine) == len(want) and len(mine & want) >= 0.98 * len(want)
    assert tiny.relative(own_logits, logits) < 0.1


@pytest.mark.parametrize("preset", ["take", "snapkv", "h2o", "streaming"])
@pytest.mark.parametrize("decode", [False, True])
def test_model_reads_as_on_the_cpu(preset, decode):
    """The same tokens in fp32, greedily, as long as no two logits are closer than the sums' rounding."""
    inputs, answers = tiny.prompt(2, 150, pad=(0, 9)), []
    for device in ("cpu", "cuda"):
        model = kvevict.patch(tiny.model().to(device), preset, budget=48, chunk_size=40, decode=decode)
        answers.append(tiny.generate(model, moved_to(device, inputs), 12).cpu())
        assert kvevict.report(model)["kept"]
    assert torch.equal(*answers)


def test_caches_are_saved_forked_and_joined_as_on_the_cpu(tmp_path):
    """A cache that a CPU saved is loaded on the GPU; forks and another cache then decode together in a pool."""
    steps = []
    for device in ("cpu", "cuda"):
        model = kvevict.patch(tiny.model().to(device), "snapkv", budget=48, chunk_size=40)
        pools, batch = Pools(find_decoder(model), 4096), Batch(model)
        with torch.no_grad():
            if device == "cpu":
                cache = model(**tiny.prompt(1, 150), use_cache=True).past_key_values
                kvevict.save_cache(cache, tmp_path / "text")
            loaded = kvevict.load_cache(tmp_path / "text", model)
            ids = tiny.prompt(1, 20, seed=2)["input_ids"].to(device)
            other = model(ids, past_key_values=pools.cache(), logits_to_keep=1).past_key_values
            for row, each in enumerate((loaded.fork(), copy.deepcopy(loaded), other)):
                batch.add(row, each)
            steps.append(torch.stack([batch.step([5 + step] * 3).cpu() for step in range(8)]))
    assert tiny.relative(*steps[::-1]) < 1e-3


@pytest.mark.parametrize("policy", ["take+edie", "snapkv"])
def test_questions_are_answered_as_on_the_cpu(policy, tmp_path):
    folder, _ = tiny.save(tmp_path / "model")
    tokenizer, answers = tiny.byte_tokenizer(), []
    for device in ("cpu", "cuda"):
        model = tiny.transformers.AutoModelForCausalLM.from_pretrained(folder).to(device)
        kvevict.patch(model, policy, budget=64, chunk_size=128, tokenizer=tokenizer)
        context, questions = "The river is long and the town is old. " * 12, ["How old is it?", "Which river?"]
        answers.append(kvevict.answer(model, tokenizer, context, questions, max_new_tokens=6))
    assert answers[0] == answers[1]


def test_an_adapters_gradients_are_those_of_the_cpu():
    """Of LookaheadKV's loss: the KL divergence and its backward pass, the learned tokens and the LoRA."""
    made, ids = adapter_of(tiny.model()), tiny.prompt(1, 60)["input_ids"][0]
    grads = []
    for device in ("cpu", "cuda"):
        decoder, adapter = find_decoder(tiny.model().to(device)), copy.deepcopy(made).to(device)
        loss(decoder, adapter, truth(decoder, *(each.to(device) for each in ids.split([50, 10])))).backward()
        grads.append({name: weight.grad.cpu() for name, weight in adapter.named_parameters()})
    want, mine = grads
    assert max(each.abs().max() for each in want.values()) > 1e-3
    for name, each in want.items():
        torch.testing.assert_close(mine[name], each, rtol=1e-3, atol=1e-5)


def test_an_adapter_trains(tmp_path):
    rows = tiny.prompt(4, 60)["input_ids"].tolist()
    pairs = [dict(prompt=row[:50], response=row[50:]) for row in rows]
    train(tiny.model().to("cuda"), pairs, tmp_path, steps=12, batch=4, lr=2e-3, tokens=4, rank=2, progress=False)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] and len(losses) == 12


@pytest.mark.parametrize("kind", ["model", "int8"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("policy", ["take+edie", "h2o", "h2o:interval=16", "streaming", "rkv:interval=16", "tova"])
def test_replayed_tokens_as_decoded_ones(policy, kind, rows):
    """compiled=True: the same bits, over slots that move and a further turn; nearly all tokens are replayed."""
    model = tiny.model(dtype=torch.bfloat16).cuda()
    ids, results = tiny.prompt(rows, 300)["input_ids"].cuda(), []
    for compiled in (False, True):
        with kvevict.evicting(model, policy, budget=64, compiled=compiled, kv=kind), torch.no_grad():
            cache, each = kvevict.models.compat.cache_of(model(ids, use_cache=True)), []
            for length in [1] * 150 + [40] + [1] * 20:
                each.append(model(ids[:, :length], past_key_values=cache).logits[:, -1])
            results.append(torch.stack(each))
            replayed = kvevict.report(cache)["replayed"]
    assert torch.equal(*results)
    assert replayed > 10  # since the further turn


@pytest.mark.parametrize("kind", ["model", "int8"])
def test_sequences_of_a_pool_share_graphs(kind):
    """Graphs for 1, 2, 4 and 8 batch rows serve whatever sequences decode together, and forks about one text."""
    model, results = tiny.model().cuda(), []
    for compiled in (False, True):
        with kvevict.evicting(model, "snapkv", budget=64, window=8, compiled=compiled, kv=kind), torch.no_grad():
            pools, batch, found = Pools(find_decoder(model), 1 << 14), Batch(model), []
            caches = [pools.cache() for _ in range(5)]
            for seed, cache in enumerate(caches):
                model(tiny.prompt(1, 90 + 50 * seed, seed)["input_ids"].cuda(), past_key_values=cache)
            for row, cache in enumerate([*caches, caches[0].fork(), caches[0].fork()]):
                batch.add(row, cache)
                found += [batch.step([5 + 7 * token + at for at in range(row + 1)]) for token in range(5)]
            batch.keep([4, 0, 6])
            found += [batch.step([9, 8, token]) for token in range(5)]
            results.append(found)
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-3 * want.abs().max().item())
    shared = next(iter(pools.of.values())).recordings
    assert {each.places.size for each in shared if each.replay is not None} == {1, 2, 4, 8}


@pytest.mark.parametrize("options", [{}, dict(temperature=1.5, top_p=0.9), dict(one_line=True, temperature=3.0)])
@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_that_are_seen_late(rows, options, tmp_path, monkeypatch):
    """The same answers as where the host looks at each token before the next step; ends of text in some of them."""
    folder, _ = tiny.save(tmp_path / "model")
    model = tiny.transformers.AutoModelForCausalLM.from_pretrained(folder).cuda()
    tokenizer, asked, seen, see = tiny.byte_tokenizer(), ["How old is it?", "Which?", "Why?"], [], writing.Unseen.see
    monkeypatch.setattr(writing.Unseen, "see", lambda self, answers: seen.append(1) or see(self, answers))
    cache = kvevict.read(model, tokenizer, "The river is long. " * 12, "snapkv", budget=64, compiled=True)
    answers = []
    for ends in ([], [*range(0, 256, 9)]):
        model.generation_config.eos_token_id = ends
        for devices in ((), ("cuda",)):
            monkeypatch.setattr(writing, "LATE", {*devices})
            answers.append(
                kvevict.answer(model, tokenizer, cache, asked, max_new_tokens=40, batch_size=rows, **options)
            )
            assert bool(seen) == bool(devices)
            seen.clear()
    assert answers[0] == answers[1] and answers[2] == answers[3]


def test_a_token_is_chosen_without_waiting():
    """Neither the choice nor the copy to the host waits for the GPU; the number is there once it is asked for."""
    logits = torch.randn(3, 32000, device="cuda")
    for sampling in (Sampling(), Sampling(0.8, 0.9)):
        choose = sampling.chooser()
        writing.Unseen([], torch.stack([choose(row) for row in logits]))  # memory of the host is pinned once
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
        after = torch.cuda.Event()
        unseen = writing.Unseen([], torch.stack([choose(row) for row in logits]))
        after.record()
        assert not after.query()
        unseen.arrived.synchronize()
        assert unseen.copy.tolist() == unseen.tokens.tolist()


PACKED = dict(kv="k8v4"), dict(recall_kv="int8")


@pytest.mark.parametrize("kind", [{}, *PACKED])
@pytest.mark.parametrize("policy", ["snapkv", "take+edie"])
def test_recalls_as_on_the_cpu(policy, kind):
    """Three turns on one cache: the archive has the slots of the CPU's tokens."""
    archived, logits = [], []
    for device in ("cpu", "cuda"):
        model = kvevict.patch(tiny.model().to(device), policy, budget=48, chunk_size=64, recall=True, **kind)
        ids, cache = tiny.prompt(1, 300)["input_ids"].to(device), None
        with torch.no_grad():
            for start in (0, 150, 220):
                out = model(ids[:, start : start + (150 if start == 0 else 70)], past_key_values=cache, use_cache=True)
                cache = kvevict.models.compat.cache_of(out)
                for token in (5, 6, 7):
                    out = model(torch.tensor([[token]], device=device), past_key_values=cache)
                logits.append(out.logits.cpu())
        archived.append([[head.tolist() for head in each.gathered().positions()[0]] for each in every(cache)])
    assert archived[0] == archived[1] == [[[*range(296)]] * 2] * len(cache.layers)
    assert tiny.relative(torch.cat(logits[3:]), torch.cat(logits[:3])) < (0.1 if kind else 1e-3)


def conversation(model, recall, policy="snapkv", **kind):
    """Logits of a text and of turns on it and on a fork, with decoded tokens between; both caches."""
    outs, options = [], dict(budget=48, chunk_size=64, recall=recall, recall_after=0, **kind)
    with kvevict.evicting(model, policy, **options), torch.no_grad():
        cache = kvevict.models.compat.cache_of(
            model(tiny.prompt(2, 300)["input_ids"].cuda(), use_cache=True, logits_to_keep=1)
        )
        fork = cache.fork()
        for seed, each in enumerate([cache, fork, cache, fork], 1):
            turn = tiny.prompt(2, 70, seed=seed)["input_ids"].cuda()
            outs.append(model(turn, past_key_values=each, logits_to_keep=1).logits)
            for token in (5, 6, 7):
                outs.append(model(torch.full((2, 1), token, device="cuda"), past_key_values=each).logits)
    return torch.cat(outs), cache, fork


def kept(cache):
    return [[[head.tolist() for head in row] for row in layer.positions()] for layer in cache.layers]


def archived(cache):
    """k, v and pos of all slots in the archives, head after head, on the host."""
    heads = [(archive, b, h) for archive in every(cache) for b, h in np.ndindex(archive.total_counts.shape)]
    pieces = [piece for archive, b, h in heads for piece in archive.places(b, h)]
    return [torch.cat([getattr(one, name)[at].cpu() for one, at in pieces]) for name in ("k", "v", "pos")]


@pytest.mark.parametrize("slow", [None, "copies", "model"])
@pytest.mark.parametrize("place", ["memory", "folder"])
@pytest.mark.parametrize("policy, kind", [("snapkv", {}), ("take+edie", {}), *(("snapkv", each) for each in PACKED)])
def test_an_archive_on_the_host(policy, kind, place, slow, monkeypatch, tmp_path):
    """As one on the device, bit by bit, also where the copies, or the model, are late: each waits for the other."""
    model = tiny.model(dtype=torch.bfloat16).cuda()
    want, *wanted = conversation(model, True, policy, **kind)
    late = {"copies": (host, "_copy"), "model": (Tiers, "write")}
    if slow:
        module, name = late[slow]
        real = getattr(module, name)

        def delayed(*arguments, **options):
            torch.cuda._sleep(2 * 10**7)
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, delayed)
    got, *caches = conversation(model, "memory" if place == "memory" else str(tmp_path), policy, **kind)
    assert torch.equal(got, want)
    for one, other in zip(caches, wanted, strict=True):
        assert kept(one) == kept(other)
        assert all(map(torch.equal, archived(one), archived(other)))
        assert all(layer.storage.device.type == "cuda" for layer in one.layers)
        for archive in every(one):
            assert archive.on_host and archive.device.type == "cpu"
            buffers = archive.k, archive.v, archive.pos
            assert all(x.is_pinned() for x in buffers) == (place == "memory" or one is caches[1])
    assert kvevict.report(caches[0])["archive_in"] == ("cpu" if place == "memory" else str(tmp_path))
    assert kvevict.report(wanted[0])["archive_in"] == "cuda:0"


@pytest.mark.parametrize("policy", ["snapkv", "take+edie"])
@pytest.mark.parametrize("drafts", [0, 8])
def test_the_device_has_two_layers_of_an_archive(drafts, policy):
    """Reading takes no memory for the archive, a question that of two of 16 layers, and the same slots come back where
    nothing is drafted: drafts are over other slots."""
    model = tiny.model(num_hidden_layers=16, head_dim=128, max_position_embeddings=20000, dtype=torch.bfloat16).cuda()
    ids, turn = tiny.prompt(1, 16384)["input_ids"].cuda(), tiny.prompt(1, 20, seed=1)["input_ids"].cuda()
    found = []
    for recall in (True, "memory"):
        grown = []
        options = dict(budget=256, chunk_size=512, recall=recall, recall_after=drafts)
        with kvevict.evicting(model, policy, **options), torch.no_grad():
            model(ids[:, :2048], logits_to_keep=1)  # what stays, such as workspaces, is there
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            cache = kvevict.models.compat.cache_of(model(ids, logits_to_keep=1, use_cache=True))
            grown.append(torch.cuda.memory_allocated() - before)
            for _ in range(2):
                torch.cuda.reset_peak_memory_stats()
                start = torch.cuda.memory_allocated()
                logits = model(turn, past_key_values=cache, logits_to_keep=1).logits
                grown.append(torch.cuda.max_memory_allocated() - start)
        size = sum(archive.live_bytes() for archive in every(cache))
        found.append((grown, logits, kept(cache)))
    (on_device, *_), (on_host, *_) = found
    if not drafts:
        assert torch.equal(found[0][1], found[1][1]) and found[0][2] == found[1][2]
    assert on_device[0] > size and on_host[0] < 0.1 * size
    assert all(more < 0.25 * size for more in on_host[1:])  # two layers are an eighth


def test_a_file_of_an_archive_on_the_host(tmp_path):
    """It stays in the file until a turn attends; the answer is that of the cache that was saved."""
    model = tiny.model(dtype=torch.bfloat16).cuda()
    turn, outs = tiny.prompt(2, 20, seed=9)["input_ids"].cuda(), []
    for recall in (True, "memory"):
        _, cache, _ = conversation(model, recall)
        options = dict(budget=48, chunk_size=64, recall=recall, recall_after=0)
        with kvevict.evicting(model, "snapkv", **options), torch.no_grad():
            kvevict.save_cache(cache, tmp_path / "cache")
            loaded = kvevict.load_cache(tmp_path / "cache", model)
            assert all(layer.storage.far and layer.storage.prefix.device.type == "cpu" for layer in loaded.layers)
            for each in (cache, loaded.fork(), loaded, copy.deepcopy(kvevict.load_cache(tmp_path / "cache", model))):
                outs.append(model(turn, past_key_values=each, logits_to_keep=1).logits)
                assert every(each)[0].on_host == (recall == "memory")
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_rows_with_archives_on_the_host():
    """They join, decode with decode=True, which recalls from them, and part."""
    model, found = tiny.model().cuda(), []
    for recall in (True, "memory"):
        options = dict(budget=48, window=4, chunk_size=64, decode=True, interval=3, recall=recall, recall_after=0)
        with kvevict.evicting(model, "snapkv", **options), torch.no_grad():
            batch = Batch(model)
            for row, length in enumerate((200, 150)):
                ids = tiny.prompt(1, length, seed=row)["input_ids"].cuda()
                cache = kvevict.models.compat.cache_of(model(ids, use_cache=True, logits_to_keep=1))
                for _ in range(4):
                    model(torch.tensor([[4]], device="cuda"), past_key_values=cache)
                batch.add(row, cache)
            steps = [batch.step([5 + number, 6 + number]) for number in range(12)]
            found.append((steps, [kept(batch.remove(row)) for row in (0, 1)]))
    assert found[0][1] == found[1][1]
    assert all(torch.equal(x, y) for one, other in zip(found[0][0], found[1][0]) for x, y in zip(one, other))
