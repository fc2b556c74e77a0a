"""Everything around `generate`: decoding strategies, caches that users hold, positions, threads, wrappers."""

import asyncio
import copy
import os
import threading

import pytest
import tiny
import torch
import transformers
from tiny import VERSION, generate, prompt, relative, shared
from transformers import AsyncTextIteratorStreamer, DynamicCache, TextIteratorStreamer

import kvevict
from kvevict.engine.memory.layer import EvictionLayer
from kvevict.models.compat import cache_of

ALL = dict(budget=4096, chunk_size=16)  # keeps everything
PADS = (0, 5, 17)
MIXED = ["llama", "gemma3"]  # full attention only, and with sliding layers
PRESETS = {name: dict(budget=10, chunk_size=16) for name in ("streaming", "h2o", "tova", "random", "knorm", "keydiff")}
PRESETS["snapkv"] = dict(budget=10, window=4, chunk_size=16)
PRESETS |= {name: dict(budget=10, probe=6, chunk_size=16) for name in ("take", "take:append=false")}
TAKE = dict(budget=16, probe=6, chunk_size=16)


def sequence(length, seed=1):
    return prompt(1, length, seed)["input_ids"]


def padded(inputs, pad):
    """The same rows with `pad` columns of padding in front."""

    def front(x):
        return torch.cat([x.new_zeros(len(x), pad), x], 1)

    return {name: front(x) for name, x in inputs.items()}


STRATEGIES = {
    "sampling": dict(do_sample=True, temperature=1.5, top_k=20),
    "three samples": dict(do_sample=True, num_return_sequences=3),
    "beam sampling": dict(do_sample=True, num_beams=2),
    "three best beams": dict(num_beams=4, num_return_sequences=3),
    "penalties": dict(repetition_penalty=1.3, no_repeat_ngram_size=2),
    "guidance": dict(guidance_scale=1.7),  # reads the last token again, in a separate cache
    "constraints": dict(prefix_allowed_tokens_fn=lambda row, ids: [7 + row, 20, 33, 60], bad_words_ids=[[20]]),
    "prefill_chunk_size": dict(prefill_chunk_size=8),
}


@pytest.mark.quick
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy):
    model, inputs, options = shared(), prompt(2, 40, pad=(0, 9)), STRATEGIES[strategy]
    torch.manual_seed(3)
    want = generate(model, inputs, **options)
    with kvevict.evicting(model, "take", probe=4, **ALL):
        torch.manual_seed(3)
        assert torch.equal(generate(model, inputs, **options), want)


@pytest.mark.quick(policy="snapkv")
@pytest.mark.parametrize("policy", PRESETS)
def test_beams_after_eviction(policy):
    """The score of every beam is that of its tokens read one by one after the prompt. (No token comes twice: equal
    keys have equal norms but for rounding, and knorm's choice would depend on the batch size.)"""
    model, ids = shared(), torch.randperm(94, generator=torch.Generator().manual_seed(0))[None, :50] + 3
    with kvevict.evicting(model, policy, **PRESETS[policy]), torch.no_grad():
        tiny.three_beams(model, dict(input_ids=ids))


def text(length, seed=1):
    return " ".join(f"w{i}" for i in sequence(length, seed)[0].tolist())


def test_streamers_in_threads():
    """A thread's `generate` has the model's policy; a loop and an asyncio task listen."""
    model, words, inputs = tiny.model(), tiny.word_tokenizer(), prompt(1, 40)
    with kvevict.evicting(model, "take", **TAKE):
        want = words.decode(generate(model, inputs)[0]).split()
    assert want != words.decode(generate(model, inputs)[0]).split()
    kvevict.patch(model, "take", **TAKE)

    def started(streamer):
        options = dict(inputs, max_new_tokens=8, do_sample=False, streamer=streamer)
        threading.Thread(target=model.generate, kwargs=options).start()
        return streamer

    async def listen():
        return [part async for part in started(AsyncTextIteratorStreamer(words, skip_prompt=True))]

    assert "".join(started(TextIteratorStreamer(words, skip_prompt=True))).split() == want
    assert "".join(asyncio.run(listen())).split() == want


@pytest.mark.quick
def test_pipeline():
    """A batch of texts of different lengths."""
    model, words = shared(), tiny.word_tokenizer()
    words.padding_side = "left"
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=words)
    texts = [text(40), text(23, seed=2)]
    options = dict(max_new_tokens=8, do_sample=False, batch_size=2)
    want = pipe(texts, **options)
    with kvevict.evicting(model, "take", probe=4, **ALL):
        assert pipe(texts, **options) == want
        assert kvevict.report(model)["seen"] == [40, 23]


def test_real_tokenizer_pipeline():
    path = os.path.join(os.path.dirname(__file__), "../../../shared/data/tokenizers/minimind-6400")
    if not os.path.isdir(path):
        pytest.skip("no ../shared/data/tokenizers here")
    words, model = transformers.AutoTokenizer.from_pretrained(path), tiny.model(vocab_size=6400)
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=words)
    options = dict(max_new_tokens=8, do_sample=False)
    chat = [[{"role": "user", "content": "A story about a cat that kept only what it needed. " * 4}]]
    want = pipe(chat, **options)
    with kvevict.evicting(model, "snapkv", **ALL):
        assert pipe(chat, **options) == want
    kvevict.patch(model, "take", **TAKE)
    pipe(chat, **options)
    assert kvevict.report(model)["kept"][0] == [[16, 16]]


def repetitive(length=48):
    return dict(input_ids=sequence(8).repeat(1, length // 8), attention_mask=torch.ones(1, length, dtype=torch.long))


def assistant(kind):
    if kind == "lookup":  # 5.4 needs an end token there; this one does not come
        return dict(prompt_lookup_num_tokens=4, eos_token_id=0)
    return dict(assistant_model=shared(seed=7) if kind == "model" else tiny.model())


@pytest.mark.parametrize("kind", ["lookup", "model", "itself"])
@pytest.mark.parametrize("policy", PRESETS)
@pytest.mark.drawn(4)
def test_assisted_after_eviction(kind, policy):
    """The same tokens as without an assistant, or one clear refusal; the model is right afterwards either way."""
    model, inputs, assisted = shared(), repetitive(), assistant(kind)
    with kvevict.evicting(model, policy, **PRESETS[policy]):
        want = generate(model, inputs, 16)
        try:
            got = generate(model, inputs, 16, **assisted)  # 5.4 may accept a candidate too many at the end
            assert torch.equal(got[:, : want.shape[1]], want) and got.shape[1] <= want.shape[1] + (VERSION < (5, 14))
        except ValueError as refusal:
            decodes = policy in ("streaming", "h2o", "tova")
            assert "decode=False" in str(refusal) if decodes else VERSION < (5, 14) and "crop" in str(refusal)
        assert torch.equal(generate(model, inputs, 16), want)


@pytest.mark.parametrize("kind", ["lookup", "itself"])
def test_a_report_without_the_assistant_s_candidates(kind):
    """It is of the prompt alone, as without an assistant."""
    model, inputs, reports = shared(), repetitive(), []
    with kvevict.evicting(model, "snapkv", **PRESETS["snapkv"]):
        for more in ({}, assistant(kind)):
            generate(model, inputs, 8, **more)
            report = kvevict.report(model)
            reports.append([report[name] for name in ("seen", "kept", "kept_share", "cache_bytes")])
    assert reports[0] == reports[1] and reports[0][0] == [48]


@pytest.mark.parametrize("kind", ["lookup", "model"])
@pytest.mark.parametrize("policy", [
    ("kvzip", dict(budget=20)), ("kvzip+", dict(budget=20)), ("read-twice", dict(budget=0.5)),
    ("read-once", dict(budget=0.5)), ("compactor", dict(budget=20)),
    ("snapkv", dict(budget=20, window=4, carry="max")), ("snapkv", dict(budget=20, window=4, carry="keep")),
], ids=lambda policy: " ".join([policy[0], policy[1].get("carry", "")]))  # fmt: skip
@pytest.mark.skipif(VERSION < (5, 14), reason="may accept a candidate too many at the end")
@pytest.mark.drawn(7)
def test_assisted_where_slots_carry_numbers(kind, policy):
    """The tokens, and the numbers in the cache, are those of greedy decoding."""
    model, inputs, (name, options) = shared(), repetitive(), policy
    with kvevict.evicting(model, name, **options):
        ask = dict(max_new_tokens=16, do_sample=False, return_dict_in_generate=True)
        greedy, got = (model.generate(**inputs, **ask, **more) for more in ({}, assistant(kind)))
    assert torch.equal(got.sequences, greedy.sequences)
    for one, other in zip(*(cache_of(out).layers for out in (greedy, got)), strict=True):
        known = [layer.carry[layer.carry.isfinite()] for layer in (one, other)]
        assert len(known[0]) and torch.equal(*known)


@pytest.mark.parametrize("family", MIXED)
@pytest.mark.parametrize("lazy", [True, False])
def test_user_cache_is_mutated_in_place(family, lazy):
    model = shared(family)
    if lazy and family == "gemma3":
        pytest.skip("a cache without a config has no sliding layers")
    cache = DynamicCache() if lazy else DynamicCache(config=model.config)
    with kvevict.evicting(model, "take", **TAKE):
        out = model.generate(sequence(50), past_key_values=cache, max_new_tokens=5, return_dict_in_generate=True)
    assert out.past_key_values is cache
    assert cache.get_seq_length() == 54
    assert len(cache.layers) == len(cache) == 4
    ours = [layer for layer in cache.layers if isinstance(layer, EvictionLayer)]
    assert len(ours) == (4 if family == "llama" else 2)
    assert all(layer.get_seq_length() == 54 and layer.keys.shape[2] == 16 + 4 for layer in ours)


@pytest.mark.parametrize("family", MIXED)
@pytest.mark.parametrize("pads", [(0,), PADS])
@pytest.mark.parametrize("new_ids_only", [False, True])
def test_follow_up_turn(family, pads, new_ids_only):
    """Two turns, with the full history or with the new ids alone and the whole mask, are one if nothing is evicted."""
    model, inputs = shared(family), prompt(len(pads), 40, pad=pads)
    with kvevict.evicting(model, "h2o", **ALL):
        first = model.generate(**inputs, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
        more = prompt(len(pads), 23, seed=5)["input_ids"]
        history = torch.cat([first.sequences, more], 1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(len(pads), 29, dtype=torch.long)], 1)
        seen = first.past_key_values.get_seq_length()
        assert seen == 45
        ids = history[:, seen:] if new_ids_only else history
        out = model.generate(ids, attention_mask=mask, past_key_values=first.past_key_values, max_new_tokens=8,
                             do_sample=False)  # fmt: skip
        assert kvevict.report(model)["seen"] == [69 - pad for pad in pads]
    want = generate(model, dict(input_ids=history, attention_mask=mask))
    assert torch.equal(out[:, ids.shape[1] :], want)


@pytest.mark.parametrize("family", MIXED)
@pytest.mark.parametrize("new_ids_only", [False, True])
def test_prefix_read_before_patching(family, new_ids_only):
    model, inputs = shared(family), prompt(3, 60, pad=PADS)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    want = generate(model, inputs)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, :30]
        model(ids[:, :30], attention_mask=mask[:, :30], position_ids=positions, past_key_values=cache)
    with kvevict.evicting(model, "h2o", **ALL):
        ids = ids[:, 30:] if new_ids_only else ids
        out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False)
        report = kvevict.report(model, positions=True)
    assert torch.equal(out[:, ids.shape[1] :], want)
    for row, pad in enumerate(PADS):
        assert report["positions"][1][row] == [list(range(60 - pad))] * 2


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_forward(fullgraph):
    """Right, or (a whole graph is not to be had) one clear error."""
    model, inputs = tiny.model(num_hidden_layers=1), prompt(1, 40)
    want = generate(model, inputs, 4)
    kvevict.patch(model, "snapkv", **ALL)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=fullgraph)
    try:
        if fullgraph:
            with pytest.raises(Exception, match=r"(?s)torch\.compiler\.disable|kvevict"):
                generate(model, inputs, 4)
        else:
            assert torch.equal(generate(model, inputs, 4), want)
            assert kvevict.report(model)["seen"] == [40]
    finally:
        del model.__dict__["forward"]
        torch._dynamo.reset()
    assert torch.equal(generate(model, inputs, 4), want)


@pytest.mark.parametrize("policy", ["take", "h2o"])
def test_inputs_embeds(policy):
    """Embeddings instead of ids: the same tokens, also with a probe and an eviction."""
    model, inputs = shared(), prompt(2, 50, pad=(0, 9))
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    for options in (dict(ALL, probe=6) if policy == "take" else ALL, PRESETS[policy]):
        with kvevict.evicting(model, policy, **options):
            want = generate(model, inputs)
            got = model.generate(inputs_embeds=embeds, attention_mask=inputs["attention_mask"], max_new_tokens=8,
                                 do_sample=False)  # fmt: skip
            assert torch.equal(got, want)


def test_labels():
    model, inputs = shared(), prompt(2, 50, pad=(0, 9))
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    with torch.no_grad():
        want = model(**inputs, labels=labels).loss
        with kvevict.evicting(model, "take", probe=4, **ALL):
            assert relative(model(**inputs, labels=labels).loss, want) < 1e-5
            assert relative(model(**inputs, labels=labels, logits_to_keep=0).loss, want) < 1e-5
        with kvevict.evicting(model, "take", **TAKE):
            assert relative(model(**inputs, labels=labels).loss, want) > 3e-5  # the evicted slots mattered


@pytest.mark.parametrize("wanted", [0, 1, 5, 20, 49, 50, 60, torch.tensor([3, 20, 41]), torch.tensor([-1])])
def test_logits_to_keep(wanted):
    model, inputs = shared(), prompt(1, 50)
    with torch.no_grad():
        want = model(**inputs, logits_to_keep=wanted).logits
        with kvevict.evicting(model, "snapkv", **ALL):
            got = model(**inputs, logits_to_keep=wanted).logits
    assert relative(got, want) < 1e-4


def test_generate_keeps_the_tail_of_the_hidden_states():
    """In generate the decoder returns the last chunk's hidden states, in a direct call the whole prompt's."""
    model, rows = shared(), []
    with kvevict.evicting(model, "take", **TAKE):  # a type's first trial runs before the hook
        hook = model.get_decoder().register_forward_hook(lambda m, a, out: rows.append(out.last_hidden_state.shape[1]))
        generate(model, prompt(2, 50, pad=(0, 9)), 3)
        assert rows == [16, 1, 1]
        assert model(sequence(50)).logits.shape[1] == 50
        assert model(sequence(50), logits_to_keep=20).logits.shape[1] == 20
        assert model.get_decoder()(sequence(50)).last_hidden_state.shape[1] == 50
    hook.remove()
    assert rows[3:] == [50, 32, 50]


def test_ways_to_call():
    """Arguments by place, tuples, the bare decoder, given positions, use_cache left to the config."""
    model, inputs = shared(), prompt(2, 50, pad=(0, 9))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    tokens, positions = mask.bool(), (mask.cumsum(1) - 1).clamp_min(0)
    for call in (
        lambda: model(ids, mask).logits, lambda: model(ids, mask, return_dict=False)[0],
        lambda: model(ids, mask, positions).logits, lambda: model.model(ids, mask)[0],
        lambda: model.model(ids, attention_mask=mask, return_dict=False)[0],
        lambda: model(ids, mask, past_key_values=DynamicCache(), use_cache=True).logits,
        lambda: model(ids, mask, use_cache=False).logits,
    ):  # fmt: skip
        with torch.no_grad():
            want = call()
            with kvevict.evicting(model, "take", probe=4, **ALL):
                got = call()
        assert relative(got[tokens], want[tokens]) < 1e-4


@pytest.mark.parametrize("policy", ["snapkv", "take"])
def test_hidden_states(policy):
    """All layers' hidden states with one chunk, refused with several; attentions refused; the model goes on."""
    model, inputs = tiny.model(), prompt(1, 50)
    options = dict(budget=10, window=4) if policy == "snapkv" else dict(budget=60, probe=4, chunk_size=60)
    want = model(**inputs, output_hidden_states=True).hidden_states
    with kvevict.evicting(model, policy, **options):
        got = model(**inputs, output_hidden_states=True).hidden_states
        assert len(got) == len(want) == 5
        assert all(relative(g, w) < 1e-4 for g, w in zip(got, want))
        with pytest.raises(ValueError, match="output_attentions"):
            model(**inputs, output_attentions=True)
    with kvevict.evicting(model, "snapkv", **ALL):
        with pytest.raises(ValueError, match="output_hidden_states"):
            model(**inputs, output_hidden_states=True)
        assert relative(model(**inputs).logits, model(**inputs, use_cache=False).logits) < 1e-4


def test_backward_through_a_cache_is_an_error():
    model, ids = tiny.model(), sequence(40)
    kvevict.patch(model, "snapkv", **ALL)
    loss = model(ids, labels=ids).loss
    with pytest.raises(RuntimeError, match=r"no gradient.*model\.train\(\).*use_cache=False"):
        loss.backward()
    embeds = model.get_input_embeddings()(ids)
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="no gradient"):
        model(inputs_embeds=embeds.detach().requires_grad_()).logits.sum().backward()


@pytest.mark.parametrize("way", ["train", "use_cache", "checkpointing"])
def test_training_is_unpatched(way):
    """Same logits and gradients, to the last bit."""
    model, ids = tiny.model(), sequence(40)
    if way != "use_cache":
        model.train()
    if way == "checkpointing":
        model.gradient_checkpointing_enable()
    options = dict(use_cache=False) if way == "use_cache" else {}

    def run():
        model.zero_grad()
        out = model(ids, labels=ids, **options)
        out.loss.backward()
        return [out.logits, *(p.grad for p in model.parameters())]

    want = run()
    kvevict.patch(model, "snapkv", budget=10, window=4)
    got = run()
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert any(g.abs().max() > 0 for g in got[1:])


LONGROPE = dict(
    family="phi3", partial_rotary_factor=1.0, original_max_position_embeddings=64,
    rope_parameters=dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 16, long_factor=[4.0] * 16,
                         partial_rotary_factor=1.0, original_max_position_embeddings=64),
)  # fmt: skip
DYNAMIC = dict(max_position_embeddings=64, rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("policy", ["h2o", "take"])
@pytest.mark.parametrize("length", [40, 64, 65, 100])
def test_frequencies_of_the_whole_prompt(kind, policy, length):
    """Chunks are rotated as in one pass, on either side of the switch point at 64."""
    model, inputs = tiny.model(**(LONGROPE if kind == "longrope" else DYNAMIC)), prompt(2, length, pad=(0, 9))
    tokens = inputs["attention_mask"].bool()
    with torch.no_grad():
        want = model(**inputs).logits[tokens]
        with kvevict.evicting(model, policy, **ALL, **(dict(probe=4) if policy == "take" else {})):
            assert relative(model(**inputs).logits[tokens], want) < 1e-4
        assert torch.equal(model(**inputs).logits[tokens], want)
    if length == 100:  # the switch matters
        with torch.no_grad():
            fresh = (tiny.model(**(LONGROPE if kind == "longrope" else DYNAMIC)) for _ in range(2))
            short, long = (model(sequence(100)[:, :n]) for model, n in zip(fresh, (60, 100)))
            assert relative(short.logits, long.logits[:, :60]) > 1e-3


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_decoding_across_the_switch_point(kind):
    """From 60 to 72 tokens with the switch at 64."""
    if kind == "longrope" and VERSION < (5, 17):
        pytest.skip("Phi3 of this Transformers drops its cache there and goes on with the last token alone")
    model, inputs = tiny.model(**(LONGROPE if kind == "longrope" else DYNAMIC)), prompt(1, 60)
    want = generate(model, inputs, 12)
    with kvevict.evicting(model, "h2o", **ALL):
        assert torch.equal(generate(model, inputs, 12), want)


@pytest.mark.parametrize("policy", ["take", "h2o"])
def test_exception_leaves_no_state(policy):
    """Raised in generate, outside of the model: tests/attack/test_interrupted.py raises them inside."""

    class Criteria(transformers.StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            raise KeyError

    model, inputs = shared(), prompt(2, 50, pad=(0, 9))
    with kvevict.evicting(model, policy, **PRESETS[policy]):
        want = generate(model, inputs)
        with pytest.raises(KeyError):
            generate(model, inputs, stopping_criteria=[Criteria()])
        assert torch.equal(generate(model, inputs), want)
        assert model(**inputs).logits.shape[1] == 50  # the failed call's logits_to_keep is forgotten


def dispatched(model):
    """On one device, but with accelerate's hooks on every module, as a device_map leaves them."""
    accelerate = pytest.importorskip("accelerate")
    return accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)


def hooked(model):
    hooks = pytest.importorskip("accelerate.hooks")
    for module in (model, model.get_decoder(), *model.get_decoder().layers):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(io_same_device=True))
    return model


@pytest.mark.parametrize("wrap", [dispatched, hooked])
@pytest.mark.parametrize("order", ["before", "after", "twice"])
def test_accelerate(wrap, order):
    """Patched before or after hooks are added, hooks added again, then unpatched: always the right output."""
    model, inputs = tiny.model(), prompt(2, 50, pad=(0, 9))
    plain = generate(model, inputs)
    with kvevict.evicting(model, "take", **TAKE):
        want = generate(model, inputs)
    if order != "before":
        wrap(model)
    kvevict.patch(model, "take", **TAKE)
    if order != "after":
        wrap(model)
    assert torch.equal(generate(model, inputs), want)
    assert kvevict.report(model)["kept"][0] == [[16, 16]] * 2
    kvevict.unpatch(model)
    assert torch.equal(generate(model, inputs), plain)
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.remove_hook_from_module(model, recurse=True)
    assert torch.equal(generate(model, inputs), plain)


def lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("order", ["before", "after", "on the base"])
def test_peft(order):
    base, inputs = tiny.model(), prompt(2, 50, pad=(0, 9))
    plain = generate(lora(copy.deepcopy(base)), inputs)
    with kvevict.evicting(lora(copy.deepcopy(base)), "take", **TAKE) as model:
        want = generate(model, inputs)
    assert not torch.equal(plain, generate(base, inputs))
    if order == "before":
        kvevict.patch(base, "take", **TAKE)
        model = lora(base)
    else:
        model = lora(base)
        kvevict.patch(model if order == "after" else base, "take", **TAKE)
    assert torch.equal(generate(model, inputs), want)
    assert kvevict.report(model)["kept"] == [[[16, 16]] * 2] * 4
    with model.disable_adapter():
        off = generate(model, inputs)
    kvevict.unpatch(model)
    assert torch.equal(generate(model, inputs), plain)
    merged = model.merge_and_unload()
    kvevict.patch(merged, "take", **TAKE)
    assert relative(merged(**inputs).logits, kvevict.patch(lora(tiny.model()), "take", **TAKE)(**inputs).logits) < 1e-3
    assert torch.equal(off, generate(kvevict.patch(tiny.model(), "take", **TAKE), inputs))
