"""Two threads that generate at once: tokens and reports are those of runs alone."""

import threading

import pytest
import tiny
import torch

import kvevict

RUNS = {
    "take": dict(budget=20, probe=5, chunk_size=40),
    "h2o": dict(budget=24, chunk_size=30),
    "laq": dict(budget=30),
    "fastkv": dict(budget=20, window=4, chunk_size=60, tsp_len=20),
}


def told(model):
    report = kvevict.report(model, positions=True)
    assert report.pop("seconds")["decode"] > 0
    return report


def generated(model, seed, length):
    return tiny.generate(model, tiny.prompt(2, length, seed=seed, pad=(0, 7)), new=12)


def together(jobs):
    """What every job (model, seed, length) gives when all run at once, several times each."""
    results, barrier = {}, threading.Barrier(len(jobs))

    def work(name, model, *job):
        barrier.wait()
        for _ in range(3):
            results[name] = generated(model, *job), told(model)

    threads = [threading.Thread(target=work, args=(name, *job)) for name, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[name] for name in range(len(jobs))]


@pytest.mark.parametrize("models", [1, 2])
@pytest.mark.parametrize("policy", RUNS)
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
