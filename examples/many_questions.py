"""A text is read once; every question continues a fork of its cache. Then again, from disk.

python examples/many_questions.py
"""

import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict

tokenizer = AutoTokenizer.from_pretrained(kvevict.small_llama())
model = AutoModelForCausalLM.from_pretrained(kvevict.small_llama())

facts = {"Naislet": 364735, "Breamuth": 906112, "Quorrin": 558240, "Stithel": 771309}
filler = "The baker counted the boats in the harbour and went home before it rained. " * 8
text = "".join(f"{filler}The code of {name} is {code}. " for name, code in facts.items()) + filler
questions = [f"Question: What is the code of {name}?\nAnswer: The code of {name} is" for name in facts]

# No question is known yet: the model's gates predict the value of each slot (`gate`, the default for a model with
# gates).
cache = kvevict.read(model, tokenizer, text, budget=0.25)
print("slots per head of layer 0:", cache.layers[0].counts[0].tolist(), "of", cache.get_seq_length())
answers = kvevict.answer(model, tokenizer, cache, questions, max_new_tokens=6, one_line=True)
for (name, code), said in zip(facts.items(), answers, strict=True):
    print(f"{name}: {said} ({'right' if str(code) in said else 'wrong'})")

with tempfile.TemporaryDirectory() as folder:
    kvevict.save_cache(cache, Path(folder) / "text.safetensors")
    loaded = kvevict.load_cache(Path(folder) / "text.safetensors", model)
again = kvevict.answer(model, tokenizer, loaded, questions, max_new_tokens=6, one_line=True)
print("from disk the same:", again == answers)
