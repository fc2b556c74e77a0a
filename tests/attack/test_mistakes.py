"""Bad input to files and commands: one clear error that names the argument, and everything as it was."""

import errno
import io
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import prompt, save, shared
from transformers import DynamicCache

import kvevict
from kvevict.asking.prompts import MARGIN, first_ids, ids_of
from kvevict.cli import main
from kvevict.commands import read_text
from kvevict.engine.read.budgets import places
from kvevict.lab.analysis.cost import plan
from kvevict.lab.analysis.run import encode
from kvevict.lab.analysis.shape import shape_of
from kvevict.lab.evaluate.haystack import haystack
from kvevict.lab.evaluate.results import Results, read
from kvevict.lab.evaluate.tasks import TaskSettings
from kvevict.policy.apportion import apportion
from kvevict.policy.building import build
from kvevict.policy.checks import DEEPEST, PLENTY, parsed
from kvevict.policy.text import parse_policy
from kvevict.store import files, form, sealed
from kvevict.store.files import replacing, write
from kvevict.train.gates.labels import pieces
from kvevict.train.lookahead.data import _entries

DEEP = "[" * 100_000
DEEPER = "[" * (DEEPEST + 1) + "]" * (DEEPEST + 1)  # Python reads it
BEYOND = 10**23


@pytest.fixture(scope="module")
def cache():
    model, made = shared(), DynamicCache(config=shared().config)
    with torch.no_grad(), kvevict.evicting(model, "h2o", budget=10):
        model(**prompt(1, 40), past_key_values=made)
    return made


def command(capsys, *words) -> str:
    """The one line that a command refuses with."""
    capsys.readouterr()
    assert main(list(map(str, words))) == 2
    out, error = capsys.readouterr()
    lines = [line for line in error.splitlines() if line.startswith("kvevict ")]
    assert out == "" and lines == error.splitlines()[-1:] and lines[0].startswith(f"kvevict {words[0]}: ")
    return lines[0]


