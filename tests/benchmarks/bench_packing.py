"""Ways to write keys and values in 8 and 4 bits, compared on a model's answers:

    python tests/benchmarks/bench_packing.py MODEL --haystack TEXTS [--tokens 1500] [--texts 6]

MODEL is a folder, TEXTS what `kvevict eval --haystack` takes. Each text of the task `many` is read once, and its keys
and values are rounded, all of them in all layers, by every way: keys less their centre or not, both rotated by the
Hadamard transform or not, symmetric around 0 or between the least and the largest number, a scale for a row or for 32
numbers. Prints for each the bytes of a slot and head, right answers, and the KL to the full cache of the tokens that
the full cache answers, with its standard error over the questions. The line kv=int4 is of slots that the package has
packed; its numbers, and those of int8, are compared with those of the ways of methods.md section 11.

--budget 0.25: in their place the slots that read-twice keeps, in the model's dtype, in 4 bits, and in 4 bits after they
were chosen in the model's dtype.
"""

import copy
import statistics
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from bench_quantised_caches import Ours, Theirs, answered, begun, is_right, reading
from transformers import DynamicCache

from kvevict.policy.kv import hadamard
from kvevict.prompts import ids_of


@dataclass(frozen=True)
class Way:
    bits: int
    centred: bool = False
    rotated: bool = False
    symmetric: bool = True
    group: int | None = None  # numbers of a scale; None: the row

    def __str__(self):
        names = [name for name in ("centred", "rotated") if getattr(self, name)]
        said = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits} bits, {' and '.join(names) or 'neither'}, {said}, per {self.group or 'row'}"

    def bytes(self, dim):
        """Of a slot and head. A scale of 8 bits is fp32; one of 4, and a least number with its scale, fp16."""
        ends = 4 if self.bits == 8 or not self.symmetric else 2
        return 2 * (dim * self.bits // 8 + ends * dim // (self.group or dim))

    def rounded(self, x):
        """x [.., d] in fp32 as it is read from so many bits."""
        y = hadamard(x.reshape(-1, x.shape[-1])) if self.rotated else x.reshape(-1, x.shape[-1])
        y = y.unflatten(1, (-1, self.group or y.shape[1]))
        least, levels = torch.zeros(()), 2 ** (self.bits - self.symmetric) - 1
        if self.symmetric:
            scale = y.abs().amax(2, True) / levels
            scale = scale if self.bits == 8 else scale.half().float()
        else:
            least = y.amin(2, True).half().float()
            scale = ((y.amax(2, True) - least) / levels).half().float()
        q = ((y - least) / scale.where(scale > 0, 1)).round().clamp(-levels if self.symmetric else 0, levels)
        y = (q * scale + least).flatten(1)
        return (hadamard(y) if self.rotated else y).view(x.shape)

    def cache(self, numbers, centres, config):
        """A cache of Transformers' own with the rounded numbers of [(keys, values)] of all layers."""
        made = DynamicCache(config=config)
        for layer, (k, v), centre in zip(made.layers, numbers, centres, strict=True):
            c = centre[:, :, None] if self.centred else 0
            layer.update((self.rounded(k.float() - c) + c).to(k.dtype), self.rounded(v.float()).to(v.dtype))
        return made


KEYS_OF = {8: Way(8, centred=True), 4: Way(4, True, True, symmetric=False)}  # as the package writes them
VALUES_OF = {8: Way(8), 4: Way(4, rotated=True, symmetric=False)}
WAYS = [Way(4, *each) for each in product((False, True), (False, True), (True, False))]
WAYS += [Way(4, *each, False, 32) for each in product((False, True), (False, True))]
WAYS += [Way(8, *each) for each in product((False, True), (False, True))]
WAYS += [Way(8, True, False, False), Way(8, True, False, True, 32)]


def compared(numbers, packed):
    """Ends the run if the package's numbers are others than ours; sums in another order may round a few otherwise."""
    for index, ((k, v), layer) in enumerate(zip(numbers, packed.layers, strict=True)):
        c = layer.storage.centre[:, :, None]
        for name, x, way in (
            ("k", k.float() - c, KEYS_OF.get(layer.bits[0])),
            ("v", v.float(), VALUES_OF[layer.bits[1]]),
        ):
            if way is not None:
                got = torch.stack([layer.storage.numbers(name, *at) for at in layer.segments()]).view(x.shape)
                got = got - c if name == "k" else got
                off = (way.rounded(x) - got).abs() > 1e-3 * x.abs().amax(-1, True)
                if off.float().mean() > 1e-3:
                    raise SystemExit(f"{name} of layer {index}: {off.float().mean():.2g} of the numbers differ")


def told(model, cache, question, answer):
    """Log-probabilities [n, vocabulary] of the answer's tokens, as many, after the question's."""
    with reading(model, cache), torch.no_grad():
        rows = torch.tensor([question + answer[:-1]])
        logits = model(rows, past_key_values=cache, logits_to_keep=len(answer)).logits[0]
    return logits.float().log_softmax(-1)


class Found:
    """Right answers and divergences of one cache."""

    def __init__(self):
        self.right, self.kl, self.bytes = [], [], None

    def add(self, model, tokenizer, copied, case, answer, full):
        """A question whose answer the full cache gives with log-probabilities `full`. Where every token of it is the
        most likely one here too, greedy decoding gives the same answer."""
        got = told(model, copied(), ids_of(tokenizer, case.question), answer)
        self.kl.append(float((full.exp() * (full - got)).sum(1).mean()))
        best = got.argmax(1).tolist()
        if best != answer:
            same = next(i for i, pair in enumerate(zip(best, answer, strict=True)) if len(set(pair)) > 1)
            answer, _, _ = answered(model, tokenizer, copied(), case, best[: same + 1])
        self.right.append(is_right(tokenizer, answer, case))

    def line(self, name):
        error = statistics.stdev(self.kl) / len(self.kl) ** 0.5
        kl = f"{statistics.mean(self.kl):.5f} | {error:.5f}"
        return f"| {name} | {self.bytes} | {sum(self.right):.0f} of {len(self.right)} | {kl} |"


def rounded(model, tokenizer, ids, numbers):
    """(name, cache, bytes of a slot and head) of all slots, [(keys, values)] of all layers."""
    int4, int8 = (Ours(None, kv, 1.0).read(model, tokenizer, ids) for kv in ("int4", "int8"))
    centres = [layer.storage.centre for layer in int4.layers]
    for packed in (int4, int8):
        compared(numbers, packed)
    dim = numbers[0][0].shape[-1]
    for way in WAYS:
        yield str(way), way.cache(numbers, centres, model.config), way.bytes(dim)
    yield "kv=int4", int4, ""


def kept(model, tokenizer, ids, budget):
    """The same of the slots that read-twice keeps."""
    plain, packed = (Ours("read-twice", kv, budget).read(model, tokenizer, ids) for kv in ("model", "int4"))
    later = copy.deepcopy(plain)
    for layer, like in zip(later.layers, packed.layers, strict=True):
        layer.storage = layer.storage.repacked(like.bits, like.storage.centre, like.storage.centred)
        layer.bits = like.bits
    one, two = ([rows for layer in x.layers for rows in layer.positions()[0]] for x in (plain, packed))
    same = sum(int(torch.isin(*pair).sum()) for pair in zip(one, two, strict=True)) / sum(map(len, one))
    print(f"{same:.3f} of the slots are the same")
    yield from (("model", plain, ""), ("int4", packed, ""), ("model, then int4", later, ""))


@torch.no_grad()
def main():
    facts = dict(type=float, help="share of the slots; none: all, in every way")
    args, model, tokenizer, texts = begun(__doc__, "--budget", facts, tokens=1500, texts=6, dtype="float32")
    found, right = defaultdict(Found), []
    for cases in texts:
        ids = torch.tensor([ids_of(tokenizer, cases[0].context)])
        read, full, asked = Ours(None, "model", 1.0).read(model, tokenizer, ids), DynamicCache(config=model.config), []
        numbers = [(layer.keys, layer.values) for layer in read.layers]
        for layer, pair in zip(full.layers, numbers, strict=True):
            layer.update(*pair)
        for case in cases:
            answer, _, _ = answered(model, tokenizer, Theirs.copied(full), case)
            asked.append((case, answer, told(model, Theirs.copied(full), ids_of(tokenizer, case.question), answer)))
            right.append(is_right(tokenizer, answer, case))
        made = kept(model, tokenizer, ids, args.budget) if args.budget else rounded(model, tokenizer, ids, numbers)
        for name, cache, size in made:
            copied = cache.fork if hasattr(cache, "fork") else partial(Theirs.copied, cache)
            found[name].bytes = size
            for each in asked:
                found[name].add(model, tokenizer, copied, *each)
        print(f"{ids.shape[1]} tokens, {len(cases)} questions", flush=True)
    print(f"full cache: {sum(right):.0f} of {len(right)} right")
    print("| keys, values | bytes | right | KL | its standard error |\n|---|---|---|---|---|")
    for name, of in found.items():
        print(of.line(name))


if __name__ == "__main__":
    main()
