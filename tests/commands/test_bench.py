"""`kvevict bench`: its counts, and its checks before timing. Times are not tested."""

import contextlib
import copy
import json

import pytest
import tiny
import torch
import zoo
from tiny import save

import kvevict
from kvevict.cli import main
from kvevict.lab.analysis import speed
from kvevict.lab.commands.bench import cells
from kvevict.policy.building import build

SLOT = 2 * 4 * 32  # bytes of a key and a value of one head: fp32, head_dim 32


def bench(folder, words, capsys):
    """(exit code, the last line's JSON or None, stdout, stderr)."""
    code = main(["bench", "--model", folder, *words.split()])
    got = capsys.readouterr()
    return code, json.loads(got.out.splitlines()[-1]) if code == 0 else None, got.out, got.err


@pytest.mark.quick
def test_rows(tmp_path, capsys):
    """Cache bytes are exact: 4 layers of 2 kv heads."""
    folder, _ = save(tmp_path)
    names = ["unpatched", "snapkv:window=4", "take:probe=4,budget=30"]
    words = f"--policies {' '.join(names[1:])} --budget 20 --lengths 90 48 --chunk-size 16 --new-tokens 3 --repeat 2"
    code, line, out, _ = bench(folder, words, capsys)
    rows = [(row["prompt_tokens"], row["policy"]) for row in line["rows"]]
    assert code == 0 and rows == [(n, name) for n in (48, 90) for name in names]
    for row in line["rows"]:
        slots = dict(zip(names, (row["prompt_tokens"], 20, 30)))[row["policy"]]
        assert row["cache_bytes"] == SLOT * 2 * 4 * slots
        assert row["read_seconds"] > 0 and row["decode_tokens_per_second"] > 0
    assert f"({20 / 90:.2f})" in next(text for text in out.splitlines() if text.split()[:2] == ["90", names[1]])
    assert "none are evicted" not in out
    _, _, out, _ = bench(folder, words.replace("90 48", "90 30").replace("--budget 20", "--budget 30"), capsys)
    assert [line for line in out.splitlines() if "none are evicted" in line] == [
        "Of 30 tokens none are evicted: give longer --lengths, or a smaller --budget."
    ]


def test_batches(tmp_path, capsys):
    """Bytes are those of all rows, tokens a second too."""
    folder, _ = save(tmp_path)
    words = "--policies snapkv:window=4 --budget 20 --lengths 90 --new-tokens 3 --repeat 1 --batch 1 3"
    code, line, out, _ = bench(folder, words, capsys)
    assert code == 0 and [(row["batch"], row["cache_bytes"]) for row in line["rows"]] == [
        (batch, batch * SLOT * 2 * 4 * slots) for batch in (1, 3) for slots in (90, 20)
    ]  # fmt: skip
    for row in line["rows"]:
        assert row["decode_tokens_per_second"] * row["token_seconds"] == pytest.approx(row["batch"])
    assert "3 prompts together:" in out
    assert bench(folder, words.replace("--batch 1 3", "--batch 0"), capsys)[0] == 2


def test_a_threshold_follows_the_text(tmp_path, capsys):
    """Nothing else is its limit, unless it is named. Bytes and the range of slots over heads are those that stay."""
    folder, _ = save(tmp_path)
    high, low = "kvzip:threshold=2", "kvzip:threshold=-1"
    words = f"--policies {high} {low} {low},budget=140 --lengths 300 --new-tokens 2 --repeat 1"
    for more, means in (("", [300, 132, 300, 140]), (" --budget 150", [300, 132, 150, 140])):
        code, line, out, _ = bench(folder, words + more, capsys)
        assert code == 0 and [row["slots"] for row in line["rows"]][:2] == ["300", "132"]
        assert [row["cache_bytes"] for row in line["rows"]] == [SLOT * 2 * 4 * n for n in means]
        assert f"({132 / 300:.2f})" in next(text for text in out.splitlines() if text.split()[:2] == ["300", high])
    middle = "kvzip:threshold=0.006,sink=0,keep_last=9"
    _, line, _, _ = bench(folder, f"--policies {middle} --lengths 300 --new-tokens 2 --repeat 1", capsys)
    least, most = map(int, line["rows"][1]["slots"].split(".."))
    assert 9 <= least < most <= 300 and line["rows"][1]["cache_bytes"] < SLOT * 2 * 4 * 300


def test_layers_that_read_fewer_tokens_are_checked_without(tmp_path, capsys):
    """With `tsp` other logits come even where nothing is evicted."""
    folder, _ = save(tmp_path)
    words = "--budget 30 --chunk-size 40 --lengths 90 --new-tokens 2 --repeat 1"
    code, line, _, err = bench(folder, f"--policies take+edie/half:probe=4,kernel=5 {words}", capsys)
    assert code == 0, err
    assert line["rows"][1]["cache_bytes"] == SLOT * 2 * 4 * 30


def test_default_lengths_fit_the_context(tmp_path, capsys):
    folder, _ = save(tmp_path, max_position_embeddings=1200)
    _, line, _, _ = bench(folder, "--policies knorm --budget 20 --new-tokens 2 --repeat 1", capsys)
    assert [row["prompt_tokens"] for row in line["rows"]] == [1024, 1024, 1198, 1198]


