"""Trains lookahead tokens on a few pairs and uses them. It takes 3 steps; `train_lookahead.py` trains a useful adapter.

pip install '.[train]'
python examples/lookahead_tokens.py
"""

import tempfile

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict

tokenizer = AutoTokenizer.from_pretrained(kvevict.small_llama())
model = AutoModelForCausalLM.from_pretrained(kvevict.small_llama(), dtype="float32")

filler = "The baker counted the boats in the harbour and went home before it rained. " * 6
asked = "\n\nQuestion: What is the code of {0}?\nAnswer: The code of {0} is"
pairs = [
    dict(prompt=f"{filler}The code of {name} is {code}. {filler}{asked.format(name)}", response=f" {code}.")
    for name, code in (("Naislet", 364735), ("Breamuth", 906112), ("Quorrin", 558240), ("Stithel", 771309))
]
with tempfile.TemporaryDirectory() as out:
    adapter = kvevict.lookahead.train(
        model, pairs, out, tokenizer=tokenizer, steps=3, batch=2, tokens=8, rank=2, progress=False
    )
kvevict.patch(model, "lookahead", adapter=adapter, budget=64)
inputs = tokenizer(pairs[0]["prompt"], return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=3, do_sample=False)
print(kvevict.report(model)["kept"][0], tokenizer.decode(output[0, inputs.input_ids.shape[1] :]))
