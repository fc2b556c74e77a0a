"""A model split over two processes (tp_plan="auto", gloo) keeps and generates the same as in one. The processes run
this file too: once, with all cases."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import fuzzing
import pytest
import tiny
import torch
from torch import distributed

import kvevict
from kvevict.engine.measure.quantities import compactor
from kvevict.engine.read.budgets import places

RANKS = 2
SIZES = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=16)
PROMPT, TURN = tiny.prompt(2, 60, pad=(0, 9)), tiny.prompt(2, 20, seed=2)
CHUNKS = dict(budget=16, chunk_size=16)
CASES = {  # name -> policy and options
    "take": ("take", CHUNKS | dict(probe=4)), "snapkv": ("snapkv", CHUNKS | dict(window=4)),
    "adakv": ("adakv", CHUNKS | dict(window=4)),
    "adakv max": ("adakv", CHUNKS | dict(window=4, floor="max", decode=True, interval=3)),
    "prompt kept": ("adakv", CHUNKS | dict(window=4, decode=True, interval=3, keep_prompt=True)),
    "edie+tada": ("edie+tada", CHUNKS | dict(window=4)), "cake": ("cake", CHUNKS | dict(window=4)),
    "cake ada": ("cake", CHUNKS | dict(window=4, heads="ada")), "chunkkv": ("chunkkv", CHUNKS | dict(window=4, c=4)),
    "chunkkv whole": ("chunkkv", dict(budget=17, window=4, c=4, exact=False, pool="avg", reduce="mean")),
    "edie runs": ("edie", CHUNKS | dict(window=4, pool="none", select="chunk", per_head=True, c=4, exact=False)),
    "take+chunkkv": ("take+chunkkv", CHUNKS | dict(probe=4, c=4)), "take+caote": ("take+caote", CHUNKS | dict(probe=4)),
    "tova": ("tova", CHUNKS), "tova reuse": ("tova", CHUNKS | dict(n_reuse=2)),
    "fastkv": ("fastkv", dict(budget=16, window=4, tsp_len=32)), "h2o": ("h2o", dict(budget=13, chunk_size=16)),
    "h2o flat": ("h2o", dict(budget=13, chunk_size=16, heads="flat")),
    "pyramidkv": ("pyramidkv", dict(budget=16, window=4)), "streaming": ("streaming", CHUNKS),
    "random": ("random", dict(budget=15)), "laq": ("laq", dict(budget=16, window=4)),
    "speckv": ("speckv", dict(budget=16, n_d=3, window=4)), "expected": ("expected", CHUNKS),
    "kvzip": ("kvzip", CHUNKS), "kvzip whole": ("kvzip", CHUNKS | dict(schedule="prompt", part=20)),
    "kvzip+": ("kvzip+", CHUNKS), "threshold": ("kvzip", dict(chunk_size=16, threshold=0.08, keep_last=4)),
    "threshold whole": ("expected", dict(budget=40, threshold=0.12, keep_last=4)),
    "gate": ("gate", CHUNKS | dict(recent=2)),
    "gate, decoding": ("gate", CHUNKS | dict(recent=2, layers="uniform", decode=True, interval=3)),
    "defensive": ("defensive", CHUNKS | dict(window=4, heads="equal")),
    "adakv critical": ("adakv", CHUNKS | dict(window=4, refine="critical")),
    "lagkv": ("lagkv", CHUNKS | dict(score=tiny.short_parts(4))),
    "compactor": ("compactor", CHUNKS | dict(sink=2, recent=2)),
    "packed": ("adakv", CHUNKS | dict(window=4, kv="k8v4")),
    "diagnose": ("adakv", CHUNKS | dict(window=4, diagnose=True)),
}  # fmt: skip
GATE = (  # each kind of choice that ranks share; nightly all of CASES
    "take", "adakv max", "edie+tada", "cake ada", "chunkkv whole", "tova reuse", "fastkv", "h2o flat", "laq",
    "threshold", "gate, decoding", "packed", "diagnose",
)  # fmt: skip
RUN = [*CASES] if fuzzing.NIGHTLY else GATE
FREE = (  # nothing travels
    "take", "snapkv", "take+caote", "h2o", "pyramidkv", "streaming", "random", "laq", "speckv", "defensive", "lagkv",
)  # fmt: skip
KEPT = ("adakv max", "h2o flat", "packed")  # saved, with decoded rows, sums and centres


@contextlib.contextmanager
def patched(model, case):
    """Of Compactor a chunk has several blocks, and more tokens than the sketch has columns."""
    policy, options = CASES[case]
    draft = dict(draft_model=tiny.shared(seed=3)) if policy == "speckv" else {}
    kvevict.history().reset()
    small = mock.patch.multiple(compactor, SKETCH=3, BLOCK=5)
    with small, kvevict.evicting(model, policy, **options, **draft):
        yield


def held(cache):
    return [places(layer, False) if hasattr(layer, "storage") else None for layer in cache.layers]


def generated(model, **options):
    return model.generate(**PROMPT, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, **options)


def read(model, case, sent=lambda: 0) -> dict:
    """The slots that a case kept at the prompt's end and after 12 tokens, those tokens, and its costs."""
    before = sent()
    with patched(model, case):
        out = generated(model)
        report = kvevict.report(model, positions=True)
    return dict(
        read=report["positions"], end=held(out.past_key_values), tokens=out.sequences, bytes=report["cache_bytes"],
        sent=sent() - before, diagnostics=report.get("diagnostics"),
    )  # fmt: skip


