"""Pinned downloads: another content than the known one is refused, by one error that says what to do."""

import hashlib

import pytest

from kvevict.evaluate.download import Changed, of_hub, of_web
from kvevict.evaluate.tasks import longbench

REVISION = "0" * 40


def test_an_address_with_the_pinned_content(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    pinned = hashlib.sha256(b"content").hexdigest()
    assert of_web(file.as_uri(), pinned) == b"content"
    file.write_bytes(b"Content")
    with pytest.raises(Changed, match=f"{file.as_uri()} is not the file that is pinned.*expected {pinned}"):
        of_web(file.as_uri(), pinned)


def test_a_file_of_the_hub_is_trusted_when_it_is_first_used(tmp_path, monkeypatch):
    path, home, asked = tmp_path / "data.zip", tmp_path / "home", []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *args, **kwargs: asked.append(kwargs) or str(path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))
    path.write_bytes(b"first")
    for _ in range(2):
        assert of_hub("them/data", "data.zip", REVISION) == str(path)
    (record,) = (home / "kvevict").iterdir()
    assert record.name == f"them--data--data.zip--{REVISION}.sha256"
    assert record.read_text() == hashlib.sha256(b"first").hexdigest() + "\n"
    path.write_bytes(b"second")
    with pytest.raises(Changed, match=f"{path} is not the file that is pinned.*remove it .* or {record}"):
        of_hub("them/data", "data.zip", REVISION)
    record.unlink()
    assert of_hub("them/data", "data.zip", REVISION) == str(path)
    assert asked == [{"repo_type": "dataset", "revision": REVISION}] * 4
    record.write_bytes(b"\xff damaged")
    with pytest.raises(Changed, match=f"remove it .* or {record}"):
        of_hub("them/data", "data.zip", REVISION)


def test_longbench_s_pins_are_whole():
    assert set(longbench.SHA256) == {longbench.PROMPTS, longbench.LENGTHS}
    assert all(len(bytes.fromhex(each)) == 32 for each in longbench.SHA256.values())
    assert len(bytes.fromhex(longbench.DATA[2])) == 20
