"""vLLM with kvevict's backend: tokens, slots and requests. vLLM runs in processes of its own: `.ci/run vllm`."""

import json
import os
import re
import subprocess
import sys

import pytest
import safetensors.torch
import tiny
import torch
from caches import kept
from in_vllm import QUESTIONS, by_engine, needed, prompts, save, vllm

pytestmark = needed
PERIOD, BUDGET, LONGEST = 16, 32, 256
FITS = dict(budget=LONGEST, period=PERIOD, policy="snapkv", window=8)
NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2)
TYPES = [
    "llama", "mistral", "qwen2", "qwen3", "phi3", "glm4", "stablelm", "granite", "olmo2", "cohere", "nemotron",
    "starcoder2",
]  # fmt: skip
TRAINED = os.environ.get("KVEVICT_VLLM_MODELS", "").split()  # folders of models; none: the test is left out


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("llama"), max_position_embeddings=LONGEST)


def test_tokens_are_vllms_where_everything_fits(tmp_path):
    """Greedy, float32: types of models, several requests at once, answers over periods' ends."""
    models = [save(tmp_path / name, name) for name in TYPES]
    runs = [dict(do="greedy", prompts=prompts([5, 60, 131, 16, 17]), new=40)]
    plain = vllm(tmp_path, models, runs)
    for policy, tokens in (("edie", 256), ("snapkv", 37)):
        assert vllm(tmp_path, models, runs, FITS | dict(policy=policy), max_num_batched_tokens=tokens) == plain


@pytest.mark.parametrize("type", ["qwen3", "phi3", "cohere"])
def test_tokens_of_compiled_models_are_vllms(tmp_path, type):
    models = [save(tmp_path / "model", type)]
    runs = [dict(do="greedy", prompts=prompts([5, 60, 131, 16, 17]), new=40)]
    plain = vllm(tmp_path, models, runs, enforce_eager=False)
    assert vllm(tmp_path, models, runs, FITS | dict(policy="edie"), enforce_eager=False) == plain


@pytest.mark.parametrize("llm", [{}, dict(model_impl="transformers"), dict(enforce_eager=False)])
@pytest.mark.parametrize("folder", TRAINED)
def test_tokens_of_trained_models_are_vllms(tmp_path, folder, llm):
    runs = [dict(do="greedy", prompts=prompts([5, 60, 131]), new=40)]
    plain = vllm(tmp_path, [folder], runs, **llm)
    assert vllm(tmp_path, [folder], runs, FITS | dict(policy="edie"), **llm) == plain


@pytest.mark.parametrize("policy", ["snapkv", "edie", "paasvn", "chunkkv:c=4", "streaming", "keydiff"])
def test_slots_and_logprobs_are_the_engines(tmp_path, llama, policy):
    """In steps of 7 and of 100 tokens. The engine reads the prompt's whole periods and then token by token (METHODS
    14)."""
    folder, model = llama
    texts, new = prompts([5 * PERIOD + 3, 4 * PERIOD, 2]), 2 * PERIOD + 5
    window = {} if policy in ("streaming", "keydiff") else dict(window=4)
    options = dict(budget=BUDGET, period=PERIOD, policy=policy) | window
    runs = [dict(do="kept", prompts=texts, new=new)]
    small, large = (
        vllm(tmp_path, [folder], runs, options, max_num_batched_tokens=n, max_num_seqs=4)[0][0] for n in (7, 100)
    )
    for ids, one, other in zip(texts, small, large, strict=True):
        assert (one["tokens"], one["slots"]) == (other["tokens"], other["slots"])
        read = ids + one["tokens"][:-1]
        logits, cache = by_engine(model, read, len(ids), PERIOD, policy=policy, budget=BUDGET, **window)
        engine = logits.log_softmax(-1)[len(ids) - 1 :]
        assert engine.argmax(-1).tolist() == one["tokens"]
        mine = torch.tensor([one["logprobs"], other["logprobs"]])
        torch.testing.assert_close(mine, engine.amax(-1).expand(2, -1), rtol=0, atol=2e-4)
        assert [layer[0] for layer in kept(cache)] == one["slots"]


