"""Downloads of data, pinned: the address names a commit, and the content must have the sha256 that is known of it."""

import hashlib
import urllib.request
from pathlib import Path

import huggingface_hub

from ..files import write


class Changed(ValueError):
    """A download is not the file that is pinned."""


def of_web(url: str, sha256: str) -> bytes:
    """What an address holds. Raises `Changed` where its sha256 is another one, and urllib's errors."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        data = answer.read()
    _compare(url, hashlib.sha256(data).hexdigest(), sha256, "download it again")
    return data


def of_hub(repo: str, name: str, revision: str) -> str:
    """Path of a file of a dataset on the hub, in the hub's cache, at a commit. Its sha256 is noted beside the cache
    (`HF_HOME`) when it is first used; raises `Changed` where a later one differs, and the hub's errors."""
    path = huggingface_hub.hf_hub_download(repo, name, repo_type="dataset", revision=revision)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    home = Path(huggingface_hub.constants.HF_HOME) / "kvevict"
    record = home / f"{repo}--{name}--{revision}.sha256".replace("/", "--")
    if not record.exists():
        home.mkdir(parents=True, exist_ok=True)
        write(record, digest.hexdigest() + "\n")
    first = record.read_text("utf-8", "replace").strip()
    _compare(path, digest.hexdigest(), first, f"remove it to download it again, or {record} to trust it")
    return path


def _compare(name, found: str, pinned: str, fix: str) -> None:
    if found != pinned:
        raise Changed(f"{name} is not the file that is pinned: its sha256 is {found}, expected {pinned}; {fix}")
