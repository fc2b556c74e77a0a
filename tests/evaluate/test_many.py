"""Many questions about one text: the cases, and that a shared read gives the same as separate reads."""

import json
import math
import operator
import re
from collections import Counter

import pytest
import torch
from tiny import model as tiny_model
from toy_task import line, tokenizer

from kvevict.cli import main
from kvevict.commands import number
from kvevict.lab.evaluate import intervals, run, summary, table
from kvevict.lab.evaluate.metrics import METRICS
from kvevict.lab.evaluate.results import read
from kvevict.lab.evaluate.run import Evaluation, evaluate
from kvevict.lab.evaluate.runs import FULL, reads_alone
from kvevict.lab.evaluate.tasks import TASKS, Case, TaskSettings
from kvevict.lab.evaluate.tasks.many import SAID


@TASKS.add("toy-many")
def toy_many(settings):
    """Two texts of three questions."""
    for text in range(2):
        rng = settings.rng("toy-many", text)
        context = "".join(rng.choice("abcdefgh .") for _ in range(settings.length))
        for i, answer in enumerate(("abc", "hg", "bad")):
            asked, id = f"\nwhere {'is ' * (i == 1)}{i}?", f"toy-many/{text}/{i}"
            yield Case("toy-many", id, context, asked, (answer,), "contains_any", 5, dict(text=text), likelihood=True)


def lines_of(net, out, policies=("streaming", "kvzip"), modes=("later",), batch_size=1, **changes):
    usual = dict(budgets=(0.25,), chunk_sizes=(None, 32), modes=modes, cases=2)
    plan = Evaluation(("toy-many",), (80,), policies, **usual | changes)
    evaluate(net, tokenizer(), plan, out, batch_size=batch_size)
    return read(out)[1]


def timeless(lines):
    """Lines by run and case, without the floats that one and two reads round differently."""
    about = ("id", "policy", "budget", "chunk_size", "mode")
    plain = ({k: v for k, v in x.items() if not k.endswith("_seconds") and k != "nats"} for x in lines)
    return {tuple(x[name] for name in about): x for x in plain}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.nightly)])
def test_one_read_for_all_questions(tmp_path, family, monkeypatch):
    """Answers, likelihoods and slots are those of a read per question; who knows the question still gets one."""
    net, reads = tiny_model(family), Counter()
    real = run.read
    monkeypatch.setattr(run, "read", lambda *a: reads.update([a[3].policy]) or real(*a))
    what = dict(policies=("streaming", "kvzip", "oracle"), modes=("known", "later"), chunk_sizes=(32,))
    shared = lines_of(net, tmp_path / "shared", **what)
    assert reads == dict(full=2, streaming=2, kvzip=2)
    monkeypatch.setattr(run, "reads_alone", lambda run: False)
    alone = lines_of(net, tmp_path / "alone", **what)
    once = [x for x in shared if "ask_seconds" in x]
    assert len(once) == 2 * 3 * 3 and all(x["ask_bytes"] > 0 and x["ask_seconds"] > 0 for x in once)
    nats = [{(*key, "nats"): x["nats"] for key, x in zip(timeless(lines), lines)} for lines in (shared, alone)]
    assert nats[0] == pytest.approx(nats[1], rel=1e-4)  # fp32 sums in another order, four layers deep
    shared, alone = timeless(shared), timeless(alone)
    for key, measured in shared.items():
        measured.pop("ask_bytes", None)
        if key[1] == "full":  # it read context and question in one pass
            measured, alone[key] = ({n: x[n] for n in ("prediction", "score")} for x in (measured, alone[key]))
        assert measured == alone[key]


@pytest.mark.parametrize("family, temperature", [("llama", None), ("llama", 2.0), ("gemma3", None)])
def test_questions_asked_together(tmp_path, family, temperature, monkeypatch):
    """Lines are those of questions asked one by one. Gemma's windows take questions of one length."""
    net, rows = tiny_model(family), []
    real = run.ask_together
    monkeypatch.setattr(run, "ask_together", lambda *a: rows.append(len(a[2])) or real(*a))
    what = dict(policies=("streaming", "kvzip", "kvzip:kv=int8"), chunk_sizes=(32,), temperature=temperature)
    alone = lines_of(net, tmp_path / "alone", **what)
    assert not rows
    both = lines_of(net, tmp_path / "together", batch_size=3, **what)
    assert rows == ([3] * 6 if family == "llama" else [2, 1] * 6)
    by = operator.itemgetter("id", "policy")
    one, other = ([line["nats"] for line in sorted(lines, key=by)] for lines in (both, alone))
    assert one == pytest.approx(other, rel=1e-3)
    assert timeless(both) == timeless(alone)


