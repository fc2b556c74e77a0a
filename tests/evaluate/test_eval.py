"""The evaluation runner, its file, and its tables. The toy task asks a tiny random model about random letters."""

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import torch
import toy_task
from tiny import model as tiny_model
from toy_task import NEW, NORMAL, plan, results, tokenizer, toy, toy_metric, toy_perplexity, untimed
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvevict import evicting, small_llama
from kvevict.asking.prompts import ids_of
from kvevict.cli import main
from kvevict.lab.evaluate import ask, intervals, summary, table
from kvevict.lab.evaluate.results import read
from kvevict.lab.evaluate.runs import FOUND, LAST, OWN
from kvevict.lab.evaluate.tasks import TASKS, Case
from kvevict.policy.building import build


def toy_ids(case):
    return tokenizer()(case.context)["input_ids"], tokenizer()(case.question)["input_ids"]


@pytest.mark.quick
def test_full_and_known_are_what_generate_gives(net, tmp_path):
    lines = results(net, tmp_path / "r", policies=("tova", "take"), chunk_sizes=(None, 20), modes=("known",))
    assert [line["policy"] for line in lines] == 2 * ["full", "tova", "tova", "take", "take"]
    cases = list(toy(plan().groups(tokenizer())[0][1]))
    for line in lines:
        case = next(case for case in cases if case.id == line["id"])
        ids = torch.tensor([[*toy_ids(case)[0], *toy_ids(case)[1]]])
        inputs = dict(inputs=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        if line["policy"] == "full":
            out = net.generate(**inputs)
        else:
            probe = dict(probe=8) if line["policy"] == "take" else {}
            with evicting(net, line["policy"], budget=16, chunk_size=line["chunk_size"] or 60, **probe):
                out = net.generate(**inputs)
        assert line["prediction"] == tokenizer().decode(out[0, 60:])
        assert line["score"] == toy_metric(line["prediction"], case.answers)
        assert line["prompt_tokens"] == 60
        assert line["tags"] == {"depth": int(case.id[-1]) % 2, "length": 60}


def test_a_schedule_of_the_policy_s_own(net, tmp_path):
    policies = ("snapkv", "snapkv:schedule=chunk", "snapkv:schedule=prompt", "laq")
    lines = results(net, tmp_path / "r", policies=policies, chunk_sizes=(20,), modes=("known",), cases=1)
    peaks = [line["peak_cache_bytes"] for line in lines[1:]]
    assert peaks[0] == peaks[1] < peaks[2] <= peaks[3]
    with pytest.raises(ValueError, match="a draft needs the whole prompt"):  # not that a chunk size is missing
        plan(policies=("laq:schedule=chunk",), chunk_sizes=(20,)).runs()


def test_later_compresses_the_context_and_keeps_the_question(net, tmp_path):
    """Against the unpatched model with the middle of its cache cut out: StreamingLLM keeps 4 sinks and the end."""
    lines = results(net, tmp_path / "r", policies=("streaming",), modes=("later",), cases=4)
    cases = list(toy(plan(cases=4).groups(tokenizer())[0][1]))
    for case, line in zip(cases, [line for line in lines if line["policy"] == "streaming"], strict=True):
        context, question = (torch.tensor([ids]) for ids in toy_ids(case))
        seen = context.shape[1]
        with torch.no_grad():
            cache = net(context).past_key_values
            stays = torch.tensor([*range(4), *range(seen - 12, seen)])
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, stays], layer.values[:, :, stays]
            new, tokens = question, []
            while len(tokens) < NEW:
                places = torch.arange(seen, seen + new.shape[1])[None]
                logits = net(new, past_key_values=cache, position_ids=places).logits
                seen, new = seen + new.shape[1], logits[:, -1:].argmax(-1)
                tokens.append(int(new))
        assert line["prediction"] == tokenizer().decode(tokens)
        assert line["kept"] == [[16, 16]] * 4
        assert line["cache_bytes"] == 2 * 4 * 32 * 16 * 2 * 4


