"""A reading that survives: `kvevict.read(file=)` goes on after what a killed process has read of a text."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from itertools import accumulate, pairwise
from pathlib import Path
from unittest import mock

import pytest
import tiny
import torch
import zoo
from recalling import POLICIES, every
from safetensors.torch import save_file
from tiny import prompt

import kvevict
from kvevict.asking.prompts import frame, ids_of
from kvevict.context import within
from kvevict.engine.memory import host, ranks
from kvevict.engine.memory.cache import EvictionCache
from kvevict.engine.memory.mapped import in_file
from kvevict.engine.watch.watcher import Watcher
from kvevict.models.compat import CACHE, cache_of
from kvevict.models.loading import load_model
from kvevict.policy.building import Chosen, build, choose
from kvevict.policy.run import Run
from kvevict.policy.tokenizer import told
from kvevict.store import resuming, sealed

pytestmark = pytest.mark.usefixtures("no_grad")
SNAPKV = POLICIES["snapkv"]
CHUNKED = {
    name: {option: value for option, value in options.items() if option != "tokenizer"} | dict(chunk_size=32)
    for name, options in POLICIES.items()
}


class Stopped(Exception):
    pass


class Words:
    """A tokenizer of texts of numbers."""

    chat_template = None

    def __call__(self, text, **options):
        return dict(input_ids=list(map(int, text.split())))


def text_of(tokens, seed=0):
    return " ".join(map(str, prompt(1, tokens, seed=seed)["input_ids"][0].tolist()))


def read(path, text, model=None, stop=None, tokenizer=None, **options):
    """The cache of a text. stop: Stopped is raised once there are so many parts, as if the process were killed."""
    write, options = resuming.Reading._write, options or SNAPKV

    def counted(self, cache, start, *args, **kwargs):
        write(self, cache, start, *args, **kwargs)
        if stop is not None and len(names(path)) >= stop:
            raise Stopped

    with mock.patch.object(resuming.Reading, "_write", counted):
        return kvevict.read(model or tiny.shared(), tokenizer or Words(), text, file=path, **options)


def stopped(path, text, stop, **options):
    with pytest.raises(Stopped):
        read(path, text, stop=stop, **options)
    return names(path)


def names(path):
    folder = Path(f"{path}.parts")
    return sorted(each.name for each in folder.iterdir() if each.name.isdigit()) if folder.exists() else []


def slots(cache):
    """The slots of all tokens, as numbers."""
    layers = [layer for layer in cache.recalled().layers if type(layer).__name__ != "DummyLayer"]
    return [[getattr(layer, name) for name in ("keys", "values")] for layer in layers]


def equal(one, other):
    return all(torch.equal(*pair) for a, b in zip(slots(one), slots(other), strict=True) for pair in zip(a, b))


class At(Watcher):
    """Keeps the slots of a text's first tokens, so many, as they are read."""

    cache: EvictionCache

    def __init__(self, tokens):
        self.tokens = tokens

    def chunk(self, cache):
        if cache.get_seq_length() == self.tokens:
            self.cache = cache.recalled()
            self.cache.sequence.half_read = False
            self.cache.sequence.policy = None  # it has no archive that a token goes to


def turns(text, counts, first=None, model=None, tokenizer=None, **options):
    """The cache of a text without files: of each turn so many tokens are kept, and the next one reads on from there,
    over the slots of all before. first: tokens that the first turn reads; the others read to the text's end."""
    model, tokenizer, past = model or tiny.shared(), tokenizer or Words(), {}
    ids = torch.tensor([frame(tokenizer, "")[0] + ids_of(tokenizer, text)])
    policy, run = choose(**options or SNAPKV)
    with kvevict.evicting(model, Chosen(told(policy, tokenizer), run), tokenizer=False):
        for start, stop in pairwise([0, *accumulate(counts)]):
            at = At(stop)
            with within(watchers=(at,)):
                out = model(ids[:, start : None if start else first], use_cache=True, logits_to_keep=1, **past)
            past = {CACHE: at.cache} if stop < ids.shape[1] else {}
    assert stop == ids.shape[1]
    return cache_of(out)


@pytest.mark.quick(name="snapkv")
@pytest.mark.parametrize("name", CHUNKED)
def test_goes_on(name, tmp_path):
    """Bit by bit the slots that turns in memory give, after one stop and after two."""
    path, text, options = tmp_path / "cache", text_of(200), CHUNKED[name] | dict(recall=str(tmp_path))
    plain = read(tmp_path / "plain", text, **options)
    assert equal(plain, turns(text, [200], **options)) and os.listdir(tmp_path) == ["plain"]
    assert stopped(path, text, 3, **options) == ["000000000", "000000008", "000000040"]
    assert stopped(path, text, 3, **options) == ["000000000", "000000072", "000000104"]
    got = read(path, text, **options)
    assert equal(got, turns(text, [72, 64, 64], **options))
    assert sorted(os.listdir(tmp_path)) == ["cache", "plain"] and path.stat().st_mode & 0o777 == 0o600
    assert all(map(in_file, every(got)))
    loaded = read(path, text, stop=0, **options)
    assert equal(loaded, got) and in_file(loaded.layers[0].storage)


