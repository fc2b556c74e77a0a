"""What every preset keeps and writes, to compare two versions of the package:

    python tests/benchmarks/record_kept.py FILE            writes it, of the presets that this version has
    python tests/benchmarks/record_kept.py FILE --compare OTHER

Tiny random models and the bundled one, three rows with left padding, whole and in chunks, two budgets, with and without
evicting while decoding. The numbers are of one machine: two versions are compared on the same.
"""

import argparse
import collections
import itertools
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))
import tiny

import kvevict

MODELS = {"llama": {}, "gemma2": {}, "qwen3": dict(num_hidden_layers=5)}
PADDING, LENGTH, NEW = (0, 5, 77), 310, 20
RESPONSE = (5, 6, 7, 8, 9)


def models():
    for family, changes in MODELS.items():
        yield family, tiny.model(family, **changes), tiny.prompt(3, LENGTH, seed=2, pad=PADDING)
    bundled = AutoModelForCausalLM.from_pretrained(kvevict.small_llama(), dtype=torch.float32).eval()
    bundled.generation_config.eos_token_id = None
    inputs = tiny.prompt(3, LENGTH, seed=3, pad=PADDING)
    yield "bundled", bundled, inputs | dict(input_ids=inputs["input_ids"] * 19)


def options_of(name, draft_model):
    given = dict(draft_model=draft_model) if name.startswith("speckv") else {}
    return given | (dict(response=RESPONSE) if name == "oracle" else {})


def slots(cache):
    """[layer][row][head] positions."""
    return [layer.places(shared=False) if hasattr(layer, "places") else None for layer in cache.layers]


def record() -> dict:
    draft_model, result = tiny.model("llama", seed=5, num_hidden_layers=2), {}
    for family, model, inputs in models():
        for name, budget, chunk, decode in itertools.product(kvevict.policies(), (80, 131), (None, 100), (None, True)):
            kvevict.history().reset()
            try:
                given = options_of(name, draft_model) | (dict(decode=True) if decode else {})
                kvevict.patch(model, name, budget=budget, chunk_size=chunk, **given)
                out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
                read = kvevict.report(model, positions=True)["positions"]
                kept = dict(read=read, decoded=slots(out.past_key_values), tokens=out.sequences[:, LENGTH:].tolist())
            except ValueError as error:
                kept = str(error)
            kvevict.unpatch(model)
            result[f"{family}/{name}/{budget}/{chunk}/{decode}"] = kept
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("--compare", metavar="OTHER")
    args = parser.parse_args()
    if args.compare:
        ours, theirs = (json.loads(Path(name).read_text()) for name in (args.file, args.compare))
        both = ours.keys() & theirs.keys()
        moved = collections.Counter(key.split("/", 1)[1].rsplit("/", 3)[0] for key in both if ours[key] != theirs[key])
        print(f"{len(both)} in both, {sum(moved.values())} differ: {dict(moved)}")
        return
    torch.set_num_threads(1)
    Path(args.file).write_text(json.dumps(record()))


if __name__ == "__main__":
    main()
