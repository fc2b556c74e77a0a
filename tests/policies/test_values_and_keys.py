"""LagKV, Compactor, DefensiveKV and CriticalKV: scores of keys and values, against the oracle and by hand."""

import itertools

import oracle
import policy_cases
import pytest
import tiny
import torch
import transformers
from caches import kept
from policy_cases import BUDGET, CHUNK, Slots, compare, compare_in_chunks, model, tokens

import kvevict
from kvevict import families
from kvevict.engine.measure.quantities import compactor
from kvevict.policy import build
from kvevict.policy.scores import defensive

CHUNKED = dict(budget=BUDGET, chunk_size=CHUNK)
CHOICES = {
    "lagkv": dict(sink=2),
    "lagkv, ada": dict(sink=1, heads="ada"),
    "lagkv, no sink": dict(sink=0, heads="flat"),
    "lagkv, runs": dict(sink=2, select="chunk", c=2),
    "lagkv, wait": dict(sink=2, warmup_layers=3, warmup_budget=22),
    "compactor": dict(sink=3, recent=2),
    "read-once": dict(sink=2, recent=2),
    "compactor, keys alone": dict(sink=3, recent=3, blend=1e6),
    "compactor, values alone": dict(sink=0, recent=0, blend=0, heads="flat"),
    "defensive": dict(window=4),
    "defensive, covered": dict(window=3, kernel=3, keep_first=2, heads="flat"),
    "defensive, nothing first": dict(window=4, heads="equal"),
    "defensive, pool": dict(window=4, heads="flat", layers="pool", least=2),
    "defensive, all rows": dict(rows="all", heads="flat", kernel=1),
    "snapkv, critical": dict(window=4, refine="critical"),
    "adakv, critical": dict(window=4, refine="critical", pool="avg", kernel=3),
    "h2o, critical": dict(refine="critical", recent=3),
    "kvzip, critical": dict(refine="critical"),
    "cake, critical": dict(refine="critical", window=4),
}  # "preset, remark": options
SMALL = dict(SKETCH=6, BLOCK=5)  # short texts have several blocks too, and more tokens than the sketch has columns
CONSTANTS = {"compactor": SMALL, "keys alone": SMALL, "read-once": SMALL}
CONSTANTS |= {"defensive, covered": dict(COVER=1.0), "nothing first": dict(COVER=0.0)}  # in place of 0.9
any_choice = pytest.mark.parametrize("name", CHOICES)


@pytest.fixture(autouse=True)
def near(monkeypatch, request):
    """Logits that are not scaled (Compactor) magnify the rounding of float32."""
    if any(name in request.node.name for name in ("compactor", "read-once")):
        monkeypatch.setattr(policy_cases, "NEAR", 1e-4)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch, request):
    """LagKV's have 4 tokens here, not 128."""
    if "lagkv" in request.node.name and "test_refused" not in request.node.name:
        monkeypatch.setattr(kvevict.SCORES["lagkv"], "lag", 4)
        monkeypatch.setitem(oracle.oracle_scores.SCORES, "lagkv", oracle.oracle_scores.SCORES["lagkv"] | dict(lag=4))


@pytest.fixture(autouse=True)
def constants(monkeypatch, request):
    """Those of CONSTANTS, in the package and in the oracle."""
    (chosen,) = [own for name, own in CONSTANTS.items() if f"{name}]" in request.node.name] or [{}]
    for module, name in itertools.product((compactor, defensive, oracle.oracle_values), chosen):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, chosen[name])


def options(name, **more):
    return name.split(",")[0], more | CHOICES[name]


# -- against the oracle ---------------------------------------------------------------------------------------------


@any_choice
@pytest.mark.drawn(5)
def test_chunks(name):
    policy, chosen = options(name, **CHUNKED)
    compare_in_chunks(policy, **chosen)


@any_choice
def test_whole_prompt(name):
    policy, chosen = options(name, budget=BUDGET, chunk_size=80)
    compare(model(), policy, [[53]], **chosen)


@any_choice
@pytest.mark.drawn(8)
def test_fractions_and_turns(name):
    """Tokens that were decoded, one by one and as a turn's beginning, and a second prompt."""
    policy, chosen = options(name, budget=0.4, chunk_size=14)
    compare(model(), policy, [[47, 1, 1, 1, 21, 1]], **chosen)


@any_choice
@pytest.mark.drawn(4)
def test_padded_rows(name):
    """No chunk has one or two keys that Compactor's sinks leave: centred, they are all alike."""
    policy, chosen = options(name, **CHUNKED)
    compare(model(), policy, [[39, 1, 24], [36, 1, 24], [27, 1, 24]], **chosen)


@pytest.mark.parametrize("name", ["lagkv", "compactor", "defensive", "snapkv, critical"])
@pytest.mark.parametrize("heads", [1, 4])
def test_groups_of(name, heads):
    policy, chosen = options(name, **CHUNKED)
    compare(model(num_key_value_heads=heads), policy, [[39]], **chosen)


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("name", ["lagkv", "compactor", "defensive", "snapkv, critical"])
@pytest.mark.drawn(6)
def test_other_families(name, family):
    policy, chosen = options(name, **CHUNKED)
    compare(model(family), policy, [[40, 1, 1]], **chosen)


@pytest.mark.parametrize("name", ["lagkv", "defensive", "snapkv, critical", "h2o, critical"])
def test_decoding(name):
    """Prompts above the budget and below it; LagKV scores decoded parts as any."""
    policy, chosen = options(name, **CHUNKED, decode=True, interval=2)
    compare(model(), policy, [[29, *[1] * 8], [12, *[1] * 8]], **chosen)


