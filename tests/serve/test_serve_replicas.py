"""Servers that share one folder: texts and prefixes of one are there for the others until one deletes them, and nothing
that they do at the same time, or leave when they are killed, makes an answer wrong."""

import contextlib
import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from process import asked_of, folder, openai, process, stores_texts  # noqa: F401
from serving import FACTS, FILLER, TEXT, Client, asks, cached, model, said, server, unpatched  # noqa: F401

from kvevict.serve import prefixes
from kvevict.serve.errors import Refused
from kvevict.serve.texts import Texts
from kvevict.store import files

OPTIONS = ("--budget", "256")
NO_LINKS = mock.Mock(side_effect=PermissionError(1, "no links"))
BLOCKS = """
import pathlib, time
from kvevict.store import files

def block(path):
    if str(path).endswith(".safetensors"):
        pathlib.Path({flag!r}).touch()
        time.sleep(1e6)

files._sync = block
"""


def opens(name="text") -> dict:
    return dict(extra_body=dict(kvevict=dict(text=name)))


def stored(folder) -> list:  # noqa: F811
    return sorted((folder / "prefixes").glob("*.safetensors"))


def kept(answer) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


@pytest.mark.slow
def test_two_servers(process, tmp_path):  # noqa: F811
    """A text that one has stored is answered by the other, which reads nothing of it, both at once. A text that one
    deletes is not there for the other."""
    store, count = tmp_path / "store", 500
    one, two = (process(*OPTIONS, "--store", str(store)) for _ in range(2))
    one.store(TEXT)
    assert len(stored(store)) == 1
    want = {name: one.ask(asks(name), **opens()).choices[0].message.content for name in FACTS}
    assert str(FACTS["Orshan"]) in want["Orshan"]
    with ThreadPoolExecutor() as threads:  # the first questions that `two` hears of it
        each = [(name, server) for name in FACTS for server in (one, two)]
        answers = list(threads.map(lambda at: (at[0], at[1].ask(asks(at[0]), **opens())), each))
    for name, answer in answers:
        assert answer.choices[0].message.content == want[name] and kept(answer) > count
    with ThreadPoolExecutor() as threads:  # one text, read by both
        list(threads.map(lambda each: each.store(TEXT.replace("118204", "555555"), "other"), (one, two)))
    assert len(stored(store)) == 2
    assert [kept(each.ask(asks("Velmora"), **opens("other"))) > count for each in (one, two)] == [True, True]
    one.client.delete("/kvevict/texts/text", cast_to=object)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        two.ask(asks("Orshan"), **opens())
    assert [each["name"] for each in two.client.get("/kvevict/texts", cast_to=object)["data"]] == ["other"]
    assert len(stored(store)) == 1
    for each in (one, two):
        assert not [line for line in each.lines if "warning" in line.lower() or "Traceback" in line]
        assert each.end() in (0, -signal.SIGTERM)


@pytest.mark.slow
def test_one_is_killed_while_it_writes(process, tmp_path):  # noqa: F811
    """The other knows nothing of the text, and stores it. A server that starts removes the file that was left once that
    is old, but not the file of a living one."""
    store, flag = tmp_path / "store", tmp_path / "writes"
    one = process(*OPTIONS, "--store", str(store), first=BLOCKS.format(flag=str(flag)))
    two = process(*OPTIONS, "--store", str(store))
    writer = threading.Thread(target=_ignored, args=(one.store, TEXT))
    writer.start()
    while not flag.exists():
        assert writer.is_alive()
        time.sleep(0.01)
    assert one.end(signal.SIGKILL) == -signal.SIGKILL
    writer.join()
    [left] = store.rglob(".kvevict-*")
    assert list(left.iterdir()) and not stored(store)
    with pytest.raises(openai.NotFoundError):
        two.ask(asks("Orshan"), **opens())
    two.store(TEXT)
    answer = two.ask(asks("Orshan"), **opens())
    assert str(FACTS["Orshan"]) in answer.choices[0].message.content and kept(answer) > 500
    assert left.exists()
    for path in (left, *left.iterdir()):
        os.utime(path, (time.time() - 7200,) * 2)
    (store / "texts" / "a" / ".kvevict-living").mkdir(parents=True)
    server(store)
    assert not left.exists() and (store / "texts" / "a" / ".kvevict-living").exists()


