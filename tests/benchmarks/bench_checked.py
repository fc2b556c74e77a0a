"""How near answers under recall are to the full cache's if chosen slots write them, with and without checks
(`recall_check`), where the archive lies in files:

    python tests/benchmarks/bench_checked.py DIR_OF_MODEL BOOKS [--texts 4] [--length 2000] [--slots 256] [--new 96]

BOOKS is a text, a folder of them or a .jsonl.xz, as `kvevict eval --haystack` takes it. Of each text the model writes a
summary and a list, greedily, in fp32 and one thread: with all slots (unpatched), with checks of --every tokens, and
with slots that the first 16 tokens choose. Prints for each request the tokens of the unpatched answer, how many of them
an answer has before its first other token, drafted tokens and those that were replaced, the share of the archive that a
token reads (calls over all slots per token), and the seconds of an answer, its prompt included.
"""

import tempfile
import time
from pathlib import Path

import torch
from bench_read import arguments
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict
from kvevict.lab.evaluate.haystack import haystack
from kvevict.lab.evaluate.tasks import TaskSettings

REQUESTS = dict(
    summary="Summarise this text in five sentences.",
    list="List every person of this text in the order in which they appear, each with what they do in it.",
)


def same(got, want):
    """The number of tokens before the first difference."""
    return next((at for at, (one, other) in enumerate(zip(got, want)) if one != other), min(len(got), len(want)))


@torch.no_grad()
def main():
    args = arguments(__doc__, "model", "books", texts=4, length=2000, slots=256, new=96, every=16, seed=0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    settings = TaskSettings(tokenizer, args.length, args.texts, args.seed, haystack=Path(args.books))
    names = "request tokens same-checked same-chosen drafted replaced calls/token s-full s-checked s-chosen"
    print(names.replace(" ", "\t"), flush=True)

    def answered(prompt, **options):
        start, given = time.perf_counter(), dict(max_new_tokens=args.new, do_sample=False)
        if not options:
            ids = model.generate(**prompt, **given)
        else:
            with tempfile.TemporaryDirectory() as folder:
                chosen = dict(budget=args.slots, recall=folder, tokenizer=tokenizer) | options
                with kvevict.evicting(model, "take+edie", **chosen):
                    ids = model.generate(**prompt, **given)
                    options["told"] = kvevict.report(model)["checked"]
        return ids[0, prompt["input_ids"].shape[1] :].tolist(), time.perf_counter() - start, options.get("told")

    for text in range(args.texts):
        passage = haystack(settings).passage(settings.rng(text), args.length - 100, settings)
        for name, request in REQUESTS.items():
            said = [dict(role="user", content=f"{passage}\n\n{request}")]
            written = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
            prompt = tokenizer(written, add_special_tokens=False, return_tensors="pt")
            want, full, _ = answered(prompt)
            checked, in_checks, told = answered(prompt, recall_check=args.every)
            chosen, in_choice, _ = answered(prompt, recall_after=16)
            numbers = len(want), same(checked, want), same(chosen, want), told["tokens"], told["replaced"]
            rates = f"{told['calls'] / len(checked):.3f}", *(f"{each:.1f}" for each in (full, in_checks, in_choice))
            print(name, *numbers, *rates, sep="\t", flush=True)


if __name__ == "__main__":
    main()
