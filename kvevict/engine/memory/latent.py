"""Multi-head latent attention (MLA): the slots of a layer are latents that all its heads share.

A slot stores the latent and the rotated part of the key. Attention and scores read keys and values that the module
expands from the stored latents for one call. The layer has one kv head for eviction, with all query heads as its group.

A decoded token attends to the latents c themselves. Let q be its query, p its attention weights, and W_k, W_v the
up-projections of latents to keys and values: q . (W_k c) = (W_k^T q) . c, and sum(p W_v c) = W_v sum(p c) (DeepSeek-V2,
arXiv 2405.04434, section 2.1.2). So each up-projection is multiplied once per token instead of once per slot.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ...ops import _ops
from .layer import EvictionLayer, fit
from .storage import Decoded, Storage
from .stored import Later, Stored


def up_projection(module: Any) -> tuple[Tensor, Tensor] | None:
    """Return a module's up-projections of latents of r numbers, in fp32: [H, nope, r] to keys, without the rotated
    part, and [H, v, r] to values. None if the projection is not a plain matrix product: it is quantised, adapted or
    hooked, or has a bias."""
    made = module.kv_b_proj
    plain = type(made) is torch.nn.Linear and type(made.weight) is torch.nn.Parameter and made.bias is None
    if not plain or made._forward_hooks or made._forward_pre_hooks or "forward" in vars(made):
        return None
    sizes = module.qk_nope_head_dim, module.v_head_dim
    of_keys, of_values = made.weight.detach().unflatten(0, (-1, sum(sizes))).float().split(sizes, 1)
    return of_keys, of_values


class LatentLayer(EvictionLayer):
    """A layer that stores latents: its buffers `k` and `v` [rows, W] hold the first and the second half of [latent |
    rotated part of the key | zeros up to a multiple of 16 numbers]."""

    widths: tuple = ()  # (r, p): numbers in a latent, and in the rotated part of a key
    decodes_after_prefix = False

    def pack(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]  # the base's is static
        """Pack latents [B, 1, S, r] and rotated parts of keys [B, 1, S, p] into two stored halves [B, 1, S, W]."""
        self.widths = latent.shape[-1], rotated.shape[-1]
        both = torch.cat([latent, rotated], -1)
        width = -(-both.shape[-1] // 16) * 8
        return pad(both, (0, 2 * width - both.shape[-1])).split(width, -1)

    def take(self, module: torch.nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        pending, self.pending_kv = self.pending_kv, None
        if pending is None:
            raise RuntimeError(f"{type(module).__name__} attended to keys that were not given to the cache")
        return self.pack(*pending)

    def held(self, module: torch.nn.Module) -> Later:
        """Return the slots as keys and values of every head. They are expanded from the latents at first use, since
        most decoded tokens do not use them."""
        storage = self.storage.gathered()
        return Later(functools.cache(lambda: self.expanded(storage, module)))

    def expanded(self, storage: Storage, module: Any) -> Stored:
        """Expand the latents of a storage into keys and values of every head."""
        rows = torch.cat([torch.arange(s.start, s.stop, device=storage.device) for _, _, s in storage.segments()])
        both = torch.cat([storage.k[rows], storage.v[rows]], -1)[None, None, :, : sum(self.widths)]
        if not len(rows):  # modules do not expand empty tensors
            both = both.new_zeros(1, 1, 1, both.shape[3])
        key, value = module.expand_kv(*both.split(self.widths, -1))  # [1, H, n, D]
        key, value = (x.to(storage.k.dtype) for x in fit(key, value))
        heads = key.shape[1]
        starts = storage.counts.cumsum(0) - storage.counts + np.arange(heads) * both.shape[2]
        return Stored(
            key.reshape(-1, key.shape[-1]), value.reshape(-1, value.shape[-1]), storage.pos[rows].repeat(heads),
            _ops.upload(starts, storage.device), storage.len.expand(-1, heads).contiguous(),
            counts=storage.counts.repeat(heads, 1), starts=starts, like=key[0, 0, :0],
        )  # fmt: skip

    def decode(  # type: ignore[override]  # needs the module, to expand latents
        self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, module: torch.nn.Module, columns: int = 0, **options: Any
    ) -> Decoded:
        stored = self.storage
        at = (stored.offset + stored.before.len).flatten()  # buffer rows of the decoded token's slots
        stored.k[at], stored.v[at] = k.flatten(0, 2).to(stored.k.dtype), v.flatten(0, 2).to(stored.v.dtype)
        stored.pos[at] = pos.expand(-1, stored.len.shape[1]).flatten()
        weights = up_projection(module)
        if weights is not None:
            return self._absorbed(*weights, q, columns, **options)
        slots: Any = self.held(module)
        none, no_rows = torch.zeros(len(q), dtype=torch.int32, device=q.device), q[:, :, :0]
        out, lse = _ops.attend(q, slots, no_rows, no_rows, none, stop=none, **options)
        if not columns:
            return out, lse, None
        probs = _ops.score(
            q, none, slots, no_rows, none, none, lse=lse, causal=False, reduce="sum", group="none", columns=columns,
            **options,
        )  # fmt: skip
        return out, lse, probs.mean(1, keepdim=True)

    @torch.no_grad()
    def _absorbed(
        self, of_keys: Tensor, of_values: Tensor, q: Tensor, columns: int, *, scale: float, softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Decoded:  # fmt: skip
        """Compute `decode` over the latents, in fp32. of_keys [H, nope, r] and of_values [H, v, r]: the up-projections;
        q [B, H, 1, D]: the query's unrotated part (nope numbers), its rotated part, and zeros up to D."""
        nope, (latent, rotated), width = of_keys.shape[1], self.widths, self.k.shape[1]
        rows = q[:, :, 0].float()
        absorbed = torch.einsum("bhn,hnr->bhr", rows[..., :nope], of_keys)
        rows = torch.cat([absorbed, rows[..., nope : nope + rotated]], -1)
        halves = pad(rows, (0, 2 * width - latent - rotated)).mul_(scale).split(width, -1)
        sink = rows.new_full((len(rows[0]), 1), -torch.inf) if sinks is None else sinks[:, None]
        sums, lse, probs = torch.empty_like(rows[..., :latent]), rows.new_empty(rows.shape[:2]), None
        if columns:
            probs = rows.new_zeros(len(q), 1, columns)
        for b, _, slots in self.segments():
            stored = self.k[slots].float(), self.v[slots].float()
            products = halves[0][b] @ stored[0].mT + halves[1][b] @ stored[1].mT
            logits = _ops.softcapped(products, softcap)
            lse[b] = torch.cat([logits, sink], -1).logsumexp(-1)
            weights = torch.exp(logits - lse[b, :, None])
            sums[b] = torch.cat([weights @ part for part in stored], -1)[:, :latent]
            if probs is not None:
                probs[b, 0, : weights.shape[1]] = weights.mean(0)
        out = torch.einsum("bhr,hvr->bhv", sums, of_values)
        return pad(out, (0, q.shape[-1] - out.shape[-1]))[:, None].to(q.dtype), lse[..., None], probs

    keys = property(lambda self: self._dense(0))
    values = property(lambda self: self._dense(1))

    def _dense(self, part: int) -> Tensor | None:
        """Copy the latents [B, 1, longest, r] (part=0), or the keys' rotated parts [B, 1, longest, p] (part=1)."""
        if not self.is_initialized:
            return None
        both = torch.cat([self.storage.dense("k"), self.storage.dense("v")], -1)
        return both[..., : sum(self.widths)].split(self.widths, -1)[part]
