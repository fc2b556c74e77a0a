"""Threads and tasks that use a model at once: tokens and reports are those of runs alone."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import fuzzing
import pytest
import stress
import tiny
import torch
from transformers import DynamicCache

import kvevict
from kvevict.context import within

RUNS = {
    "take": dict(budget=20, probe=5, chunk_size=40), "h2o": dict(budget=24, chunk_size=30), "laq": dict(budget=30),
    "fastkv": dict(budget=20, window=4, chunk_size=60, tsp_len=20),
}  # fmt: skip


def told(model):
    report = kvevict.report(model, positions=True)
    assert report.pop("seconds")["decode"] > 0
    return report


def generated(model, seed, length):
    return tiny.generate(model, tiny.prompt(2, length, seed=seed, pad=(0, 7)), new=12)


def together(jobs):
    """The results of every job (model, seed, length) when all run at once, several times each."""
    barrier = threading.Barrier(len(jobs))

    def work(job):
        barrier.wait()
        return [(generated(*job), told(job[0])) for _ in range(3)][-1]

    with ThreadPoolExecutor(len(jobs)) as threads:
        return [*threads.map(work, jobs)]


@pytest.mark.parametrize("models", [1, 2])
@pytest.mark.parametrize("policy", RUNS)
@pytest.mark.drawn(2)
def test_as_alone(policy, models):
    made = [kvevict.patch(tiny.model(seed=seed), policy, **RUNS[policy]) for seed in range(models)]
    jobs = [(made[0], 1, 90), (made[-1], 2, 131)]
    alone = [(generated(*job), told(job[0])) for job in jobs]
    for (want, wanted), (got, told_of) in zip(alone, together(jobs), strict=True):
        assert torch.equal(got, want)
        assert told_of == wanted


def test_a_thread_that_read_nothing_sees_the_last_read():
    model = kvevict.patch(tiny.model(), "take", **RUNS["take"])
    seen = {}
    thread = threading.Thread(target=lambda: (generated(model, 1, 90), seen.update(told(model))))
    thread.start()
    thread.join()
    assert told(model) == seen


def test_a_report_of_a_cache():
    """From another thread, after other reads, after forks and whatever the model is patched with by then."""
    model = kvevict.patch(tiny.model(), "take", **RUNS["take"])
    inputs, seen = tiny.prompt(1, 90), {}

    def work():
        seen["cache"] = model(**inputs, logits_to_keep=1).past_key_values
        seen["report"] = kvevict.report(model, positions=True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    cache = seen["cache"]
    generated(model, 2, 50)
    assert kvevict.report(cache, positions=True) == kvevict.report(cache.fork(), positions=True) == seen["report"]
    kvevict.unpatch(model)
    assert kvevict.report(cache)["kept"] == seen["report"]["kept"]
    for other in (pickle.loads(pickle.dumps(cache)), DynamicCache()):
        with pytest.raises(ValueError, match="no patched model has read anything into this cache"):
            kvevict.report(other)
    cache.reset()
    with pytest.raises(ValueError, match="no patched model"):
        kvevict.report(cache)


def test_decoding_counts_for_its_own_read():
    model = kvevict.patch(tiny.model(), "take", **RUNS["take"])
    first, second = (model(**tiny.prompt(1, 50, seed=seed), logits_to_keep=1).past_key_values for seed in (1, 2))
    model(torch.tensor([[5]]), past_key_values=first)
    assert "decode" in kvevict.report(first)["seconds"] and "decode" not in kvevict.report(second)["seconds"]


@pytest.fixture(scope="module")
def net():
    return stress.Net(0)


def test_the_policy_belongs_to_the_call(net):
    """A block holds in its thread: an `answer` in another one neither removes a model's policy nor leaves another."""
    kvevict.patch(net.model, "snapkv", **stress.POLICIES["snapkv"])
    inside, go_on = threading.Event(), threading.Event()

    def work():
        with kvevict.evicting(net.model, "take", **stress.POLICIES["take"]):
            inside.set()
            go_on.wait()
            got.append(net.generate())

    got: list = []
    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    assert net.generate() == net.generated["snapkv"]
    kvevict.unpatch(net.model)
    assert net.generate() == net.unpatched
    go_on.set()
    thread.join()
    assert got == [net.generated["take"]] and net.is_as_before()


def test_a_generate_keeps_its_policy(net):
    """Patched anew or unpatched while it decodes."""
    for change in (kvevict.unpatch, lambda model: kvevict.patch(model, "h2o", budget=6)):
        kvevict.patch(net.model, "take", **stress.POLICIES["take"])

        def stop(ids, scores, change=change, **kwargs):
            change(net.model)
            return torch.tensor([False])

        out = net.model.generate(**stress.INPUTS, **stress.GENERATED, stopping_criteria=[stop])
        assert (out.sequences.tolist(), stress.kept(out.past_key_values)) == net.generated["take"]
    assert net.is_as_before()


def test_everything_at_once(net):
    nets = [net, stress.Net(1)]
    stress.together(nets, threads=8, tasks=32, each=fuzzing.count(1), seed=fuzzing.SEED)
    assert all(net.is_as_before() for net in nets)


def test_two_threads_on_one_cache():
    """The second is told so, and the first goes on as alone."""
    model, prompt = kvevict.patch(tiny.shared(), "snapkv", budget=20, window=4, chunk_size=16), tiny.prompt(1, 50)
    caches, said = [DynamicCache(config=model.config) for _ in range(2)], []

    def second():
        with pytest.raises(ValueError, match="another thread is reading") as error, torch.no_grad():
            model(torch.tensor([[5]]), past_key_values=caches[1])
        said.append(str(error.value))

    def pause():
        if caches[1].get_seq_length() and not said:
            other = threading.Thread(target=second)
            other.start()
            other.join()

    try:
        with torch.no_grad():
            want = model(**prompt, past_key_values=caches[0], logits_to_keep=1).logits
            with within(pause=pause):
                got = model(**prompt, past_key_values=caches[1], logits_to_keep=1).logits
    finally:
        kvevict.unpatch(model)
    assert said and torch.equal(got, want)
