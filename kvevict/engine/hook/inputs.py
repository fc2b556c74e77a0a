"""The decoder's arguments for one chunk of a call: tensors with a row for each of the chunk's columns, followed by the
rows that are appended to the chunk."""

from typing import Any

import torch

from ...policy.rows import AppendedRows
from .packing import Packing

PER_LAYER = "per_layer_inputs"
PICTURES = "visual_pos_masks"


class Inputs:
    """The decoder's arguments for the new tokens [B, N] of a call.

    ids      token ids [B, N], or None if the call has embeddings
    embeds   embeddings [B, N, E], or None if the call has ids
    more     the other arguments by name. Of per-layer inputs and pictures a chunk gets its part; every other argument
             goes to each chunk unchanged
    """

    def __init__(self, decoder: Any, ids: torch.Tensor | None, embeds: torch.Tensor | None, more: dict) -> None:
        self.decoder, self.ids, self.embeds, self.more = decoder, ids, embeds, more
        self.tokens: torch.Tensor = ids if ids is not None else embeds  # type: ignore[assignment]  # one is given

    def packed(self, packing: Packing) -> "Inputs":
        """Return a copy in which the padding of every batch row is at the left."""
        shape = self.tokens.shape[:2]
        more = {
            name: packing.pack(value) if isinstance(value, torch.Tensor) and value.shape[:2] == shape else value
            for name, value in self.more.items()
        }
        return Inputs(self.decoder, packing.pack(self.ids), packing.pack(self.embeds), more)

    def at(self, columns: torch.Tensor) -> torch.Tensor:
        """The tokens at columns [B, p]: ids [B, p], or embeddings [B, p, E] if the call has embeddings."""
        return _rows(self.tokens, columns)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids [B, p] in the form of the call's tokens: as ids, or as embeddings [B, p, E]."""
        return ids if self.embeds is None else self.decoder.get_input_embeddings()(ids)

    def unsplittable(self) -> str | None:
        """The name of an argument that cannot be cut into chunks; None if all arguments can."""
        for name, value in self.more.items():
            split = name in (PICTURES, PER_LAYER) or not isinstance(value, torch.Tensor)
            if not split and value.ndim > 1 and self.tokens.shape[1] in value.shape:
                return name
        return None

    def chunk(self, start: int, end: int, appended: AppendedRows | None = None, wanted: int = 0) -> dict[str, Any]:
        """The decoder's arguments for columns start .. end - 1, followed by the appended rows.

        wanted   number of the chunk's last rows whose logits the caller will use; 0: all rows
        """
        ids, embeds = (None if t is None else t[:, start:end] for t in (self.ids, self.embeds))
        rows = 0 if appended is None else appended.tokens.shape[1]
        if rows and embeds is None and appended.tokens.is_floating_point():
            ids, embeds = None, self.decoder.get_input_embeddings()(ids)
        if rows:
            ids, embeds = (None if t is None else torch.cat([t, appended.tokens], 1) for t in (ids, embeds))
        inputs: dict[str, Any] = dict(input_ids=ids) if embeds is None else dict(inputs_embeds=embeds)
        if isinstance(self.more.get("logits_to_keep"), int):  # the decoder counts appended rows, too; 0: all rows
            inputs["logits_to_keep"] = wanted and wanted + rows
        inputs |= _per_layer(self.more.get(PER_LAYER), start, end, appended)
        return self.more | inputs | _pictures(self.more, start, end, appended)


def _per_layer(value: Any, start: int, end: int, appended: AppendedRows | None) -> dict:
    """The chunk's part of `value` [B, N, layers, width], the input that every layer of Gemma 3n and 4 gets for each
    token; an empty dict for None."""
    if value is None:
        return {}
    parts = [value[:, start:end]]
    if appended is not None:
        if appended.columns is None:
            raise ValueError(
                f"rows that are not tokens of the prompt have no {PER_LAYER}: choose a policy whose rows are, like "
                "take or snapkv, or call the text model with input_ids"
            )
        parts.append(_rows(value, appended.columns.to(value.device)))
    return {PER_LAYER: torch.cat(parts, 1)}


def _pictures(more: dict, start: int, end: int, appended: AppendedRows | None) -> dict:
    """The chunk's part of the arguments for pictures in `more`. After its first layers Qwen3-VL adds embeddings to the
    hidden states of picture tokens. The arguments for this are a mask [B, N], True for picture tokens, and for each of
    these layers a tensor with a row for each picture token."""
    mask = more.get(PICTURES)
    if mask is None:
        return {}
    row_of = mask.flatten().cumsum(0).view(mask.shape) - 1
    columns = torch.arange(start, end, device=mask.device).expand(len(mask), -1)
    if appended is not None and appended.columns is not None:
        columns = torch.cat([columns, appended.columns], 1)
    mask, row_of = mask.gather(1, columns), row_of.gather(1, columns)
    embeds = [each[row_of[mask]] for each in more["deepstack_visual_embeds"]]
    if appended is not None and appended.columns is None:
        mask = torch.cat([mask, torch.zeros_like(appended.tokens[:, :, 0], dtype=torch.bool)], 1)
    return {PICTURES: mask, "deepstack_visual_embeds": embeds}


def _rows(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Gather x [B, N, ..] at columns [B, p] of each batch row: [B, p, ..]."""
    return x[torch.arange(len(columns), device=x.device)[:, None], columns]
