"""Learned rows (METHODS section 6): the tensors that the adapter touches, its rows' choices, and saving."""

import contextlib
import itertools
import json
import zlib

import pytest
import safetensors
import tiny
import torch
import transformers
from tiny import FAMILIES, prompt, shared
from transformers.cache_utils import DynamicCache
from untrained import adapter

import kvevict
from kvevict.lab.evaluate.ask import encode
from kvevict.lab.evaluate.tasks import TaskSettings, find
from kvevict.models.loading import load_model
from kvevict.policy.building import build, choose
from kvevict.store import sealed
from kvevict.train.lookahead import Adapter, load

families = pytest.mark.parametrize("family", FAMILIES)
ALL = 4096


def zero(model, like):
    """The same rows with the adapter off."""
    made = Adapter(model, like.tokens, like.rank, like.alpha, like.targets)
    with torch.no_grad():
        made.embeddings.copy_(like.embeddings)
    return made


def read(model, inputs, policy="lookahead", **options):
    """(logits, cache) of a prompt."""
    cache = DynamicCache(config=model.config)
    with kvevict.evicting(model, policy, **options), torch.no_grad():
        return model(**inputs, past_key_values=cache).logits, cache


def stored(cache):
    """Keys, values and positions of every slot of the layers that are evicted from."""
    for layer in cache.layers:
        if hasattr(layer, "counts"):
            for _, _, rows in layer.segments():
                yield from (layer.k[rows], layer.v[rows], layer.pos[rows])


def positions(cache):
    return [layer.pos[rows].tolist() for layer in cache.layers for _, _, rows in layer.segments()]


def test_the_bundled_adapter_knows_what_is_asked():
    """Values of names that it was not trained on: kept in 40 of some 250 slots, where a window keeps few."""
    model, tokenizer = load_model(kvevict.small_llama(), "float32", "cpu")
    asked = list(find("keyvalue")(TaskSettings(tokenizer, 256, 12, seed=7)))
    right = {"lookahead": 0, "snapkv": 0}
    for case in asked:
        ids = encode(model, tokenizer, case).row("cpu")
        answers = {}
        for name in ("full", *right):
            with contextlib.nullcontext() if name == "full" else kvevict.evicting(model, name, budget=40):
                answers[name] = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :].tolist()
        for name in right:
            right[name] += answers[name] == answers["full"]
    print(right)
    assert right["lookahead"] >= 10 > right["snapkv"], right


LLAMA = dict(vocab_size=128256, num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=True)
QWEN = dict(vocab_size=151936, num_key_value_heads=8, head_dim=128)
TABLE_1 = {
    "LLaMA3.2-1B": (5.4, "Llama", LLAMA | dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16)),
    "LLaMA3.2-3B": (11.9, "Llama", LLAMA | dict(hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
                                               num_attention_heads=24, head_dim=128)),
    "LLaMA3.1-8B": (20.6, "Llama", LLAMA | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)),
    "Qwen3-1.7B": (8.5, "Qwen3", QWEN | dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
                                             num_attention_heads=16)),
    "Qwen3-4B": (16.2, "Qwen3", QWEN | dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
                                            num_attention_heads=32)),
    "Qwen3-8B": (21.5, "Qwen3", QWEN | dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
                                            num_attention_heads=32)),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE_1)
def test_as_many_parameters_as_table_1(name):
    millions, kind, sizes = TABLE_1[name]
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    made = Adapter(model)
    assert all(weight.device.type == "meta" and weight.requires_grad for weight in made.parameters())
    assert round(sum(weight.numel() for weight in made.parameters()) / 1e6, 1) == millions


def test_fused_projections_carry_as_many():
    """Phi-3's qkv_proj and gate_up_proj, against Qwen2's of the same sizes."""
    counts = [sum(w.numel() for w in Adapter(shared(name), 4, 2).parameters()) for name in ("phi3", "qwen2")]
    assert counts[0] == counts[1]


