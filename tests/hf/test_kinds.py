"""Generation with every kind of decoder: batches with left padding, beams, further turns, candidates that are removed,
a cache on the disk. One type of each kind; `test_types.py` tests all types."""

import pytest
import tiny
import torch
import zoo

import kvevict
from kvevict.engine.memory.latent import LatentLayer
from kvevict.engine.memory.layer import EvictionLayer

KINDS = {
    "hybrid": "qwen3_next", "hybrid layers": "falcon_h1", "latent": "deepseek_v3", "shared": "gemma4_text",
    "several axes": "qwen2_5_vl", "chunked": "llama4_text", "no rope": "smollm3", "other names": "gpt2",
}  # fmt: skip
STATES = ("hybrid", "hybrid layers")
OLD = tiny.VERSION < (5, 23)  # it had some kinds in other forms: refused, or impossible to make


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def model(kind):
    try:
        return kvevict.unpatch(kvevict.patch(zoo.model(KINDS[kind]), "snapkv", budget=64))
    except Exception as error:
        if not OLD:
            raise
        pytest.skip(f"{type(error).__name__}: {error}")


BATCH = tiny.prompt(3, 50, pad=(0, 9, 23))
READS = [("snapkv", dict(budget=4096, chunk_size=7)), ("take", dict(budget=4096, chunk_size=16, probe=4))]


@pytest.mark.parametrize("policy, options", READS, ids=["snapkv", "take"])
@pytest.mark.parametrize("search", [{}, dict(num_beams=3), dict(num_beams=2, num_return_sequences=2)],
                         ids=["greedy", "beams", "returned"])  # fmt: skip
@pytest.mark.drawn(10)
def test_batch(model, policy, options, search):
    """When all fits, the tokens are the unpatched model's."""
    want = tiny.generate(model, BATCH, **search)
    with kvevict.evicting(model, policy, **options):
        assert torch.equal(tiny.generate(model, BATCH, **search), want)


def test_rows_of_a_batch_alone(model):
    """At a tight budget a row keeps the same slots in a batch as alone."""
    with kvevict.evicting(model, "snapkv", budget=12, window=4):
        tiny.generate(model, BATCH, new=1)
        together = kvevict.report(model, positions=True)["positions"]
        for row, pad in enumerate((0, 9, 23)):
            alone = {name: value[row : row + 1, pad:] for name, value in BATCH.items()}
            tiny.generate(model, alone, new=1)
            for mine, layer in zip(kvevict.report(model, positions=True)["positions"], together, strict=True):
                assert layer is None if mine is None else mine[0] == layer[row]


def test_follow_up_turn(model):
    """A second prompt after the first one's cache, and a third: the logits are those of all at once."""
    ids = tiny.prompt(1, 70)["input_ids"]
    with torch.no_grad():
        want = model(ids).logits
        with kvevict.evicting(model, "take", budget=69, chunk_size=7, probe=3):
            parts, cache = [], None
            for start, end in ((0, 40), (40, 62), (62, 70)):
                out = model(ids[:, start:end], past_key_values=cache)
                cache = out.past_key_values
                parts.append(out.logits)
    assert tiny.relative(torch.cat(parts, 1), want) < 1e-4


@pytest.mark.parametrize("policy, options", [
    ("snapkv", dict(recall=True)), ("snapkv", dict(recall=True, chunk_size=16)), ("tova", {}), ("h2o", {}),
], ids=["recall", "recall in chunks", "tova", "h2o"])  # fmt: skip
@pytest.mark.parametrize("kind", ["shared", "other names"], indirect=True)
def test_a_cut_while_decoding_follows_all_that_attend(model, policy, options):
    """A decoded token's logits do not know of the cut after it, also where layers read another layer's slots."""
    ids, found = tiny.prompt(1, 60)["input_ids"], []
    for interval in (1, 100):
        given = dict(budget=12, interval=interval, decode=True) | (dict(window=4) if policy == "snapkv" else {})
        with torch.no_grad(), kvevict.evicting(model, policy, **given, **options):
            cache = model(ids, logits_to_keep=1, use_cache=True).past_key_values
            tokens = [model(torch.tensor([[token]]), past_key_values=cache).logits for token in (5, 9)]
            assert all(max(map(len, row)) <= 12 + (interval > 1) * 2 for layer in cache.layers
                       if isinstance(layer, EvictionLayer) for row in layer.positions())  # fmt: skip
        found.append(tokens)
    assert torch.equal(found[0][0], found[1][0])


