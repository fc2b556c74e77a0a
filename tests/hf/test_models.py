"""Every supported family: right without evictions, right with them, and unchanged after `unpatch`."""

import pytest
import tiny
import torch
import transformers
from tiny import FAMILIES, generate, prompt, relative, shared
from transformers.cache_utils import DynamicCache

import kvevict

families = pytest.mark.parametrize("family", FAMILIES)
PADS = (0, 5, 17)
ALL = 4096  # a budget that keeps everything

# The decoder reads the prompt in one pass, token by token, in chunks, and with a probe after each chunk.
READS = {
    "whole": ("snapkv", dict()), "1": ("snapkv", dict(chunk_size=1)), "7": ("h2o", dict(chunk_size=7)),
    "64": ("tova", dict(chunk_size=64)), "all": ("streaming", dict(chunk_size=90)),
    "take-7": ("take", dict(chunk_size=7, probe=4)), "take-64": ("take", dict(chunk_size=64, probe=32)),
}  # fmt: skip
reads = pytest.mark.parametrize("read", READS)


def evicting(model, read, budget=ALL):
    policy, options = READS[read]
    return kvevict.evicting(model, policy, budget=budget, **options)


@families
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.drawn(8)
def test_same_tokens(family, batch, beams):
    model, inputs = shared(family), prompt(batch, 50, pad=PADS)
    want = generate(model, inputs, 12, num_beams=beams)
    for read in ("7", "take-7"):
        with evicting(model, read):
            assert torch.equal(generate(model, inputs, 12, num_beams=beams), want), read


@families
@reads
@pytest.mark.drawn(12)
def test_same_logits(family, read):
    """All rows' logits of a padded batch, where there is a token."""
    model, inputs = shared(family), prompt(3, 90, pad=PADS)
    tokens = inputs["attention_mask"].bool()
    want = model(**inputs).logits[tokens]
    with evicting(model, read), torch.no_grad():
        got = model(**inputs).logits[tokens]
    assert relative(got, want) < 1e-4


@families
@pytest.mark.parametrize("read", ["whole", "7", "take-64"])
@pytest.mark.drawn(12)
def test_bf16(family, read):
    """Logits within 3e-2; the same best token wherever the unpatched margin is more than rounding."""
    model, inputs = shared(family, torch.bfloat16), prompt(3, 90, pad=PADS)
    tokens = inputs["attention_mask"].bool()
    with torch.no_grad():
        want = model(**inputs).logits[tokens].float()
        with evicting(model, read):
            got = model(**inputs).logits[tokens].float()
    assert relative(got, want) < 3e-2
    best, second = want.topk(2).values.unbind(-1)
    sure = best - second > 2 * 3e-2 * want.abs().max()
    assert sure.any()
    assert torch.equal(got.argmax(-1)[sure], want.argmax(-1)[sure])


