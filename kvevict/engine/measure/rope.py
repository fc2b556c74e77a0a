"""The rotation of queries and keys by their positions (RoPE), as an attention module does it."""

import torch

from ...models import rotary


class Rope:
    """An attention module's rotation. rotates: whether there is one; None: not known, and `rotated` raises
    ValueError."""

    __slots__ = ("_decoder", "_module", "rotates")

    def __init__(self, decoder: torch.nn.Module, module: torch.nn.Module, rotates: bool | None) -> None:
        self._decoder, self._module, self.rotates = decoder, module, rotates

    def rotated(self, x: torch.Tensor, position_from: torch.Tensor, position_to: torch.Tensor) -> torch.Tensor:
        """Rotate x [B, H, p, D] from positions [B] to others [B]; to others [B, n]: the mean over the n rotations."""
        if self.rotates is None:
            raise ValueError(
                "a part that rotates must declare it, so that models are checked: rows with rotates = True, a quantity "
                'with "rope" in its needs'
            )
        if not self.rotates:
            return x
        return rotary.rotate(self._decoder, self._module, x, position_from, position_to)

    def unrotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate x [B, H, T, D] from positions [B, T] back to position 0, in fp32."""
        if not self.rotates:
            return x.float()
        batch, _, rows, _ = x.shape
        each = x.float().transpose(1, 2).flatten(0, 1)[:, :, None]  # [B * T, H, 1, D]
        position = positions.flatten().long()
        rotated = self.rotated(each, position, 0 * position)
        return rotated[:, :, 0].unflatten(0, (batch, rows)).transpose(1, 2)

    def partners(self, width: int, device: torch.device) -> torch.Tensor:
        """int64 [width] the dimension that rotation mixes each of `width` ones with; itself if it is not rotated."""
        own = torch.arange(width, device=device)
        if not self.rotates:
            return own
        none = torch.zeros(1, dtype=torch.long, device=device)
        rotated = self.rotated(torch.eye(width, device=device)[None, None], none, none + 1)[0, 0].abs()
        mixed, partner = rotated.fill_diagonal_(0).max(1)
        return torch.where(mixed > 0, partner, own)
