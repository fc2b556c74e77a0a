"""Ten questions about one context: the prompt read again for each, its cache copied for each, or forked.

    python tests/benchmarks/bench_questions.py --model DIR [--file TEXT] [--tokens 6000] [--dtype float32]

Every way answers the same questions with the same number of greedy tokens, and keeps its ten caches: as a server does
that goes on with each of them. Bytes are those of the caches' storages, a shared one counted once. Forks must answer as
copies do: in float32 that is an error, in 16 bits, where sums in another order round otherwise, the table says how many
answers are the same. Prints a table and one JSON line.
"""

import argparse
import copy
import json
import random
import time

import torch
from transformers import DynamicCache

import kvevict
from kvevict.analysis.run import load_model
from kvevict.commands import add_budget, add_policy, build_policies, grid, read_text
from kvevict.evaluate.haystack import Haystack
from kvevict.prompts import frame, ids_of

QUESTIONS = [f"{ask} is spoken of {where}?" for ask in ("Who", "What") for where in (
    "first", "last", "in the middle", "most often", "only once",
)]  # fmt: skip


def bytes_of(caches) -> int:
    """Of every storage that the caches' layers hold, shared ones once."""
    storages = {}
    for cache in caches:
        for layer in cache.layers:
            tensors = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
            storages |= {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def asked(model, cache, ids, tokens: int) -> list:
    """The greedy tokens after ids, which follow what the cache holds."""
    ids = torch.tensor([ids])
    mask = torch.ones(1, cache.get_seq_length() + ids.shape[1], dtype=torch.long)
    options = dict(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **options)[0, ids.shape[1] :].tolist()


def again(model, context, question, tokens):
    """The whole prompt for every question."""
    cache = DynamicCache(config=model.config)
    return cache, asked(model, cache, context + question, tokens)


def ways(model, policy, context):
    """Name -> a function that prepares what all questions share and returns (question, tokens) -> (cache, answer)."""
    everything = kvevict.Policy(score="streaming", budget=2**31 - 1, decode=False)

    def from_one(copied):
        def prepare():
            with kvevict.evicting(model, policy), torch.no_grad():
                cache = model(torch.tensor([context]), logits_to_keep=1).past_key_values

            def ask(question, tokens):
                mine = copied(cache)
                with kvevict.evicting(model, everything):
                    return mine, asked(model, mine, question, tokens)

            return ask

        return prepare

    def patched(question, tokens):
        with kvevict.evicting(model, policy):
            return again(model, context, question, tokens)

    return {
        "unpatched, read ten times": lambda: lambda question, tokens: again(model, context, question, tokens),
        "patched, read ten times": lambda: patched,
        "read once, deepcopy": from_one(copy.deepcopy),
        "read once, fork": from_one(lambda cache: cache.fork()),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto", help="of the model; default: as it is stored")
    parser.add_argument("--file", help="text to read; default: made-up sentences")
    parser.add_argument("--tokens", type=int, default=6000, help="of the context; default 6000")
    parser.add_argument("--new-tokens", type=int, default=16, help="of an answer; default 16")
    add_policy(parser)
    add_budget(parser)
    args = parser.parse_args()
    policy = build_policies([args.policy], args)[args.policy]
    model, tokenizer = load_model(args.model, args.dtype, "cpu")
    sentences = Haystack().sentences(random.Random(0))
    text = read_text(args.file) if args.file else " ".join(next(sentences) for _ in range(args.tokens))
    head, *_ = frame(tokenizer, "")
    context = (head + ids_of(tokenizer, text))[: args.tokens]
    questions = [frame(tokenizer, f"\n\n{question}")[1] for question in QUESTIONS]
    asked(model, DynamicCache(config=model.config), context[:64], 2)  # warm up
    rows, results, answers = [("", "read, s", "ask, s", "a question, s", "MiB")], {}, {}
    for name, prepare in ways(model, policy, context).items():
        start = time.perf_counter()
        ask = prepare()
        read = time.perf_counter()
        runs = [ask(question, args.new_tokens) for question in questions]
        end = time.perf_counter()
        answers[name] = [answer for _, answer in runs]
        size = bytes_of([cache for cache, _ in runs])
        results[name] = dict(read_seconds=read - start, ask_seconds=end - read, bytes=size)
        shown = read - start, end - read, (end - start) / len(runs), size / 2**20
        rows.append((name, *(f"{number:.2f}" for number in shown)))
        del runs, ask
    alike = sum(map(list.__eq__, answers["read once, fork"], answers["read once, deepcopy"]))
    if alike < len(questions) and model.dtype == torch.float32:
        raise SystemExit(f"only {alike} of {len(questions)} answers of forks are those of copies")
    print(f"{len(context)} tokens, {len(questions)} questions, {args.new_tokens} tokens each\n{grid(rows)}")
    print(f"{alike} of {len(questions)} answers of forks are those of copies, token by token")
    facts = dict(
        tokens=len(context), policy=args.policy, budget=args.budget, alike=alike, threads=torch.get_num_threads()
    )
    print(json.dumps({"bench": "questions", **facts, "results": results}))


if __name__ == "__main__":
    main()
