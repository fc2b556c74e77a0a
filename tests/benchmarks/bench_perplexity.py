"""Perplexity of text after a prompt that was read in chunks and evicted, per policy and budget, against the full cache.

    python tests/benchmarks/bench_perplexity.py --model DIR [--file TEXT] [--stories 64] [--budgets 48 64 128]
    python tests/benchmarks/bench_perplexity.py --model DIR --save FILE  # only writes the stories, for `kvevict eval`

Without --file the stories are the model's own, sampled with a fixed seed. Each is `--tokens` long; the first half is
read in chunks, the rest is scored token by token through the cache. Windows and probes are 16. Two tables: only the
prompt is evicted (the cache then grows with every scored token), and eviction goes on while scoring. Prints the mean
negative log likelihood as perplexity, the standard error of its difference to the full cache over stories in nats, and
one JSON line.
"""

import argparse
import json

import torch

import kvevict
from kvevict.analysis.run import load_model
from kvevict.evaluate.ask import observers
from kvevict.policy import PRESETS, build
from kvevict.policy.text import parse_policy

POLICIES = [
    "streaming:sink=0", "streaming", "random", "knorm", "keydiff", "h2o", "tova", "snapkv", "take",
    "take:ema_space=literal", "take/no-probe", "take/no-delay", "take/chunk-only",
]  # fmt: skip
WINDOW = 16


def built(text, **options):
    """The policy NAME[:OPTION=VALUE,...], with windows and probes of at most `WINDOW`."""
    name, given = parse_policy(text)
    sizes = observers(PRESETS.find(name)["score"])
    return build(name, **options | {option: min(size, WINDOW) for option, size in sizes.items()} | given)


def sample_stories(model, count, tokens, temperature):
    """[count, tokens] ids the model wrote itself."""
    torch.manual_seed(0)
    start = torch.full((count, 1), model.config.bos_token_id)
    ids = model.generate(
        start, attention_mask=torch.ones_like(start), do_sample=True, top_k=0, temperature=temperature,
        min_new_tokens=tokens - 1, max_new_tokens=tokens - 1, pad_token_id=0,
    )  # fmt: skip
    return ids


def text_windows(tokenizer, path, count, tokens):
    """[count, tokens] ids from evenly spaced places of a text."""
    with open(path, encoding="utf-8", errors="replace") as file:
        ids = tokenizer(file.read(), add_special_tokens=False)["input_ids"]
    step = (len(ids) - tokens) // count
    return torch.tensor([ids[i * step : i * step + tokens] for i in range(count)])


@torch.no_grad()
def loss(model, ids):
    """[stories] mean negative log likelihood of the second half, one token at a time through the cache."""
    half = ids.shape[1] // 2
    out = model(ids[:, :half], use_cache=True, logits_to_keep=1)
    cache, total = out.past_key_values, 0.0
    for position in range(half, ids.shape[1]):
        total += torch.nn.functional.cross_entropy(out.logits[:, -1].float(), ids[:, position], reduction="none")
        out = model(ids[:, position : position + 1], past_key_values=cache)
    return total / (ids.shape[1] - half)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--file")
    parser.add_argument("--stories", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=480)
    parser.add_argument("--temperature", type=float, default=1.0, help="of the stories that the model writes")
    parser.add_argument("--save", metavar="FILE", help="write the stories as .jsonl and stop")
    parser.add_argument("--chunk-size", type=int, default=40)
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="NAME[:OPTION=VALUE,...]")
    parser.add_argument("--budgets", type=int, nargs="+", default=[48, 64, 128])
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, torch.float32)
    if args.file:
        ids = text_windows(tokenizer, args.file, args.stories, args.tokens)
    else:
        ids = sample_stories(model, args.stories, args.tokens, args.temperature)
    if args.save:
        stories = [tokenizer.decode(story[1:]) for story in ids]
        with open(args.save, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": story}) + "\n" for story in stories)
        return
    full = loss(model, ids)
    results = {"full": float(full.mean().exp())}
    print(f"{args.stories} stories of {args.tokens} tokens, chunks of {args.chunk_size}")
    print(f"full cache: {results['full']:.3f}")
    for decode in (False, True):
        print(f"\n{'evicting while scoring too' if decode else 'prompt evicted only':28}", end="")
        print("".join(f"{f'B={budget}':>18}" for budget in args.budgets))
        for name in args.policies:
            row = []
            for budget in args.budgets:
                policy = built(name, budget=budget, chunk_size=args.chunk_size, decode=decode)
                with kvevict.evicting(model, policy):
                    got = loss(model, ids)
                error = float((got - full).std() / args.stories**0.5)
                row.append((float(got.mean().exp()), error))
            results[f"{name}, decode={decode}"] = row
            print(f"{name:28}" + "".join(f"{ppl:10.3f} ±{error:.3f}" for ppl, error in row), flush=True)
    print(json.dumps({"bench": "perplexity", "budgets": args.budgets, "results": results}))


if __name__ == "__main__":
    main()
