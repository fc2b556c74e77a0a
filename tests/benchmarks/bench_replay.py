"""Milliseconds of a decoded token without and with compiled=True, medians of turns: of policies that evict while
decoding, and of one that does not. `python tests/benchmarks/bench_replay.py DIR_OF_MODEL snapkv h2o`."""

import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM

import kvevict
from kvevict.engine.hook.installed import plan_of, using
from kvevict.models.families import find_decoder

SLOTS, PROMPT, FIRST, ROUNDS, TOKENS = 512, 600, 24, 5, 8


def main(folder, names):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    decoder = find_decoder(model)
    ids = torch.randint(model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    token, runs = ids[:, :1], {}
    for run in ((name, compiled) for name in names for compiled in (False, True)):
        kvevict.patch(model, run[0], budget=SLOTS, compiled=run[1])
        cache = kvevict.models.compat.cache_of(model(ids, use_cache=True, logits_to_keep=1))
        for _ in range(FIRST):  # a recording takes some
            model(token, past_key_values=cache)
        runs[run] = plan_of(decoder), cache, []
    for _ in range(ROUNDS):
        for plan, cache, times in runs.values():
            with using(model, decoder, plan):
                start = time.perf_counter()
                for _ in range(TOKENS):
                    model(token, past_key_values=cache)
                times.append((time.perf_counter() - start) / TOKENS * 1e3)
    for name in names:
        before, after = (statistics.median(runs[name, compiled][2]) for compiled in (False, True))
        print(f"{name:24} {before:7.2f} {after:7.2f}  {after / before:.2f}")


with torch.no_grad():
    main(sys.argv[1], sys.argv[2:])
