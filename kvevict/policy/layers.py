"""How the budget C = B*L*Hkv is split over layers. The fields of a layer budget are its options.

A layer budget gives shares; `layer_slots` rounds them to whole slots by the rules of METHODS section 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from .apportion import apportion
from .checks import PLENTY, count, flag, one_of
from .heads import LOWEST, best, order, winners
from .history import history
from .inputs import Needs, OwnPolicy, Slots, need
from .registry import Part, Registry

LAYERS: Registry = Registry("layer budget")
BETA = 20  # PyramidKV's: the last layer gets 1/20 of the average


@LAYERS.add("uniform")
@dataclass(frozen=True)
class LayerBudget(Part):
    """Every layer gets B."""

    needs: ClassVar[Needs] = ()  # quantities that `preference` gets, as a score's `needs`
    measures: ClassVar[bool] = False  # needs the error of every layer, so every layer must score
    beyond: ClassVar[bool] = False  # shares are of the slots beyond the protected ones
    cascades: ClassVar[bool] = False  # splits by `preference`, and cuts layers again as further ones are read
    pools: ClassVar[bool] = False  # one ranking of all layers' slots, by `keep`, once the last layer was read
    residual: ClassVar[str] = "off"  # up to where in a layer the residual stream is compared: "attention", "layer"

    def shares(self, policy: OwnPolicy, layers: int, tokens: int, measured: list[float] | None = None) -> list[float]:
        """Return each layer's share, relative to the others', for a row that will have seen `tokens` tokens. measured:
        the layers' mean errors over the row's earlier chunks, if there were any; for a cascade the layers'
        preferences, 0 for a layer that was not read yet."""
        return [1.0] * layers

    def preference(self, slots: Slots, *quantities: Any) -> torch.Tensor:
        """Return a layer's share in a cascade, relative to the others', by a chunk's attention: fp64 [B]."""
        raise NotImplementedError

    def keep(self, layers: list[Slots], scores: list[torch.Tensor], wanted: torch.Tensor) -> Sequence[torch.Tensor]:
        """Split wanted [B] slots over all layers, for a budget that pools: each layer's slots per head, int32 [B, Hkv].
        scores: the numbers [B, Hkv, C] of each layer."""
        raise NotImplementedError

    def learn(self, contexts: list[list[float]]) -> None:
        """Learn at the end of a read from the layers' mean errors in each row that was evicted from."""


@LAYERS.add("pyramid")
@dataclass(frozen=True)
class Pyramid(LayerBudget):
    """PyramidKV (Cai et al. 2024): slots decrease arithmetically from the first layer to the last.

    With b = B - protected slots, the last layer gets b // 20 of these and the first 2b - b // 20, or as many as there
    are. Prompts shorter than 2b tokens are split uniformly. The source truncates the step to a whole number and so
    keeps somewhat more than b per layer; here the layers' sum is exact.
    """

    def shares(self, policy: OwnPolicy, layers: int, tokens: int, measured: list[float] | None = None) -> list[float]:
        protected = policy.protected
        mean = policy.slots(tokens) - protected
        if tokens < 2 * mean or layers == 1:
            return [1.0] * layers
        most = min(2 * mean - mean // BETA, tokens - protected)
        least = 2 * mean - most
        return [protected + most - layer * (most - least) / (layers - 1) for layer in range(layers)]


@LAYERS.add("cake")
@dataclass(frozen=True)
class CakeBudget(LayerBudget):
    """CAKE (Qin et al. 2025): slots beyond the window in proportion to P = H * V, in a cascade.

    a is the attention of the score's window to the slots that are not protected, in the chunk being read. H is
    -sum a ln a over query heads, rows and slots; V is the sum over query heads and slots of the sample variance over
    rows. A batch row from which nothing was evicted yet has no measurement and splits uniformly.
    """

    beyond: ClassVar[bool] = True
    cascades: ClassVar[bool] = True
    needs: ClassVar[Needs] = (need("attention", reduce="sum", group="sum", term="entropy"), "moments")

    def shares(self, policy: OwnPolicy, layers: int, tokens: int, measured: list[float] | None = None) -> list[float]:
        return measured or [1.0] * layers

    def preference(
        self, slots: Slots, entropy: torch.Tensor, moments: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        protected = ~slots.competing
        entropy = entropy.masked_fill(protected, 0)
        variance = moments[1].unflatten(1, (protected.shape[1], -1)).masked_fill(protected[:, :, None], 0)
        spread = slots.heads.sum(entropy.double().sum((1, 2))).clamp_min(0)
        shift = slots.heads.sum(variance.double().sum((1, 2, 3)))
        return spread * shift


@LAYERS.add("pool")
@dataclass(frozen=True)
class PoolBudget(LayerBudget):
    """One ranking of all slots of all layers and heads: the best C stay (KVzip's non-uniform budget).

    least   slots that every head keeps besides its protected ones, where the budget has that many

    Layers are cut when a chunk's last one was read: the peak is the budget and one chunk in every layer.
    """

    least: int = 4
    pools: ClassVar[bool] = True

    def check(self, policy: OwnPolicy) -> None:
        count("least", self.least, 0)

    def keep(self, layers: list[Slots], scores: list[torch.Tensor], wanted: torch.Tensor) -> Sequence[torch.Tensor]:
        heads = [slots.n.shape[1] for slots in layers]
        columns, device = max(slots.columns for slots in layers), wanted.device
        keys = wanted.new_full((len(wanted), sum(heads), columns), LOWEST, dtype=torch.int64)
        for number, (slots, score) in enumerate(zip(layers, scores, strict=True)):
            first = sum(heads[:number])
            key = order(slots, score, first=first, heads=sum(heads))
            keys[:, first : first + heads[number], : key.shape[-1]] = key.to(device)
        protected = torch.cat([slots.least.to(device) for slots in layers], 1)
        wanted = wanted - protected.sum(1)
        mine = best(keys, (wanted // sum(heads)).clamp(0, self.least)) & (keys > LOWEST)
        keep = protected + winners(keys.masked_fill(mine, -LOWEST - 1), wanted)
        return keep.to(torch.int32).split(heads, 1)


@LAYERS.add("tada")
@dataclass(frozen=True)
class Tada(LayerBudget):
    """TADA (EDIE, eq. 12-18): slots in proportion to the layers' mean error over earlier contexts of the same task.

    task   names the history that is read and added to: `kvevict.history(task)`
    cd     the residual stream is compared after this part of a layer: "attention", "layer", or "off": not at all
    own    True: a prompt read chunk by chunk is split by its earlier chunks as soon as there are any, and not by
           earlier contexts

    A layer's error is the sum of its scores outside the window times the mean over the observing rows of
    1 - cos(R, R + O): how far the layer rotates the residual stream. The first context of a task has uniform layers
    or, read chunk by chunk, is split by its earlier chunks. Every batch row that loses slots is a context: the mean
    over its chunks. The next batch uses it.
    """

    task: str = "default"
    cd: str = "attention"
    own: bool = False
    measures: ClassVar[bool] = True

    @property
    def residual(self) -> str:
        return self.cd

    def check(self, policy: OwnPolicy) -> None:
        if not isinstance(self.task, str) or not self.task:
            raise TypeError(f"task must be the name of a task, got {self.task!r}")
        one_of("cd", self.cd, ("attention", "layer", "off"))
        flag("own", self.own)

    def shares(self, policy: OwnPolicy, layers: int, tokens: int, measured: list[float] | None = None) -> list[float]:
        past = history(self.task)
        if past.contexts and len(past.errors) != layers:
            raise ValueError(
                f"the history of task {self.task!r} is of a model with {len(past.errors)} layers, not {layers}: give "
                "another task=, or reset it with kvevict.history(task).reset()"
            )
        if measured and (self.own or not past.contexts):
            return measured
        return past.errors or [1.0] * layers

    def learn(self, contexts: list[list[float]]) -> None:
        history(self.task).add(contexts)


def layer_slots(
    policy: OwnPolicy, layers: int, kv_heads: int, tokens: list[int], alive: torch.Tensor | np.ndarray | None = None,
    measured: list[list[float] | None] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Count the slots of every evicting layer, summed over its kv heads: int64 [layers, B]. Each row's layers sum to C,
    or to all alive slots.

    tokens     per row, number of tokens it will have seen at the prompt's end
    alive      [layers, B] slots there are now, the most a layer can keep, on the host; None: no limit
    measured   per row as in `LayerBudget.shares`
    """
    unit = kv_heads if policy.shared else 1  # heads that share one selection have equally many slots
    groups = policy.groups(layers)
    measured = measured or [None] * len(tokens)
    rows = [policy.layers.shares(policy, layers, n, m) for n, m in zip(tokens, measured, strict=True)]
    shares = torch.tensor(rows, dtype=torch.double, device="cpu")  # torch's default device may be another
    given = not any(measured)  # measured errors may be NaN
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
