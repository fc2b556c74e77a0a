"""A custom score: a class with its options as fields, used by name like a built-in score.

python examples/own_score.py [MODEL]
"""

import sys
from dataclasses import dataclass

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict


@kvevict.register_score("rare")
@dataclass(frozen=True)
class Rare(kvevict.Score):
    """Slots with values of a large norm that the last rows attend to."""

    power: float = 1.0
    rows = kvevict.ROWS["window"](16)  # the observing rows, unless the policy names others

    needs = ("attention", "value_norm")

    def score(self, slots, attention, norm):  # fp32 [batch, kv heads, slots], larger is better
        return attention * norm**self.power


folder = sys.argv[1] if len(sys.argv) > 1 else kvevict.small_llama()
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
filler = "The baker counted the boats in the harbour and went home before it rained. " * 20
prompt = filler + "The code of Naislet is 364735. " + filler + "\n\nQuestion: What is the code of Naislet?\nAnswer:"
inputs = tokenizer(prompt, return_tensors="pt")

for options in (dict(), dict(power=0.5, heads="ada"), dict(rows="probe", chunk_size=128)):
    policy = kvevict.Policy(score="rare", budget=64)
    kvevict.patch(model, policy, **options)
    output = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    kept = kvevict.report(model)["kept"][0][0]
    print(options, "kept", kept, "answer", tokenizer.decode(output[0, inputs.input_ids.shape[1] :]))
