"""Reads `known.tsv`, a table of model types and whether patched models of each type give the output of unpatched ones.
tests/hf/test_types.py writes it."""

import functools
from pathlib import Path
from typing import NamedTuple

from .compat import VERSION

FILE = Path(__file__).with_name("known.tsv")
EQUAL, LIMITED, REFUSED, UNTRIED = "equal", "limited", "refused", "untried"


class Type(NamedTuple):
    """One line of known.tsv: a model type.

    name      model_type of the whole model's config
    decoder   model_type of its text decoder's config
    verdict   "equal": the output of patched models equals that of unpatched ones with every policy; "limited": it does,
              with the exceptions in `note`; "refused": models cannot be patched, for the reason in `note`; "untried":
              Transformers makes no tiny model of this type that reads token ids
    note      the reason or the exceptions that belong to the verdict
    since     a version of Transformers, such as "5.23": with it and with all later ones that were tested the verdict
              was "equal" or "limited"
    """

    name: str
    decoder: str
    verdict: str
    note: str
    since: str = ""

    @property
    def label(self) -> str:
        return self.name + ("" if self.decoder in ("", self.name) else f" ({self.decoder})")


@functools.cache
def table() -> tuple:
    lines = FILE.read_text(encoding="utf-8").splitlines()[1:]
    return tuple(Type(*line.split("\t")) for line in lines)


def version(text: str) -> tuple:
    return tuple(int(part) for part in text.split("."))


def is_verified(name: str, decoder: str) -> bool:
    """Whether models of this type have the verdict "equal" or "limited" since a version of Transformers that is not
    newer than the installed one."""
    good = (t for t in table() if (t.name, t.decoder) == (name, decoder) and t.verdict in (EQUAL, LIMITED))
    return any(t.since and version(t.since) <= VERSION for t in good)


def refused(name: str, decoder: str) -> str | None:
    """Return the reason why models of this type are refused; None if they are not refused."""
    return next((t.note for t in table() if (t.name, t.decoder, t.verdict) == (name, decoder, REFUSED)), None)
