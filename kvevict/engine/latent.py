"""Latent attention (MLA): a layer whose slots are latents that all its heads share, from which its module makes every
head's keys and values. What is stored is the latent and the rotated part of the key; what attention and scores read is
made of the stored slots for one call. So a layer has one kv head to choose for, whose group is all query heads."""

import copy
from dataclasses import dataclass

import numpy as np
import torch

from .. import _ops
from .cache import EvictionLayer, fit


@dataclass
class Expanded:
    """Slots of a layer with keys and values for every head, as the ops read them: H heads instead of one."""

    k: torch.Tensor  # [H * n, D], and v; rows of head (b, h) are offset[b, h] .. offset[b, h] + len[b, h] - 1
    v: torch.Tensor
    pos: torch.Tensor  # [H * n]
    offset: torch.Tensor  # [B, H]
    len: torch.Tensor  # [B, H]
    counts: np.ndarray  # len on the host

    device = property(lambda self: self.k.device)

    def longest(self) -> int:
        return int(self.counts.max()) if self.counts.size else 0

    def segments(self):
        """(b, h, slice of the flat buffers) of every head's slots."""
        for b, row in enumerate(self.offset.tolist()):
            for h, start in enumerate(row):
                yield b, h, slice(start, start + int(self.counts[b, h]))


class LatentLayer(EvictionLayer):
    """`k` and `v` [rows, W] are the two halves of latent, rotated part and zeros up to a multiple of 16."""

    widths: tuple = ()  # (of the latent, of the rotated part)

    def fork(self):
        return copy.deepcopy(self)

    def update(self, latent, rotated, *args, **kwargs):
        """Note the new latents [B, 1, S, r] and rotated parts [B, 1, S, p] and hand them back."""
        self.widths = latent.shape[-1], rotated.shape[-1]
        return super().update(latent, rotated)

    def pack(self, latent, rotated):
        """The halves [B, 1, S, W] that are stored."""
        self.widths = latent.shape[-1], rotated.shape[-1]
        both = torch.cat([latent, rotated], -1)
        width = -(-both.shape[-1] // 16) * 8
        return torch.nn.functional.pad(both, (0, 2 * width - both.shape[-1])).split(width, -1)

    def take(self, module, key, value):
        pending, self.pending_kv = self.pending_kv, None
        if pending is None:
            raise RuntimeError(f"{type(module).__name__} attended to keys that were not given to the cache")
        return self.pack(*pending)

    def slots(self, module) -> Expanded:
        """The stored slots with every head's keys and values."""
        rows = torch.cat([torch.arange(s.start, s.stop, device=self.device) for _, _, s in self.segments()])
        both = torch.cat([self.k[rows], self.v[rows]], -1)[None, None, :, : sum(self.widths)]
        if not len(rows):  # which modules do not expand
            both = both.new_zeros(1, 1, 1, both.shape[3])
        key, value = module.expand_kv(*both.split(self.widths, -1))  # [1, H, n, D]
        key, value = (x.to(self.k.dtype) for x in fit(key, value))
        heads = torch.arange(key.shape[1], device=self.device)
        start = self.len[:, 0].cumsum(0) - self.len[:, 0]
        return Expanded(
            key.reshape(-1, key.shape[-1]), value.reshape(-1, value.shape[-1]), self.pos[rows].repeat(len(heads)),
            start[:, None].long() + heads * both.shape[2], self.len.expand(-1, len(heads)).contiguous(),
            self.counts.repeat(len(heads), 1),
        )  # fmt: skip

    def decode(self, q, k, v, pos, module, columns=0, **options):
        none = torch.zeros(len(q), dtype=torch.int32, device=q.device)
        self.append(k, v, pos, none, 0 * self.counts[:, 0])
        slots = self.slots(module)
        where, no_rows = (slots.offset, slots.len), q[:, :, :0]
        out, lse = _ops.attend(q, slots.k, slots.v, *where, no_rows, no_rows, none, stop=none, **options)
        if not columns:
            return out, lse, None
        probs = _ops.score(
            q, none, slots.k, *where, no_rows, none, none, lse=lse, causal=False, reduce="sum", group="none",
            columns=columns, **options,
        )  # fmt: skip
        return out, lse, probs.mean(1, keepdim=True)

    keys = property(lambda self: self._dense(0))
    values = property(lambda self: self._dense(1))

    def _dense(self, part):
        """Copy [B, 1, longest, r or p] of the latents or the rotated parts."""
        if not self.is_initialized:
            return None
        both = torch.cat([self.storage.dense("k"), self.storage.dense("v")], -1)
        return both[..., : sum(self.widths)].split(self.widths, -1)[part]
