from dataclasses import dataclass

from . import SELECTIONS, Selection


@SELECTIONS.add("token")
@dataclass(frozen=True)
class Token(Selection):
    """The best slots per kv head."""
