"""python tests/benchmarks/kept_slots.py > before.tsv: a line per preset and situation with hashes of the kept slots and
of the greedy tokens, on a small random model. A change that must not change a choice is tested by running this at both
commits, on one machine, and comparing the two files."""

import hashlib
import sys
import tempfile
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

import tiny
import untrained

import kvevict
from kvevict.models.adapter import Adapter

LENGTH, NEW, BUDGET = 301, 6, 96
SITUATIONS = {
    "one pass": dict(budget=BUDGET, chunk_size=512), "chunks": dict(budget=BUDGET, chunk_size=64),
    "budget 1/2": dict(budget=0.5, chunk_size=64), "padded batch": dict(budget=BUDGET, chunk_size=64),
    "decoding": dict(budget=BUDGET, chunk_size=64, decode=True, interval=2),
    "forks": dict(budget=BUDGET, chunk_size=64),
}  # fmt: skip


def digest(x) -> str:
    return hashlib.sha256(repr(x).encode()).hexdigest()[:12]


def positions(cache) -> list:
    """[layer][row][kv head] -> positions of the slots."""
    return [[[head.tolist() for head in row] for row in layer.storage.positions()] for layer in cache.layers]


def prompt(rows: int):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 97, (rows, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) >= torch.tensor([0, 40, 133][:rows])[:, None]).long()
    return dict(input_ids=ids * mask, attention_mask=mask)


def given(preset: str, model, folder: str) -> dict:
    """Options that a preset needs here: an adapter, a smaller model and gates have random weights."""
    if preset.startswith("lookahead"):
        torch.manual_seed(1)
        adapter = Adapter(model, tokens=4, rank=2)
        for weight in adapter.parameters():
            weight.normal_(std=0.3)
        return dict(adapter=adapter)
    if preset.startswith("speckv"):
        return dict(draft_model=tiny.model(seed=2, num_hidden_layers=2))
    return {"gate": dict(gates=folder), "oracle": dict(ids=(7, 11, 13)), "lagkv": dict(score=tiny.short_parts(16))}.get(
        preset, {}
    )


def run(model, preset: str, situation: str, options: dict):
    """(kept slots, tokens) of a prompt and a few decoded tokens; of forks, of two of them and of their origin."""
    inputs = prompt(3 if situation == "padded batch" else 1)
    kept, told = [], []
    with kvevict.evicting(model, preset, tokenizer=False, **SITUATIONS[situation], **options):
        if situation == "forks":
            cache = model(**inputs, logits_to_keep=1).past_key_values
            for token in (7, 8):
                fork = cache.fork()
                more = torch.tensor([[token] * 5])
                told.append(model(more, past_key_values=fork, logits_to_keep=1).logits.argmax(-1).tolist())
                kept.append(positions(fork))
            kept.append(positions(cache))
        else:
            out = model.generate(
                **inputs, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, pad_token_id=0
            )
            told, kept = out.sequences[:, LENGTH:].tolist(), positions(out.past_key_values)
    return kept, told


@torch.no_grad()
def main():
    model = tiny.model(num_hidden_layers=4)
    with tempfile.TemporaryDirectory() as folder:
        untrained.written(folder, model)
        for preset in kvevict.PRESETS:
            options = given(preset, model, folder)
            for situation in SITUATIONS:
                try:
                    found = "\t".join(map(digest, run(model, preset, situation, options)))
                except ValueError as refused:
                    found = f"refused\t{str(refused)[:90]}"
                print(preset, situation, found, sep="\t", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
