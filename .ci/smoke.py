"""What must work wherever a wheel was installed: the bundled model answers from a small cache, forked and not."""

import tempfile

import transformers

import kvevict
from kvevict.ops import _ops

folder = kvevict.small_llama()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
filler = "The baker counted the boats in the harbour and went home before it rained. " * 12
text = filler + "The code of Naislet is 364735. " + filler
question = "Question: What is the code of Naislet?\nAnswer:"
inputs = tokenizer(f"{text}\n\n{question}", return_tensors="pt")
for policy in ("take+chunkkv", "take", "laq"):
    with kvevict.evicting(model, policy, budget=128, chunk_size=128):
        output = model.generate(**inputs, max_new_tokens=10, do_sample=False)
        assert "364735" in tokenizer.decode(output[0, inputs.input_ids.shape[1] :]), policy
        assert max(max(row[0]) for row in kvevict.report(model)["kept"]) <= 128, policy
cache = kvevict.read(model, tokenizer, text, "keydiff", budget=300)
with tempfile.TemporaryDirectory() as place:
    kvevict.save_cache(cache, f"{place}/cache")
    cache = kvevict.load_cache(f"{place}/cache", model)
assert "364735" in kvevict.answer(model, tokenizer, cache, [question] * 2, max_new_tokens=10)[1]
print("kvevict", kvevict.__version__, _ops.build_info(), _ops.cpu_isa(), "transformers", transformers.__version__, "ok")
