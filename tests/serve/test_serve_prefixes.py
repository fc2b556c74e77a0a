"""The prompts that `kvevict serve` stores: shared, bounded, back after a restart, and never a wrong answer."""

import asyncio
import copy
import functools
import gc
import logging
import os
import threading
import unicodedata
from pathlib import Path
from unittest import mock
from urllib.parse import quote

import pytest
from serving import FACTS, FILLER, TEXT, Client, asks, cached, model, said, server, unpatched  # noqa: F401

import kvevict
from kvevict.serve import beginnings, prefixes, prompt
from kvevict.serve.start import server_of
from kvevict.store import files

OPENS = dict(kvevict=dict(text="text"))


def stored(folder) -> list:
    return sorted((folder / "prefixes").glob("*.safetensors"))


def warnings(caplog) -> list:
    found = (each for each in caplog.records if each.name == "kvevict.serve" and each.levelno >= logging.WARNING)
    return [each.getMessage() for each in found]


@pytest.fixture(scope="module")
def alone():
    """The answers to the questions about the text, each of a server that was asked nothing else."""

    def answer(name):
        client = Client(server())
        client.store()
        return said(client.chat(asks(name), **OPENS))

    return {name: answer(name) for name in FACTS}


def test_a_text_is_read_once(alone):
    client = Client(server())
    tokens = client.store().json()["tokens"]
    for name in FACTS:
        response = client.chat(asks(name), **OPENS)
        assert said(response) == alone[name] and cached(response) == tokens > 500
    options = dict(budget=256, chunk_size=256, recall=True)
    cache = kvevict.read(model(), client.server.tokenizer, TEXT, "take", **options)
    want = kvevict.answer(model(), client.server.tokenizer, cache, list(map(asks, FACTS)), max_new_tokens=12)
    assert [each.strip() for each in alone.values()] == want
    assert str(FACTS["Naislet"]) in alone["Naislet"]


