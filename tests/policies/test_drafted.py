"""LAQ and SpecKV: against the float64 oracle; drafting changes nothing else; refusals."""

import copy
import itertools

import pytest
import tiny
import torch
from choices import DRAFT, DRAFTS
from policy_cases import VOCAB, compare, model, ours, tokens

import kvevict
from kvevict.engine.hook.installed import plan_of
from kvevict.engine.methods.draft import Drafting
from kvevict.patch import is_patched
from kvevict.policy.building import build
from kvevict.policy.policy import Policy

ITSELF = [name for name, chosen in DRAFTS.items() if name.startswith("laq") and "draft_model" not in chosen]
GEOMETRIES = {
    "whole": dict(budget=16), "fraction": dict(budget=0.4), "odd budget": dict(budget=11),
    "chunks, evict at the end": dict(budget=16, chunk_size=13, schedule="prompt"),
    "chunks": dict(budget=16, chunk_size=12),
}  # fmt: skip
any_policy = pytest.mark.parametrize("name", DRAFTS)


def options(name, **more):
    chosen = DRAFTS[name] | more
    if name in ITSELF and "chunk_size" in chosen:
        chosen["schedule"] = "prompt"  # the oracle needs it named
    return name.split(",")[0], chosen


@pytest.mark.parametrize("geometry", GEOMETRIES)
@any_policy
@pytest.mark.drawn(16)
def test_read(name, geometry):
    policy, chosen = options(name, **GEOMETRIES[geometry])
    for n in (1, 17, 61) if geometry == "whole" else (40,):
        ((_, positions),) = compare(model(), policy, [[n]], **chosen)[0]
        if isinstance(chosen["budget"], int):
            assert {len(head) for layer in positions for head in layer} == {min(n, chosen["budget"])}


@pytest.mark.parametrize("policy", ["laq", "laq:n_d=32,window=32,draft_keys=true"])
def test_read_with_defaults(policy):
    """And with the whole window of the first cut."""
    compare(model(), policy, [[131]], budget=70)


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("name", ["laq", "laq, paper", "speckv", "laq, by another"])
def test_read_and_decode_of_other_families(family, name):
    policy, chosen = options(name, budget=16)
    compare(model(family), policy, [[40, 1, 1, 1]], **chosen)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("name", ["laq", "laq, paper", "speckv"])
def test_groups_of(heads, name):
    policy, chosen = options(name, budget=16)
    compare(model(num_key_value_heads=heads), policy, [[40, 1]], **chosen)


@any_policy
def test_left_padded_rows_are_read_as_if_alone(name):
    policy, chosen = options(name, budget=16)
    compare(model(), policy, [[41, 1, 1], [26, 1, 1], [10, 1, 1]], **chosen)
    compare(model("gemma3"), policy, [[30, 1], [1, 1]], **chosen)


@pytest.mark.parametrize("budget", [16, 0.4])
@pytest.mark.parametrize("name", ITSELF)
@pytest.mark.drawn(4)
def test_follow_up_turns(name, budget):
    policy, chosen = options(name, budget=budget)
    compare(model(), policy, [[30, 1, 1, 15, 1, 2, 1]], **chosen)
    compare(model(), policy, [[30, 1, 15], [11, 1, 15]], **chosen)


@any_policy
@pytest.mark.drawn(4)
def test_decode_with_eviction(name, interval=3):
    """The last decoded rows stand in for drafted ones."""
    policy, chosen = options(name, budget=16, decode=True, interval=interval)
    longest = []

    def bounded(call, cache):
        longest.append(max(int(layer.len.max()) for layer in cache.layers))

    compare(model(), policy, [[29, *[1] * 12]], bounded, **chosen)
    assert max(longest) == 16 + interval - 1


