"""Versions of Transformers: too old is an error, newer than the tested ones a warning, and
without it counts and plans are the same."""

import ast
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import counts
import pytest
from transformers import GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

import kvevict
from kvevict import compat, known
from kvevict.lab.analysis import plain
from kvevict.lab.analysis.shape import shape_of

ROOT = Path(kvevict.__file__).parent
NEWER = f"{compat.TESTED[1][0]}.{compat.TESTED[1][1] + 1}"

# -- the tested range --------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_range_is_the_declared_one():
    """The declared lowest versions and the range in README are `TESTED`; a newer version can be installed."""
    declared = pytest.importorskip("tomllib").loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    (needed,) = (each for each in declared["dependencies"] if each.startswith("transformers"))
    assert re.match(r"transformers>=([\d.]+)", needed)[1] == compat.OLDEST
    assert f"Transformers {compat.OLDEST} to {compat.NEWEST}" in (ROOT.parent / "README.md").read_text()


@pytest.mark.quick
def test_versions():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in (compat.OLDEST, f"{compat.OLDEST}.1", f"{compat.NEWEST}.7", f"{compat.NEWEST}.0.dev0"):
            assert compat.checked(version) in {(5, 4), compat.TESTED[1]}
    for old in ("4.57.1", "5.3.9"):
        with pytest.raises(ImportError, match=f"needs transformers {compat.OLDEST} or newer, found {old}; run: pip"):
            compat.checked(old)
    for new in (f"{NEWER}.0", f"{NEWER}.0.dev0", "6.0"):
        with pytest.warns(
            UserWarning, match=f"tested with transformers {compat.OLDEST} to {compat.NEWEST}, found {new}"
        ):
            compat.checked(new)


@pytest.mark.parametrize("version, code", [(f"{NEWER}.0", 0), ("5.3.0", 1)])
def test_another_version_is_installed(version, code, tmp_path):
    """A newer one warns once, and then all goes on; an older one stops the first use."""
    (tmp_path / f"transformers-{version}.dist-info").mkdir()
    (tmp_path / f"transformers-{version}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n"
    )
    source = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT.parent)!r}]; import kvevict; "
    source += "print(len(kvevict.policies())); kvevict.patch, kvevict.read"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    if code:
        assert f"ImportError: kvevict needs transformers {compat.OLDEST} or newer, found {version}" in done.stderr
    else:
        assert done.stdout.split() == [str(len(kvevict.policies()))]
        assert done.stderr.count(f"tested with transformers {compat.OLDEST} to {compat.NEWEST}, found {version}") == 1


# -- what is imported --------------------------------------------------------------------------------------------------


def private(text: str) -> list:
    """Names with an underscore that a file imports from Transformers, modules' paths included."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            names = [] if node.level else [f"{node.module}.{name}" for name in names]
        found += [name for name in names if name.split(".")[0] == "transformers" and "._" in name]
    return found


@pytest.mark.quick
def test_nothing_private_is_imported():
    files = list(ROOT.rglob("*.py"))
    assert len(files) > 100
    assert [(file.name, name) for file in files for name in private(file.read_text("utf-8"))] == []


@pytest.mark.parametrize("text, found", [
    ("from transformers.a import b, _c", ["transformers.a._c"]), ("import transformers._a", ["transformers._a"]),
    ("def f():\n    from transformers._a import b", ["transformers._a.b"]),
    ("from transformers import a\nfrom .transformers import _b\nfrom torch import _C", []),
])  # fmt: skip
def test_what_is_private(text, found):
    assert private(text) == found


def test_stand_ins_are_of_methods_that_there_are():
    """And a model without such a method is patched all the same."""
    from transformers import LlamaForCausalLM

    assert all(hasattr(LlamaForCausalLM, name) for name in compat.STAND_INS)


# -- without Transformers ----------------------------------------------------------------------------------------------

# Runs a file with Transformers hidden, as though it were not installed.
WITHOUT = """
import importlib.metadata as metadata, runpy, sys

class Hiding:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

def version(name, found=metadata.version):
    if name == "transformers":
        raise metadata.PackageNotFoundError(name)
    return found(name)

