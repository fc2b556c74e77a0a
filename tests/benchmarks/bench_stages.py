"""The time of a read and of a decoded token by stages:

    python tests/benchmarks/bench_stages.py [--model DIR] [--dtype bfloat16] [--tokens 8192] [--runs unpatched take]

A prompt of random tokens, read once after a short one to warm up; then tokens are decoded, the unpatched model's after
a prompt of as many tokens as the policies keep slots. Seconds of torch's linear layers, of attention, of kvevict's work
after it (scoring, choosing, moving slots), and of all other operators, the largest of them by name. All of it is under
torch's profiler, which costs a few percent. Without --model: the random model of bench_read.py.
"""

import json
from functools import partial

import torch
from bench_read import arguments, build, parse
from transformers import DynamicCache

import kvevict
from kvevict.models.loading import load_model

OPERATORS = {
    "linear": ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise", "aten::mkldnn_linear"),
    "attention": ("kvevict::attend", "kvevict::decode", "aten::_scaled_dot_product_flash_attention_for_cpu"),
}


def clocks(model) -> dict:
    try:
        return kvevict.report(model)["seconds"]
    except ValueError:  # not patched, or nothing was read yet
        return {}


@torch.no_grad()
def stages(model, run, times=1, began=()) -> tuple:
    """({stage: seconds of one run}, the largest other operators) of `times` runs. began: the clocks before; a read's
    clocks start at 0."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profiler as profile, torch.profiler.record_function("all"):
        for _ in range(times):
            run()
    spent = {name: seconds - dict(began).get(name, 0) for name, seconds in clocks(model).items()}
    events = {event.key: event for event in profile.key_averages()}
    total = events.pop("all").cpu_time_total / 1e6
    own = {name: event.self_cpu_time_total / 1e6 for name, event in events.items()}
    found = {stage: sum(own.pop(name, 0) for name in names) for stage, names in OPERATORS.items()}
    choosing, moving = spent.get("select", 0), spent.get("compact", 0)
    found |= dict(scoring=spent.get("evict", 0) - choosing - moving, choosing=choosing, moving=moving)
    found = dict(total=total, **found, other=total - sum(found.values()))
    largest = sorted((x for x in own.items() if not x[0].startswith("kvevict")), key=lambda x: -x[1])[:5]
    return tuple({name: seconds / times for name, seconds in pairs} for pairs in (found.items(), largest))


def measure(model, ids, run, new):
    """(of the read, of a decoded token)"""
    name, options = parse(run)
    options = dict(budget=512, chunk_size=1024) | options
    if name != "unpatched":
        kvevict.patch(model, name, **options)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :256], use_cache=True, logits_to_keep=1)
    read = stages(model, partial(model, ids, past_key_values=cache, logits_to_keep=1))
    if name == "unpatched":
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, : options["budget"]], past_key_values=cache, logits_to_keep=1)
    step = partial(model, ids[:, :1], past_key_values=cache)
    with torch.no_grad():
        step()
    decoded = stages(model, step, new, clocks(model))
    kvevict.unpatch(model)
    return read, decoded


def main():
    runs = ["unpatched", "take", "snapkv"]
    args = arguments(__doc__, model=None, dtype="float32", tokens=[8192], runs=runs, new_tokens=32)
    model = load_model(args.model, args.dtype, "cpu")[0] if args.model else build(max(args.tokens))
    results = []
    for tokens in args.tokens:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(model.config.vocab_size, (1, tokens), generator=generator)
        for run in args.runs:
            both = zip(("read, s", "token, ms"), (1, 1e3), measure(model, ids, run, args.new_tokens))
            for what, scale, (found, largest) in both:
                results.append(dict(tokens=tokens, run=run, what=what, **found))
                for names in (found, largest):
                    line = "  ".join(f"{k.removeprefix('aten::')} {scale * v:.2f}" for k, v in names.items())
                    print(f"{tokens:7} {run} {what}: {line}" if names is found else f"{'':20}{line}", flush=True)
    print(json.dumps({"bench": "stages", "threads": torch.get_num_threads(), "results": results}))


if __name__ == "__main__":
    main()
