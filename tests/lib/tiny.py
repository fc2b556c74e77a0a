"""Tiny random models of every supported family, built from configs: no download."""

import functools

import pytest
import tokenizers
import torch
import transformers

import kvevict

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])

BASE = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    attn_implementation="sdpa",
)  # fmt: skip
MIXED = ["sliding_attention", "full_attention"] * 2
FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "qwen2": ("Qwen2", dict(head_dim=None, hidden_size=128)),
    "qwen3": ("Qwen3", {}),
    "phi3": ("Phi3", dict(head_dim=None, hidden_size=128, partial_rotary_factor=0.5, sliding_window=None)),
    "gemma2": ("Gemma2", dict(sliding_window=12, layer_types=MIXED, attn_implementation="eager",
                              query_pre_attn_scalar=32)),
    "gemma3": ("Gemma3Text", dict(sliding_window=12, layer_types=MIXED, query_pre_attn_scalar=32)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen3_moe": ("Qwen3Moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)),
    "olmo2": ("Olmo2", dict(head_dim=None, hidden_size=128)),
    "granite": ("Granite", dict(head_dim=None, hidden_size=128, attention_multiplier=0.2, residual_multiplier=0.5)),
    "gpt_oss": ("GptOss", dict(sliding_window=12, layer_types=MIXED, num_local_experts=4, num_experts_per_tok=2,
                               attn_implementation="eager")),
}  # fmt: skip


def model(family="llama", dtype=torch.float32, seed=0, **changes):
    """A random model in eval mode; attention is made peaked, so that what is evicted matters."""
    kind, own = FAMILIES[family]
    options = {
        k: v for k, v in (BASE | own | changes).items() if v is not None or k in ("sliding_window", "eos_token_id")
    }
    implementation = options.pop("attn_implementation")
    if kind == "Olmo2" and VERSION == (5, 4):
        pytest.skip("Olmo2Config of transformers 5.4 cannot be built beside this huggingface_hub")
    config = getattr(transformers, f"{kind}Config")(**options)
    if kind == "Gemma3Text":
        kind = "Gemma3"
    torch.manual_seed(seed)
    config._attn_implementation = implementation
    made = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("sinks"):
                weight.normal_()
            elif "attn" in name and weight.ndim > 1:
                weight.mul_(4)
    made.generation_config.eos_token_id = None
    return made


SHARED = []


@functools.cache
def shared(family="llama", dtype=torch.float32, seed=0):
    """One model for many tests, which leave it as it was."""
    SHARED.append(model(family, dtype, seed))
    return SHARED[-1]


def foreign_hooks():
    """Hooks of shared models that are not ours. Transformers adds some, and leaves them, where a call asks for hidden
    states or attentions; with hooks no token is recorded."""
    modules = (module for made in SHARED for module in made.modules())
    hooks = (hook for m in modules for each in (m._forward_hooks, m._forward_pre_hooks) for hook in each.values())
    return [hook for hook in hooks if not getattr(hook, "func", hook).__module__.startswith("kvevict.")]


def byte_tokenizer():
    """One token per byte."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


def word_tokenizer():
    """One word per token, w3 to w96, for a model of 97."""
    words = {"<pad>": 0, "<s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, 97)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>")


def save(folder, family="llama", **changes):
    """A tiny random model with a token per byte; returns the folder's name and the model."""
    made = model(family, vocab_size=256, bos_token_id=None, pad_token_id=None, **changes)
    made.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder), made


def prompt(batch=1, length=50, seed=1, pad=(0,)):
    """input_ids and attention_mask [batch, length], row b left-padded by pad[b % len(pad)]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        ids[row, : pad[row % len(pad)]] = 0
        mask[row, : pad[row % len(pad)]] = 0
    return dict(input_ids=ids, attention_mask=mask)


def generate(model, inputs, new=8, **options):
    """The new tokens of a greedy generation [batch, new]."""
    out = model.generate(**inputs, **dict(max_new_tokens=new, do_sample=False) | options)
    return out[:, inputs["input_ids"].shape[1] :]


def three_beams(model, inputs):
    """Beam search over a prompt of one row; asserts that every beam's score is that of its tokens read one by one."""
    out = model.generate(**inputs, max_new_tokens=6, num_beams=3, num_return_sequences=3, do_sample=False,
                         length_penalty=0.0, return_dict_in_generate=True, output_scores=True)  # fmt: skip
    beams = out.sequences[:, inputs["input_ids"].shape[1] :]
    for beam, score in zip(beams, out.sequences_scores, strict=True):
        cache, total = transformers.DynamicCache(config=model.config), 0
        logits = model(**inputs, past_key_values=cache).logits[0, -1]
        for token in beam:
            total += logits.log_softmax(-1)[token]
            logits = model(token.view(1, 1), past_key_values=cache).logits[0, -1]
        assert abs(total - score) < 1e-3
    assert len({tuple(beam) for beam in beams.tolist()}) == 3


