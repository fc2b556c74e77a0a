"""`kvevict.calibrate`: bounds are exact, promises hold in simulation, and a setting that is found can be used."""

import json
import math

import numpy as np
import pytest
from scipy import stats
from tiny import byte_tokenizer, model, save

import kvevict
from kvevict.answering import calibration
from kvevict.answering.calibration import allowed, bound
from kvevict.cli import main
from kvevict.engine.hook.installed import plan_of
from kvevict.lab.evaluate.runs import policy_for, specs

WAYS = dict(policies=["snapkv:window=4"], budgets=[128, 64, 32, 16], chunk_size=32, max_new_tokens=4)


@pytest.fixture(scope="module")
def net():
    return model(vocab_size=256, bos_token_id=None, pad_token_id=None)


def prompts(count, length=80, seed=0):
    rng = np.random.default_rng(seed)
    return ["".join(map(chr, rng.integers(97, 123, length))) for _ in range(count)]


@pytest.mark.parametrize("count, confidence", [(1, 0.5), (20, 0.9), (59, 0.95), (300, 0.975)])
def test_bounds_are_clopper_and_pearsons(count, confidence):
    for differing in range(0, count, max(1, count // 7)):
        want = stats.beta.ppf(confidence, differing + 1, count - differing)
        assert bound(differing, count, confidence) == pytest.approx(want, abs=1e-9)


def test_prompts_that_are_needed():
    for agree, needed in ((0.95, [59, 93, 124, 153]), (0.9, [29, 46, 61, 76])):
        for differing, count in enumerate(needed):
            assert allowed(count, agree, 0.95) == differing
            if differing:
                assert allowed(count - 1, agree, 0.95) == differing - 1
    with pytest.raises(ValueError, match=r"58 prompts are too few .* give 59 or more"):
        allowed(58, 0.95, 0.95)


@pytest.mark.parametrize("candidates", [1, 3])
def test_a_promise_is_wrong_as_seldom_as_it_says(candidates):
    """10,000 draws of 200 prompts; the smallest budget that holds the promise is just above it."""
    rates, agree, draws = {64: 0.01, 32: 0.04, 16: 0.1001, 8: 0.3}, 0.9, 10_000
    rng = np.random.default_rng(0)
    most = allowed(200, agree, 1 - 0.05 / candidates)
    wrong = 0
    for _ in range(draws):
        found = []
        for _ in range(candidates):
            last = None
            for budget, rate in rates.items():
                if rng.binomial(200, rate) > most:
                    break
                last = budget
            found.append(last)
        wrong += any(last is not None and rates[last] > 1 - agree for last in found)
    assert 0.01 < wrong / draws <= 0.055


def test_the_smallest_budget_is_found_and_used(net, tmp_path):
    asked, words, file = prompts(30), byte_tokenizer(), tmp_path / "calibrated.json"
    result = kvevict.calibrate(net, words, asked, agree=0.9, **WAYS)
    assert [each.budget for each in result.tried] == WAYS["budgets"][: len(result.tried)]
    held = [each for each in result.tried if each.agreed is not None]
    assert held and result.tried[0].differing == 0 and result.found == held[-1]
    assert all(each.differing > allowed(30, 0.9, 0.95) for each in result.tried if each.agreed is None)
    for each in result.tried:  # the counts are those of generate
        differing = 0
        for text in asked:
            ids = words(text, return_tensors="pt").input_ids
            want = net.generate(ids, max_new_tokens=4, do_sample=False)
            with kvevict.evicting(net, "snapkv:window=4", budget=each.budget, chunk_size=32):
                differing += (net.generate(ids, max_new_tokens=4, do_sample=False) != want).any().item()
            if differing > allowed(30, 0.9, 0.95):
                break
        assert differing == each.differing
    result.save(file)
    kvevict.patch(net, str(file))
    policy = plan_of(net.model).policy
    kvevict.unpatch(net)
    (run,) = specs([str(file)], [7, 8], [None], ["known"])
    for each in (policy, policy_for(run, 100, ()).policy):
        assert (each.budget, each.chunk_size, each.rows.window) == (result.found.budget, 32, 4)


def test_a_killed_run_goes_on(net, tmp_path, monkeypatch):
    asked, words, file = prompts(30), byte_tokenizer(), tmp_path / "lines"
    want = kvevict.calibrate(net, words, asked, agree=0.9, file=file, **WAYS)
    lines = file.read_text().splitlines(keepends=True)
    done = len(lines) // 2
    file.write_text("".join(lines[:done]) + lines[done][:9])
    calls = []
    monkeypatch.setattr(calibration, "evicting", lambda *a, **b: calls.append(a) or kvevict.evicting(*a, **b))
    assert kvevict.calibrate(net, words, asked, agree=0.9, file=file, **WAYS) == want
    assert len(calls) == len(lines) - done
    assert kvevict.calibrate(net, words, asked, agree=0.9, file=file, **WAYS) == want
    assert len(calls) == len(lines) - done


def test_refusals(net, tmp_path):
    words = byte_tokenizer()
    for asked, error, match in (
        ([], ValueError, "too few"),
        (prompts(5), ValueError, "5 prompts are too few"),
        ([*prompts(60), "  "], ValueError, "prompt 61 is empty"),
        ([*prompts(60), 3], TypeError, "prompt 61 must be"),
        ([*prompts(60), "x" * 5000], ValueError, "prompt 61 takes 5000 tokens"),
    ):
        with pytest.raises(error, match=match):
            kvevict.calibrate(net, words, asked, **WAYS)
    for name in ("agree", "confidence"):
        with pytest.raises(ValueError, match="give agree and confidence below 1"):
            kvevict.calibrate(net, words, prompts(60), **WAYS | {name: 1})
    nothing = kvevict.Calibration(0.9, 0.95, 30, 4, [])
    with pytest.raises(ValueError, match="nothing to save"):
        nothing.save(tmp_path / "x.json")
    for text in ("{}", "[", '{"policy": 3, "budget": 1, "kv": "model", "chunk_size": null}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ValueError, match="not a file of `kvevict calibrate`"):
            kvevict.patch(net, str(tmp_path / "x.json"))
    with pytest.raises(ValueError, match=r"y\.json: No such file or directory; `kvevict calibrate` makes"):
        kvevict.patch(net, str(tmp_path / "y.json"))


def test_command(tmp_path, capsys):
    folder, _ = save(tmp_path / "model")
    lines = [json.dumps(dict(prompt=text)) for text in prompts(29)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    usual = f"calibrate {folder} --prompts {tmp_path}/p.jsonl --out {tmp_path}/c.json --agree 0.9".split()
    usual += ["--policies", "snapkv:window=4", "--budgets", "128", "--max-new-tokens", "2"]
    assert main([*usual, "--json"]) == 0
    told = capsys.readouterr().err
    assert (
        "29 prompts, 1 candidate: to promise 90.0% of equal answers at most 0 may differ here, of 46 prompts 1." in told
    )
    assert "29/29" in told  # answers, in the bar's last line
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["budget"] == 128 and math.isclose(found["calibration"]["tried"][0]["agreed"], 0.05 ** (1 / 29))
    (tmp_path / "p.jsonl").write_text("\n".join(lines[1:]))
    assert main([*usual[:1], "nowhere", *usual[2:]]) == 2  # before a model is loaded
    assert "28 prompts are too few" in capsys.readouterr().err
    (tmp_path / "p.jsonl").write_text('{"text": 3}')
    assert main(usual) == 2 and "line 1: give" in capsys.readouterr().err
