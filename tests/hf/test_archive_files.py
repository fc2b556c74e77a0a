"""Archives in files that are mapped into memory, and caches whose file stays mapped."""

import copy
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
from recalling import POLICIES, SNAPKV, decoded, every
from safetensors import safe_open
from tiny import prompt, shared

import kvevict
from kvevict.engine.memory import mapped
from kvevict.engine.read.budgets import places
from kvevict.models.compat import CACHE
from kvevict.policy.building import build, choose
from kvevict.store import files, sealed

pytestmark = pytest.mark.usefixtures("no_grad")


def conversation(model, options):
    """Logits of a text and of turns on a fork and on the cache, longer than the file's first size; the cache."""
    outs = []
    with kvevict.evicting(model, **options):
        cache = model(prompt(1, 90)["input_ids"], logits_to_keep=1).past_key_values
        fork = cache.fork()
        for seed, each in enumerate([cache, fork, cache, cache], 1):
            outs.append(model(prompt(1, 60, seed=seed)["input_ids"], **{CACHE: each}, logits_to_keep=1).logits)
            outs.append(decoded(model, each).logits)
    return torch.cat(outs), cache


def in_files(tensor):
    """Whether a tensor lies in a mapped file."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps if "/kvevict-" in line]
    return any(start <= tensor.data_ptr() < stop for start, stop in spans)


@pytest.mark.parametrize("name", POLICIES)
def test_a_folder_s_archive_is_one_in_memory(name, tmp_path):
    """Bit by bit; the kept slots and what a fork adds lie in memory, and the folder shows no file."""
    model = shared()
    want, memory = conversation(model, POLICIES[name])
    got, files = conversation(model, POLICIES[name] | dict(recall=str(tmp_path)))
    assert torch.equal(got, want)
    assert not list(tmp_path.iterdir())
    for one, other in zip(files.layers, memory.layers, strict=True):
        assert places(one, False) == places(other, False)
        assert not any(in_files(getattr(one.storage, part)) for part in ("k", "v", "pos"))
    for one, other in zip(every(files), every(memory), strict=True):
        for part in ("k", "v", "pos"):
            assert in_files(getattr(one, part)) and not in_files(getattr(other, part))
        for part in ("k", "v"):
            assert torch.equal(one.dense(part), other.dense(part))
    twin = copy.deepcopy(files)
    assert not in_files(every(twin)[0].k)
    assert torch.equal(every(twin)[0].dense("k"), every(files)[0].dense("k"))


def test_the_file_goes_with_the_cache(tmp_path):
    model = shared()
    _, cache = conversation(model, SNAPKV | dict(recall=str(tmp_path)))
    assert "/kvevict-" in Path("/proc/self/maps").read_text()
    del cache
    assert f"{tmp_path}/kvevict-" not in Path("/proc/self/maps").read_text()


def test_a_full_disk(tmp_path):
    """The archive goes on in memory, with a warning, and nothing is lost."""
    model = shared()
    want, _ = conversation(model, SNAPKV)
    full = OSError(28, os.strerror(28))
    make, made = mapped._mapped, []

    def few(folder, size):
        made.append(size)
        if len(made) > 5:
            raise full
        return make(folder, size)

    with mock.patch.object(mapped, "_mapped", few), pytest.warns(UserWarning, match="cannot hold a file of .* bytes"):
        got, cache = conversation(model, SNAPKV | dict(recall=str(tmp_path)))
    assert torch.equal(got, want)
    assert not in_files(every(cache)[0].k)


def test_a_folder_s_path(monkeypatch, tmp_path):
    """A text, or a path, which means a folder whatever its name is."""
    monkeypatch.chdir(tmp_path)
    for given in ("memory", Path("memory"), str(tmp_path), tmp_path):
        policy, run = choose("snapkv", budget=64, recall=given)
        assert run.archive == ("memory" if given == "memory" else str(tmp_path / given))
        assert policy == build("snapkv", budget=64, recall=True)


def test_refusals(tmp_path):
    model = shared()
    for folder in (tmp_path / "missing", Path("/proc")):
        with pytest.raises(ValueError, match=r"recall='.*': no file can be made there"):
            kvevict.patch(model, "snapkv", budget=64, recall=str(folder))


KILLED = """
import sys, torch
sys.path[:0] = sys.argv[2:]
from tiny import prompt, shared
import kvevict
from kvevict.engine.memory.storage import Storage
append, seen = Storage.append, []
def noted(self, *args):
    seen.append(0)
    if len(seen) == 9:
        print("now", flush=True)
    return append(self, *args)
