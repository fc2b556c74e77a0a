"""Metrics: cases worked by hand."""

import pytest

from kvevict.lab.evaluate.metrics import METRICS

WORKED = [
    ("exact", "  42, says the text", ["42"], 1),
    ("exact", "421", ["42"], 0),  # no word boundary after 42
    ("exact", "It is 42", ["42"], 0),
    ("exact", "no idea", ["yes", " no\n"], 1),  # the better of two answers, stripped
    ("exact", "a+b!", ["a+b"], 1),  # no pattern of its own
    ("contains_any", "It is the RED one", ["blue", "red"], 1),
    ("contains_any", "It is green", ["blue", "red"], 0),
    ("contains_all", "12 and 34", ["34", "12", "56", "78"], 2 / 4),
    # "the" and the marks go: {quick, fox} and {quick, brown, fox, red}: 2 common, 2 * 2 / (2 + 4)
    ("f1_line", "The quick fox!", ["a quick, brown fox: red"], 2 / 3),
    ("f1_line", "no no", ["no"], 2 / 3),  # words count as often as they occur: 1 common, 2 / (2 + 1)
    ("f1_line", "the", ["a"], 0),  # nothing is left
    ("f1_line", "x", ["y", "x"], 1),
    ("f1_line", "red blue", ["red"], 2 / 3),
    ("f1_line", "\n\nred\nblue", ["red"], 1),  # the first line that is not empty
]


@pytest.mark.parametrize("name, prediction, answers, want", WORKED)
def test_worked(name, prediction, answers, want):
    got = METRICS[name](prediction, tuple(answers))
    assert isinstance(got, float)
    assert got == pytest.approx(want, abs=1e-8)


def test_unknown_name():
    with pytest.raises(ValueError, match="f1_line"):
        METRICS.find("f1_lin")
