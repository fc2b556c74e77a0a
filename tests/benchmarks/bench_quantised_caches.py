"""Packed slots beside Transformers' own quantised caches, on the same prompts in one run:

    python tests/benchmarks/bench_quantised_caches.py MODEL --haystack TEXTS [--tokens 2000] [--texts 4]

MODEL is a folder, TEXTS what `kvevict eval --haystack` takes. Each text of the task `many` is read once per cache; each
question goes on from a copy, or a fork, and its answer is decoded greedily. Prints of each cache: right answers, the
KL of the answer's first token to the full cache's with its standard error over the questions, bytes of the cache of the
text, seconds to read it, milliseconds of an answer's token. The caches take turns, text by text. QuantizedCache needs
optimum-quanto (4 bits) and hqq (4 and 8): where one is missing, its lines are left out with a sentence.
"""

import argparse
import copy
import statistics
import time
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from transformers import DynamicCache, QuantizedCache
from transformers.utils import is_hqq_available, is_optimum_quanto_available

import kvevict
from kvevict.answer import KEEPS
from kvevict.lab.evaluate.metrics import METRICS
from kvevict.lab.evaluate.tasks import TASKS, Settings
from kvevict.models import load_model
from kvevict.prompts import ids_of


def tensors(x):
    """All plain tensors in an object of a quantiser's."""
    if hasattr(x, "__tensor_flatten__"):
        for name in x.__tensor_flatten__()[0]:
            yield from tensors(getattr(x, name))
    elif isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (dict, list, tuple)):
        for each in x.values() if isinstance(x, dict) else x:
            yield from tensors(each)


def size(cache):
    """Bytes of keys and values, with scales."""
    if isinstance(cache, kvevict.engine.slots.adopt.EvictionCache):
        return sum(layer.live_bytes() for layer in cache.layers)
    names = ("keys", "values", "_quantized_keys", "_quantized_values")
    return sum(t.nbytes for layer in cache.layers for name in names for t in tensors(getattr(layer, name, None)))


class Theirs:
    """A cache of Transformers."""

    def __init__(self, made):
        self.made = made

    def read(self, model, tokenizer, ids):
        return model(ids, past_key_values=self.made(), logits_to_keep=1).past_key_values

    @staticmethod
    def copied(cache):
        """Its layers replace their tensors and never write to them. (quanto's have no deep copy.)"""
        twin = copy.copy(cache)
        twin.layers = [copy.copy(layer) for layer in cache.layers]
        return twin


class Ours:
    """Slots kept by a policy, in a representation. budget 1.0: all of them."""

    def __init__(self, policy, kv, budget):
        self.options = (KEEPS, dict(kv=kv)) if budget == 1 else (policy, dict(kv=kv, budget=budget))

    def read(self, model, tokenizer, ids):
        policy, options = self.options
        with kvevict.evicting(model, policy, tokenizer=False, **options):
            return model(ids, logits_to_keep=1).past_key_values

    @staticmethod
    def copied(cache):
        return cache.fork()


def caches(config, policy):
    """Name -> cache."""
    made = {
        "full cache": Theirs(partial(DynamicCache, config=config)),
        "fp8": Theirs(partial(QuantizedCache, "fp8", config)),
    }
    for name, bits, is_here in (
        ("quanto", 4, is_optimum_quanto_available()), ("hqq", 8, is_hqq_available()), ("hqq", 4, is_hqq_available()),
    ):  # fmt: skip
        if is_here:
            made[f"{name} {bits} bits"] = Theirs(partial(QuantizedCache, name, config, nbits=bits, **AXES[name]))
        else:
            print(f"{name} is not installed: pip install {'optimum-quanto' if name == 'quanto' else name}")
    for budget in (1.0, 0.25):
        made |= {
            f"{kv}, {budget:.2f} of the slots": Ours(policy, kv, budget) for kv in ("model", "int8", "k8v4", "int4")
        }
    return made


