"""Layer budgets split the slots that a cache keeps, C = B*L*Hkv, over its L layers. The fields of a layer budget are
its options.

A layer budget returns the layers' shares; `layer_slots` turns these into whole numbers of slots (METHODS section 4).
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
BETA = 20  # PyramidKV's beta: the last layer gets 1/20 of the average number of slots


@LAYERS.add("uniform")
@dataclass(frozen=True)
class LayerBudget(Part):
    """Every layer gets B slots per kv head."""

    needs: ClassVar[Needs] = ()  # quantities that `preference` gets, named as in `Score.needs`
    measures: ClassVar[bool] = False  # needs every layer's error, so every layer must compute scores
    beyond: ClassVar[bool] = False  # shares apply to the slots that a layer keeps besides its protected slots
    cascades: ClassVar[bool] = False  # splits by `preference`, and cuts earlier layers again as later ones are read
    pools: ClassVar[bool] = False  # `keep` ranks the slots of all layers together, once the last layer was read
    residual: ClassVar[str] = "off"  # part of a layer around which the residual stream is compared, or "off": `Tada.cd`

    def shares(self, policy: OwnPolicy, layers: int, tokens: int, measured: list[float] | None = None) -> list[float]:
        """Return each layer's share of the slots, in any unit, for a batch row that will have seen `tokens` tokens.
        measured: the layers' mean errors over the row's earlier chunks, or None before there are any; with `cascades`,
        the layers' preferences, 0 for a layer that was not read yet."""
        return [1.0] * layers

    def preference(self, slots: Slots, *quantities: Any) -> torch.Tensor:
        """Return a layer's share in a cascade, in any unit, from the attention of the chunk that was read: fp64 [B]."""
        raise NotImplementedError

    def keep(self, layers: list[Slots], scores: list[torch.Tensor], wanted: torch.Tensor) -> Sequence[torch.Tensor]:
        """Split wanted [B] slots over the heads of all layers, for a layer budget with `pools`. Returns for each layer
        the number of slots that each head keeps, int32 [B, Hkv]. scores: each layer's numbers that rank its slots,
        [B, Hkv, C]."""
        raise NotImplementedError

    def learn(self, contexts: list[list[float]]) -> None:
        """Learn from a read, at its end. contexts: for each batch row that lost slots, the layers' mean errors."""


@LAYERS.add("pyramid")
@dataclass(frozen=True)
class Pyramid(LayerBudget):
    """PyramidKV (Cai et al. 2024): slots decrease arithmetically from the first layer to the last.

    With b = B - protected slots, the last layer gets b // 20 slots besides the protected ones, and the first layer
    2b - b // 20 if the prompt has that many. Prompts shorter than 2b tokens are split uniformly. The source truncates
    the difference between neighbouring layers to a whole number and so keeps somewhat more than b per layer; here the
    sum over layers is exact.
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
    """CAKE (Qin et al. 2025): unprotected slots in proportion to P = H * V; earlier layers are cut again as later ones
    are read.

    With a the attention of the observing rows to the slots that are not protected, in the chunk being read, H is the
    entropy -sum a ln a over query heads, rows and slots, and V is the sum over query heads and slots of the sample
    variance of a over rows. A batch row from which nothing was evicted yet has no measurement and is split uniformly.
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
    """One ranking of all slots of all layers and heads: the best B*L*Hkv slots stay (KVzip's non-uniform budget).

    least   number of slots that every head keeps besides its protected ones, if the budget is large enough

    All layers are cut once the chunk's last layer was read, so the peak memory is the budget and one chunk in every
    layer.
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

    task   name of the task, whose history `kvevict.history(task)` is used and extended
    cd     part of a layer that the error measures: "attention" or "layer" (attention and MLP); "off": the error is the
           sum of scores alone
    own    True: a prompt that is read in chunks is split by the errors of its own earlier chunks, once there are any,
           and not by the errors of earlier contexts

    A layer's error is the sum of the scores of its unprotected slots, times the mean of 1 - cos(R, R + O) over the
    observing rows, where R is the residual stream that enters the layer and O is what the layer (see `cd`) adds to it.
    The first context of a task is split uniformly or, if it is read in chunks, by its own earlier chunks. Every batch
    row that loses slots is a context, whose errors are means over its chunks; the next batch uses them.
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
    """Return the number of slots that every evicting layer keeps, summed over its kv heads: int64 [layers, B]. The sum
    over layers is C for each batch row, or the number of all its alive slots if that is smaller.

    tokens     for each batch row, the number of tokens that it will have seen at the prompt's end
    alive      [layers, B] slots that each layer has now and cannot exceed, on the host; None: no limit
    measured   for each batch row, the argument of `LayerBudget.shares`
    """
    unit = kv_heads if policy.shared else 1  # heads that share one selection keep equally many slots
    groups = policy.groups(layers)
    measured = measured or [None] * len(tokens)
    rows = [policy.layers.shares(policy, layers, n, m) for n, m in zip(tokens, measured, strict=True)]
    shares = torch.tensor(rows, dtype=torch.double, device="cpu")  # torch's default device may be a GPU
    given = not any(measured)  # measured shares are not checked: errors may be NaN
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
    # repeat_interleave would start torch's threads, which a busy machine delays by milliseconds.
    return slots.T[[at for at, group in enumerate(groups) for _ in group]]
