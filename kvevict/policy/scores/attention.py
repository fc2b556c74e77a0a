"""Scores computed from the attention of the observing rows. The methods differ in their rows, in how they reduce the
attention over rows and heads, and in how they pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..checks import at_least_0, flag, one_of
from ..inputs import LayerRows, Needs, OwnPolicy, Slots, need
from ..rows.drafted import Drafted, Given
from ..rows.lookahead import Lookahead
from ..rows.probe import Probe
from ..rows.window import All, Last, Window
from . import SCORES, Attention, Pooled, Score

GAMMA = 200.0  # CAKE's gamma, the weight of the variance
MIX = 0.1  # R-KV's lambda, the weight of the importance; the redundancy has the weight 1 - lambda


@SCORES.add("snapkv")
@dataclass(frozen=True)
class SnapKV(Attention):
    """SnapKV (Li et al. 2024): attention of the last `window` rows, pooled; the window's slots are kept."""

    reduce: str = "sum"

    def check(self, policy: OwnPolicy) -> None:
        super().check(policy)
        one_of("reduce", self.reduce, ("sum", "mean", "max"))


@SCORES.add("products")
@dataclass(frozen=True)
class Products(Pooled):
    """ChunkKV's scores as its algorithms print them: q k of the last rows' queries and a slot's key, neither scaled nor
    put through a softmax, summed over rows; the mean over the query heads of a group."""

    pool: str = "none"
    ordinal: ClassVar[bool] = True
    needs: ClassVar[Needs] = ("products",)


@SCORES.add("paasvn")
@dataclass(frozen=True)
class PAASVN(Attention):
    """PAASVN (the EDIE paper's baseline, eq. 4): SnapKV's attention sums times the 1-norm of the value, pooled."""

    factors: ClassVar[tuple[str, ...]] = ("value_norm",)


