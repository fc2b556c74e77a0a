"""Damaged and foreign files: each gives a ValueError, TypeError or OSError, or a right result, and nothing is lost."""

import contextlib
import json
import math
import os
import shutil

import fuzzing
import pytest
import tiny
import torch
import untrained
from fuzzing import changed, damaged, text
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import prompt, shared
from transformers import DynamicCache

import kvevict
from kvevict.lab.evaluate import table
from kvevict.lab.evaluate.results import Results, read
from kvevict.policy.building import build
from kvevict.store import sealed

REFUSED = (ValueError, TypeError, OSError)
READERS = {
    "llama": ("h2o", dict(budget=10)),  # carried scores, decodes
    "gemma2": ("take", dict(budget=10, probe=6, chunk_size=16, decode=True)),  # sliding windows, the last queries
}


@pytest.fixture(autouse=True, scope="module")
def no_disk():
    """Files are not synced: the time of that depends on the disk's other users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """(family, bytes, tensors, metadata) of good files of two rows."""
    folder, made = tmp_path_factory.mktemp("caches"), []
    for family, (policy, options) in READERS.items():
        model, path = shared(family), folder / family
        cache, inputs = DynamicCache(config=model.config), prompt(2, 40, pad=(0, 9))
        with torch.no_grad(), kvevict.evicting(model, policy, **options):
            model(**inputs, past_key_values=cache)
            mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
            model(torch.tensor([[5], [6]]), attention_mask=mask, past_key_values=cache)
        kvevict.save_cache(cache, path)
        with safe_open(path, framework="pt") as file:
            made.append((family, path.read_bytes(), load_file(path), file.metadata()))
    return made


def tensor(rng, x):
    """A tensor of another shape, dtype, size or content."""
    kind = rng.randrange(7)
    if kind == 0:
        return x.to(rng.choice((torch.float32, torch.float16, torch.int32, torch.int64, torch.bool, torch.uint8)))
    if kind == 1:
        return x.flatten()
    if kind == 2:
        return x[: rng.randrange(len(x) + 1)] if x.ndim else x[None]
    if kind == 3:
        return x[None].expand(rng.choice((1, 2)), *x.shape)
    if kind == 4:
        return x.new_zeros(rng.choice(((), (0,), (2,), (2, 2), (0, 3, 0, 5))))
    if kind == 5 and not x.is_floating_point() and x.numel():
        x = x.clone()
        x.view(-1)[rng.randrange(x.numel())] = rng.choice((-1, 0, 1, 2**31 - 1, -(2**31), 40, 41))
        return x
    return torch.cat([x, x]) if x.ndim else x + 1


def test_caches(caches, tmp_path):
    """A loaded cache decodes two tokens and can be saved."""
    path = tmp_path / "cache"

    def case(rng):
        family, data, tensors, meta = rng.choice(caches)
        if rng.random() < 0.5:
            path.write_bytes(damaged(rng, data))
            with pytest.raises(REFUSED) if path.read_bytes() != data else contextlib.nullcontext():
                kvevict.load_cache(path, shared(family))
            return "damaged"
        else:
            tensors, facts = dict(tensors), json.loads(meta["layers"])
            for _ in range(rng.choice((1, 1, 3))):
                name = rng.choice([*tensors])
                if rng.random() < 0.2:
                    tensors[rng.choice((name, "0", "0.", "1.2.3", "x"))] = tensors.pop(name)
                elif rng.random() < 0.6:
                    tensors[name] = tensor(rng, tensors[name])
                else:
                    facts = changed(rng, facts)
            tensors = {name: x.contiguous().clone() for name, x in tensors.items()}
            sealed.write(path, tensors, meta | {"layers": json.dumps(facts)})
        model, (policy, options) = shared(family), READERS[family]
        before = path.read_bytes()
        try:
            cache = kvevict.load_cache(path, model)
        except REFUSED:
            assert path.read_bytes() == before
            return "refused"
        seen = cache.get_seq_length()
        for head in (head.tolist() for layer in cache.layers if hasattr(layer, "positions") for row in layer.positions()
                     for head in row):  # fmt: skip
            assert head == sorted(set(head)) and all(0 <= position < seen for position in head)
        try:
            with torch.no_grad(), kvevict.evicting(model, policy, **options):
                for more in (1, 2):
                    mask = torch.ones(2, seen + more, dtype=torch.long)
                    model(torch.tensor([[5], [6]]), attention_mask=mask, past_key_values=cache)
        except REFUSED:
            return "loaded, not decoded with"
        kvevict.save_cache(cache, path)
        return "loaded"

    fuzzing.expect(fuzzing.fuzz(case, cases=300), "damaged", "refused", "loaded")


def beside(model, folder):
    """Files for a model, one of each kind that is for one model only: {a file: (policy, options)}."""
    kvevict.lookahead.Adapter(model, tokens=3, rank=1).save(folder / "adapter")
    kvevict.measure_queries(model, prompt(1, 60)["input_ids"][0], folder / "queries")
    untrained.written(folder / "gates", model)
    adapter, gates = (dict(adapter=str(folder / "adapter")), dict(gates=str(folder / "gates")))
    return {
        folder / "queries": ("expected", dict(stats=str(folder / "queries"))),
        folder / "adapter/adapter_model.safetensors": ("lookahead", adapter),
        folder / "adapter/config.json": ("lookahead", adapter),
        folder / "gates/gates.safetensors": ("gate", gates), folder / "gates/config.json": ("gate", gates),
    }  # fmt: skip


def test_adapters_gates_and_statistics(tmp_path):
    """`patch` refuses every damaged file and leaves the model unpatched."""
    model = shared()
    given = beside(model, tmp_path)
    good = {path: path.read_bytes() for path in given}

    def case(rng):
        path = rng.choice([*given])
        (policy, options), made = given[path], damaged(rng, good[path])
        path.write_bytes(made)
        try:
            with pytest.raises(REFUSED) if made != good[path] else contextlib.nullcontext():
                kvevict.patch(model, policy, budget=80, **options)
            assert made == good[path] or "_kvevict" not in model.model.__dict__
        finally:
            kvevict.unpatch(model)
            path.write_bytes(good[path])
        return "intact" if made == good[path] else path.name

    fuzzing.expect(fuzzing.fuzz(case, cases=300), *(path.name for path in given))


SIZES = [dict(num_hidden_layers=3), dict(num_hidden_layers=5), dict(num_key_value_heads=1), dict(num_key_value_heads=4),
         dict(head_dim=16), dict(hidden_size=32), dict(num_attention_heads=8)]  # fmt: skip


KINDS = ("family", "size", "rope", "seed", "one weight")


def another(rng, kind):
    """A model that is not `shared()`, but for one thing."""
    if kind == "family":
        return shared(rng.choice([name for name in tiny.FAMILIES if name not in ("llama", "mistral", "olmo2")]))
    if kind == "rope":
        return tiny.model(rope_parameters=dict(rope_type="default", rope_theta=rng.choice((1e5, 1e6))))
    if kind == "size":
        return tiny.model(**rng.choice(SIZES))
    if kind == "seed":
        return tiny.model(seed=rng.randrange(1, 10**6))
    made = tiny.model()
    with torch.no_grad():
        rng.choice([*made.model.parameters()]).mul_(1 + 2**-7)  # at least one step of bfloat16
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_caches_of_other_models(kind, tmp_path):
    """Live and saved, they are refused as another model's; model and cache are as before, and no file is left."""
    model, inputs, path = shared(), prompt(1, 40), tmp_path / "cache"
    plain, turn, policy = model(**inputs).logits, prompt(1, 3)["input_ids"], dict(budget=12, chunk_size=16)

    @torch.no_grad()
    def case(rng):
        other, name = another(rng, kind), rng.choice(("h2o", "streaming", "tova"))
        with kvevict.evicting(other, name, **policy):
            cache = other(**inputs, logits_to_keep=1).past_key_values
            kvevict.save_cache(cache, path)
            twin, want = cache.fork(), other(turn, past_key_values=cache.fork()).logits
            with pytest.raises(ValueError, match="another model"), kvevict.evicting(model, name, **policy):
                model(turn, past_key_values=twin)
            assert torch.equal(other(turn, past_key_values=twin).logits, want)
        with pytest.raises(ValueError, match=str(path)):
            kvevict.load_cache(path, model)
        assert [each.name for each in tmp_path.iterdir()] == ["cache"]
        path.unlink()
        assert torch.equal(model(**inputs).logits, plain)
        return "refused"

    fuzzing.fuzz(case, cases=5)


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_other_models(kind, tmp_path):
    """Adapters, gates and statistics are refused as another model's; model and files are as before."""
    model = shared()

    def case(rng):
        folder = tmp_path / "files"
        folder.mkdir()
        given = dict(beside(another(rng, kind), folder).values())
        left = sorted(folder.rglob("*"))
        for of, options in given.items():
            if (of, kind) != ("lookahead", "rope"):  # an adapter's rows are fitted to weights at any position
                with pytest.raises(ValueError, match="another model"):
                    kvevict.patch(model, of, budget=80, **options)
            assert "_kvevict" not in model.model.__dict__ and sorted(folder.rglob("*")) == left
        shutil.rmtree(folder)
        return "refused"

    fuzzing.fuzz(case, cases=3)


