"""`kvevict papers`: cells are what they say, other tables go on after a mistake, and nothing is measured twice."""

import csv
import json
import math
from types import SimpleNamespace

import pytest
import torch
from toy_task import line

import kvevict
from kvevict.cli import main
from kvevict.lab.evaluate.protocols import words
from kvevict.lab.evaluate.runs import RunSpec, policy_for
from kvevict.lab.papers import PAPERS, Found, Paper, Table, Value, numbers, scores, write
from kvevict.lab.papers.run import chosen, lacking
from kvevict.lab.papers.run import run as make
from kvevict.lab.papers.scores import value
from kvevict.lab.papers.speed import theory

SMALL = ["--lengths", "200", "--cases", "1"]


def run(tmp_path, capsys, *argv):
    code = main(["papers", *argv, "--out", str(tmp_path)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def cells(path):
    return {(row["row"], row["column"]): row for row in csv.DictReader(path.open())}


@pytest.mark.quick
def test_numbers():
    assert numbers("""
           H2O  Snap KV
        2k  1.5  -2e-4
        4 k  -   3
    """) == {("2k", "H2O"): 1.5, ("2k", "Snap KV"): -2e-4, ("4 k", "Snap KV"): 3}
    with pytest.raises(ValueError, match="row '2k' has 1 numbers, the table 2 columns"):
        numbers("a  b\n2k  1")


@pytest.mark.quick
@pytest.mark.parametrize("name", PAPERS)
def test_every_table_is_one(name):
    """Policies exist, names are unique, and the paper's numbers can be read."""
    paper = PAPERS[name]
    assert len({table.name for table in paper.tables} | paper.cannot.keys()) == len(paper.tables) + len(paper.cannot)
    for table in paper.tables:
        assert all(table.printed().values()) or not table.paper
        for cell in table.cells().values():
            if cell.get("policy", "full") != "full":
                policy = cell["policy"].format(**words(cell.get("budget", 128), 30, draft="folder"))
                assert policy_for(RunSpec(policy, cell.get("budget", 128), cell.get("chunk"), "known"), 4096, (0,))


def test_similarity(tmp_path, capsys):
    """Against a count of the slots; an unknown table is named, and a second call reads what the first one wrote."""
    code, out, _ = run(tmp_path, capsys, "chunkkv", "--quick", *SMALL, "--only", "table2", "table99")
    assert code == 0 and "table99" in out and "there is no such table; there are table2" in out
    told = json.loads(out.splitlines()[-1])
    assert set(told["tables"]) == {"table2"} and set(told["left_out"]) == {"table99"}
    found = cells(tmp_path / "table2.csv")
    assert found["LLaMA-3-8B", "ChunkKV"]["paper"] == "57.74" and found["this model", "ChunkKV"]["n"] == "3"
    before = (tmp_path / "measured/table2.json").stat().st_mtime_ns
    assert run(tmp_path, capsys, "chunkkv", "--quick", *SMALL, "--only", "table2")[0] == 0
    assert (tmp_path / "measured/table2.json").stat().st_mtime_ns == before
    assert cells(tmp_path / "table2.csv") == found
    code, _, err = run(tmp_path, capsys, "chunkkv", "--quick", "--lengths", "300", "--only", "table2")
    assert code == 2 and "lengths was [200], is [300]" in err and "give another --out" in err


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name, only, cell", [
    ("take", ["fig4", "table2"], ("TAKE", "NIAH")), ("edie", ["table4", "table5"], ("w/ cd", "NIAH")),
    ("chunkkv", ["table12", "table13"], ("ChunkKV", "facts")),
    ("lookaheadkv", ["table1", "table8", "fig4a"], ("160 tokens", "LookaheadKV")),
    ("caote", ["table6", "table7", "fig2"], ("6k", "H2O+CAOTE")),
])  # fmt: skip
def test_tables_of_each(name, only, cell, tmp_path, capsys):
    code, out, err = run(tmp_path, capsys, name, "--quick", "--lengths", "160", "--cases", "1", "--only", *only)
    told = json.loads(out.splitlines()[-1])
    assert code == 0 and {*told["tables"]} == {*only} and told["left_out"] == {}, err
    found = [cells(tmp_path / f"{table}.csv") for table in only]
    assert any(cell in each for each in found), found
    for each in found:
        for row in each.values():
            assert row["ours"] == "" or math.isfinite(float(row["ours"])), row
            assert row["low"] == "" or float(row["low"]) <= float(row["ours"]) <= float(row["high"])
    before = (tmp_path / "README.md").read_text()
    assert run(tmp_path, capsys, name, "--quick", "--lengths", "160", "--cases", "1", "--only", *only)[0] == 0
    assert (tmp_path / "README.md").read_text() == before
    assert [cells(tmp_path / f"{table}.csv") for table in only] == found