# -- by hand --------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["lagkv", "compactor", "defensive, pool", "adakv, critical"])
def test_a_budget_above_all_tokens_changes_nothing(name):
    made, ids = model(), tokens([[61]], 0)[0][0][None]
    policy, chosen = options(name, budget=64, chunk_size=CHUNK)
    want = made(ids, use_cache=False).logits
    with kvevict.evicting(made, policy, **chosen):
        out = made(ids)
    torch.testing.assert_close(out.logits, want, rtol=0, atol=1e-5)
    assert all(head == [*range(61)] for layer in kept(out.past_key_values) for head in layer[0])


@pytest.mark.parametrize("seed", range(5))
def test_critical_by_hand(seed):
    """Half of each head's slots by score, protected ones counted first, then the best of the rest by the product."""
    generator = torch.Generator().manual_seed(seed)
    slots, keep = Slots(2, 11, window=3), torch.tensor([[7, 9]])
    score, norm = torch.rand(2, 1, 2, 11, generator=generator)
    got = kvevict.REFINEMENTS["critical"]().pick(slots, score, keep, norm)
    for head, (number, half) in enumerate(((7, 0), (9, 1))):
        free = range(8)  # the last three are kept anyway
        first = sorted(free, key=lambda i: -score[0, head, i])[:half]
        rest = sorted(set(free) - {*first}, key=lambda i: -(score[0, head, i] + 1e-4) * norm[0, head, i])
        want = {*first, *rest[: number - 3 - half]}
        assert {*got[0, head, :8].topk(number - 3).indices.tolist()} == want


@torch.no_grad()
@pytest.mark.parametrize("change", ["as it is", "int8", "conv", "lora"])
def test_the_output_projection_of_any_kind(change):
    """A projection that is not a plain matrix is measured by projecting unit vectors; a bias is left out."""
    module = tiny.model().model.layers[0].self_attn
    plain = torch.nn.Linear(128, 64)
    want = plain.weight.detach().clone()
    module.o_proj = plain
    if change == "conv":
        module.o_proj = transformers.pytorch_utils.Conv1D(64, 128)
        module.o_proj.weight.copy_(want.T)
    elif change == "lora":
        module.o_proj, more = _Adapted(plain), torch.randn(64, 128)
        module.o_proj.more, want = more, want + more
    elif change == "int8":
        module.o_proj = _Stored(plain)
    torch.testing.assert_close(families.output_weight(module, torch.float32), want, rtol=0, atol=1e-5)


def test_an_unknown_output_projection_is_refused():
    made = tiny.model()
    attention = made.model.layers[2].self_attn
    attention.ours = attention._modules.pop("o_proj")
    with pytest.raises(ValueError, match="no output projection by a known name"):
        kvevict.patch(made, "defensive", budget=64)
    assert "_kvevict" not in made.model.__dict__


class _Adapted(torch.nn.Linear):
    def __init__(self, plain):
        super().__init__(128, 64)
        self.plain = plain

    def forward(self, x):
        return self.plain(x) + x @ self.more.T


class _Stored(torch.nn.Module):
    """Weights stored in another order."""

    in_features = 128

    def __init__(self, plain):
        super().__init__()
        self.plain = plain

    def forward(self, x):
        return self.plain(x)


@torch.no_grad()
@pytest.mark.parametrize("name", ["lagkv", "compactor", "defensive", "snapkv, critical"])
def test_latents(name):
    """Heads that share latents (MLA) have separate values and keys, and one choice."""
    made = pytest.importorskip("zoo").make("deepseek_v3", "DeepseekV3ForCausalLM")
    if not hasattr(made.model.layers[0].self_attn, "expand_kv"):
        pytest.skip("this version of Transformers caches no latents")
    policy, chosen = options(name, **CHUNKED)
    ids = tokens([[61]], 0)[0][0][None] % 300
    with kvevict.evicting(made, policy, **chosen):
        places = kept(made(ids).past_key_values)
    assert all([len(head) for head in layer[0]] == [BUDGET] for layer in places)


@pytest.mark.parametrize("chosen, text", [
    (dict(score="lagkv", budget=259), "budget >= 260"),
    (dict(score="lagkv", carry="none"), "carry='keep'"),
    (dict(score="lagkv", carry="max"), "carry='none'|carry='keep'"),
    (dict(score="lagkv", tsp=1), "tsp=None"),
    (dict(score="lagkv", layers="pool", heads="flat"), "scores that compare"),
    (dict(score="lagkv", refine="critical"), "only rank slots"),
    (dict(score="lagkv", refine="caote"), "only rank slots"),
    (dict(score="compactor", carry="none"), "carry='keep'"),
    (dict(score="compactor", rows="window"), "rows='all'"),
    (dict(score="compactor", decode=True), "decode=False"),
    (dict(score="compactor", blend=-1), "blend must be a finite number"),
    (dict(score="compactor", recent=-1), "recent must be at least 0"),
    (dict(score="compactor", refine="critical"), "only rank slots"),
    (dict(score="defensive", kernel=4), "kernel must be odd"),
    (dict(score="defensive", refine="caote"), "only rank slots"),
    (dict(score="defensive", carry="sum"), "only rank the slots"),
    (dict(score="knorm", refine="critical"), "only rank slots"),
    (dict(score="tova", refine="critical"), "per_head=True"),
    (dict(refine="critical", select="chunk"), "select='token'"),
], ids=str)  # fmt: skip
def test_refused(chosen, text):
    with pytest.raises((ValueError, TypeError), match=text):
        build("snapkv", **dict(budget=300) | chosen)


def test_keys_whose_rotation_depends_on_the_length_are_refused():
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
    made = tiny.model(rope_parameters=rope)
    with pytest.raises(ValueError, match="rotary frequencies change with the prompt's length"):
        kvevict.patch(made, "compactor", budget=64)
    assert "_kvevict" not in made.model.__dict__
