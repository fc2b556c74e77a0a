"""The question observes: named by the caller as a text or tokens, or found by the chat template. Against the float64
oracle with the same span of each row's tokens as its probe."""

import argparse
import contextlib
import functools
import inspect
import io
import json
import pickle
import types
import warnings
from dataclasses import dataclass

import oracle
import pytest
import templates
import tiny
import torch
from policy_cases import BUDGET, CHUNK, NEAR, VOCAB, model, ours, tokens
from transformers import AutoModelForCausalLM, DynamicCache

import kvevict
import kvevict.cautions
from kvevict.asking.question import Finder, LastTurn
from kvevict.asking.sentences import question_of
from kvevict.asking.tokens import find
from kvevict.asking.turns import Turns
from kvevict.cli import COMMANDS
from kvevict.context import within
from kvevict.lab.analysis.run import encode
from kvevict.models.compat import CACHE, cache_of
from kvevict.models.families import base_model
from kvevict.policy.rows import Question
from kvevict.policy.rows.probe import Probe

TEXT = "The harbour opens at seven. The lantern is lit at nine, says the old man by the door. " * 4
ASKED = "When is the lantern lit?"
MORE = "Answer in one short sentence. Do not explain how you found it, and do not repeat it."
PRESETS = {"take": {}, "take+edie": dict(kernel=5, keep_first=2), "take+chunkkv": dict(c=3)}
CHOICES = [*PRESETS.items()]
CHOICES += [("take+edie", dict(kernel=5, keep_first=n, heads=heads)) for n, heads in ((2, "ada"), (0, "flat"))]
MEASURED = [(name, dict(rows="probe")) for name in ("edie-exact", "snapkv", "defensive")]
MEASURED += [("take+caote", {}), ("take+edie", dict(kernel=5, weight="all"))]
TURNS = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<assistant>' }}{{ m.content }}</user>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


PROBE = 3  # tokens of the policy's probe, and number of the prompt's last tokens that are kept


@pytest.fixture(params=["plain", "chat", "turns", "words"])
def tokenizer(request):
    made = tiny.byte_tokenizer() if request.param == "plain" else tiny.chat_tokenizer()
    if request.param == "turns":
        made.chat_template = TURNS
    if request.param == "words":  # nothing but a space ends a turn
        made.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    return made


def truth(name, lengths, asked, **options):
    """The first seed without a near-tie, and the oracle's (logits, positions) of each row, which has `asked`."""
    for seed in range(60):
        try:
            results = []
            for (ids,), own in zip(tokens([[n] for n in lengths], seed), asked, strict=True):
                row = oracle.Row(model(), name, near=NEAR, **own, **options)
                results.append((row.read(ids.tolist()).view(-1, VOCAB), row.positions))
            return seed, results
        except oracle.NearTie:
            continue
    raise AssertionError("60 seeds and every one has a near-tie")