@pytest.mark.parametrize("name", ["snapkv", "decode", "after"])
@pytest.mark.parametrize("more", [1, 2, 50])
def test_a_text_that_grows(name, more, tmp_path):
    """What a finished file has is not read again, nor what a stopped call for more has read."""
    path, text, options = tmp_path / "cache", text_of(150), CHUNKED[name]
    short = text_of(150).split()[: 150 - more]
    read(path, " ".join(short), **options)
    too_many = mock.patch.object(resuming, "slot_bytes", lambda model, kind, beside: 1 << 60)
    with too_many, pytest.raises(OSError, match="make room"):
        read(path, text, **options)
    if more == 50:
        assert stopped(path, text, 1, **options) == [f"{150 - more:09d}"]
    got, counts = read(path, text, **options), [150 - more, *([18, 32] if more == 50 else [more])]
    assert equal(got, turns(text, counts, counts[0], **options)) and got.get_seq_length() == 150
    assert os.listdir(tmp_path) == ["cache"]
    assert equal(read(path, text, stop=0, **options), got)
    with pytest.raises(ValueError, match="is of another text"):
        read(path, " ".join(short), **options)


def test_parts_that_hold_all(tmp_path):
    """As where a process is killed after the last chunk, or while it gives the whole file its name."""
    path, text = tmp_path / "cache", text_of(100)
    stopped(path, text, 4)
    with mock.patch.object(os, "replace", side_effect=Stopped), pytest.raises(Stopped):
        read(path, text)
    assert len(names(path)) == 4 and not path.exists()
    got = read(path, text, stop=0)
    assert equal(got, turns(text, [100])) and os.listdir(tmp_path) == ["cache"]


