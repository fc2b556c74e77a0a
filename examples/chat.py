"""A chat that asks about what was said long before. It is sent again each turn, or its cache is carried.

python examples/chat.py [MODEL] [--carry | --recall]

If it is sent again, the slots are chosen for each question out of all that was said. Otherwise only new tokens are
read. With --carry what no earlier question asked about may be gone, with --recall all tokens stay in an archive. Both
write "[said]" for answers into the template: the cache has their tokens, and their text could be split into others.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvevict

carries = {"--carry", "--recall"} & {*sys.argv}
folder = ([word for word in sys.argv[1:] if word not in carries] or [kvevict.small_llama()])[0]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
if not tokenizer.chat_template:  # the bundled model: its own form of questions and answers
    turn = "'Question: ' + turn.content + '\nAnswer:' if turn.role == 'user' else turn.content"
    tokenizer.chat_template = f"{{% for turn in messages %}}{{{{ {turn} }}}}{{% endfor %}}"
    model.generation_config.stop_strings = "\n\n"
kvevict.patch(model, budget=256, tokenizer=tokenizer, recall="--recall" in carries)

filler = "The baker counted the boats in the harbour and went home before it rained. " * 20
codes = {"Naislet": 364735, "Breamuth": 906112, "Quorrin": 558240}
text = "".join(f"{filler}The code of {name} is {code}. " for name, code in codes.items()) + filler + "\n\n"
chat, cache, output = [], DynamicCache(config=model.config), torch.empty(1, 0, dtype=torch.long)
for name in ("Quorrin", "Breamuth", "Naislet"):
    chat.append({"role": "user", "content": f"{'' if chat else text}What is the code of {name}?"})
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    new = tokenizer(prompt.rpartition("[said]")[2], add_special_tokens=False, return_tensors="pt").input_ids
    ids = torch.cat([output[:, : cache.get_seq_length()], new], 1)
    output = model.generate(ids, past_key_values=cache if carries else None, max_new_tokens=32, tokenizer=tokenizer)
    said = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    chat.append({"role": "assistant", "content": "[said]" if carries else said})
    share, verdict = kvevict.report(model)["kept_share"][0], "right" if str(codes[name]) in said else "wrong"
    print(f"{new.shape[1]} tokens read, {share:.0%} of the slots kept: {said.strip()} ({verdict})")