def test_responses_of_a_smaller_model(tmp_path, capsys):
    """LookaheadKV table 8: the model itself as the smaller one gives equal responses; without one a note says so."""
    usual = ["lookaheadkv", "--quick", *SMALL, "--only", "table8", "--dtype", "bfloat16"]
    assert run(tmp_path / "own", capsys, *usual, "--draft", kvevict.small_llama())[0] == 0
    found = cells(tmp_path / "own/table8.csv")
    assert all(float(found[row, "smaller model"]["ours"]) == pytest.approx(100) for row in ("Recall", "Tau"))
    assert all(float(found["Tau", f"T = {t}"]["ours"]) < 100 for t in (0.6, 0.8))
    assert run(tmp_path / "none", capsys, *usual)[0] == 0
    assert cells(tmp_path / "none/table8.csv")["Tau", "smaller model"]["ours"] == ""
    assert "give one by --draft" in (tmp_path / "none/table8.md").read_text()


@pytest.mark.quick
def test_computed_costs():
    """LookaheadKV's table 3 is within 1.5 % of the paper's. LAQ's drafts, 6 %: they read less than the paper counts."""
    (table,) = (table for table in PAPERS["lookaheadkv"].tables if table.name == "table3")
    found, (printed,) = theory(None, table).cells, table.printed().values()
    assert len(printed) == 4 * 19
    for place, number in printed.items():
        near = 0.06 if place[0].endswith("LAQ") else 0.015
        assert found[place].mean == pytest.approx(number, rel=near, abs=0.02), place


@pytest.mark.quick
def test_a_model_that_lacks_something():
    table = Table("fig7", "", lambda: None, {}, {}, layers=4, kv_heads=2)
    made = lambda layers, heads: SimpleNamespace(layers=layers, kv_heads=heads)  # noqa: E731
    assert lacking(made(3, 2), table) == "it needs 4 layers that evict, the model has 3"
    assert lacking(made(4, 1), table) == "it needs 2 kv heads, the model has 1"
    assert lacking(made(4, 2), table) == ""


@pytest.mark.quick
def test_a_table_that_fails(tmp_path):
    """The other tables go on."""

    def full(session, table):
        raise torch.OutOfMemoryError("CUDA out of\nmemory")

    measures = (full, lambda *_: Found({("a", "b"): Value(1.0)}), lambda *_: Found({}))
    tables = [Table(f"table{n}", "", measure, {}, {}) for n, measure in enumerate(measures)]
    session = SimpleNamespace(
        name="m", out=tmp_path, layers=2, kv_heads=2, texts=1, about={}, notes=[], bar=None, step=lambda count: None,
        prompts=lambda count: [torch.zeros(1, 8, dtype=torch.long)], model=SimpleNamespace(generate=lambda *_, **__: 0),
    )  # fmt: skip
    made, failed = make(session, Paper("X", tuple(tables), {"table9": "why"}), [])
    assert list(made) == ["table1"] and (tmp_path / "table1.csv").exists()
    assert failed == {"table0": "CUDA out of memory", "table2": "no cell of it can be measured"}
    assert "- table0: CUDA out of memory\n" in (tmp_path / "README.md").read_text()


