"""The slots that every policy keeps, and the tokens, on fixed models and prompts, to compare two versions:

    python tests/benchmarks/fingerprints.py --out a.json [--ranks 2] [--only "llama/take*" --slots]
    python tests/benchmarks/fingerprints.py --compare a.json b.json       prints what differs and exits 1, or 0

A case is model/policy/way. It holds a hash per layer of the kept positions, after the read and at the end, and one of
the tokens; or the name of an error. The ways: a padded batch, read in one pass and in chunks, at two budgets; a prompt
whose answer is decoded with eviction; one that two forks of its cache and the cache itself continue; a text with
questions. `--slots` writes positions and tokens in place of hashes, and the errors' texts to stderr. Only public names
of kvevict are used. Hashes are of one machine and one version of torch: run both versions on the same, with
OMP_NUM_THREADS=1.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from torch import distributed

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
import tiny
import zoo

import kvevict

LENGTH, PADDING = 310, (0, 5, 77)
WAYS = {  # name -> options, rows of the batch, new tokens
    "whole": (dict(budget=90), 3, 6),
    "chunks": (dict(budget=131, chunk_size=100), 3, 6),
    "decode": (dict(budget=90, chunk_size=200, decode=True), 1, 44),
    "short": (dict(budget=90, decode=True), 1, 20),
    "forks": (dict(budget=0.4, chunk_size=100), 1, 6),
    "answers": (dict(budget=90, chunk_size=100), 1, 6),
}
GIVEN = dict(rows="given", ids=(7, 11, 13))
PROBE = dict(rows="probe", probe=16)
OTHERS = {  # rarer choices, beside the presets: name -> preset, options
    "caote each": ("snapkv", dict(refine="caote", weights="each")),
    "caote each of edie": ("take+edie", dict(refine="caote", weights="each")),
    "caote each unprotected": ("snapkv", dict(refine="caote", weights="each", protect=False)),
    "caote squared unprotected": ("snapkv+caote", dict(squared=True, protect=False)),
    "take+caote unprotected": ("take+caote", dict(protect=False)),
    "h2o+fastcaote unprotected": ("h2o+fastcaote", dict(protect=False)),
    "h2o recent 0": ("h2o", dict(recent=0)),
    "h2o flat": ("h2o", dict(heads="flat")),
    "h2o pyramid": ("h2o", dict(layers="pyramid")),
    "h2o of a window": ("h2o", dict(rows="window")),
    "h2o of given rows": ("h2o", GIVEN),
    "tova per head": ("tova", dict(per_head=True, heads="ada")),
    "tova of a window": ("tova", dict(rows="window")),
    "tova reuse": ("tova", dict(n_reuse=2)),
    "adakv reuse": ("adakv", dict(n_reuse=2)),
    "adakv max": ("adakv", dict(floor="max", interval=3)),
    "vatp ada": ("vatp", dict(heads="ada")),
    "select by layer": ("snapkv", dict(select_by_layer=((1, 2, "chunk"),), heads="equal")),
    "select by layer flat": (
        "snapkv", dict(select_by_layer=((0, 1, kvevict.SELECTIONS["chunk"](5, True)),), heads="flat")),
    "runs not exact": ("chunkkv/edie", dict(exact=False, c=7)),
    "runs of take": ("take", dict(select="chunk", c=7)),
    "tsp": ("fastkv", dict(tsp_len=120)),
    "tsp of take+edie": ("take+edie", dict(tsp=1, tsp_len=120)),
    "tsp of random": ("random", dict(tsp=2, tsp_len=100)),
    "streaming rerotated": ("streaming", dict(rerotate=True)),
    "snapkv rerotated": ("snapkv", dict(rerotate=True)),
    "take rerotated": ("take", dict(rerotate=True)),
    "snapkv keeps first": ("snapkv", dict(keep_first=7)),
    "h2o keeps first": ("h2o", dict(keep_first=7)),
    "snapkv waits": ("snapkv", dict(warmup_layers=2, warmup_budget=150)),
    "take+edie waits": ("take+edie", dict(warmup_layers=3)),
    "snapkv tada": ("snapkv", dict(layers="tada", cd="layer", own=True)),
    "h2o tada": ("h2o", dict(layers="tada", cd="off")),
    "cake ada": ("cake", dict(heads="ada", tau1=0.7, tau2=1.3)),
    "take+edie cake": ("take+edie", dict(layers="cake")),
    "pyramid flat": ("pyramidkv", dict(heads="flat", beta=4)),
    "probe at its place": ("take", dict(place="true")),
    "probe is a span": ("take", dict(probe=(-60, -40), ema_space="literal")),
    "edie none": ("edie", dict(weight="none", alpha=0.0)),
    "edie all": ("edie", dict(weight="all")),
    "edie earlier": ("edie", dict(weight="i<=t-2w", **PROBE)),
    "edie later": ("edie", dict(weight="i>w", **GIVEN)),
    "edie of the last row": ("edie", dict(rows="last")),
    "edie-exact of a probe": ("edie-exact", PROBE),
    "cake of a probe": ("cake", PROBE),
    "snapkv max": ("snapkv", dict(reduce="max", group="max")),
    "laq of both parts": ("laq", dict(reduce="max", group="sum", n_d=4)),
    "laq without a window": ("laq", dict(window=0, n_d=5, reduce="mean")),
    "laq edie": ("laq", dict(score="edie", rows=kvevict.ROWS["drafted"](4, 8, True))),
    "lookahead and a probe": ("lookahead", dict(probe=8)),
    "snapkv, schedule prompt": ("snapkv", dict(schedule="prompt")),
    "take, schedule prompt": ("take", dict(schedule="prompt")),
    "adakv diagnosed": ("adakv", dict(diagnose=True)),
    "beams": ("tova", dict(num_beams=2)),
    "beams of adakv": ("adakv", dict(num_beams=3)),
    "candidates": ("snapkv", dict(prompt_lookup_num_tokens=4, decode=False)),
    "holes": ("take", dict(holes=True)),
    "holes of h2o": ("h2o", dict(holes=True)),
    "saved": ("adakv", dict(saved=True)),
    "saved h2o": ("h2o", dict(saved=True)),
}  # fmt: skip
RANKED = ["take", "adakv", "edie+tada", "cake", "chunkkv", "tova", "h2o", "caote each"]  # with --ranks


def models(ranks) -> dict:
    """Name -> a function that makes the model, its ways, and those of the rarer choices."""
    all_ways, some = ("whole", "chunks", "decode", "forks"), ("chunks", "short", "forks")

    def bundled():
        return transformers.AutoModelForCausalLM.from_pretrained(kvevict.small_llama(), dtype=torch.float32)

    if ranks:
        return {"split": (split_model, some, some)}
    return {
        "llama": (tiny.model, all_ways, all_ways),
        "gemma3": (lambda: tiny.model("gemma3"), all_ways, ("chunks", "forks")),
        "gpt_oss": (lambda: tiny.model("gpt_oss"), some, ()),
        "deepseek_v3": (lambda: zoo.make("deepseek_v3", "DeepseekV3ForCausalLM"), some, ()),
        "qwen3_next": (lambda: zoo.make("qwen3_next", "Qwen3NextForCausalLM"), some, ()),
        "bundled": (bundled, ("chunks", "answers"), ()),
    }


def split_model():
    """A Llama over the ranks of this run, loaded as Transformers splits it."""
    torch.manual_seed(0)
    whole = tiny.model("llama", num_attention_heads=8, num_key_value_heads=4, head_dim=16)
    with tempfile.TemporaryDirectory() as folder:
        whole.save_pretrained(folder)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)


def of_model(model, preset):
    """The models and ids that a preset needs."""
    vocabulary = model.config.get_text_config().vocab_size
    if preset.startswith("speckv"):
        return dict(draft_model=tiny.model(seed=5, num_hidden_layers=2, vocab_size=vocabulary))
    if preset.startswith("lookahead"):
        adapter, generator = kvevict.lookahead.Adapter(model, tokens=6, rank=2), torch.Generator().manual_seed(4)
        with torch.no_grad():
            for weight in adapter.parameters():
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
        return dict(adapter=adapter)
    return dict(ids=(5, 6, 7, 8, 9)) if preset == "oracle" else {}


def slots(model, gather):
    """[layer][row][head] positions of the last read, the heads of all ranks."""
    ranks = gather(kvevict.report(model, positions=True)["positions"])
    layers = [layer[0] and list(zip(*layer, strict=True)) for layer in zip(*ranks, strict=True)]
    return [layer and [[head for part in row for head in part] for row in layer] for layer in layers]


def extended(cache, mask, tokens):
    """The mask of what a cache has seen, and of `tokens` more."""
    return torch.cat([mask, mask.new_ones(len(mask), cache.get_seq_length() + tokens - mask.shape[1])], 1)


def end(model, cache, mask, rerotate, gather):
    """The slots of a cache, from the report of a policy that evicts nothing and reads two more tokens."""
    kvevict.patch(model, kvevict.Policy("streaming", budget=10**6, decode=False, rerotate=rerotate))
    more = extended(cache, mask, 2)
    model(torch.full((len(mask), 2), 9), attention_mask=more, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return slots(model, gather)


def forks(model, cache, mask, new) -> list:
    """[(cache, tokens)] of two forks of a cache, then of the cache itself, each after a question of its own."""
    made = []
    for seed, each in enumerate([cache.fork(), cache.fork(), cache]):
        ids = tiny.prompt(1, 9, seed=seed)["input_ids"]
        try:
            out = model.generate(
                ids, attention_mask=extended(each, mask, 9), past_key_values=each, max_new_tokens=new,
                do_sample=False,
            )  # fmt: skip
            made.append((each, out.tolist()))
        except Exception as error:  # some policies do not read a second turn
            made.append((None, type(error).__name__))
    return made


@torch.no_grad()
def run(model, preset, options, way, rows, new, gather) -> dict:
    """The slots at the read's end and at last, and the tokens, of one case."""
    options = dict(options)
    own = {name: options.pop(name) for name in ("num_beams", "prompt_lookup_num_tokens") if name in options}
    holes, saved = options.pop("holes", False), options.pop("saved", False)
    kvevict.history().reset()
    if way == "answers":
        return answers(model, preset, options, new, gather)
    inputs = tiny.prompt(rows, LENGTH, seed=2, pad=PADDING)
    inputs["input_ids"] *= model.config.get_text_config().vocab_size // 97
    mask, rerotate = inputs["attention_mask"], options.get("rerotate", False)
    if holes:
        mask[:, 150:155] = 0
    kvevict.patch(model, preset, **options)
    if "tada" in preset or options.get("layers") == "tada":
        model(**inputs, logits_to_keep=1)  # an earlier context of the task
    if way != "forks":
        out = model.generate(**inputs, max_new_tokens=new, do_sample=False, return_dict_in_generate=True, **own)
        read, caches = slots(model, gather), [out.past_key_values]
        tokens, mask = out.sequences[:, LENGTH:].tolist(), mask.repeat_interleave(own.get("num_beams", 1), 0)
    else:
        cache = model(**inputs, logits_to_keep=1, use_cache=True).past_key_values
        read = slots(model, gather)
        if saved:
            with tempfile.TemporaryDirectory() as folder:
                kvevict.save_cache(cache, Path(folder) / "cache")
                cache = kvevict.load_cache(Path(folder) / "cache", model)
        caches, tokens = zip(*forks(model, cache, mask, new), strict=True)
    ends = [each and end(model, each, mask, rerotate, gather) for each in caches]
    return dict(read=read, tokens=tokens, end=ends)