def test_perplexity(net, tmp_path):
    lines = results(net, tmp_path / "r", tasks=("toy-perplexity",), policies=("knorm",), budgets=(100, 16))
    cases = {case.id: case for case in toy_perplexity(plan().groups(tokenizer())[0][1])}
    for line in lines:
        case = cases[line["id"]]
        ids = torch.tensor(tokenizer()([case.context + case.question + case.answers[0]])["input_ids"])
        with torch.no_grad():
            logs = net(ids).logits[0, :-1].log_softmax(-1)
        loss = -logs.gather(1, ids[0, 1:, None])[-20:].mean().item()
        same = line["budget"] != 16
        assert (abs(line["score"] - loss) < 1e-4) is same
        assert line["prompt_tokens"] == 40
    known, later = (next(x for x in lines if x["mode"] == m and x["budget"] == 16) for m in ("known", "later"))
    assert known["score"] != later["score"]  # five of the prompt's tokens are the question


@pytest.mark.parametrize("policy, decodes", [
    ("h2o", True), ("h2o:decode=False", False), ("h2o+caote", True), ("snapkv:window=4,decode=True,interval=3", True),
])  # fmt: skip
def test_perplexity_under_eviction(net, tmp_path, policy, decodes):
    """In mode `known` the continuation is decoded token by token, against the float64 oracle; in mode `later`, and if
    the policy evicts nothing while decoding, all of it is read over the slots that the prompt left."""
    lines = results(net, tmp_path / "r", tasks=("toy-perplexity",), policies=(policy,), chunk_sizes=(20,), cases=1)
    case = next(toy_perplexity(plan().groups(tokenizer())[0][1]))
    prompt, answer = (tokenizer()(text)["input_ids"] for text in (case.context + case.question, case.answers[0]))

    def oracle_s(**options):
        row = oracle.Row(net, policy, 16, chunk_size=20, **options)
        logits = [row.read(prompt)[-1], *(row.step(token) for token in answer[:-1])]
        return torch.nn.functional.cross_entropy(torch.stack(logits), torch.tensor(answer)).item()

    known, later = (next(x["score"] for x in lines if x["mode"] == mode) for mode in ("known", "later"))
    assert known == pytest.approx(oracle_s(), abs=1e-5) and later != known
    assert (abs(known - oracle_s(decode=False)) > 1e-3) is decodes


def test_an_oracle_is_given_what_comes(net, tmp_path, monkeypatch):
    given = {}
    real = ask.policy_for

    def spy(run, tokens, response, *rest):
        given[run.mode] = response
        return real(run, tokens, response, *rest)

    monkeypatch.setattr(ask, "policy_for", spy)
    lines = results(net, tmp_path / "r", policies=("knorm",), cases=1)
    question = toy_ids(next(toy(plan().groups(tokenizer())[0][1])))[1]
    assert len(lines[0]["response"]) == NEW
    assert given["known"] == lines[0]["response"]
    assert given["later"] == question + lines[0]["response"]


@pytest.mark.parametrize("policy, budget, option, value", [
    ("take", 16, "probe", 8), ("take", 80, "probe", 32), ("snapkv", 0.5, "window", 15),
    ("h2o", 12, "recent", None), ("snapkv:window=14", 16, "window", 14),
])  # fmt: skip
def test_small_budgets_have_small_windows(net, tmp_path, policy, budget, option, value):
    line = results(net, tmp_path / "r", policies=(policy,), budgets=(budget,), cases=1, modes=("known",))[1]
    assert line["options"][option] == value
    assert line["kept"][0][0] <= (budget if isinstance(budget, int) else 30)


def test_chat_template(net):
    talker = PreTrainedTokenizerFast(tokenizer_object=tokenizer()._tokenizer)
    talker.chat_template = "[U]{{ messages[0]['content'] | trim }}[/U]{% if add_generation_prompt %}[A]{% endif %}"
    case = Case("toy", "1", " some text", "\nWhat?", ("x",), "toy", NEW)
    prompt = ask.encode(net, talker, case)
    assert talker.decode(prompt.context) == "[U] some text"
    assert talker.decode(prompt.question) == "\nWhat?[/U][A]"
    case.tags["chat"] = False
    prompt = ask.encode(net, talker, case)
    assert talker.decode(prompt.context + prompt.question) == " some text\nWhat?"


