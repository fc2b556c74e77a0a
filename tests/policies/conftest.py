"""Small constants for the short texts of the cases in `choices.py`."""

import itertools

import oracle
import policy_cases
import pytest

import kvevict
from kvevict.engine.measure.quantities import compactor
from kvevict.policy.scores import defensive

SMALL = dict(SKETCH=6, BLOCK=5)  # short texts have several blocks too, and more tokens than the sketch has columns
CONSTANTS = dict.fromkeys(("compactor", "compactor, keys alone", "read-once"), SMALL)
CONSTANTS |= {"defensive, covered": dict(COVER=1.0), "defensive, nothing first": dict(COVER=0.0)}  # in place of 0.9
PART = 4  # tokens of LagKV's parts, in place of 128


@pytest.fixture(autouse=True)
def constants(monkeypatch, request):
    """Those of the test's parameter `name`, in the package and in the oracle."""
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    for module, constant in itertools.product((compactor, defensive, oracle.oracle_values), CONSTANTS.get(name, {})):
        if hasattr(module, constant):
            monkeypatch.setattr(module, constant, CONSTANTS[name][constant])
    if str(name).startswith(("compactor", "read-once")):  # logits that are not scaled magnify the rounding of float32
        monkeypatch.setattr(policy_cases, "NEAR", 1e-4)
    if str(name).startswith("lagkv"):
        monkeypatch.setattr(kvevict.SCORES["lagkv"], "lag", PART)
        monkeypatch.setitem(oracle.oracle_scores.SCORES, "lagkv", oracle.oracle_scores.SCORES["lagkv"] | dict(lag=PART))


@pytest.fixture
def task():
    """A history that no other test adds to."""
    kvevict.history("test").__init__()
    yield "test"
    kvevict.history("test").__init__()