def test_memory_and_disk_are_bounded(tmp_path, alone):
    client = Client(server())
    client.store()
    size = client.server.prefixes.live_bytes
    Client(server(tmp_path)).store()
    [file] = stored(tmp_path)
    disk = 3 * file.stat().st_size
    small, files = (Client(server(folder, memory=2 * size + size // 2, disk=disk)) for folder in (None, tmp_path / "b"))
    for n in range(6):
        for each in (small, files):
            each.store(f"text{n}", f"Number {n}. {TEXT}")
        assert 0 < small.server.prefixes.live_bytes <= 2 * size + size // 2
        used = sum(path.stat().st_size for path in stored(tmp_path / "b"))
        assert used == files.server.prefixes.file_bytes <= disk - files.server.texts.bytes
        assert files.server.prefixes.live_bytes == 0
        assert set(files.server.prefixes._live) == {path.stem for path in stored(tmp_path / "b")}
    assert len(stored(tmp_path / "b")) == len(small.server.prefixes._live) == 2
    again = small.chat(asks("Naislet"), kvevict=dict(text="text0"))  # read again from the text
    assert cached(again) == 0 and said(again) == said(small.chat(asks("Naislet"), kvevict=dict(text="text0")))
    assert client.store("big", "a" * (1 << 20) * 300).status_code == 413
    nothing = Client(server(memory=0))
    nothing.store()
    response = nothing.chat(asks("Orshan"), **OPENS)
    assert cached(response) == 0 and said(response) == alone["Orshan"]
    assert nothing.server.prefixes.live_bytes == 0


def mapped(folder) -> int:
    """How many of a store's files this process has in its memory."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if str(folder) in line})  # inodes


def test_the_slots_of_a_text_on_disk_lie_in_its_file(tmp_path, alone, monkeypatch):
    """They take none of the memory, in the server that wrote them and in one that loads them; it is loaded once, and
    let go when another server has removed it. Where that one may be on another machine they are copied."""
    first = Client(server(tmp_path / "store", memory=1 << 22))
    for name in ("text", "other"):
        first.store(name, TEXT.replace("118204", "555555") if name == "other" else TEXT)
    second, loads, load = Client(server(tmp_path / "store", memory=1 << 22)), [], prefixes.load_cache
    monkeypatch.setattr(prefixes, "load_cache", lambda *args, **options: loads.append(args) or load(*args, **options))
    for client in (first, second):
        for name in ("Orshan", "Velmora", "Naislet"):
            assert said(client.chat(asks(name), **OPENS)) == alone[name]
        assert "555555" in said(client.chat(asks("Orshan"), kvevict=dict(text="other")))
        assert client.server.prefixes.live_bytes == 0 and len(client.server.prefixes._live) == 2
    assert len(loads) == 2 and mapped(tmp_path / "store") == 2
    first.server.prefixes.disk = lambda: 0
    first.server.scheduler.submit(first.server.prefixes._fit, 0).result()  # for want of room
    assert stored(tmp_path / "store") == [] and not first.server.prefixes._live
    assert said(second.chat(asks("Orshan"), **OPENS)) == alone["Orshan"]  # it is read where it was, and let go then
    second.store("third", f"Yes. {TEXT}")
    assert len(second.server.prefixes._live) == mapped(tmp_path / "store") == 1
    monkeypatch.setattr("kvevict.store.loading.is_remote", lambda path: True)
    third = Client(server(tmp_path / "store"))
    assert str(FACTS["Orshan"]) in said(third.chat(asks("Orshan"), kvevict=dict(text="third")))
    assert third.server.prefixes.live_bytes > 1 << 18


@pytest.mark.parametrize("disk", [None, 1 << 19])
def test_slots_that_fit_nowhere(tmp_path, caplog, disk):
    """The text is read again for each question, and the log says why."""
    client = Client(server(tmp_path if disk else None, memory=1 << 10, **dict(disk=disk) if disk else {}))
    assert client.store().status_code == 200
    for _ in range(2):
        response = client.chat(asks("Orshan"), **OPENS)
        assert str(FACTS["Orshan"]) in said(response) and cached(response) == 0
    assert warnings(caplog) == ["a stored text is read again for each question"]
    [told] = [each.facts for each in caplog.records if each.levelno >= logging.WARNING]
    assert "raise --memory-bytes" + (" or --store-bytes" if disk else "") in told["reason"]


def test_after_a_restart(tmp_path, alone, caplog):
    first = Client(server(tmp_path))
    tokens = first.store().json()["tokens"]
    second = Client(server(tmp_path))  # the first one was killed
    response = second.chat(asks("Orshan"), **OPENS)
    assert said(response) == alone["Orshan"] and cached(response) == tokens
    assert second.ask("GET", "/v1/kvevict/texts").json()["data"][0]["name"] == "text"
    other = Client(server(tmp_path, budget=128)).chat(asks("Orshan"), **OPENS)
    assert cached(other) == 0  # of another policy
    whole = Client(server(tmp_path, of=copy.deepcopy(model()).float()))
    assert cached(whole.chat(asks("Orshan"), **OPENS)) == 0  # in another dtype
    assert cached(Client(server(tmp_path)).chat(asks("Orshan"), **OPENS)) == tokens
    assert second.ask("DELETE", "/v1/kvevict/texts/text").status_code == 200
    assert Client(server(tmp_path)).chat(asks("Orshan"), **OPENS).status_code == 404
    assert warnings(caplog) == []


def test_servers_that_compute_alike_share(tmp_path, alone):
    """Whether they record decoded tokens or not; not where slots are stored otherwise."""
    tokens = Client(server(tmp_path)).store().json()["tokens"]
    for changes, shared in ((dict(policy="take:compiled=true"), tokens), (dict(kv="int8"), 0)):
        response = Client(server(tmp_path, **changes)).chat(asks("Orshan"), **OPENS)
        assert cached(response) == shared and len(stored(tmp_path)) == (1 if shared else 2)
        assert said(response) == alone["Orshan"] or not shared


def test_a_damaged_file_is_read_again(tmp_path, alone, caplog):
    """Damage in every region, a short file, an empty one, and one of another text under this one's name."""
    client = Client(server(tmp_path))
    client.store()
    client.store("other", TEXT.replace("118204", "555555"))
    one, two = stored(tmp_path)
    own = next(path for path in (one, two) if path.stem in key_of(client))
    whole, others = own.read_bytes(), (two if own == one else one).read_bytes()
    step = len(whole) // 7
    for n, bad in enumerate([
        *(whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :] for at in range(3, len(whole), step)),
        whole[: len(whole) // 2], b"", others,
    ]):  # fmt: skip
        own.write_bytes(bad)
        caplog.clear()
        other = Client(server(tmp_path))
        response = other.chat(asks("Orshan"), **OPENS)
        assert said(response) == alone["Orshan"] and cached(response) == 0, n
        other.server.scheduler.submit(bool).result()  # it has looked at the texts
        assert warnings(caplog) == ["a stored prefix is read again"]
    [text] = [path for path in (tmp_path / "texts").glob("*/*.json") if path.stem == "text"]
    data = text.read_bytes()
    (text.parent / "copy.json").write_bytes(data)
    text.write_bytes(data.replace(b"118204", b"118205"))
    caplog.clear()
    again = Client(server(tmp_path))
    assert again.chat(asks("Orshan"), **OPENS).status_code == 404
    assert again.chat(asks("Orshan"), kvevict=dict(text="copy")).status_code == 404
    assert warnings(caplog) == ["a stored text is damaged and not known"] * 2


def key_of(client) -> list:
    """The keys that the text `text` was stored under."""
    whole = prompt.of_messages(client.server.tokenizer, [dict(role="user", content="")], {}, 2048, TEXT)
    chosen, own = client.server.policies.built(), client.server.manager.reader.weights
    start, end = whole.text
    facts, mark = beginnings.facts_of("everyone", own, *chosen), beginnings.mark_of("everyone", TEXT)
    return [beginnings.Beginnings(facts, whole.ids, [end], mark=mark, start=start).keys[end]]


def test_a_disk_that_is_full(tmp_path, monkeypatch, caplog, alone):
    client = Client(server(tmp_path))
    monkeypatch.setattr(files, "_sync", mock.Mock(side_effect=OSError(28, os.strerror(28))))
    assert client.store().status_code == 507
    response = client.chat(TEXT + FILLER, asks("Naislet"), asks("Orshan"), kvevict=dict(question=None))
    assert response.status_code == 200  # from memory
    assert client.chat(TEXT + FILLER * 2, asks("Naislet"), kvevict=dict(question=None)).status_code == 200
    assert warnings(caplog) == ["a prefix is not stored on disk"]
    assert not stored(tmp_path) and not list(tmp_path.rglob(".kvevict-*"))
    monkeypatch.undo()
    assert client.store().status_code == 200  # known already, and written now
    assert len(stored(tmp_path)) == 1 and said(client.chat(asks("Orshan"), **OPENS)) == alone["Orshan"]


def unreadable(monkeypatch, folder):
    """Nothing of a folder can be read or written, as by another user's process."""

    def refused(function, path=".", *args, **options):
        if str(path).startswith(str(folder)):
            raise PermissionError(13, os.strerror(13), str(path))
        return function(path, *args, **options)

    for name in ("stat", "scandir", "listdir", "mkdir", "open", "unlink", "utime"):
        monkeypatch.setattr(os, name, functools.partial(refused, getattr(os, name)))


@pytest.mark.parametrize("how", ["gone", "a file", "unreadable"])
@pytest.mark.parametrize("name", ["prefixes", "texts"])
def test_a_store_that_fails_while_it_is_used(name, how, tmp_path, monkeypatch, caplog):
    """Answers go on, and the log says so once. What a folder that cannot be read holds is not deleted."""
    client = Client(server(tmp_path))
    client.store()
    folder = tmp_path / name
    if how == "unreadable":
        unreadable(monkeypatch, folder)
    else:
        folder.rename(tmp_path / "away")
        if how == "a file":
            folder.write_text("")
    for at in range(2):
        for question in ("Who went home?", "What rained?"):
            response = client.chat(f"{at} {FILLER * 70}", question, question, max_tokens=3)
            assert response.status_code == 200, response.text
    assert client.ask("GET", "/metrics").status_code == client.ask("GET", "/v1/kvevict/texts").status_code == 200
    if name == "texts":
        assert client.store("another").status_code == 507
        assert client.ask("DELETE", "/v1/kvevict/texts/text").status_code == 404
    wrong = {"texts": "the folder of texts cannot be read", "prefixes": "a prefix is not stored on disk"}[name]
    assert warnings(caplog).count(wrong) == 1 and len(warnings(caplog)) <= 2
    monkeypatch.undo()
    if how != "unreadable":
        folder.unlink(missing_ok=True)
        (tmp_path / "away").rename(folder)
    assert len(stored(tmp_path)) >= 1 and client.chat(asks("Orshan"), **OPENS).status_code == 200


def test_a_text_that_cannot_be_deleted(tmp_path):
    client = Client(server(tmp_path))
    client.store()
    with mock.patch.object(Path, "unlink", side_effect=OSError(30, os.strerror(30))):
        response = client.ask("DELETE", "/v1/kvevict/texts/text")
    assert response.status_code == 507 and "Read-only" in response.json()["error"]["message"]
    assert client.ask("DELETE", "/v1/kvevict/texts/text").status_code == 200


def test_what_was_kept():
    """All of a text that nobody has asked about; then the slots that the last question chose, within the budget; all
    where answers attend to all slots."""
    client = Client(server(budget=64, policy="take:recall=true,recall_after=0"))
    client.store()

    def pieces():
        return client.ask("GET", "/v1/kvevict/texts/text/kept").json()["pieces"]

    assert "".join(text for text, _ in pieces()) == TEXT and {share for _, share in pieces()} == {1.0}
    for name, digits in (("Naislet", "364"), ("Velmora", "907")):
        client.chat(asks(name), **OPENS)
        assert "".join(text for text, _ in pieces()) == TEXT
        assert 0 < sum(share for _, share in pieces()) <= 64
        assert [share > 0.5 for text, share in pieces() if text == digits] == [True]
    every = Client(server(budget=64))
    every.store()
    every.chat(asks("Naislet"), **OPENS)
    found = every.ask("GET", "/v1/kvevict/texts/text/kept").json()["pieces"]
    assert {share for _, share in found} == {1.0}
    assert client.ask("GET", "/v1/kvevict/texts/none/kept").status_code == 404
    assert "<!doctype html>" in client.ask("GET", "/").text


def test_texts_belong_to_their_key(tmp_path):
    served = server(tmp_path, keys=("one", "two"))
    one, two, none = (Client(served, key) for key in ("one", "two", None))
    assert one.store().status_code == 200
    assert two.chat(asks("Orshan"), **OPENS).status_code == 404
    assert two.ask("GET", "/v1/kvevict/texts").json()["data"] == []
    assert two.ask("DELETE", "/v1/kvevict/texts/text").status_code == 404
    assert two.store().status_code == 200
    assert cached(one.chat(asks("Orshan"), **OPENS)) > 0
    for response in (none.chat("Who?"), none.store(), none.ask("GET", "/v1/models"), none.ask("GET", "/metrics")):
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert Client(served, "three").chat("Who?").status_code == 401
    assert none.ask("GET", "/health").status_code == 200


def test_names_stay_in_the_store(tmp_path):
    client = Client(server(tmp_path / "store"))
    hostile = [
        "../x", "..", ".", "", "a/b", "a\\b", "/etc/passwd", "a\0b", "x" * 101, 5, None, ["x"], "a\n", " a", "a ",
        "\x85", "\u202egpj.txt", "\ufeffa", "a\u2028b", "文" * 81, "\u200d\0", ".文", "\u3000",
    ]  # fmt: skip
    for name in hostile:
        for response in (client.store(name), client.chat("Who?", kvevict=dict(text=name))):
            if name is not None or response.status_code != 200:
                assert response.status_code in (400, 404), name
                assert client.server.texts.bytes == 0
    assert client.ask("DELETE", "/v1/kvevict/texts/..%2F..%2Fx").status_code in (400, 404)
    assert {path.name for path in tmp_path.rglob("*")} <= {"store", "texts", "prefixes"}


NAMES = [
    "文章.txt", "Отчёт за май.pdf.txt", "تقرير.md", "می\u200cخواهم.txt", "हिन्दी", "รายงาน.txt", "보고서", "Übung é.txt",
    "📘 notes.txt", "a (2).txt", "100% #1?.txt", "文" * 80, "x" * 100, "con", "a..b", "-", "'\"<b>&.txt",
]  # fmt: skip


def test_names_in_every_script(tmp_path):
    """A text is found by its name, also when its file is, after a restart, and however its accents are written."""
    client = Client(server(tmp_path / "store"))
    for at, name in enumerate(NAMES):
        assert client.store(name, f"{at} {FILLER}").json()["name"] == name
    again = Client(server(tmp_path / "store"))
    for served in (client, again):
        assert {each["name"] for each in served.ask("GET", "/v1/kvevict/texts").json()["data"]} == set(NAMES)
        for at, name in enumerate(NAMES):
            assert served.server.texts.get("everyone", unicodedata.normalize("NFD", name)).text == f"{at} {FILLER}"
        assert served.chat("Who?", kvevict=dict(text=NAMES[0])).status_code == 200
    for name in NAMES:
        assert again.ask("DELETE", f"/v1/kvevict/texts/{quote(name, safe='')}").json()["name"] == name
    assert not list((tmp_path / "store" / "texts").rglob("*.json"))


def test_a_text_that_is_not_to_be_replaced():
    """A name with another text is taken, whether that was there before or came while this one was read."""
    client, path = Client(server()), "/v1/kvevict/texts"
    assert client.store("a", FILLER).status_code == 200
    assert client.post(path, name="a", text=FILLER, replace=False).status_code == 200  # the same
    taken = client.post(path, name="a", text=TEXT, replace=False)
    assert taken.status_code == 409 and taken.json()["error"]["code"] == "text_exists"
    assert client.server.texts.get("everyone", "a").text == FILLER
    assert client.post(path, name="a", text=TEXT, replace="no").status_code == 400

    both = client.together([dict(name="b", text=text, replace=False) for text in (TEXT, FILLER)], path)
    long, short = (each.status_code for each in both)
    assert sorted((long, short)) == [200, 409]
    assert client.server.texts.get("everyone", "b").text == (TEXT if long == 200 else FILLER)
    assert client.store("a", TEXT).status_code == 200 and client.server.texts.get("everyone", "a").text == TEXT


def test_what_is_deleted_is_gone(tmp_path):
    """A text's prefixes leave memory and disk with it, whatever read and followed them; others stay."""
    client, system = Client(server(tmp_path)), dict(role="system", content=FILLER * 6)
    client.store("other", TEXT.replace("118204", "555555"))
    client.chat(FILLER * 12, asks("Orshan"), asks("Naislet"), kvevict=dict(question=None))

    def held():
        client.server.scheduler.submit(client.server.prefixes.flush).result()
        return set(client.server.prefixes._live), {path.stem for path in stored(tmp_path)}

    before = held()
    client.store()
    client.store("small", TEXT + "The end.")
    client.post("/v1/kvevict/texts", name="text", text=TEXT, budget=128)
    client.chat(asks("Orshan"), **OPENS)
    client.chat(asks("Orshan") + FILLER * 6, "Yes.", asks("Naislet"), **OPENS)
    client.post(
        "/v1/chat/completions", messages=[system, dict(role="user", content=asks("Orshan"))], max_tokens=1, **OPENS
    )
    live, files = held()
    assert len(live) >= len(before[0]) + 4 and live == files and before[0] == before[1]
    assert client.ask("DELETE", "/v1/kvevict/texts/text").status_code == 200
    assert client.ask("DELETE", "/v1/kvevict/texts/small").status_code == 200
    assert held() == before
    assert client.server.prefixes.file_bytes == sum(path.stat().st_size for path in stored(tmp_path))
    again = Client(server(tmp_path))  # the same from files
    assert again.ask("DELETE", "/v1/kvevict/texts/other").status_code == 200
    assert {path.stem for path in stored(tmp_path)} == {key for key in before[1] if "-" not in key}


def test_a_text_of_two_names_and_one_of_another_text(tmp_path, alone):
    client = Client(server(tmp_path))
    client.store("one")
    client.store("two")
    client.ask("DELETE", "/v1/kvevict/texts/one")
    response = client.chat(asks("Orshan"), kvevict=dict(text="two"))
    assert said(response) == alone["Orshan"] and cached(response) > 500 and len(stored(tmp_path)) == 1
    kept = stored(tmp_path)
    client.store("two", FILLER * 20)
    assert len(stored(tmp_path)) == 1 and stored(tmp_path) != kept
    assert client.store("large", "a b " * 4000).status_code == 400
    client.server.texts.most = client.server.texts.bytes + 100
    read = client.server.scheduler.submit
    client.server.scheduler.submit = None  # it is not read
    assert client.store("large", TEXT).status_code == 507
    client.server.scheduler.submit = read
    client.server.scheduler.submit(bool).result()
    assert len(stored(tmp_path)) == 1 and len(client.server.prefixes._live) == 1


def test_a_text_that_is_deleted_while_it_is_asked(tmp_path, monkeypatch):
    """Its caches go, also those of the request that runs and of one that waits."""
    client = Client(server(tmp_path))
    client.store()
    asked = dict(messages=[dict(role="user", content=asks("Orshan"))], max_tokens=2, **OPENS)
    begun, go, prefix = threading.Event(), threading.Event(), client.server.manager.reader._known

    def held(*args):
        begun.set()
        assert go.wait(60)
        return prefix(*args)

    monkeypatch.setattr(client.server.manager.reader, "_known", held)

    async def all_of():
        running = [asyncio.ensure_future(client.asked("POST", "/v1/chat/completions", asked)) for _ in range(2)]
        await asyncio.to_thread(begun.wait, 60)
        while not client.server.scheduler.waiting:
            await asyncio.sleep(0)
        deleted = asyncio.ensure_future(client.asked("DELETE", "/v1/kvevict/texts/text"))
        while client.server.texts.of("everyone"):
            await asyncio.sleep(0)
        go.set()
        return await asyncio.gather(*running, deleted)

    assert [each.status_code for each in asyncio.run(all_of())] == [200] * 3
    client.server.scheduler.submit(bool).result()
    assert stored(tmp_path) == [] and not client.server.prefixes._live


def test_nobody_else_reads_what_is_stored(tmp_path):
    before = os.umask(0)
    try:
        client = Client(server_of(store=str(tmp_path / "store"), budget=256))
        for _ in range(2):  # in place of the file
            assert client.store().status_code == 200
        client.server.scheduler.submit(client.server.prefixes.flush).result()
        assert len(stored(tmp_path / "store")) == 1
    finally:
        os.umask(before)
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