def spans_of(lengths, spans, ending=PROBE):
    """The oracle's options of each row's span. One in the second half of its prompt begins a request, and observes in
    place in the last quarter; one in the first half stands before the text."""
    for n, span in zip(lengths, spans, strict=True):
        rest = -(span[0] % -n) if span[0] else n
        request, before = ((rest,), None) if rest <= n // 2 else ((), (*span, True))
        yield dict(probe=span, ending=ending, request=request, before=before, ends=rest <= n // 4)


def check(name, lengths, question, asked, probe=PROBE, **chosen):
    """Rows with this question keep what the oracle keeps; returns ours, (logits, positions) of each row."""
    seed, want = truth(name, lengths, [*asked], **chosen)
    with question:
        ((*got,),) = ours(model(), name, [[n] for n in lengths], seed, **chosen, probe=probe)
    for (logits, positions), (our_logits, our_positions) in zip(want, got, strict=True):
        assert our_positions == positions
        torch.testing.assert_close(our_logits.double(), logits, rtol=0, atol=1e-5 * logits.abs().max().item())
    return got


SPANS = {  # presets with options, chunk sizes, the probe's rows; lengths and spans of a batch, the budget
    "at either end of a prompt, where a row's observes in place beside others that are appended": (
        PRESETS, (CHUNK, 64), (PROBE,), [41, 26, 38, 33], [(7, 12), (20, 23), (0, 9), (-6, 0)], BUDGET),
    "near the end: the last chunk has its tokens, which see those before them and are not appended to it again": (
        PRESETS, (16, 64, None), (11,), [62, 48, 55, 41], [(50, 55), (40, 43), (44, 51), (-6, 0)], 32),
    "with a question elsewhere, few of the last slots are the question's: eight are kept of a probe's": (
        {"take+edie": dict(kernel=5)}, (14,), (8, 12), [48, 15], [(5, 10), (3, 6)], 20),
    "at the first cut EDIE's c_j would be the largest attention over slots that the rows do not see: it is 1": (
        {"take+edie": PRESETS["take+edie"]}, (24,), (12,), [48, 44], [(0, 14), (1, 14)], 16),
}  # fmt: skip


@pytest.mark.parametrize("name, chunk, probe, what", [
    (name, chunk, probe, what) for what, (names, chunks, probes, *_) in SPANS.items()
    for name in names for chunk in chunks for probe in probes
])  # fmt: skip
def test_a_span_of_each_row(name, chunk, probe, what):
    """Of other lengths; rows with fewer tokens are padded."""
    names, _, _, lengths, spans, budget = SPANS[what]
    asked = spans_of(lengths, spans, ending=probe)
    chosen = dict(budget=budget, chunk_size=chunk) | names[name]
    check(name, lengths, kvevict.observing(spans), asked, probe=probe, **chosen)


def test_one_span_for_all_rows_and_while_decoding():
    """One span for all rows equals the same one for each."""
    rows, chosen = [[30, 1, 1, 1], [30, 1, 1, 1]], dict(budget=BUDGET, chunk_size=CHUNK, kernel=5, probe=5)
    with kvevict.observing([(4, 9)] * 2):
        want = ours(model(), "take+edie", rows, 5, **chosen)
    with kvevict.observing((4, 9)):
        got = ours(model(), "take+edie", rows, 5, **chosen)
    for theirs, mine in zip(want, got, strict=True):
        for (logits, positions), (our_logits, our_positions) in zip(theirs, mine, strict=True):
            assert our_positions == positions and torch.equal(our_logits, logits)


@dataclass(frozen=True)
class Known(Finder):
    """Spans of each row, and its request's beginnings."""

    spans: tuple  # a row's, one or more
    requests_of: tuple
    near: bool = False
    before: tuple = ()

    def rows(self, arguments, prompt):
        before = self.before or (None,) * len(self.spans)
        each = zip(self.spans, self.requests_of, before, strict=True)
        return arguments.policy.rows.asked([Question(*of, self.near) for of in each]), ()


@pytest.mark.parametrize("chunk", [12, 16, None])
@pytest.mark.parametrize("name, options", CHOICES)
def test_a_request_against_the_oracle(name, options, chunk):
    """Rows of other lengths: the request fits, only its part from the question on does, no beginning fits, a chunk
    begins in it, there is none, and no beginning fits beside a text that is too short to fill what it leaves."""
    lengths = [62, 48, 55, 41, 33, 40]
    spans = ((50, 55), (40, 43), (44, 51), (35, 40), (2, 5), (22, 25))
    requests = ((15, 12), (20, 8), (30, 24, 17), (14,), (), (26, 18))
    chosen = dict(budget=32, chunk_size=chunk) | options
    asked = [dict(probe=span, ending=11, request=request) for span, request in zip(spans, requests, strict=True)]
    question = within(question=Known([(span,) for span in spans], requests))
    got = check(name, lengths, question, asked, probe=11, **chosen)
    for n, kept, (_, positions) in zip(lengths, (15, 8, 8, 14, 0, 8), got, strict=True):
        assert all(head[len(head) - kept :] == list(range(n - kept, n)) for layer in positions for head in layer)


@pytest.mark.parametrize("name", PRESETS)
def test_a_request_that_observes_and_does_not_fit(name):
    """The question's rows score every slot of it that half of the budget does not hold."""
    lengths, spans, requests = [62, 70], ((42, 47), (52, 54)), ((24, 20), (19,))
    chosen, known = dict(budget=24, chunk_size=24) | PRESETS[name], dict(ending=9, ends=True)
    asked = [dict(probe=span, request=request, **known) for span, request in zip(spans, requests, strict=True)]
    question = within(question=Known([(span,) for span in spans], requests, near=True))
    check(name, lengths, question, asked, probe=9, **chosen)


@pytest.mark.parametrize("chunk", [12, 16, None])
@pytest.mark.parametrize("name, options", [*CHOICES, *MEASURED])
def test_a_question_before_the_text_against_the_oracle(name, options, chunk):
    """Neither its copies nor the rows that observe see it, and it is kept: one that a quarter of the budget holds, a
    longer one, one that the prompt's end repeats, one that observes with another, and none."""
    lengths = [62, 48, 55, 41, 33]
    spans = (((5, 10),), ((3, 13),), ((44, 51),), ((2, 6), (35, 40)), ((20, 25),))
    before = ((5, 10, True), (3, 13, True), (4, 11, False), (2, 6, True), None)
    requests = ((), (), (11,), (6,), (13,))
    rows = zip(spans, requests, before, strict=True)
    asked = [dict(probe=span, ending=11, request=request, before=opens) for span, request, opens in rows]
    question = within(question=Known(spans, requests, before=before))
    got = check(name, lengths, question, asked, probe=11, **dict(budget=32, chunk_size=chunk) | options)
    for b, (start, stop) in ((0, (5, 10)), (3, (2, 6))):
        assert all({*range(start, stop)} <= {*head} for layer in got[b][1] for head in layer)


BEFORE = "We could not agree on it yesterday."
TAIL = f"{ASKED} {MORE}"


def holes(positions, begin: int, tokens: int) -> set:
    """The tokens from `begin` on that some head of some layer does not keep."""
    return {t for layer in positions for row in layer for head in row for t in {*range(begin, tokens)} - {*head}}


@pytest.mark.parametrize("options", [
    dict(chunk_size=512), dict(chunk_size=200), dict(chunk_size=64), dict(chunk_size=200, heads="flat"),
    dict(chunk_size=200, heads="ada"), dict(chunk_size=200, diagnose=True), dict(chunk_size=400, tsp=1, tsp_len=0.9),
    dict(chunk_size=200, select="chunk", c=4), dict(chunk_size=None, layers="cake", score="cake", probe=150),
], ids=str)  # fmt: skip
def test_what_is_written_around_a_question_has_no_holes(net, tokenizer, options):
    """Whatever observes: a question near the end, found or named, with the answer's first words after it."""
    chats = tokenizer.chat_template is not None
    last = f"{BEFORE} {ASKED}"
    for request, opening in ((f"{BEFORE} {TAIL}", ""), (last, ""), (last, " It is lit at"), (TAIL, "")):
        text = f"{TEXT * 2}\n\n{request}"
        if chats:
            turns = [dict(role="user", content=text)]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer(text + opening, add_special_tokens=False)["input_ids"]])
        rest = len(tokenizer((text + opening)[text.rindex(request) :], add_special_tokens=False)["input_ids"])
        for how in ("patched", "observing"):
            chosen = dict(budget=420, kernel=5, keep_first=2) | options
            question = {} if how == "patched" else dict(question=ASKED, tokenizer=tokenizer)
            kept = slots(net, ids, **question, patched=tokenizer if how == "patched" else False, **chosen)
            assert not holes(kept, ids.shape[1] - rest, ids.shape[1])


