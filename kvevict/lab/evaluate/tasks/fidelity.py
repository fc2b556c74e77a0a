"""`fidelity`: how near a policy's next-token distributions stay to the full cache's, on a response that the full cache
writes. No right answers are needed, so any text will do: the haystack's here, in `fidelity/NAME` the prompts of NAME.
"""

from collections.abc import Iterator

from ..haystack import haystack
from . import FIDELITY, RESPONSE, TASKS, Case, Settings


@TASKS.add(FIDELITY)
def fidelity(settings: Settings) -> Iterator[Case]:
    """Passages of at most `length` tokens, which the model continues."""
    for i in range(settings.cases):
        text = haystack(settings).passage(settings.rng(FIDELITY, i), settings.length, settings)
        id, tags = f"{FIDELITY}/{settings.length}/{i}", {"length": settings.length, "chat": False}
        yield Case(FIDELITY, id, text, "", (), FIDELITY, RESPONSE, tags)
