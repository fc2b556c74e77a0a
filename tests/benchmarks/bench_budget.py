"""python bench_budget.py MODEL --tokens 8000 [--budgets 512 4096] [--chunks 4096] [--rounds 1]: what slots cost.

The table behind the default budget (docs/usage.md, "Which budget?"): reading a prompt, a decoded token, and bytes, with
each number of slots per kv head and each chunk size. In a round every setting reads the same text once, in turn, and
then writes `NEW` tokens. Times are processor time of all threads of the process, which other work on the machine
changes less than seconds on the clock, and are told with their ratios to the first setting's of the same round. The
last row is budget=1.0, which evicts nothing. Each run is a line of JSON on standard output as soon as it is there.
"""

import argparse
import json
import time
from statistics import median

import torch

import kvevict
from kvevict.lab.evaluate.haystack import haystack
from kvevict.lab.evaluate.tasks import TaskSettings
from kvevict.models.loading import load_model

BUDGETS = [512, 1024, 2048, 4096, 8192, 1.0]
NEW = 16  # decoded tokens


def prompt(tokenizer, length):
    """Ids [1, length] of generated text."""
    settings = TaskSettings(tokenizer, length + 200, 1)
    text = haystack(settings).passage(settings.rng("budget"), settings.length, settings)
    return torch.tensor([tokenizer(text)["input_ids"][:length]])


@torch.no_grad()
def run(model, ids, budget, chunk):
    """One prompt and `NEW` tokens: a dict of processor seconds and bytes."""
    with kvevict.evicting(model, budget=budget, chunk_size=chunk, tokenizer=False):  # the last 32 tokens observe
        began = time.process_time()
        out = model(ids, use_cache=True, logits_to_keep=1)
        read = time.process_time() - began
        cache = out.past_key_values
        began = time.process_time()
        for _ in range(NEW):
            out = model(out.logits[:, -1:].argmax(-1), past_key_values=cache, use_cache=True)
        report = kvevict.report(model)
    written = (time.process_time() - began) / NEW
    return dict(read=read, token=written, bytes=report["cache_bytes"], peak_bytes=report["peak_cache_bytes"])


def table(runs):
    """Medians over rounds of each setting, and of its ratios to the first setting's."""
    first, rows = next(iter(runs.values())), []
    for (budget, chunk), found in runs.items():
        ratio = {key: median(a[key] / b[key] for a, b in zip(found, first)) for key in ("read", "token")}
        read, token = (median(each[key] for each in found) for key in ("read", "token"))
        rows.append(
            f"| {budget} | {chunk} | {read:.1f} | {ratio['read']:.2f} | {1000 * token:.0f} | {ratio['token']:.2f} "
            f"| {found[0]['bytes'] / 1e6:.1f} | {found[0]['peak_bytes'] / 1e6:.1f} |"
        )
    heads = ["| slots | chunk | read, s | ratio | a token, ms | ratio | MB | peak MB |", "|---" * 8 + "|"]
    return "\n".join(heads + rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--budgets", type=lambda x: float(x) if "." in x else int(x), nargs="+", default=BUDGETS)
    parser.add_argument("--chunks", type=int, nargs="+", default=[4096])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, args.dtype, "cpu")
    ids = prompt(tokenizer, args.tokens)
    settings = [(budget, chunk) for chunk in args.chunks for budget in args.budgets]
    run(model, ids[:, -max(args.chunks) - 1000 :], *settings[0])  # a first reading allocates and is slower
    runs = {each: [] for each in settings}
    for _ in range(args.rounds):
        for budget, chunk in settings:
            runs[budget, chunk].append(run(model, ids, budget, chunk))
            said = dict(budget=budget, chunk=chunk, tokens=args.tokens)
            print(json.dumps(said | runs[budget, chunk][-1]), flush=True)
    print(table(runs))


if __name__ == "__main__":
    main()
