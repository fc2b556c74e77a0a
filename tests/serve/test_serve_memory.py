"""The memory of `kvevict serve` beside what it stores."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import serving  # noqa: F401  # skips without the extra

from kvevict.serve import log
from kvevict.serve.start import server_of

SCRIPT = """
import ctypes, sys
import torch
from kvevict.serve.start import server_of
torch.set_num_threads(1)
from serving import FILLER, Client

class Used(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e used free f".split()]

libc = ctypes.CDLL("libc.so.6")
libc.mallinfo2.restype = Used
client, used = Client(server_of(memory=0, budget=128)), []
for tokens in range(200, 380, 3):
    ids = client.server.tokenizer(FILLER * 40)["input_ids"][:tokens]
    response = client.post("/v1/completions", prompt=client.server.tokenizer.decode(ids), max_tokens=1)
    assert response.status_code == 200, response.text
    now = libc.mallinfo2()
    used.append((now.used + now.mapped) / 2**20)
print(used[29], used[-1])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks the allocator of Linux")
def test_memory_does_not_grow_with_each_length():
    """Each new length of a prompt gives matrices new shapes, of which PyTorch keeps products that it has made."""
    own = dict(PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | own | dict(HF_HUB_OFFLINE="1"), capture_output=True, text=True
    )
    if "mallinfo2" in done.stderr:
        pytest.skip("the C library does not say what is used")
    assert done.returncode == 0, done.stderr[-2000:]
    early, late = map(float, done.stdout.split())
    assert late - early < 8, (early, late)  # MiB after 30 more lengths; 42 with PyTorch's own limits


def test_a_memory_for_few_answers_is_told(monkeypatch):
    """The bundled model has 4,096 bytes a token. An answer to a long prompt that chooses its slots may have 128 + 512 +
    1,024; one that attends to all 2,048 + 1,024, in twice the memory, since stored prefixes have most of them."""
    lines = []
    monkeypatch.setattr(log, "note", lambda message, level=logging.INFO, **facts: lines.append((message, level, facts)))
    for answers, told in ((1, True), (7, True), (8, False), (40, False)):
        lines.clear()
        chooses = "take+edie:recall=true,recall_after=16"
        assert server_of(memory=answers * 1536 * 4096 + 4095, budget=128).manager.reader.together() == min(answers, 16)
        lines.clear()
        server = server_of(memory=answers * 1664 * 4096 + 4095, budget=128, policy=chooses)
        assert server.manager.reader.together() == min(answers, 16)
        assert [(level, facts["answers"]) for message, level, facts in lines if "few answers" in message] == [
            (logging.WARNING, answers)
        ] * told
