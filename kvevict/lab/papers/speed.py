"""Tables of time and memory: measured on this machine, or computed for the paper's own model and machine."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch

from ...models.adapter import Adapter
from ...policy.building import choose
from ...policy.policy import Policy
from ..analysis.cost import UNPATCHED, Hardware, largest_batch, plan
from ..analysis.shape import Shape, shape_of
from ..analysis.speed import alternate
from ..evaluate.runs import FULL, policy_for
from . import Found, Place, Setting, Table, Value
from .scores import laid_out
from .session import Session, kept

LLAMA: dict[str, object] = dict(vocab_size=128256, num_attention_heads=32, num_key_value_heads=8)
QWEN: dict[str, object] = dict(vocab_size=151936, num_key_value_heads=8, head_dim=128)
CONFIGS: dict[str, tuple[str, dict[str, object]]] = {  # the papers' models
    "LLaMA3.2-1B": ("Llama", LLAMA | dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
                                          tie_word_embeddings=True)),
    "LLaMA3.2-3B": ("Llama", LLAMA | dict(hidden_size=3072, intermediate_size=8192, num_hidden_layers=28,
                                          num_attention_heads=24, head_dim=128, tie_word_embeddings=True)),
    "LLaMA3.1-8B": ("Llama", LLAMA | dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32)),
    "Qwen3-1.7B": ("Qwen3", QWEN | dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28,
                                        num_attention_heads=16, tie_word_embeddings=True)),
    "Qwen3-4B": ("Qwen3", QWEN | dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
                                      num_attention_heads=32, tie_word_embeddings=True)),
    "Qwen3-8B": ("Qwen3", QWEN | dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
                                      num_attention_heads=32)),
    "Mistral-7B": ("Mistral", dict(vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                                   num_attention_heads=32, num_key_value_heads=8, sliding_window=None)),
}  # fmt: skip
TERA, GIGA = 2**40, 2**30  # LookaheadKV's TFLOPs and GB
H100 = Hardware(756 * TERA / 1e12, 2039 * GIGA / 1e9 * 0.9 / 0.7, 0.7)  # its H100 PCIe, with 0.9 of the bandwidth


def config_of(name: str) -> object:
    import transformers

    kind, sizes = CONFIGS[name]
    return getattr(transformers, f"{kind}Config")(**sizes, max_position_embeddings=2**18, dtype="bfloat16")


@cache
def shape(name: str) -> Shape:
    return shape_of(config_of(name))


@kept
def speed(session: Session, table: Table) -> Found:
    """Time prompts of generated text and `new` tokens after them, medians over `repeat` runs. Columns are names in
    `_metrics`. tokens/s counts the prompt's tokens and the new ones, of all prompts of a batch."""
    found, cells = Found({}), laid_out(session, table).cells()
    runs: dict[tuple[int, int, int], dict[str, list[Place]]] = {}
    for place, cell in cells.items():
        run = session.run_of(cell)
        if session.usable(run):
            key = cell.get("length", session.lengths[-1]), cell.get("batch", 1), cell["new"]
            name = UNPATCHED if run == FULL else f"{run.policy} {run.budget} {run.chunk_size}"
            runs.setdefault(key, {}).setdefault(name, []).append(place)
    setattr(session.model.generation_config, "eos_token_id", None)  # noqa: B010  all runs write as many tokens
    for (length, batch, new), places in runs.items():
        (ids,) = session.prompts(1, length=length)
        named = {name: session.run_of(cells[some[0]]) for name, some in places.items() if name != UNPATCHED}
        policies = {name: policy_for(run, ids.shape[1], (0,), model=session.model) for name, run in named.items()}
        told = {name: chosen.with_tokenizer(session.tokenizer) for name, chosen in policies.items()}
        timed = alternate(session.model, ids.expand(batch, -1), told, new, session.repeat)
        for name, some in places.items():
            metrics = _metrics(timed[name], ids.shape[1], batch, new)
            found.cells |= {place: Value(metrics[place[1]], n=session.repeat) for place in some}
    found.cells = {place: found.cells[place] for place in cells if place in found.cells}
    runs_each = f"medians of {session.repeat} runs" if session.repeat > 1 else "one run each"
    dtype = str(session.model.dtype).removeprefix("torch.")
    found.notes.append(f"{dtype}, threads: {torch.get_num_threads()}; {runs_each}.")
    return found


def _metrics(row: dict, prompt: int, batch: int, new: int) -> dict[str, float]:
    whole = row["read_seconds"] + (new - 1) * row["token_seconds"]
    return {
        "first token s": row["read_seconds"], "ms per token": 1000 * row["token_seconds"],
        "whole s": whole, "tokens/s": batch * (prompt + new) / whole, "new tokens/s": batch * new / whole,
        "KV MiB": row["cache_bytes"] / 2**20, "peak MiB": row["peak_bytes"] / 2**20,
    }  # fmt: skip


# -- computed ---------------------------------------------------------------------------------------------------------


def _policy(cell: Setting, **options: object) -> Policy | None:
    """Return a cell's policy, None for the full cache."""
    if cell["policy"] == FULL.policy:
        return None
    return choose(cell["policy"], budget=cell["budget"], chunk_size=cell.get("chunk"), **options).policy


