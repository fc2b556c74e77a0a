"""`kvevict papers`: cells are what they say, other tables go on after a mistake, and nothing is measured twice."""

import csv
import json

import pytest

from kvevict.cli import main
from kvevict.lab.evaluate.protocols import words
from kvevict.lab.evaluate.runs import RunSpec, policy_for
from kvevict.lab.papers import PAPERS, numbers
from kvevict.lab.papers.run import chosen

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


def test_only_unknown_tables():
    with pytest.raises(ValueError, match="--only fig99: there is no such table"):
        chosen(PAPERS["chunkkv"], ["fig99"])
