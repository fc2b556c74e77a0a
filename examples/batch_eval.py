"""Prompts split over processes, in batches with left padding.

pip install '.[train]'
python examples/batch_eval.py
accelerate launch --num_processes 2 examples/batch_eval.py
"""

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict

accelerator = Accelerator()
tokenizer = AutoTokenizer.from_pretrained(kvevict.small_llama(), padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.decode(0)
model = AutoModelForCausalLM.from_pretrained(kvevict.small_llama()).to(accelerator.device)
kvevict.patch(model, "take+chunkkv", budget=96, chunk_size=128)

filler = "The baker counted the boats in the harbour and went home before it rained. "
codes = {"Naislet": 364735, "Breamuth": 906112, "Quorrin": 558240, "Stithel": 771309}
asked = "\n\nQuestion: What is the code of {0}?\nAnswer: The code of {0} is"
cases = [
    (f"{filler * n}The code of {name} is {code}. {filler * 9}{asked.format(name)}", str(code))
    for n, (name, code) in enumerate(codes.items(), 5)
]
right = []
with accelerator.split_between_processes(cases) as mine:
    for start in range(0, len(mine), 2):
        prompts, truths = zip(*mine[start : start + 2], strict=True)
        inputs = tokenizer(list(prompts), return_tensors="pt", padding=True).to(accelerator.device)
        output = model.generate(**inputs, max_new_tokens=3, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        said = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :])
        right += [truth in text for truth, text in zip(truths, said, strict=True)]
right = gather_object(right)
accelerator.print(f"{sum(right)} of {len(right)} right")