def test_likelihood_and_bytes(tmp_path):
    """Of the answer, by the unpatched model over the whole text: also of a policy that keeps all."""
    net, tok = tiny_model(), tokenizer()
    lines = lines_of(net, tmp_path / "r", ("knorm",), budgets=(1000,), chunk_sizes=(None,))
    cases = {case.id: case for case in toy_many(TaskSettings(tok, 80, 2))}
    for x in lines:
        case = cases[x["id"]]
        prompt, answer = (tok(text)["input_ids"] for text in (case.context + case.question, f" {case.answers[0]}"))
        with torch.no_grad():
            logs = net(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert x["nats"] == pytest.approx(-logs.gather(1, torch.tensor(answer)[:, None]).mean().item(), rel=1e-4)
        slots = len(tok(case.question)["input_ids"]) + 4  # the last of five tokens is not read
        assert x["ask_bytes"] == slots * 2 * 4 * 2 * 32 * 4 and x["cache_bytes"] == 80 * 2 * 4 * 2 * 32 * 4


def test_more_policies_go_to_the_same_file(tmp_path):
    net, out = tiny_model(), tmp_path / "r"
    first = lines_of(net, out, ("streaming",))
    text = out.read_bytes()
    out.write_bytes(text[: text.rindex(b"\n", 0, -1) - 7])  # cut in the middle of a text's questions
    both = lines_of(net, out, ("knorm",), budgets=(0.5,))
    assert Counter(x["policy"] for x in both) == dict(full=6, streaming=10, knorm=12)
    whole = timeless(lines_of(net, out, ("streaming",)))
    assert timeless(first).items() <= whole.items() and len(whole) == 6 + 12 + 12
    with pytest.raises(ValueError, match=r"other settings: .*lengths was"):
        evaluate(net, tokenizer(), Evaluation(("toy-many",), (70,), ("knorm",), (0.5,)), out)


@pytest.mark.parametrize("task", ["many", "many/paraphrased"])
def test_facts(words, task):
    """Every text has two questions of each kind; the words before the answer are the text's; depths are even."""
    cases = list(TASKS[task](TaskSettings(words, 900, 3, seed=5)))
    assert cases == list(TASKS[task](TaskSettings(words, 900, 3, seed=5)))
    assert len({case.context for case in cases}) == 3 and len({case.id for case in cases}) == len(cases)
    for text in range(3):
        mine = [case for case in cases if case.tags["text"] == text]
        assert Counter(case.tags["kind"] for case in mine) == dict.fromkeys(SAID, 2)
        for case in mine:
            assert case.question.endswith(case.opening) and case.one_line and case.likelihood
            said = f"{case.opening.removeprefix('Answer: ')} {case.answers[0]}"
            assert case.context.count(said) == 1
            assert case.context.index(said) / len(case.context) == pytest.approx(case.tags["depth"], abs=0.1)
            assert words.decode(words(case.answers[0])["input_ids"]).strip() == case.answers[0]
        assert len(re.findall("The key of the|The parcel for the", mine[0].context)) == 4
    assert all(len(words(case.context + case.question)["input_ids"]) <= 900 for case in cases)


def test_other_words_than_stated(words):
    """A paraphrased question names the fact's subject and shares no other word of five letters with the fact."""
    long = lambda text: set(re.findall(r"\w{5,}", text.lower()))  # noqa: E731
    for _, lines in SAID.values():
        for statement, question, other in lines:
            assert "{of}" in question and "{of}" in other and not long(statement) & long(other), other
    plain, other = (list(TASKS[task](TaskSettings(words, 900, 2, seed=5))) for task in ("many", "many/paraphrased"))
    assert [case.answers for case in plain] == [case.answers for case in other]
    assert not {case.question for case in plain} & {case.question for case in other}


def test_a_list_in_the_texts_order(words):
    """Twelve lockers at even depths; the right list scores 1, and each number of it a twelfth."""
    for case in TASKS["listed"](TaskSettings(words, 900, 3, seed=5)):
        found = re.findall(r"The parcel for the ([\w ]+) lies in locker (\d{5})\.", case.context)
        assert tuple(number for _, number in found) == case.answers and len({who for who, _ in found}) == 12
        places = [case.context.index(number) * 12 // len(case.context) for number in case.answers]
        assert all(abs(place - at) <= 1 for at, place in enumerate(places))
        lines = "\n".join(f"{at}. The parcel for the {who}: {number}" for at, (who, number) in enumerate(found, 1))
        score, whole = METRICS[case.metric], lines.removeprefix(f"1. The parcel for the {found[0][0]}: ")
        assert score(whole, case.answers) == 1 and score(whole[:40], case.answers) == pytest.approx(1 / 12)
        assert len(words(whole)["input_ids"]) < case.new_tokens and case.question.endswith(case.opening)
        assert len(words(case.context + case.question)["input_ids"]) <= 900


def test_books_of_one_s_own(tmp_path, words):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"The {name * 4} was there. " * 300)
    texts = {case.context for case in TASKS["many"](TaskSettings(words, 700, 12, haystack=tmp_path))}
    books = {re.search(r"The (a+|b+|c+) was", text)[1] for text in texts}
    assert len(texts) == 12 and len(books) > 1
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"haystack: .*none has no text"):
        list(TASKS["many"](TaskSettings(words, 700, 1, haystack=tmp_path / "none")))


