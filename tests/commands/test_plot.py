"""Figures draw the numbers of the tables and of the benchmark, and nothing in them overlaps."""

import io
import itertools
import json
import sys

import pytest
from toy_task import line

from kvevict.cli import main
from kvevict.lab.analysis import plot
from kvevict.lab.evaluate import plot as eval_plot
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
        about = dict(id=i, length=(256, 1024)[i % 2], kept=[[9, 9], None])
        needle = dict(task="needle", depth=(0.0, 0.5, 1.0)[i % 3])
        for task in (dict(task="facts"), needle):
            lines.append(line("full", float(i % 8 > 0), **task, **about))
            for p, policy in enumerate(POLICIES):
                for b, budget in enumerate(BUDGETS):
                    for m, mode in enumerate(("aware", "agnostic")):
                        score = float((7 * i + 3 * p + 5 * b + m) % 11 < 4 + b + p)
                        lines.append(line(policy, score, mode, budget=budget, **task, **about))
    for entry in lines:
        entry["kept"] = entry["tags"].pop("kept")
        if entry["policy"] != "full":
            entry["kept"] = [[entry["budget"] + int(entry["id"]) % 2, 3], None]
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
    figure, summary = eval_plot.budget(lines), summarize(lines)
    shown = panels(figure)
    assert set(shown) == {f"{task}, {mode}" for task in ("facts", "needle") for mode in ("aware", "agnostic")}
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


def test_families():
    policies = ("snapkv", "take:kernel=9", "snapkv:window=9", "h2o", "take+chunkkv", "oracle",
                "snapkv:rows=probe,decode=false,window=8", "edie-exact", "edie", "tova",
                "random", "cake", "knorm", "vatp", "streaming")  # fmt: skip
    lines = [line("full", 1.0, id=i) for i in range(4)]
    lines += [line(p, float((i + b) % 3 > 0), "aware", i, b) for p in policies for b in BUDGETS for i in range(4)]
    figure = eval_plot.families(lines)
    shown = {
        title.removesuffix(": toy, aware"): [container.get_label() for container in axes.containers]
        for title, axes in panels(figure).items()
    }
    assert shown == {
        "snapkv": ["snapkv", "snapkv:window=9", "snapkv:rows=probe,decode=false,window=8", "oracle"],
        "take": ["take:kernel=9", "take+chunkkv", "oracle"],
        "edie": ["edie-exact", "edie", "oracle"],
        "others": ["h2o", "tova", "random", "cake", "knorm", "vatp", "oracle"],
        "others 2": ["streaming", "oracle"],
    }
    for part in figure.subfigs[: len(shown)]:
        (legend,), (axes,) = part.legends, part.axes
        assert [text.get_text() for text in legend.get_texts()][1:] == shown[axes.get_title().split(":")[0]]
    boxes_apart(figure)


def test_budget_of_perplexities():
    lines = [line("full", 2.0, id=i, metric="perplexity") for i in range(2)]
    lines += [line("take", 2.0 + i / 4, "aware", i, 0.25, metric="perplexity") for i in range(2)]
    (axes,) = eval_plot.budget(lines).axes
    assert axes.containers[0][0].get_ydata() == pytest.approx([2.71828**2.125], rel=1e-4)
    assert axes.get_ylabel() == "perplexity"
    assert "fraction" in axes.get_xlabel()
    with pytest.raises(ValueError, match="slots and fractions"):
        eval_plot.budget([*lines, line("take", 2.0, "aware", 0, 64, metric="perplexity")])
    with pytest.raises(ValueError, match="no results of a policy"):
        eval_plot.budget(lines[:2])


def test_heatmap():
    lines = [entry for entry in results() if entry["budget"] in (None, 64)]
    figure, summary = eval_plot.heatmap(lines), summarize(lines, ("length", "depth"))
    shown = panels(figure)
    assert list(shown) == ["full"] + [f"{p}, 64 slots\n{mode}" for mode in ("aware", "agnostic") for p in POLICIES]
    for title, axes in shown.items():
        row = ("full", None, None) if title == "full" else (title.split(",")[0], 64, None)
        mode = "agnostic" if "agnostic" in title else "aware"
        want = [[100 * summary[row]["needle", (n, d), mode].mean for n in (256, 1024)] for d in (0.0, 0.5, 1.0)]
        assert axes.images[0].get_array().tolist() == want
        assert [text.get_text() for text in axes.texts] == [f"{value:.0f}" for row in want for value in row]
        assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "50", "100"]
    boxes_apart(figure)
    with pytest.raises(ValueError, match="tags length and depth"):
        eval_plot.heatmap([line("full", 1.0, length=3)])
    many = [line("take", 1.0, "aware", budget=b, length=1, depth=0) for b in range(40, 80)]
    with pytest.raises(ValueError, match="40 panels do not fit"):
        eval_plot.heatmap(many)


