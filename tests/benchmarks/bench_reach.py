"""Processor time of a decoded token that attends to all slots of a text, beside one that attends to 512 chosen ones:

    python tests/benchmarks/bench_reach.py DIR_OF_MODEL [--slots 512 8192 32768] [--dtype bfloat16] [--compiled]

The model reads 512 random tokens, and its slots are repeated up to each of the numbers: time does not depend on what a
slot holds. One thread; the sizes take --rounds turns of --tokens tokens. Prints milliseconds of processor time a token
(median of the turns), their ratio to the first number's, and the bytes of slots and of weights that a token reads, by
which `kvevict.policy.reach` decides.
"""

import statistics
import time

import torch
from bench_read import arguments
from transformers import AutoModelForCausalLM

import kvevict
from kvevict.engine.hook.installed import plan_of, using
from kvevict.models.compat import CACHE, cache_of
from kvevict.models.families import find_decoder
from kvevict.policy.reach import sizes_of

READ = 512  # tokens that the model reads
FIRST = 20  # tokens before the first turn: a recording takes some


def repeated(cache, times):
    """A fork of a cache in which each layer has its slots `times` times."""
    cache = cache.fork()
    for layer in cache.layers:
        one = whole = layer.storage.gathered()
        whole = whole.moved(whole.grown(times * one.counts))
        for _ in range(times - 1):
            whole = whole.followed_by(one)
        layer.storage = whole
    return cache


@torch.no_grad()
def main():
    args = arguments(__doc__, "model", slots=[512, 8192, 32768], dtype="bfloat16", rounds=9, tokens=6, compiled=False)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    decoder = find_decoder(model)
    ids = torch.randint(1000, (1, READ), generator=torch.Generator().manual_seed(0))
    sizes = sizes_of(decoder, "model")
    print(f"weights {sizes.weights / 2**20:.0f} MiB, slots of a token {sizes.slot} bytes")
    kvevict.patch(model, "take+edie", budget=2**20, compiled=args.compiled, tokenizer=False)
    text, plan = cache_of(model(ids, use_cache=True, logits_to_keep=1)), plan_of(decoder)
    runs = {slots: (repeated(text, slots // READ), []) for slots in args.slots}
    with using(model, decoder, plan):
        for cache, _ in runs.values():
            for _ in range(FIRST if args.compiled else 1):
                model(ids[:, :1], **{CACHE: cache})
        for _ in range(args.rounds):
            for cache, times in runs.values():
                start = time.process_time()
                for _ in range(args.tokens):
                    model(ids[:, :1], **{CACHE: cache})
                times.append((time.process_time() - start) / args.tokens * 1e3)
    first = statistics.median(runs[args.slots[0]][1])
    for slots, (cache, times) in runs.items():
        taken, held = statistics.median(times), slots * sizes.slot / 2**20
        assert int(cache.layers[0].counts.max()) >= slots
        told = kvevict.report(cache)["replayed"] if args.compiled else 0
        print(f"{slots:6} slots {taken:8.2f} ms  {taken / first:.2f}  {held:6.0f} MiB, {told} replayed")


if __name__ == "__main__":
    main()