def test_sliding_layers_do_not_count(tmp_path, capsys):
    """gemma3's tiny model has two full-attention layers among four."""
    folder, _ = save(tmp_path, "gemma3")
    _, line, _, _ = bench(folder, "--policies knorm --budget 20 --lengths 40 --new-tokens 2 --repeat 1", capsys)
    assert [row["cache_bytes"] for row in line["rows"]] == [SLOT * 2 * 2 * 40, SLOT * 2 * 2 * 20]


def disturbed(change):
    """A stand-in for `evicting` whose model's last weights are off by about `change` of the largest."""

    @contextlib.contextmanager
    def evicting(model, policy, **options):
        weight = model.lm_head.weight
        before = weight.detach().clone()
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
        with kvevict.evicting(model, policy, **options), torch.no_grad():
            weight.add_(change * before.abs().max() * noise)
            yield
            weight.copy_(before)

    return evicting


@pytest.mark.parametrize("change, fine", [(0.0, True), (1e-8, True), (1e-5, False), (float("nan"), False)])
def test_checks_before_timing(change, fine, tmp_path, capsys, monkeypatch):
    """A patched model that computes something else is found out, rounding is not."""
    folder, _ = save(tmp_path)
    monkeypatch.setattr(speed, "evicting", disturbed(change))
    code, _, out, error = bench(folder, "--policies knorm --budget 20 --lengths 40 --new-tokens 4 --repeat 1", capsys)
    assert (code == 0) == fine, error
    assert fine or (out == "" and "policy knorm" in error and "nothing was timed" in error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma3_text", "deepseek_v3", "falcon_h1", "gpt_oss"])
@pytest.mark.drawn(9)
def test_the_bound_follows_the_dtype(kind, dtype, monkeypatch):
    """As near the exact logits as the unpatched model's, but not with 1,000 times the dtype's rounding in the head."""
    model, ids = copy.deepcopy(zoo.model(kind)).to(dtype), tiny.prompt(length=90)["input_ids"]
    speed.check(model, ids, {"h2o": build("h2o", budget=8, chunk_size=16)})
    monkeypatch.setattr(speed, "evicting", disturbed(1000 * torch.finfo(dtype).eps))
    with pytest.raises(ValueError, match="policy h2o: though"):
        speed.check(model, ids, {"h2o": build("h2o", budget=8, chunk_size=16)})


def test_exact_logits(monkeypatch):
    """`Wide` computes what a model in the wider dtype does, and leaves the weights."""
    ids = tiny.prompt(length=60)["input_ids"]
    for narrow, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float64)):
        model = copy.deepcopy(tiny.shared()).to(narrow)
        with torch.no_grad():
            with speed.Wide(narrow):
                got = model(ids).logits
            assert {p.dtype for p in model.parameters()} == {narrow} and got.dtype == wide
            want = model.to(wide)(ids).logits
        assert tiny.relative(got, want) < (1e-5 if wide == torch.float32 else 1e-6)  # its norms are in fp32


def test_medians_by_hand():
    each = [dict(read_seconds=s, decode_seconds=d, peak_bytes=p) for s, d, p in ((3, 2, 5), (1, 1, 9), (2, 5, 1))]
    runs = [one | dict(new_tokens=11, report=dict(cache_bytes=7)) for one in each]
    want = dict(read_seconds=2, token_seconds=0.2, decode_tokens_per_second=20, peak_bytes=5, cache_bytes=7)
    assert speed.medians(runs, full=99, rows=4) == want
    del runs[0]["report"]
    assert speed.medians(runs, full=99, rows=4) == want | dict(cache_bytes=99)


def test_cells_by_hand():
    names = ("read_seconds", "token_seconds", "decode_tokens_per_second", "peak_bytes", "cache_bytes")
    row = dict(zip(names, (1.5, 0.01, 100.0, 2**20, 2**19))) | dict(slots="3..9")
    base = dict(zip(names, (3.0, 0.05, 20.0, 0, 2**21)))
    assert cells(row, base).split() == [
        "1.5",
        "(0.50)",
        "10",
        "(0.20)",
        "100",
        "(5.00)",
        "1",
        "(-)",
        "0.5",
        "(0.25)",
        "3..9",
    ]


def test_no_foreign_warning(tmp_path, capfd):
    """Of the text that the prompts are cut from, which is longer than the tokenizer's limit."""
    folder, _ = save(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | dict(model_max_length=90)))
    words = "--policies knorm --budget 20 --lengths 60 --new-tokens 2 --repeat 1"
    assert main(["bench", "--model", folder, *words.split()]) == 0
    assert "indexing errors" not in capfd.readouterr().err


@pytest.mark.parametrize("words, message", [
    ("--lengths 8", "--lengths"), ("--lengths 40 4090 --new-tokens 9", "4087"), ("--repeat 0", "--repeat"),
    ("--new-tokens 1", "--new-tokens"), ("--policies snapvk", "snapkv"), ("--budget x", "--budget"),
])  # fmt: skip
def test_mistakes(words, message, tmp_path, capsys):
    folder, _ = save(tmp_path)
    code, _, out, error = bench(folder, words, capsys)
    assert code == 2 and message in error and not out
