"""Threads and asyncio tasks that use two models in every way at once. Each gets the same result as a lone run."""

import asyncio
import random
import re
import sys
import threading
from contextlib import contextmanager

import tiny
import torch

import kvevict

POLICIES = {
    "snapkv": dict(budget=16, window=4), "h2o": dict(budget=20, chunk_size=24), "laq": dict(budget=18, n_d=3),
    "take": dict(budget=18, probe=4, chunk_size=24), "fastkv": dict(budget=16, window=4, tsp_len=20),
    "kvzip+": dict(budget=20, chunk_size=24),
}  # fmt: skip
OWN = ("snapkv", "take")  # policies of `patch`; other calls may have these, or none
TEXT, QUESTIONS = "The lantern is lit at nine and the harbour opens at seven. ", ["When?", "Why not?"]
ASKED = dict(max_new_tokens=4)
INPUTS = tiny.prompt(1, 61, seed=5)
GENERATED = dict(max_new_tokens=5, do_sample=False, return_dict_in_generate=True)


class Net:
    """A model, and its results of lone runs of every kind."""

    def __init__(self, seed):
        self.model = tiny.model(seed=seed, vocab_size=259, bos_token_id=None, pad_token_id=None)
        self.tokenizer = tiny.byte_tokenizer()
        self.before = _hooks(self.model)
        self.cache = self.read("snapkv")
        self.reads = {name: kept(self.read(name)) for name in POLICIES}
        self.answers = {name: self.answer(name) for name in POLICIES}
        self.unpatched = self.generate()
        self.generated = {name: self.evicting(name) for name in POLICIES}
        self.forked = self.ask()
        self.owns = [self.unpatched, *(self.generated[name] for name in OWN)]
        assert len({str(each) for each in self.generated.values()}) == len(POLICIES)

    def read(self, name):
        return kvevict.read(self.model, self.tokenizer, TEXT, name, **POLICIES[name])

    def answer(self, name):
        return kvevict.answer(self.model, self.tokenizer, TEXT, QUESTIONS, name, **POLICIES[name], **ASKED)

    def ask(self):
        """Answers from one cache that all share."""
        return kvevict.answer(self.model, self.tokenizer, self.cache, QUESTIONS, **ASKED)

    def generate(self):
        out = self.model.generate(**INPUTS, **GENERATED)
        return out.sequences.tolist(), kept(out.past_key_values)

    def evicting(self, name):
        with kvevict.evicting(self.model, name, **POLICIES[name]):
            tokens, slots = self.generate()
            assert kvevict.report(self.model, positions=True)["positions"] == slots, "another's report"
            return tokens, slots

    def check(self, kind: int, name: str) -> None:
        """Do one thing of eight; its result must be a lone run's."""
        if kind == 0:
            kvevict.patch(self.model, OWN[len(name) % 2], **POLICIES[OWN[len(name) % 2]])
        elif kind == 1:
            kvevict.unpatch(self.model)
        elif kind == 2:
            try:
                assert self.generate() in self.owns, "generated under no policy that anybody patched"
            except (RuntimeError, ValueError) as error:  # it began unpatched, and others patched the model since
                assert re.search("filled by a model patched|was read under another policy", str(error)), error
        elif kind == 3:
            assert kept(self.read(name)) == self.reads[name], f"read under {name}"
        elif kind == 4:
            assert self.answer(name) == self.answers[name], f"answered under {name}"
        elif kind == 5:
            assert self.ask() == self.forked, "asked of a fork"
        elif kind == 6:
            assert self.evicting(name) == self.generated[name], f"generated under {name}"
        else:
            with kvevict.evicting(self.model, "laq", **POLICIES["laq"]):
                assert self.evicting(name) == self.generated[name], f"generated under {name} inside laq"
                assert self.generate() == self.generated["laq"], f"generated under laq around {name}"

    async def wait(self, name, aside: bool) -> None:
        """As a task does: others run before, in and after its block; aside: the model runs in a thread."""
        with kvevict.evicting(self.model, name, **POLICIES[name]):
            await asyncio.sleep(0)
            out = await asyncio.to_thread(self.generate) if aside else self.generate()
            await asyncio.sleep(0)
            assert out == self.generated[name], f"a task under {name}"
            assert kvevict.report(self.model, positions=True)["positions"] == out[1], "another task's report"

    def is_as_before(self) -> bool:
        kvevict.unpatch(self.model)
        return _hooks(self.model) == self.before and self.generate() == self.unpatched


def kept(cache):
    """[layer][row][kv head] positions; None of an unpatched model's."""
    return kvevict.report(cache, positions=True)["positions"] if getattr(cache, "meter", None) else None


def _hooks(model) -> list:
    """Every module's attributes and numbers of hooks."""

    def own(module):
        return sorted(module.__dict__), len(module._forward_pre_hooks), len(module._forward_hooks)

    return [own(module) for module in model.modules()]


@contextmanager
def switching(interval):
    before = sys.getswitchinterval()
    sys.setswitchinterval(interval)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def together(nets, threads: int, tasks: int, each: int, seed) -> None:
    """Threads and tasks do `each` random things. Raises the first error of any."""
    errors = []

    def work(number):
        draw = random.Random(f"{seed} thread {number}")
        for _ in range(each):
            try:
                draw.choice(nets).check(draw.randrange(8), draw.choice(list(POLICIES)))
            except BaseException as error:
                errors.append(error)

    async def task(number):
        draw = random.Random(f"{seed} task {number}")
        for _ in range(each):
            try:
                net, name = draw.choice(nets), draw.choice(list(POLICIES))
                if draw.random() < 0.5:
                    await net.wait(name, draw.random() < 0.5)
                else:
                    await asyncio.to_thread(net.check, draw.randrange(8), name)
            except BaseException as error:
                errors.append(error)

    async def every():
        await asyncio.gather(*(task(number) for number in range(tasks)))

    started = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    with switching(1e-5), torch.no_grad():
        for thread in started:
            thread.start()
        asyncio.run(every())
        for thread in started:
            thread.join()
    if errors:
        raise errors[0]
