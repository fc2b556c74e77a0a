"""Archives in files that are mapped into memory, and caches whose file stays mapped."""

import copy
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from recalling import POLICIES, SNAPKV, decoded
from tiny import prompt, shared

import kvevict
from kvevict.compat import CACHE
from kvevict.engine.read.budgets import places
from kvevict.engine.slots import mapped


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def conversation(model, options):
    """The logits of a text, of turns on a fork and on the cache itself, longer than the file's first size, and the
    cache."""
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
        for part in ("k", "v", "pos"):
            assert in_files(getattr(one.archive, part)) and not in_files(getattr(other.archive, part))
            assert not in_files(getattr(one.storage, part))
        for part in ("k", "v"):
            assert torch.equal(one.archive.dense(part), other.archive.dense(part))
    twin = copy.deepcopy(files)
    assert not in_files(twin.layers[0].archive.k)
    assert torch.equal(twin.layers[0].archive.dense("k"), files.layers[0].archive.dense("k"))


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

    with mock.patch.object(mapped, "_mapped", few), pytest.warns(UserWarning, match="has no room for .* bytes"):
        got, cache = conversation(model, SNAPKV | dict(recall=str(tmp_path)))
    assert torch.equal(got, want)
    assert not in_files(cache.layers[0].archive.k)


def test_refusals(tmp_path):
    model = shared()
    for folder in (tmp_path / "missing", Path("/proc")):
        with pytest.raises(ValueError, match=r"recall='.*': no file can be made there"):
            kvevict.patch(model, "snapkv", budget=64, recall=str(folder))
    here = mock.patch("kvevict.families.device_of", lambda module: torch.device("cuda"))
    with here, pytest.raises(ValueError, match="files are for a model on the CPU"):
        sys.modules["kvevict.patch"].check_folder(str(tmp_path), model)


KILLED = """
import sys, torch
sys.path[:0] = sys.argv[2:]
from tiny import prompt, shared
import kvevict
from kvevict.engine.slots.storage import Storage
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
        assert all(
            in_files(getattr(layer.storage.prefix, part)) for layer in loaded.layers for part in ("k", "v", "pos")
        )
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