def test_candidates_that_are_taken_back(model, kind):
    inputs = tiny.prompt(1, 40)
    inputs["input_ids"][0, 20:] = inputs["input_ids"][0, :20]  # so that there are candidates
    if kind in STATES:
        kvevict.patch(model, "snapkv", budget=4096, chunk_size=7)
        with pytest.raises(ValueError, match=r"without an assistant|stateful"):
            tiny.generate(model, inputs, prompt_lookup_num_tokens=3)
        return
    if OLD and kind == "chunked":
        pytest.skip("this version of Transformers takes nothing back from a full window")
    want = tiny.generate(model, inputs)
    with kvevict.evicting(model, "snapkv", budget=4096, chunk_size=7):
        lookup = dict(prompt_lookup_num_tokens=3, eos_token_id=0)  # 5.4 needs an end token there; it does not come
        assert torch.equal(tiny.generate(model, inputs, **lookup), want)


def test_save_and_load(model, kind, tmp_path):
    if kind in STATES:
        pytest.skip("a state is not written: test_types.py")
    kvevict.patch(model, "snapkv", budget=16, window=4)
    with torch.no_grad():
        cache = model(**BATCH).past_key_values
        kvevict.save_cache(cache, tmp_path / "cache")
        loaded = kvevict.load_cache(tmp_path / "cache", model)
        mask = torch.cat([BATCH["attention_mask"], torch.ones(3, 1, dtype=torch.long)], 1)
        step = dict(input_ids=torch.tensor([[5], [6], [7]]), attention_mask=mask)
        want = model(**step, past_key_values=cache).logits
        assert torch.equal(model(**step, past_key_values=loaded).logits, want)


@pytest.fixture
def latent():
    return zoo.latent()


def test_latents_are_what_is_stored(latent):
    """One head of r + p numbers a slot, not 2 H D; heads choose together."""
    kvevict.patch(latent, "snapkv", budget=16, window=4)
    with torch.no_grad():
        cache = latent(**tiny.prompt(2, 50, pad=(0, 9))).past_key_values
    config, told = latent.config, kvevict.report(latent)
    assert told["kept"] == [[[16]] * 2] * config.num_hidden_layers
    numbers = config.kv_lora_rank + config.qk_rope_head_dim
    assert numbers % 16 == 0  # else zeros follow
    assert told["cache_bytes"] == 4 * numbers * 16 * 2 * config.num_hidden_layers
    assert all(isinstance(layer, LatentLayer) for layer in cache.layers)
    assert cache.layers[0].keys.shape == (2, 1, 16, config.kv_lora_rank)
    assert cache.layers[0].values.shape == (2, 1, 16, config.qk_rope_head_dim)


@pytest.mark.parametrize("policy, score", [
    ("tova", lambda a: a[:, -1].mean(0)),  # a [H, N, N]
    ("h2o", lambda a: a.sum(1).mean(0)),
])  # fmt: skip
def test_what_latents_are_chosen_by(latent, policy, score):
    """By the mean over heads of the unpatched model's attention matrices."""
    ids, budget = tiny.prompt(1, 40)["input_ids"], 12
    latent.set_attn_implementation("eager")
    with torch.no_grad():
        matrices = latent(ids, output_attentions=True).attentions
        options = dict(recent=2) if policy == "h2o" else {}
        kvevict.patch(latent, policy, budget=budget, chunk_size=None, **options)
        latent(ids)
    last = 2 if policy == "h2o" else 0
    for layer, a in zip(kvevict.report(latent, positions=True)["positions"], matrices, strict=True):
        worth = score(a[0])
        worth[len(worth) - last :] = torch.inf
        assert layer == [[sorted(worth.topk(budget).indices.tolist())]]


@pytest.mark.parametrize("policy, options", [
    ("knorm", {}), ("keydiff", {}), ("vatp", dict(sink=2, recent=4)), ("edie-exact", dict(window=4)),
    ("cake", dict(window=4)), ("h2o+caote", {}), ("edie+tada", dict(window=4)),
    ("laq", dict(window=4)), ("fastkv", dict(window=4)),
    ("snapkv", dict(window=4, diagnose=True)), ("chunkkv:n_reuse=2", dict(window=4)), ("take", dict(probe=4)),
    ("lagkv", dict(score=tiny.short_parts(4))), ("compactor", dict(sink=3, recent=2)), ("defensive", dict(window=4)),
    ("snapkv", dict(window=4, refine="critical")), ("expected", dict(chunk_size=12)), ("kvzip+", dict(chunk_size=12)),
])  # fmt: skip
def test_scores_of_latents(latent, policy, options):
    """Every kind of score has one number a slot, and every kind of choice one head."""
    kvevict.history().reset()
    kvevict.patch(latent, policy, budget=16, **options)
    tokens = tiny.generate(latent, BATCH)
    assert tokens.shape == (3, 8)
    kept = kvevict.report(latent)["kept"]
    assert all(len(row) == 1 for layer in kept for row in layer)
    assert sum(sum(row) for layer in kept for row in layer) <= 3 * 16 * len(kept)
