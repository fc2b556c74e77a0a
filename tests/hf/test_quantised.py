"""Quantised weights: kept slots and answers equal those of the same weights, dequantised. (.gguf files are read into
plain weights: tests/commands/test_gguf.py.)"""

import contextlib

import pytest
import tiny
import torch

import kvevict
from kvevict.train.lookahead import Adapter, passes

POLICIES = [
    ("take", dict(budget=16, chunk_size=16, probe=4)), ("snapkv", dict(budget=16, window=4)),
    ("adakv", dict(budget=16, window=4)), ("h2o", dict(budget=16)),
]  # fmt: skip


def torchao(model):
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())


def quanto(model):
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)


def int8(quantise):
    """(model of int8 weights, the same with those weights as fp32)."""
    model, plain = tiny.model(), tiny.model()
    quantise(model)
    changed = 0
    for mine, theirs in zip(model.modules(), plain.modules(), strict=True):
        if isinstance(mine, torch.nn.Linear) and hasattr(mine.weight, "dequantize"):
            with torch.no_grad():
                changed += not torch.equal(theirs.weight, mine.weight.dequantize())
                theirs.weight.copy_(mine.weight.dequantize())
    assert changed, "nothing was quantised"
    return model, plain


def nf4():
    """(model of bitsandbytes' 4-bit weights, the same with those weights as fp32). Sizes are allowed by its kernels."""
    bnb = pytest.importorskip("bitsandbytes")
    model, plain = tiny.model(intermediate_size=128), tiny.model(intermediate_size=128)
    twins = dict(plain.named_modules())
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            new = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            new.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")._quantize("cpu")
            model.set_submodule(name, new)
            weight = bnb.functional.dequantize_4bit(new.weight.data, new.weight.quant_state).float()
            assert not torch.equal(twins[name].weight, weight)
            twins[name].weight.data = weight
    return model.eval(), plain


@pytest.mark.parametrize("policy, options", POLICIES, ids=[name for name, _ in POLICIES])
def test_4_bit_weights(policy, options, tmp_path):
    """Its kernels round otherwise than fp32 products do, so a few slots of equal worth may be others."""
    model, plain = nf4()
    inputs = tiny.prompt(2, 50, pad=(0, 9))
    with kvevict.evicting(plain, policy, **options):
        plain(**inputs, logits_to_keep=1)
        want = kvevict.report(plain, positions=True)["positions"]
    kvevict.patch(model, policy, **options)
    goes_on_from_a_file(model, inputs, tmp_path)
    got = kvevict.report(model, positions=True)["positions"]
    pairs = [(set(a), set(b)) for x, y in zip(got, want, strict=True)
             for v, w in zip(x, y, strict=True) for a, b in zip(v, w, strict=True)]  # fmt: skip
    assert sum(len(a & b) / len(a | b) for a, b in pairs) / len(pairs) > 0.8


def goes_on_from_a_file(model, inputs, folder):
    """A saved and loaded cache gives the same logits as before."""
    with torch.no_grad():
        cache = model(**inputs, logits_to_keep=1).past_key_values
        kvevict.save_cache(cache, folder / "cache")
        loaded = kvevict.load_cache(folder / "cache", model)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
        step = dict(input_ids=torch.tensor([[5], [6]]), attention_mask=mask)
        got = model(**step, past_key_values=loaded).logits
        assert torch.equal(got, model(**step, past_key_values=cache).logits)


@pytest.mark.filterwarnings("ignore")  # torch.ao is deprecated
@pytest.mark.parametrize("policy, options", [*POLICIES, ("defensive", dict(budget=40)), ("expected", dict(budget=40))])
def test_modules_without_parameters(policy, options, tmp_path):
    """torch.ao quantises the inputs, too, by their largest number, so that rows depend on each other: in one pass
    tokens are the unpatched model's. A file of a model that differs in such modules alone is refused."""

    def quantised(seed):
        model, other = tiny.model(), tiny.model(seed=seed)
        for mine, theirs in zip(model.model.layers, other.model.layers, strict=True):
            mine.self_attn.o_proj.load_state_dict(theirs.self_attn.o_proj.state_dict())
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    model, inputs = quantised(0), tiny.prompt(2, 50, pad=(0, 9))
    want = tiny.generate(model, inputs)
    with kvevict.evicting(model, policy, **options | dict(budget=60, chunk_size=None, tokenizer=False)):
        assert torch.equal(tiny.generate(model, inputs), want)
    kvevict.patch(model, policy, **options)
    goes_on_from_a_file(model, inputs, tmp_path)
    with pytest.raises(ValueError, match="its weights are"):
        kvevict.load_cache(tmp_path / "cache", quantised(1))


class Rounding(torch.nn.Module):
    """A linear layer that rounds its input to steps that depend on all rows, like kernels over quantised weights."""

    def __init__(self, linear, quantised):
        super().__init__()
        scale = linear.weight.abs().max() / 127
        integers = (linear.weight / scale).round()
        self.weight = torch.nn.Parameter(integers.to(torch.int8) if quantised else integers, requires_grad=False)
        self.scale, self.in_features = scale.item(), linear.in_features

    def forward(self, x):
        step = x.abs().max() / 2**7
        return torch.nn.functional.linear((x / step).round() * step, self.weight.float() * self.scale)


def test_rounding_of_quantised_layers_is_not_an_error():
    """Quantised layers are tried with the tolerance of 16 bits; such errors of plain layers are refused."""
    for quantised in (True, False):
        model = tiny.model()
        for layer in model.model.layers:
            layer.mlp.down_proj = Rounding(layer.mlp.down_proj, quantised)
        with contextlib.nullcontext() if quantised else pytest.raises(ValueError, match=r"change|differs"):
            kvevict.patch(model, "snapkv", budget=16, window=4)


@pytest.mark.parametrize("quantise", [torchao, quanto])
@pytest.mark.parametrize("policy, options", POLICIES, ids=[name for name, _ in POLICIES])
def test_int8_weights(policy, options, quantise, tmp_path):
    model, plain = int8(quantise)
    inputs = tiny.prompt(2, 50, pad=(0, 9))
    with kvevict.evicting(plain, policy, **options):
        tokens, want = tiny.generate(plain, inputs), kvevict.report(plain, positions=True)["positions"]
    kvevict.patch(model, policy, **options)
    assert torch.equal(tiny.generate(model, inputs), tokens)
    assert kvevict.report(model, positions=True)["positions"] == want
    goes_on_from_a_file(model, inputs, tmp_path)


def test_lookahead_over_int8_weights():
    """The adapter's rows choose the same slots, and its gradient is the same to rounding."""
    kept, gradients = [], []
    inputs, prompt = tiny.prompt(2, 50, pad=(0, 9)), torch.arange(3, 43)
    for model in int8(torchao):
        torch.manual_seed(0)
        adapter = Adapter(model, tokens=4, rank=2)
        with torch.no_grad():
            for name, weight in adapter.named_parameters():
                if "lora_B" in name:
                    weight.normal_(std=0.3)
        with kvevict.evicting(model, "lookahead", adapter=adapter, budget=16):
            tiny.generate(model, inputs)
            kept.append(kvevict.report(model, positions=True)["positions"])
        for weight in model.parameters():
            weight.requires_grad_(False)
        found = passes.truth(model.get_decoder(), prompt, prompt[:6])
        passes.loss(model.get_decoder(), adapter, found).backward()
        gradients.append([weight.grad for weight in adapter.parameters()])
    assert kept[0] == kept[1]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
