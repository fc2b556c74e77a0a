"""A long report about a long text, in pieces: each part is asked for by itself and attends to all of the text.

python examples/report.py MODEL --text BOOK.txt --parts PARTS.txt --out report.md

PARTS.txt has what each part is to tell, a line each, for instance "Who are the people, and how do they change?". The
text is read once, into a file beside the report. Run again, it loads that file and writes the parts that are missing.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default=kvevict.small_llama())
parser.add_argument("--text", required=True, type=Path)
parser.add_argument("--parts", required=True, type=Path)
parser.add_argument("--out", default="report.md", type=Path)
parser.add_argument("--budget", type=int, help="slots per kv head; default: kvevict's")
parser.add_argument("--max-new-tokens", default=512, type=int)
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
file = args.out.with_suffix(".safetensors")
options = dict(budget=args.budget, recall=True, recall_slots=1.0)  # a part attends to all slots, to its last token
cache = kvevict.read(model, tokenizer, args.text.read_text("utf-8"), file=file, **options)
written = args.out.read_text("utf-8") if args.out.exists() else ""
for part in args.parts.read_text("utf-8").splitlines():
    title = f"## {part}\n"
    if title not in written:
        (answer,) = kvevict.answer(model, tokenizer, cache, [part], max_new_tokens=args.max_new_tokens)
        with args.out.open("a", encoding="utf-8") as report:
            report.write(f"{title}\n{answer}\n\n")
        print(f"{part}: {len(answer.split())} words")