@families
@pytest.mark.parametrize("chunk_size", [None, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.drawn(16)
def test_other_rows_keep_every_bit(family, chunk_size, dtype):
    """Logits and caches of the prompt's tokens are the same with the adapter on and off."""
    same_bits(shared(family, dtype), chunk_size)


def same_bits(model, chunk_size):
    inputs = prompt(3, 50, pad=(0, 5, 17))
    made, tokens = adapter(model), inputs["attention_mask"].bool()
    options = dict(budget=ALL, probe=4, chunk_size=chunk_size, score="h2o", rows="lookahead")  # h2o always observes
    on, off = (read(model, inputs, "snapkv", adapter=each, **options) for each in (made, zero(model, made)))
    assert torch.equal(on[0][tokens], off[0][tokens])
    assert all(torch.equal(x, y) for x, y in zip(stored(on[1]), stored(off[1]), strict=True))
    carried = [torch.equal(x.carry, y.carry) for x, y in zip(on[1].layers, off[1].layers) if hasattr(x, "carry")]
    assert not all(carried)  # so it was on


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_other_rows_keep_every_bit_where_rounding_depends_on_how_many_an_expert_has(family):
    """As on some processors, but by a millionth a row, whatever this one does."""

    def rounded(forward):
        return lambda x, index, weights: (
            forward(x, index, weights) + 1e-6 * index.flatten().bincount()[index].sum(1)[:, None]
        )

    model = tiny.model(family)
    for name, module in model.named_modules():
        if name.endswith("experts"):
            module.forward = rounded(module.forward)
    same_bits(model, 16)


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "gemma3"])
def test_adds_the_lora_to_the_last_rows(family):
    """Every linear's output gets scale * B A x at the last rows, at the place of its part where some are fused."""
    model = shared(family)
    decoder, made, seen = model.get_decoder(), adapter(model, targets="all"), {}
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    def note(name):
        return lambda module, args, output: seen.setdefault(name, []).append((args[0], output.clone()))

    linears = {name: m for name, m in decoder.named_modules() if "_proj" in name}
    with made.on(decoder), torch.no_grad():
        hooks = [module.register_forward_hook(note(name)) for name, module in linears.items()]
        decoder(inputs_embeds=torch.randn(2, 9, model.config.hidden_size), use_cache=False)
    [hook.remove() for hook in hooks]
    weights = dict(made.named_parameters())
    last = max(i for i in range(4) if model.config.layer_types[i] == "full_attention") if family == "gemma3" else 3
    for name, module in linears.items():
        (x, got), (_, index, block, own) = seen[name][0], name.split(".")
        want = torch.nn.functional.linear(x, module.weight, module.bias)
        added = []
        for part in parts.get(own, (own,)):
            path = f"layers.{index}.{block}.{part}.lora_"
            reaches = int(index) < last or (int(index) == last and part in ("q_proj", "k_proj"))
            assert (path + "A.weight" in weights) == reaches, path
            size = dict(q_proj=4, k_proj=2, v_proj=2).get(part, 0) * decoder.layers[0].self_attn.head_dim
            size = size or want.shape[-1] // len(parts.get(own, (own,)))
            added.append(torch.zeros(2, 9, size))
            if reaches:
                a, b = (weights[path + letter + ".weight"] for letter in "AB")
                added[-1][:, -6:] = x[:, -6:] @ a.T @ b.T * (32 / 2)
        torch.testing.assert_close(got, want + torch.cat(added, -1).detach(), rtol=1e-4, atol=1e-4)


def test_leaves_the_model_unchanged():
    model, inputs = shared("llama"), prompt(1, 30)
    before = model(**inputs).logits
    read(model, inputs, adapter=adapter(model), budget=9)
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(model(**inputs).logits, before)