def test_as_much_of_a_request_as_half_of_the_budget_holds(net):
    """From its paragraph on, from its line, from the question; else three eighths, with the prompt's last tokens."""
    tok, request = tiny.byte_tokenizer(), f"{BEFORE}\nWell. {TAIL}"
    ids, sizes = row(f"{TEXT * 2}\n\n{request}"), [len(request), len(f"Well. {TAIL}"), len(TAIL)]
    end = ids.shape[1]
    for half, kept in ((sizes[0], sizes[0]), (sizes[0] - 1, sizes[1]), (sizes[1] - 1, sizes[2]), (sizes[2] - 1, 0)):
        for size in (512, 150):
            found = slots(net, ids, patched=tok, budget=2 * half, chunk_size=size, keep_first=2)
            assert not holes(found, end - (kept or half // 4), end)
            for head in (head for layer in found for row in layer for head in row):
                assert kept or sum(position >= end - sizes[0] for position in head) <= 3 * half // 4


@pytest.mark.parametrize("chunk", [None, 400])
def test_a_question_that_is_longer_than_the_part_near_the_end(net, chunk):
    """It does not stand before the text, where it would be dropped if a quarter of the budget does not hold it."""
    asked = f"{'The lamp, the old man said, was lit before the ships came in. ' * 5}{ASKED}"
    ids, rest = row(f"{TEXT * 3}\n\n{asked} {ASKED}"), len(f"{asked} {ASKED}")
    for named in (asked, f"{asked} {ASKED}"):
        kept = slots(net, ids, question=named, tokenizer=tiny.byte_tokenizer(), budget=2 * rest, chunk_size=chunk)
        assert not holes(kept, ids.shape[1] - rest, ids.shape[1])


def test_a_request_in_a_batch(net):
    """Each row its own; a row without a question keeps the policy's last slots."""
    ids, mask = side_by_side([f"{TEXT * 2}\n\n{TAIL}", f"{TEXT}\n\n{BEFORE} {ASKED}", f"{TEXT * 9}"[:340]])
    kept = slots(net, ids, patched=tiny.byte_tokenizer(), given=dict(attention_mask=mask), budget=300)
    for b, size in enumerate((len(TAIL), len(f"{BEFORE} {ASKED}"), 8)):
        assert not holes([layer[b : b + 1] for layer in kept], ids.shape[1] - size, ids.shape[1])


@pytest.mark.parametrize("options", [{}, dict(heads="flat"), dict(ema_alpha=0.0), dict(chunk_size=None)])
def test_other_rows_change_nothing(net, options):
    """Questions at the end, before the text and alone, one that an answer begins after, and a text without one."""
    texts = [f"{TEXT * 2}\n\n{TAIL}", f"{ASKED}\n\n{TEXT * 2}", ASKED, f"{TEXT}\n\n{ASKED} It is lit at", TEXT * 2]
    ids, mask = side_by_side(texts)
    given = dict(attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))
    options = dict(patched=tiny.byte_tokenizer(), budget=90, probe=48) | options
    together = slots(net, ids, given=given, **options)
    for b, text in enumerate(texts):
        assert [layer[b] for layer in together] == [layer[0] for layer in slots(net, row(text), **options)], text


def test_other_rows_of_earlier_turns_change_nothing(net):
    """Whether a question is near the end is counted in tokens of its own row, not in columns with padding."""
    tok, chats = tiny.byte_tokenizer(), [[TEXT * 2, ASKED], [TEXT[:60], TAIL]]
    options = dict(budget=64, chunk_size=200, probe=8, kernel=5)

    def kept(rows):
        cache, masks = None, []
        for turn in range(2):
            ids, mask = side_by_side([chat[turn] for chat in rows])
            masks.append(mask)
            whole = torch.cat(masks, 1)
            places = (whole.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
            more = {} if cache is None else {CACHE: cache}
            cache = cache_of(net(ids, attention_mask=whole, position_ids=places, use_cache=True, **more))
        return [[[head.tolist() for head in row] for row in layer.positions()] for layer in cache.layers]

    with kvevict.evicting(net, "take+edie", tokenizer=tok, **options), torch.no_grad():
        together = kept(chats)
        for b, chat in enumerate(chats):
            assert [layer[b] for layer in together] == [layer[0] for layer in kept([chat])]


def test_the_last_rows_of_a_text_without_a_question(net):
    """Their slots stay, too, where they are read again because another row of the batch has a question."""
    (ids, mask), longest = side_by_side([f"{TEXT}\n\n{ASKED} It is lit at", TEXT * 2]), len(TEXT * 2)
    options = dict(patched=tiny.byte_tokenizer(), budget=150, probe=len(ASKED), diagnose=True)
    kept = slots(net, ids, given=dict(attention_mask=mask), **options)
    assert not holes([layer[1:] for layer in kept], longest - len(ASKED), longest)


def test_a_last_turn_that_is_short(net):
    """A long text with questions and answers before it: all of the turn is kept, and nothing before it has to be."""
    tok = tiny.chat_tokenizer()
    tok.chat_template = TURNS
    said = [("user", f"{TEXT * 2}\n\nWho says it?"), ("assistant", "The old man."), ("user", TAIL)]
    text = tok.apply_chat_template(
        [dict(role=r, content=c) for r, c in said], tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([tok(text, add_special_tokens=False)["input_ids"]])
    n, rest = ids.shape[1], len(tok(text[text.rindex(TAIL) :], add_special_tokens=False)["input_ids"])
    kept = slots(net, ids, patched=tok, budget=300, chunk_size=128)
    assert not holes(kept, n - rest, n) and holes(kept, n - rest - 20, n)


@pytest.mark.parametrize("name", ["generate", "serve"])
def test_what_a_command_or_the_server_is_asked(net, name):
    """They know the request's words: `LastTurn(tokenizer, words)`."""
    tok = tiny.chat_tokenizer()
    words = f"{BEFORE} {TAIL}" if name == "generate" else f"{TEXT * 2}\n\n{BEFORE} {TAIL}"
    prompt = encode(tok, TEXT * 2, f"{BEFORE} {TAIL}")
    ids = torch.tensor([prompt.context + prompt.question])
    with within(question=LastTurn(tok, words)):
        kept = slots(net, ids, budget=420, chunk_size=150, patched=False)
    assert not holes(kept, ids.shape[1] - len(prompt.question) + 2, ids.shape[1])


def test_a_budget_that_does_not_hold_the_request(net, monkeypatch):
    """A warning names one that does, once."""
    monkeypatch.setattr(kvevict.cautions, "_given", set())
    tok, ids = tiny.byte_tokenizer(), row(f"{TEXT * 3}\n\n{TAIL}")
    with pytest.warns(UserWarning, match=f"give budget={2 * len(TAIL)}, or budget=0.2"):
        slots(net, ids, patched=tok, budget=2 * len(TAIL) - 1)
    for budget in (2 * len(TAIL) - 1, 2 * len(TAIL), 0.2, 5000):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            slots(net, ids, patched=tok, budget=budget, chunk_size=150)


def slots(net, ids, question=None, tokenizer=None, patched=None, given=None, **options):
    """The positions that are kept. given: further arguments of the model's call."""
    chosen = dict(budget=60, chunk_size=128, probe=8, kernel=5) | options
    asked = contextlib.nullcontext() if question is None else kvevict.observing(question, tokenizer)
    with kvevict.evicting(net, "take+edie", tokenizer=patched, **chosen), torch.no_grad(), asked:
        net(ids, use_cache=True, logits_to_keep=1, **given or {})
        return kvevict.report(net, positions=True)["positions"]


def row(text):
    return torch.tensor([tiny.byte_tokenizer()(text)["input_ids"]])


def side_by_side(texts):
    """ids, and the mask of the padding at their left."""
    longest = max(map(len, texts))
    ids = torch.cat([torch.nn.functional.pad(row(text), (longest - len(text), 0)) for text in texts])
    return ids, torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])


def test_a_text_is_its_tokens(net):
    """Its last occurrence, white space aside; each row may have another text."""
    tok, text = tiny.byte_tokenizer(), f"{ASKED} {TEXT}\n\n{ASKED}\n{MORE}"
    start = text.rindex(ASKED)
    want = slots(net, row(text), (start, start + len(ASKED)), tok)
    assert slots(net, row(text), ASKED, tok) == want != slots(net, row(text))
    assert slots(net, row(text), f" {ASKED.replace(' ', '  ')}\n", tok) == want
    other = f"{TEXT * 2}"[: len(text)]
    both = slots(net, torch.cat([row(text), row(other)]), [ASKED, "the old man by the door"], tok)
    assert [layer[:1] for layer in both] == want


@pytest.mark.parametrize("name", ["ab", "b\u00e4r \u2026", "\U0001f680 ?"])
def test_find(name):
    """Tokens of one byte each, so that a letter may be several."""
    tok, text = tiny.byte_tokenizer(), f"{name}x{name} x " * 30
    start = len(text[: text.rindex(name)].encode())
    assert find(tok, tok(text)["input_ids"], name) == (start, start + len(name.encode()))
    assert find(tok, tok(text)["input_ids"], "nowhere") is None
    assert find(tok, [], name) is None


@pytest.mark.parametrize("turn, found", [
    (f"{TEXT}\n\n{ASKED}", ASKED), (f"{TEXT}\n\n{ASKED}\n\n{MORE}", ASKED), (f"{ASKED}\n\n{TEXT * 9}", ASKED),
    (f"{TEXT}\n\nI could not find it. {ASKED} {MORE}", ASKED),
    (f"{TEXT * 9}He said: \u201cWho is it?\u201d and left.\n\nName the man.", "Name the man."),
    (f"{TEXT * 9}Who is it? Nobody knew.\n\nName the man.", "Name the man."),
    (f"Some pages.\n\n{TEXT * 9}Who is it? Nobody knew.\n\nName the man.", ""),
    (f"{ASKED}\n\n{TEXT * 9} Who is it? {TEXT}\n\n{MORE}", ASKED), (f"{TEXT * 9} {ASKED} {MORE}", ASKED),
    (f"{TEXT * 9}\n\nName the man.\n\nAnswer:", "Name the man."), ("Name the man.\nAnswer :", "Name the man."),
    ("Name the man.", "Name the man."), ("Where did Mr. Smith go? Why?", "Where did Mr. Smith go? Why?"),
    (f"{TEXT * 9}\n\nTwo things. {ASKED} And then: Who is it? {MORE}", f"{ASKED} And then: Who is it?"),
    (f"{TEXT * 9}\n\nWho is it? It is a long story that nobody tells. {ASKED} {MORE}", ASKED),
    ("Read it with this in mind: When is the lantern lit?", ASKED), (f"Question: {ASKED}", ASKED),
    ("Which is right: the first or the second?", "Which is right: the first or the second?"),
    ("Where did Mr. Smith go?", "Where did Mr. Smith go?"),
    ("\u706f\u306f\u4f55\u6642\u306b\uff1f", "\u706f\u306f\u4f55\u6642\u306b\uff1f"), ("", ""),
])  # fmt: skip
def test_the_question_of_a_turn(turn, found):
    assert question_of(turn) == found


# The text is a paragraph, or several; the last is not the turn's question but for its marks.
@pytest.mark.parametrize("before, asked, after", [
    ("Ο λύχνος ανάβει στις εννέα· έτσι λέει. ", "Πότε ανάβει ο λύχνος;", " Απάντησε σύντομα."),
    ("Ο λύχνος ανάβει στις εννέα. ", "Πότε ανάβει ο λύχνος του Jared Allen;", " Απάντησε σύντομα."),
    ("Ο λύχνος ανάβει στις εννέα. ", "Πότε ανάβει ο λύχνος\u037e", " Short, please."),
    ("तीन घर हैं। ", "दीपक कब जलाया जाता है?", " एक वाक्य में उत्तर दें।"),
    ("چراغ نو بجے جلتا ہے۔ ", "چراغ کب جلتا ہے؟", " مختصر جواب دیں۔"),
    ("الميناء يفتح في السابعة. ", "متى يضاء المصباح؟", " أجب بجملة واحدة."),
    ("灯在九点点亮。", "灯什么时候点亮？", "请用一句话回答。"),
    ("ท่าเรือเปิดเจ็ดโมง\n", "ตะเกียงจุดกี่โมง", "\nตอบสั้นๆ ในประโยคเดียว"),
    ("ทุกวันใด ๆ ก็ตาม\n", "ตะเกียงจุดเมื่อไร", ""),
    ("", "Wer ging mit Heinrich III. nach Oslo?", " Antworte kurz."),
    ("", "Topu 3. ve 9. kez kim tuttu?", " Kısaca yanıtla."),
    ("It is I. ", "What did J. R. Smith of the U.S. navy say?", " Be brief."),
    ("It was lit in 1843. ", "What was lit?", " Be brief."),
])  # fmt: skip
def test_the_question_in_other_scripts(before, asked, after):
    assert question_of(f"{TEXT * 9}\n\n{TEXT}\n\n{before}{asked}{after}") == asked
    assert question_of(f"{before}{asked}{after}\n\n{TEXT * 9}") == asked


@pytest.mark.parametrize(
    "line", ["x = 3; y = 4;", "f(\u03b1, \u03b2);", "It rained; he left;", "ก็" * 90 + "ใคร" + "ก็" * 90]
)
def test_what_does_not_ask(line):
    assert question_of(f"Some pages.\n\n{TEXT * 9}\n\n{line}") == ""


REFERS = "Those were the pages. What is your answer?"


@pytest.mark.parametrize("turn, asks, before", [
    (f"{ASKED}\n\n{TEXT * 9}", [ASKED], ASKED),
    (f"{ASKED}\n\n{TEXT * 9}\n\n{REFERS}", [ASKED, "What is your answer?"], ASKED),
    (f"{ASKED}\n\n{TEXT * 9}\n\nOnce more: {ASKED}", [ASKED], ASKED),
    (f"Can you help me with it?\n\n{TEXT * 9}\n\n{ASKED} {MORE}", [ASKED], None),
    (f"Why?\n\n{TEXT * 9}\n\nWho is it?", ["Who is it?"], None),
    (f"Can you help me with it?\n\n{ASKED} {TEXT * 9}\n\nNow then. {ASKED}", [ASKED], ASKED),
    (f"It is this. {TEXT * 9}\n\nIs it?", ["Is it?"], None),
    (f"{TEXT * 4}{ASKED} {TEXT * 5}\n\n{ASKED} {MORE}", [ASKED], ASKED),
    (f"{TEXT * 9}\n\n{ASKED}", [ASKED], None), (ASKED, [ASKED], ASKED),
])  # fmt: skip
def test_the_question_before_the_text(turn, asks, before):
    tok = tiny.byte_tokenizer()
    ids = tok(turn)["input_ids"]
    spans, opens = LastTurn(tok).found(ids)
    assert [tok.decode(ids[start:stop]) for start, stop in spans] == asks
    assert before is None if opens is None else opens[:2] == (turn.index(before), turn.index(before) + len(before))
    assert opens is None or opens[2] == (turn.count(before) == 1)


@pytest.mark.parametrize("kernel", [1, 5])
def test_layers_after_tsp_read_a_question_before_the_text(net, kernel):
    for seed in range(4):
        ids = torch.randint(200, (1, 200), generator=torch.Generator().manual_seed(seed))
        kept = slots(net, ids, (5, 10), budget=60, chunk_size=50, tsp=1, tsp_len=24, kernel=kernel)
        assert all({*range(5, 10)} <= {*head} for layer in kept for rows in layer for head in rows)


def test_what_refers_to_a_question_before_the_text(net):
    """It is kept like the request at the end, and both observe."""
    tok, ids = tiny.byte_tokenizer(), row(f"{ASKED}\n\n{TEXT * 5}\n\n{REFERS}")
    for options in (dict(chunk_size=128), dict(chunk_size=None), dict(chunk_size=128, heads="flat")):
        kept = slots(net, ids, patched=tok, budget=120, **options)
        assert not holes(kept, ids.shape[1] - len(REFERS), ids.shape[1])
        assert all({*range(len(ASKED))} <= {*head} for layer in kept for rows in layer for head in rows)


def test_a_tokenizer_finds_it(net, tokenizer):
    """In the last user's turn, as if named; an answer's first words after it, near the end, observe, too."""

    def prompt(text, opening=""):
        chat = [dict(role="user", content=text)]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) if chats else text
        return torch.tensor([tokenizer(text + opening, add_special_tokens=False)["input_ids"]])

    chats = tokenizer.chat_template is not None
    ids = prompt(f"{TEXT}\n\n{ASKED}\n\n{MORE}")
    assert slots(net, ids, patched=tokenizer) == slots(net, ids, ASKED, tokenizer) != slots(net, ids)
    last, inside = f"{TEXT}\n\n{ASKED}", dict(probe=48)
    at_end = slots(net, prompt(last), patched=tokenizer, **inside)
    assert at_end == slots(net, prompt(last), ASKED, tokenizer, **inside) != slots(net, prompt(last), **inside)
    for ids_of, options in ((prompt(last, " It is lit at"), inside), (prompt(f"{TEXT * 5} {MORE}"), {})):
        assert slots(net, ids_of, patched=tokenizer, **options) == slots(net, ids_of, **options)
    both = torch.cat([ids, prompt(TEXT * 9)[:, : ids.shape[1]]])
    assert [layer[:1] for layer in slots(net, both, patched=tokenizer)] == slots(net, ids, ASKED, tokenizer)