Storage.append = noted
with torch.no_grad(), kvevict.evicting(shared(), "snapkv", budget=24, window=4, chunk_size=32, recall=sys.argv[1]):
    for number in range(10**6):
        shared()(prompt(1, 900)["input_ids"], logits_to_keep=1)
"""


def test_a_killed_process_leaves_nothing(tmp_path):
    """Its files have no names, so the space is free again, whenever it is killed."""
    arguments = [str(tmp_path), str(Path(__file__).parent.parent / "lib")]
    with subprocess.Popen([sys.executable, "-c", KILLED, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["snapkv", "int8"])
def test_a_loaded_cache_reads_its_file_in_place(name, tmp_path):
    """Also once the file's name is another's or gone; a policy in it names no folder of the machine that wrote it."""
    model, turn, path = shared(), prompt(1, 20, seed=1)["input_ids"], tmp_path / "kvevict-cache"
    with kvevict.evicting(model, **POLICIES[name] | dict(recall=str(tmp_path))):
        cache = model(prompt(1, 120)["input_ids"], logits_to_keep=1).past_key_values
        want = model(turn, **{CACHE: cache.fork()}, logits_to_keep=1).logits
        kvevict.save_cache(cache, path)
        loaded = kvevict.load_cache(path, model, verify=False)
        assert all(in_files(buffer) for layer in loaded.layers for buffer in layer.storage.prefix.buffers)
        assert not any(in_files(x) for layer in copy.deepcopy(loaded).layers for x in layer.storage.tensors())
        before = path.read_bytes()
        other = tmp_path / "other"
        other.write_bytes(bytes(len(before)))
        other.rename(path)
        for _ in range(2):
            got = model(turn, **{CACHE: loaded.fork()}, logits_to_keep=1).logits
            assert (got - want).abs().max() < 1e-4
            path.unlink(missing_ok=True)
        again = model(turn, **{CACHE: loaded}, logits_to_keep=1).logits
        assert (again - want).abs().max() < 1e-4
    path.write_bytes(before)
    assert kvevict.load_cache(path, model).sequence.policy.recall is True


PROBE = """
import re, sys, threading
import torch
sys.path[:0] = sys.argv[2:3]
from tiny import model, prompt
import kvevict
from kvevict.models.compat import CACHE

def anonymous():
    return 1024 * int(re.search(r"Anonymous: +([0-9]+)", open("/proc/self/smaps_rollup").read())[1])

def growth(work):
    # of the memory that is no file's, at most, in bytes
    before, seen, done = anonymous(), [], threading.Event()
    def look():
        while not done.wait(0.002):
            seen.append(anonymous())
    looks = threading.Thread(target=look)
    looks.start()
    result = work()
    done.set()
    looks.join()
    return result, max(*seen, anonymous()) - before

def ask(cache):
    fork = cache.fork()
    logits = made(turn, **{CACHE: fork}, logits_to_keep=1).logits
    for _ in range(2):
        made(turn[:, :1], **{CACHE: fork})
    return logits

torch.set_num_threads(1)
made, turn, path = model(head_dim=128, max_position_embeddings=20000), prompt(1, 20, seed=1)["input_ids"], sys.argv[1]
options = dict(budget=64, window=8, chunk_size=512, recall=True, recall_after=int(sys.argv[3]))
torch.set_grad_enabled(False)
with kvevict.evicting(made, "snapkv", **options):
"""
SAVES = """
    for length in (600, 16384):  # the first one warms up
        cache = made(prompt(1, length)["input_ids"], logits_to_keep=1).past_key_values
        _, grown = growth(lambda: kvevict.save_cache(cache, path if length > 600 else path + ".small"))
    print(grown, ask(cache).sum().item(), flush=True)
