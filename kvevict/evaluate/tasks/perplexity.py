"""`perplexity`: how well a model predicts what follows a long text. The answer's tokens are scored, none generated."""

from ..haystack import haystack, most, sentences
from . import TASKS, Case

SCORED = 256  # tokens, and up to a sentence more


@TASKS.add("perplexity")
def perplexity(settings):
    """Whole sentences of at most `length` tokens, and as the answer what follows them."""
    return (continuation(settings, i) for i in range(settings.cases))


def continuation(settings, i: int) -> Case:
    text = haystack(settings).passage(settings.rng("perplexity", i), settings.length + SCORED, settings)
    parts = sentences(text)

    def fits(n):
        return n < len(parts) and settings.tokens(" ".join(parts[:n])) <= settings.length

    if not (n := most(fits, len(parts) * settings.length // (settings.length + SCORED))):
        raise ValueError(f"length: {settings.length} tokens are too few for a sentence; give more")
    context, answer = " ".join(parts[:n]), " " + " ".join(parts[n:])
    id, tags = f"perplexity/{settings.length}/{i}", {"length": settings.length}
    return Case("perplexity", id, context, "", (answer,), "perplexity", settings.tokens(answer), tags)