def test_the_policys_rows_where_a_question_would_be_appended(net):
    """A question within the last tokens, of a prompt that is hardly longer, or where the last rows are measured."""
    tok = tiny.byte_tokenizer()
    for text, options in ((TEXT[:60], {}), (TEXT, dict(diagnose=True))):
        ids, inside = row(f"{text}\n\n{ASKED}"), dict(probe=32) | options
        assert slots(net, ids, patched=tok, **inside) == slots(net, ids, **inside)


def test_a_question_after_what_was_read_before(net, monkeypatch):
    """The turn is little more than a question, and the text before it is in the cache: it ends the whole."""
    seen, asked = [], Probe.asked
    monkeypatch.setattr(Probe, "asked", lambda self, questions: seen.extend(questions) or asked(self, questions))
    tok, turn = tiny.byte_tokenizer(), f" {ASKED} {MORE}"
    with kvevict.evicting(net, "take+edie", budget=60, chunk_size=128, probe=8, kernel=5, tokenizer=tok):
        cache = net(row(TEXT), use_cache=True, logits_to_keep=1).past_key_values
        net(row(turn), past_key_values=cache, use_cache=True, logits_to_keep=1)
        net(row(turn), use_cache=True, logits_to_keep=1)
    first, *others = seen
    assert first.near and first.spans[0][0] == 1 and not any(each.near for each in others)