"""
LOADS = """
    ask(kvevict.load_cache(path + ".small", made))
    cache, grown = growth(lambda: kvevict.load_cache(path, made))
    logits, more = growth(lambda: ask(cache))
    fork = cache.fork()
    ask_again = lambda: [made(turn, **{CACHE: fork}, logits_to_keep=1) for _ in range(2)]
    print(grown + more, logits.sum().item(), growth(ask_again)[1], flush=True)
    input()
    lines = open("/proc/self/smaps").read().split("VmFlags")
    [own] = [each for each in lines if path + chr(10) in each]
    sizes = [re.search(name + ": +([0-9]+)", own)[1] for name in ("Rss", "Private_Clean", "Private_Dirty")]
    print(*(1024 * int(size) for size in sizes), flush=True)
    input()
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="asks Linux")
@pytest.mark.parametrize("after", [0, 2])
def test_files_take_no_memory(after, tmp_path):
    """A cache with an archive of 16,384 tokens is saved, loaded and asked in 2 % of the file's bytes of memory; the
    choice after an answer's first tokens copies fewer than two of the four layers at a time. Two processes that load it
    share all of it, and answer as the one that saved it."""
    path, lib = tmp_path / "cache", str(Path(__file__).parent.parent / "lib")

    def start(script):
        words = [sys.executable, "-W", "ignore", "-c", PROBE + script, str(path), lib, str(after)]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def said(process):
        return list(map(float, process.stdout.readline().split()))

    with start(SAVES) as saves:
        grown, want = said(saves)
    size = path.stat().st_size
    assert size > 1 << 27 and grown < 0.02 * size
    with start(LOADS) as one, start(LOADS) as two:
        for each in (one, two):
            grown, got, second_turn = said(each)
            assert grown < (0.5 if after else 0.02) * size and abs(got - want) < 1e-3
            assert second_turn < 0.8 * size  # copies of four layers, one at a time: not all are returned at once
        for each in (one, two):
            print(file=each.stdin, flush=True)
            resident, *private = said(each)
            assert resident > 0.99 * size and sum(private) < 0.01 * size
        for each in (one, two):
            each.communicate("\n")
            assert each.returncode == 0


@pytest.mark.parametrize("name", ["snapkv", "int8"])
def test_files_that_are_refused(name, tmp_path):
    """By name, before a turn: damaged anywhere, cut short, and of another model."""
    model, path = shared(), tmp_path / "cache"
    with kvevict.evicting(model, **POLICIES[name]):
        kvevict.save_cache(model(prompt(1, 120)["input_ids"], logits_to_keep=1).past_key_values, path)
    data = path.read_bytes()
    for at in range(5, len(data), len(data) // 40):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            kvevict.load_cache(path, model)
    path.write_bytes(data[:-100])
    for verify in (True, False):
        with pytest.raises(ValueError, match=re.escape(str(path))):
            kvevict.load_cache(path, model, verify=verify)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} was written for another model: its weights"):
        kvevict.load_cache(path, shared(seed=1))
    kvevict.load_cache(path, model)


