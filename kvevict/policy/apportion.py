"""Whole numbers in proportion to shares, between bounds, with an exact sum (METHODS section 4)."""

import torch

SMALLEST = 5e-324  # the smallest fp64 number above 0


def apportion(
    share: torch.Tensor,
    total: torch.Tensor,
    least: torch.Tensor,
    most: torch.Tensor,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Split total [R] into P parts: int64 x [R, P] in proportion to share [R, P], with least <= x <= most [R, P] and
    sum(weight * x) = total.

    A part at a bound stays there, and the other parts go on by their shares, until nothing changes; then the largest
    remainders are rounded up (of equal ones the lower index). Shares below 0 or NaN count as 0; if all are 0 they count
    as equal. weight [P]: how many times a part counts (layers that keep the same slots); then rounding up goes on
    while any part fits, and a rest smaller than the weight of every part with room stays unused. A total outside the
    bounds' sums is moved to them.
    """
    weights = torch.ones_like(least[0]) if weight is None else weight
    most = most.long()
    least = torch.minimum(least.long(), most)
    total = torch.minimum(torch.maximum(total.long(), (weights * least).sum(1)), (weights * most).sum(1))
    exact = _fill(share.double().nan_to_num(0.0, posinf=1e100).clamp(0, 1e100), total, least, most, weights)
    # remainders in steps of 1e-9, so that those that differ by rounding errors are equal
    x = torch.minimum((exact + 1e-9).floor().long(), most)
    rest = ((exact - x) * 1e9).round().masked_fill(x >= most, -1)
    left = total - (weights * x).sum(1)
    order = rest.sort(dim=1, descending=True, stable=True).indices
    if weight is None:
        return x + (order.argsort(1) < left[:, None])
    before = None
    while before is None or bool((left < before).any()):
        before = left
        for part in order.T:
            room = most.gather(1, part[:, None])[:, 0] > x.gather(1, part[:, None])[:, 0]
            takes = room & (weights[part] <= left)
            x.scatter_add_(1, part[:, None], takes.long()[:, None])
            left = left - takes * weights[part]
    return x


def _fill(
    share: torch.Tensor, total: torch.Tensor, least: torch.Tensor, most: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Apportion in real numbers: fp64 [R, P]. Each round fixes parts that are beyond one of their bounds: those below
    their least if raising them costs more than capping the others frees, else those above their most."""
    x, free = torch.zeros_like(share), torch.ones_like(least, dtype=torch.bool)
    while True:
        left = total - (weights * x).masked_fill(free, 0).sum(1)
        mine = share.masked_fill(~free, 0)
        mine = torch.where((mine.sum(1) > 0)[:, None], mine, free.double())
        mine = mine / mine.amax(1, keepdim=True).clamp_min(SMALLEST)  # sums of tiny shares lose digits
        whole = (weights * mine).sum(1).clamp_min(SMALLEST)
        x = torch.where(free, mine * left[:, None] / whole[:, None], x)
        inside = x.clamp(least, most)
        change = (weights * (inside - x)).sum(1)[:, None]
        beyond = free & (((inside > x) & (change >= 0)) | ((inside < x) & (change <= 0)))
        if not bool(beyond.any()):
            return x
        x, free = torch.where(beyond, inside, x), free & ~beyond