def test_what_the_turn_asks_may_be_known(net, tokenizer):
    """As `kvevict generate` knows it: nothing is looked for in the text."""
    text = f"{TEXT * 4} Nobody knows it. Who is it? {TEXT}"
    for question in (f"{ASKED}\n{MORE}", f"Name the hour. {MORE}"):
        prompt = encode(tokenizer, text, question)
        start, stop = LastTurn(tokenizer, question).found(prompt.context + prompt.question)[0][0]
        asked = ASKED if "?" in question else question
        assert tokenizer.decode((prompt.context + prompt.question)[start:stop]) == asked


def test_it_is_looked_for_in_the_last_turn():
    tok = tiny.chat_tokenizer()
    tok.chat_template = TURNS
    said = [("user", f"{TEXT} Who is it?"), ("assistant", "Nobody? No."), ("user", f"{ASKED} {MORE}")]
    text = tok.apply_chat_template([dict(role=r, content=c) for r, c in said], tokenize=False)
    ids = tok(text, add_special_tokens=False)["input_ids"]
    (((start, stop),), _) = LastTurn(tok).found(ids)
    assert tok.decode(ids[start:stop]) == ASKED
    assert LastTurn(tok).found(tok(ASKED)["input_ids"]) == ((), None)  # not in the template


PAGE = "The baker counted the boats. " * 9
RESULTS = {  # of one call or of two
    "with a question": [f"{PAGE}Who owns the boats? The baker. {PAGE}"],
    "a page": [f"{PAGE}\n\n{PAGE * 4}\n\nThe end."],
    "short": ["ok"],
    "JSON": ['{"status": "ok", "is it?": ["Who is it?", null]}'],
    "two": ["Who is it?", f"Nobody. Why?\n\n{PAGE}"],
    "an echo": [json.dumps(dict(query=ASKED, hits=0))],
    "one like a turn": ["user: Who is it?\n\nuser\nWho is it?"],
}
SCHEMA = dict(type="object", properties=dict(url=dict(type="string", description="Which page?")))
SCHEMAS = [dict(type="function", function=dict(name="fetch", description="Why fetch?", parameters=SCHEMA))]
WITH_TOOLS = {name: getattr(templates, name) for name in ("QWEN", "NAMED", "HERMES", "LLAMA", "MISTRAL")}


