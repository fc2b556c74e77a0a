import os
import time

import helpers
import pytest
import torch

torch.set_num_threads(1)  # the workers share the cores, and tiny models are faster so

OPS = {f"test_{op}" for op in (
    "attend", "score", "peak", "error", "kl", "refine", "norm", "select", "compact", "decode",
)}  # fmt: skip
CPU_ONLY = {"test_errors", "test_isa"}  # a GPU does not look at counts and indices


def pytest_configure(config):
    config.addinivalue_line("markers", "drawn(n): so many of the test's cases are run, unless KVEVICT_MOST=all")
    os.environ.setdefault("KVEVICT_SEED", str(time.time_ns() // 1000 % 10**9))  # the workers' too


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"random tests began with KVEVICT_SEED={os.environ['KVEVICT_SEED']}")


def pytest_collection_modifyitems(config, items):
    from fuzzing import drawn

    run = drawn(items)
    config.hook.pytest_deselected(items=[item for item in items if item not in run])
    items[:] = [item for item in items if item in run]


def on_gpu() -> bool:
    from kvevict import _ops

    return torch.cuda.is_available() and _ops.build_info()["cuda"]


def pytest_generate_tests(metafunc):
    """With a GPU the ops' tests run there too."""
    if metafunc.module.__name__ in OPS and metafunc.function.__name__ not in CPU_ONLY and on_gpu():
        metafunc.parametrize("device", ["cpu", "cuda"], indirect=True)


@pytest.fixture(autouse=True)
def device(request, monkeypatch):
    """Where this test runs ops."""
    monkeypatch.setattr(helpers, "device", torch.device(getattr(request, "param", "cpu")))


@pytest.fixture(autouse=True)
def context_is_restored():
    """After every test, and after errors in it, no call's context is left."""
    yield
    from kvevict.context import Context, context

    assert vars(context()) == vars(Context())
