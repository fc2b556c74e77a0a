"""Train a draft model for `speckv` out of the bundled model: some of its layers, taught to say what all of them say.

    python tests/benchmarks/train_draft.py --layers 0 3 --minutes 15 --out draft
    kvevict eval --out draft.jsonl --tasks facts keyvalue --policies laq snapkv oracle speckv:draft_model=draft ...

Sequences are those of examples/small_llama: made-up facts, with names that no task asks for. Prints how often the draft
model's likeliest token is the bundled model's, on answers to facts that it was not trained on.
"""

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvevict

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "small_llama"))
import data


class Sequences:
    """Batches (ids [B, length + 1], where an answer's tokens are [B, length + 1])."""

    def __init__(self, tokenizer, seed):
        self.rng = random.Random(seed)
        self.facts = data.Facts(tokenizer, self.rng, 8000)
        self.text = data.encode(tokenizer, [data.made_up(20_000)])

    def batch(self, rows, length):
        made = [self.row(length) for _ in range(rows)]
        return [torch.tensor(part) for part in zip(*made)]

    def row(self, length):
        if self.rng.random() < 0.4:
            return data.lines_sequence(self.facts, length, bare=0.2)
        return data.text_sequence(self.facts, self.text, length, questions=12, several=0.2)


def smaller(model, layers):
    """A copy of the model with these layers of it alone."""
    config = type(model.config).from_dict(model.config.to_dict() | dict(num_hidden_layers=len(layers)))
    draft = type(model)(config)
    draft.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    draft.model.norm.load_state_dict(model.model.norm.state_dict())
    for mine, its in zip(draft.model.layers, layers):
        mine.load_state_dict(model.model.layers[its].state_dict())
    return draft


def loss_of(model, draft, ids, answers):
    """KL from the model's next-token distribution to the draft's; an answer's tokens weigh ten times as much."""
    with torch.no_grad():
        told = model(ids[:, :-1]).logits.log_softmax(-1)
    said = draft(ids[:, :-1]).logits.log_softmax(-1)
    divergence = (told.exp() * (told - said)).sum(-1)
    weight = 1 + 9 * answers[:, 1:]
    return (divergence * weight).sum() / weight.sum()


@torch.no_grad()
def agreement(model, draft, sequences, length, rows=24):
    """(tokens of answers that are both models' first choice, tokens of answers)"""
    same = count = 0
    for _ in range(rows):
        ids, answers = sequences.batch(1, length)
        where = answers[:, 1:].bool()
        equal = model(ids[:, :-1]).logits.argmax(-1) == draft(ids[:, :-1]).logits.argmax(-1)
        same, count = same + int(equal[where].sum()), count + int(where.sum())
    return same, count


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[0, 3], help="of the bundled model")
    parser.add_argument("--minutes", type=float, default=15, help="of this process's CPU time")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--out", default="draft")
    args = parser.parse_args()
    torch.manual_seed(0)
    folder = kvevict.small_llama()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draft = smaller(model, args.layers)
    sequences = Sequences(tokenizer.backend_tokenizer, seed=1)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.01)
    start, steps = time.process_time(), 0
    while (share := (time.process_time() - start) / (60 * args.minutes)) < 1:
        rows, length = ((8, 128), (4, 256), (2, 512), (1, 1024))[min(3, int(share * 5))]
        optimizer.param_groups[0]["lr"] = args.rate * min(1, (steps + 1) / 50) * (1 - 0.95 * share)
        loss = loss_of(model, draft, *sequences.batch(rows, length))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps % 50 == 0:
            print(f"{100 * share:.0f} %, step {steps}, {length} tokens: loss {loss:.3f}", flush=True)
    draft.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    draft.float()
    fresh = Sequences(tokenizer.backend_tokenizer, seed=2)
    for length in (256, 1024):
        same, count = agreement(model, draft, fresh, length)
        print(f"{length} tokens: {same} of {count} answer tokens are the model's first choice ({same / count:.1%})")
    size = sum(p.numel() for p in draft.parameters())
    print(f"{args.out}: {steps} steps, {size:,} parameters of {sum(p.numel() for p in model.parameters()):,}")


if __name__ == "__main__":
    main()