def agent(template, said, results, **more):
    """(tokenizer, ids) of a chat whose user says something, upon which a tool is called until there are no results."""
    tok = tiny.byte_tokenizer()
    tok.chat_template = template
    if template == templates.MISTRAL:
        tok.add_special_tokens(dict(additional_special_tokens=["<s>", "</s>"]))
    messages = list(said) if isinstance(said, list) else [dict(role="user", content=said)]
    written = json.dumps if template == templates.NAMED else dict
    for at, result in enumerate(results):
        function = dict(name="fetch", arguments=written({"url": "u", "for": ASKED}))
        calls = [dict(id=f"call{at:05}", type="function", function=function)]
        if at % 2 == 0:  # two results answer one turn
            messages.append(dict(role="assistant", content="Shall I look?", tool_calls=calls))
        messages.append(dict(role="tool", name="fetch", tool_call_id=f"call{at:05}", content=result))
    text = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more)
    return tok, tok(text, add_special_tokens=False)["input_ids"]


def asking(tok, ids, request=""):
    """The texts that observe, and where the first begins."""
    spans, _ = LastTurn(tok, request).found(ids)
    return [tok.decode(ids[start:stop]) for start, stop in spans], spans[0][0] if spans else None


@pytest.mark.parametrize("results", RESULTS)
@pytest.mark.parametrize("template", WITH_TOOLS)
def test_a_tools_result_does_not_ask(template, results):
    """What the user said does, wherever the words come again; the server, which knows what the user said, finds the
    same tokens, and so it does in a completion's prompt."""
    earlier = [dict(role="user", content="Who is it?"), dict(role="assistant", content="Who knows?")]
    for asked in (ASKED, "Name the hour."):
        said = f"{'Read the page.' if asked == ASKED else ''} {asked}".strip()
        turns = [*earlier, dict(role="user", content=said)]
        for chat, more in ((said, {}), (said, dict(tools=SCHEMAS * 3)), (turns, dict(tools=SCHEMAS))):
            tok, ids = agent(WITH_TOOLS[template], chat, RESULTS[results], **more)
            before = tok.decode(ids).partition(said)[0] + said.partition(asked)[0]
            first = len(tok(before, add_special_tokens=False)["input_ids"])
            assert asking(tok, ids) == asking(tok, ids, said) == asking(tok, ids, tok.decode(ids)) == ([asked], first)


