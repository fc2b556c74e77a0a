"""Papers' protocols: their comparisons, and the verdicts."""

import json
import random
import statistics
from pathlib import Path

import pytest
import tiny
from toy_task import tokenizer

from kvevict.cli import main
from kvevict.lab.evaluate import claims, protocols
from kvevict.lab.evaluate.results import read
from kvevict.lab.evaluate.run import Evaluation, evaluate
from kvevict.models import families

QUANTILES = {9: 2.2622, 19: 2.0930, 39: 2.0227}  # Student's, two-sided 95 %, by degrees of freedom, from tables


@pytest.mark.parametrize("name", protocols.PROTOCOLS)
def test_every_policy_is_one(name):
    """And both sides of a claim differ."""
    plan = Evaluation((), (1024,), (), (64, 128), modes=("known",), protocol=name)
    assert plan.runs(layers=30)[0].policy == "full"
    for claim, sides in protocols.pairs(name, (64, 128), "known", 30, draft="folder"):
        assert len(sides) == (claim.least <= 64) + (claim.least <= 128), claim
        assert all(better != than for better, than in sides), claim


def test_only_what_can_be_told_apart():
    """Of three layers a quarter and a half are one; 64 slots hold no probe of 64 tokens."""
    names = lambda **about: [claim.says for claim, _ in protocols.pairs("take", **about)]  # noqa: E731
    many = names(budgets=(64, 128, 256), mode="known", layers=30)
    few = names(budgets=(64,), mode="known", layers=3)
    assert set(many) - set(few) == {
        "table 2: delay helps", "table 2: delay without probe neither helps nor harms",
        "figure 7: B_warmup of 20 B beats B", "figure 7: W = L/4 beats L/2",
        "ours: a probe of 64 tokens is about as good as one of 32",
        "ours: a probe of 128 tokens is about as good as one of 32",
    }  # fmt: skip
    plans = {claim.says: sides for claim, sides in protocols.pairs("take", (64, 128, 256), "known", 30)}
    assert len(plans["ours: a probe of 64 tokens is about as good as one of 32"]) == 2


def test_claims_of_drafts_need_one():
    without, given = (protocols.runs("lookaheadkv", (64,), "known", 4, None, draft) for draft in (None, "folder"))
    assert {run.policy for run in given} - {run.policy for run in without} == {
        "speckv:draft_model=folder", "laq:n_d=32,window=32,draft_keys=true,draft_model=folder",
    }  # fmt: skip


def test_an_adapter_is_named_to_all_that_read_it():
    runs = protocols.runs("lookaheadkv", (64,), "known", 4, "folder")
    named = [run.policy for run in runs if "adapter=folder" in run.policy]
    assert named == [
        "lookahead:adapter=folder", "lookahead:window=32,adapter=folder", "edie:rows=lookahead,adapter=folder",
    ]  # fmt: skip


def test_layers_are_those_that_evict(tmp_path):
    """Halves and quarters of Gemma 3 are of its layers with full attention."""
    net = tiny.model("gemma3")
    plan = Evaluation(("toy",), (120,), (), (64,), modes=("known",), cases=1, protocol="chunkkv")
    evaluate(net, tokenizer(), plan, tmp_path / "lines.jsonl")
    settings, made = read(tmp_path / "lines.jsonl")
    evicts = families.layer_kinds(net.config).count(families.FULL_ATTENTION)
    assert settings["layers"] == evicts < net.config.num_hidden_layers
    assert f'chunkkv:select_by_layer=[[{max(1, evicts // 2)},null,"token"]]' in {line["policy"] for line in made}


@pytest.mark.parametrize("n", [10, 20, 40])
def test_interval_is_student_s(n):
    values = [random.gauss(0.1, 0.3) for _ in range(n)]
    found, half = claims.difference(values), QUANTILES[n - 1] * statistics.stdev(values) / n**0.5
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=1e-4)
    assert (found.won, found.lost) == (sum(x > 0 for x in values), sum(x < 0 for x in values))


def lines(task, metric, scores):
    """scores: {(policy, budget): a number per case}"""
    return [dict(task=task, id=str(i), seed=0, policy=policy, budget=budget, chunk_size=None, score=score,
                 metric=metric, mode=None if policy == "full" else "known")
            for (policy, budget), numbers in scores.items() for i, score in enumerate(numbers)]  # fmt: skip


def told(scores, metric="exact", budgets=(64,), **options):
    claim = protocols.Claim("x", "a", "b", **options)
    sides = [claim.runs(budget, "known", {}) for budget in budgets]
    of = metric if metric in claims.UNITS else claims.ANSWERS
    found = claims.scores(lines("t", metric, scores), of)
    apart = claims.compared(found, sides, of)
    return apart, apart.verdict((claim.margin or 0) * claims.usual(found, sides, of))