def test_a_file_s_bytes_are_those_of_safetensors(tmp_path):
    """Of slots that lie in several places: an archive's first ones, later ones, decoded ones."""
    model, path, kinds = shared(), tmp_path / "cache", (torch.bool, torch.uint8, torch.float16, torch.int64)
    with kvevict.evicting(model, **SNAPKV):
        cache = model(prompt(2, 120)["input_ids"], logits_to_keep=1).past_key_values.fork()
        decoded(model, cache)
        model(prompt(2, 20, seed=1)["input_ids"], **{CACHE: cache}, logits_to_keep=1)
        decoded(model, cache)
        assert every(cache)[0].prefix.counts.any() and every(cache)[0].counts.any()
    kvevict.save_cache(cache, path, name='"checksum": "00000000" \n \x7f ü')
    other = {str(kind): torch.ones(3, 5).to(kind)[:, ::2] for kind in kinds} | {"scalar": torch.tensor(1.5)}
    sealed.write(tmp_path / "other", other, {})
    for each in (path, tmp_path / "other"):
        with safe_open(each, framework="pt") as file:
            texts = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        found, want = each.read_bytes(), safetensors.torch.save(tensors, texts)
        end = 8 + int.from_bytes(want[:8], "little")
        assert (found[:8], found[end:]) == (want[:8], want[end:])
        one, two = (json.loads(data[8:end]) for data in (found, want))
        assert one == two and list(one) == list(two)  # but for the order of the texts, which safetensors draws


def test_machines_that_share_files(tmp_path, monkeypatch):
    """Where another machine could remove the file, load_cache copies it."""
    model, path = shared(), tmp_path / "kvevict-cache"
    with kvevict.evicting(model, **SNAPKV):
        kvevict.save_cache(model(prompt(1, 120)["input_ids"], logits_to_keep=1).past_key_values, path)
    assert not files.is_remote(path)
    number = os.stat(path).st_dev
    line = "22 27 {}:{} / /mnt rw,relatime shared:1 - {} somewhere rw\n"
    for kind, remote in (("nfs4", True), ("fuse.sshfs", True), ("ext4", False), ("tmpfs", False)):
        (tmp_path / "mounts").write_text(
            line.format(0, 12345, "nfs") + line.format(os.major(number), os.minor(number), kind)
        )
        monkeypatch.setattr(files, "MOUNTS", tmp_path / "mounts")
        assert files.is_remote(path) == remote
        assert in_files(kvevict.load_cache(path, model).layers[0].storage.gathered().k) != remote
    monkeypatch.setattr(files, "MOUNTS", tmp_path / "missing")
    assert not files.is_remote(path)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_file_that_cannot_be_finished(share, tmp_path):
    """As on a full disk: the one from before stays, and nothing else."""
    resource = pytest.importorskip("resource")
    model, path, limits = shared(), tmp_path / "cache", resource.getrlimit(resource.RLIMIT_FSIZE)
    with kvevict.evicting(model, **SNAPKV):
        caches = [model(prompt(1, length)["input_ids"], logits_to_keep=1).past_key_values for length in (90, 120)]
    sizes = []
    for cache in reversed(caches):
        kvevict.save_cache(cache, path)
        sizes.append(path.stat().st_size)
    before = path.read_bytes()
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * sizes[0]), limits[1]))
    try:
        with pytest.raises(OSError, match=re.escape(str(path))):
            kvevict.save_cache(caches[1], path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["cache"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_while_a_cache_with_an_archive_is_saved(tmp_path):
    """50 times, at any moment: the file is the one from before or the new one, each whole, with its archive."""
    model, path, draw = shared(), tmp_path / "cache", random.Random(5)
    ids, turn = prompt(1, 90)["input_ids"], prompt(1, 20, seed=1)["input_ids"]

    def asked(cache):
        with kvevict.evicting(model, **SNAPKV):
            return model(turn, **{CACHE: cache.fork()}, logits_to_keep=1).logits

    with kvevict.evicting(model, **SNAPKV):
        caches = [model(ids[:, : 60 + 30 * number], logits_to_keep=1).past_key_values for number in range(2)]
    want = [asked(cache) for cache in caches]
    kvevict.save_cache(caches[0], path)
    for _ in range(50):
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            for cache in itertools.cycle(reversed(caches)):
                kvevict.save_cache(cache, path)
                os.write(writes, b".")
        os.read(reads, draw.randint(1, 4))
        time.sleep(draw.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reads)
        os.close(writes)
        got = asked(kvevict.load_cache(path, model))
        assert torch.equal(got, want[0]) or torch.equal(got, want[1])
    assert len(list(tmp_path.iterdir())) > 1  # what a killed one was writing