def go_on(model, cache, new=4):
    """Tokens [2, new] after a cache: a second turn's prompt is read, and its answer decoded."""
    mask = torch.cat([PROMPT["attention_mask"], TURN["attention_mask"]], 1)
    ids = torch.cat([PROMPT["input_ids"], TURN["input_ids"]], 1)
    return model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new, do_sample=False)[
        :, -new:
    ]


def turns(model) -> dict:
    """Beams, and second turns after forks of a cache and after the cache itself."""
    with patched(model, "adakv max"), torch.no_grad():
        beams, cache = generated(model, num_beams=2).sequences, model(**PROMPT).past_key_values
        tokens = [go_on(model, each) for each in (cache.fork(), cache.fork(), cache)]
    return dict(beams=beams, tokens=tokens, end=held(cache))


def save(model, folder):
    """Write a cache of every case of KEPT to a folder."""
    folder.mkdir(exist_ok=True)
    for case in KEPT:
        with patched(model, case), torch.no_grad():
            kvevict.save_cache(model(**PROMPT).past_key_values, folder / case)


def load(model, folder) -> dict:
    """The contents of `save`'s caches, and their continuations."""
    found = {}
    for case in KEPT:
        with patched(model, case):
            cache = kvevict.load_cache(folder / case, model)
            found[case] = dict(read=held(cache), tokens=go_on(model, cache), end=held(cache))
    return found


def refusal(function) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return "nothing"


def refusals(load_model, model, folder) -> dict:
    """This rank's errors for models and policies that cannot be split."""

    def decoder_alone():
        with kvevict.evicting(model.model, "snapkv", budget=64), torch.no_grad():
            model.model(**PROMPT)

    def other_policy():  # a layer's heads hold different slots, and would have to share a choice
        with patched(model, "adakv"), torch.no_grad():
            cache = model(**PROMPT).past_key_values
        with patched(model, "tova"):
            go_on(model, cache)

    few = load_model(folder / "few")
    return dict(
        few=refusal(lambda: kvevict.patch(few, "snapkv", budget=64)),
        lookahead=refusal(lambda: kvevict.patch(model, "lookahead", budget=16)),
        decoder=refusal(decoder_alone), policy=refusal(other_policy),
    )  # fmt: skip


def of_rank(heads: list, rank: int) -> list:
    """The part of [layer][row][head] that a rank has."""
    part = SIZES["num_key_value_heads"] // RANKS
    return [layer and [row[rank * part : (rank + 1) * part] for row in layer] for layer in heads]


