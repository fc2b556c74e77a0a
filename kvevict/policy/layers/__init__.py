"""How the budget C = B*L*Hkv is split over layers. One file per idea; the file registers it, and its fields are its
options.

A layer budget gives shares; `layer_slots` rounds them to whole slots by the rules of METHODS section 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..apportion import apportion
from ..checks import PLENTY
from ..inputs import Policy, Slots
from ..registry import Part, Registry, load_folder

LAYERS: Registry = Registry("layer budget")


@LAYERS.add("uniform")
@dataclass(frozen=True)
class LayerBudget(Part):
    """Every layer gets B."""

    needs: ClassVar[tuple[Any, ...]] = ()  # quantities that `preference` gets, as a score's
    measures: ClassVar[bool] = False  # needs the error of every layer, so every layer must score
    beyond: ClassVar[bool] = False  # shares are of the slots beyond the protected ones
    cascades: ClassVar[bool] = False  # splits by `preference`, and cuts layers again as further ones are read
    pools: ClassVar[bool] = False  # one ranking of all layers' slots, by `keep`, once the last layer was read
    residual: ClassVar[str] = "off"  # up to where in a layer the residual stream is compared: "attention", "layer"

    def shares(self, policy: Policy, layers: int, tokens: int, measured: Any = None) -> list[Any]:
        """Return each layer's share, relative to the others', for a row that will have seen `tokens` tokens. measured:
        the layers' mean errors over the row's earlier chunks, if there were any; for a cascade the layers'
        preferences, 0 for a layer that was not read yet."""
        return [1.0] * layers

    def preference(self, slots: Slots, *quantities: Any) -> torch.Tensor:
        """Return a cascade's share of a layer, relative to the others', by a chunk's attention: fp64 [B]."""
        raise NotImplementedError

    def keep(self, layers: list[Slots], scores: list[torch.Tensor], wanted: torch.Tensor) -> Sequence[torch.Tensor]:
        """Split wanted [B] slots over all layers, for a budget that pools: per layer int32 [B, Hkv] slots of its heads.
        layers: `Slots`; scores: the numbers [B, Hkv, C] of each layer."""
        raise NotImplementedError

    def learn(self, contexts: list[Any]) -> None:
        """Learn at the end of a read from the layers' mean errors in each row that was evicted from."""


def layer_slots(
    policy: Policy, layers: int, kv_heads: int, tokens: list[Any], alive: Any = None, measured: Any = None
) -> Any:
    """Count the slots of every evicting layer, summed over its kv heads: int64 [layers, B]. Each row sums to C, or to
    all alive slots.

    tokens     per row, number of tokens it will have seen at the prompt's end
    alive      [layers, B] slots there are now, the most a layer can keep (a CPU tensor or an array); None: no limit
    measured   per row as in `LayerBudget.shares`
    """
    unit = kv_heads if policy.shared else 1  # heads that share one selection have equally many slots
    groups = policy.groups(layers)
    measured = measured or [None] * len(tokens)
    rows = [policy.layers.shares(policy, layers, n, m) for n, m in zip(tokens, measured, strict=True)]
    shares = torch.tensor(rows, dtype=torch.double, device="cpu")  # whatever torch's default is
    given = not any(measured)  # a measured error may be NaN
    if shares.shape[1:] != (layers,) or (given and not bool(((shares >= 0) & shares.isfinite()).all())):
        name = LAYERS.name_or_class(policy.layers)
        raise ValueError(f"layer budget {name} returned the shares {rows[0]}: return {layers} finite numbers >= 0")
    most = torch.full_like(shares, PLENTY * kv_heads, dtype=torch.long)
    most = most if alive is None else torch.as_tensor(alive).T.long()
    shares = torch.stack([shares[:, group].mean(1) for group in groups], 1)
    most = torch.stack([most[:, group].amin(1) for group in groups], 1) // unit
    least = torch.full_like(most, max(policy.protected, 1) * kv_heads // unit)
    total = torch.tensor([policy.slots(n) * layers * kv_heads // unit for n in tokens], device="cpu")
    weight = torch.tensor([len(group) for group in groups], device="cpu")
    own = policy.protected * kv_heads // unit if policy.layers.beyond else 0
    bounds = total - own * layers, least - own, most - own
    slots = unit * (own + apportion(shares, *bounds, None if bool((weight == 1).all()) else weight))
    return slots.T.repeat_interleave(weight, 0)


load_folder(__name__)