def test_beside_a_peft_adapter():
    """Other rows still have its LoRA, and ours comes on top."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model, inputs = peft.get_peft_model(tiny.model("llama"), config).eval(), prompt(2, 40, pad=(0, 7))
    made, tokens = adapter(model), inputs["attention_mask"].bool()
    with torch.no_grad():
        want = model(**inputs).logits
        with kvevict.evicting(model, "lookahead", adapter=made, budget=ALL):
            torch.testing.assert_close(model(**inputs).logits[tokens], want[tokens], rtol=1e-4, atol=1e-4)
        with kvevict.evicting(model, "lookahead", adapter=made, budget=9):
            cache = DynamicCache(config=model.config)
            model(**inputs, past_key_values=cache)
    assert all((layer.counts == 9).all() for layer in cache.layers)


def mean_attention(model, made, ids, window):
    """Mean attention [layer][kv head, N] of the lookahead rows and the prompt's last `window` rows, from attention
    matrices of the unpatched model."""
    decoder = model.get_decoder()
    embeds = torch.cat([decoder.embed_tokens(ids), made.embeddings[None]], 1)
    with made.on(decoder), torch.no_grad():
        matrices = decoder(inputs_embeds=embeds, use_cache=False, output_attentions=True).attentions
    return [m[0, :, -made.tokens - window :, : ids.shape[1]].mean(1).unflatten(0, (2, -1)).mean(1) for m in matrices]


@pytest.mark.parametrize("kernel, window", [(1, 0), (7, 0), (1, 6)])
def test_keeps_what_the_rows_attend_to(kernel, window):
    model = tiny.model("llama", attn_implementation="eager")
    made, inputs = adapter(model), prompt(1, 60)
    want = []
    for scores in mean_attention(model, made, inputs["input_ids"], window):
        pooled = torch.nn.functional.max_pool1d(scores, kernel, 1, kernel // 2)
        want += [sorted(head.topk(13).indices.tolist()) for head in pooled]
    got = positions(read(model, inputs, adapter=made, budget=13, kernel=kernel, window=window)[1])
    same = [len(set(a) & set(b)) for a, b in zip(got, want)]
    assert min(same) >= 13 - (kernel > 1) * 2 and sum(same) >= 13 * len(same) - 4  # equal pooled scores are one's pick


def test_a_padded_row_keeps_what_it_keeps_alone():
    model = shared("llama")
    made, inputs = adapter(model), prompt(2, 70, pad=(0, 9))
    for chunk_size in (None, 64, 33):
        options = dict(adapter=made, budget=11, probe=4, chunk_size=chunk_size)
        _, both = read(model, inputs, **options)
        _, alone = read(model, {n: x[1:, 9:] for n, x in inputs.items()}, **options)
        # without position_ids a model counts positions from the padding on
        rows = [(layer.pos[at] - 9).tolist() for layer in both.layers for b, _, at in layer.segments() if b == 1]
        assert rows == positions(alone), chunk_size


def test_reads_the_task_after_every_chunk():
    """[chunk | probe | lookahead]: other slots are lost then; the last chunk ends with the probe."""
    model, inputs = shared("llama"), prompt(1, 90)
    made, seen = adapter(model), []
    note = lambda module, args, kwargs: seen.append(args[0].shape[1])  # noqa: E731
    hook = model.get_decoder().layers[0].register_forward_pre_hook(note, with_kwargs=True)
    kept = {p: positions(read(model, inputs, adapter=made, budget=8, chunk_size=30, probe=p)[1]) for p in (0, 5)}
    hook.remove()
    assert seen == [36, 36, 36, 41, 41, 36]
    assert kept[0] != kept[5]


AXES = dict(
    score=[dict(score="lookahead"), dict(score="snapkv"), dict(score="edie", heads="flat"), dict(score="edie-exact"),
           dict(score="cake", layers="cake"), dict(score="h2o"), dict(score="vatp", sink=0), dict(score="fastkv")],
    more=[{}, dict(refine="caote"), dict(heads="ada"), dict(layers="pyramid"), dict(select="chunk", c=3),
          dict(layers="tada", heads="flat"), dict(warmup_layers=2), dict(n_reuse=2), dict(decode=True, interval=2),
          dict(diagnose=True)],
    when=[dict(chunk_size=20), dict(schedule="prompt")],
)  # fmt: skip


@pytest.mark.slow
def test_every_combination():
    """It runs, keeps the budget exactly and the same a second time; or the rules say why not."""
    model, inputs, refused = shared("llama"), prompt(2, 45, pad=(0, 7)), 0
    made = adapter(model)
    for parts in itertools.product(*AXES.values()):
        options = {k: v for part in parts for k, v in part.items()}
        options |= dict(rows=kvevict.ROWS["lookahead"](made, probe=4), budget=9)
        try:
            choose("snapkv", **options)
        except ValueError as error:
            refused += 1
            assert str(error).count(": ") and "rows='lookahead'" in str(error)
            continue
        first, second = (read(model, inputs, "snapkv", **options)[1] for _ in range(2))
        assert sum(int(layer.counts.sum()) for layer in first.layers) == 2 * 9 * 2 * 4, options
        assert options.get("layers") == "tada" or positions(first) == positions(second), options
    assert 0 < refused < 40


def test_saved_and_loaded(tmp_path):
    model, inputs = shared("phi3"), prompt(1, 50)
    made = adapter(model)
    made.save(tmp_path / "a")
    again = load(tmp_path / "a", model)
    assert all(torch.equal(x, y) for x, y in zip(made.state_dict().values(), again.state_dict().values(), strict=True))
    kept = [positions(read(model, inputs, adapter=a, budget=9)[1]) for a in (made, tmp_path / "a", str(tmp_path / "a"))]
    assert kept[0] == kept[1] == kept[2]
    with safetensors.safe_open(tmp_path / "a" / "adapter_model.safetensors", "pt") as file:
        assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in file.keys()  # noqa: SIM118
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["tokens"], config["rank"], config["base"]["model_type"]) == (6, 2, "phi3")
    policy = kvevict.Policy.from_json(build("lookahead", adapter=str(tmp_path / "a"), budget=9).to_json())
    assert policy.rows.most == 6


@pytest.mark.parametrize("change, field", [
    (dict(family="qwen3"), "model_type"), (dict(num_hidden_layers=3), "num_hidden_layers"),
    (dict(intermediate_size=64), "intermediate_size"), (dict(num_key_value_heads=4), "num_key_value_heads"),
])  # fmt: skip
def test_another_model_is_named(tmp_path, change, field):
    made = adapter(shared("llama"))
    made.save(tmp_path)
    other = tiny.model(**change)
    for given in (made, tmp_path):
        with pytest.raises(ValueError, match=field):
            kvevict.patch(other, "lookahead", adapter=given, budget=64)
    assert not any("_kvevict" in name for name in other.get_decoder().__dict__)


def test_another_model_s_weights(tmp_path):
    made, twin = adapter(shared("llama")), tiny.model("llama")
    made.save(tmp_path)
    with torch.no_grad():
        for weight in twin.model.parameters():
            weight.mul_(1 + 2**-7)  # at least one step of bfloat16
    for given in (made, tmp_path):
        with pytest.raises(ValueError, match="for another model: the weights that it was trained on"):
            kvevict.patch(twin, "lookahead", adapter=given, budget=64)
    assert not any("_kvevict" in name for name in twin.get_decoder().__dict__)
    kvevict.patch(tiny.model("llama", torch.bfloat16), "lookahead", adapter=tmp_path, budget=64)


def test_damaged_or_missing(tmp_path):
    model = tiny.model("llama")
    with pytest.raises(ValueError, match="kvevict train"):
        kvevict.patch(model, "lookahead", budget=64)
    with pytest.raises(ValueError, match="not the folder of a lookahead adapter"):
        kvevict.patch(model, "lookahead", adapter=str(tmp_path / "none"), budget=64)
    with pytest.raises(TypeError, match="adapter must be"):
        kvevict.patch(model, "lookahead", adapter=3, budget=64)
    adapter(model).save(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="missing or damaged"):
        load(tmp_path, model)
    adapter(model).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(alpha=33)))
    with pytest.raises(ValueError, match="checksum"):
        load(tmp_path, model)
    (tmp_path / "config.json").write_text(json.dumps(config | dict(version=1)))
    with pytest.raises(ValueError, match="version 1 of a kvevict lookahead adapter, this kvevict reads version 2"):
        load(tmp_path, model)
    changed = bytearray(json.dumps(config | dict(rank=3, checksum="0" * 8)).encode())
    sealed.seal(changed, zlib.crc32(weights.read_bytes()))
    (tmp_path / "config.json").write_bytes(changed)
    with pytest.raises(ValueError, match=r"lora_A.weight is \(2, 64\), its config.json wants \(3, 64\)"):
        load(tmp_path, model)


@pytest.mark.parametrize("given, reason", [
    (dict(tokens=0), "tokens must be at least 1"), (dict(rank=0), "rank must be at least 1"),
    (dict(alpha=0), "alpha must be"), (dict(targets="q"), "targets must be one of"),
    (dict(targets=("q_proj", "lm_head")), "targets must be one of"),
])  # fmt: skip
def test_wrong_options(given, reason):
    with pytest.raises(ValueError, match=reason):
        Adapter(shared("llama"), **given)


@pytest.mark.parametrize("targets, count", [("none", 0), ("qv", 4 + 3), ("all", 7 * 3 + 2), (("up_proj",), 3)])
def test_targets(targets, count):
    made = Adapter(shared("llama"), targets=targets)
    assert sum("lora_A" in name for name, _ in made.named_parameters()) == count
