"""A chat that asks about what was said long before. It is sent again each turn, or its cache is carried.

python examples/chat.py [MODEL] [--carry | --recall]

If it is sent again, the slots are chosen for each question out of all that was said. With --carry only new tokens are
read, and what no earlier question asked about may be gone. With --recall only new tokens are read, too, and every
question chooses out of all tokens, which stay in an archive.
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
kvevict.patch(model, budget=256, tokenizer=tokenizer, recall="--recall" in carries)

filler = "The baker counted the boats in the harbour and went home before it rained. " * 20
codes = {"Naislet": 364735, "Breamuth": 906112, "Quorrin": 558240}
text = "".join(f"{filler}The code of {name} is {code}. " for name, code in codes.items()) + filler + "\n\n"
chat, cache, output = [], DynamicCache(config=model.config), torch.empty(1, 0, dtype=torch.long)
for name in ("Quorrin", "Breamuth", "Naislet"):
    chat.append({"role": "user", "content": f"{'' if chat else text}What is the code of {name}?"})
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids, seen = prompt.input_ids, cache.get_seq_length()
    assert torch.equal(ids[:, :seen], output[:, :seen]), "the template changes earlier turns: send all again"
    known = dict(past_key_values=cache) if carries else {}
    output = model.generate(**prompt, **known, max_new_tokens=32, stop_strings="\n\n", tokenizer=tokenizer)
    said = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    chat.append({"role": "assistant", "content": said})
    share, verdict = kvevict.report(model)["kept_share"][0], "right" if str(codes[name]) in said else "wrong"
    print(f"{ids.shape[1] - seen} tokens read, {share:.0%} of the slots kept: {said.strip()} ({verdict})")
