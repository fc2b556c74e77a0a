"""A chat that asks about what was said long before.

python examples/chat.py [MODEL] [--again]

Every turn reads its own tokens alone, and finds what it asks about in an archive of all tokens (recall=True). With
--again memory is bounded, and every turn reads the whole chat again. The chat is saved after every turn, and goes on
from its file in the end.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict

folder = ([word for word in sys.argv[1:] if word != "--again"] or [kvevict.small_llama()])[0]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
if not tokenizer.chat_template:  # the bundled model: its own form of questions and answers
    turn = "'Question: ' + turn.content + '\nAnswer:' if turn.role == 'user' else turn.content"
    tokenizer.chat_template = f"{{% for turn in messages %}}{{{{ {turn} }}}}{{% endfor %}}"
    model.generation_config.stop_strings = "\n\n"

filler = "The baker counted the boats in the harbour and went home before it rained. " * 20
codes = {"Naislet": 364735, "Breamuth": 906112, "Quorrin": 558240}
text = "".join(f"{filler}The code of {name} is {code}. " for name, code in codes.items()) + filler + "\n\n"
chat = kvevict.Chat(model, tokenizer, budget=256, recall="--again" not in sys.argv)
for name in ("Quorrin", "Breamuth", "Naislet"):
    said = chat.ask(f"{'' if chat.messages else text}What is the code of {name}?", max_new_tokens=32)
    share, verdict = kvevict.report(chat.cache)["kept_share"][0], "right" if str(codes[name]) in said else "wrong"
    print(f"{said} ({verdict}; attends to {share:.0%} of the slots)")
    chat.save("chat.safetensors")

chat = kvevict.Chat.load("chat.safetensors", model, tokenizer)
print("of the file:", chat.ask("What is the code of Quorrin?", max_new_tokens=32))
