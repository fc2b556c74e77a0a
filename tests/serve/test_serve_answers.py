"""An answer: its text, its end, its tool calls and usage, at every endpoint, whole and as a stream."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving import CHATML, FILLER, TEMPLATE, Client, asks, events, model, qwen, saying, server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.cli.serving.utils import ReasoningText, get_response_template

import kvevict
from kvevict.serve.template import Form, Parser, joined
from kvevict.serve.written import RepeatDetector, Written

QUESTION = f"The code of Naislet is 364735. {FILLER}\n\n{asks('Naislet')}"
PATHS = "/v1/chat/completions", "/v1/completions"
PLAIN = {
    "defaults": {"role": "assistant"}, "start_anchor": "\nAnswer:",
    "fields": {"content": {"close": ["<|end|>"], "content": "text"}},
}  # fmt: skip
TOOL = dict(name="f", parameters=dict(type="object", properties=dict(x=dict(type="string"))))
TOOLS = [dict(type="function", function=TOOL)]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "a.b"}}\n</tool_call>'


def answered(client, path, stream=False, question=QUESTION, system=None, most=12, **body) -> dict:
    """text, reasoning, calls, finish and usage of an answer."""
    if path == PATHS[0]:
        messages = [dict(role="system", content=system)] if system else []
        body |= dict(messages=[*messages, dict(role="user", content=question)], max_tokens=most)
    else:
        opening = f"{system}\n\n" if system else ""
        body |= dict(prompt=f"{opening}{question}\nAnswer:", max_tokens=most)
    if stream:
        body["stream_options"] = dict(include_usage=True)
    response = client.post(path, **body, stream=stream)
    assert response.status_code == 200, response.text
    return of_chunks(events(response)) if stream else of_choice(response.json())


def of_choice(said: dict) -> dict:
    choice = said["choices"][0]
    message = choice.get("message", {})
    calls = [each["function"] for each in message.get("tool_calls", [])]
    text = choice["text"] if "text" in choice else message["content"] or ""
    assert "text" in choice or (message["content"] is None) == (bool(calls) and not text)
    found = dict(text=text, reasoning=message.get("reasoning_content", ""), calls=calls)
    return found | dict(finish=choice["finish_reason"], usage=said["usage"])


def of_chunks(chunks: list) -> dict:
    assert all(len(chunk["choices"]) == (chunk["usage"] is None) for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    deltas = [choice.get("delta", {}) for choice in choices]
    text = "".join(choice.get("text") or delta.get("content") or "" for choice, delta in zip(choices, deltas))
    calls = [each["function"] for delta in deltas for each in delta.get("tool_calls", [])]
    found = dict(text=text, reasoning="".join(d.get("reasoning_content") or "" for d in deltas), calls=calls)
    return found | dict(finish=choices[-1]["finish_reason"], usage=chunks[-1]["usage"])


def alike(client, path, **asked) -> dict:
    """An answer that is the same whole and as a stream."""
    whole, stream = (answered(client, path, stream, **asked) for stream in (False, True))
    assert whole == stream
    return whole


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("template", ["of its own", "Alpaca", "in the question"])
def test_no_prompt_is_in_an_answer(path, template):
    """A model of a type that has a response template, with a chat template that opens answers otherwise."""
    alpaca = TEMPLATE.replace("Answer:", "### Response:\n")
    client = Client(server(of=qwen(), template=alpaca if template == "Alpaca" else TEMPLATE))
    question = f"<|im_start|>assistant\n<think>\n{QUESTION}" if template == "in the question" else QUESTION
    found = alike(client, path, system="Be brief and secret.", question=question)
    assert "secret" not in found["text"] and "Naislet is 364735. The" not in found["text"] and not found["reasoning"]
    if template != "Alpaca":
        assert "The code of Naislet is 364735" in found["text"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["text", "response template", "type"])
@pytest.mark.parametrize("stop, want", [("735", "The code of Naislet is 364"), ([" code", "zz"], "The"), ("T", "")])
def test_no_stop_string_is_in_an_answer(path, kind, stop, want):
    own = dict(of=qwen(), template=CHATML) if kind == "type" else {}
    client = Client(server(**own, response_template=PLAIN if kind == "response template" else None))
    with saying(client.server.manager.model, written(client, " The code of Naislet is 364735. ")):
        found = alike(client, path, stop=stop, most=30)
    assert found["text"].strip() == want and found["finish"] == "stop"


@pytest.mark.parametrize("path", PATHS[:2])
def test_stop_strings_are_of_what_is_written(path):
    """The prompt ends with "Answer:", and the answer begins with " The"."""
    found = alike(Client(server()), path, stop=[": The", "Answer"], most=8)
    assert found["text"].startswith(" The code of Naislet is") and found["finish"] == "length"


def written(client, text, end=True) -> list:
    tokenizer = client.server.tokenizer
    return tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * end


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("type_", ["llama", "qwen2"])
def test_an_end_with_the_last_token_allowed(path, type_):
    """It is "stop", not "length"; without the last token it is "length"."""
    client = Client(server(**(dict(of=qwen(), template=CHATML) if type_ == "qwen2" else {})))
    ids = written(client, " The code is 36.")
    with saying(client.server.manager.model, ids):
        ended, cut = alike(client, path, most=len(ids)), alike(client, path, most=len(ids) - 1)
        assert alike(client, path, most=len(ids) - 1, stop="36.")["finish"] == "stop"
    assert ended["finish"] == "stop" and cut["finish"] == "length"
    assert ended["text"] == cut["text"] and ended["text"].strip() == "The code is 36."
    assert ended["usage"]["completion_tokens"] == len(ids) == cut["usage"]["completion_tokens"] + 1


WITHOUT_END = CALL.removesuffix("\n</tool_call>")
NONE = "<tool_call>\nno\n</tool_call>"
OTHER = CALL.replace("a.b", "c")
ANSWERS = {  # an answer, whether it ends, with tools: text, calls, finish
    "call": (CALL, True, True, "", 1, "tool_calls"),
    "calls": (f"Well.\n{CALL}\n{OTHER}", True, True, "Well.", 2, "tool_calls"),
    "the same call again": (f"Well.\n{CALL}\n{OTHER}\n{CALL}\n{CALL[:30]}", False, True, "Well.", 2, "tool_calls"),
    "cut": (CALL[:30], False, True, CALL[:30], 0, "length"),
    "cut before its end": (WITHOUT_END, False, True, WITHOUT_END, 0, "length"),
    "ended before its end": (WITHOUT_END, True, True, "", 1, "tool_calls"),
    "one and a cut one": (f"{CALL}{CALL[:30]}", False, True, CALL[:30], 1, "length"),
    "not JSON": (f"Well.\n{NONE} So.", True, True, f"Well.\n{NONE} So.", 0, "stop"),
    "a list": ("<tool_call>[1]</tool_call>", True, True, "<tool_call>[1]</tool_call>", 0, "stop"),
    "no name": ('<tool_call>{"x": 1}</tool_call>', True, True, '<tool_call>{"x": 1}</tool_call>', 0, "stop"),
    **{f"arguments: {value[:20]}": (call := CALL.replace('"a.b"', value), True, True, call, 0, "stop") for value in (
        "NaN", "-Infinity", "1e999", "[1e999]", '"\\ud83d"', '{"\\udc00": 1}', "[" * 120 + "]" * 120, "9" * 400,
    )},
    "a name with half a pair": (call := CALL.replace('"f"', '"\\ud83d"'), True, True, call, 0, "stop"),
    **{f"arguments in a text, {said}": (call := CALL.replace('{"x": "a.b"}', json.dumps(said)), True, True, call, 0,
       "stop") for said in ("no", '{"x": NaN}', '{"x": "\\udc00"}')},
    "right arguments in a text": (CALL.replace('{"x": "a.b"}', json.dumps('{"x": "a.b"}')), True, True, "", 1,
       "tool_calls"),
    "a pair": (CALL.replace("a.b", "\\ud83d\\ude00"), True, True, "", 1, "tool_calls"),
    "a mention": ("It writes <tool_call> tags.", True, True, "It writes <tool_call> tags.", 0, "stop"),
    "without tools": (CALL, True, False, CALL, 0, "stop"),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_tool_calls(case):
    """All that is not a call is text, and the answer is not lost."""
    text, ends, tools, want, calls, finish = ANSWERS[case]
    client = Client(server(of=qwen(), template=CHATML))
    ids = written(client, text, ends)
    with saying(qwen(), ids):
        found = alike(client, PATHS[0], most=len(ids), **(dict(tools=TOOLS) if tools else {}))
    assert (found["text"], len(found["calls"])) == (want, calls)
    assert found["finish"] == finish
    assert [json.loads(each["arguments"])["x"] for each in found["calls"]] == (
        ["😀"] if case == "a pair" else ["a.b", "c"]
    )[:calls]
    assert all(each["name"] == "f" for each in found["calls"])


def test_a_tool_call_that_a_stop_string_cuts():
    client = Client(server(of=qwen(), template=CHATML))
    with saying(qwen(), written(client, CALL)):
        for stop in ("b", "."):
            found = alike(client, PATHS[0], most=99, tools=TOOLS, stop=stop)
            assert found["text"] == CALL[: CALL.index(stop)] and found["finish"] == "stop" and not found["calls"]
        none = alike(client, PATHS[0], most=99, tools=TOOLS, tool_choice="none")
        whole = alike(client, PATHS[0], most=99, tools=TOOLS, stop=[])
    assert none["text"] == CALL and not none["calls"]
    assert not whole["text"] and len(whole["calls"]) == 1 and whole["finish"] == "tool_calls"


def test_a_single_call():
    """Without parallel calls an answer ends with the first."""
    client, text = Client(server(of=qwen(), template=CHATML)), f"Well.\n{CALL}\n{OTHER}"
    with saying(qwen(), written(client, text)):
        for parallel in (True, False):
            found = alike(client, PATHS[0], most=200, tools=TOOLS, parallel_tool_calls=parallel)
            assert (found["text"], len(found["calls"])) == ("Well.", 2 if parallel else 1)
            assert found["finish"] == "tool_calls"


@pytest.mark.parametrize("opening", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_reasoning(opening):
    """It is apart from the text and counted, also if the template opens it; the answer has none of the opening."""
    client = Client(server(of=qwen(), template=f"{CHATML}{{{{ {opening!r} }}}}"))
    before = "" if opening else "<think>"
    thought = "" if "</" in opening else f"{before}\nLet me see, é.\n</think>\n\n"
    begin, inside, end, rest = (written(client, each, end=False) for each in (
        before * bool(thought), thought.removeprefix(before).removesuffix("</think>\n\n"), "</think>" * bool(thought),
        "\n\nIt is so." if thought else "It is so.",
    ))  # fmt: skip
    ids = [*begin, *inside, *end, *rest, client.server.tokenizer.eos_token_id]
    with saying(qwen(), ids):
        found, twice = alike(client, PATHS[0], most=len(ids)), answered(client, PATHS[0], most=len(ids), n=2)
        cut = alike(client, PATHS[0], most=len(begin) + 2)
    assert found["text"] == "It is so." and found["reasoning"] == ("Let me see, é." if thought else "")
    told = [each["usage"]["completion_tokens_details"]["reasoning_tokens"] for each in (found, twice, cut)]
    count = len(inside) + max(len(end) - 1, 0)  # a delimiter of several tokens is known by its last
    assert told == [count, 2 * count, 2 * bool(thought)] and cut["finish"] == "length"


def of_llama_2():
    """A tokenizer of Llama 2's kind: its decoder strips a text's first space, and bytes are tokens."""
    words = ["<unk>", *(f"<0x{at:02X}>" for at in range(256)), "▁The", "▁", "▁sat", ".", "▁is"]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    spaces, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<unk>")


def of_bytes():
    return AutoTokenizer.from_pretrained(kvevict.small_llama())


PIECES = [b" The", b" ", b"\xf0", b"\x9f", b"\x9a", b"\x80", b"\xc3", b"\xa9", b" sat", b"."]  # of " The 🚀é sat."
VOCABULARIES = [
    (of_llama_2, "▁The ▁ <0xF0> <0x9F> <0x9A> <0x80> <0xC3> <0xA9> ▁sat ."), (of_bytes, "ĠThe Ġ ð Ł ļ Ģ Ã © Ġsat ."),
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("kind, tokens", VOCABULARIES)
def test_the_tokens_of_an_answer(path, kind, tokens):
    """Together they are its text, which has its first space after a prompt; the same whole and as a stream."""
    tokenizer, chats = kind(), path == PATHS[0]
    body = dict(messages=[dict(role="user", content="The cat")], logprobs=True, top_logprobs=3) if chats else None
    body = (body or dict(prompt="The cat", logprobs=3)) | dict(max_tokens=len(PIECES))
    client, pieces = Client(server(tokenizer=tokenizer)), list(PIECES)
    if chats and kind is of_llama_2:
        pieces[0] = b"The"  # a turn's beginning
    text = b"".join(pieces).decode()
    with saying(model(), tokenizer.convert_tokens_to_ids(tokens.split())):
        whole = client.post(path, **body).json()["choices"][0]
        parts = [event["choices"][0] for event in events(client.post(path, **body, stream=True))]
    found, streamed = whole["logprobs"], [part["logprobs"] for part in parts if part["logprobs"]]
    for name in ("content",) if chats else found:
        assert found[name] == [each for part in streamed for each in part[name]]
    if chats:
        assert [bytes(each["bytes"]) for each in found["content"]] == pieces
        others = [[other["bytes"] for other in each["top_logprobs"]] for each in found["content"]]
        said = whole["message"]["content"], "".join(part["delta"].get("content", "") for part in parts)
    else:
        said = whole["text"], "".join(part["text"] for part in parts)
        assert found["text_offset"] == [0, 4, *[5] * 4, 6, 6, 7, 11]
        assert found["tokens"] == [each.decode(errors="backslashreplace") for each in pieces]
        others = [[*each] for each in found["top_logprobs"]]
    assert said == (text, text) and all(len(each) == 3 and None not in each for each in others)


@pytest.mark.parametrize("opening, want", [("", "The"), ("▁is", " The"), ("▁is <0xE2>", " The"), ("▁is ▁", " The")])
def test_an_answer_goes_on_with_its_prompt(opening, want):
    """A space that a decoder strips at the beginning of a text is stripped there alone."""
    tokenizer = of_llama_2()
    before, ids = (tokenizer.convert_tokens_to_ids(each.split()) for each in (opening, "▁The ▁sat"))
    answer = Written(Form(tokenizer, None), None, (), (), 2, before=before)
    parts = [part for token in ids for part in answer.put(token)] + answer.close()
    assert "".join(parts) == f"{want} sat"


MISTRAL = (  # what Mistral's templates ask of ids
    "{% for m in messages %}{% for id in (m.tool_calls or []) | map(attribute='id') | list + [m.tool_call_id] %}"
    "{% if id and id | length != 9 %}{{ raise_exception('an id needs 9 letters') }}{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("stream", [False, True])
def test_ids_of_calls(stream):
    """Nine letters and digits, each another; the turn that gives them back is taken."""
    client = Client(server(of=qwen(), template=MISTRAL + CHATML))
    user, function = dict(role="user", content="?"), dict(name="f", arguments="{}")
    given = dict(messages=[user], tools=TOOLS, n=2)
    with saying(qwen(), written(client, CALL + OTHER)):
        made = client.post(PATHS[0], **given, stream=stream)
    ids = [*dict.fromkeys(re.findall(r'"id": ?"([^"]+)", ?"type": ?"function"', made.text))]
    assert len(ids) == 4 and all(re.fullmatch("[a-zA-Z0-9]{9}", each) for each in ids)
    given["messages"] += [
        dict(role="assistant", tool_calls=[dict(id=i, type="function", function=function) for i in ids])
    ]
    given["messages"] += [dict(role="tool", tool_call_id=each, content="3") for each in ids]
    again = client.post(PATHS[0], **given, max_tokens=2)
    assert again.status_code == 200, again.text


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("seed", range(3))
def test_answers_of_random_tokens(tools, seed):
    """Whatever is written, at whatever end: texts hold no stop string, and nothing of it is lost."""
    tokenizer = AutoTokenizer.from_pretrained(kvevict.small_llama())
    tokenizer.chat_template = CHATML
    form, draw = Form(tokenizer, qwen()), random.Random(seed)
    pieces = ["<tool_call>", "</tool_call>", "<think>", "</think>", CALL, "\n", "é", "👩", "x"]
    prompt = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    for _ in range(60):
        text = "".join(draw.choices(pieces, k=draw.randrange(12)))
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ids[: draw.randrange(len(ids) + 1)]
        for parser in (None, form.parser(prompt, tools)):
            answer, parts = Written(form, parser, ("xx", "é"), (), len(ids)), []
            for token in ids:
                parts += answer.put(token)
                if answer.ended:
                    break
            parts = joined(parts + answer.close())
            whole = tokenizer.decode(ids).rstrip("\ufffd")
            before = whole[: min([whole.find(stop) for stop in ("xx", "é") if stop in whole], default=len(whole))]
            said = "".join(part for part in parts if isinstance(part, str))
            assert "xx" not in said.replace("x\nx", "") and "é" not in said
            if parser is None:
                assert said == before
            else:
                letters = "".join(f"{part}" if isinstance(part, str) else part.arguments for part in parts)
                assert letters.count("👩") == before.count("👩") and bool(answer.calls) <= bool(tools)


HELD = "<think>\n\n</think>\n\n"  # of a prompt, and its end may begin a delimiter
XML = "<tool_call>\n<function=f>\n<parameter=x>\na.b\n</parameter>\n</function>\n</tool_call>"
LISTED = {
    "defaults": {}, "start_anchor": "[/INST]",
    "fields": {
        "content": {"close": "</s>"}, "number": {"open": ["<n>", "<nn>"], "close": "</n>", "content": "int"},
        "tool_calls": {"open": "[TOOL_CALLS]", "content": "python-call-list", "transform_each": True,
                       "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}}},
    },
}  # fmt: skip
WRITTEN = [  # template or type, prompt, answer: text, reasoning, calls
    ("qwen2", "<|im_start|>assistant\n", f"So.\n{CALL}\n{CALL}<|im_end|>", "So.", "", 2),
    ("qwen3_5", f"<|im_start|>assistant\n{HELD}", f"{XML}\n{XML}<|im_end|>\n", "", "", 2),
    ("qwen3_5", f"<|im_start|>assistant\n{HELD}", XML[:30], XML[:30], "", 0),
    ("qwen3_5", "<|im_start|>assistant\n<think>\n", f"Hm.\n</think>\n\nSo. {XML}", "So.", "Hm.", 1),
    ("gemma4", "<|turn>model\n", '<|channel>thought\nHm.<channel|><|tool_call>call:f{x:<|"|>a.b<|"|>}<tool_call|>',
     "", "Hm.", 1),
    ("gemma4", "<|turn>model\n", BAD := "<|tool_call>call:f{x:<tool_call|> No.", BAD, "", 0),
    (LISTED, "[INST]x[/INST]", "<n>3</n>So.[TOOL_CALLS][f(x='a.b'), f(x='a.b')]", "So.", "", 2),
    (LISTED, "[INST]x[/INST] [TOOL_", "CALLS][f(x='a.b')]", "", "", 1),
    (LISTED, "[INST]x[/INST] [TOOL_", "CALLS][f(x]", "CALLS][f(x]", "", 0),
    (LISTED, "[INST]x[/INST][TOOL_CALLS][f(", "x]", "x]", "", 0),
    (LISTED, "[INST]x", "<nn>x</n>So.[TOOL_CALLS]", "<nn>x</n>So.[TOOL_CALLS]", "", 0),
]  # fmt: skip


@pytest.mark.parametrize("template, prompt, answer, text, reasoning, calls", WRITTEN)
def test_the_response_templates(template, prompt, answer, text, reasoning, calls):
    """Of types that Transformers knows, and others: pieces of any length give the same parts, none of the prompt."""
    if isinstance(template, str):
        template = get_response_template(None, SimpleNamespace(config=SimpleNamespace(model_type=template)))
    for size in range(1, len(answer) + 1):
        parser = Parser(template, prompt, TOOLS)
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        parts = joined(
            [part for piece in pieces for part in parser.parts(piece)] + parser.close("", cut=answer == XML[:30])
        )
        told = ["".join(part for part in parts if type(part) is kind) for kind in (str, ReasoningText)]
        called = [part for part in parts if not isinstance(part, str)]
        assert (told, len(called)) == ([text, reasoning], calls), size
        assert all((each.name, json.loads(each.arguments)) == ("f", {"x": "a.b"}) for each in called)


@pytest.mark.parametrize("opening", ["", "<think>"])
@pytest.mark.parametrize("rest", ["</think>\n\nSo.<|im_end|>", "<|im_end|>", ""])
def test_delimiters_of_reasoning(opening, rest):
    """Those that are one token, and the answer's end, are not counted."""
    tokenizer = AutoTokenizer.from_pretrained(kvevict.small_llama())
    tokenizer.chat_template = CHATML
    tokenizer.add_special_tokens(dict(additional_special_tokens=["<think>", "</think>", "<|im_end|>"]))
    form, end = Form(tokenizer, qwen()), tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt, thought, before, after = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (
        f"<|im_start|>assistant\n{opening}", "\nHm, é.\n", "" if opening else "<think>", rest))  # fmt: skip
    answer = Written(form, form.parser(prompt, None), (), {end}, 99)
    for token in before + thought + after:
        answer.put(token)
    assert answer.reasoning == len(thought)


