"""`kvevict plan --vllm`: the requests that fit a memory, as vLLM counts them."""

import pytest
import transformers

from kvevict.cli import main
from kvevict.lab.analysis.served import served
from kvevict.lab.analysis.shape import shape_of

SMOLLM2 = dict(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize(("kv", "size", "count"), [("model", 25_067_520, 84), ("int8", 14_255_520, 149)])
def test_requests_are_those_that_vllm_counts(kv, size, count):
    """SmolLM2-135M, 8,192 tokens, 2 GiB, 512 slots: vLLM itself counts 11 and 84 (tests/benchmarks/bench_vllm.py)."""
    shape = shape_of(transformers.LlamaConfig(**SMOLLM2), "bfloat16")
    found = served(shape, dict(policy="snapkv", budget=512), kv, 2 << 30, 8192)
    assert found["plain"] == dict(request_bytes=30 * 2 * 2 * 64 * 3 * 8192, requests=11)
    assert found["kvevict"] == dict(request_bytes=size, requests=count)


def test_what_cannot_work_in_vllm_is_refused():
    shape = shape_of(transformers.LlamaConfig(**SMOLLM2), "bfloat16")
    with pytest.raises(ValueError, match="give 'take:warmup_layers=none'"):
        served(shape, dict(policy="take", budget=512), "model", 2 << 30, 8192)


def test_the_command_says_the_counts(capsys):
    assert main(["plan", "--vllm", "1MiB", "--tokens", "400", "--new-tokens", "112", "--budget", "64",
                 "--policy", "snapkv:window=8"]) == 0  # fmt: skip
    said = capsys.readouterr().out
    assert said.startswith("In vLLM 1MiB for KV hold ") and "requests of 512 tokens" in said
    assert main(["plan", "--vllm", "2", "--tokens", "400"]) == 2
    assert "--vllm='2' is not a number of bytes" in capsys.readouterr().err
