"""A task that asks a tiny random model about random letters, and lines of the evaluation's file."""

import functools
import statistics

import tokenizers
from transformers import PreTrainedTokenizerFast

from kvevict.lab.evaluate.metrics import METRICS
from kvevict.lab.evaluate.results import read
from kvevict.lab.evaluate.run import Evaluation, evaluate
from kvevict.lab.evaluate.tasks import TASKS, Case

NEW = 6
NORMAL = statistics.NormalDist().inv_cdf(0.975)


@METRICS.add("toy")
def toy_metric(prediction, answers):
    return len(set(prediction) & set(answers[0])) / len(set(answers[0]))


def letters(rng, count):
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(count))


@TASKS.add("toy")
def toy(settings):
    for i in range(settings.cases):
        rng = settings.rng("toy", settings.length, i)
        text, question = letters(rng, settings.length - 9), "\nWhere is "[:9]
        yield Case("toy", f"toy/{settings.length}/{i}", text, question, (text,), "toy", NEW, {"depth": i % 2})


@TASKS.add("toy-perplexity")
def toy_perplexity(settings):
    for i in range(settings.cases):
        rng = settings.rng("toy-perplexity", i)
        text, rest = letters(rng, settings.length - 20), letters(rng, 20)
        yield Case("toy-perplexity", f"{settings.length}/{i}", text[:-5], text[-5:], (rest,), "perplexity", 0)


@functools.cache
def tokenizer():
    """One id per character."""
    vocabulary = {char: i for i, char in enumerate(["\u0000", "\n", *map(chr, range(32, 127))])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="\u0000"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def plan(**changes):
    usual = dict(tasks=("toy",), lengths=(60,), policies=("snapkv", "streaming"), budgets=(16,), cases=2)
    return Evaluation(**usual | changes)


def results(net, out, **changes):
    name = changes.pop("name", "")
    evaluate(net, tokenizer(), plan(**changes), out, name)
    return read(out)[1]


def untimed(lines):
    """Lines by key, without the fields that differ from run to run."""
    names = "task", "id", "seed", "policy", "budget", "chunk_size", "mode"
    found = {tuple(line[name] for name in names): line for line in lines}
    assert len(found) == len(lines), "a case was repeated"
    return {k: {n: v for n, v in line.items() if not n.endswith("_seconds")} for k, line in found.items()}


def line(policy, score, mode=None, id=0, budget=None, task="toy", metric="toy", **tags):
    return dict(
        task=task, id=str(id), seed=0, policy=policy, budget=budget, chunk_size=None, mode=mode, metric=metric,
        score=score, tags=tags,
    )  # fmt: skip
