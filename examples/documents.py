"""Many documents, the same questions about each: a document is read once, and all questions are asked of it.

python examples/documents.py MODEL --documents FOLDER --questions QUESTIONS.txt --out answers.jsonl

FOLDER has text files, QUESTIONS.txt a question a line. A line of answers.jsonl is {"document", "question", "answer"}.
Run again, it goes on with the documents that are not in the file. With `recall=True` every question attends to all of a
document: its archive takes the memory of a full cache, for one document at a time.
"""

import argparse
import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", default=kvevict.small_llama())
parser.add_argument("--documents", required=True, type=Path)
parser.add_argument("--questions", required=True, type=Path)
parser.add_argument("--out", default="answers.jsonl", type=Path)
parser.add_argument("--budget", type=int, help="slots per kv head; default: kvevict's")
parser.add_argument("--max-new-tokens", default=64, type=int)
args = parser.parse_args()

questions = args.questions.read_text("utf-8").splitlines()
lines = args.out.read_text("utf-8").splitlines() if args.out.exists() else []
done = {json.loads(line)["document"] for line in lines}
documents = [path for path in sorted(args.documents.glob("*.txt")) if path.name not in done]
print(f"{len(done)} documents are done, {len(documents)} are left")

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
for path in documents:
    cache = kvevict.read(model, tokenizer, path.read_text("utf-8"), budget=args.budget, recall=True)
    answers = kvevict.answer(model, tokenizer, cache, questions, max_new_tokens=args.max_new_tokens)
    made = [
        json.dumps(dict(document=path.name, question=question, answer=answer)) + "\n"
        for question, answer in zip(questions, answers, strict=True)
    ]
    with args.out.open("a", encoding="utf-8") as file:
        file.write("".join(made))  # a document's lines at once: a killed run leaves whole documents
    print(f"{path.name}: {cache.get_seq_length()} tokens, {len(answers)} answers")
