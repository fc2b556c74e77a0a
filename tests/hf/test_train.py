"""Training of lookahead adapters: its loss and gradient, and the files that a run writes."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from exact import spread
from tiny import FAMILIES
from untrained import adapter

import kvevict
from kvevict import cli
from kvevict.models import families
from kvevict.train import checkpoint
from kvevict.train.lookahead import passes, training, validation

PAIRS = [dict(prompt=[3 + (7 * i + j) % 90 for j in range(20 + i)], response=[5 + (i + 3 * j) % 60 for j in range(4)])
         for i in range(7)]  # fmt: skip
FAST = dict(steps=6, batch=2, tokens=4, rank=2, save_every=2, progress=False, lr=0.01)


def two_passes(model, made, prompt, response):
    """The loss from the attention matrices of [prompt | response] and of [prompt | lookahead]."""
    decoder, n = model.get_decoder(), len(prompt)
    with torch.no_grad():
        found = decoder(input_ids=torch.cat([prompt, response])[None], use_cache=False, output_attentions=True)
    with made.on(decoder):
        embeds = torch.cat([decoder.get_input_embeddings()(prompt), made.embeddings])[None]
        lookahead = decoder(inputs_embeds=embeds, use_cache=False, output_attentions=True).attentions
    each = []
    for kind, true, got in zip(families.layer_kinds(decoder.config), found.attentions, lookahead):
        if kind == families.FULL_ATTENTION:
            p, t = (x[0, :, n:, :n].mean(1) for x in (got, true))
            p, t = (x / x.sum(-1, keepdim=True) for x in (p, t))
            each.append((t * (t / p).log()).sum(-1).mean())
    return torch.stack(each).mean()


def gradient(loss, made):
    """[name] of the loss and of its gradient to every tensor of the adapter, float64."""
    made.zero_grad()
    loss.backward()
    found = {name: weight.grad.double().clone() for name, weight in made.named_parameters()}
    return found | dict(loss=loss.detach().double())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.drawn(3)
def test_gradient_is_that_of_two_materialised_passes(family):
    """Every tensor is as near to float64 as random float32 rounding puts it: within twice the farthest of three draws
    of such rounding (tests/lib/exact.py), and that is less than 0.4 % of the tensor."""
    model, exact = (tiny.model(family, attn_implementation="eager") for _ in range(2))
    for weight in (*model.parameters(), *exact.parameters()):
        weight.requires_grad_(False)
    exact.double().set_experts_implementation("eager")  # the other implementation has no float64
    made, true = adapter(model), adapter(model).double()
    generator = torch.Generator().manual_seed(0)
    pair = [torch.randint(3, 97, (n,), generator=generator) for n in (40, 9)]
    got = gradient(passes.loss(model.get_decoder(), made, passes.truth(model.get_decoder(), *pair)), made)
    want, moved = spread(lambda: gradient(two_passes(exact, true, *pair), true), draws=3)
    for name, value in want.items():
        assert moved[name] < 2e-3 * value.norm(), (name, "the bound is too wide")
        assert (got[name] - value).norm() < 2 * moved[name], name


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("length", [1, 2, 41])
def test_the_target_of_a_repetition(family, length):
    """kvzip+'s numbers of the prompt's slots, divided by their sum; keys and values are the other target's."""
    made, ids, none = tiny.shared(family), torch.arange(3, 3 + length), torch.zeros(0, dtype=torch.long)
    found = passes.repeated(made.get_decoder(), ids, none)
    with kvevict.evicting(made, "kvzip+", budget=80, schedule="prompt"), torch.no_grad():
        layers = made(ids[None], use_cache=True).past_key_values.layers
    want = {i: layer.carry[0, :, :length] for i, layer in enumerate(layers) if hasattr(layer, "carry")}
    assert sorted(found.target) == list(want)
    for index, numbers in want.items():
        share = (numbers / numbers.sum(1, keepdim=True)).repeat_interleave(2, 0)
        # A chunk and a prompt's part are summed in another order: 1e-5 of numbers of up to 1.
        torch.testing.assert_close(found.target[index][0], share, rtol=1e-4, atol=1e-5)
    other = passes.truth(made.get_decoder(), ids, ids[:1])
    for index in found.keys:
        torch.testing.assert_close(found.keys[index], other.keys[index], rtol=0, atol=1e-5)
        torch.testing.assert_close(found.values[index], other.values[index], rtol=0, atol=1e-5)


def log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def losses(folder):
    return [line["loss"] for line in log(folder)]


