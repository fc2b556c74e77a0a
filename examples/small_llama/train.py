"""Train the bundled model: `python examples/small_llama/train.py --books FOLDER --out FOLDER`."""

import argparse
import json
import math
import random
import time
from pathlib import Path

import data
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONFIG = dict(
    vocab_size=data.VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    rope_parameters=dict(rope_type="default", rope_theta=1e6), bos_token_id=None, eos_token_id=0,
    initializer_range=0.03,
)  # fmt: skip
# steps, length, share of line sequences, share of those without question words, questions in text at most, share of
# text sequences that ask for facts that belong together
PHASES = [
    (300, 128, 0.8, 0.9, 4, 0.0),
    (200, 256, 0.5, 0.5, 6, 0.1),
    (250, 512, 0.4, 0.3, 8, 0.1),
    (200, 1024, 0.4, 0.3, 10, 0.1),
    (140, 2048, 0.4, 0.3, 12, 0.1),
    (200, 512, 0.4, 0.3, 8, 0.4),
    (300, 1024, 0.4, 0.3, 10, 0.3),
    (150, 2048, 0.4, 0.3, 12, 0.3),
]
TOKENS = 8192  # of a step


def look_back(model, heads=((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6))):
    """Start layer 0's heads as (head, distance): attend `distance` tokens back and copy that token's embedding into a
    separate part of the stream. Training finds such heads only slowly, and recalling a fact needs them: the token after
    a name must know the name.

    The last dimension of every embedding is one constant, which keys and queries turn into rotations.
    """
    config = model.config
    d, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    frequency = config.rope_parameters["rope_theta"] ** (-torch.arange(0, d, 2) / d)
    attention, embedding = model.model.layers[0].self_attn, model.model.embed_tokens.weight
    with torch.no_grad():
        embedding[:, -1] = 0.5
        constant = 0.5 / embedding.pow(2).mean(1).sqrt().mean()  # after the norm
        fast = d // 4  # the slow rotations hardly differ between neighbours
        strength = math.sqrt(8 * math.sqrt(d)) / constant
        for head, distance in heads:
            key, query = attention.k_proj.weight[head // group * d :], attention.q_proj.weight[head * d :]
            key[:d], query[:d] = 0, 0
            key[:fast, -1] = strength
            angle = -distance * frequency[:fast]
            query[:fast, -1] = strength * angle.cos()
            query[d // 2 : d // 2 + fast, -1] = strength * angle.sin()
    return model


class Loss(torch.nn.Module):
    """Weighted cross-entropy at chosen positions of the flattened batch."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, chosen, target, weight):
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[chosen]
        loss = F.cross_entropy(self.model.lm_head(hidden).float(), target, reduction="none")
        return (loss * weight).sum(), loss


def batch(facts, text, phase, text_weight):
    """ids [B, T] and the chosen positions: all answer tokens (at most 1024) and 1024 others, lighter."""
    _, length, lines, bare, questions, several = phase
    rng = facts.rng
    rows = []
    for _ in range(TOKENS // length):
        if rng.random() < lines:
            rows.append(data.lines_sequence(facts, length, bare))
        else:
            rows.append(data.text_sequence(facts, rng.choice(text), length, questions, several))
    ids = torch.tensor([row[0] for row in rows])
    mask = torch.tensor([row[1] for row in rows])[:, 1:].flatten()
    answers = mask.nonzero()[:, 0]
    answers = answers[torch.randperm(len(answers))[:1024]]
    others = torch.randint(0, len(mask), (2048 - len(answers),))
    chosen = torch.cat([answers, others])
    weight = torch.full([len(chosen)], 1 / max(1, len(answers)))
    weight[len(answers) :] = text_weight / len(others)
    return ids[:, :-1].contiguous(), chosen, ids[:, 1:].flatten()[chosen], weight, len(answers)


def step_of(loss_of, optimizers, inputs):
    """One update; the mean losses of the answers' tokens and of the others."""
    *inputs, answers = inputs
    with torch.autocast("cpu", torch.bfloat16):
        loss, each = loss_of(*inputs)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(loss_of.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return each[:answers].mean().item(), each[answers:].mean().item()


@torch.no_grad()
def accuracy(model, facts, text, length, count, lines, cases=32):
    """Share of answers that greedy decoding gets wholly right, one question about `count` facts per sequence."""
    right = 0
    for _ in range(cases):
        drawn = facts.draw(count)
        if lines:
            body = [token for fact in drawn for token in facts.line(fact)]
            ask, answer = facts.line_question(facts.rng.choice(drawn), False)
        else:
            ask, answer = facts.question(facts.rng.choice(drawn))
            said = [facts.statement(fact) for fact in drawn]
            room = length - len(ask) - len(answer) - sum(map(len, said))
            start = facts.rng.randrange(len(text) - room)
            body = text[start : start + room].tolist()
            for words in said:
                place = facts.rng.randrange(len(body) + 1)
                body[place:place] = words
        ids = torch.tensor([body + ask + answer])
        with torch.autocast("cpu", torch.bfloat16):
            best = model(input_ids=ids, logits_to_keep=len(answer) + 1, use_cache=False).logits[0, :-1].argmax(-1)
        right += best.tolist() == answer
    return right / cases


def save(model, tokenizer_file, folder):
    """Write a folder for `from_pretrained`, with weights in bf16."""
    model.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file), eos_token=data.END, model_max_length=CONFIG["max_position_embeddings"]
    ).save_pretrained(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--books", type=Path, required=True, help="folder of *.jsonl.xz, one book a line, field text")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="go on from the last state saved in --out")
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True, parents=True)
    torch.manual_seed(0)
    texts, file = list(data.books(args.books)), args.out / "words.json"
    tokenizer = data.Tokenizer.from_file(str(file)) if args.resume else data.train_tokenizer(data.sample(texts), file)
    books, test_text = (data.encode(tokenizer, map(data.piece, part)) for part in (texts[:-8], texts[-8:]))
    made = data.encode(tokenizer, [data.made_up(60_000)])
    facts, unseen = data.Facts(tokenizer, random.Random(1)), data.Facts(tokenizer, random.Random(2), 2000, True)
    print(f"{len(books)} tokens of books, {len(made)} of made-up text", flush=True)

    model = look_back(LlamaForCausalLM(LlamaConfig(**CONFIG)))
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    loss_of = torch.compile(Loss(model), dynamic=False)
    total, step, start = sum(phase[0] for phase in PHASES), 0, time.time()
    if args.resume:
        weights, *states, step = torch.load(args.out / "state.pt")
        model.load_state_dict(weights)
        for optimizer, state in zip(optimizers, states):
            optimizer.load_state_dict(state)
    for index, phase in enumerate(PHASES):
        while step < sum(phase[0] for phase in PHASES[: index + 1]):
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = args.lr * min(1, (step + 1) / 50, 2 * (total - step) / total)
            losses = step_of(loss_of, optimizers, batch(facts, [books, books, books, made], phase, 0.3))
            step += 1
            if step % 20 == 0:
                report = dict(length=phase[1], step=step, tokens=step * TOKENS, seconds=round(time.time() - start))
                print(json.dumps(report | dict(zip(("answers", "text"), losses))), flush=True)
            if step % 100 == 0:
                kinds = [(kind, n) for kind in ("text", "lines") for n in (1, 4, 8, 16) if n * 14 + 24 < phase[1]]
                right = {f"{k} {n}": accuracy(model, unseen, test_text, phase[1], n, k == "lines") for k, n in kinds}
                print(json.dumps(right), flush=True)
                torch.save([model.state_dict(), *(o.state_dict() for o in optimizers), step], args.out / "state.pt")
    save(model, file, args.out / "small_llama")


if __name__ == "__main__":
    main()