def batches(session: Session, table: Table) -> Found:
    """Compute the largest batch, a power of two, of Mistral-7B in 64 GB; rows are context lengths."""
    found = Found({})
    for (row, column), cell in table.cells().items():
        if batch := largest_batch(shape("Mistral-7B"), _policy(cell), cell["length"], 64 * 10**9):
            found.cells[row, column] = Value(2 ** int(math.log2(batch)))
    return found


def parameters(session: Session, table: Table) -> Found:
    """Count the trainable parameters of lookahead rows in millions, and their share of the model, for the paper's
    models and this one."""
    import transformers

    found, (total, share) = Found({}), table.columns
    models: dict[str, torch.nn.Module] = {}
    with torch.device("meta"):
        for name, (kind, _) in CONFIGS.items():
            if name in table.rows:
                models[name] = getattr(transformers, f"{kind}ForCausalLM")(config_of(name))
        for name, model in (models | {"this model": session.model}).items():
            count = sum(weight.numel() for weight in Adapter(model).parameters())
            all_of_it = sum(weight.numel() for weight in model.parameters())
            found.cells[name, total], found.cells[name, share] = Value(count / 1e6), Value(100 * count / all_of_it)
    return found


def theory(session: Session, table: Table) -> Found:
    """Compute LookaheadKV's costs of LLaMA3.1-8B on an H100 with 128 slots, as its appendix B: non-causal attention, no
    logits, no time of scoring; TFLOPs (2^40), GB (2^30) of weights and of what drafts read, the time to the first token
    and above a forward pass in ms. A policy "oracle" stands for 32 lookahead rows, whose adapter of 20.6 million
    parameters is read besides, "speckv" for 32 rows that LLaMA3.2-1B has written after it read the prompt."""
    found, base, model = Found({}), {}, replace(shape("LLaMA3.1-8B"), head_weights=0)
    small = replace(shape("LLaMA3.2-1B"), head_weights=0)
    for (row, column), cell in table.cells().items():
        own, drafts = cell["policy"] == "oracle", cell["policy"] == "speckv"
        appended = Setting(policy="oracle", budget=cell["budget"])
        policy = _policy(appended, ids=tuple(range(32))) if own or drafts else _policy(cell)
        run = plan(model, policy, cell["length"], hardware=H100, causal=False)
        work, moved = sum(run["flops"].values()), run["moved"]["linear"] + run["moved"].get("drafts", 0)
        seconds = run["seconds"] - H100.seconds(run["flops"]["scoring"], run["moved"]["scoring"])
        seconds += own * H100.seconds(0, 2 * 20.6e6)
        if drafts:
            draft = plan(small, None, cell["length"], hardware=H100, causal=False, new_tokens=32)
            written = draft["decode"]
            work += sum(draft["flops"].values()) + written["flops"]
            moved += draft["moved"]["linear"] + written["moved"]
            seconds += draft["seconds"] + written["seconds"]
        base.setdefault(cell["length"], seconds)
        numbers = {
            "TFLOPs": work / TERA, "GB": moved / GIGA, "TTFT ms": 1000 * seconds,
            "overhead ms": 1000 * (seconds - base[cell["length"]]),
        }  # fmt: skip
        found.cells[row, column] = Value(numbers[column])
    return found


def flops(session: Session, table: Table) -> Found:
    """Compute a policy's share of the unpatched model's attention FLOPs, and its memory in GB (10^9), for LLaMA3.1-8B
    at 131,072 tokens."""
    found, tokens = Found({}), 131072
    plain = plan(shape("LLaMA3.1-8B"), None, tokens, causal=False)["flops"]["attention"]
    for (row, column), cell in table.cells().items():
        run = plan(shape("LLaMA3.1-8B"), _policy(cell), tokens, causal=False)
        numbers = {
            "attention FLOPs, %": 100 * run["flops"]["attention"] / plain, "peak GB": run["peak_bytes"] / 1e9,
            "KV and activations, GB": (run["peak_bytes"] - run["weight_bytes"]) / 1e9,
        }  # fmt: skip
        found.cells[row, column] = Value(numbers[column])
    return found


def refining(session: Session, table: Table) -> Found:
    """Compute CAOTE's eq. 53 to 56: the FLOPs of its scores as a share of the model's, for LLaMA3.1-8B and, by the same
    equations, this model. Rows are "prefill N" and "generation N"."""
    found, own = Found({}), shape_of(session.config)
    for model, sizes in (("", shape("LLaMA3.1-8B")), (", this model", own)):
        d, layers, inner = sizes.hidden, len(sizes.windows), sizes.kv_heads * sizes.head_dim
        for row, cell in table.rows.items():
            s, whole = cell["length"], row.startswith("prefill")
            layer = d + inner + sizes.mlp // 3 + 2 * s + 6
            base = 2 * layers * (s if whole else 1) * d * layer + d * (sizes.head_weights // d)
            for column, factor in table.columns.items():
                each = layers * s * ((4 if factor["policy"].endswith("fastcaote") else 7) * d + 3)
                found.cells[row, column + model] = Value(each / base)
    return found


COMPUTED = (batches, parameters, theory, flops, refining)  # they read no prompt