@pytest.mark.quick
def test_learns_and_saves(tmp_path):
    model = tiny.model("llama")
    before = [weight.requires_grad for weight in model.parameters()]
    made = kvevict.lookahead.train(model, PAIRS, tmp_path, held_out=2, validate_every=3, **FAST | dict(steps=30))
    found = losses(tmp_path)
    assert len(found) == 30 and sum(found[-5:]) < 0.8 * sum(found[:5])
    valid = [line["valid"] for line in log(tmp_path) if "valid" in line]
    assert len(valid) == 10 and valid[-1]["loss"] < valid[0]["loss"]
    assert all(0 <= v["recall"] <= 1 == v["recall_512"] and -1 <= v["tau"] <= 1 for v in valid)
    again = kvevict.lookahead.load(tmp_path, model)
    assert all(torch.equal(x, y) for x, y in zip(made.parameters(), again.parameters(), strict=True))
    assert [weight.requires_grad for weight in model.parameters()] == before


def test_learns_the_repetition(tmp_path):
    """Responses, given or not, have no part in it; rows read in chunks without a question."""
    model = tiny.model("llama")
    model.generate = None
    prompts = [dict(prompt=pair["prompt"]) for pair in PAIRS[:4]] + PAIRS[4:]
    options = FAST | dict(steps=30, target="repeat", max_response=1)
    kvevict.lookahead.train(model, prompts, tmp_path, held_out=2, validate_every=30, **options)
    found = losses(tmp_path)
    assert sum(found[-5:]) < 0.8 * sum(found[:5])
    assert log(tmp_path)[-1]["valid"]["recall"] <= 1
    assert kvevict.lookahead.config_of(tmp_path)["target"] == "repeat"
    with pytest.raises(ValueError, match="a training with target='repeat', this one has 'response'"):
        other = options | dict(target="response", max_response=8)
        kvevict.lookahead.train(model, prompts, tmp_path, held_out=2, **other)
    chunks = dict(adapter=tmp_path, probe=0, chunk_size=20, budget=16, heads="ada", kernel=1)
    with kvevict.evicting(model, "lookahead", **chunks), torch.no_grad():
        model(**tiny.prompt(1, 70))
        assert kvevict.report(model)["kept_share"] == [16 / 70]


def test_a_repetition_has_half_of_the_context(tmp_path):
    long = [dict(prompt=[5] * 2049)]
    with pytest.raises(ValueError, match="2049 tokens, max_prompt is 2048"):
        kvevict.lookahead.train(tiny.shared("llama"), long, tmp_path, **FAST | dict(target="repeat"))
    with pytest.raises(ValueError, match="unknown target 'text'"):
        kvevict.lookahead.train(tiny.shared("llama"), long, tmp_path, **FAST | dict(target="text"))


def test_tau_by_hand():
    """tau-b: pairs that agree less those that do not, over the root of the products of the untied ones."""
    got = torch.tensor([[1.0, 2, 3, 4], [1, 1, 2, 3], [5, 5, 5, 5]])
    want = torch.tensor([[1.0, 2, 4, 3], [1, 2, 3, 4], [1, 2, 3, 4]])
    by_row = [(5 - 1) / 6, 5 / (5 * 6) ** 0.5, 0]
    for row, value in enumerate(by_row):
        assert validation.tau(got[row], want[row]).item() == pytest.approx(value)
    assert validation.tau(got, want).item() == pytest.approx(sum(by_row) / 3)


def test_a_model_in_bfloat16(tmp_path):
    """The adapter stays in fp32; the first loss is that of the model in fp32, to bf16's rounding."""
    for name, dtype in (("half", torch.bfloat16), ("single", torch.float32)):
        made = kvevict.lookahead.train(tiny.model("llama", dtype), PAIRS, tmp_path / name, **FAST | dict(steps=30))
        assert all(weight.dtype == torch.float32 for weight in made.parameters())
    half, single = losses(tmp_path / "half"), losses(tmp_path / "single")
    assert half[0] == pytest.approx(single[0], rel=0.05)
    assert sum(half[-5:]) < 0.8 * sum(half[:5])


def test_goes_on_where_it_was(tmp_path, monkeypatch):
    """Ended after a checkpoint and some steps more: the same curve and the same bits as in one go."""
    model = tiny.model("llama")
    whole = kvevict.lookahead.train(model, PAIRS, tmp_path / "a", **FAST)
    step, one = [], training.LookaheadTraining._one
    monkeypatch.setattr(
        training.LookaheadTraining, "_one", lambda run: step.append(0) or (one(run) if len(step) < 6 else 1 / 0)
    )
    with pytest.raises(ZeroDivisionError):
        kvevict.lookahead.train(model, PAIRS, tmp_path / "b", **FAST)
    monkeypatch.undo()
    assert len(log(tmp_path / "b")) == 5
    with pytest.raises(ValueError, match="a training with steps=6, this one has 9; continue with the same"):
        kvevict.lookahead.train(model, PAIRS, tmp_path / "b", **FAST | dict(steps=9))  # the half of a schedule
    parted = kvevict.lookahead.train(model, PAIRS, tmp_path / "b", **FAST)
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    assert all(torch.equal(x, y) for x, y in zip(whole.parameters(), parted.parameters(), strict=True))


