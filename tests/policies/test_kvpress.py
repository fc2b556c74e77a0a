"""Policies by kvpress' defaults keep the positions that kvpress keeps.

kvpress needs an older Transformers than our oldest, so it needs a separate environment:

    python3 -m venv DIR && DIR/bin/pip install torch==2.13.0 && DIR/bin/pip install kvpress==0.5.5
    KVPRESS_PYTHON=DIR/bin/python python -m pytest tests/policies/test_kvpress.py

It removes a ratio r: int(n (1 - r)) of n slots stay, of ChunkKV's runs as many. test_conventions.py lists the
differences of METHODS, and the cases without them.
"""

import json
import os
import pathlib
import subprocess

import pytest
import torch
from policy_cases import model, ours, tokens, truth
from untrained import published

import kvevict
from kvevict.engine.measure.quantities.compactor import sketch

PYTHON = os.environ.get("KVPRESS_PYTHON")
RUN = 20  # tokens of ChunkKV's runs
TOLD, PART = (5, 9, 2), 90  # KVzip's request to repeat, and the tokens of a part

pytestmark = pytest.mark.skipif(not PYTHON, reason="set KVPRESS_PYTHON to a Python that has kvpress, as described here")


def budget(name, length, ratio):
    """Slots that stay by kvpress' rounding."""
    if name != "chunkkv":
        return int(length * (1 - ratio))
    runs = -(-length // RUN)
    return RUN * int(runs * (1 - ratio)) - (RUN * runs - length)  # the last, short run is in the window


WINDOW = "window=64,kernel=5,pool=avg,reduce=mean"
DEFAULTS = {  # kvpress' name: the same in a text
    "snapkv": f"snapkv:{WINDOW}", "chunkkv": f"chunkkv:{WINDOW},c=20,exact=false", "adakv": f"adakv:{WINDOW},floor=all",
    "keydiff": "keydiff:unit=true", "expected": "expected:heads=equal,eps=0.0", "expected, ada": "expected:floor=all",
}  # fmt: skip
CASES = {
    "llama": [*DEFAULTS.items(), ("knorm", "knorm"), ("streaming", "streaming")],
    # Keys of qwen3 are of one length, so both keydiffs have the same mean.
    "qwen3": [*DEFAULTS.items(), ("keydiff", "keydiff")],
}


LENGTHS = ((224, 0.25), (204, 0.4), (164, 0.3))
KVZIP = dict(schedule="prompt", instruction=TOLD)
POOLED = KVZIP | dict(least=0)
ZAP = dict(layers="uniform", schedule="prompt", sink=0, recent=0)
CRITICAL = dict(refine="critical")
PARTS = {  # beside kvpress' name: preset, options, lengths and ratios
    # Half of the slots hold the window, and no head gets less than twice what it has for sure.
    "critical": (DEFAULTS["snapkv"], CRITICAL, ((224, 0.25), (264, 0.4))),
    "criticalada": (DEFAULTS["adakv"], CRITICAL, ((224, 0.25), (264, 0.4))),
    # Each head keeps its best; or heads of a layer compete.
    "kvzap-linear": ("gate", ZAP | dict(heads="equal"), LENGTHS),
    "kvzap-mlp": ("gate", ZAP | dict(heads="equal"), LENGTHS),
    "kvzap-mlp, ada": ("gate", ZAP, LENGTHS),
    # As many slots of every part as of any other: kvpress leaves the remainder to ties.
    "lagkv": ("lagkv", {}, ((4 + 3 * 128, 0.1645), (4 + 2 * 128 + 126, 0.2225))),
    # Whole blocks: in a shorter one kvpress' padding takes part in the softmax.
    "compactor": ("compactor", {}, ((12 + 256, 0.5), (12 + 256, 0.25))),
    # In one part as kvpress has it. Its second part has another instruction; `prepare` makes it equal to the first.
    "kvzip": ("kvzip", POOLED, ((204, 0.25), (125, 0.6))),
    "kvzip, layers": ("kvzip", KVZIP | dict(layers="uniform"), ((204, 0.25),)),
    "kvzip+": ("kvzip+", POOLED, ((204, 0.25),)),
    "kvzip, parts": ("kvzip", POOLED | dict(part=PART), ((204, 0.25),)),
    "kvzip+, parts": ("kvzip+", POOLED | dict(part=PART), ((125, 0.6),)),
}


@pytest.mark.parametrize("family", CASES)
def test_same_positions(family, tmp_path):
    made, cases = model(family), []
    made.save_pretrained(tmp_path)
    for kind in ("linear", "mlp"):
        published(tmp_path / f"kvzap-{kind}", made, kind, torch.float32)
        kvevict.gates.convert(tmp_path / f"kvzap-{kind}", made, tmp_path / f"gates-{kind}")
    torch.save(sketch(32), tmp_path / "sketch.pt")
    table = [(press, (text, {}, LENGTHS)) for press, text in CASES[family]] + [*PARTS.items()]
    for press, (name, options, lengths) in table:
        for length, ratio in lengths:
            own = dict(blend=ratio) if press == "compactor" else {}
            if name == "gate":
                own = dict(gates=str(tmp_path / press.split(",")[0].replace("kvzap", "gates")))
            options = options | own | dict(budget=budget(press, length, ratio))
            seed, (((_, want),),) = truth(made, name, [[length]], **options)  # no two scores that rounding may swap
            ((_, got),) = ours(made, name, [[length]], seed, **options)[0]
            assert got == want
            cases.append((press, ratio, tokens([[length]], seed)[0][0].tolist(), got))
    asks = [(press, ratio, ids) for press, ratio, ids, _ in cases]
    (tmp_path / "asks.json").write_text(json.dumps(asks))
    script = pathlib.Path(__file__).parents[1] / "lib/parity_kvpress.py"
    subprocess.run([PYTHON, "-I", script, tmp_path], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    answers = json.loads((tmp_path / "kept.json").read_text())
    for (name, ratio, ids, got), theirs in zip(cases, answers, strict=True):
        assert got == theirs, (name, ratio, len(ids))
