"""streaming with rerotate=True: distances within the cache, against the definition in fp64."""

import copy

import pytest
import tiny
import torch
import zoo
from test_generate import DYNAMIC, LONGROPE, repetitive
from tiny import generate, prompt, relative, shared
from transformers import AttentionInterface

import kvevict
from kvevict.engine.budgets import places

BUDGET = 10
ON = dict(budget=BUDGET, chunk_size=16, rerotate=True)
YARN = dict(
    max_position_embeddings=256,
    rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64),
)
MODELS = {"llama": {}, "phi3": {}, "gemma2": {}, "gpt_oss": {}, "yarn": dict(family="llama", **YARN)}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def made(name):
    return tiny.model(**({"family": name} | MODELS[name]))


class Paper:
    """A row by the definition: a layer holds the unrotated keys of its slots, [Hkv, n, D] in fp64, and at every call
    rotates them to 0..n-1 and the new rows to the positions from n on (or all to their `text` positions)."""

    def __init__(self, model, text=False):
        self.model, self.text, self.slots, self.seen = copy.deepcopy(model), text, {}, 0
        self.frequency = self.model.model.rotary_emb.inv_freq.double()
        self.attention = {}
        AttentionInterface.register(
            "paper", lambda module, *args, **kwargs: module.paper.attend(module, *args, **kwargs)
        )
        self.model.config._attn_implementation = "paper"
        for layer in self.model.model.layers:
            layer.self_attn.paper = self

    def __call__(self, ids):
        """Logits [T, V] of ids [1, T], which are stored."""
        none = torch.zeros(1, 1, ids.shape[1], ids.shape[1], dtype=self.model.dtype)  # at position 0 RoPE only scales
        out = self.model(ids, attention_mask=none, position_ids=torch.zeros_like(ids), use_cache=False)
        self.seen += ids.shape[1]
        return out.logits[0]

    def rotated(self, x, place):
        half = len(self.frequency)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        angle = place[:, None] * self.frequency
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def attend(self, module, q, k, v, mask, scaling, softcap=None, sliding_window=None, s_aux=None, **_):
        q, k, v = (x[0].double() for x in (q, k, v))
        token = torch.arange(self.seen, self.seen + k.shape[1])
        if module.layer_idx in self.slots:
            old = self.slots[module.layer_idx]
            k, v, token = torch.cat([old[0], k], 1), torch.cat([old[1], v], 1), torch.cat([old[2], token])
        self.slots[module.layer_idx] = k, v, token
        place = token if self.text else torch.arange(len(token))
        rows = place[-q.shape[1] :]
        group = q.shape[0] // k.shape[0]
        keys = self.rotated(k, place).repeat_interleave(group, 0)
        x = self.rotated(q, rows) @ keys.mT * scaling
        x = x if softcap is None else softcap * torch.tanh(x / softcap)
        distance = rows[:, None] - place
        x = x.masked_fill((distance < 0) | (distance >= (sliding_window or torch.inf)), -torch.inf)
        if s_aux is not None:
            x = torch.cat([x, s_aux.double()[:, None, None].expand(*x.shape[:2], 1)], 2)
        a = x.softmax(2)[..., : len(place)]
        self.attention[module.layer_idx] = a
        return (a @ v.repeat_interleave(group, 0)).transpose(0, 1)[None].to(mask.dtype), None

    def evict(self):
        """The share of the rows' attention on kept slots, per layer."""
        shares = []
        for index, layer in enumerate(self.model.model.layers):
            if getattr(layer.self_attn, "sliding_window", None) is None:
                k, v, token = self.slots[index]
                kept = list(range(len(token)))
                kept = kept if len(kept) <= BUDGET else kept[:4] + kept[4 - BUDGET :]
                self.slots[index] = k[:, kept], v[:, kept], token[kept]
                a = self.attention[index]
                shares.append((a[..., kept].sum() / a.sum()).item())
        return shares

    def read(self, ids, size=16):
        """Logits of the last token [1, V]; a remainder goes first."""
        shares = []
        for end in range((ids.shape[1] - 1) % size + 1, ids.shape[1] + 1, size):
            logits = self(ids[:, max(0, end - size) : end])
            shares.append(self.evict())
        self.shares = torch.tensor(shares)  # [chunks, layers]
        return logits[-1:]

    def decode(self, logits, new, interval=None):
        """Logits [new, V] of a greedy generation that goes on from `logits`; interval None: nothing is evicted."""
        out = [logits]
        while len(out) < new:
            out.append(self(out[-1].argmax(-1, keepdim=True)))
            held = len(self.slots[max(self.slots)][2])  # the last layer never slides
            if interval and held > BUDGET + interval - 1:
                self.evict()
        return torch.cat(out)


def ours(model, inputs, new=20, **options):
    """Logits [B, new, V] of a greedy generation, and its cache."""
    out = model.generate(
        **inputs, max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )
    return torch.stack(out.logits, 1), out.past_key_values