def _ignored(function, *args):
    with contextlib.suppress(openai.OpenAIError):
        function(*args)


def test_slots_in_memory_go_where_another_server_deletes_their_text(tmp_path):
    """With the next request, whatever that is; nothing is written of them any more."""
    one, two = Client(server(tmp_path)), Client(server(tmp_path))
    one.store()
    assert cached(two.chat(asks("Orshan"), kvevict=dict(text="text"))) > 500
    assert two.server.prefixes._live
    one.ask("DELETE", "/v1/kvevict/texts/text")
    assert stored(tmp_path) == []
    two.server.scheduler.submit(two.server.prefixes.flush).result()  # as at its end
    assert stored(tmp_path) == [] and not two.server.prefixes._live

    one.store()
    assert cached(two.chat(asks("Orshan"), kvevict=dict(text="text"))) > 500
    one.store(text=FILLER * 20)  # another text of that name
    assert two.chat("Who?", max_tokens=1).status_code == 200
    two.server.scheduler.submit(bool).result()
    assert not two.server.prefixes._live
    assert cached(two.chat(asks("Orshan"), kvevict=dict(text="text"))) < 500


def test_a_text_that_is_deleted_while_its_slots_are_written(tmp_path, monkeypatch):
    one, two = Client(server(tmp_path)), Client(server(tmp_path))
    one.store()
    two.chat(asks("Orshan"), kvevict=dict(text="text"))
    stored(tmp_path)[0].unlink()  # for want of room
    save = prefixes.save_cache

    def slow(*args, **options):
        assert one.ask("DELETE", "/v1/kvevict/texts/text").status_code == 200
        save(*args, **options)

    monkeypatch.setattr(prefixes, "save_cache", slow)
    two.server.scheduler.submit(two.server.prefixes.flush).result()
    assert stored(tmp_path) == []


def test_prefixes_whose_text_was_deleted_by_a_server_that_was_killed(tmp_path):
    """They go when a server starts, after an hour: before that the text may be on its way."""
    one = Client(server(tmp_path))
    one.store()
    one.store("other", TEXT.replace("118204", "555555"))
    one.server.scheduler.submit(bool).result()
    one.server.texts.remove("everyone", "text")
    server(tmp_path)
    assert len(stored(tmp_path)) == 2
    for path in stored(tmp_path):
        os.utime(path, (time.time() - 7200,) * 2)
    two = Client(server(tmp_path))
    assert len(stored(tmp_path)) == 1
    assert cached(two.chat(asks("Orshan"), kvevict=dict(text="other"))) > 500


@pytest.mark.parametrize("links", [True, False])
def test_one_name_for_two_texts_at_once(tmp_path, monkeypatch, links):
    """Without `replace` one of them is refused; both servers have the other."""
    if not links:
        monkeypatch.setattr(os, "link", NO_LINKS)
    one, two = Texts(1 << 20, tmp_path), Texts(1 << 20, tmp_path)
    write = files.write

    def late(*args, **options):
        monkeypatch.setattr(files, "write", write)
        two.put("me", "a", "the other text", replace=False)
        write(*args, **options)

    monkeypatch.setattr(files, "write", late)
    with pytest.raises(Refused, match="already"):
        one.put("me", "a", "a text", replace=False)
    assert one.get("me", "a").text == two.get("me", "a").text == "the other text"
    one.put("me", "a", "the other text", replace=False)
    assert one.put("me", "a", "a text") is not None and two.get("me", "a").text == "a text"
    assert two.gone() == {*two.gone("x"), *one.gone()} - {"x"} != set()


