"""`kvevict inspect`: the page has the report's slots and the prompt's text."""

import json
import random
import re

import pytest
import tokenizers
import torch
from kept_page import Scripts, data_of, opened
from tiny import byte_tokenizer, save
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import kvevict
from kvevict.asking.prompts import pieces
from kvevict.cli import main
from kvevict.lab.analysis.page import gaps, page, picture, places
from kvevict.lab.commands.inspect import told_of

TEXT = "Grüße, 日本語 🙂👩‍🚀! </script><script>alert(1)</script> a &amp; b\n\n\u2028 __DATA__ the end\t."


def word_tokenizer(words):
    """One token per word; as in SentencePiece, a word includes the space before it, except at the text's start."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"▁{w}": i for i, w in enumerate(words)}, "▁x"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    inner.decoder = tokenizers.decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize("seed", range(20))
def test_gaps_open_again(seed):
    rng = random.Random(seed)
    positions = sorted(rng.sample(range(200), rng.randrange(1, 200)))
    assert opened(gaps(positions)) == positions


def test_split_characters_are_one_piece():
    ids = byte_tokenizer()(TEXT)["input_ids"]
    assert pieces(byte_tokenizer(), ids) == [[char, len(char.encode())] for char in TEXT]


def test_half_a_character_at_the_end():
    ids = byte_tokenizer()("a日本")["input_ids"][:-1]
    assert [count for _, count in pieces(byte_tokenizer(), ids)] == [1, 3, 2]


def test_bytes_that_are_no_text():
    ids = [byte_tokenizer().convert_tokens_to_ids(c) for c in "aÿ" + 40 * "ł" + "b"]
    made = pieces(byte_tokenizer(), ids)
    assert sum(count for _, count in made) == len(ids)
    assert made[0] == ["a", 1] and made[-1][0].endswith("b")


def test_spaces_that_decoders_strip():
    words = ["x", "now", "is", "the", "time"]
    tokenizer = word_tokenizer(words)
    ids = tokenizer("now is the time now")["input_ids"]
    assert pieces(tokenizer, ids) == [[w, 1] for w in ["now", " is", " the", " time", " now"]]


def test_places_by_hand():
    made = [["a ", 1], ["🙂", 4], ["is 12", 2], ["34", 1], [", 12", 1], ["34", 1]]
    assert places(made, "1234") == [5, 8]
    assert places(made, "🙂") == [1]
    assert places(made, "5") == []


def test_page_is_one_file_and_text_stays_text():
    ids = torch.tensor([byte_tokenizer()(TEXT)["input_ids"]])
    run = dict(name="</script>", answer="<b>", facts=[("a", "<i>")], positions=[None, [[[0, 2], [1]]]])
    html = page(byte_tokenizer(), ids, [run], [("question", "</script>")], "the end")
    found = Scripts(html)
    assert len(found.scripts) == 2
    assert not found.addresses and not re.search(r"https?:|@import|url\(|fetch\(|innerHTML", html)
    data = data_of(html)
    assert "".join(text for text, _ in data["pieces"]) == TEXT
    assert data["runs"][0]["kept"] == [None, [[0, 1, 1, 1], [1, 1]]]
    assert data["facts"] == [["question", "</script>"]]


@pytest.mark.quick(family="llama")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_command(family, tmp_path, capsys):
    """The page's slots are those of the report of the same read; sliding-window layers have none."""
    folder, model = save(tmp_path / "model", family)
    (tmp_path / "text").write_text(TEXT * 3, encoding="utf-8")
    out = tmp_path / "page.html"
    policies = ["--policy", "snapkv:window=4", "--policy", "streaming"]
    argv = ["inspect", "--model", folder, "--file", str(tmp_path / "text"), *policies, "--budget", "12"]
    assert main([*argv, "--chunk-size", "50", "--max-new-tokens", "3", "--out", str(out), "Who?"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    data = data_of(out.read_text(encoding="utf-8"))
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(TEXT * 3 + "\n\nWho?")["input_ids"]])
    assert data["tokens"] == line["tokens"] == ids.shape[1]
    for run, (name, options) in zip(data["runs"], [("snapkv", dict(window=4)), ("streaming", {})], strict=True):
        with kvevict.evicting(model, name, budget=12, chunk_size=50, **options):
            model(ids)
            want = [layer and layer[0] for layer in kvevict.report(model, positions=True)["positions"]]
        assert [heads and [opened(head) for head in heads] for heads in run["kept"]] == want
        assert dict(run["facts"])["kept"] == f"12 of {ids.shape[1]} slots per kv head"
    layers = sum(heads is not None for heads in want)
    slots_bytes = 2 * 4 * 32 * 2 * layers
    full, kept = f"{slots_bytes * ids.shape[1] / 1024:,.0f}", f"{slots_bytes * 12 / 1024:,.0f}"
    assert dict(run["facts"])["KV cache"].startswith(f"{kept} of {full} KiB")


