"""What answers cost where a text's slots are given to an engine that knows plain caches alone: as many slots for every
head of every layer, keys at positions 0, 1, 2 ... and the question after them (docs/export.md).

    python tests/benchmarks/bench_export.py OUT.jsonl --model DIR --haystack BOOKS [--seeds 20 21] [--shares .5 .25]

A text of each seed is read by `read-twice`; its questions (task `many`) are asked of

    full    the unpatched model's cache
    ragged  the slots of the default policy, where heads and layers compete, at the positions that they have
    equal   as many slots for each head and layer, in a plain DynamicCache of the unpatched model, at these positions
    moved   the same, with each head's keys rotated once, in fp32, to the positions 0 .. n - 1, the question from n on

OUT has a line for each question and is gone on with; the table compares answers of pairs.
"""

import argparse
import copy
import itertools
import json
import math
from pathlib import Path

import torch
from transformers import DynamicCache

from kvevict import families
from kvevict.compat import CACHE, cache_of
from kvevict.families import find_decoder
from kvevict.lab.evaluate.ask import FULL, Asked, Run, ask, encode, read
from kvevict.lab.evaluate.intervals import clustered
from kvevict.lab.evaluate.metrics import METRICS
from kvevict.lab.evaluate.tasks import Settings, find
from kvevict.models import load_model
from kvevict.prompts import ids_of, line_ended
from kvevict.writing import ends_of

RAGGED, EQUAL = "read-twice", "read-twice:heads=equal,layers=uniform"


def plain(model, cache, moved: bool) -> DynamicCache:
    """The slots of an evicted cache of one row with as many slots for each head, as an engine with plain caches has
    them. moved: to the positions 0, 1, 2 ..."""
    decoder, made = find_decoder(model), DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        k, v, positions = layer.keys, layer.values, torch.stack(layer.positions()[0])
        assert (layer.counts == k.shape[2]).all(), "heads have different numbers of slots"
        if moved:
            module = families.attention_of(families.layers_of(decoder)[index], index)
            to = torch.arange(k.shape[2])
            heads = [
                families.rotate(decoder, module, each[:, None, None].float(), own.long(), to)[:, 0, 0]
                for each, own in zip(k[0], positions)
            ]
            k = torch.stack(heads)[None].to(k.dtype)
        made.update(k, v, index)
    return made


@torch.no_grad()
def answer(model, tokenizer, asked: Asked, cache, start: int) -> dict:
    """A plain cache's answer to a question whose tokens have the positions from `start` on, as `ask` measures it."""
    case, ends, said = asked.case, ends_of(model, tokenizer), []

    def follow(cache, ids, at):
        place = torch.arange(at, at + len(ids))[None]
        return model(torch.tensor([ids]), **{CACHE: cache}, position_ids=place, use_cache=True).logits[0].float()

    logits = follow(cache, asked.prompt.question, start)[-1:]
    start += len(asked.prompt.question)
    right = ids_of(tokenizer, f" {case.answers[0]}")
    rows = torch.cat([logits, follow(copy.deepcopy(cache), right[:-1], start)]) if len(right) > 1 else logits
    while True:
        said.append(int(logits[-1].argmax()))
        if len(said) == case.new_tokens or said[-1] in ends or line_ended(tokenizer, said):
            break
        logits, start = follow(cache, said[-1:], start), start + 1
    text = tokenizer.decode(said, skip_special_tokens=True)
    nats = float(torch.nn.functional.cross_entropy(rows, torch.tensor(right)))
    return dict(prediction=text, score=METRICS[case.metric](text, case.answers), nats=nats)


def check(model, tokenizer, asked: Asked) -> None:
    """With all slots kept, rotation from each position to the same one changes nothing that counts, and the plain cache
    answers as the unpatched model does. With half of them it answers as kvevict does."""
    whole = cache_of(read(model, tokenizer, asked, Run("streaming", 1 << 20, 1024, "agnostic")).out)
    still, moved = plain(model, whole, False), plain(model, whole, True)
    for one, other in zip(still.layers, moved.layers):
        assert torch.equal(one.values, other.values)
        assert (one.keys - other.keys).norm() < torch.finfo(one.keys.dtype).eps * one.keys.norm()
    want = ask(model, tokenizer, asked, FULL)
    for cache in (still, moved):
        found = answer(model, tokenizer, asked, cache, len(asked.prompt.context))
        _same(found, want)
    tokens, equal = len(asked.prompt.context), Run(EQUAL, 0.5, 1024, "agnostic")
    half = read(model, tokenizer, asked, equal)
    found = answer(model, tokenizer, asked, plain(model, cache_of(half.out), False), tokens)
    _same(found, ask(model, tokenizer, asked, equal, text=half))


