import hashlib
import os
import random
import sys
import zlib

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the network; before anything imports huggingface_hub

import durations
import fuzzing
import helpers
import numpy as np
import pytest
import torch
import touched
import workers

pytest.register_assert_rewrite("caches", "op_cases", "policy_cases")  # their asserts print what differs
torch.set_num_threads(1)  # the workers share the cores, and tiny models are faster so

OPS = {f"test_{op}" for op in (
    "attend", "attend_score", "score", "peak", "error", "kl", "refine", "norm", "quadratic", "probe", "select",
    "compact", "decode", "packed",
)}  # fmt: skip
# A GPU does not look at counts and indices, and takes head dimensions up to 256.
CPU_ONLY = {"test_errors", "test_isa", "test_the_largest_head_dimension"}


TIER = os.environ.get("KVEVICT_TESTS", "gate")
DURATIONS = os.environ.pop("KVEVICT_DURATIONS", None)  # not of the workers, and of what tests start
spent: dict = {}  # seconds by node id


def pytest_configure(config):
    config.pluginmanager.register(workers)
    config.addinivalue_line("markers", "drawn(n): so many of the test's cases are run, unless KVEVICT_MOST=all")
    config.addinivalue_line("markers", "quick(**values): cases with these parameters are run with KVEVICT_TESTS=quick")
    config.addinivalue_line("markers", "slow: a case takes more than 5 s")
    config.addinivalue_line("markers", "nightly: only run with KVEVICT_TESTS=all")
    if TIER not in ("quick", "gate", "all"):
        raise pytest.UsageError(f"KVEVICT_TESTS is {TIER!r}, not quick, gate or all")


def pytest_ignore_collect(collection_path):
    """Files without a test for `quick` are not even imported."""
    if TIER == "quick" and collection_path.name.startswith("test_"):
        near = str(collection_path.relative_to(touched.ROOT)) in touched.nearest()
        return None if near or "mark.quick" in collection_path.read_text(encoding="utf-8") else True
    return None


@pytest.hookimpl(trylast=True)  # of the cases that pytest's own -k and -m leave
def pytest_collection_modifyitems(config, items):
    tier = [item for item in items if TIER == "all" or not item.get_closest_marker("nightly")]
    run = fuzzing.drawn(tier)
    if TIER == "quick":
        functions = list(dict.fromkeys(item.nodeid.partition("[")[0] for item in run))
        near = touched.chosen_of(functions)
        run = {item for item in tier if is_quick(item) or (item in run and item.nodeid.partition("[")[0] in near)}
    config.hook.pytest_deselected(items=[item for item in items if item not in run])
    items[:] = [item for item in items if item in run]


def is_quick(item) -> bool:
    """Whether a mark `quick` is the test's, and its values are the case's."""
    values = getattr(item, "callspec", None) and item.callspec.params
    return any(all(values[name] == value for name, value in mark.kwargs.items()) for mark in item.iter_markers("quick"))


def pytest_runtest_logreport(report):
    spent[report.nodeid] = spent.get(report.nodeid, 0.0) + report.duration


def pytest_terminal_summary(terminalreporter):
    """Of this run: its seed, and its cases as a number that is the same if they are."""
    cases = hashlib.sha1("\n".join(sorted(spent)).encode()).hexdigest()[:8]
    terminalreporter.write_line(f"KVEVICT_TESTS={TIER} KVEVICT_SEED={fuzzing.SEED}: {len(spent)} cases ({cases})")


def pytest_sessionfinish():
    if DURATIONS:
        durations.write(DURATIONS, spent)


def seed(name) -> None:
    number = zlib.crc32(f"{fuzzing.SEED} {name}".encode())
    for each in (random.seed, np.random.seed, torch.manual_seed):
        each(number)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Fixtures, those of a module too, draw the same numbers whichever test asks for them first."""
    seed(item.path.name)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    """A test draws the same numbers whichever tests ran before."""
    seed(item.nodeid)


def pytest_generate_tests(metafunc):
    """With a GPU the ops' tests run there too."""
    if metafunc.module.__name__ in OPS and metafunc.function.__name__ not in CPU_ONLY and helpers.on_gpu():
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


@pytest.fixture(autouse=True)
def shared_models_are_left_as_they_were():
    yield
    if "tiny" in sys.modules:
        assert not sys.modules["tiny"].foreign_hooks(), "use a model of the test's own"


@pytest.fixture(scope="module")
def net():
    """A model of bytes: the words are those of `tiny.byte_tokenizer`."""
    import tiny

    return tiny.model(vocab_size=259, bos_token_id=None, pad_token_id=None)


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield
