"""One context, many questions: the answers are those of the whole prompt, whatever was asked before."""

import copy

import pytest
import tiny
import torch
import transformers

import kvevict
from kvevict.answering.writing import Sampling
from kvevict.asking.prompts import frame, ids_of
from kvevict.engine.read.budgets import places
from kvevict.models.compat import CACHE
from kvevict.models.loading import load_model

CONTEXT = "The harbour opens at seven and the lantern is lit at nine; nobody in the town knows why. " * 3
QUESTIONS = ["When?", "Why is the lantern lit?", "?"]
POLICIES = {
    "snapkv": dict(budget=20, window=4), "h2o": dict(budget=20), "tova": dict(budget=20, chunk_size=64),
    "take+chunkkv": dict(budget=30, probe=8, chunk_size=64), "streaming": dict(budget=20),
    "laq": dict(budget=20), "fastkv": dict(budget=20, tsp_len=64), "adakv": dict(budget=0.2, window=4),
}  # fmt: skip


@pytest.fixture(params=["plain", "chat"])
def tokenizer(request):
    return tiny.byte_tokenizer() if request.param == "plain" else tiny.chat_tokenizer()


def whole(net, tokenizer, question, tokens):
    """The unpatched model's answer to context and question in one prompt."""
    head, asked = frame(tokenizer, f"\n\n{question}")
    ids = torch.tensor([head + ids_of(tokenizer, CONTEXT) + asked])
    out = net.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()


@pytest.mark.quick
def test_everything_kept_is_the_whole_prompt(net, tokenizer):
    got = kvevict.answer(net, tokenizer, CONTEXT, QUESTIONS, "snapkv", budget=4096, max_new_tokens=12)
    assert got == [whole(net, tokenizer, question, 12) for question in QUESTIONS]


@pytest.fixture(scope="module")
def bundled():
    """A model with different answers to different questions, and its tokenizer."""
    return load_model(kvevict.small_llama(), "float32", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.drawn(1)
def test_questions_do_not_meet(bundled, policy, tmp_path):
    """The same answers in any order, twice, from a cache, a file and deep copies; a long answer does not evict."""
    net, tokenizer = bundled
    options, asked = POLICIES[policy], dict(max_new_tokens=24)
    want = kvevict.answer(net, tokenizer, CONTEXT, QUESTIONS, policy, **asked, **options)
    assert len(set(want)) == 3
    cache = kvevict.read(net, tokenizer, CONTEXT, policy, **options)
    slots = [layer.counts.tolist() for layer in cache.layers]
    assert kvevict.answer(net, tokenizer, cache, QUESTIONS[::-1] * 2, **asked) == want[::-1] * 2
    assert kvevict.answer(net, tokenizer, copy.deepcopy(cache), QUESTIONS[2:], **asked) == want[2:]
    kvevict.save_cache(cache, tmp_path / "cache")
    loaded = kvevict.load_cache(tmp_path / "cache", net)
    assert kvevict.answer(net, tokenizer, loaded, QUESTIONS, **asked) == want
    kvevict.save_cache(loaded, tmp_path / "again")
    with kvevict.evicting(net, "streaming", budget=20):  # the model's policy does not matter
        loaded = kvevict.load_cache(tmp_path / "again", net)
        assert kvevict.answer(net, tokenizer, loaded, QUESTIONS, **asked) == want
    assert [layer.counts.tolist() for layer in cache.layers] == slots
    assert max(map(max, slots[0])) < 60


def test_the_model_is_left_as_it_was(net):
    tokenizer = tiny.byte_tokenizer()
    before = net.config.to_dict(), {name: dict(module.__dict__) for name, module in net.named_modules()}
    kvevict.answer(net, tokenizer, CONTEXT, QUESTIONS[:1], "snapkv", budget=20, window=4, max_new_tokens=2)
    with pytest.raises(ValueError, match="unknown policy 'snapk'; did you mean 'snapkv'"):
        kvevict.answer(net, tokenizer, CONTEXT, QUESTIONS, "snapk", budget=20)
    after = net.config.to_dict(), {name: dict(module.__dict__) for name, module in net.named_modules()}
    assert [sorted(module) for module in before[1].values()] == [sorted(module) for module in after[1].values()]
    assert before[0] == after[0]


def test_of_a_patched_model(net):
    """The model's policy reads, with changes if given, and stays, where it does not need the question."""
    tokenizer, options = tiny.byte_tokenizer(), dict(max_new_tokens=12)
    named = kvevict.answer(net, tokenizer, CONTEXT, QUESTIONS, "keydiff", budget=30, **options)
    with kvevict.evicting(net, "keydiff", budget=20):
        own = kvevict.read(net, tokenizer, CONTEXT)
        assert own.layers[0].counts.tolist() == [[20, 20]]
        assert kvevict.read(net, tokenizer, CONTEXT, budget=25).layers[0].counts.tolist() == [[25, 25]]
        assert kvevict.answer(net, tokenizer, CONTEXT, QUESTIONS, budget=30, **options) == named
        assert kvevict.read(net, tokenizer, CONTEXT).layers[0].counts.tolist() == [[20, 20]]


def test_pipeline(net):
    tokenizer, options = tiny.byte_tokenizer(), dict(max_new_tokens=12)
    want = kvevict.answer(net, tokenizer, CONTEXT, QUESTIONS, "snapkv", budget=20, window=4, **options)
    pipe = kvevict.Pipeline(net, tokenizer, "snapkv", budget=20, window=4)
    assert pipe(CONTEXT, questions=QUESTIONS, **options) == dict(answers=want)
    assert pipe(CONTEXT, question=QUESTIONS[1], **options) == dict(answer=want[1])
    assert pipe(pipe.read(CONTEXT), QUESTIONS[1], **options) == dict(answer=want[1])
    for wrong in ({}, dict(question="a", questions=["b"])):
        with pytest.raises(ValueError, match="either question"):
            pipe(CONTEXT, **wrong)
    with pytest.raises(ValueError, match="budget"):
        kvevict.Pipeline(net, tokenizer, "snapkv", budget=0)


def test_what_reads_where_no_question_is_known(bundled, monkeypatch):
    """The gates in the model's folder; else `read-twice`, in chunks. A text near the end of the model's positions is
    read in shorter chunks, to leave room to repeat."""
    net, tokenizer = bundled

    def kept(text, policy=None, **options):
        return places(kvevict.read(net, tokenizer, text, policy, **options).layers[1], False)

    text = CONTEXT * 8
    assert kept(text, budget=80) == kept(text, "gate", budget=80) != kept(text, "kvzip", budget=80)
    monkeypatch.setattr(net.config, "_name_or_path", "")
    assert kept(CONTEXT, budget=20) == kept(CONTEXT, "kvzip", budget=20)
    long = CONTEXT * (1990 // len(ids_of(tokenizer, CONTEXT)))
    room = net.config.max_position_embeddings - len(ids_of(tokenizer, long))
    assert 16 <= room < 512
    pipe = kvevict.Pipeline(net, tokenizer, budget=0.2)
    shorter = kvevict.read(net, tokenizer, long, "kvzip", budget=0.2, chunk_size=room)
    assert places(pipe.read(long).layers[1], False) == places(shorter.layers[1], False)
    with pytest.raises(ValueError, match="give a chunk_size of at most"):
        kvevict.read(net, tokenizer, long, "kvzip", budget=0.2)


def test_one_line(bundled):
    """An answer of the bundled model ends where its first line does."""
    model, tokenizer = bundled
    asked = ["Question: What is the code of Naislet?\nAnswer: The code of Naislet is"]
    text = "The code of Naislet is 364735. Agnes kept the barley under the oar."
    options = dict(budget=512, max_new_tokens=12)
    (long,) = kvevict.answer(model, tokenizer, text, asked, "snapkv", **options)
    (short,) = kvevict.answer(model, tokenizer, text, asked, "snapkv", one_line=True, **options)
    assert short == "364735" == long.splitlines()[0]
    assert len(long.splitlines()) > 1


def test_mistakes(net):
    tokenizer, small = tiny.byte_tokenizer(), dict(policy="snapkv", budget=20)
    cache = kvevict.read(net, tokenizer, CONTEXT, **small, window=4)
    for context, questions, options, kind, said in (
        (cache, "Who?", {}, TypeError, r"questions must be a list.*\[question\]"),
        (cache, [b"Who?"], {}, TypeError, "questions must be a list"),
        ([1, 2], ["Who?"], {}, TypeError, "context must be a text or a cache.*list"),
        (cache, ["Who?"], small, ValueError, r"policy, budget: the context is a cache.*kvevict\.read"),
        ("", ["Who?"], small, ValueError, "context is empty"),
        (cache, ["Who?"], dict(max_new_tokens=0), ValueError, "max_new_tokens"),
    ):  # fmt: skip
        with pytest.raises(kind, match=said):
            kvevict.answer(net, tokenizer, context, questions, **options)
    with pytest.raises(TypeError, match="context must be a text"):
        kvevict.read(net, tokenizer, cache, **small)
    net.train()
    try:
        with pytest.raises(ValueError, match=r"model\.eval\(\)"):
            kvevict.answer(net, tokenizer, CONTEXT, ["Who?"], **small)
    finally:
        net.eval()


SETTINGS = [
    dict(return_dict_in_generate=True, output_scores=True), dict(num_beams=3), dict(cache_implementation="static"),
    dict(repetition_penalty=5.0), dict(no_repeat_ngram_size=1), dict(do_sample=True, temperature=9.0),
    dict(max_length=3, min_new_tokens=9), dict(suppress_tokens=list(range(128))), dict(prompt_lookup_num_tokens=4),
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_whatever_generation_config_says(net, settings):
    tokenizer, options = tiny.byte_tokenizer(), dict(budget=30, window=4, max_new_tokens=12)
    want = kvevict.answer(net, tokenizer, CONTEXT, QUESTIONS, "snapkv", **options)
    before = copy.deepcopy(net.generation_config)
    try:
        net.generation_config.update(**settings)
        assert kvevict.answer(net, tokenizer, CONTEXT, QUESTIONS, "snapkv", **options) == want
    finally:
        net.generation_config = before


def test_an_answer_ends_where_the_model_says_so(net):
    tokenizer, options = tiny.byte_tokenizer(), dict(budget=30, window=4, max_new_tokens=12)
    (want,) = kvevict.answer(net, tokenizer, CONTEXT, QUESTIONS[:1], "snapkv", **options)
    cache = kvevict.read(net, tokenizer, CONTEXT, "snapkv", budget=30, window=4)
    _, ids = frame(tokenizer, f"\n\n{QUESTIONS[0]}")
    with kvevict.evicting(net, "streaming", budget=4096), torch.no_grad():
        ids = torch.tensor([ids])
        mask = torch.ones(1, cache.get_seq_length() + ids.shape[1], dtype=torch.long)
        said = net.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, do_sample=False)
    said = said[0, ids.shape[1] :].tolist()
    assert tokenizer.decode(said).strip() == want
    net.generation_config.eos_token_id = [said[4]]
    try:
        (short,) = kvevict.answer(net, tokenizer, CONTEXT, QUESTIONS[:1], "snapkv", **options)
    finally:
        net.generation_config.eos_token_id = None
    assert short == tokenizer.decode(said[: said.index(said[4]) + 1]).strip()


def test_drawn_answers(net):
    tokenizer, options = tiny.byte_tokenizer(), dict(max_new_tokens=12)
    cache = kvevict.read(net, tokenizer, CONTEXT, "snapkv", budget=30, window=4)
    greedy = kvevict.answer(net, tokenizer, cache, QUESTIONS, **options)
    drawn = kvevict.answer(net, tokenizer, cache, QUESTIONS, temperature=3.0, **options)
    assert drawn != greedy
    pipe = kvevict.Pipeline(net, tokenizer, "snapkv", budget=30, window=4)
    assert pipe(cache, questions=QUESTIONS[::-1], temperature=3.0, **options) == dict(answers=drawn[::-1])
    assert kvevict.answer(net, tokenizer, cache, QUESTIONS, temperature=3.0, sampling_seed=1, **options) != drawn
    assert kvevict.answer(net, tokenizer, cache, QUESTIONS, temperature=3.0, top_p=1e-6, **options) == greedy
    for wrong in (dict(temperature=0), dict(temperature=1.0, top_p=0), dict(top_p=0.5), dict(temperature=float("nan")),
                  dict(temperature=1.0, sampling_seed=-1), dict(temperature=1.0, top_p=2)):  # fmt: skip
        with pytest.raises(ValueError, match=list(wrong)[-1]):
            kvevict.answer(net, tokenizer, cache, ["Who?"], **wrong)


def test_noise_is_of_a_question(net):
    """Of two questions, noise alone makes different answers; a question that is asked twice gets one."""
    tokenizer = tiny.byte_tokenizer()
    cache = kvevict.read(net, tokenizer, CONTEXT, "snapkv", budget=30, window=4)
    drawn = kvevict.answer(net, tokenizer, cache, ["Who?", "Why?", "Who?"], temperature=1e6, max_new_tokens=12)
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_draws_have_their_probabilities(top_p):
    """Of softmax(logits / 2), renormalised over the fewest tokens that reach top_p: within 5 standard deviations."""
    logits, draws = [0.0, 3.0, 1.0, 2.5, -4.0, 2.0], 4000
    chances = torch.tensor(logits, dtype=torch.float64).div(2).softmax(0).tolist()
    order, among = sorted(range(6), key=lambda i: -chances[i]), []
    while sum(chances[i] for i in among) < top_p - 1e-12 and len(among) < 6:
        among.append(order[len(among)])
    choose = Sampling(2.0, top_p, 3).chooser()
    found = [choose(torch.tensor(logits)) for _ in range(draws)]
    for token in range(6):
        p = chances[token] / sum(chances[i] for i in among) if token in among else 0.0
        assert abs(found.count(token) - draws * p) <= 5 * (draws * p * (1 - p)) ** 0.5


def _pipeline(net, tokenizer):
    return transformers.pipeline("text-generation", model=net, tokenizer=tokenizer)


def _distributed(net, tokenizer):
    return torch.nn.parallel.DistributedDataParallel(net)


def _peft(net, tokenizer):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(net, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()


AROUND = {
    "pipeline": _pipeline, "data parallel": lambda net, _: torch.nn.DataParallel(net), "distributed": _distributed,
    "compiled": lambda net, _: torch.compile(net, backend="eager"), "peft": _peft,
    "peft in all": lambda net, tokenizer: torch.nn.DataParallel(torch.compile(_peft(net, tokenizer), backend="eager")),
}  # fmt: skip


@pytest.fixture
def processes():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.drawn(2)
def test_what_may_be_around_a_model(around, processes, tmp_path):
    """`read`, `answer`, `Pipeline`, `report` and a loaded cache take the same models as `patch`."""
    net, tokenizer = tiny.model(vocab_size=259, bos_token_id=None, pad_token_id=None), tiny.byte_tokenizer()
    options = dict(max_new_tokens=8)
    wrapped = AROUND[around](net, tokenizer)
    want = kvevict.answer(net, tokenizer, CONTEXT, QUESTIONS, "keydiff", budget=20, **options)
    assert kvevict.answer(wrapped, tokenizer, CONTEXT, QUESTIONS, "keydiff", budget=20, **options) == want
    assert kvevict.Pipeline(wrapped, tokenizer, "keydiff", budget=20)(CONTEXT, questions=QUESTIONS, **options) == dict(
        answers=want
    )
    with kvevict.evicting(wrapped, "keydiff", budget=20):
        cache = kvevict.read(wrapped, tokenizer, CONTEXT)
        assert kvevict.report(wrapped) == kvevict.report(cache)
    kvevict.save_cache(cache, tmp_path / "cache")
    loaded = kvevict.load_cache(tmp_path / "cache", wrapped)
    assert kvevict.answer(wrapped, tokenizer, loaded, QUESTIONS, **options) == want
    torch.compiler.reset()


@pytest.mark.skipif(CACHE == "cache", reason="PEFT 0.21 generates other tokens, unpatched too")
def test_learned_tokens(net):
    """A PEFT model's learned tokens come once, before the text: the answers are those of its whole prompt."""
    peft = pytest.importorskip("peft")
    tokenizer, plain = tiny.byte_tokenizer(), tiny.model(vocab_size=259, bos_token_id=None, pad_token_id=None)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    learned = peft.get_peft_model(plain, config).eval()
    want = [whole(learned, tokenizer, question, 8) for question in QUESTIONS]
    assert want != [whole(plain, tokenizer, question, 8) for question in QUESTIONS]
    got = kvevict.answer(learned, tokenizer, CONTEXT, QUESTIONS, "snapkv", budget=4096, keep_first=5, max_new_tokens=8)
    assert got == want