def test_generation_stops_at_the_end_token(tmp_path):
    net = tiny_model()
    free = results(net, tmp_path / "free", cases=1, policies=("knorm",))[0]["response"]
    net.generation_config.eos_token_id = [free[2], 96]
    stopped = results(net, tmp_path / "stopped", cases=1, policies=("knorm",))[0]["response"]
    assert stopped == free[: free.index(free[2]) + 1]


def test_cut_anywhere_it_resumes(net, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    want = untimed(results(net, whole, seeds=(0, 1), cases=1))
    data, rng = whole.read_bytes(), random.Random(5)
    ends = [0, 1, len(data) - 1, len(data), data.index(b"\n"), data.index(b"\n") + 1]
    for end in ends + [rng.randrange(len(data)) for _ in range(6)]:
        cut.write_bytes(data[:end])
        assert untimed(results(net, cut, seeds=(0, 1), cases=1)) == want
        kept = data[: data[:end].rfind(b"\n") + 1]
        assert cut.read_bytes().startswith(kept)  # known lines were not measured again


def command(folder, out):
    words = f"eval --model {folder} --out {out} --tasks toy --lengths 200 --policies snapkv take --budgets 16"
    return [*words.split(), "--cases", "6", "--seeds", "3", "4"]


KILLED = """
import os, signal, sys, torch, toy_task
from kvevict.cli import main
from kvevict.lab.evaluate.results import Results

torch.set_num_threads(1)
write, left = Results.write, int(sys.argv[1])

def written(self, line):
    global left
    if not left:
        self.file.write('{"task": ')
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    write(self, line)

Results.write = written
main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def whole(net, tmp_path_factory):
    """(a model's folder, the file of a run that nothing stops)."""
    folder = tmp_path_factory.mktemp("model")
    net.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    assert main(command(folder, folder / "whole")) == 0
    return folder, folder / "whole"


@pytest.mark.slow
def test_killed_it_resumes(whole, tmp_path, capsys):
    (folder, whole), out = whole, tmp_path / "out"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    total, written = len(whole.read_bytes().splitlines()), 1
    assert total == 1 + 6 * 2 * 5
    for lines in (5, 17):
        child = subprocess.run(
            [sys.executable, "-c", KILLED, str(lines), *command(folder, out)], cwd=Path(__file__).parent,
            capture_output=True, text=True, env=environment,
        )  # fmt: skip
        written += lines
        assert child.returncode == -signal.SIGKILL, child.stderr
        assert out.read_bytes().count(b"\n") == written
    assert main(command(folder, out)) == 0
    assert untimed(read(out)[1]) == untimed(read(whole)[1])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["lines"] == total - 1


@pytest.mark.slow
def test_processes_share_the_cases(whole, tmp_path):
    """Two processes and a file begun by one; the first alone has the file and prints."""
    (folder, whole), out = whole, tmp_path / "out"
    data = whole.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(data[:13]))
    (tmp_path / "go.py").write_text("import sys, toy_task; from kvevict.cli import main; sys.exit(main(sys.argv[1:]))")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launch, str(tmp_path / "go.py"), *command(folder, out)], capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["lines"] == len(data) - 1
    assert done.stdout.count("command") == 1
    assert out.read_bytes().startswith(b"".join(data[:13]))
    assert untimed(read(out)[1]) == untimed(read(whole)[1])


def test_other_settings_are_refused(net, tmp_path):
    out = tmp_path / "r"
    results(net, out)
    before = out.read_bytes()
    with pytest.raises(ValueError, match=r"other settings: budgets was \[16\], is \[20\]; cases was 2, is 3; repeat"):
        results(net, out, budgets=(20,), cases=3)
    with pytest.raises(ValueError, match="other settings: weights was"):
        results(tiny_model(seed=1), out)
    assert out.read_bytes() == before
    out.write_text("something else\n")
    with pytest.raises(ValueError, match="holds no results"):
        results(net, out)
    out.write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match="holds no results"):
        results(net, out)