def same(got, want):
    assert relative(got, want) < 1e-4
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [100, 7])
@pytest.mark.parametrize("interval", [1, 3, None])
@pytest.mark.drawn(8)
def test_definition(name, size, interval):
    model, inputs = made(name), prompt(1, 50)
    paper = Paper(model)
    want = paper.decode(paper.read(inputs["input_ids"], size), 20, interval)
    options = dict(ON, chunk_size=size, decode=interval is not None, interval=interval)
    with kvevict.evicting(model, "streaming", **options):
        same(ours(model, inputs)[0][0], want)
    with kvevict.evicting(model, "streaming", **options | dict(rerotate=False)):  # which is something else
        assert relative(ours(model, inputs)[0][0], want) > 1e-2


def test_layers_of_other_lengths():
    """Each layer's distances are those within its own slots."""
    model, inputs = shared(), prompt(1, 50)
    kvevict.patch(model, "streaming", budget=20, rerotate=True, layers="pyramid", beta=4, decode=False)
    got = ours(model, inputs)[0][0]
    kept = [layer[0][0] for layer in kvevict.report(model)["kept"]]
    kvevict.unpatch(model)
    assert len(set(kept)) == 4
    paper = Paper(model)
    logits = paper(inputs["input_ids"])[-1:]
    for index, count in enumerate(kept):
        left = torch.tensor([*range(4), *range(54 - count, 50)])
        k, v, token = paper.slots[index]
        paper.slots[index] = k[:, left], v[:, left], token[left]
    same(got, paper.decode(logits, 20))


def test_rows_of_a_batch():
    model, inputs = shared(), prompt(3, 50, pad=(0, 9, 45))  # the last is shorter than the budget
    kvevict.patch(model, "streaming", **ON)
    both = ours(model, inputs)[0]
    for row, (ids, mask) in enumerate(zip(inputs["input_ids"], inputs["attention_mask"].bool())):
        same(both[row], ours(model, dict(input_ids=ids[None, mask]))[0][0])
    kvevict.unpatch(model)


def test_padding_needs_no_position_ids():
    """A follow-up that is padded in one row: its distances count slots, not columns."""
    model = kvevict.patch(tiny.model(), "streaming", **ON)
    first, second = (prompt(2, length, seed)["input_ids"] for length, seed in ((40, 1), (30, 2)))
    mask = torch.ones(2, 70, dtype=torch.long)
    mask[1, 40:45] = 0
    both = model(second, attention_mask=mask, past_key_values=model(first).past_key_values).logits[1, -1]
    alone = model(second[1:, 5:], past_key_values=model(first[1:]).past_key_values).logits[0, -1]
    assert relative(both, alone) < 1e-4


def test_nothing_evicted():
    model, inputs = shared(), prompt(2, 50, pad=(0, 9))
    want = ours(model, inputs)[0]
    got = []
    for rerotate in (False, True):
        with kvevict.evicting(model, "streaming", budget=70, chunk_size=16, rerotate=rerotate):
            got.append(ours(model, inputs)[0])
    assert torch.equal(*got)
    same(got[1], want)