@pytest.mark.parametrize("damage", ["a byte", "cut", "empty", "missing"])
@pytest.mark.parametrize("at", [0, 8, 72])
@pytest.mark.drawn(4)
def test_a_damaged_part(damage, at, tmp_path):
    """The reading goes on before it, and says so; later parts are not used."""
    path, text = tmp_path / "cache", text_of(200)
    stopped(path, text, 5)
    part = Path(f"{path}.parts/{at:09d}")
    data = bytearray(part.read_bytes())
    data[random.Random(at).randrange(len(data))] ^= 1
    part.write_bytes({"a byte": data, "cut": data[: len(data) // 2]}.get(damage, b""))
    if damage == "missing":
        part.unlink()
    with pytest.warns(UserWarning, match=f"{part} is damaged or missing: the text is read anew from token {at}$"):
        got = read(path, text)
    assert equal(got, turns(text, [at, 200 - at] if at else [200])) and os.listdir(tmp_path) == ["cache"]


def test_others(tmp_path):
    """Files and parts of another text, model, policy or version, and files of `save_cache`, are refused and stay."""
    path, text, other = tmp_path / "cache", text_of(100), tiny.shared(seed=1)
    changed = dict(budget=32), dict(window=8), dict(kv="int8"), dict(policy="adakv")
    for stop in (3, None):
        if stop:
            stopped(path, text, stop)
        else:
            read(path, text)
        before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
        what = f"delete {path}{'.parts' if stop else ''}, or give another file="
        for options in changed:
            with pytest.raises(ValueError, match=f"was read with another .*; give that, {what}"):
                read(path, text, **SNAPKV | options)
        for words in (text_of(100, seed=1), text_of(20), text[:-3] + " 5" if stop is None else text_of(8) + " 7" * 90):
            with pytest.raises(ValueError, match=f"is of another text; {what}"):
                read(path, words)
        with pytest.raises(ValueError, match=f"written for another model: .*; {what}"):
            read(path, text, other)
        other_format = mock.patch.object(resuming, "FORMAT", "kvevict-cache-6")
        with other_format, pytest.raises(ValueError, match="another version"):
            read(path, text)
        assert before == {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
        read(path, text, **SNAPKV | dict(progress=True, compiled=True, recall=str(tmp_path)))  # are no difference
    kvevict.save_cache(read(path, text), tmp_path / "saved")
    with pytest.raises(ValueError, match="does not name its text"):
        read(tmp_path / "saved", text)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match=f"cache is damaged: .*; delete {path}, or give another file="):
        read(path, text)
    save_file(dict(weight=torch.ones(2)), tmp_path / "weights", metadata=dict(format="pt"))
    (tmp_path / "text").write_text("the text, as the commands take it by --file")
    for name in ("weights", "text"):  # nobody is told to delete these
        with pytest.raises(ValueError, match=f"{name} is not a cache: [^;]*; give another file=$"):
            read(tmp_path / name, text)
    with pytest.raises(ValueError, match="is not a cache written by kvevict"):
        stopped(tmp_path / "new", text, 2)
        kvevict.load_cache(tmp_path / "new.parts/000000004", tiny.shared())


def test_refusals(tmp_path):
    path, text = tmp_path / "cache", text_of(20)
    with pytest.raises(ValueError, match="add recall=True"):
        kvevict.read(tiny.shared(), Words(), text, "snapkv", budget=24, window=4, file=path)
    with pytest.raises(ValueError, match="a regular file"):
        read(tmp_path, text)
    with pytest.raises(FileNotFoundError, match="its folder is missing"):
        read(tmp_path / "missing/cache", text)
    (tmp_path / "cache.parts").write_text("a file")
    with pytest.raises(OSError):
        read(path, text)
    assert sorted(os.listdir(tmp_path)) == ["cache.parts"]


READS = """
import os, pathlib, signal, sys, time, traceback, warnings
import torch
import kvevict
from kvevict.models.loading import load_model

warnings.simplefilter("error")
torch.set_num_threads(1)
model, tokenizer = load_model(kvevict.small_llama(), "float32", "cpu")
options, path, text = eval(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]).read_text()
for line in sys.stdin:
    child = os.fork()
    if not child:
        try:
            kvevict.read(model, tokenizer, text, file=path, **options)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    time.sleep(float(line))
    os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1], flush=True)
"""
KILLED = dict(policy="take+edie", budget=64, recall=True, chunk_size=48)
FACTS = "The code of Naislet is 364735. The code of Breamuth is 906112. "
ASKED = ["Question: What is the code of Naislet?\nAnswer:"]


def killed(folder, kills, seed=0):
    """Kill a process that reads a text at random moments. What it leaves says how far it goes, no part is damaged, and
    the next one goes on from there. Returns how many left parts, and how many had read all."""
    path, copied, draw, found = folder / "cache", folder / "copy", random.Random(seed), [0, 0]
    model, tokenizer = load_model(kvevict.small_llama(), "float32", "cpu")
    text = FACTS + "The baker counted the boats and went home. " * 40
    policy = told(build(**KILLED), tokenizer)
    began = time.perf_counter()
    tokens = read(folder / "whole", text, model, tokenizer=tokenizer, **KILLED).get_seq_length()
    took, ends = time.perf_counter() - began, [0]  # how far the text was read each time
    (folder / "text").write_text(text)
    command = [sys.executable, "-W", "ignore", "-c", READS, repr(KILLED), str(path), str(folder / "text")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(kills):
            print(took * draw.random(), file=process.stdin, flush=True)
            assert int(process.stdout.readline()) in (0, signal.SIGKILL)
            if path.exists():
                found[1] += 1
                assert not names(path)
                got = read(path, text, model, stop=0, tokenizer=tokenizer, **KILLED)
                counts = [stop - start for start, stop in pairwise([*ends, tokens]) if stop > start]
                assert equal(got, turns(text, counts, model=model, tokenizer=tokenizer, **KILLED))
                assert kvevict.answer(model, tokenizer, got, ASKED, one_line=True) == ["The code of Naislet is 364735"]
                path.unlink()
                ends = [0]
            elif names(path):
                found[0] += 1
                shutil.copytree(f"{path}.parts", f"{copied}.parts")
                reading = resuming.Reading(copied, model, policy, Run(), ids_of(tokenizer, text))
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    reading._before()
                ends.append(reading.done)
                shutil.rmtree(f"{copied}.parts")
        process.stdin.close()
    return found


@pytest.mark.slow
def test_killed(tmp_path):
    left, ended = killed(tmp_path, 5)
    assert left and left + ended <= 5


def test_two_readers(tmp_path):
    """The second one is refused while the first one reads, and reads once that has ended."""
    path, text = tmp_path / "cache", text_of(100)
    stopped(path, text, 2)
    said = "another process is reading a text into it: wait, or give"
    with resuming._locked(f"{path}.parts", str(path)), pytest.raises(BlockingIOError, match=said):
        read(path, text)
    assert equal(read(path, text), turns(text, [36, 64])) and os.listdir(tmp_path) == ["cache"]


class Full:
    """Inside, a disk has room for so many files."""

    def __init__(self, files):
        self.files = files

    def __enter__(self):
        write = sealed.write

        def limited(*args):
            self.files -= 1
            if self.files < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*args)

        self.patch = mock.patch.object(sealed, "write", limited)
        self.patch.start()

    def __exit__(self, *error):
        self.patch.stop()


def test_a_full_disk(tmp_path):
    """The text is read on, with one warning, and the cache is in memory; the next call goes on after the parts."""
    path, text = tmp_path / "cache", text_of(200)
    with Full(3), pytest.warns(UserWarning) as told:
        got = read(path, text)
    ran_on, unwritten = [str(each.message) for each in told]
    assert "cache.parts holds the text up to token 72 (No space left on device): it is read on without" in ran_on
    assert "cache was not written (No space left on device): the cache is in memory alone." in unwritten
    assert equal(got, turns(text, [200])) and len(names(path)) == 3
    with Full(0), pytest.raises(OSError, match="No space left"):  # for the parts as one
        read(path, text)
    assert equal(read(path, text), turns(text, [72, 128])) and os.listdir(tmp_path) == ["cache"]


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "deepseek_v3", "gemma4_text"])
def test_other_models(family, tmp_path):
    """Windows, sinks, latents, and layers that read another one's slots."""
    model = tiny.shared(family) if family in tiny.FAMILIES else zoo.make(family, dict(zoo.types())[family])
    path, text = tmp_path / "cache", text_of(200)
    stopped(path, text, 3, model=model)
    got = read(path, text, model)
    assert equal(got, turns(text, [72, 128], model=model)) and os.listdir(tmp_path) == ["cache"]
    logits = []
    for cache in (got, read(path, text, model, stop=0)):
        with kvevict.evicting(model, **SNAPKV):
            logits.append(model(prompt(1, 20, seed=1)["input_ids"], **{CACHE: cache}, logits_to_keep=1).logits)
    assert tiny.relative(*logits) < 1e-4


def test_models_that_are_refused(tmp_path):
    path, text = tmp_path / "cache", text_of(20)
    for name in ("qwen3_next", "falcon_h1"):
        with pytest.raises(ValueError, match="layers with a state: read without it"):
            read(path, text, zoo.make(name, dict(zoo.types())[name]))
    two = mock.patch.object(resuming.ranks, "of", lambda model: ranks.Ranks(0, 2))
    with two, pytest.raises(ValueError, match="in tensor parallel read without it"):
        resuming.Reading(path, tiny.shared(), build(**SNAPKV), Run(), [5])
    assert not os.listdir(tmp_path)


def test_adapters(tmp_path):
    """LoRA is part of a model; learned tokens before a text have no place in the file."""
    peft = pytest.importorskip("peft")
    path, text = tmp_path / "cache", text_of(100)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(tiny.model(), config).eval()
    stopped(path, text, 2, model=tuned)
    with tuned.disable_adapter(), pytest.raises(ValueError, match="was written for another model"):
        read(path, text, tuned)
    assert equal(read(path, text, tuned), turns(text, [36, 64], model=tuned))
    learned = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ValueError, match="not those that PEFT puts before it"):
        read(tmp_path / "other", text, peft.get_peft_model(tiny.model(), learned).eval())