AXES = dict(quanto={}, hqq=dict(axis_key=1, axis_value=1))  # hqq's default, 0, groups numbers of other heads


def reading(model, cache):
    """A block in which the model reads on from a cache, Transformers' or ours."""
    return torch.no_grad() if type(cache).__module__.startswith("transformers") else kvevict.evicting(model, KEEPS)


def answered(model, tokenizer, cache, case, begun=()):
    """(tokens, log-probabilities of the first that is not in `begun`, seconds of each after that)."""
    rows, tokens, first, taken = torch.tensor([[*ids_of(tokenizer, case.question), *begun]]), [*begun], None, []
    with reading(model, cache):
        while len(tokens) < case.new_tokens:
            start = time.perf_counter()
            logits = model(rows, past_key_values=cache, logits_to_keep=1).logits[0, -1]
            taken.append(time.perf_counter() - start)
            first = logits.float().log_softmax(-1) if first is None else first
            rows = logits.argmax().view(1, 1)
            tokens.append(int(rows))
            if case.one_line and "\n" in tokenizer.decode(tokens).lstrip():
                break
    return tokens, first, taken[1:]


def is_right(tokenizer, tokens, case):
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return METRICS.find(case.metric)(text.strip().split("\n")[0] if case.one_line else text, case.answers)


def begun(doc, option, option_facts, **defaults):
    """(arguments of the command line, model, tokenizer, cases of each text). option: one of this benchmark, besides
    those that have the defaults."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--haystack", type=Path)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--texts", type=int)
    parser.add_argument("--dtype")
    parser.add_argument(option, **option_facts)
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    model, tokenizer = load_model(args.model, args.dtype, "cpu")
    cases = TASKS.find("many")(Settings(tokenizer, args.tokens, args.texts, haystack=args.haystack))
    return args, model, tokenizer, [list(of_text) for _, of_text in groupby(cases, lambda case: case.context)]


@torch.no_grad()
def main():
    args, model, tokenizer, texts = begun(
        __doc__, "--policy", dict(default="read-twice"), tokens=2000, texts=4, dtype="bfloat16"
    )
    runs = caches(model.config, args.policy)
    found = {name: dict(right=[], kl=[], bytes=[], read=[], token=[]) for name in runs}
    for cases in texts:
        ids, want = torch.tensor([ids_of(tokenizer, cases[0].context)]), {}
        ids = ids[:, ids.shape[1] % 2 :]  # hqq's 4 bits fail on an odd number of groups
        for name, run in list(runs.items()):
            of, start = found[name], time.perf_counter()
            try:
                cache = run.read(model, tokenizer, ids)
                of["read"].append(time.perf_counter() - start)
                of["bytes"].append(size(cache))
                for case in cases:
                    tokens, first, taken = answered(model, tokenizer, run.copied(cache), case)
                    of["right"].append(is_right(tokenizer, tokens, case))
                    of["token"] += taken
                    full = want.setdefault(case.id, first)
                    of["kl"].append(float((full.exp() * (full - first)).sum()))
            except (RuntimeError, AssertionError, TypeError, ValueError, ImportError, AttributeError) as error:
                print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                del runs[name], found[name]
        print(f"{len(ids[0])} tokens, {len(cases)} questions", flush=True)
    full = statistics.mean(found["full cache"]["bytes"])
    print(f"{'cache':28} right    of   KL +- error     MiB   share  read s  token ms")
    for name, of in found.items():
        kl, stored = statistics.mean(of["kl"]), statistics.mean(of["bytes"])
        error = statistics.stdev(of["kl"]) / len(of["kl"]) ** 0.5
        seconds, token = statistics.median(of["read"]), statistics.median(of["token"])
        print(
            f"{name:28} {sum(of['right']):5.1f} {len(of['right']):5} {kl:.4f} +- {error:.4f} {stored / 2**20:6.2f}"
            f" {stored / full:6.3f} {seconds:7.2f} {token * 1e3:8.1f}"
        )


if __name__ == "__main__":
    main()