@pytest.mark.parametrize("more", [
    dict(layers="pyramid"), dict(heads="ada"), dict(heads="flat", layers="pyramid"), dict(refine="caote"),
    dict(select="chunk", c=3, per_head=True, heads="flat"), dict(refine="fastcaote"),
    dict(warmup_layers=3), dict(n_reuse=2),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["laq", "laq, paper", "speckv"])
def test_other_choices(name, more):
    policy, chosen = options(name, budget=18, **more)
    compare(model(), policy, [[39]], **chosen)


def test_a_draft_by_the_model_itself_is_the_oracle_s_response():
    """The unpatched model's greedy answer is appended in both."""
    made = model()
    twin, ids = copy.deepcopy(made), tokens([[45]], 2)[0][0][None]
    answer = tuple(tiny.generate(made, dict(input_ids=ids), 6)[0].tolist())
    kept = []
    for policy, own in (("oracle", dict(ids=answer)), ("laq:draft_keys=true", dict(n_d=6, window=0, draft_model=twin))):
        with kvevict.evicting(made, policy, budget=16, **own), torch.no_grad():
            made(ids)
            kept.append(kvevict.report(made, positions=True)["positions"])
    assert kept[0] == kept[1]


def runs(module):
    """A list that grows by the rows of every call of a module."""
    seen = []
    return seen, module.register_forward_hook(lambda m, args, out: seen.append(1))


@pytest.mark.parametrize("name", ["laq", "speckv"])
def test_nothing_is_drafted_for_a_prompt_within_the_budget(name):
    policy, chosen = options(name, budget=16)
    for length, drafted in ((16, 0), (17, DRAFTS[name]["n_d"])):
        calls, hook = runs(model().lm_head if name == "laq" else DRAFT)
        ours(model(), policy, [[length]], 0, **chosen)
        hook.remove()
        assert len(calls) == drafted + (name == "laq")


@any_policy
def test_drafting_touches_nothing_else(name):
    policy, chosen = options(name, budget=16)
    weights, config = copy.deepcopy(DRAFT.state_dict()), DRAFT.config.to_dict()
    made = model()  # building it draws random numbers
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, two = (ours(made, policy, [[41, 1, 1], [22, 1, 1]], 0, **chosen) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    for (logits, positions), (again, same) in zip(itertools.chain(*one), itertools.chain(*two), strict=True):
        assert positions == same and torch.equal(logits, again)
    assert DRAFT.config.to_dict() == config and not DRAFT._forward_pre_hooks
    assert all(torch.equal(weights[key], value) for key, value in DRAFT.state_dict().items())


def test_the_copy_s_bytes_are_in_the_peak():
    ids, slot = tokens([[45]], 0)[0][0][None], 2 * 4 * 32 * 2 * 4  # of all heads and layers
    with kvevict.evicting(model(), "laq", budget=16), torch.no_grad():
        model()(ids)
        report = kvevict.report(model())
    assert report["cache_bytes"] == slot * 16 and report["peak_cache_bytes"] == slot * (45 + 16 + 8)


@pytest.mark.parametrize("name", ["laq", "speckv"])
def test_drafting_is_a_part_of_the_reading_time(name):
    policy, chosen = options(name, budget=16)
    with kvevict.evicting(model(), policy, **chosen), torch.no_grad():
        model()(tokens([[45]], 0)[0][0][None])
        seconds = kvevict.report(model())["seconds"]
    assert 0 < seconds["draft"] < seconds["read"]


def test_an_interrupted_draft_is_told(monkeypatch):
    ids, cache = tokens([[45]], 0)[0][0][None], tiny.transformers.DynamicCache(config=model().config)
    with kvevict.evicting(model(), "laq", budget=16), torch.no_grad():
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Drafting, "_write", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            model()(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="half read"):
            model()(ids, past_key_values=cache)


@pytest.mark.parametrize("name", ["laq", "speckv"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generate(name, family):
    """Candidates after the prompt do not observe; beams and copies of the model draft too."""
    made = tiny.model(family, vocab_size=VOCAB)
    policy, chosen = options(name, budget=16)
    inputs = tiny.prompt(2, 50, pad=(0, 11))
    kvevict.patch(made, policy, **chosen)
    want = tiny.generate(made, inputs)
    assert torch.equal(tiny.generate(copy.deepcopy(made), inputs), want)
    if family == "llama":  # Transformers cannot always restore slots that left a sliding window
        row, ends = {key: value[:1] for key, value in inputs.items()}, dict(eos_token_id=0)
        plain = tiny.generate(made, row, **ends)
        assert torch.equal(tiny.generate(made, row, prompt_lookup_num_tokens=3, **ends)[:, : plain.shape[1]], plain)
    assert tiny.generate(made, inputs, num_beams=2).shape == want.shape


def test_copies_of_the_model_share_the_draft_model():
    made = tiny.model("llama", vocab_size=VOCAB)
    kvevict.patch(made, "speckv", budget=16, window=3, draft_model=DRAFT)
    assert plan_of(copy.deepcopy(made).model).policy.rows.draft_model is DRAFT


def test_laq_reads_embeddings():
    made, ids = model(), tokens([[45]], 0)[0][0][None]
    with kvevict.evicting(made, "laq", budget=16), torch.no_grad():
        want = made(ids)
        kept = kvevict.report(made, positions=True)["positions"]
        got = made(inputs_embeds=made.get_input_embeddings()(ids))
        assert kvevict.report(made, positions=True)["positions"] == kept
    assert torch.equal(want.logits, got.logits)


def test_a_draft_model_by_name(tmp_path):
    """It is loaded when it is needed, and the policy can be written to JSON."""
    folder, draft = tiny.save(tmp_path / "draft", num_hidden_layers=1)
    made, ids = tiny.model(vocab_size=256), tokens([[45]], 0)[0][0][None] % 256
    policy = build("speckv", budget=16, window=3, draft_model=folder)
    assert Policy.from_json(policy.to_json()) == policy
    kept = []
    for chosen in (policy, build("speckv", budget=16, window=3, draft_model=draft)):
        with kvevict.evicting(made, chosen), torch.no_grad():
            made(ids)
            kept.append(kvevict.report(made, positions=True)["positions"])
    assert kept[0] == kept[1]
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is not JSON.*draft_model='"):
        build("speckv", budget=16, window=3, draft_model=draft).to_json()


def test_a_draft_model_that_is_not_there():
    made = tiny.model()
    with pytest.raises(ValueError, match="draft_model='/nowhere' cannot be loaded"):
        kvevict.patch(made, "speckv", budget=16, window=3, draft_model="/nowhere")
    with pytest.raises(ValueError, match="not patched"):
        kvevict.report(made)


def test_vocabularies_of_different_sizes():
    """Drafted ids are ids of the model that reads them."""
    big = tiny.model("llama", vocab_size=VOCAB + 50, seed=3)
    with torch.no_grad():
        big.lm_head.weight[VOCAB:] = 100 * big.lm_head.weight[:50]
    ours(model(), "speckv", [[41]], 0, budget=16, window=3, draft_model=big)
    small = tiny.model("llama", vocab_size=50, seed=3)
    with pytest.raises(ValueError, match="draft_model knows 50: it must share the tokenizer"):
        ours(model(), "speckv", [[41]], 0, budget=16, window=3, draft_model=small)


@pytest.mark.parametrize("policy, given, error", [
    ("laq", dict(n_d=0), "n_d must be at least 1"), ("laq", dict(window=-1), "window must be at least 0"),
    ("laq", dict(draft_keys=1), "draft_keys must be True or False"), ("laq", dict(budget=8), "budget=8 is too small"),
    ("laq", dict(schedule="chunk", chunk_size=9), "needs the whole prompt.*schedule='prompt'"),
    ("speckv", {}, "draft_model="), ("edie", dict(rows="given"), "needs ids="),
    ("speckv", dict(draft_model=3), "draft_model must be 'self', a loaded Transformers model"),
    ("speckv", dict(draft_model=copy.deepcopy(DRAFT).train()), "training mode.*draft_model.eval()"),
    ("speckv", dict(draft_model=DRAFT.model), "makes no logits.*AutoModelForCausalLM"),
])  # fmt: skip
def test_refused_options(policy, given, error):
    with pytest.raises((ValueError, TypeError), match=error):
        kvevict.patch(model(), policy, **dict(budget=48) | given)
    assert not is_patched(model().model)


def test_refused_calls():
    made, (first, more) = tiny.model(vocab_size=VOCAB), tokens([[45, 9]], 0)[0]
    embeds = made.get_input_embeddings()(first[None]).detach()
    with torch.no_grad():
        kvevict.patch(made, "speckv", budget=16, window=3, draft_model=made)
        with pytest.raises(ValueError, match="draft_model is the patched model itself"):
            made(first[None])
        kvevict.patch(made, "speckv", budget=16, window=3, draft_model=DRAFT)
        with pytest.raises(ValueError, match="pass input_ids, not inputs_embeds"):
            made(inputs_embeds=embeds)
        cache = made(first[None]).past_key_values
        before = [layer.pos.clone() for layer in cache.layers]
        with pytest.raises(ValueError, match="speckv drafts from the whole conversation"):
            made(more[None], past_key_values=cache)
        assert all(torch.equal(a, layer.pos) for a, layer in zip(before, cache.layers, strict=True))
        made(more[None, :1], past_key_values=cache)  # a decoded token
        kvevict.patch(made, "laq", budget=16)
        with pytest.raises(ValueError, match="patch and call the causal language model, not its decoder"):
            made.model(first[None])
        made.model(first[None, :16])  # nothing to evict, nothing to draft
    kvevict.unpatch(made)