def test_results_alone_do_not_ask():
    """As in a turn after a cache that has the user's."""
    tok, ids = agent(templates.QWEN, ASKED, RESULTS["with a question"])
    cut = len(tok(tok.decode(ids).partition("\n</tool_call>")[0], add_special_tokens=False)["input_ids"])
    assert asking(tok, ids[cut:]) == ([], None)
    assert asking(tok, ids)[0] == [ASKED]


def test_a_template_without_tools():
    """It refuses their results, and its turns are found as before."""
    tok, ids = agent(templates.GEMMA, f"{TEXT} {ASKED}", [])
    assert asking(tok, ids)[0] == [ASKED] and not Turns.of(tok).result


@pytest.mark.parametrize("results", ["with a question", "a page", "JSON"])
def test_the_users_question_observes_a_tools_result(net, results):
    """With the slots that it keeps where it is named."""
    tok, ids = agent(templates.QWEN, f"Read the page. {ASKED}", [TEXT * 2 + RESULTS[results][0]])
    _, start = asking(tok, ids)
    ids = torch.tensor([ids])
    named = slots(net, ids, (start, start + len(ASKED)), tok, budget=100)
    assert slots(net, ids, patched=tok, budget=100) == named != slots(net, ids, budget=100)


def test_other_rows_are_left_alone(net):
    tok, ids = tiny.byte_tokenizer(), row(f"{TEXT}\n\n{ASKED}\n\n{MORE}")
    for policy, options in (("snapkv", dict(window=4)), ("take", dict(probe=8, append=False)), ("streaming", {}),
                            ("take", dict(probe=(3, 9)))):  # fmt: skip
        held = []
        for patched in (None, tok):
            with kvevict.evicting(net, policy, budget=40, chunk_size=64, tokenizer=patched, **options):
                net(ids, use_cache=True)
                held.append(kvevict.report(net, positions=True)["positions"])
        assert held[0] == held[1]


def test_it_stays_with_the_patch(net):
    """After a policy for a while, and in a pickled copy."""
    tok, ids = tiny.byte_tokenizer(), row(f"{TEXT}\n\n{ASKED}\n\n{MORE}")
    want = slots(net, ids, ASKED, tok)
    try:
        kvevict.patch(net, "take+edie", budget=60, chunk_size=128, probe=8, kernel=5, tokenizer=tok)
        with kvevict.evicting(net, "snapkv", budget=40):
            net(ids, use_cache=True, logits_to_keep=1)
        for each in (net, pickle.loads(pickle.dumps(net))):
            with torch.no_grad():
                each(ids, use_cache=True)
            assert kvevict.report(each, positions=True)["positions"] == want
    finally:
        kvevict.unpatch(net)


@pytest.mark.parametrize("question, error, message", [
    ("", ValueError, "empty"), (" \n", ValueError, "empty"), (ASKED, TypeError, "tokenizer is missing"),
    (7, TypeError, "a text, "), ((1, 2, 3), TypeError, "a text, "), ((1.0, 2), TypeError, "a text, "),
    ([(0, 1), None], TypeError, "a text, "), ((3, 3), ValueError, "not a span"), ((-3, 2), ValueError, "not a span"),
])  # fmt: skip
def test_what_is_not_a_question(question, error, message):
    with pytest.raises(error, match=message), kvevict.observing(question):
        raise AssertionError


