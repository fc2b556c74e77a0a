"""Figures draw the numbers of the tables, and nothing in them overlaps."""

import io
import itertools
import json
import sys

import pytest
from toy_task import line

from kvevict.cli import main
from kvevict.lab.evaluate import plot
from kvevict.lab.evaluate.summary import summarize

POLICIES = ("take", "snapkv", "oracle")
BUDGETS = (48, 64, 256)


@pytest.fixture(autouse=True)
def drawn(request):
    if "without" not in request.node.name:
        pytest.importorskip("matplotlib")


def results():
    """Two tasks, one with depths; scores that differ from cell to cell."""
    lines = []
    for i in range(24):
        about = dict(id=i, length=(256, 1024)[i % 2])
        needle = dict(task="needle", depth=(0.0, 0.5, 1.0)[i % 3])
        for task in (dict(task="facts"), needle):
            lines.append(line("full", float(i % 8 > 0), **task, **about))
            for p, policy in enumerate(POLICIES):
                for b, budget in enumerate(BUDGETS):
                    for m, mode in enumerate(("known", "later")):
                        score = float((7 * i + 3 * p + 5 * b + m) % 11 < 4 + b + p)
                        lines.append(line(policy, score, mode, budget=budget, **task, **about))
    return lines


def panels(figure):
    """Title -> axes, colour bars apart."""
    return {axes.get_title(): axes for axes in figure.axes if axes.get_title()}


def boxes_apart(figure):
    """Axes with their labels and titles, and the legend, are beside each other and inside the figure."""
    figure.savefig(io.BytesIO())  # lays it out
    legends = [legend for part in (figure, *figure.subfigs) for legend in part.legends]
    boxes = [axes.get_tightbbox() for axes in figure.axes] + [legend.get_window_extent() for legend in legends]
    width, height = figure.bbox.width, figure.bbox.height
    for i, box in enumerate(boxes):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
        for other in boxes[:i]:
            across = min(box.x1, other.x1) - max(box.x0, other.x0)
            along = min(box.y1, other.y1) - max(box.y0, other.y0)
            assert across <= 0.5 or along <= 0.5
    for axes in figure.axes:
        for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
            spans = [label.get_window_extent() for label in labels if label.get_text()]
            straight = not any(label.get_rotation() for label in labels)
            for a, b in itertools.pairwise(spans):
                assert not (straight and a.overlaps(b)), "tick labels overlap"


def test_budget():
    lines = results()
    figure, summary = plot.budget(lines), summarize(lines)
    shown = panels(figure)
    assert set(shown) == {f"{task}, {mode}" for task in ("facts", "needle") for mode in ("known", "later")}
    for title, axes in shown.items():
        task, mode = title.split(", ")
        got = {}
        for container in axes.containers:
            data, _, (bars,) = container
            got[container.get_label()] = data.get_xydata(), bars.get_segments()
        assert set(got) == set(POLICIES)
        for policy, (points, bars) in got.items():
            for budget, (x, y), ((_, low), (_, high)) in zip(BUDGETS, points, bars, strict=True):
                cell = summary[policy, budget, None][task, (), mode]
                assert (y, low, high) == pytest.approx((100 * cell.mean, 100 * cell.low, 100 * cell.high))
                assert abs(x / budget - 1) < 0.08
        full = summary["full", None, None][task, (), mode].mean
        (reference,) = [entry for entry in axes.lines if entry.get_label() == "full cache"]
        assert list(reference.get_ydata()) == [100 * full] * 2
        assert [label.get_text() for label in axes.get_xticklabels()] == ["48", "64", "256"]
        assert "slots" in axes.get_xlabel() and "%" in axes.get_ylabel()
    styles = {(d[0].get_color(), d[0].get_marker(), d[0].get_linestyle()) for d in axes.containers}
    assert len(styles) == len({marker for _, marker, _ in styles}) == len(POLICIES)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["full cache", *POLICIES]
    boxes_apart(figure)


def test_one_budget():
    """Its policies' points are near its tick."""
    for axes in plot.budget([entry for entry in results() if entry["budget"] in (None, 64)]).axes:
        low, high = axes.transData.inverted().transform([axes.transAxes.transform((x, 0)) for x in (0.4, 0.6)])[:, 0]
        points = [x for data, *_ in axes.containers for x in data.get_xdata()]
        assert len(points) == len(POLICIES) and low < min(points) < 64 < max(points) < high


def test_budget_of_perplexities():
    lines = [line("full", 2.0, id=i, metric="perplexity") for i in range(2)]
    lines += [line("take", 2.0 + i / 4, "known", i, 0.25, metric="perplexity") for i in range(2)]
    (axes,) = plot.budget(lines).axes
    assert axes.containers[0][0].get_ydata() == pytest.approx([2.71828**2.125], rel=1e-4)
    assert axes.get_ylabel() == "perplexity"
    assert "fraction" in axes.get_xlabel()
    with pytest.raises(ValueError, match="slots and fractions"):
        plot.budget([*lines, line("take", 2.0, "known", 0, 64, metric="perplexity")])
    with pytest.raises(ValueError, match="no results of a policy"):
        plot.budget(lines[:2])


def written(path, lines):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in ({"settings": {}}, *lines)))
    return str(path)


@pytest.mark.quick
def test_command(tmp_path, capsys):
    file, out = written(tmp_path / "results.jsonl", results()), tmp_path / "figure.png"
    assert main(["plot", file, "--out", str(out), "--budgets", "48", "--mode", "known"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    told, last = capsys.readouterr().out.splitlines()
    assert told == f"scores by budget of {file} are in {out}" and json.loads(last)["out"] == str(out)


@pytest.mark.parametrize("words, message", [
    ("--policies tak", "no results of policy tak; there are oracle, snapkv, take"),
    ("--budgets 50", "no results of budget 50; there are 256, 48, 64"),
    ("--tasks full", "no results of task full; there are facts, needle"),
    ("--out figure.docx", "--out figure.docx: give a name that ends in .png, .svg or .pdf"),
    ("--out nowhere/figure.png", "there is no folder nowhere"),
])  # fmt: skip
def test_mistakes_are_named(tmp_path, capsys, words, message):
    file = tmp_path / "results.jsonl"
    written(file, [] if "--out" in words else results())  # a path is checked before the results are read
    assert main(["plot", str(file), *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    file = written(tmp_path / "results.jsonl", results())
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", file, "--kind", "budget"]) == 2
    assert "pip install 'kvevict[plot]'" in capsys.readouterr().err


def test_without_results(tmp_path, capsys):
    assert main(["plot", str(tmp_path / "none"), "--kind", "budget"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_turns():
    """The figure's points are the means of each turn."""
    lines = []
    for turn in range(1, 11):
        for text in range(4):
            about = dict(task="turns", turn=turn)
            lines.append(line("full", float(turn < 8), id=f"{text}/{turn}", **about))
            lines.append(
                line("take", float((text + turn) % 4 == 0), "known", budget=0.0625, id=f"{text}/{turn}", **about)
            )
    figure = plot.turns(lines)
    boxes_apart(figure)
    (panel,) = panels(figure).values()
    heights = [bar.lines[0].get_ydata().tolist() for bar in panel.containers]
    assert heights == [[100.0 * (turn < 8) for turn in range(1, 11)], [25.0] * 10]
    assert [bar.get_label() for bar in panel.containers] == ["full cache", "take, 0.0625"]
    with pytest.raises(ValueError, match="there are no turns"):
        plot.turns(results())