def test_a_finished_run_is_lengthened(tmp_path, monkeypatch):
    """With more steps; while the rate is constant the bits are those of one long run. Another time there are fewer."""
    model = tiny.model("llama")
    with monkeypatch.context() as constant:
        constant.setattr(training.LookaheadSettings, "rate", lambda *_: 0.01)
        whole = kvevict.lookahead.train(model, PAIRS, tmp_path / "a", **FAST | dict(steps=9))
        kvevict.lookahead.train(model, PAIRS, tmp_path / "b", **FAST)
        parted = kvevict.lookahead.train(model, PAIRS, tmp_path / "b", **FAST | dict(steps=9))
    assert losses(tmp_path / "b") == losses(tmp_path / "a") and len(losses(tmp_path / "a")) == 9
    assert all(torch.equal(x, y) for x, y in zip(whole.parameters(), parted.parameters(), strict=True))
    kvevict.lookahead.train(model, PAIRS, tmp_path / "b", **FAST | dict(steps=12))
    assert [line["lr"] for line in log(tmp_path / "b")[9:]] == [
        pytest.approx(0.01 * 0.5 * (1 + math.cos(math.pi * step / 11))) for step in (9, 10, 11)
    ]
    with pytest.raises(ValueError, match="a training with steps=12, this one has 6"):
        kvevict.lookahead.train(model, PAIRS, tmp_path / "b", **FAST)


