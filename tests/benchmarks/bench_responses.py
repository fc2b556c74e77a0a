"""How like are the scores that a prompt gets from other responses than the likeliest one (LookaheadKV, table 8)?

    python tests/benchmarks/bench_responses.py [--model M --haystack TEXT] [--draft DIR] [--tasks facts fidelity]

Responses are sampled at four temperatures, or a smaller model's likeliest. Of every layer that evicts and every head:
recall of the best eighth of the prompt and Kendall's tau, unpooled, against the likeliest response's; means over
prompts, with standard errors. Prints a table and one JSON line.
"""

import argparse
import itertools
import json
import math
import statistics

import torch
from lookahead_pairs import pairs

from kvevict.analysis.run import load_model
from kvevict.lookahead import passes
from kvevict.lookahead.validation import recall, tau
from kvevict.models import small_llama
from kvevict.patch import find_decoder

TEMPERATURES = (0.2, 0.4, 0.6, 0.8)


def respond(model, prompt, length, temperature=None):
    """Ids of a sampled response, or of the likeliest, to its end or to `length` tokens."""
    how = dict(do_sample=False)
    if temperature is not None:
        how = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0)
    return model.generate(prompt[None], max_new_tokens=length, **how)[0, len(prompt) :]


def alike(got, want):
    """(recall, tau) of two passes' scores, means over layers and heads."""
    pairs = [(got[layer][0], want[layer][0]) for layer in want]
    count = max(1, pairs[0][0].shape[-1] // 8)
    return tuple(
        torch.stack(values).mean().item()
        for values in zip(*((recall(a, b, count), tau(a, b)) for a, b in pairs), strict=True)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=small_llama())
    parser.add_argument("--haystack")
    parser.add_argument("--draft", help="folder of a smaller model with the same tokenizer")
    parser.add_argument("--tasks", nargs="+", default=["facts", "fidelity"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024])
    parser.add_argument("--response", type=int, default=32, help="tokens at most")
    parser.add_argument("--count", type=int, default=30, help="prompts")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, "float32", "cpu")
    decoder, draft = find_decoder(model), load_model(args.draft, "float32", "cpu")[0] if args.draft else None
    torch.manual_seed(0)
    found: dict = {f"T = {t}": [] for t in TEMPERATURES} | ({"draft": []} if draft else {})
    for pair in itertools.islice(pairs(model, tokenizer, args, first=2000), args.count):
        prompt = torch.tensor(pair["prompt"])
        want = passes.truth(decoder, prompt, respond(model, prompt, args.response)).target
        for name, each in found.items():
            temperature = None if name == "draft" else float(name.split()[-1])
            response = respond(draft if name == "draft" else model, prompt, args.response, temperature)
            each.append(alike(passes.truth(decoder, prompt, response).target, want))
    print(
        f"{args.count} prompts of {args.tasks}, {args.lengths} tokens\n{'':10}recall of the best eighth, Kendall's tau"
    )
    for name, each in found.items():
        shown = [
            f"{statistics.mean(x):.3f} ± {statistics.stdev(x) / math.sqrt(len(x)) if len(x) > 1 else math.inf:.3f}"
            for x in zip(*each, strict=True)
        ]
        print(f"{name:10}{shown[0]:27}{shown[1]}")
    print(json.dumps({name: [statistics.mean(x) for x in zip(*each, strict=True)] for name, each in found.items()}))


if __name__ == "__main__":
    main()