@families
@pytest.mark.drawn(6)
def test_bf16_tokens(family):
    """Greedy tokens are the unpatched ones up to the first that rounding may decide."""
    model, inputs = shared(family, torch.bfloat16), prompt(4, 60)
    options = dict(max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
    want = model.generate(**inputs, **options)
    with evicting(model, "7"):
        got = model.generate(**inputs, **options)
    logits = torch.stack(want.logits, 1).float()  # [rows, new, vocabulary]
    best, second = logits.topk(2).values.unbind(-1)
    sure = (best - second > 3e-2 * logits.abs().amax(-1)).cumprod(1).bool()
    assert sure.sum() >= 4
    assert torch.equal(got.sequences[:, 60:][sure], want.sequences[:, 60:][sure])


TIGHT = {name: dict(budget=10, chunk_size=16) for name in ("streaming", "h2o", "tova", "random", "knorm")}
TIGHT |= dict(snapkv=dict(budget=10, window=4), keydiff=dict(budget=10), take=dict(budget=10, probe=6, chunk_size=16))


@families
@pytest.mark.parametrize("policy", TIGHT)
@pytest.mark.drawn(16)
def test_tight(family, policy):
    """Finite logits, at most the budget kept, sliding layers left alone, and unpatching undoes it to the last bit."""
    model, inputs = shared(family), prompt(3, 50, pad=PADS)
    decoder = model.get_decoder()
    with torch.no_grad():
        before = model(**inputs).logits
        with kvevict.evicting(model, policy, **TIGHT[policy]):
            out = model.generate(
                **inputs, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
            report = kvevict.report(model)
        after = model(**inputs).logits
    assert all(logits.isfinite().all() for logits in out.logits)
    assert report["seen"] == [50 - pad for pad in PADS]
    kinds = getattr(decoder.config, "layer_types", None) or ["full_attention"] * 4
    for kept, kind, layer in zip(report["kept"], kinds, out.past_key_values.layers, strict=True):
        if kind == "sliding_attention":
            assert kept is None
            assert layer.get_seq_length() == 55
        else:
            assert kept == [[10, 10]] * 3
            assert int(layer.len.max()) == (10 if policy in ("streaming", "h2o", "tova") else 15)
    assert torch.equal(before, after)


def causal(length, window=None):
    row, column = torch.arange(length)[:, None], torch.arange(length)
    return (column <= row) & (column > row - (window or length))


@families
def test_evicted_slots_are_as_if_masked(family):
    """Streaming's kept slots follow from the positions alone, so the unpatched model under a 4D mask must agree: after
    the prompt is read in chunks and while each new token is read."""
    model, length, new, size, sink, budget = shared(family), 50, 8, 16, 4, 12
    ids = prompt(1, length + new)["input_ids"]
    mask = tiny.streaming_sees(length, new, size, sink, budget)
    config, dtype = model.get_decoder().config, torch.float32
    hide = {kind: torch.zeros(m.shape, dtype=dtype).masked_fill(~m, -torch.inf)[None, None] for kind, m in {
        "full_attention": mask, "sliding_attention": causal(length + new, getattr(config, "sliding_window", None)),
    }.items()}  # fmt: skip
    with torch.no_grad():
        mixed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        want = model(ids, attention_mask=hide if mixed else hide["full_attention"]).logits
        with kvevict.evicting(model, "streaming", budget=budget, sink=sink, chunk_size=size):
            cache = DynamicCache(config=config)
            got = [model(ids[:, :length], past_key_values=cache).logits]
            for token in range(length, length + new):
                got.append(model(ids[:, token : token + 1], past_key_values=cache).logits)
    got = torch.cat(got, 1)
    assert relative(got, want) < 1e-4
    assert relative(model(ids).logits, want) > 1e-3  # the evicted slots mattered


def small(kind, head="ForCausalLM", model=None, **options):
    torch.manual_seed(0)
    base = dict(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0)
    config = getattr(transformers, f"{kind}Config")(**base | options)
    return getattr(transformers, model or f"{kind}{head}")(config).eval()


T5 = dict(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, hidden_size=64)
BART = dict(d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=96, decoder_ffn_dim=96)  # fmt: skip
JAMBA = dict(num_key_value_heads=2, intermediate_size=96, num_experts=2, attn_layer_period=2, attn_layer_offset=1,
             mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False)  # fmt: skip
REFUSED = {
    "falcon": (lambda: small("Falcon", alibi=True, new_decoder_architecture=False), "(?i)alibi"),
    "bloom": (lambda: small("Bloom", n_layer=2, n_head=4), "(?i)alibi"),
    "t5": (lambda: small("T5", "ForConditionalGeneration", **T5), "(?i)encoder"),
    "bart": (lambda: small("Bart", "ForConditionalGeneration", **BART), "(?i)encoder"),
    "jamba": (lambda: small("Jamba", **JAMBA), "jamba.*two calls|no single module"),
    "mamba": (lambda: small("Mamba", state_size=8), "no layer has full attention|no single module"),
    "every layer slides": (lambda: tiny.model("mistral", sliding_window=12), "every layer has a sliding window"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind):
    """A model that cannot be patched is refused with the reason, and is unchanged afterwards."""
    make, reason = REFUSED[kind]
    model = make()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    hooks = {
        name: len(module._forward_hooks) + len(module._forward_pre_hooks) for name, module in model.named_modules()
    }
    with pytest.raises(ValueError, match=reason):
        kvevict.patch(model, "snapkv", budget=64)
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert all(value is before[name][key] for key, value in module.__dict__.items())
        assert len(module._forward_hooks) + len(module._forward_pre_hooks) == hooks[name]
    kvevict.unpatch(model)  # does nothing