@pytest.mark.parametrize("name, value", [
    ("dtype", torch.bfloat16), ("temperature", 0.7), ("haystack", "HAYSTACK"), ("seeds", (1,)),
    ("lengths", (50,)), ("name", "another"),
])  # fmt: skip
def test_every_setting_that_changes_numbers_is_one_of_the_file(net, tmp_path, name, value):
    (tmp_path / "HAYSTACK").write_text("One sentence. Another one. " * 40)
    value, out = str(tmp_path / value) if value == "HAYSTACK" else value, tmp_path / "r"
    results(net, out, **({"name": "one"} if name == "name" else {}))
    before, made = out.read_bytes(), tiny_model().to(value) if name == "dtype" else net
    said = {"dtype": "dtype was 'torch.float32', is 'torch.bfloat16'", "name": "model was 'one', is 'another'"}
    with pytest.raises(ValueError, match=f"begun with other settings: .*{said.get(name, name + ' was')}.*give another"):
        results(made, out, **({} if name == "dtype" else {name: value}))
    assert out.read_bytes() == before


def test_what_cannot_work_fails_before_anything_is_measured(net, tmp_path):
    out = tmp_path / "r"
    with pytest.raises(ValueError, match="toy/70/0 takes 70 tokens and 6 new ones, the model's context is 72"):
        results(tiny_model(max_position_embeddings=72), out, lengths=(60, 70))

    def impossible(settings):
        raise ValueError("no data")
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "impossible", impossible)
        with pytest.raises(ValueError, match="no data"):
            results(net, out, tasks=("toy", "impossible"))
        patch.setitem(TASKS, "double", lambda settings: 2 * list(toy(settings)))
        with pytest.raises(ValueError, match="two cases of toy have the same id"):
            results(net, out, tasks=("double",))
    assert len(out.read_bytes().splitlines()) == 1


def test_intervals():
    # 8 of 10: centre (0.8 + z^2 / 20) / (1 + z^2 / 10), half z / (1 + z^2 / 10) * sqrt(0.016 + z^2 / 400), z = 1.95996
    assert intervals.of_scores([1] * 8 + [0] * 2) == pytest.approx((0.8, 0.490162, 0.943318), abs=1e-6)
    assert intervals.of_scores([1, 1])[2] == 1
    # standard deviation 0.2, so 1.95996 * 0.2 / sqrt(3)
    assert intervals.of_scores([0.2, 0.4, 0.6]) == pytest.approx((0.4, 0.4 - 0.226317, 0.4 + 0.226317), abs=1e-6)
    assert intervals.of_scores([0.5]) == (0.5, 0, 1)


def test_summary():
    full = [toy_task.line("full", s, id=i, depth=i % 2) for i, s in enumerate((1, 1, 1, 0))]
    known = [toy_task.line("take", s, "known", i, 64, depth=i % 2) for i, s in enumerate((1, 0, 1))]
    blind = [toy_task.line("take", s, "later", i, 64, depth=i % 2) for i, s in enumerate((0, 0, 1, 0))]
    got = summary.summarize(full + known + blind)
    take = got["take", 64, None]
    assert list(got) == [("full", None, None), ("take", 64, None)]
    assert got["full", None, None]["toy", (), "known"].mean == 0.75
    assert take["toy", (), "known"].mean == take["toy", (), "known"].share == pytest.approx(2 / 3)  # of the same cases
    assert take["toy", (), "later"].share == pytest.approx(1 / 3)
    assert take["toy", (), "later"].cases == 4
    by = summary.summarize(full + known + blind, ("depth",))["take", 64, None]
    assert {key[1:]: cell.mean for key, cell in by.items()} == {
        ((0,), "known"): 1, ((1,), "known"): 0, ((0,), "later"): 0.5, ((1,), "later"): 0,
    }  # fmt: skip