sys.meta_path.insert(0, Hiding())
metadata.version = version
file, *sys.argv[1:] = sys.argv[1:]
runpy.run_path(file, run_name="__main__") if file.endswith(".py") else runpy.run_module(file, run_name="__main__")
"""


def run(*argv, seed="random") -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent), "PYTHONHASHSEED": seed}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=environment)


def without(*argv, **options) -> subprocess.CompletedProcess:
    return run("-c", WITHOUT, *argv, **options)


@pytest.mark.slow
def test_counts_are_the_same_without():
    """Of commands, their errors and their help, and of every preset. Each in a process that has read nothing, since a
    plan with TADA follows the history of the reads before it; under two hash seeds, as no sum may depend on them."""
    halves = run(counts.__file__, seed="1"), without(counts.__file__, seed="2")
    assert [done.returncode for done in halves] == [0, 0], [done.stderr for done in halves]
    want, got = (json.loads(done.stdout.splitlines()[-1]) for done in halves)
    assert got["presets"] == want["presets"]
    for ours, theirs in zip(got["commands"], want["commands"], strict=True):
        assert ours == theirs
    assert {code for _, code, _, _ in got["commands"]} == {0, 2}
    assert len([cost for cost in got["presets"].values() if isinstance(cost, dict)]) > 40


def test_what_needs_it_says_so(tmp_path):
    """`kvevict plan` of a model type whose config it does not read."""
    GemmaConfig().save_pretrained(tmp_path)
    done = without("kvevict", "plan", "--model", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "its sizes are read with Transformers (No module named 'transformers'); install it, or" in done.stderr
    assert "llama, mistral, qwen2, qwen3" in done.stderr


# -- sizes that are read from config.json alone ------------------------------------------------------------------------

SMALL = dict(
    vocab_size=90, hidden_size=64, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=300,
)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)  # fmt: skip
PLAIN = [
    LlamaConfig(**SMALL), LlamaConfig(**SMALL, tie_word_embeddings=True, head_dim=24, dtype="float32"),
    LlamaConfig(**SMALL, attention_bias=True), LlamaConfig(**SMALL, mlp_bias=True, pad_token_id=4),
    LlamaConfig(**SMALL, rope_parameters=LLAMA3), LlamaConfig(**SMALL | dict(num_key_value_heads=None)),
    MistralConfig(**SMALL, sliding_window=None), MistralConfig(**SMALL, sliding_window=None, head_dim=8),
    Qwen2Config(**SMALL), Qwen2Config(**SMALL, tie_word_embeddings=True, dtype="float16"), Qwen3Config(**SMALL),
    Qwen3Config(**SMALL, head_dim=16, attention_bias=True, tie_word_embeddings=True),
]  # fmt: skip


@pytest.mark.parametrize("config", PLAIN, ids=lambda config: config.model_type)
def test_plain_sizes_are_those_of_the_model(config, tmp_path):
    config.save_pretrained(tmp_path)
    for dtype in ("auto", "float32"):
        assert plain.read(str(tmp_path), dtype) == (shape_of(config, dtype), 300)
    assert plain.read(str(tmp_path / "config.json")) == plain.read(str(tmp_path))
    assert known.refused(config.model_type, config.model_type) is None
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        plain.read(str(tmp_path), "int8")


@pytest.mark.parametrize("changes", [
    dict(model_type="gemma"), dict(model_type=["llama"]), dict(hidden_size=None), dict(hidden_size=50),
    dict(num_hidden_layers=-1), dict(vocab_size="90"), dict(intermediate_size=True), dict(num_key_value_heads=3),
    dict(head_dim=12), dict(head_dim=520), dict(sliding_window=20), dict(sliding_window=20, use_sliding_window=False),
    dict(hidden_act="gelu"),
    dict(quantization_config={"bits": 4}),
    dict(attention_bias=1), dict(pad_token_id=90), dict(layer_types=["sliding_attention"] * 3), dict(is_causal=False),
    dict(use_sliding_window=True), dict(rope_scaling={"type": "dynamic", "factor": 2.0}), dict(rope_scaling=[]),
    dict(rope_parameters={"rope_type": "longrope"}), dict(rope_parameters={"rope_type": "yarn"}),
    dict(rope_parameters={"rope_type": "llama3", "factor": 2.0}), dict(num_experts=4),
    dict(_attn_implementation="flex_attention"),
])  # fmt: skip
def test_what_is_left_to_transformers(changes, tmp_path):
    file = tmp_path / "config.json"
    config = LlamaConfig(**SMALL).to_dict()
    file.write_text(json.dumps(config))
    assert plain.read(str(file)) is not None
    file.write_text(json.dumps(config | changes))
    assert plain.read(str(file)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"llama"', "[" * 100_000])
def test_files_that_are_no_config(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    assert plain.read(str(tmp_path)) is None
    assert plain.read(str(tmp_path / "no.json")) is plain.read("owner/model") is plain.read("model.gguf") is None


def test_a_default_window_is_not_overlooked(tmp_path):
    """Mistral's config has one where it is not written."""
    config = MistralConfig(**SMALL, sliding_window=None).to_dict()
    del config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plain.read(str(tmp_path)) is None