def test_verdicts():
    half, none, all_ = [0, 1] * 20, [0] * 40, [1] * 40
    assert told({("a", 64): all_, ("b", 64): half})[1] == "yes"
    assert told({("a", 64): half, ("b", 64): all_})[1] == "no"
    assert told({("a", 64): half, ("b", 64): half[::-1]})[1] == "open"
    assert told({("a", 64): none, ("b", 64): none}, margin=0.5)[1] == "open"  # no case differs
    assert told({("a", 64): all_[:9], ("b", 64): none[:9]})[1] == "open"  # too few
    assert told({("full", None): all_, ("a", 64): [0, *all_[1:]], ("b", 64): all_}, margin=0.2)[1] == "yes"
    assert told({("full", None): all_, ("a", 64): half, ("b", 64): all_}, margin=0.2)[1] == "no"
    nearer = {("a", 64): [0.1 + i / 1e4 for i in range(40)], ("b", 64): [0.3] * 40}
    apart, verdict = told(nearer, "fidelity")
    assert verdict == "yes" and apart.mean > 0 and apart.won == 40
    likelier = {("full", None): [2.0] * 40} | {run: [2 + x for x in numbers] for run, numbers in nearer.items()}
    assert told(likelier, "perplexity")[0].mean == pytest.approx(apart.mean)
    likelier["a", 64] = [2.32 + i / 1e4 for i in range(40)]  # farther from the full cache, by 7 % of the loss
    assert [told(likelier, "perplexity", margin=margin)[1] for margin in (0.05, 0.1)] == ["no", "yes"]


def test_a_case_counts_once_over_its_budgets():
    scores = {("a", 64): [1] * 10, ("b", 64): [0] * 10, ("a", 128): [1] * 10, ("b", 128): [1] * 10}
    apart = told(scores, budgets=(64, 128))[0]
    assert apart.cases == 10 and apart.mean == 0.5


def test_command(tmp_path, capsys):
    folder, _ = tiny.save(tmp_path / "model")
    out = str(tmp_path / "results.jsonl")
    run = ["eval", "--protocol", "chunkkv", "--model", folder, "--out", out, "--tasks", "fidelity", "--lengths", "200",
           "--budgets", "48", "--cases", "2"]  # fmt: skip
    assert main(run) == 0
    printed = capsys.readouterr().out
    assert "its table of chunk sizes: 10 beats 3: chunkkv against chunkkv:c=3\n" in printed and "nats of KL" in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 120  # the last line is JSON
    rows = [row.split() for row in printed.splitlines() if " nats of KL " in row]
    assert rows and all(row[5] == "[few]" and row[8:] == ["2", "open"] for row in rows)  # of two cases
    settings, *found = map(json.loads, Path(out).read_text().splitlines())
    assert settings["settings"]["protocol"] == "chunkkv" and settings["settings"]["layers"] == 4
    assert {line["policy"] for line in found} >= {"full", "chunkkv", "chunkkv:c=3", "snapkv:pool=none"}
    hybrid = 'chunkkv:select_by_layer=[[2,null,"token"]]'  # of the model's four layers
    assert hybrid in {line["policy"] for line in found}
    assert main([*run[:1], "--out", out, "--table-only"]) == 0
    assert capsys.readouterr().out == printed
    settings["settings"]["protocol"] = None  # as if the policies had been named
    Path(out).write_text("".join(json.dumps(each) + "\n" for each in [settings, *found]))
    assert main([*run[:1], "--out", out, "--table-only"]) == 0
    plain = capsys.readouterr().out.splitlines()
    told = next(at for at, row in enumerate(plain) if row.startswith("Ran: "))
    assert plain[:told] == printed.splitlines()[:told] and "its table of chunk sizes" not in " ".join(plain)
    assert main([*run[:3], "--out", out, "--table-only"]) == 0
    again = capsys.readouterr().out
    assert again.partition("ChunkKV (Liu")[2] == printed.partition("ChunkKV (Liu")[2]


@pytest.mark.parametrize("arguments, said", [
    (["--protocol", "takes"], "unknown protocol 'takes'"),
    (["--protocol", "take", "--policies", "h2o"], "--policies and --protocol exclude each other"),
    (["--protocol", "take", "--chunk-size", "64"], "--chunk-size and --protocol exclude each other"),
    (["--protocol", "take", "--question", "found"], "--question and --protocol exclude each other"),
    (["--protocol", "take", "--budgets", "0.1"], "--budgets 0.1: a protocol's budgets are whole numbers of slots"),
])  # fmt: skip
def test_refused(arguments, said, tmp_path, capsys):
    assert main(["eval", "--out", str(tmp_path / "r.jsonl"), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
