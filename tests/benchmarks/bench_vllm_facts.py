"""python bench_vllm_facts.py MODEL ENGINE: facts in a long text, whose question is known: how many each engine answers.

ENGINE is "plain" (vLLM), "kvevict" (in vLLM, with copies of the question), "blind" (without them) or "patch"
(`kvevict.patch` in Transformers). All get the same prompts, with the answer's first words. A line per question.
"""

import argparse
import json
import os
import random
from pathlib import Path

os.environ |= dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING",
)  # fmt: skip


def by_vllm(a, cases):
    from vllm import LLM, SamplingParams

    own = dict(additional_config=dict(kvevict=dict(budget=a.budget, period=a.chunk, policy=a.policy)))
    if a.engine == "kvevict":
        own |= dict(
            scheduler_cls="kvevict.vllm.scheduler.create", logits_processors=["kvevict.vllm.copies:RequestCopies"]
        )
    llm = LLM(
        model=a.model, dtype="bfloat16", max_model_len=8192, max_num_batched_tokens=a.chunk, max_num_seqs=8,
        kv_cache_memory_bytes=2 << 30, enforce_eager=True, seed=0, enable_prefix_caching=False,
        **({} if a.engine == "plain" else own),
    )  # fmt: skip
    for case, ids in cases:
        given = dict(extra_args=dict(kvevict_question=case.said)) if a.engine == "kvevict" else {}
        params = SamplingParams(temperature=0, max_tokens=case.new_tokens, **given)
        (output,) = llm.generate([dict(prompt_token_ids=ids)], params, use_tqdm=False)
        yield case, output.outputs[0].text


def by_patch(a, cases, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    import kvevict

    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.bfloat16).eval()
    for case, ids in cases:
        inputs = torch.tensor([ids])
        chosen = kvevict.evicting(model, a.policy, budget=a.budget, chunk_size=a.chunk, tokenizer=tokenizer)
        with chosen, kvevict.observing(case.said, tokenizer):
            out = model.generate(inputs, max_new_tokens=case.new_tokens, do_sample=False)
        yield case, tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("model")
    p.add_argument("engine", choices=["plain", "kvevict", "blind", "patch"])
    p.add_argument("--haystack", type=Path, required=True, help="a text, as for kvevict eval")
    p.add_argument("--tokens", type=int, default=6000)
    p.add_argument("--cases", type=int, default=60)
    p.add_argument("--budget", type=int, default=500)
    p.add_argument("--chunk", type=int, default=512)
    p.add_argument("--policy", default="take+edie")
    a = p.parse_args()
    from transformers import AutoTokenizer

    from kvevict.lab.analysis.run import encode
    from kvevict.lab.evaluate.metrics import METRICS
    from kvevict.lab.evaluate.tasks import TASKS, TaskSettings

    tokenizer = AutoTokenizer.from_pretrained(a.model)
    settings = TaskSettings(tokenizer, a.tokens, a.cases, haystack=a.haystack)
    found = [*TASKS.find("asked/opened")(settings)]
    random.Random(0).shuffle(found)
    prompts = [encode(tokenizer, case.context, case.question, opening=case.opening) for case in found]
    cases = [(case, prompt.context + prompt.question) for case, prompt in zip(found[: a.cases], prompts, strict=False)]
    answered = by_patch(a, cases, tokenizer) if a.engine == "patch" else by_vllm(a, cases)
    right = total = 0
    for case, text in answered:
        ok = METRICS.find(case.metric)(text, case.answers)
        right, total = right + ok, total + 1
        print(json.dumps(dict(id=case.id, right=ok, text=text, sums=[right, total])), flush=True)


if __name__ == "__main__":
    main()
