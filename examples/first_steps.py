"""The same prompt with a full cache and with 128 slots per head.

python examples/first_steps.py [MODEL]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict

folder = sys.argv[1] if len(sys.argv) > 1 else kvevict.small_llama()  # a folder or a name on the hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)

filler = "The baker counted the boats in the harbour and went home before it rained. " * 40
text = filler + "The code of Naislet is 364735. " + filler
inputs = tokenizer(text + "\n\nQuestion: What is the code of Naislet?\nAnswer:", return_tensors="pt")


def answer():
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(output[0, inputs.input_ids.shape[1] :]).strip().partition("\n")[0]


print("full cache:", answer())
for policy in ("take+edie", "snapkv", "streaming"):
    with kvevict.evicting(model, policy, budget=128, chunk_size=256):
        said, report = answer(), kvevict.report(model)
    share, size = report["kept_share"][0], report["cache_bytes"]
    print(f"{policy}: {said} ({share:.0%} of {report['seen'][0]} tokens' slots, {size >> 10} KiB)")
