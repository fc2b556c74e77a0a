"""Makes the training data of gates: pieces of texts, and KVzip's scores of the pieces' tokens (METHODS section 9)."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ...asking.prompts import Tokenizer
from ...models import families
from ...store.files import decoded
from ..targets import numbers

SKIP = 4  # number of first tokens that are left out: always kept, and with hidden states unlike other tokens'
FLOOR = 1e-6  # smallest score: smaller scores are raised to it before the logarithm is taken


def pieces(
    texts: str | Path | Iterable[object], tokenizer: Tokenizer | None, length: int, limit: int, vocabulary: int
) -> list[torch.Tensor]:
    """Cut each text into equal pieces of at most `length` tokens; each piece begins with the token that the tokenizer
    puts before a text. Returns the ids of some pieces, spread evenly over all pieces, with at most `limit` tokens
    together (or one piece). texts: a file's path, or an iterable of texts or of 1-D token ids. vocabulary: number of
    the model's token ids. Raises ValueError for texts that cannot be trained on."""
    if isinstance(texts, Path) or (isinstance(texts, str) and os.path.isfile(texts)):
        texts = [decoded(Path(texts).read_bytes(), texts)]
    elif isinstance(texts, str):
        raise ValueError("texts must be a file's path, or a list of texts or of token ids: give [text] for one text")
    found = []
    for number, text in enumerate(texts, 1):
        ids, first = _ids(number, text, tokenizer, vocabulary), _first(text, tokenizer)
        room = length - len(first)
        parts = ids.tensor_split(-(-len(ids) // room)) if len(ids) else ()
        found += [torch.cat([first, part]) for part in parts if len(first) + len(part) > SKIP + 1]
    if not found:
        raise ValueError(f"texts hold no piece of more than {SKIP + 1} tokens; give longer ones, better 10,000 tokens")
    most = max(1, limit // max(map(len, found)))
    return [found[i * len(found) // most] for i in range(most)] if most < len(found) else found


def _ids(number: int, text: Any, tokenizer: Tokenizer | None, vocabulary: int) -> torch.Tensor:
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError(f"text {number} is not token ids; give a tokenizer, or token ids")
        text = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    ids = torch.as_tensor(text)
    if ids.ndim != 1 or (len(ids) and (ids.is_floating_point() or ids.dtype == torch.bool)):
        raise ValueError(f"text {number} must be a text or 1-D token ids, got {ids.dtype} {list(ids.shape)}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(f"text {number}: its ids must be below {vocabulary}, the model's vocabulary, and not negative")
    return ids.long()


def _first(text: object, tokenizer: Tokenizer | None) -> torch.Tensor:
    """Return the token that the tokenizer puts before a text, as ids [1], or ids [0] if there is no such token."""
    first = getattr(tokenizer, "bos_token_id", None) if isinstance(text, str) else None
    if first is not None and tokenizer("a")["input_ids"][:1] != [first]:
        first = None
    return torch.tensor([] if first is None else [first], dtype=torch.long)


def each_layer(
    model: torch.nn.Module, label: str, ids: torch.Tensor, take: Callable[[int, torch.Tensor, torch.Tensor], None]
) -> None:
    """Read a piece of text, and then the same piece again after it. Calls take(layer, x [T, E], y [T, heads] fp32) for
    every evicting layer, about the piece's T tokens after the first `SKIP`: x are the inputs of the layer's attention
    block, y the logarithms of the scores in the layer's kv heads."""
    decoder = families.find_decoder(model)
    inputs: dict = {}

    def note(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        inputs[module.layer_idx] = args[0] if args else kwargs["hidden_states"]

    own = families.attentions(decoder, families.evicting(decoder.config))
    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in own]

    def pair(index: int, score: torch.Tensor) -> None:
        take(index, inputs.pop(index)[0, SKIP : len(ids)], score[:, SKIP:].T.clamp_min(FLOOR).log())

    try:
        numbers(model, label, ids, pair)
    finally:
        for hook in hooks:
            hook.remove()