def test_perplexity_in_tables():
    about = dict(task="text", metric="perplexity")
    full = [toy_task.line("full", s, id=i, **about) for i, s in enumerate((2.0, 3.0))]
    lines = [toy_task.line("h2o", s, "known", i, 8, **about) for i, s in enumerate((3.0, 3.2))]
    cell = summary.summarize(full + lines)["h2o", 8, None]["text", (), "known"]
    half = NORMAL * math.sqrt(0.02 / 2)  # variance of 3.0 and 3.2: 0.02
    assert (cell.mean, cell.low, cell.high) == pytest.approx([math.exp(3.1 + d) for d in (0, -half, half)])
    assert cell.share == pytest.approx(math.exp(2.5) / math.exp(3.1))
    assert cell.gap == pytest.approx((0.6, 12.7062 * 0.4))  # Student's t
    assert str(cell).endswith(" [few]; +0.600 [few]")


def test_rendered():
    lines = [toy_task.line("full", 1, depth=0.5), toy_task.line("full", 1, task="other", depth=0.5)]
    lines += [toy_task.line("take", 0, mode, budget=64, depth=0.5) for mode in ("known", "later")]
    text = table.render(lines).splitlines()[3:]
    assert text[0].split("  ")[0] == "policy"
    heads = [word.strip() for row in text if row.startswith("policy") for word in row.split("  ")[1:] if word.strip()]
    columns = [head for head in heads if head not in ("budget", "chunk")]
    assert columns[-4:] == ["toy, known", "toy, later", "other, known", "other, later"]
    assert text[2].split() == ["take", "64", "whole", "0.0", "[few]", "0%", "0.0", "[few]", "0%"]
    by_depth = table.render(lines, ("depth",)).splitlines()
    assert [row for row in by_depth if "by depth" in row] == [
        f"{task}, {mode}, by depth" for task in ("toy", "other") for mode in ("known", "later")
    ]  # fmt: skip
    at = next(n for n, row in enumerate(by_depth) if row.startswith("policy"))
    assert by_depth[at].split() == ["policy", "budget", "chunk", "0.5"]
    assert by_depth[at + 2].split() == ["take", "64", "whole", "0.0", "[few]", "0%"]
    assert "take+edie:recall=true" in text[-2] and "read-twice" in text[-1]
    assert "read-twice" not in table.render(lines[:3])  # no question came later
    assert table.render([]) == "no results yet"


def test_intervals_of_few_cases_are_not_shown():
    for cases, shown in ((4, "50.0 [few] 100%"), (6, "50.0 [19, 81] 100%")):  # Wilson's of 3 of 6
        both = [[toy_task.line("full", i % 2, id=i), toy_task.line("a", i % 2, "known", i)] for i in range(cases)]
        lines = [line for pair in both for line in pair]
        row = next(row for row in table.render(lines).splitlines() if row.startswith("full"))
        assert row.split(None, 1)[1] == shown


def test_tables_fit_a_terminal():
    """Columns go on in further tables, long policies in further lines; nothing is lost."""
    long = "edie:rows=probe,heads=equal,kernel=31,pool=avg,keep_first=4,alpha=0.05"
    lines = [toy_task.line("full", 1, task=f"ruler/niah_multikey_{i}") for i in range(9)]
    lines += [toy_task.line(long, 1, "known", budget=64, task=f"ruler/niah_multikey_{i}") for i in range(9)]
    text = table.render(lines)
    assert max(map(len, text.splitlines())) <= 120
    assert all(f"ruler/niah_multikey_{i}, known" in text for i in range(9))
    parts = [row for row in text.splitlines() if row.startswith(("edie:", "  "))]
    assert "".join(row.split()[0] for row in parts[:2]) == long
    assert len([row for row in text.splitlines() if row.startswith("policy")]) > 1