def test_requests_together_and_preempted(tmp_path, llama):
    """More requests than vLLM has room for, in steps that mix them: each answers as it does alone, also between the
    steps of which vLLM makes graphs on a GPU."""
    folder, _ = llama
    texts = prompts([100, 3, 50, 16, 33, 77, 120, 15, 64, 40])
    runs = [
        *(dict(do="greedy", prompts=[text], new=50) for text in texts),
        dict(do="greedy", prompts=texts, new=50),
        dict(do="greedy", prompts=texts, new=50),  # again: vLLM's prefix cache finds nothing
        dict(do="preempted", prompts=texts[:5], new=50, after=[3, 9, 30]),
        dict(do="greedy", prompts=texts[:3], new=50, n=3, temperature=1),  # vLLM refuses n > 1 without
        dict(do="captured", prompts=texts[:5], new=50),
    ]
    options = dict(budget=BUDGET, period=PERIOD, policy="edie", window=4)
    (results,) = vllm(tmp_path, [folder], runs, options, max_num_batched_tokens=48, max_num_seqs=6)
    alone = [result[0][0] for result in results[: len(texts)]]
    together, again, preempted, drawn, captured = results[len(texts) :]
    assert [answer for (answer,) in together] == [answer for (answer,) in again] == alone
    assert preempted == dict(tokens=alone[:5], lost=[5, 5, 5])
    assert captured == alone[:5]
    assert [len({*map(tuple, answers)}) for answers in drawn] == [3] * 3


def test_requests_begin_by_their_priority(tmp_path, llama):
    """One at a time, as each has a whole state and there is one: none is preempted, and each answers as alone."""
    folder, _ = llama
    texts, priorities = prompts([40, 70, 20, 90]), [3, 0, 2, 1]
    runs = [
        *(dict(do="greedy", prompts=[text], new=20) for text in texts),
        dict(do="ranked", prompts=texts, new=20, priorities=priorities),
    ]
    options = dict(budget=BUDGET, period=PERIOD, policy="edie", window=4)
    (results,) = vllm(tmp_path, [folder], runs, options, max_num_seqs=1, scheduling_policy="priority")
    assert results[-1] == dict(tokens=[result[0][0] for result in results[:-1]], order=[1, 3, 2, 0])


def test_a_question_observes_every_period_and_is_not_counted(tmp_path, llama):
    """Whatever the steps, also after all states were lost; the prompt, its logprobs and the answer's length are those
    of the client."""
    folder, _ = llama
    texts = prompts([100, 50, 5, 77])
    runs = [
        *(dict(do="asked", prompts=[text], new=20, question="w3 w4") for text in texts),
        dict(do="asked", prompts=texts, new=20, question="w3 w4"),
        dict(do="asked", prompts=texts, new=20, question=None),
        dict(do="asked", prompts=texts, new=20, question="w3 w4", prompt_logprobs=1),
        dict(do="preempted", prompts=texts, new=20, after=[2, 9], extra_args=dict(kvevict_question="w3 w4")),
        dict(do="refused", prompts=texts, extra_args=dict(kvevict_question=3)),
        dict(do="asked", prompts=prompts([200]), new=LONGEST - 200, question="w3 w4"),
    ]
    options = dict(budget=BUDGET, period=PERIOD, policy="edie", window=4)
    small, large = (
        vllm(tmp_path, [folder], runs, options, max_num_batched_tokens=n, max_num_seqs=4, **QUESTIONS)[0]
        for n in (7, 100)
    )
    *alone, together, without, scored, preempted, refused, longest = small
    assert large == small
    assert together == [answer for (answer,) in alone]
    assert [sent for sent, _, _ in together] == [sent for sent, _, _ in scored] == texts
    assert [len(tokens) for _, tokens, _ in together] == [20] * 4
    assert together != without and together[2] == without[2]  # a prompt of 5 tokens has no copy
    assert [tokens for _, tokens, _ in scored] == [tokens for _, tokens, _ in without]  # without copies
    assert [count for _, _, count in scored] == [100, 50, 5, 77]
    assert preempted == dict(tokens=[tokens for _, tokens, _ in together], lost=[4, 4])
    assert "kvevict_question must be a text" in refused
    assert [len(tokens) <= LONGEST - 200 for _, tokens, _ in longest] == [True]


