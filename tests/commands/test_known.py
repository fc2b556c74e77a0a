"""`kvevict models`."""

import json

import pytest

from kvevict.cli import main
from kvevict.models import known


@pytest.mark.quick
def test_list(capsys):
    assert main(["models", "gemma"]) == 0
    *lines, told = capsys.readouterr().out.splitlines()
    told = json.loads(told)
    assert sum(told["counts"].values()) == len(told["models"])
    assert any(line.split()[:2] == ["gemma2", "equal"] for line in lines)
    assert all("gemma" in each["name"] for each in told["models"])


def test_right_counts():
    """As the page promises: at least 130 types, and every line has one of four verdicts."""
    verdicts = [each.verdict for each in known.table()]
    assert set(verdicts) == {known.EQUAL, known.LIMITED, known.REFUSED, known.UNTRIED}
    assert verdicts.count(known.EQUAL) + verdicts.count(known.LIMITED) >= 130
