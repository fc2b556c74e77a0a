"""Facts in a long text, whose question is known: right answers of plain vLLM, of kvevict in it, and of `kvevict.patch`.

    python tests/benchmarks/bench_vllm_facts.py OUT.jsonl MODEL --haystack BOOKS --side plain|kvevict|blind|patch
    python tests/benchmarks/bench_vllm_facts.py OUT.jsonl --table

"plain" is vLLM, "kvevict" in vLLM with copies of the question, "blind" without them, "patch" in Transformers. All get
the same prompts, which end with the answer's first words, and the same policy; an answer ends with its line. Run
"plain" first: the others are asked what it answers right, and the table counts the questions that all were asked. The
answers to a text's questions are appended together, and an interrupted run goes on with the next text.
"""

import argparse
import itertools
import json
import os
from pathlib import Path

os.environ |= dict(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING",
)  # fmt: skip
SIDES = ["plain", "kvevict", "blind", "patch"]
NEW = 40  # most tokens of an answer


def by_vllm(a):
    """A function that answers (case, ids of its prompt) by vLLM."""
    from vllm import LLM, SamplingParams

    own = dict(budget=a.budget, period=a.chunk, policy=a.policy, kv=a.kv)
    llm = LLM(
        model=a.model, dtype=a.dtype, max_model_len=8192, max_num_batched_tokens=a.chunk, max_num_seqs=8, seed=0,
        kv_cache_memory_bytes=2 << 30, enforce_eager=True,
        **({} if a.side == "plain" else dict(additional_config=dict(kvevict=own))),
        **(dict(
            scheduler_cls="kvevict.vllm.scheduler.create", logits_processors=["kvevict.vllm.copies:RequestCopies"]
        ) if a.side == "kvevict" else {}),
    )  # fmt: skip

    def answers(cases):
        prompts = [dict(prompt_token_ids=ids) for _, ids in cases]
        params = [
            SamplingParams(
                temperature=0, max_tokens=NEW, stop=["\n"],
                extra_args=dict(kvevict_question=case.said) if a.side == "kvevict" else None,
            )
            for case, _ in cases
        ]  # fmt: skip
        return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]

    return answers


def by_patch(a, tokenizer):
    """The same by `kvevict.patch`'s engine."""
    import torch
    from transformers import AutoModelForCausalLM

    import kvevict

    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=a.dtype).eval()
    own = dict(budget=a.budget, chunk_size=a.chunk, kv=a.kv, tokenizer=tokenizer)

    def answer(case, ids):
        inputs = torch.tensor([ids])
        with kvevict.evicting(model, a.policy, **own), kvevict.observing(case.said, tokenizer):
            out = model.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NEW, do_sample=False,
                stop_strings=["\n"], tokenizer=tokenizer,
            )  # fmt: skip
        return tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)

    return lambda cases: [answer(*each) for each in cases]


def measure(a, lines):
    from transformers import AutoTokenizer

    from kvevict.lab.analysis.run import encode
    from kvevict.lab.evaluate.metrics import METRICS
    from kvevict.lab.evaluate.tasks import TASKS, TaskSettings

    tokenizer = AutoTokenizer.from_pretrained(a.model)
    settings = TaskSettings(tokenizer, a.tokens, a.texts, haystack=a.haystack)
    known = {(line["side"], line["kv"], line["text"]) for line in lines}
    right = {line["id"] for line in lines if line["side"] == "plain" and line["right"]}
    answers = by_patch(a, tokenizer) if a.side == "patch" else by_vllm(a)
    for text, cases in itertools.groupby(TASKS.find("asked/opened")(settings), lambda case: case.tags["text"]):
        if (a.side, a.kv, text) in known:
            continue
        if a.side != "plain":
            if ("plain", "model", text) not in known:
                return print(f"text {text}: run --side plain first")
            cases = [case for case in cases if case.id in right]
            if not cases:
                continue
        prompts = []
        for case in cases:
            prompt = encode(tokenizer, case.context, case.question, opening=case.opening)
            prompts.append((case, prompt.context + prompt.question))
        found = [
            json.dumps(dict(side=a.side, kv=a.kv, text=text, id=case.id, tokens=len(ids), said=said,
                            right=METRICS.find(case.metric)(said, case.answers))) + "\n"
            for (case, ids), said in zip(prompts, answers(prompts), strict=True)
        ]  # fmt: skip
        with open(a.out, "a", encoding="utf-8") as file:
            file.writelines(found)


def table(lines):
    from kvevict.lab.evaluate.intervals import of_scores

    sides = {}
    for line in lines:
        sides.setdefault((line["side"], line["kv"]), {})[line["id"]] = line["right"]
    asked = set.intersection(*(set(of_side) for of_side in sides.values()))
    for (side, kv), of_side in sides.items():
        right = [of_side[id] for id in asked]
        mean, low, high = (100 * x for x in of_scores(right))
        print(f"{side:8} {kv:6} {sum(right):3.0f} of {len(right)}, {mean:3.0f} % [{low:.0f}, {high:.0f}]")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("out", type=Path)
    p.add_argument("model", nargs="?")
    p.add_argument("--table", action="store_true")
    p.add_argument("--side", choices=SIDES)
    p.add_argument("--haystack", type=Path, help="a text, as for kvevict eval")
    p.add_argument("--tokens", type=int, default=6000)
    p.add_argument("--texts", type=int, default=8, help="with eight questions each")
    p.add_argument("--budget", type=int, default=500)
    p.add_argument("--chunk", type=int, default=512, help="the period; patch's chunk")
    p.add_argument("--policy", default="take+edie")
    p.add_argument("--kv", default="model", help="how kvevict stores slots")
    p.add_argument("--dtype", default="bfloat16")
    a = p.parse_args()
    lines = [json.loads(line) for line in a.out.read_text("utf-8").splitlines()] if a.out.exists() else []
    if a.table:
        return table(lines)
    measure(a, lines)


if __name__ == "__main__":
    main()
