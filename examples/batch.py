"""A file of prompts, in batches with left padding.

python examples/batch.py MODEL --prompts prompts.jsonl --out answers.jsonl

A line of prompts.jsonl is {"prompt": TEXT}; a line of answers.jsonl has the answer, too. Run again, it goes on with the
prompts that have no answer. The texts get the model's chat template, if it has one. Prompts are sorted by length, so
that those of a batch need little padding.
"""

import argparse
import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default=kvevict.small_llama())
parser.add_argument("--prompts", required=True, type=Path)
parser.add_argument("--out", default="answers.jsonl", type=Path)
parser.add_argument("--budget", type=int, help="slots per kv head; default: kvevict's")
parser.add_argument("--batch-size", default=4, type=int)
parser.add_argument("--max-new-tokens", default=64, type=int)
args = parser.parse_args()

lines = args.out.read_text("utf-8").splitlines() if args.out.exists() else []
done = {json.loads(line)["prompt"] for line in lines}
prompts = [json.loads(line)["prompt"] for line in args.prompts.read_text("utf-8").splitlines()]
prompts = sorted({prompt for prompt in prompts if prompt not in done}, key=len)
print(f"{len(done)} prompts are done, {len(prompts)} are left")

tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.decode(0)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
kvevict.patch(model, budget=args.budget, tokenizer=tokenizer)
for start in range(0, len(prompts), args.batch_size):
    batch = texts = prompts[start : start + args.batch_size]
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": prompt}] for prompt in batch]
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not tokenizer.chat_template)
    output = model.generate(**inputs, max_new_tokens=args.max_new_tokens, pad_token_id=tokenizer.pad_token_id)
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    with args.out.open("a", encoding="utf-8") as file:
        for prompt, answer in zip(batch, answers, strict=True):
            file.write(json.dumps(dict(prompt=prompt, answer=answer.strip())) + "\n")
    print(f"{start + len(batch)} of {len(prompts)}")