def test_it_measures_what_patch_does(net, tmp_path):
    """The policy's own chunks, and the question that the tokenizer finds; with `last` a probe is the last tokens."""
    options = dict(policies=("take:probe=8",), modes=("known",), cases=6, budgets=(24,))
    found = results(net, tmp_path / "found", chunk_sizes=(OWN,), question=FOUND, **options)
    last = results(net, tmp_path / "last", chunk_sizes=(OWN,), question=LAST, **options)
    cases = {case.id: case for case in toy(plan(cases=6).groups(tokenizer())[0][1])}
    said = {name: [] for name in ("patch", "found", "last")}
    for name, lines in (("found", found), ("last", last)):
        said[name] = [line["prediction"] for line in lines if line["policy"] != "full"]
    assert {line["chunk_size"] for line in found} == {None, build("take", budget=99).chunk_size}
    for case in cases.values():
        ids = torch.tensor([[*toy_ids(case)[0], *toy_ids(case)[1]]])
        inputs = dict(inputs=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        with evicting(net, "take", probe=8, budget=24, tokenizer=tokenizer()):
            said["patch"].append(tokenizer().decode(net.generate(**inputs)[0, ids.shape[1] :]))
    assert said["found"] == said["patch"] != said["last"]


def test_what_runs_is_told(net, tmp_path, capsys):
    """Before it is run, with the time that the first text took, and under the table."""
    net.save_pretrained(tmp_path / "m")
    tokenizer().save_pretrained(tmp_path / "m")
    words = f"eval --model {tmp_path / 'm'} --out {tmp_path / 'r'} --tasks toy --lengths 60 --policies take snapkv"
    assert main([*words.split(), "--budgets", "16", "--cases", "2", "--mode", "known"]) == 0
    out, told = capsys.readouterr()
    said = " ".join(told.split())
    assert f"{tmp_path / 'm'}, float32 on cpu; tasks toy, 2 cases of each length, seed and depth; lengths 60" in said
    assert "Policies take, snapkv with 16 slots per kv head, read in the policy's own chunks, as" in said
    assert f"3 runs of every case; results go to {tmp_path / 'r'} " in said
    assert re.search(r"the first text took \d+ s, the others take about \d+ s", said) and "6/6" in said
    assert "The policy finds the question as `kvevict.patch` does." in " ".join(out.split()).partition("Ran: ")[2]
    assert main([*words.split(), "--budgets", "16", "--cases", "2", "--mode", "known", "--table-only"]) == 0
    assert capsys.readouterr().out.partition("Ran: ")[2] == out.partition("Ran: ")[2]


@pytest.mark.parametrize("words, message", [
    ("--policies take", "--tasks is missing: give at least one of "),
    ("--tasks toy --budgets 1", "budget=1 is too small"),
    ("--tasks toi --policies take", "unknown task 'toi'; did you mean 'toy'"),
    ("--tasks fidelity/toi --policies take", "unknown task 'toi'; did you mean 'toy'"),
    ("--tasks toy --policies take --temperature 0", "--temperature must be above 0, got 0.0"),
    ("--tasks toy --policies tak", "unknown policy 'tak'"),
    ("--tasks toy --policies take:prob=3", "unknown option 'prob'"),
    ("--tasks toy --policies take:budget=3", "by --budgets and --chunk-size"),
    ("--tasks toy --policies take --budgets many", "--budget many"),
    ("--tasks toy --policies take --budgets 1", "budget=1 is too small"),
    ("--tasks toy --policies take --cases 0", "--cases must be at least 1"),
    ("--tasks toy --policies take --chunk-size -1", "--chunk-size must be at least 0"),
    ("--table-only", "does not exist"),
])  # fmt: skip
def test_mistakes_are_named(tmp_path, capsys, words, message):
    assert main(["eval", "--model", "nowhere", "--out", str(tmp_path / "r"), *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_unknown_tag(net, tmp_path, capsys):
    out = tmp_path / "r"
    results(net, out, cases=1)
    assert main(["eval", "--table-only", "--out", str(out), "--by", "depth"]) == 0
    assert main(["eval", "--table-only", "--out", str(out), "--by", "width"]) == 2
    assert "the cases' tags are depth, length" in capsys.readouterr().err


def test_text_holds_no_special_tokens():
    """A special token's name in a document is text: <end> there does not end anything."""
    ours = AutoTokenizer.from_pretrained(small_llama())
    assert ours.all_special_tokens
    for special in ours.all_special_tokens:
        assert not set(ids_of(ours, f"a {special} b")) & set(ours.all_special_ids)
    assert ids_of(ours, "a b") == ours("a b", add_special_tokens=False)["input_ids"]
