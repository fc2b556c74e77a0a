"""`fidelity` against distributions worked out here in float64, sampling, and what tables say of both."""

import re

import pytest
import torch
from tiny import model as tiny_model
from toy_task import NORMAL, line, plan, results, tokenizer, toy, untimed

from kvevict.answering import writing
from kvevict.lab.evaluate import summary, table
from kvevict.lab.evaluate.tasks import FIDELITY, RESPONSE, TASKS, TaskSettings, find

TASK = "fidelity/toy"


def cut(net, ids, response, stays):
    """log-probabilities [R, vocabulary] of a response after a prompt of whose cache the slots `stays` are left."""
    with torch.no_grad():
        out = net(torch.tensor([ids]), logits_to_keep=1)
        for layer in out.past_key_values.layers:
            layer.keys, layer.values = layer.keys[:, :, stays], layer.values[:, :, stays]
        places = torch.arange(len(ids), len(ids) + len(response) - 1)[None]
        rest = net(torch.tensor([response[:-1]]), past_key_values=out.past_key_values, position_ids=places).logits
    return torch.cat([out.logits[0], rest[0]]).double().log_softmax(1)


def test_against_float64(tmp_path):
    """StreamingLLM keeps 4 sinks and the end, so its cache is the full one with the middle cut out."""
    net = tiny_model()
    net.lm_head.weight.data.mul_(20)
    usual = dict(policies=("streaming",), budgets=(6,), modes=("known",), cases=3)
    lines, same = results(net, tmp_path / "r", tasks=(TASK,), **usual), []
    full, kept = ([x for x in lines if (x["policy"] == "full") == whole] for whole in (True, False))
    for case, truth, found in zip(toy(plan(cases=3).groups(tokenizer())[0][1]), full, kept, strict=True):
        ids, response = tokenizer()(case.context + case.question)["input_ids"], truth["response"]
        inputs = dict(inputs=torch.tensor([ids]), attention_mask=torch.ones(1, 60), max_new_tokens=RESPONSE)
        assert response == net.generate(**inputs, do_sample=False)[0, 60:].tolist() and len(response) == RESPONSE
        p = cut(net, ids, response, [*range(60)])
        q = cut(net, ids, response, [*range(4), 58, 59])
        want = (p.exp() * (p - q)).sum(1).mean().item()
        assert want > 1e-3 and found["score"] == pytest.approx(want, rel=1e-3)
        same.append((p.argmax(1) == q.argmax(1)).double().mean().item())
        assert found["same"] == same[-1]
        assert (truth["score"], truth["same"]) == (0, 1)
        assert found["task"] == TASK and found["id"] == f"fidelity/{case.id}" and found["metric"] == FIDELITY
    assert min(same) < 1


def test_nothing_evicted_is_the_full_cache(net, tmp_path):
    tasks = TASK, "fidelity/toy-perplexity"
    lines = results(net, tmp_path / "r", tasks=tasks, budgets=(100,), chunk_sizes=(None, 20))
    assert len(lines) == 2 * 2 * (1 + 2 * 2 * 2)
    assert all(abs(x["score"]) < 1e-6 and x["same"] == 1 for x in lines)


def test_passages_of_the_haystack(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"Sentence {i} is here." for i in range(90)))
    cases = list(TASKS[FIDELITY](TaskSettings(tokenizer(), 200, 3, haystack=text)))
    assert len({case.context for case in cases}) == 3
    for case in cases:
        assert case.context.startswith("Sentence ") and 170 < len(case.context) <= 200
        assert (case.question, case.tags) == ("", {"length": 200, "chat": False})
    again = next(find("fidelity/fidelity")(TaskSettings(tokenizer(), 200, 1, haystack=text)))
    assert again.context == cases[0].context


@pytest.mark.parametrize("top_p, left", [(1.0, [0, 1, 2, 3]), (0.9, [1, 2])])
def test_samples_have_the_right_shares(top_p, left):
    row = torch.tensor([0.0, 1.0, 2.0, -1.0])
    choose = writing.Sampling(0.7, top_p, seed=1).chooser()
    drawn = torch.tensor([choose(row) for _ in range(8000)]).bincount(minlength=4) / 8000
    want = torch.zeros(4)
    want[left] = (row[left] / 0.7).softmax(0)
    torch.testing.assert_close(drawn, want, atol=0.03, rtol=0)
    assert writing.Sampling().chooser()(row) == 2


def test_runs_share_their_noise(net, tmp_path):
    changes = dict(policies=("knorm",), budgets=(100,), temperature=1.0, seeds=(0, 1), cases=1, modes=("known",))
    lines = results(net, tmp_path / "hot", **changes)
    greedy = results(net, tmp_path / "cold", **changes | dict(temperature=None))
    assert untimed(lines) == untimed(results(net, tmp_path / "again", **changes))
    said = [[x["prediction"] for x in found] for found in (lines, greedy)]
    for found in said:
        assert found[0] == found[1] and found[2] == found[3]  # full, and a policy that keeps everything
    assert said[0][0] != said[1][0] and said[0][0] != said[0][2]


def near(policy, score, same, id):
    return line(policy, score, "known", id, 16, TASK, FIDELITY) | dict(same=same)


def test_cells_by_hand():
    lines = [near("take", 0.1, 1.0, 0), near("take", 0.3, 0.5, 1)]
    cell = summary.summarize(lines)["take", 16, None][TASK, (), "known"]
    assert (cell.mean, cell.error, cell.same, cell.same_error) == pytest.approx((0.2, 0.1, 0.75, 0.25))
    assert (cell.low, cell.high) == pytest.approx((0.2 - 0.1 * NORMAL, 0.2 + 0.1 * NORMAL))
    text = table.render(lines)
    assert "0.200 ±0.100 75.0 ±25.0%" in text and "fidelity: mean KL" in text
    assert "fidelity" not in table.render([line("full", 1)])


def test_averages_by_hand():
    lines = [line("full", 1, id=i) for i in range(2)] + [line("full", 0.6, task="other"), near("take", 0.1, 1.0, 0)]
    lines += [line("take", s, "known", i, 16) for i, s in enumerate((0, 1))]
    lines += [line("take", 0.3, "known", 0, 16, "other"), line("h2o", 1, "known", 0, 16)]
    lines.append(line("take", 2.0, "known", 0, 16, "text", "perplexity"))
    means = summary.averages(summary.summarize(lines), "known")
    assert list(means) == [("full", None, None), ("take", 16, None)]
    assert means["full", None, None].mean == pytest.approx(0.8)
    assert (means["take", 16, None].mean, means["take", 16, None].share) == pytest.approx((0.4, 0.5))
    assert re.search(r"^take +16 +whole +40\.0 50% ", table.render(lines), re.MULTILINE)
    assert not summary.averages(summary.summarize(lines[:2]), "known")