@pytest.mark.parametrize("policy", ["snapkv:window=4,recall_after=0,recall=true", "snapkv:window=4"])
def test_several_questions(policy, tmp_path, capsys):
    """The text is read without them; each is asked of a fork, and chooses its slots anew if the policy recalls."""
    folder, model = save(tmp_path / "model", "llama")
    (tmp_path / "text").write_text(TEXT * 3, encoding="utf-8")
    out, asked = tmp_path / "page.html", ["Who?", "Where\nfrom?"]
    argv = ["inspect", "--model", folder, "--file", str(tmp_path / "text"), "--policy", policy, "--budget", "24"]
    assert main([*argv, "--chunk-size", "50", "--max-new-tokens", "3", "--out", str(out), *asked]) == 0
    told = capsys.readouterr().out
    runs, data = json.loads(told.splitlines()[-1])["runs"], data_of(out.read_text(encoding="utf-8"))
    tok, recall = AutoTokenizer.from_pretrained(folder), policy.endswith("true")
    chooses = dict(recall=True, recall_after=0) if recall else {}
    cache = kvevict.read(model, tok, TEXT * 3, "snapkv", window=4, budget=24, chunk_size=50, **chooses)
    tokens = len(tok(TEXT * 3)["input_ids"])
    assert data["tokens"] == tokens
    names = [f"{asks} ({policy})" for asks in ("no question", "Who?", "Where from?")]
    assert [run["name"] for run in data["runs"]] == [*runs] == names and all(name in told for name in names)
    assert [run.get("before") for run in data["runs"]] == [None, 0, 0]
    answers = [run["answer"].strip() for run in runs.values()]
    assert answers == ["", *kvevict.answer(model, tok, cache, asked, max_new_tokens=3)]
    wants = [kvevict.report(cache, positions=True)]
    with kvevict.evicting(model, "snapkv", window=4, budget=24 if recall else 999, chunk_size=50, **chooses):
        for question in asked:
            fork = cache.fork()
            model(torch.tensor([tok(f"\n\n{question}")["input_ids"]]), past_key_values=fork)
            wants.append(kvevict.report(fork, positions=True))
    for run, want in zip(data["runs"], wants, strict=True):
        slots = [[[at for at in head if at < tokens] for head in layer[0]] for layer in want["positions"]]
        assert [[opened(head) for head in heads] for heads in run["kept"]] == slots
        assert ("archive" in dict(run["facts"])["kept"]) is recall
    first, *others = (run["kept"] for run in data["runs"])
    assert all((kept == first) is not recall for kept in others)


@pytest.mark.parametrize("archive, recalled, want", [
    (0, None, ""), (3072, None, ", beside an archive of 3 KiB in there"),
    (3072, [None, None], ", beside an archive of 3 KiB in there"),
    (3072, [None, [[1, 2]]], ", 50% of them from the archive of 3 KiB in there"),
])  # fmt: skip
def test_what_is_told_of_an_archive(archive, recalled, want):
    seen = dict(kept=[None, [[3, 3]]], seen=[9], archive_bytes=archive, archive_in="there", recalled=recalled)
    assert told_of(seen) == f"3 of 9 slots per kv head{want}"


def test_mistakes(tmp_path, capsys):
    (tmp_path / "text").write_text("a")
    start = ["inspect", "--model", "nowhere", "--file", str(tmp_path / "text"), "Who?"]
    for words, message in [
        ("--policy snapvk", "snapkv"), ("--policy snapkv:windo=4", "window"), ("--budget 0", "budget"),
        ("--max-new-tokens 0", "max-new-tokens"), ("--policy snapkv:recall=nowhere", "recall='nowhere': no file can"),
    ]:  # fmt: skip
        assert main([*start, *words.split()]) == 2
        assert message in capsys.readouterr().err


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [dict(name=name, answer="1", positions=[None, [[[0, 2], [1]]]]) for name in "ab"]
    for name, marks in (("plain", []), ("marked", [2])):
        picture(tmp_path / f"{name}.png", runs, 4, "title", marks)
    plain, marked = ((tmp_path / f"{name}.png").read_bytes() for name in ("plain", "marked"))
    assert plain[:8] == b"\x89PNG\r\n\x1a\n" and plain != marked