@SCORES.add("take")
@dataclass(frozen=True)
class Take(Attention):
    """TAKE (eq. 10-13): mean attention of the prompt's last tokens, the probe, which is appended to every chunk.

    per_query   True: nothing is averaged over the query heads of a group, as in the paper: each query head ranks the
                slots, and a slot's score is the best of its ranks. With a budget of b slots times the query heads of a
                group, a kv head has the best b slots of each of them
    """

    pool: str = "avg"
    per_query: bool = False
    reduce: ClassVar[str] = "mean"
    rows: ClassVar = Probe()

    @property
    def per_query_head(self) -> bool:
        return self.per_query

    ordinal = per_query_head

    @property
    def needs(self) -> Needs:
        return (need("attention", reduce=self.reduce, group="none" if self.per_query else self.group),)

    def check(self, policy: OwnPolicy) -> None:
        super().check(policy)
        flag("per_query", self.per_query)

    def plain(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        return sum(_heads(slots, score)) if self.per_query else score  # type: ignore[return-value]

    def pooled(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        if not self.per_query:
            return super().pooled(slots, score)
        pooled = [Attention.pooled(self, slots, head) for head in _heads(slots, score)]
        ranks = [x.masked_fill(~slots.competing, -torch.inf).sort(dim=-1, descending=True, stable=True) for x in pooled]
        return -torch.stack([rank.indices.argsort(dim=-1) for rank in ranks]).amin(0).float()


@SCORES.add("oracle")
@dataclass(frozen=True)
class Oracle(Attention):
    """The true response's attention to the prompt (LookaheadKV eq. 2): a reference, since it needs the response."""

    reduce: ClassVar[str] = "mean"
    rows: ClassVar = Given()


@SCORES.add("lookahead")
@dataclass(frozen=True)
class LookaheadKV(Attention):
    """LookaheadKV (eq. 4, algorithm 2): mean attention of learned rows after the prompt; no slot is protected."""

    reduce: ClassVar[str] = "mean"
    rows: ClassVar = Lookahead()


@SCORES.add("laq")
@dataclass(frozen=True)
class Laq(Attention):
    """Lookahead Q-Cache (Wang et al. 2025): tokens drafted over a copy of the cache, cut by SnapKV, score the prompt.

    Drafting needs the whole prompt first, so a chunk_size bounds the memory of activations but not the cache.
    """

    rows: ClassVar = Drafted()


@SCORES.add("speckv")
@dataclass(frozen=True)
class SpecKV(Attention):
    """SpecKV (Galim et al. 2025): a smaller model's draft after every chunk, and the prompt's last rows, observe."""

    reduce: ClassVar[str] = "max"
    group: ClassVar[str] = "max"
    rows: ClassVar = Drafted(draft_model=None)


@SCORES.add("fastkv")
@dataclass(frozen=True)
class FastKV(Attention):
    """FastKV (Jo et al. 2025): attention of the last 8 rows, pooled per query head before the group is summed.

    FastKV's token-selective propagation is set by the policy's options `tsp` and `tsp_len`.
    """

    rows: ClassVar = Window(8)
    per_query_head: ClassVar[bool] = True

    @property
    def needs(self) -> Needs:
        return (need("attention", reduce=self.reduce, group="none"),)

    def plain(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        return sum(_heads(slots, score))  # type: ignore[return-value]

    def pooled(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        return sum(Attention.pooled(self, slots, head) for head in _heads(slots, score))  # type: ignore[return-value]


def _heads(slots: Slots, score: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split scores [B, H, C] of query heads into one tensor [B, Hkv, C] for each place in a group: the first query head
    of every kv head, the second, and so on."""
    return score.unflatten(1, (slots.n.shape[1], -1)).unbind(2)


@SCORES.add("cake")
@dataclass(frozen=True)
class Cake(Pooled):
    """CAKE (Qin et al. 2025): the mean of the attention over observing rows plus 200 times its variance over rows, for
    each query head, then averaged over the group; average pooling."""

    kernel: int = 5
    pool: str = "avg"
    needs: ClassVar[Needs] = ("moments",)

    def score(self, slots: Slots, moments: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        mean, variance = moments
        return (mean + GAMMA * variance).unflatten(1, (slots.n.shape[1], -1)).mean(2)


@SCORES.add("rkv")
@dataclass(frozen=True)
class RKV(Pooled):
    """R-KV (2505.24133): attention of the last 8 rows minus a key's similarity to other keys, for long answers.

    The score is 0.1 times the importance (attention) minus 0.9 times the redundancy (similarity). Only the importance
    is pooled.
    """

    rows: ClassVar = Window(8)
    continues: ClassVar[bool] = True
    ordinal: ClassVar[bool] = True
    own_interval: ClassVar[int] = 128
    needs: ClassVar[Needs] = ("group_attention", "redundancy")

    def score(self, slots: Slots, importance: torch.Tensor, redundancy: torch.Tensor) -> torch.Tensor:
        pooled = super().pooled(slots, importance).masked_fill(~slots.competing, 0)
        return MIX * pooled - (1 - MIX) * redundancy

    def pooled(self, slots: Slots, score: torch.Tensor) -> torch.Tensor:
        return score


@SCORES.add("tova")
@dataclass(frozen=True)
class TOVA(Score):
    """TOVA (Oren et al. 2024): attention of the last row, mean over all heads, one selection for the layer.

    With `per_head=True` every kv head chooses its own slots, which is how the CAOTE paper uses TOVA.
    """

    per_head: bool = False
    rows: ClassVar = Last()
    needs: ClassVar[Needs] = ("attention",)
    continues: ClassVar[bool] = True
    decodes: ClassVar[bool] = True

    @property
    def shared(self) -> bool:
        return not self.per_head

    def check(self, policy: OwnPolicy) -> None:
        flag("per_head", self.per_head)

    def score(self, slots: Slots, attention: torch.Tensor) -> torch.Tensor:
        return attention if self.per_head else slots.heads.gather(attention).mean(1, keepdim=True)


@SCORES.add("edie")
@dataclass(frozen=True)
class Edie(Pooled):
    """EDIE (eq. 9-11): estimate of how far the observing rows' outputs move in the 1-norm if a slot is removed.

    alpha    number that keeps the denominator 1 + alpha - a from vanishing, where a is an attention weight; the paper
             uses 0.05, 0.1 and 0.2 (table 2). With 0, the score is an upper bound
    weight   the slots among which the largest attention of row j is its weight c_j: at positions i with w <= i < T - 2w
             ("middle"), all ("all"), with i < T - 2w ("i<=t-2w"), or with w <= i ("i>w"); "none": c_j = 1 (table 3). w
             is the number of observing rows, T the number of tokens read
    """

    alpha: float = 0.1
    weight: str = "middle"
    kind: ClassVar[str] = "edie"

    def check(self, policy: OwnPolicy) -> None:
        super().check(policy)
        one_of("weight", self.weight, ("middle", "none", "all", "i<=t-2w", "i>w"))
        at_least_0("alpha", self.alpha)

    @property
    def needs(self) -> Needs:
        return (need("output_error", kind=self.kind, alpha=self.alpha, weight=self.weight),)


@SCORES.add("edie-exact")
@dataclass(frozen=True)
class EdieExact(Edie):
    """EDIE without its triangle inequality (eq. 7): exact 1-norm change of outputs if a slot is removed, times c_j."""

    alpha: ClassVar[float] = 0.0
    kind: ClassVar[str] = "l1"


@SCORES.add("h2o")
@dataclass(frozen=True)
class H2O(Score):
    """H2O (Zhang et al. 2023): attention summed over all rows so far, carried with the slot; `recent` slots are kept.

    `recent=None` keeps half of the budget. The sums over rows come from a second pass that reuses each row's
    log-sum-exp, so they are exact for a prompt that is read in chunks, and no attention matrix is stored.
    """

    recent: int | None = None
    sink: ClassVar[int] = 0
    rows: ClassVar = All()
    needs: ClassVar[Needs] = ("attention",)
    carry: ClassVar[str] = "sum"
    continues: ClassVar[bool] = True
    decodes: ClassVar[bool] = True

    @property
    def protected(self) -> tuple[int, int]:  # None: half of the smallest budget, 2 * sink + 1
        return self.sink, self.sink if self.recent is None else self.recent

    def protect(self, call: LayerRows) -> tuple[int, int | torch.Tensor]:
        return self.sink, (call.budget // 2 if self.recent is None else self.recent)


@SCORES.add("vatp")
@dataclass(frozen=True)
class VATP(H2O):
    """VATP (Guo et al. 2024): H2O's attention sums times the 1-norm of the value; the first `sink` slots are kept."""

    sink: int = 20
    decodes: ClassVar[bool] = False
    factors: ClassVar[tuple[str, ...]] = ("value_norm",)