def relative(got, want):
    """The largest difference, relative to the largest value."""
    return ((got.float() - want.float()).abs().max() / want.float().abs().max()).item()


CHAT = "<user>{{ messages[0]['content'] | trim }}</user>\n{% if add_generation_prompt %}<assistant>\n{% endif %}"


def chat_tokenizer():
    """One token per byte, with a chat template of tokens 256, 257 and 258."""
    made = byte_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<user>", "</user>", "<assistant>"]})
    made.chat_template = CHAT
    return made


def scripted(text, **changes):
    """A model of `chat_tokenizer` that goes on with a text of distinct characters after its first one, whatever came
    before that."""
    made = model(vocab_size=260, bos_token_id=None, pad_token_id=None, **changes)
    ids = byte_tokenizer()(text)["input_ids"]
    assert len(set(ids)) == len(ids)
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = torch.nn.functional.normalize(made.model.embed_tokens.weight)
        made.model.embed_tokens.weight.copy_(embedding)
        made.lm_head.weight.zero_()
        made.lm_head.weight[ids[1:]] = embedding[ids[:-1]]
    return made


def save_gguf(path, architecture="llama", **changes):
    """A tiny random Llama with a token per byte, in one .gguf file of fp32 weights; returns the model. Two zero bytes
    are a token, since the format has no empty list of merges."""
    gguf = pytest.importorskip("gguf")
    made = model(vocab_size=257, bos_token_id=None, pad_token_id=None, **changes)
    config, letters = made.config, byte_tokenizer().convert_ids_to_tokens(range(256))
    zero = byte_tokenizer().tokenize("\0")[0]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(257)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*letters, 2 * zero])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257)
    writer.add_token_merges([f"{zero} {zero}"])
    for name, weight in made.state_dict().items():
        writer.add_tensor(_gguf_name(name), _gguf_weight(name, weight, config).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return made


def _gguf_name(name):
    for ours, theirs in (
        ("model.layers", "blk"), ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"), ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"),
        ("lm_head", "output"),
    ):  # fmt: skip
        name = name.replace(ours, theirs)
    return name


def _gguf_weight(name, weight, config):
    """llama.cpp pairs a head's rotary dimensions side by side."""
    if "q_proj" not in name and "k_proj" not in name:
        return weight.contiguous()
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def streaming_sees(length, new, size, sink, budget):
    """[length + new] * 2, the columns that a row sees where `streaming` evicts: a prompt read in chunks of `size`, the
    first being the shortest, then tokens one by one."""
    alive, mask = [], torch.zeros(length + new, length + new, dtype=torch.bool)
    ends = [*range(length % size or size, length + 1, size), *range(length + 1, length + new + 1)]
    for start, end in zip([0, *ends], ends):
        for row in range(start, end):
            mask[row, [*alive, *range(start, row + 1)]] = True
        alive = [*alive, *range(start, end)]
        alive = alive[:sink] + alive[sink:][-(budget - sink) :]
    return mask


def short_parts(tokens):
    """LagKV's score with parts of so many tokens, in place of 128."""
    return type("ShortParts", (kvevict.SCORES["lagkv"],), dict(lag=tokens))()


def snapshot(model):
    """Every module's attributes by identity, containers one level deep."""

    def one(value):
        return (id(value), {k: id(v) for k, v in value.items()}) if isinstance(value, dict) else id(value)

    return {name: {key: one(value) for key, value in module.__dict__.items()} for name, module in model.named_modules()}