def test_stops_where_the_loss_is_no_number(tmp_path, monkeypatch):
    model, count, real = tiny.model("llama"), [], training.loss

    def broken(*args):
        count.append(0)
        return real(*args) * (float("nan") if len(count) > 8 else 1)  # two pairs a step

    monkeypatch.setattr(training, "loss", broken)
    with pytest.raises(ValueError, match=r"the loss is nan.*at step 5.*last checkpoint.*smaller lr"):
        kvevict.lookahead.train(model, PAIRS, tmp_path, **FAST)
    assert len(log(tmp_path)) == 4
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["step"] == 4 and all(value.isfinite().all() for value in state["adapter"].values())


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    model, write, count = tiny.model("llama"), checkpoint.write, []

    def full(path, data):
        if str(path).endswith("checkpoint.pt") and len(count) == 1:
            path.with_name("checkpoint.pt.part").write_bytes(data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        count.append(0) if str(path).endswith("checkpoint.pt") else None
        write(path, data)

    monkeypatch.setattr(checkpoint, "write", full)
    with pytest.raises(OSError, match="No space"):
        kvevict.lookahead.train(model, PAIRS, tmp_path, **FAST)
    monkeypatch.undo()
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 2
    kvevict.lookahead.train(model, PAIRS, tmp_path, **FAST)


def test_refuses_a_checkpoint_that_is_damaged_or_another_s(tmp_path):
    model = tiny.model("llama")
    kvevict.lookahead.train(model, PAIRS, tmp_path, **FAST)
    for change, field in ((dict(lr=0.5), "lr"), (dict(tokens=5), "tokens"), (dict(held_out=1), "held_out")):
        with pytest.raises(ValueError, match=f"a training with {field}="):
            kvevict.lookahead.train(model, PAIRS, tmp_path, **FAST | change)
    with pytest.raises(ValueError, match="a training with data="):
        kvevict.lookahead.train(model, PAIRS[1:], tmp_path, **FAST)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(ValueError, match=r"is damaged.*remove it"):
        kvevict.lookahead.train(model, PAIRS, tmp_path, **FAST)


@pytest.mark.parametrize("pair, reason", [
    (dict(response=[5]), "pair 2 has no prompt"), (dict(prompt=[], response=[5]), "pair 2 has an empty prompt"),
    (dict(prompt=[5], response=[]), "pair 2 has an empty response"),
    (dict(prompt=[5], response=[5] * 600), "600 tokens, max_response is 512"),
    (dict(prompt=[5] * 17000, response=[5]), "17000 tokens, max_prompt is 16384"),
    (dict(prompt=[5] * 4090, response=[5] * 9), "exceed the model's context of 4096"),
    (dict(prompt="text"), "give a tokenizer"), (dict(prompt=[1.5]), "text or a list of token ids"),
    (dict(messages=[]), "need a tokenizer with a chat template"), (7, "must be an object"),
])  # fmt: skip
def test_refused_pairs(tmp_path, pair, reason):
    with pytest.raises(ValueError, match=reason):
        kvevict.lookahead.train(tiny.shared("llama"), [PAIRS[0], pair], tmp_path, **FAST)
    assert not list(tmp_path.iterdir())


def test_a_template_that_refuses_a_turn():
    talker = tiny.byte_tokenizer()
    talker.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    turns = [dict(role="system", content="Be short."), dict(role="user", content="Who?")]
    with pytest.raises(ValueError, match=r"pair 1: .*refuses its messages: no system role; leave out the turn"):
        kvevict.lookahead.data.pairs([dict(messages=turns)], talker, kvevict.lookahead.data.Limits(99, 9, 999))


def test_answers_itself_once(tmp_path):
    """A missing response is written by the model and kept."""
    model, data = tiny.model("llama"), [dict(prompt=pair["prompt"]) for pair in PAIRS[:3]]
    kvevict.lookahead.train(model, data, tmp_path, max_response=3, **FAST)
    kept = [json.loads(line) for line in (tmp_path / "responses.0.jsonl").read_text().splitlines()]
    assert len(kept) == 3 and all(len(entry["response"]) == 3 for entry in kept)
    model.generate = None
    (tmp_path / "checkpoint.pt").unlink()
    kvevict.lookahead.train(model, data, tmp_path, max_response=3, **FAST)


def test_answers_in_place_of_the_data(tmp_path):
    """With responses="model" the model's own replaces each response, also a chat's last answer; drawn at a temperature
    it is another, and the same once more."""
    model, talker, written = tiny.model("llama"), tiny.byte_tokenizer(), {}
    talker.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = dict(messages=[dict(role="user", content="Who?"), dict(role="assistant", content="I.")])
    data, options = [chat, dict(prompt="What?", response="It.")], dict(tokenizer=talker, max_response=4, **FAST)
    for name, more in dict(greedy={}, drawn=dict(temperature=0.9), again=dict(temperature=0.9)).items():
        kvevict.lookahead.train(model, data, tmp_path / name, responses="model", **options, **more)
        lines = map(json.loads, (tmp_path / name / "responses.0.jsonl").read_text().splitlines())
        written[name] = {each["prompt"]: each["response"] for each in lines}
    ids = torch.tensor([talker("Who?", add_special_tokens=False)["input_ids"]])
    greedy = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert greedy[0, ids.shape[1] :].tolist() in written["greedy"].values() and len(written["greedy"]) == 2
    assert written["drawn"] == written["again"] != written["greedy"]
    with pytest.raises(ValueError, match=r"with temperature=None, this one has 0\.5"):
        kvevict.lookahead.train(model, data, tmp_path / "greedy", responses="model", temperature=0.5, **options)


SCRIPT = """
import sys
sys.path[:0] = ["tests/lib", "tests/hf"]
import tiny, torch
torch.set_num_threads(1)
from test_train import FAST, PAIRS
import kvevict
kvevict.lookahead.train(tiny.model("llama"), PAIRS, sys.argv[1], **FAST)
"""


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_accumulation(tmp_path):
    """Adapters alike to rounding, one log."""
    script, root = tmp_path / "script.py", Path(tiny.__file__).parents[2]
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines"]
    launch += ["1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    env = os.environ | dict(PYTHONPATH=f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", OMP_NUM_THREADS="1")
    subprocess.run([*launch, script, tmp_path / "two"], check=True, env=env, cwd=root, capture_output=True)
    kvevict.lookahead.train(tiny.model("llama"), PAIRS, tmp_path / "one", **FAST)
    one, two = (kvevict.lookahead.load(tmp_path / out, tiny.shared("llama")) for out in ("one", "two"))
    assert len(log(tmp_path / "two")) == 6
    for x, y in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-5)


def test_command(tmp_path, capsys):
    folder, _ = tiny.save(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(dict(prompt=f"What is {i}?", response=f"It is {i}.")) + "\n" for i in range(4)))
    arguments = ["train", "--model", folder, "--data", str(data), "--out", str(tmp_path / "out"), "--steps", "2",
                 "--batch", "2", "--tokens", "3", "--held-out", "1"]  # fmt: skip
    told, left = [], "; it was finished before, nothing was left to train"
    for _ in range(2):
        assert cli.main(arguments) == 0
        line, last = capsys.readouterr().out.splitlines()
        facts = json.loads(last)
        assert facts["out"] == str(tmp_path / "out")
        told.append(line)
    start = f"{tmp_path / 'out'}: adapter of {facts['parameters']:,} parameters; step 2, loss "
    assert told[0].startswith(start) and "; on held-out pairs loss " in told[0] and told[1] == told[0] + left
    assert cli.main(["generate", "--model", folder, "--file", str(data), "--budget", "8", "--policy",
                     f"lookahead:adapter={tmp_path / 'out'}", "--max-new-tokens", "2", "What?"]) == 0  # fmt: skip
    data.write_text('{"response": "x"}\n')
    assert cli.main(arguments) == 2
    assert "line 1 has no prompt" in capsys.readouterr().err
