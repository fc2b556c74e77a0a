"""Rotation of queries and keys by their positions (RoPE), as the model's attention modules do it."""

import torch

from ...models import rotary


class Rope:
    """The rotation of an attention module's queries and keys. rotates: whether the module rotates them; None: that was
    not tested, and `rotated` raises ValueError."""

    __slots__ = ("_decoder", "_module", "rotates")

    def __init__(self, decoder: torch.nn.Module, module: torch.nn.Module, rotates: bool | None) -> None:
        self._decoder, self._module, self.rotates = decoder, module, rotates

    def rotated(self, x: torch.Tensor, position_from: torch.Tensor, position_to: torch.Tensor) -> torch.Tensor:
        """Rotate x [B, H, p, D] from position_from [B] to position_to [B]. With position_to [B, n] the result is the
        mean over the n rotations."""
        if self.rotates is None:
            raise ValueError(
                "a part that rotates must declare it, so that models are checked: rows with rotates = True, a quantity "
                'with "rope" in its needs'
            )
        if not self.rotates:
            return x
        return rotary.rotate(self._decoder, self._module, x, position_from, position_to)

    def factors(
        self, width: int, position_from: torch.Tensor, position_to: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Return (cos, sin, partner) of the rotation of vectors with `width` numbers from position_from [B] to
        position_to [B]: number d becomes x[d] cos[b, d] + x[partner[d]] sin[b, d]. cos, sin: fp32 [B, width]; partner:
        int32 [width]. None: the module does not rotate."""
        device = position_from.device
        unit = torch.eye(width, dtype=torch.float32, device=device)
        rows = unit.expand(len(position_from), 1, -1, -1)
        turned = self.rotated(rows, position_from, position_to)[:, 0]  # [B, width, width]: row i is unit vector i
        if not self.rotates:
            return None
        others = turned * (1 - unit)
        partner = others.abs().amax(0).argmax(0)
        column = torch.arange(width, device=device)
        cos, sin = turned[:, column, column], others[:, partner, column]
        return cos.contiguous(), sin.contiguous(), partner.int()

    def unrotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate x [B, H, T, D] back from positions [B, T] to position 0, in fp32."""
        if not self.rotates:
            return x.float()
        batch, _, rows, _ = x.shape
        each = x.float().transpose(1, 2).flatten(0, 1)[:, :, None]  # [B * T, H, 1, D]
        position = positions.flatten().long()
        rotated = self.rotated(each, position, 0 * position)
        return rotated[:, :, 0].unflatten(0, (batch, rows)).transpose(1, 2)

    def partners(self, width: int, device: torch.device) -> torch.Tensor:
        """For each of `width` dimensions, the index of the dimension that rotation pairs it with, int64 [width]; its
        own index if it is not rotated."""
        own = torch.arange(width, device=device)
        if not self.rotates:
            return own
        none = torch.zeros(1, dtype=torch.long, device=device)
        rotated = self.rotated(torch.eye(width, device=device)[None, None], none, none + 1)[0, 0].abs()
        mixed, partner = rotated.fill_diagonal_(0).max(1)
        return torch.where(mixed > 0, partner, own)