def test_slots():
    lines = [entry for entry in results() if entry["mode"] != "agnostic"]
    figure = plot.slots(eval_plot.mean_kept(lines))
    shown = panels(figure)
    assert len(shown) == len(POLICIES) * len(BUDGETS)
    for title, axes in shown.items():
        data = axes.images[0].get_array()
        assert data[0].tolist() == [int(title.split(", ")[1].split()[0]) + 0.5, 3]
        assert data.mask[1].all()  # a sliding-window layer
    boxes_apart(figure)
    with pytest.raises(ValueError, match="only of the full cache"):
        eval_plot.mean_kept([entry for entry in lines if entry["policy"] == "full"])


def bench():
    return [
        dict(prompt_tokens=n, policy=p, read_seconds=n * (i + 1) / 1e4, peak_bytes=(n + i) << 20, cache_bytes=1)
        for i, p in enumerate(("unpatched", "take", "snapkv"))
        for n in (65536, 1024, 4096)
    ]


def test_speed():
    figure = plot.speed(bench())
    for axes, unit in zip(figure.axes, (1e-4, 1), strict=True):
        got = {entry.get_label(): entry.get_xydata().tolist() for entry in axes.lines}
        assert list(got) == ["take", "snapkv", "unpatched"]
        for i, name in enumerate(("unpatched", "take", "snapkv")):
            want = [[n, n * (i + 1) * unit if unit < 1 else n + i] for n in (1024, 4096, 65536)]
            assert got[name] == [pytest.approx(point) for point in want]
        assert axes.get_ylabel().endswith((", s", ", MiB"))
    boxes_apart(figure)


def written(path, lines):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in ({"settings": {}}, *lines)))
    return str(path)


def diagnosis(layers=3):
    numbers = [dict(recall=0.1 * i, top16=0.2, output_error=0.5, attention_cosine=0.9) for i in range(layers)]
    run = dict(layers=numbers, layer_overlap=[[1.0 if i == j else 0.25 for j in range(layers)] for i in range(layers)])
    full = [dict(sparsity=0.1, fastcaote_spearman=0.99)] * layers
    return dict(command="diagnose", runs=dict(take=run, snapkv=run), overlap={}, full_cache=full)


def test_layers():
    figure = plot.layers(diagnosis())
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[0, 0.1, 0.2]] * 2
    assert len(figure.axes) == 6 and len(figure.axes[5].lines) == 1
    panels = plot.overlap(diagnosis()).axes
    assert [panel.get_title() for panel in panels[:2]] == ["take", "snapkv"]
    assert sorted({text.get_text() for text in panels[0].texts}) == ["100", "25"]


@pytest.mark.quick(kind="slots")
@pytest.mark.parametrize("kind", ["budget", "heatmap", "slots", "speed", "layers", "overlap"])
def test_command(tmp_path, capsys, kind):
    file, out, more = tmp_path / "results.jsonl", tmp_path / "figure.png", []
    if kind == "speed":
        file.write_text("a table\n" + json.dumps({"command": "bench", "rows": bench()}) + "\n")
    elif kind in ("layers", "overlap"):
        file.write_text("a table\n" + json.dumps(diagnosis()) + "\n")
    else:
        written(file, results())
        more = ["--budgets", "48", "--mode", "aware"]
    assert main(["plot", str(file), "--kind", kind, "--out", str(out), *more]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["out"] == str(out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--policies tak", "no results of policy tak; there are oracle, snapkv, take"),
        ("--budgets 50", "no results of budget 50; there are 256, 48, 64"),
        ("--tasks full", "no results of task full; there are facts, needle"),
        ("--tasks facts", "tags length and depth"),
        ("--out figure.docx", "--out figure.docx: give a name that ends in .png, .svg or .pdf"),
        ("--out nowhere/figure.png", "there is no folder nowhere"),
    ],
)
def test_mistakes_are_named(tmp_path, capsys, words, message):
    file = tmp_path / "results.jsonl"
    written(file, [] if "--out" in words else results())  # a path is checked before the results are read
    assert main(["plot", str(file), "--kind", "heatmap", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_policies_of_a_diagnosis(tmp_path, capsys, monkeypatch):
    file, drawn = tmp_path / "out.txt", []
    file.write_text(json.dumps(diagnosis(30)))
    monkeypatch.setattr(plot, "overlap", lambda found, draw=plot.overlap: drawn.append(draw(found)) or drawn[-1])
    run = ["plot", str(file), "--kind", "overlap", "--out", str(tmp_path / "figure.png")]
    assert main([*run, "--policies", "take", "h2o"]) == 0
    assert [panel.get_title() for panel in drawn[0].axes] == ["take", ""]  # and the colour bar
    assert max(drawn[0].get_size_inches()) < 6, "thirty layers fit a page"
    assert main([*run, "--policies", "h2o"]) == 2
    assert "no results of policy h2o; there are snapkv, take" in capsys.readouterr().err
    assert main([*run, "--budgets", "48"]) == 2
    assert "--budgets selects results of `kvevict eval`, not of overlap; leave it out" in capsys.readouterr().err


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    file = written(tmp_path / "results.jsonl", results())
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", file, "--kind", "budget"]) == 2
    assert "pip install 'kvevict[plot]'" in capsys.readouterr().err


def test_without_results(tmp_path, capsys):
    assert main(["plot", str(tmp_path / "none"), "--kind", "speed"]) == 2
    assert "does not exist" in capsys.readouterr().err
