"""A smaller model that drafts for the bundled one (SpecKV): its first layers, taught the bundled model's next tokens.

    python tests/benchmarks/train_draft.py OUT [--layers 2] [--steps 600]

Prompts are those of examples/train_lookahead.py, whose names no task asks for; the divergence from the bundled model's
distributions counts where it answers, and a tenth as much elsewhere. OUT is a folder for `--draft` and `draft_model=`.
"""

import argparse
import copy
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import kvevict
from kvevict.analysis.run import load_model

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_lookahead import pairs


def first_layers(model, count):
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = count
    small = type(model)(config)
    small.load_state_dict({k: v for k, v in model.state_dict().items() if k in small.state_dict()})
    return small


def next_tokens(model, ids, chosen):
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
    return model.lm_head(hidden[chosen]).float()


def batches(tokenizer, steps, size, longest, others=48):
    """ids [B, T] filled up with zeros; of their flattened positions those whose next token is learned, answers' first;
    the weight of each: all tokens of an answer together count ten times as much as `others` of the prompt; and how many
    are of answers."""
    made, rng = pairs(tokenizer, steps * size, longest, seed=7), random.Random(7)
    for _ in range(steps):
        rows = [next(made) for _ in range(size)]
        length = max(len(row["prompt"]) + len(row["response"]) for row in rows)
        ids, answers, rest, weight = torch.zeros(size, length, dtype=torch.long), [], [], []
        for i, row in enumerate(rows):
            both, start = row["prompt"] + row["response"], i * length + len(row["prompt"]) - 1
            ids[i, : len(both)] = torch.tensor(both)
            answers += range(start, start + len(row["response"]))
            weight += [1 / len(row["response"])] * len(row["response"])
            rest += rng.choices(range(i * length, start), k=others)
        yield ids, torch.tensor(answers + rest), torch.tensor(weight + [0.1 / others] * len(rest)) / size, len(answers)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--longest", type=int, default=512)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, tokenizer = load_model(kvevict.small_llama(), "float32", "cpu")
    small = first_layers(model, args.layers).float().train()
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, args.steps, pct_start=0.05)
    began, seen = time.time(), 0.0
    for step, (ids, chosen, weight, answers) in enumerate(batches(tokenizer, args.steps, args.batch, args.longest), 1):
        with torch.no_grad():
            taught = next_tokens(model, ids, chosen).softmax(-1)
        logits = next_tokens(small, ids, chosen)
        loss = (F.cross_entropy(logits, taught, reduction="none") * weight).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(small.parameters(), 1.0)
        optimizer.step()
        rate.step()
        alike = (logits.argmax(-1) == taught.argmax(-1))[:answers].float().mean()
        seen = 0.95 * seen + 0.05 * float(alike)
        if step % 20 == 0 or step == args.steps:
            took = f"{time.time() - began:.0f} s"
            print(f"{step:5} loss {float(loss):.3f}  answers' first choices alike {seen:.2f}  {took}", flush=True)
    small.eval().to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