def policies(rng):
    name = rng.choice([name for name in kvevict.PRESETS if name not in ("lookahead", "gate")])
    options = dict(budget=rng.choice((0.3, 40)), chunk_size=rng.choice((None, 16)))
    with contextlib.suppress(ValueError):
        small = {"window": 4} if "window" in build(name, budget=500).rows.__dataclass_fields__ else {}
        return build(name, **options, **small)
    return build(name, budget=500)


def test_policies():
    """A parsed policy makes the same text again, can be patched with, and reads a prompt."""
    model, inputs = shared(), prompt(1, 40)
    plain = model(**inputs).logits

    def case(rng):
        made = text(rng, json.loads(policies(rng).to_json()))
        try:
            policy = kvevict.Policy.from_json(made.decode("utf-8", rng.choice(("replace", "surrogateescape"))))
        except REFUSED as error:
            assert str(error)
            return "refused"
        assert kvevict.Policy.from_json(policy.to_json()) == policy
        if type(policy.rows).__name__ == "Drafted" and policy.rows.most > 1000:
            return "read, drafts for hours"
        try:
            with torch.no_grad(), kvevict.evicting(model, policy):
                model(**inputs)
        except REFUSED:
            assert torch.equal(model(**inputs).logits, plain)
            return "read, not used"
        return "used"

    fuzzing.expect(fuzzing.fuzz(case, cases=300), "refused", "used")