@pytest.mark.quick
def test_values():
    """Of four cases, by hand: per cent, per cent of the full cache's score above it, perplexity above the full one."""
    own, full = ([line("x", score, id=i) for i, score in enumerate(each)] for each in ((1, 0, 1, 0), (1, 1, 1, 0)))
    assert value(own, full, "").mean == 50 and value(own, full, "").n == 4
    gap = value(own, full, "gap")
    assert gap.mean == pytest.approx(100 * -0.25 / 0.75) and gap.low < gap.mean < gap.high
    own, full = ([line("x", x, id=i, metric="perplexity") for i, x in enumerate(each)] for each in ((2, 3), (1, 2)))
    assert value(own, full, "").mean == pytest.approx(math.exp(2.5))
    assert value(own, full, "difference").mean == pytest.approx(math.exp(2.5) - math.exp(1.5))
    assert value(own[:1], full[:1], "").low is None


@pytest.mark.quick
def test_files():
    """A row that only the paper has, a cell that only we have, a cell of both; a heat map's cells are in the CSV."""
    table = Table(
        "table1",
        "Tasks. More",
        lambda: None,
        {},
        {},
        paper={
            "8B": """
             a    b
        row  1.5  -
        old  2    3"""
        },
    )
    found = Found(
        {("row", "a"): Value(12.345, 10, 14, 9), ("row", "b"): Value(1)}, {"m": {("0", "64"): 50.0}}, ["Why."]
    )
    text = write.as_markdown(table, found, drawn=False)
    assert "| row | 12.3 [10, 14] (1.50) | 1 |" in text and "| old | (2) | (3) |" in text
    assert "n = 1 to 9; in square brackets the 95 % interval; in parentheses the paper's number (8B)." in text
    assert text.endswith("Why.\n")
    rows = list(csv.reader(write.as_csv(table, found).splitlines()))
    assert rows[0] == ["row", "column", "ours", "low", "high", "n", "paper 8B"]
    assert ["row", "a", "12.345", "10", "14", "9", "1.5"] in rows and ["old", "b", "", "", "", "", "3.0"] in rows
    assert ["map m: 0", "64", "50.0", "", "", "", ""] in rows


@pytest.mark.quick
def test_pictures():
    """Rows that name a method and a length are drawn along the lengths, a colour per method; rows that only the paper
    has are left out, and a title ends at the end of a sentence."""
    pytest.importorskip("matplotlib")
    printed = """
                       seconds
        A, 256 tokens  1
        C, 64k         2"""
    table = Table("fig1", "Slots of eq. 7. More", lambda: None, {}, {}, kind="panels", paper={"": printed})
    cells = {(f"{name}, {n} tokens", column): Value(n, n - 1, n + 1, 3)
             for name in "AB" for n in (256, 512) for column in ("seconds", "MiB")}  # fmt: skip
    figure = write.picture(table, Found(cells))
    assert [axis.get_title() for axis in figure.axes] == ["seconds", "MiB"]
    for axis in figure.axes:
        assert [text.get_text() for text in axis.get_xticklabels()] == ["256 tokens", "512 tokens"]
        assert [list(each.lines[0].get_ydata()) for each in axis.containers] == [[256, 512]] * 2
    assert [text.get_text() for text in figure.legends[0].texts] == ["A", "B", write.HOLLOW]
    assert write.title(table) == "fig1: Slots of eq. 7"


@pytest.mark.quick
def test_records(monkeypatch):
    """With --data a column for each task of the records, and as many cases as they have."""
    tasks = ["lcc"] * 5 + ["trec"]
    monkeypatch.setattr(scores, "records", lambda data: [dict(task=task) for task in tasks])
    session = SimpleNamespace(data="folder", lengths=(512,), cases=1, bundled=True, haystack=None)
    columns = scores.expanded(session, {"{task}": {}}, "answers")
    assert columns == {"lcc": dict(task="lcc"), "trec": dict(task="trec"), "average": {}}
    assert scores.Group("answers", None).size(session) == 2 + 1  # two cases of each task, and trec has one


def test_only_unknown_tables():
    with pytest.raises(ValueError, match="--only fig99: there is no such table"):
        chosen(PAPERS["chunkkv"], ["fig99"])
