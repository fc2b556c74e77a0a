"""A chat over many turns in a cache that stays near its budget.

python examples/chat.py [MODEL]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvevict

folder = sys.argv[1] if len(sys.argv) > 1 else kvevict.small_llama()  # a folder or a name on the hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = kvevict.patch(AutoModelForCausalLM.from_pretrained(folder), "snapkv", budget=96, decode=True)

turns = ["The code of Naislet is 364735. The baker counted the boats in the harbour. " * 3]
turns += [f"Question: What is the code of {name}?\nAnswer:" for name in ("Naislet", "Breamuth", "Naislet", "Stithel")]
cache = DynamicCache(config=model.config)
for turn in turns:
    text = "\n\n" + turn
    if tokenizer.chat_template:  # of the turn alone: the cache has the turns before
        said = [{"role": "user", "content": turn}]
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    new = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    mask = torch.ones(1, cache.get_seq_length() + new.shape[1], dtype=torch.long)  # all seen tokens, and the new ones
    output = model.generate(new, attention_mask=mask, past_key_values=cache, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, new.shape[1] :], skip_special_tokens=True).split("\n\n")[0]
    kept = max(layer.longest() for layer in cache.layers)
    print(f"{cache.get_seq_length():4} tokens seen, {kept:3} slots at most | {' '.join(answer.split())[:60]}")
    assert kept <= 96 + 15, "it evicts every 16 tokens: the budget and 15 more"