def test_a_chat(tmp_path):
    """The template's head counts as text; `answer` hands file= on."""
    path, tokenizer = tmp_path / "cache", tiny.chat_tokenizer()
    model, text = tiny.model(vocab_size=259, bos_token_id=None, pad_token_id=None), FACTS * 3
    stopped(path, text, 3, model=model, tokenizer=tokenizer)
    got = read(path, text, model, tokenizer=tokenizer)
    head, end = frame(tokenizer, "")[0], got.get_seq_length()
    assert head and end == len(head) + len(ids_of(tokenizer, text))
    with pytest.raises(ValueError, match="is of another text"):
        read(path, text, model, tokenizer=tiny.byte_tokenizer())
    want = kvevict.answer(model, tokenizer, kvevict.load_cache(path, model), ASKED, max_new_tokens=8)
    assert kvevict.answer(model, tokenizer, text, ASKED, max_new_tokens=8, file=path, **SNAPKV) == want


@pytest.mark.parametrize("name", ["snapkv", "int8"])
def test_an_archive_on_the_host(name, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "is_away", lambda device: True)
    path, text, options = tmp_path / "cache", text_of(200), CHUNKED[name] | dict(recall="memory")
    stopped(path, text, 3, **options)
    got = read(path, text, **options)
    assert all(archive.on_host for archive in every(got))
    assert equal(got, turns(text, [72, 128], **options)) and equal(read(path, text, stop=0, **options), got)