def _same(found, want) -> None:
    assert found["prediction"] == want["prediction"] and abs(found["nats"] - want["nats"]) < 0.02, (found, want)


def lines(model, tokenizer, seed, shares, args):
    """The lines of one text."""
    settings = Settings(tokenizer, args.length, 1, seed, haystack=Path(args.haystack))
    questions = [Asked(case, encode(model, tokenizer, case)) for case in find("many")(settings)]
    if args.check:
        check(model, tokenizer, questions[0])
        print(f"seed {seed}: all slots, rotated to where they are, answer as before", flush=True)
    tokens = len(questions[0].prompt.context)

    def line(asked, kind, share, found):
        return dict(seed=seed, id=asked.case.id, kind=kind, share=share, tokens=tokens,
                    **{name: found[name] for name in ("prediction", "score", "nats")})  # fmt: skip

    full = read(model, tokenizer, questions[0], FULL)
    yield from (line(each, "full", 1, ask(model, tokenizer, each, FULL, text=full)) for each in questions)
    for share in shares:
        ragged, equal = (
            Run(policy, math.ceil(share * tokens), args.chunk_size, "agnostic") for policy in (RAGGED, EQUAL)
        )
        text = read(model, tokenizer, questions[0], ragged)
        kept = text.held["kept"]
        held, heads = sum(map(sum, kept)), sum(map(len, kept))
        padded = [sum(max(layer) * len(layer) for layer in kept) / held, max(map(max, kept)) * heads / held]
        for each in questions:
            found = ask(model, tokenizer, each, ragged, text=text)
            yield line(each, "ragged", share, found) | dict(padded=padded)
        cache = cache_of(read(model, tokenizer, questions[0], equal).out)
        for kind, start in (("equal", tokens), ("moved", cache.layers[0].keys.shape[2])):
            slots = plain(model, cache, kind == "moved")
            for each in questions:
                found = answer(model, tokenizer, each, copy.deepcopy(slots), start)
                yield line(each, kind, share, found)


def table(found) -> None:
    """Right answers, and paired differences among the questions that the full cache answers."""
    by = {(each["kind"], each["share"], each["seed"], each["id"]): each for each in found}
    asked = sorted({(each["seed"], each["id"]) for each in found})
    known = [each for each in asked if by[("full", 1, *each)]["score"] == 1]
    print(f"{len(asked)} questions about {len({seed for seed, _ in asked})} texts, {len(known)} with the full cache")
    for share in sorted({each["share"] for each in found} - {1}, reverse=True):
        for kind in ("ragged", "equal", "moved"):
            own = [by[(kind, share, *each)] for each in known]
            nats = sum(each["nats"] for each in own) / len(own)
            print(f"{share}: {kind:6} {sum(each['score'] == 1 for each in own)} of {len(known)} right, {nats:.3f} nats")
        padded = [each["padded"] for each in found if each["share"] == share and "padded" in each]
        if padded:
            layer, most = (sum(each) / len(each) for each in zip(*padded))
            print(f"{share}: ragged: {layer:.2f} times the slots if heads are as long as their layer's longest, "
                  f"{most:.2f} if all are as long as the longest")  # fmt: skip
        for one, other in itertools.pairwise(("ragged", "equal", "moved")):
            pairs = [(by[(one, share, *each)], by[(other, share, *each)]) for each in known]
            won, lost = (sum(b["score"] * sign > a["score"] * sign for a, b in pairs) for sign in (1, -1))
            groups = [seed for seed, _ in known]
            parts = []
            for name, factor in (("score", 100), ("nats", 1)):
                values = [factor * (b[name] - a[name]) for a, b in pairs]
                parts.append(f"{name} {sum(values) / len(values):+.3g} +- {clustered(values, groups):.2g}")
            print(f"{share}: {other} against {one}: {won} won, {lost} lost, {', '.join(parts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out")
    parser.add_argument("--model", required=True)
    parser.add_argument("--haystack", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--chunk-size", type=int, default=1024)
    parser.add_argument("--seeds", type=int, nargs="+", default=[20])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--check", action="store_true", help="check each text with all its slots first")
    args = parser.parse_args()
    out = Path(args.out)
    found = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    model, tokenizer = load_model(args.model, args.dtype, "cpu")
    for seed in [seed for seed in args.seeds if seed not in {each["seed"] for each in found}]:
        more = list(lines(model, tokenizer, seed, args.shares, args))
        with out.open("a") as file:
            file.writelines(f"{json.dumps(each)}\n" for each in more)
        found += more
        print(f"seed {seed}", flush=True)
    table(found)


if __name__ == "__main__":
    main()