def test_without_sinks_there_is_no_hole():
    model, inputs, got = shared(), prompt(1, 50), []
    for rerotate in (False, True):
        with kvevict.evicting(model, "streaming", **ON | dict(sink=0, rerotate=rerotate)):
            got.append(ours(model, inputs)[0])
    assert torch.equal(*got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_holds_keys_as_they_came(dtype):
    """However many evictions there were: the first layer's keys, which depend on nothing but token and position."""
    model, inputs = tiny.model(dtype=dtype), prompt(2, 50, pad=(0, 9))
    tokens, caches = [], []
    for rerotate in (False, True):
        with kvevict.evicting(model, "streaming", **ON | dict(rerotate=rerotate)):
            cache = model(**inputs).past_key_values
            for token in range(3, 80):
                model(torch.full((2, 1), token), past_key_values=cache)
            caches.append(cache)
            tokens.append(kvevict.report(model, positions=True)["positions"])
    assert tokens[0] == tokens[1] and tokens[1][0][0][0] == [0, 1, 2, 3, *range(44, 50)]
    old, new = (cache.layers[0] for cache in caches)
    assert torch.equal(old.keys, new.keys) and torch.equal(old.values, new.values)
    assert places(old, True) == places(new, True)


def test_bf16():
    model, ids = tiny.model(dtype=torch.bfloat16), prompt(1, 50)["input_ids"]
    want = Paper(model).read(ids, 7)
    error = {}
    for rerotate in (False, True):
        with kvevict.evicting(model, "streaming", budget=BUDGET, chunk_size=7, rerotate=rerotate):
            error[rerotate] = relative(model(ids).logits[0, -1:], want)
    assert error[True] < 0.01 and error[False] > 0.04


def test_follow_up_and_files(tmp_path):
    """A second turn, with decoded tokens before it, by the cache in memory and by one that was saved."""
    model, (first, second) = tiny.model(), (prompt(1, length, seed)["input_ids"] for length, seed in ((50, 1), (40, 2)))
    paper = Paper(model)
    paper.decode(paper.read(first), 9, 1)
    want = paper.decode(paper.read(second), 9, 1)
    kvevict.patch(model, "streaming", **ON)
    out, cache = ours(model, dict(input_ids=first), 9)
    whole = torch.cat([first, out.argmax(-1)[:, :-1], second], 1)  # the last token was not read
    kvevict.save_cache(cache, tmp_path / "cache")
    for each in (kvevict.load_cache(tmp_path / "cache", model), cache):
        same(ours(model, dict(input_ids=whole), 9, past_key_values=each)[0][0], want)


@pytest.mark.parametrize("before", [False, True])
def test_policies_share_caches(before):
    """A cache has no positions of a policy: what was read with the option goes on without it, and the other way."""
    model, ids = tiny.model(), prompt(1, 50)["input_ids"]
    paper = Paper(model, text=not before)
    logits = paper.read(ids)
    paper.text = before
    want = paper.decode(logits, 20, 1)
    kvevict.patch(model, "streaming", **ON | dict(rerotate=before))
    out = model(ids)
    kvevict.patch(model, "streaming", **ON | dict(rerotate=not before))
    got = [out.logits[0, -1:]]
    while len(got) < 20:
        got.append(model(got[-1].argmax(-1, keepdim=True), past_key_values=out.past_key_values).logits[0])
    same(torch.cat(got), want)


@pytest.mark.parametrize("kind", ["lookup", "itself"])
def test_assisted_decoding(kind):
    model, inputs = shared(), repetitive()
    with kvevict.evicting(model, "streaming", **ON, decode=False):
        want = generate(model, inputs, 16)
        options = (
            dict(assistant_model=tiny.model()) if kind == "itself" else dict(prompt_lookup_num_tokens=4, eos_token_id=0)
        )
        assert torch.equal(generate(model, inputs, 16, **options)[:, :16], want)


def test_crop():
    model = kvevict.patch(tiny.model(), "streaming", **ON, decode=False)
    straight, detour = (model(prompt(1, 50)["input_ids"]).past_key_values for _ in range(2))
    for token in (5, 6, 7):
        model(torch.tensor([[token]]), past_key_values=detour)
    detour.crop(-3)
    one, other = (model(torch.tensor([[8]]), past_key_values=cache).logits for cache in (straight, detour))
    assert torch.equal(one, other)


def test_diagnostics_see_what_rows_see():
    model, ids = shared(), prompt(1, 50)["input_ids"]
    paper = Paper(model)
    paper.read(ids)
    with kvevict.evicting(model, "streaming", **ON, diagnose=True):
        model(ids)
        got = kvevict.report(model)["diagnostics"]["recall"]
    cuts = paper.shares < 1
    want = (paper.shares * cuts).sum(0) / cuts.sum(0)
    assert relative(torch.tensor(got)[:, 0], want) < 1e-4


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_frequencies_that_change(kind):
    model = tiny.model(**kind)
    before, want = dict(model.model.__dict__), model(**prompt(1, 40)).logits
    with pytest.raises(ValueError, match="pass rerotate=False"):
        kvevict.patch(model, "streaming", **ON)
    assert model.model.__dict__ == before and torch.equal(model(**prompt(1, 40)).logits, want)
    kvevict.patch(model, "streaming", budget=BUDGET, chunk_size=16)
    want = model(**prompt(1, 40)).logits
    with pytest.raises(ValueError, match="pass rerotate=False"):
        kvevict.patch(model, "streaming", **ON)
    assert torch.equal(model(**prompt(1, 40)).logits, want)  # still patched, by the policy it had


def test_other_values():
    with pytest.raises(TypeError, match="rerotate must be True or False, got 1"):
        kvevict.patch(shared(), "streaming", budget=BUDGET, rerotate=1)


def test_latents():
    """One layer of latents (MLA): the last chunk, and a decoded token, see what is kept as if all else had not been."""
    model = zoo.make("deepseek_v3", dict(zoo.types())["deepseek_v3"])
    if not hasattr(model.model.layers[0].self_attn, "expand_kv"):
        pytest.skip("this version of Transformers expands before it caches")
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
    ids = prompt(1, 50)["input_ids"]
    last = ids[:, :1]
    seen = [torch.cat([ids[:, :4], ids[:, 28:]], 1), torch.cat([ids[:, :4], ids[:, 44:], last], 1)]
    want = torch.stack([model(each).logits[0, -1] for each in seen])
    got = {}
    for rerotate in (False, True):
        with kvevict.evicting(model, "streaming", **ON | dict(rerotate=rerotate)):
            read = model(ids, logits_to_keep=1, use_cache=True)
            one = model(last, past_key_values=read.past_key_values)
            got[rerotate] = torch.stack([read.logits[0, -1], one.logits[0, -1]])
    assert relative(got[True], want) < 1e-4 < relative(got[False], want)