@pytest.mark.slow
def test_in_two_processes(tmp_path):
    from untrained import written  # the processes cannot import it

    whole = {name: tiny.model(name, **SIZES) for name in ("llama", "gemma3", "phi3")}
    for name, model in [*whole.items(), ("few", tiny.model(**SIZES | dict(num_key_value_heads=1)))]:
        model.save_pretrained(tmp_path / name)
    model = whole["llama"]
    model.config._name_or_path = str(tmp_path / "llama")
    written(tmp_path / "llama" / "kvevict_gates", model)
    save(model, tmp_path / "whole")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    here = [Path(kvevict.__file__).parents[1], Path(tiny.__file__).parent]
    path = os.pathsep.join([*map(str, here), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*run, __file__, str(tmp_path)], env=os.environ | dict(PYTHONPATH=path, OMP_NUM_THREADS="1"),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    found = [torch.load(tmp_path / f"rank{rank}", weights_only=False) for rank in range(RANKS)]

    def alike(want, part, what):
        """Slot for slot and token for token."""
        for rank, got in enumerate(map(part, found)):
            for name in got.keys() & {"read", "end"}:
                assert got[name] == of_rank(want[name], rank), (what, name)
            for name in got.keys() & {"tokens", "beams"}:
                assert str(got[name]) == str(want[name]), (what, name)
        return [part(each) for each in found]

    for case in RUN:
        want = read(model, case)
        got = alike(want, lambda each, case=case: each["cases"][case], case)
        assert sum(each["bytes"] for each in got) == want["bytes"]  # each rank stores its heads' slots only
        assert (got[0]["sent"] == 0) == (case in FREE), case
        if want["diagnostics"]:
            for name, values in want["diagnostics"].items():
                torch.testing.assert_close(torch.tensor(got[0]["diagnostics"][name]), torch.tensor(values))
    alike(read(whole["gemma3"], "adakv"), lambda each: each["gemma3"], "sliding windows")
    want = read(whole["phi3"], "adakv")  # its plan leaves all heads on every rank
    for each in found:
        assert str(each["phi3"] | dict(sent=0)) == str(want)
    kvevict.load_cache(tmp_path / "all heads", whole["phi3"])
    alike(turns(model), lambda each: each["turns"], "turns")
    again, saved = load(model, tmp_path / "whole"), load(model, tmp_path / "split")
    for case, want in again.items():
        alike(want, lambda each, case=case: each["whole"][case], "loaded from one process")
        alike(want, lambda each, case=case: each["split"][case], "loaded from two")
        assert str(saved[case]) == str(want)  # one process loads what two have saved
    for each in found:
        said = each["refusals"]
        assert "its 1 kv heads cannot be split over 2 ranks (tensor parallel)" in said["few"]
        assert "lookahead's adapter is for unsplit projections" in said["lookahead"]
        assert "layer 0 has 4 and 2 heads of queries and of keys, by its config (8, 4): patch" in said["decoder"]
        assert "layers or heads that are to share their choice hold different slots" in said["policy"]


def test_latents_are_refused(monkeypatch):
    """Every rank has them whole, and its query heads' part of the scores."""
    model = pytest.importorskip("zoo").latent()
    monkeypatch.setattr(model, "_tp_size", 2)
    with pytest.raises(ValueError, match=r"its heads share latents, .* \(tensor parallel\); load it unsplit"):
        kvevict.patch(model, "snapkv", budget=64)


def main(folder):
    import transformers

    sent, gather = [0], distributed.all_gather

    def counted(parts, x, **options):
        sent[0] += x.numel() * x.element_size()
        return gather(parts, x, **options)

    def load_model(path):
        made = transformers.AutoModelForCausalLM.from_pretrained(path, tp_plan="auto", dtype=torch.float32).eval()
        made.generation_config.eos_token_id = None
        return made

    distributed.all_gather = counted
    model = load_model(folder / "llama")
    result = dict(cases={case: read(model, case, lambda: sent[0]) for case in RUN}, turns=turns(model))
    result["gemma3"] = read(load_model(folder / "gemma3"), "adakv")
    every = load_model(folder / "phi3")
    result["phi3"] = read(every, "adakv")
    with patched(every, "adakv"), torch.no_grad():
        kvevict.save_cache(every(**PROMPT).past_key_values, folder / "all heads")
    save(model, folder / "split")
    result |= {saved: load(model, folder / saved) for saved in ("whole", "split")}
    result["refusals"] = refusals(load_model, model, folder)
    torch.save(result, folder / f"rank{distributed.get_rank()}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