def test_a_loaded_cache_holds_nothing_of_its_file(cache, tmp_path):
    path = tmp_path / "cache"
    kvevict.save_cache(cache, path)
    loaded = kvevict.load_cache(path, shared())
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 8)
        file.write(b"\xff" * (size - size // 8))
    assert (loaded.sequence.seen == cache.sequence.seen).all()
    for a, b in zip(cache.layers, loaded.layers, strict=True):
        for name in ("k", "v", "pos", "len", "carry"):
            assert torch.equal(getattr(b, name)[: 0 if name in ("k", "v", "pos") else None],
                               getattr(a, name)[: 0 if name in ("k", "v", "pos") else None])  # fmt: skip
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        assert places(a, False) == places(b, False)


@pytest.mark.parametrize("lie", [
    lambda t, f: t.update({"0": torch.ones(1)}), lambda t, f: t.update({"0.len": torch.tensor(3, dtype=torch.int32)}),
    lambda t, f: [fact.update(columns=10**30) for fact in f], lambda t, f: [fact.update(columns=True) for fact in f],
    lambda t, f: f.__setitem__(0, json.loads(DEEPER)),
])  # fmt: skip
def test_caches_that_lie(cache, tmp_path, lie):
    path = tmp_path / "cache"
    kvevict.save_cache(cache, path)
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        meta = file.metadata()
    facts = json.loads(meta["layers"])
    lie(tensors, facts)
    sealed.write(path, tensors, meta | {"layers": json.dumps(facts)})
    if "0" in tensors:
        kvevict.load_cache(path, shared())  # tensors of no layer do no harm
        return
    with pytest.raises(ValueError, match=f"{path}(?!.*checksum)"):
        kvevict.load_cache(path, shared())


@pytest.mark.parametrize("text", [DEEP, DEEPER, "9" * 5000, "{}"])
def test_layers_of_a_cache_that_are_none(cache, tmp_path, text):
    path = tmp_path / "cache"
    sealed.write(path, {"0.k": torch.ones(1)}, {"format": form.FORMAT, "layers": text})
    with pytest.raises(ValueError, match=f"{path}(?!.*checksum)"):
        kvevict.load_cache(path, shared())


def test_what_the_file_system_refuses(cache, tmp_path):
    """A missing folder, a folder of that name, an empty path; and no file is left over."""
    with pytest.raises(FileNotFoundError):
        kvevict.save_cache(cache, tmp_path / "none" / "cache")
    (tmp_path / "folder").mkdir()
    for saved in (lambda path: kvevict.save_cache(cache, path), kvevict.history("mistakes").save):
        with pytest.raises(IsADirectoryError):
            saved(tmp_path / "folder")
        with pytest.raises(TypeError):
            saved(None)
    with pytest.raises(IsADirectoryError):
        kvevict.load_cache(tmp_path / "folder", shared())
    assert os.listdir(tmp_path) == ["folder"] and not os.listdir(tmp_path / "folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(cache, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        kvevict.save_cache(cache, tmp_path / "cache")


def test_a_disk_that_is_full(cache, tmp_path):
    """A limit of file sizes stands in for it: the old file stays, and no other."""
    path, limits = tmp_path / "cache", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_text("before")
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError) as error:
            kvevict.save_cache(cache, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(path))
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["cache"]


def test_links_bytes_and_devices(cache, tmp_path):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "cache", tmp_path / "link"
    link.symlink_to(target)
    kvevict.save_cache(cache, os.fsencode(link))
    assert link.is_symlink() and not target.is_symlink()
    assert os.listdir(tmp_path / "there") == ["cache"]
    assert kvevict.load_cache(os.fsencode(link), shared()).get_seq_length() == 40
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(ValueError, match="not a regular file"):
            kvevict.save_cache(cache, path)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_replacing_after_an_error(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        with open(temporary, "w") as file:
            file.write("half")
        raise KeyboardInterrupt
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("failing", ["mkdir", "fsync", "replace"])
def test_a_disk_that_fails(cache, tmp_path, monkeypatch, failing):
    """Whatever fails, the old file stays, no other is left, and the error names the file that was asked for."""
    saved = {name: tmp_path / name for name in ("cache", "history", "page")}
    for path in saved.values():
        path.write_text("before")

    monkeypatch.setattr(os, failing, mock.Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    writers = dict(
        cache=lambda path: kvevict.save_cache(cache, path), history=kvevict.history("mistakes").save,
        page=lambda path: write(path, "after"),
    )  # fmt: skip
    for name, path in saved.items():
        with pytest.raises(OSError) as error:
            writers[name](path)
        assert error.value.errno == errno.EIO and error.value.filename == str(path)
    monkeypatch.undo()
    assert all(path.read_text() == "before" for path in saved.values())
    assert sorted(os.listdir(tmp_path)) == sorted(saved)


def test_a_write_that_fails(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("before")

    class Full(io.FileIO):
        def write(self, data):
            super().write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "open", lambda name, mode: Full(name, mode.replace("b", "")), raising=False)
    with pytest.raises(OSError, match=f"No space left.*{path}"):
        write(path, "after")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["file"]


def test_writes_of_one_path_at_once(tmp_path):
    """Each has a separate file, also in one process; the last one to end stays."""
    path = tmp_path / "file"
    with replacing(path) as one, replacing(path) as other:
        Path(one).write_text("one")
        Path(other).write_text("other")
        assert one != other and not path.exists()
    assert path.read_text() == "one" and os.listdir(tmp_path) == ["file"]


def test_what_is_written_is_on_the_disk_first(tmp_path, monkeypatch):
    """The file is synced before it gets its name, the folder after; its mode is that of any new file."""
    calls, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: (calls.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle))
    )
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append(names), replace(*names)))
    write(tmp_path / "file", "text")
    (temporary, (source, target), folder), plain = calls, tmp_path / "plain"
    assert temporary == source and target == str(tmp_path / "file") and folder == str(tmp_path)
    plain.write_text("text")
    assert (tmp_path / "file").stat().st_mode == plain.stat().st_mode


NUMBERS = dict(
    h2o=("interval", "recent", "budget", "chunk_size"), vatp=("sink",),
    snapkv=("window", "kernel", "warmup_layers", "n_reuse"),
    take=("probe", "warmup_budget"), random=("seed",), fastkv=("tsp", "tsp_len"), laq=("n_d",), chunkkv=("c",),
)  # fmt: skip


@pytest.mark.parametrize("preset, option", [(name, option) for name, own in NUMBERS.items() for option in own])
@pytest.mark.parametrize("value", [PLENTY + 2, BEYOND + 1, -BEYOND - 1])  # a kernel is odd
def test_numbers_beyond_32_bits(preset, option, value):
    with pytest.raises(ValueError, match=f"{option}.* must be at (most|least)|budget=.*too small"):
        build(preset, **dict(budget=PLENTY) | {option: value})