def test_tokens_that_are_not_text():
    """Special tokens that the response template does not look for are not written."""
    tokenizer = AutoTokenizer.from_pretrained(kvevict.small_llama())
    tokenizer.chat_template = CHATML
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|pad|>"]})
    form = Form(tokenizer, qwen())
    silent = form.silent(form.parser([1], None))
    known = {each: tokenizer.convert_tokens_to_ids(each) for each in ("<|im_end|>", "<|pad|>")}
    assert known["<|pad|>"] in silent and known["<|im_end|>"] not in silent
    assert set(known.values()) <= form.silent(None)


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_that_repeats_itself(path):
    """It ends with four copies of a piece, of 64 tokens or more, where the request does not give `max_tokens`."""
    client, ids = Client(server()), AutoTokenizer.from_pretrained(kvevict.small_llama())("one two three")["input_ids"]
    for piece, count in ((ids[-1:], 64), (ids[-3:], 64), (list(range(300, 330)), 120)):
        with saying(model(), [5, 6, 7, *piece * 200]):
            for stream in (False, True):
                found = answered(client, path, stream, most=None)
                assert (found["usage"]["completion_tokens"], found["finish"]) == (3 + count, "length")
            assert answered(client, path, most=140)["usage"]["completion_tokens"] == 140  # as it was asked for


def test_texts_do_not_repeat_themselves():
    """Neither do prose, tables and code, in any 1,024 of their tokens."""
    tokenizer, folder = AutoTokenizer.from_pretrained(kvevict.small_llama()), Path(kvevict.__file__).parents[1]
    for file in ("docs/methods.md", "docs/results.md", "csrc/ops.def", "kvevict/serve/fields.py", "LICENSE"):
        seen = RepeatDetector()
        assert not any(map(seen.put, tokenizer((folder / file).read_text(), verbose=False)["input_ids"])), file