def test_histories(tmp_path):
    """A parsed history splits a budget exactly."""
    path, history = tmp_path / "history", kvevict.history("attacked")
    policy = build("edie+tada", budget=50, task="attacked")

    def case(rng):
        errors = [rng.choice((0.0, 1.0, 1e-320, 5e-324, 1e300, rng.random())) for _ in range(4)]
        path.write_bytes(text(rng, dict(contexts=rng.randrange(1, 5), errors=errors)))
        history.reset()
        try:
            history.load(path)
        except REFUSED:
            assert (history.contexts, history.errors) == (0, [])
            return "refused"
        layers = len(history.errors) or 3
        history.add([[1.0] * layers])
        assert all(map(math.isfinite, history.errors))
        assert int(kvevict.policy.layers.layer_slots(policy, layers, 2, [400]).sum()) == 50 * 2 * layers
        return "loaded"

    fuzzing.expect(fuzzing.fuzz(case, cases=1000), "refused", "loaded")


def results(rng):
    """The lines of a file of results."""
    lines = [dict(settings=dict(model="m", budgets=[8], modes=["aware"], layers=2))]
    metric = rng.choice(("toy", "perplexity", "fidelity"))
    for at in range(rng.randrange(4)):
        for policy in ("full", "take"):
            own = dict(budget=8, chunk_size=rng.choice((None, 16)), mode="aware", kept=[[8, 8], None])
            full = dict(budget=None, chunk_size=None, mode=None, response=[1, 2])
            lines.append(dict(
                task="toy", id=f"toy/{at}", seed=0, policy=policy, metric=metric, score=rng.random(), same=0.5,
                tags=dict(length=1024, depth=rng.choice((0, 0.5))), **(full if policy == "full" else own),
            ))  # fmt: skip
    return lines


def test_results(tmp_path):
    """Parsed results make a table; a refused file keeps every byte."""
    path = tmp_path / "results"

    def case(rng):
        lines = results(rng)
        if rng.random() < 0.6:
            at = rng.randrange(len(lines))
            lines[at] = changed(rng, lines[at])
        data = rng.choice((b"\n", b"\n", b"\r\n", b"\r")).join(json.dumps(line).encode() for line in lines) + b"\n"
        data = damaged(rng, data) if rng.random() < 0.5 else data
        path.write_bytes(data)
        try:
            settings, kept = read(path)
            table.render(kept, rng.choice(((), ("depth",), ("length", "depth"))))
        except REFUSED:
            came = "refused"
        else:
            came = "read"
        try:
            with Results(path, settings if came == "read" else dict(model="m")):
                pass
        except REFUSED:
            assert path.read_bytes() == data
            return came
        assert path.read_bytes().startswith(data[: data.rfind(b"\n") + 1])
        return came + ", gone on with"

    fuzzing.expect(fuzzing.fuzz(case, cases=200), "refused", "read, gone on with")