@pytest.mark.parametrize("probe", [(0, BEYOND), (-BEYOND, 0), (BEYOND, BEYOND + 1)])
def test_spans_beyond_32_bits(probe):
    with pytest.raises(ValueError, match="probe"):
        build("take", budget=PLENTY, probe=probe)


def test_the_largest_budget_reads():
    model, inputs = shared(), prompt(2, 40, pad=(0, 9))
    want = tiny.generate(model, inputs)
    with kvevict.evicting(model, "h2o", budget=PLENTY, chunk_size=16, interval=PLENTY):
        assert torch.equal(tiny.generate(model, inputs), want)


@pytest.mark.parametrize("text", [DEEP, DEEPER, '{"budget": ' + DEEPER + "}", '{"score": ' + DEEP, "9" * 5000, "[}"])
def test_deep_json(text, tmp_path):
    """In a policy, a history and results; JSON within the limit is read."""
    path = tmp_path / "file"
    path.write_text(text + "\n")
    history = kvevict.history("deep")
    for read_it in (kvevict.Policy.from_json, lambda text: history.load(path), lambda text: read(path)):
        with pytest.raises(ValueError):
            read_it(text)
    assert (history.contexts, history.errors) == (0, [])
    assert parsed(DEEPER[1:-1]) is not None
    path.write_text('{"settings": {}}\n' + text + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read(path)
    assert parse_policy("take:probe=" + DEEPER)[1]["probe"] == DEEPER  # a word; probe refuses it


@pytest.mark.parametrize("data", [
    dict(contexts=1e400, errors=[1.0]), dict(contexts=2, errors=[10**400]), dict(contexts=1, errors="12"),
    dict(contexts=2, errors=[]), dict(contexts=0, errors=[1.0]), dict(contexts=True, errors=[1.0]),
    dict(contexts=BEYOND, errors=[1.0]), dict(contexts=2.5, errors=[1.0]), dict(contexts=1, errors=[True]),
])  # fmt: skip
def test_histories_that_lie(data, tmp_path):
    (tmp_path / "file").write_text(json.dumps(data))
    history = kvevict.history("lies")
    with pytest.raises(ValueError, match="is not a history"):
        history.load(tmp_path / "file")
    assert (history.contexts, history.errors) == (0, [])


@pytest.mark.parametrize("share", [[1e-310, 2e-310, 3e-310], [5e-324] * 3, [1e-320, 1.0, 1e-322], [1e100, 5e-324, 0]])
def test_tiny_shares_split_exactly(share):
    def split(share, total):
        least, most = torch.zeros(1, len(share)), torch.full((1, len(share)), 900.0)
        return apportion(torch.tensor([share], dtype=torch.double), torch.tensor([total]), least, most)

    for total in (7, 100, 1001):
        assert int(split(share, total).sum()) == total
    assert split([1e-310, 3e-310], 100).tolist() == [[25, 75]]


@pytest.mark.parametrize("span", [(1, 5), (30, 36), (-5, -1)])
def test_a_span_and_a_row_of_padding(span):
    """The rows with tokens read as they do alone."""
    model, inputs = shared(), prompt(2, 40, pad=(0, 40))
    options = dict(budget=12, probe=span, chunk_size=16)
    with torch.no_grad(), kvevict.evicting(model, "take", **options):
        got = model(**inputs).logits[0]
        kept = kvevict.report(model, positions=True)["positions"]
        want = model(inputs["input_ids"][:1]).logits[0]
        assert [layer[0] for layer in kept] == [l[0] for l in kvevict.report(model, positions=True)["positions"]]
    assert tiny.relative(got, want) < 1e-4


LINE = dict(task="toy", id="a", seed=0, policy="take", budget=8, chunk_size=None, mode="aware", metric="toy",
            score=0.5, tags={"length": 9})  # fmt: skip


@pytest.mark.parametrize("change", [
    dict(score="1"), dict(score=1e300), dict(score=True), dict(tags=[]), dict(tags={"a": []}), dict(mode=3),
    dict(budget="8"), dict(kept=3), dict(kept=[["a"]]), dict(metric="fidelity"), dict(task=None), dict(response=[[]]),
])  # fmt: skip
def test_foreign_lines(change, tmp_path, capsys):
    path, settings = tmp_path / "results", {"settings": {"model": "m"}}
    text = "".join(json.dumps(x) + "\n" for x in (settings, LINE, LINE | change))
    path.write_text(text)
    assert "line 3" in command(capsys, "eval", "--table-only", "--out", path)
    with pytest.raises(ValueError, match="line 3"):
        Results(path, settings["settings"])
    assert path.read_text() == text
    path.write_text("".join(json.dumps(x) + "\n" for x in (settings, LINE)))
    assert main(["eval", "--table-only", "--out", str(path)]) == 0


@pytest.mark.parametrize("first", ['{"settings": 1}', '{"settings": {"model": "m", "protocol": "take"}}', "7"])
def test_foreign_settings(first, tmp_path, capsys):
    (tmp_path / "results").write_text(f"{first}\n")
    command(capsys, "eval", "--table-only", "--out", tmp_path / "results")


def test_carriage_returns(tmp_path):
    """A file with other line ends is not the beginning that a killed process left."""
    path = tmp_path / "results"
    settings = {"a": 1, "question": "last"}
    text = "\r".join(json.dumps(x) for x in ({"settings": settings}, LINE)) + "\r"
    for known in (text, text.replace("\r", "\r\n")[:-1]):
        path.write_bytes(known.encode())
        if "\n" in known:
            Results(path, settings).file.close()
            assert path.read_bytes() == known[: known.rindex("\n") + 1].encode()
            continue
        with pytest.raises(ValueError, match="holds no results"):
            Results(path, settings)
        assert path.read_bytes() == known.encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    save(made)
    (made / "text").write_text("What is kept of this? " * 20)
    return made


def generate(folder, *words):
    return ["generate", "--model", folder, "--file", folder / "text", "--max-new-tokens", "2", "--budget", "64", *words,
            "Who?"]  # fmt: skip


def answer(printed: str) -> str:
    return json.loads(printed.splitlines()[-1])["runs"]["take+edie"]["answer"]


@pytest.mark.parametrize("words, said", [
    (["--device", "cuda:99"], "device 'cuda:99'"), (["--device", "tpu"], "device 'tpu'"),
    (["--device", "mps"], "device 'mps'"), (["--device", "meta"], "device 'meta'"),
    (["--policy", f"h2o:interval={BEYOND}"], "interval must be at most"),
    (["--budget", BEYOND], "budget must be at most"), (["--chunk-size", BEYOND], "chunk_size must be at most"),
    (["--policy", "take:probe=" + DEEPER], "probe must be"),
])  # fmt: skip
def test_arguments_of_generate(words, said, folder, capsys):
    assert said in command(capsys, *generate(folder, *words))


def test_none_and_true_as_python_takes_them(folder, capsys):
    policies = "take:warmup_layers=none take:warmup_layers=None chunkkv:per_head=True,window=4 tova:per_head=true"
    for policy in policies.split():
        assert main(list(map(str, generate(folder, "--policy", policy)))) == 0
        capsys.readouterr()


@pytest.mark.parametrize("change, said", [
    (dict(hidden_size="x"), "cannot be loaded"), (dict(num_attention_heads=0), "config"),
    (dict(head_dim=12), "head_dim 12"), (dict(head_dim=1024), "head_dim 1024"), (dict(dtype="float64"), "float64"),
    (dict(num_key_value_heads=0), "config"), (dict(hidden_size=10**12, intermediate_size=10**12), "config"),
    (dict(model_type="bloom"), "ALiBi"), (dict(model_type="bert"), "cannot be"), (dict(num_hidden_layers=0), ""),
])  # fmt: skip
def test_odd_configs(change, said, tmp_path, capsys):
    config = shared().config.to_dict() | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert said in command(capsys, "plan", "--model", tmp_path)


def test_plan_refuses_what_patch_refuses():
    dynamic = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    for changes, name in ((dict(head_dim=12), "streaming"), (dict(rope_parameters=dynamic), "expected")):
        made = tiny.model(**changes)
        policy = build(name, budget=40)
        with pytest.raises(ValueError) as patched:
            kvevict.patch(made, policy)
        with pytest.raises(ValueError) as planned:
            plan(shape_of(made.config, "float32"), policy, 100)
        assert str(planned.value) == str(patched.value)


class Bytes(io.TextIOWrapper):
    """Standard input of some bytes."""

    def __init__(self, data):
        super().__init__(io.BytesIO(data), "utf-8")


WRITTEN = "caf\u00e9 \u2713\r\nand\rend"
MARKED = {
    "utf-8": b"", "utf-8-sig": b"", "utf-16": b"", "utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff", "utf-32": b"",
    "utf-32-be": b"\0\0\xfe\xff",
}  # fmt: skip


@pytest.mark.parametrize("encoding", MARKED)
def test_a_text_s_mark_names_its_encoding(encoding, tmp_path, monkeypatch):
    """In a file, on standard input, in texts and pairs to train on, and in a haystack."""
    data, path, want = MARKED[encoding] + WRITTEN.encode(encoding), tmp_path / "text.txt", "caf\u00e9 \u2713\nand\nend"
    path.write_bytes(data)
    monkeypatch.setattr(sys, "stdin", Bytes(data))
    assert read_text(str(path)) == read_text("-") == want
    assert haystack(TaskSettings(None, 100, 1, haystack=str(path))).documents == [want]
    ids = torch.cat(pieces(path, tiny.byte_tokenizer(), 20, 10**6, 300))
    assert ids.tolist() == tiny.byte_tokenizer()(want, add_special_tokens=False)["input_ids"]
    pair = json.dumps(dict(prompt=WRITTEN, response="y"), ensure_ascii=False)
    path.write_bytes(MARKED[encoding] + f"\r\n{pair}\r\n".encode(encoding))
    assert [*_entries(path)] == [(f"{path} line 2", dict(prompt=WRITTEN, response="y"))]


@pytest.mark.slow
@pytest.mark.parametrize("data, said", [
    (b"caf\xc3\xa9 \xe9\n", "byte 6 is not UTF-8"), (b"\xff\xfeab\0", "byte 4 is not UTF-16"),
    (b"\xff\xfe\0\0a\0\0\0\0\0\x11\0", "byte 8 is not UTF-32"), (b"\xef\xbb\xbfa\xff", "byte 4 is not UTF-8"),
])  # fmt: skip
def test_bytes_that_are_no_text(data, said, folder, tmp_path, monkeypatch, capsys):
    path = tmp_path / "text"
    path.write_bytes(data)
    monkeypatch.setattr(sys, "stdin", Bytes(data))
    for name in (str(path), "-"):
        with pytest.raises(ValueError, match=f"^--file {name}: {said}.*give a text in UTF-8"):
            read_text(name)
    assert said in command(capsys, *generate(folder)[:-1], "--file", path, "Who?")
    for each in (lambda: pieces(path, None, 20, 100, 300), lambda: [*_entries(path)],
                 lambda: haystack(TaskSettings(None, 100, 1, haystack=str(path)))):  # fmt: skip
        with pytest.raises(ValueError, match=f"{path}: {said}"):
            each()


@pytest.mark.slow
def test_words_whatever_the_locale(folder, capsys):
    words = [*map(str, generate(folder)[:-1]), "caf\u00e9?", "--opening", "\u00e9"]
    run = subprocess.run(
        [sys.executable, "-m", "kvevict", *words], capture_output=True,
        env=os.environ | dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr.decode()[-500:]
    capsys.readouterr()
    assert main(words) == 0
    assert answer(run.stdout.decode()) == answer(capsys.readouterr().out)


def test_a_terminal_without_the_letters(monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "ascii"))
    monkeypatch.setitem(kvevict.commands.COMMANDS, "policies", lambda parser, argv: print("caf\u00e9 \u2713"))
    assert main(["policies"]) == 0
    assert out.getvalue() == b"caf\\xe9 \\u2713\n"


def test_a_long_text_is_tokenised_as_far_as_needed(folder):
    """The ids are those of the whole text, cut."""
    tokenizer, seen = tiny.byte_tokenizer(), []

    class Counted:
        chat_template = None

        def __call__(self, text, **options):
            seen.append(len(text))
            return tokenizer(text, **options)

    text = "some words and more " * 100_000
    for count in (1, 500):
        ids, whole = first_ids(Counted(), text, count)
        assert ids == ids_of(tokenizer, text[: 4 * count + 99])[:count] and not whole
    assert max(seen) < 20_000
    for count in (3, 4):
        assert first_ids(Counted(), "abcd", count) == (ids_of(tokenizer, "abcd")[:count], count == 4)
    made = encode(Counted(), text, "?", limit=100)
    assert len(made.context) + len(made.question) == 100 and max(seen) < 20_000
    long = "x" * (8 * (10 + MARGIN) + 1)  # few tokens of many letters

    class Wide(Counted):
        def __call__(self, text, **options):
            return {"input_ids": [len(text)] * (len(text) // 100)}

    assert len(first_ids(Wide(), long * 20, 10)[0]) == 10
