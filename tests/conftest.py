import os

import fuzzing
import helpers
import pytest
import torch

torch.set_num_threads(1)  # the workers share the cores, and tiny models are faster so

OPS = {f"test_{op}" for op in (
    "attend", "score", "peak", "error", "kl", "refine", "norm", "select", "compact", "decode",
)}  # fmt: skip
CPU_ONLY = {"test_errors", "test_isa"}  # a GPU does not look at counts and indices


NIGHTLY = os.environ.get("KVEVICT_TESTS", "gate") == "all"


def pytest_configure(config):
    config.addinivalue_line("markers", "drawn(n): so many of the test's cases are run, unless KVEVICT_MOST=all")
    config.addinivalue_line("markers", "slow: takes more than 5 s")
    config.addinivalue_line("markers", "nightly: only run with KVEVICT_TESTS=all")


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"seed: KVEVICT_SEED={fuzzing.SEED}")


def pytest_collection_modifyitems(config, items):
    tier = [item for item in items if NIGHTLY or not item.get_closest_marker("nightly")]
    run = fuzzing.drawn(tier)
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