def answers(model, preset, options, new, gather) -> dict:
    """Of a text that is read once."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(kvevict.small_llama())
    text = " ".join(f"The number of house {i} is {7 * i + 13}." for i in range(30))
    cache, asked = kvevict.read(model, tokenizer, text, preset, **options), ["The number of house 5 is", "House 21 is"]
    tokens = kvevict.answer(model, tokenizer, cache, asked, max_new_tokens=new)
    read = end(model, cache, torch.ones(1, 0, dtype=torch.long), False, gather)
    return dict(read=read, tokens=tokens, end=[])


def digest(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def hashed(found: dict) -> dict:
    """A hash per layer of the slots, and one of the tokens."""
    ends = [each and list(map(digest, each)) for each in found["end"]]
    return dict(read=list(map(digest, found["read"])), end=ends, tokens=digest(found["tokens"]))


def record(args, gather) -> dict:
    result, presets = {}, {name: (name, {}) for name in kvevict.policies()}
    for family, (make, all_ways, rare_ways) in models(args.ranks).items():
        wanted = [(n, *chosen, way) for n, chosen in presets.items() for way in all_ways]
        wanted += [(n, *chosen, way) for n, chosen in OTHERS.items() for way in rare_ways]
        wanted = [each for each in wanted if fnmatch.fnmatch(f"{family}/{each[0]}/{each[-1]}", args.only)]
        wanted = [each for each in wanted if not args.ranks or each[0] in RANKED]
        model, given = make().eval() if wanted else None, {}
        for name, preset, options, way in wanted:
            model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
            general, rows, new = WAYS[way]
            try:
                if preset not in given:
                    given[preset] = of_model(model, preset)
                found = run(model, preset, general | given[preset] | options, way, rows, new, gather)
                found = found if args.slots else hashed(found)
            except Exception as error:  # a refusal, or what both versions do wrong
                found = dict(error=type(error).__name__)
                if args.slots:
                    print(f"{family}/{name}/{way}: {error!r}", file=sys.stderr)
            result[f"{family}/{name}/{way}"] = found
            kvevict.unpatch(model)
    return result


def compare(ours: dict, theirs: dict) -> int:
    """Print what differs; how many cases do."""
    differ = [case for case in sorted(ours.keys() | theirs.keys()) if ours.get(case) != theirs.get(case)]
    for case in differ:
        a, b = ours.get(case), theirs.get(case)
        if not a or not b:
            print(f"{case}: only in the {'first' if a else 'second'}")
            continue
        what = []
        for part in sorted(a.keys() | b.keys()):
            x, y = a.get(part), b.get(part)
            if x != y and isinstance(x, list) and isinstance(y, list) and part != "tokens":
                part += f" {[i for i, pair in enumerate(zip(x, y)) if pair[0] != pair[1]]}"
            what += [part] if x != y else []
        print(f"{case}: {', '.join(what)}")
    policies = Counter(case.split("/", 1)[1].rsplit("/", 1)[0] for case in differ)
    print(f"{len(ours)} and {len(theirs)} cases, {len(differ)} differ: {dict(policies)}")
    return len(differ)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FILE", help="write the fingerprints of the kvevict that is imported")
    parser.add_argument("--compare", nargs=2, metavar="FILE")
    parser.add_argument("--ranks", type=int, default=0, help="some policies, on a model split over so many processes")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cases whose name matches")
    parser.add_argument("--slots", action="store_true", help="positions and tokens in place of hashes")
    args = parser.parse_args()
    if args.compare:
        both = [json.loads(Path(name).read_text()) for name in args.compare]
        both = [{case: found[case] for case in fnmatch.filter(found, args.only)} for found in both]
        sys.exit(compare(*both) > 0)
    if args.ranks and "RANK" not in os.environ:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
        sys.exit(subprocess.run([*run, *sys.argv], env=os.environ | dict(OMP_NUM_THREADS="1")).returncode)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)

    def gather(mine):
        parts = [None] * max(1, args.ranks)
        if not args.ranks:
            return [mine]
        distributed.all_gather_object(parts, mine)
        return parts

    result = record(args, gather)
    if not args.ranks or distributed.get_rank() == 0:
        Path(args.out).write_text(json.dumps(result, indent=0))
        refused = sum("error" in found for found in result.values())
        print(f"{len(result)} cases, {refused} with an error, of {Path(kvevict.__file__).parent}")
    if args.ranks:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