@pytest.mark.parametrize("question, options, message", [
    ((0, 400), {}, "reaches outside a prompt of 344 tokens"), ((-345, 0), {}, "reaches outside"),
    ([(0, 4)] * 3, {}, "3 questions for a batch of 2 rows"), ([], {}, "0 questions for a batch of 2 rows"),
    ("Nobody asked this?", {}, "does not have the question 'Nobody asked this.'"),
    ((0, 128), {}, "of 128 tokens does not fit a chunk of 128"),
    ([(0, 4), (0, 5)], dict(diagnose=True), "spans of one length"),
    ([(0, 4), (0, 5)], dict(layers="tada", heads="flat"), "spans of one length"),
    ((0, 4), dict(append=False), "rows='probe'"), ((0, 4), dict(rows="window", window=8), "rows='probe'"),
])  # fmt: skip
def test_refused_before_the_cache_changes(net, question, options, message):
    ids, cache = row(TEXT).expand(2, -1), DynamicCache()
    chosen = dict(budget=60, chunk_size=128) | (dict(probe=8) if "rows" not in options else {}) | options
    with kvevict.evicting(net, "take+edie", **chosen), kvevict.observing(question, tiny.byte_tokenizer()):
        with pytest.raises(ValueError, match=message):
            net(ids, past_key_values=cache, use_cache=True)
        assert cache.get_seq_length() == 0
        with pytest.raises(ValueError, match=message if "does" in message or "rows=" in message else "."):
            net(ids, past_key_values=cache, use_cache=True)
    with kvevict.evicting(net, "take+edie", **chosen), torch.no_grad():  # nothing is left of it
        net(ids, past_key_values=cache, use_cache=True)


def test_a_text_needs_ids(net):
    embeds, asked = net.get_input_embeddings()(row(TEXT)), kvevict.observing(ASKED, tiny.byte_tokenizer())
    with kvevict.evicting(net, "take+edie", budget=60, probe=8), asked, pytest.raises(ValueError, match="input_ids"):
        net(inputs_embeds=embeds, use_cache=True)


def test_the_tokenizer_of_the_models_folder(tmp_path):
    """Found where none is given, unless it is False. Without a file, or with one that does not load, there is none."""
    tok, ids, options = tiny.byte_tokenizer(), row(f"{TEXT}\n\n{ASKED}\n\n{MORE}"), dict(budget=60, chunk_size=128)
    folders = {name: tiny.save(tmp_path / name, seed=1)[0] for name in ("own", "broken", "none")}
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for path in (tmp_path / "none").glob("tokenizer*"):
        path.unlink()
    nets = {name: AutoModelForCausalLM.from_pretrained(folder).eval() for name, folder in folders.items()}
    plain, known = (slots(nets["none"], ids, patched=each) for each in (False, tok))
    found = {name: slots(each, ids) for name, each in nets.items()}
    assert found == dict(own=known, broken=plain, none=plain) and known != plain
    for patched in nets["own"], types.SimpleNamespace(model=nets["none"], tokenizer=tok):  # a pipeline
        kvevict.patch(patched, "take+edie", probe=8, kernel=5, **options)
        base_model(patched)(ids)
        assert kvevict.report(patched, positions=True)["positions"] == known


class Processor:
    """As Transformers' are: its first argument is a picture."""

    tokenizer = tiny.byte_tokenizer()

    def __call__(self, images=None, text=None, **options):
        raise OSError(f"no picture: {images}")


@pytest.mark.parametrize("given, said", [("name", "got str"), (Processor(), r"got Processor.*processor\.tokenizer")])
def test_a_tokenizer_is_one(net, given, said):
    def observing(given):
        with kvevict.observing("a text", given):
            pass

    for call in (
        functools.partial(kvevict.patch, net, "take+edie", budget=60, tokenizer=given),
        functools.partial(kvevict.read, net, given, "a text", budget=60),
        functools.partial(kvevict.answer, net, given, None, ["a question"]), functools.partial(observing, given),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"tokenizer must be .*{said}"):
            call()


class Digits:
    """A tokenizer with so many digits of a number per token."""

    def __init__(self, digits):
        self.digits = digits

    def __call__(self, text, **options):
        assert text.isdigit()
        return dict(input_ids=list(range(-(-len(text) // self.digits))))

    def decode(self, ids, **options):
        return ""


@pytest.mark.parametrize("digits, kernel", [(1, 31), (3, 11), (31, 1)])
def test_pooling_over_digits(net, digits, kernel):
    ids, options = torch.randint(3, 259, (1, 150)), dict(budget=60, chunk_size=64, probe=8)

    def kept(policy, tokenizer=None, **more):
        kvevict.patch(net, policy, tokenizer=tokenizer, **options, **more)
        net(ids)
        found = kvevict.report(net, positions=True)["positions"]
        kvevict.unpatch(net)
        return found

    want = kept("take+edie", kernel=kernel)
    assert kept("take+edie", Digits(digits)) == want
    assert kept("take+edie", Digits(digits), kernel=31) == kept("take+edie")
    assert (kernel == 31) == (kept("take+edie") == want)
    with pytest.raises(TypeError, match="kernel"):
        kvevict.patch(net, "take+edie", budget=60, kernel="words")


def test_the_default():
    """The README's recommendation is the default policy."""
    for function in (kvevict.patch, kvevict.evicting):
        assert inspect.signature(function).parameters["policy"].default == "take+edie"
    for command in ("bench", "demo", "diagnose", "generate", "inspect", "plan", "serve"):
        with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as printed:
            COMMANDS.find(command)(argparse.ArgumentParser(), ["--help"])
        assert "default take+edie" in " ".join(printed.getvalue().split())
