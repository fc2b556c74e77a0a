"""Peak memory and time of reading a prompt:

    python tests/benchmarks/bench_read.py [--lengths 4096 16384 65536] [--runs ...] [--cpu-time]

Every run is a fresh process with a random 4-layer, hidden-512, 8/2-head fp32 Llama. A run is a policy and its options,
e.g. "take:budget=512,chunk_size=1024", or "unpatched". Before it is timed, each policy's logits are checked against the
unpatched model's on a short prompt that fits the budget. With --new-tokens it also times decoding that many. With
--cpu-time a run has one thread, and its processor time is taken: others use the machine. Prints a table and one JSON
line.
"""

import argparse
import json
import resource
import subprocess
import sys
import threading
import time

import torch

RUNS = ["unpatched", *(f"{p}:budget=512,chunk_size=1024" for p in ("take", "snapkv", "h2o"))]


def arguments(doc, *places, **options):
    """The values of a command line: of `places` in order, and of an option by each name, with its default and the
    default's type. ...: the option is required; None: a text; a list: one value or more; False: a flag."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in places:
        parser.add_argument(name)
    for name, default in options.items():
        kind = type(default[0] if isinstance(default, list) else default)
        more: dict = dict(type=kind if kind in (int, float, str) else str, default=default, required=default is ...)
        if default is False:
            more = dict(action="store_true")
        elif isinstance(default, list):
            more["nargs"] = "+"
        parser.add_argument("--" + name.replace("_", "-"), **more)
    return parser.parse_args()


def build(length):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=max(length + 1024, 8192),
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def parse(run):
    name, _, options = run.partition(":")
    pairs = (pair.split("=") for pair in options.split(",") if pair)
    words = {"true": True, "false": False}
    return name, {key: int(value) if value.lstrip("-").isdigit() else words.get(value, value) for key, value in pairs}


def resident(field="VmRSS:", process="self"):
    """MiB of a process's memory."""
    with open(f"/proc/{process}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def measured(read, clock):
    """What a call returns, its seconds by `clock`, and the growth of the process's peak memory in it, in MiB: all
    of it, and that without mapped files, looked at every 5 ms."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is that from here on
    before, own, done = resident(), [resident("RssAnon:")], threading.Event()

    def look():
        while not done.wait(0.005):
            own.append(resident("RssAnon:"))

    looks = threading.Thread(target=look)
    looks.start()
    start = clock()
    result = read()
    seconds = clock() - start
    done.set()
    looks.join()
    return result, seconds, resident("VmHWM:") - before, max(own) - own[0]


def measure(run, length, new, clock=time.perf_counter):
    """One fresh process: read `length` tokens and decode `new` more. Memory is the growth of the peak in MiB."""
    import kvevict

    name, options = parse(run)
    model = build(length)
    ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(1))
    if name != "unpatched":
        with torch.no_grad():
            want = model(ids[:, :300]).logits
            kvevict.patch(model, name, **options)
            got = model(ids[:, :300]).logits
        error = float((got - want).abs().max() / want.abs().max())
        assert error < 1e-4, f"{run}: logits differ by {error}"
    generate = dict(do_sample=False, attention_mask=torch.ones_like(ids))
    model.generate(ids[:, :64], attention_mask=generate["attention_mask"][:, :64], max_new_tokens=2)  # warm up
    _, read, growth, own = measured(lambda: model.generate(ids, max_new_tokens=1, **generate), clock)
    result = dict(run=run, tokens=length, read_seconds=read, growth_mib=growth, growth_without_files_mib=own)
    if name != "unpatched":
        report = kvevict.report(model)
        result |= dict(
            kept=report["kept"][0][0], cache_bytes=report["cache_bytes"], peak_cache_bytes=report["peak_cache_bytes"],
            overhead_bytes=report["overhead_bytes"], archive_bytes=report["archive_bytes"], seconds=report["seconds"],
        )  # fmt: skip
        slots = sum(n for layer in report["kept"] for row in layer for n in row)
        assert report["cache_bytes"] == 2 * 4 * 64 * slots
    if new:
        start = clock()
        model.generate(ids, max_new_tokens=1 + new, **generate)
        result["decode_seconds"] = clock() - start - read
    return result | dict(peak_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main():
    args = arguments(__doc__, lengths=[4096, 16384, 65536], runs=RUNS, new_tokens=0, cpu_time=False, one=None)
    if args.cpu_time:
        torch.set_num_threads(1)
    if args.one:  # RUN
        clock = time.thread_time if args.cpu_time else time.perf_counter
        print(json.dumps(measure(args.one, args.lengths[0], args.new_tokens, clock)))
        return
    results = []
    head = [("read s", 8), ("of unpatched", 12), ("growth MiB", 11), ("no files", 9), ("KV MiB", 8)]
    head += [("peak KV", 8), ("archive", 8)]
    print(f"{'tokens':>8} {'run':40}", *(f"{name:>{width}}" for name, width in head))
    for length in args.lengths:
        for run in args.runs:
            words = ["--one", run, "--lengths", str(length), "--new-tokens", str(args.new_tokens)]
            words += ["--cpu-time"] * args.cpu_time
            done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{run} at {length} failed:\n{done.stderr}")
            r = json.loads(done.stdout.splitlines()[-1])
            results.append(r)
            base = next((x for x in results if x["run"] == "unpatched" and x["tokens"] == length), None)
            ratio = f"{r['read_seconds'] / base['read_seconds']:12.3f}" if base else f"{'':12}"
            sizes = "cache_bytes", "peak_cache_bytes", "archive_bytes"
            kv = [f"{r[k] / 2**20:8.2f}" if k in r else f"{'':8}" for k in sizes]
            grown = f"{r['growth_mib']:11.1f} {r['growth_without_files_mib']:9.1f}"
            print(f"{length:8} {run:40} {r['read_seconds']:8.2f} {ratio} {grown}", *kv, flush=True)
    print(json.dumps({"bench": "read", "threads": torch.get_num_threads(), "results": results}))


if __name__ == "__main__":
    main()