def test_compiled_and_by_transformers_implementation(tmp_path, llama):
    folder, _ = llama
    runs = [dict(do="greedy", prompts=prompts([90, 40]), new=40)]
    options = dict(budget=BUDGET, period=PERIOD, policy="snapkv", window=4)
    eager = vllm(tmp_path, [folder], runs, options)
    assert vllm(tmp_path, [folder], runs, options, model_impl="transformers") == eager
    assert vllm(tmp_path, [folder], runs, options, enforce_eager=False) == eager


def test_two_processes_with_half_of_the_heads_each(tmp_path, llama):
    """Tensor parallel, under a policy whose heads keep equally many slots, with copies of questions."""
    folder, _ = llama
    drawn = dict(do="asked", prompts=prompts([90, 40, 7]), new=40, temperature=1, seed=5)
    runs = [drawn | dict(question=question) for question in ("w3 w4", None)]
    options = dict(budget=BUDGET, period=PERIOD, policy="take+edie", probe=4)
    one, two = (vllm(tmp_path, [folder], runs, options, tensor_parallel_size=n, **QUESTIONS) for n in (1, 2))
    assert one == two and one[0][0] != one[0][1]


def adapter(folder, model):
    """Save a random LoRA adapter of a model's queries and values."""
    weights = {}
    for i, layer in enumerate(model.model.layers):
        for name in ("q_proj", "v_proj"):
            out, size = getattr(layer.self_attn, name).weight.shape
            of = f"base_model.model.model.layers.{i}.self_attn.{name}.lora_"
            weights |= {f"{of}A.weight": torch.randn(8, size), f"{of}B.weight": 0.1 * torch.randn(out, 8)}
    folder.mkdir()
    safetensors.torch.save_file(weights, folder / "adapter_model.safetensors")
    config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=8, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_adapters_are_vllms_where_everything_fits(tmp_path, llama):
    folder, model = llama
    own = adapter(tmp_path / "adapter", model)
    runs = [dict(do="greedy", prompts=prompts([40, 7, 90]), new=20, adapter=each) for each in (own, None)]
    lora = dict(enable_lora=True, max_lora_rank=8)
    ((adapted, base),) = plain = vllm(tmp_path, [folder], runs, **lora)
    assert all(one != other for one, other in zip(adapted, base, strict=True))
    assert vllm(tmp_path, [folder], runs, FITS, **lora) == plain


@pytest.mark.parametrize(("family", "options", "llm", "said"), [
    ("gemma2", FITS, {}, "the model has layers with a sliding window"),
    ("llama", dict(policy="take", budget=64), {}, "layers do not wait for each other: give 'take:warmup_layers=none'"),
    ("llama", dict(policy="snapkv", budget=32), {}, "always keeps 32 slots of each head"),
    ("llama", FITS, dict(scheduler_cls=QUESTIONS["scheduler_cls"]), "needs --logits-processors kvevict.vllm.copies"),
    ("llama", FITS, dict(speculative_config=NGRAM), "leave --speculative-config out"),
    ("llama", FITS | dict(policy="edie"), dict(tensor_parallel_size=2), "leave --tensor-parallel-size at 1, or give"),
])  # fmt: skip
def test_refused_at_start_up(tmp_path, family, options, llm, said):
    model, _ = tiny.save(tmp_path / "model", family, max_position_embeddings=LONGEST)
    with pytest.raises(AssertionError, match=re.escape(said)):
        vllm(tmp_path, [model], [], options, **llm)


def test_without_options_vllm_is_as_it_was():
    code = (
        "import kvevict, sys; assert 'vllm' not in sys.modules; from vllm.plugins import load_general_plugins as load; "
        "load(); from vllm.config import VllmConfig, set_current_vllm_config as use; import kvevict.vllm.chosen as c\n"
        "with use(VllmConfig()): print(c.CPU_ATTN.__module__)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=200)
    assert said.stdout.split()[-1:] == ["vllm.v1.attention.backends.cpu_attn"], said.stderr[-3000:]