def article(name, letters):
    return {"title": name, "paragraphs": [
        {"context": f"In {name} the {x} is {x * 3}. " * 4, "qas": [
            {"id": x, "question": f"What is {x}?", "answers": [{"text": x * 3, "answer_start": 0}]}]} for x in letters
    ]}  # fmt: skip


def test_benchmarks(tmp_path, words):
    file = tmp_path / "xquad.en.json"
    file.write_text(
        json.dumps({"data": [article("Rome", "abcdef"), article("Oslo", "ghijkl"), article("Bern", "mnopqr")]})
    )
    settings = TaskSettings(words, 300, 2, data=tmp_path)
    cases = list(TASKS["many/xquad"](settings))
    assert {case.tags["text"] for case in cases} == {0, 1} and all(case.answers[0] in case.context for case in cases)
    assert not {c.question for c in cases if c.tags["text"]} & {c.question for c in cases if not c.tags["text"]}
    with pytest.raises(ValueError, match="has too little text for 9 of 300 tokens; give fewer"):
        list(TASKS["many/xquad"](TaskSettings(words, 300, 9, data=tmp_path)))
    file.write_text('{"data": [{}]}')
    with pytest.raises(ValueError, match="is not in SQuAD's format"):
        list(TASKS["many/xquad"](settings))
    facts = [f"The lake {name} is {name.lower()} deep." for name in ("One", "Two", "Three", "Four")]
    pairs = [dict(Q=f"How deep is {fact[9:14]}?", A=fact[-9:], S=fact) for fact in facts]
    text = " ".join(" ".join([fact, "Nothing else is said of it."] * 3) for fact in facts)
    record = dict(input=text, qa_pairs=str(pairs))
    (tmp_path / "shortdep_qa.jsonl").write_text(json.dumps(record) + "\n")
    cases = list(TASKS["many/loogle"](TaskSettings(words, 110, 1, data=tmp_path)))
    assert 0 < len(cases) < 4 and len({case.context for case in cases}) == 1 and text.startswith(cases[0].context)
    (tmp_path / "shortdep_qa.jsonl").write_text('{"input": "x", "qa_pairs": "[1]"}\n')
    with pytest.raises(ValueError, match="is not LooGLE's shortdep_qa"):
        list(TASKS["many/loogle"](settings))


def test_tables():
    """Questions that the full cache answers count; the likelihood is compared over all, texts as clusters."""
    full = [line("full", s, id=i, text=i // 2) | dict(nats=0.5) for i, s in enumerate((1, 1, 1, 0))]
    nats = (0.5, 0.7, 1.1, 1.3)
    cut = [
        line("a", s, "later", i, 0.25, text=i // 2) | dict(nats=n) for i, (s, n) in enumerate(zip((1, 0, 1, 1), nats))
    ]
    costs = dict(read_seconds=2.0, cache_bytes=2**20, peak_cache_bytes=3 * 2**20, ask_seconds=0.5, ask_bytes=512)
    lines = [x | costs for x in full + cut]
    cell = summary.summarize(lines)["a", 0.25, None]["toy", (), "later"]
    assert (cell.counted, cell.cases, cell.mean) == (3, 4, pytest.approx(2 / 3))
    # Deviations from 0.4 are -0.4, -0.2, 0.2, 0.4: sums -0.6 and 0.6; t of one degree of freedom is 12.7062.
    assert (cell.dnll, cell.half) == pytest.approx((0.4, 12.7062 * math.sqrt(2 * 0.72) / 4), rel=1e-4)
    assert intervals.clustered([1.0, 3.0], "aa") == math.inf
    # Each value is a cluster: Student's interval.
    assert intervals.clustered([1.0, 2.0, 4.0], "abc") == pytest.approx(intervals.student([1.0, 2.0, 4.0]))
    text = table.render(lines)
    assert "66.7 [few] of 3/4; +0.400 [few]" in text  # three of the full cache's, two texts
    cost = [row.split()[3:] for row in text.splitlines() if row.startswith("a ")][-1]
    assert cost == ["2.00", "1.00", "3.00", "0.50", "0.50"]


def test_the_command(tmp_path, capsys):
    net, out = tiny_model(), tmp_path / "r"
    net.save_pretrained(tmp_path / "m")
    tokenizer().save_pretrained(tmp_path / "m")
    words = f"eval --model {tmp_path / 'm'} --out {out} --tasks toy-many --lengths 80 --cases 2 --mode later"
    words += " --policies streaming knorm --shares 1/8 1/4 --chunk-size 32"
    assert main(words.split()) == 0
    told = capsys.readouterr().out
    assert "question KiB" in told
    assert {x["budget"] for x in read(out)[1]} == {None, 0.125, 0.25}
    with pytest.raises(ValueError, match="--budget 1/0: give"):
        number("1/0")
    assert reads_alone(FULL)