def test_texts_are_looked_for_where_their_folder_has_changed(tmp_path, monkeypatch):
    """Once its last change is not of these seconds, for file systems do not tell two changes at once apart."""
    one, two, looks, look = Texts(100, tmp_path), Texts(100, tmp_path), [], Texts._look
    monkeypatch.setattr(Texts, "_look", lambda self, owner, entries: looks.append(owner) or look(self, owner, entries))

    def looked() -> tuple:
        looks.clear()
        return len(two.gone()), sorted(looks)

    one.put("me", "a", "a text")
    one.put("you", "b", "a text")
    assert looked() == looked() == (0, ["me", "you"])
    for owner in ("me", "you"):
        os.utime(tmp_path / owner, (time.time() - 60,) * 2)
    assert looked() == (0, ["me", "you"]) and looked() == (0, []) and two.bytes == 12
    one.remove("me", "a")
    assert looked() == (1, ["me"]) and two.bytes == 6
    before = os.stat(tmp_path / "you")
    one.remove("you", "b")
    os.utime(tmp_path / "you", ns=(before.st_atime_ns, before.st_mtime_ns))  # as if the folder's time were not kept
    os.utime(tmp_path / "me", (time.time() - 60,) * 2)
    assert looked() == (0, ["me"]) and looked() == (0, [])
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    assert looked()[0] == 1


@pytest.mark.parametrize("data", [b"[" * 100_000, b"[]", b"{}", b'"text"', b'{"text": 1}', b"\xff"])
def test_a_file_that_is_not_a_text(tmp_path, data):
    """Its name is free."""
    from kvevict.serve.errors import Refused

    (tmp_path / "me").mkdir()
    (tmp_path / "me" / "a.json").write_bytes(data)
    texts = Texts(100, tmp_path)
    with pytest.raises(Refused, match="does not exist"):
        texts.get("me", "a")
    texts.put("me", "a", "a text")
    assert texts.get("me", "a").text == "a text"


def test_texts_of_others_count(tmp_path):
    one, two = Texts(100, tmp_path), Texts(100, tmp_path)
    one.put("me", "a", "a" * 60)
    assert two.bytes == 60 and two.of("me") == [("a", 60)] and two.of("you") == []
    with pytest.raises(Refused, match="delete some"):
        two.put("me", "b", "b" * 60)
    two.put("me", "a", "b" * 100)
    one.remove("me", "a")
    assert (one.bytes, two.bytes) == (0, 0)
    with pytest.raises(Refused, match="does not exist"):
        two.get("me", "a")


@pytest.mark.parametrize("links", [True, False])
def test_a_prefix_that_another_server_removes(tmp_path, monkeypatch, caplog, links):
    """While it is read. That is not damage; without hard links it is read again."""
    one, two = Client(server(tmp_path)), Client(server(tmp_path))
    one.store()
    load = prefixes.load_cache

    def removed(*args):
        patched.setattr(prefixes, "load_cache", load)
        stored(tmp_path)[0].unlink()
        return load(*args)

    with monkeypatch.context() as patched:
        patched.setattr(prefixes, "load_cache", removed)
        if not links:
            patched.setattr(os, "link", NO_LINKS)
        response = two.chat(asks("Orshan"), kvevict=dict(text="text"))
    assert str(FACTS["Orshan"]) in said(response) and (cached(response) > 500) == links
    assert len(stored(tmp_path)) == 1 - links  # written again
    assert not [each for each in caplog.records if each.name == "kvevict.serve" and each.levelno > logging.INFO]
    assert not list(tmp_path.rglob(".kvevict-*"))


def test_a_beginning_that_another_server_has_shared(tmp_path):
    """It is written when it comes again. The third request is the first one that `two` hears of it, and the next turn
    of its chat continues it; another policy, and another beginning, share nothing."""
    system = dict(role="system", content=f"{TEXT} {FILLER * 30}")

    def ask(client, *messages, **more):
        turns = [dict(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(messages)]
        return client.post("/v1/chat/completions", messages=[system, *turns], max_tokens=12, **more)

    one, two = (Client(server(tmp_path)) for _ in range(2))
    assert [cached(ask(one, asks(name))) > 1024 for name in ("Naislet", "Orshan")] == [False, True]
    want, found = (ask(client, asks("Velmora")) for client in (one, two))
    assert cached(found) == cached(want) > 1024 and said(found) == said(want)
    assert cached(ask(two, asks("Velmora"), said(found), asks("Orshan"))) >= cached(found)
    assert cached(ask(Client(server(tmp_path, budget=100)), asks("Velmora"))) == 0
    system["content"] = f"Yes. {system['content']}"
    assert cached(ask(Client(server(tmp_path)), asks("Velmora"))) == 0
