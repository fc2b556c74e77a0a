"""Splits totals into whole numbers in proportion to shares, within bounds, with exact sums (METHODS section 4)."""

import torch

SMALLEST = 5e-324  # the smallest fp64 number above 0


def apportion(
    share: torch.Tensor,
    total: torch.Tensor,
    least: torch.Tensor,
    most: torch.Tensor,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Split each row's total [R] over P parts in proportion to share [R, P]. Returns x, int64 [R, P], with
    least <= x <= most (bounds [R, P]) and sum(weight * x) = total.

    A part that reaches a bound is fixed there, and the other parts share what is left, until no part changes. Then the
    parts with the largest remainders are rounded up; of equal remainders, the part of lower index. Shares below 0 or
    NaN count as 0; if all shares of a row are 0, they count as equal. A total outside the sums of the bounds is moved
    to the nearer of these sums.

    weight [P]: how many times a part counts in the sum (the number of layers that keep the same slots). With weights,
    rounding up goes on while any part fits, and a remainder smaller than the weight of every part with room is unused.
    """
    weights = torch.ones_like(least[0]) if weight is None else weight
    most = most.long()
    least = torch.minimum(least.long(), most)
    total = torch.minimum(torch.maximum(total.long(), (weights * least).sum(1)), (weights * most).sum(1))
    exact = _fill(share.double().nan_to_num(0.0, posinf=1e100).clamp(0, 1e100), total, least, most, weights)
    # Remainders are rounded to steps of 1e-9, so that remainders that differ by floating-point errors are equal.
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
    """Apportion in real numbers: fp64 [R, P]. Each round fixes parts at a bound: the parts below `least` if raising
    them costs at least as much as capping the parts above `most` frees, and the parts above `most` if it costs at most
    as much."""
    x, free = torch.zeros_like(share), torch.ones_like(least, dtype=torch.bool)
    while True:
        left = total - (weights * x).masked_fill(free, 0).sum(1)
        mine = share.masked_fill(~free, 0)
        mine = torch.where((mine.sum(1) > 0)[:, None], mine, free.double())
        mine = mine / mine.amax(1, keepdim=True).clamp_min(SMALLEST)  # largest is 1: sums of tiny shares lose digits
        whole = (weights * mine).sum(1).clamp_min(SMALLEST)
        x = torch.where(free, mine * left[:, None] / whole[:, None], x)
        inside = x.clamp(least, most)
        change = (weights * (inside - x)).sum(1)[:, None]
        beyond = free & (((inside > x) & (change >= 0)) | ((inside < x) & (change <= 0)))
        if not bool(beyond.any()):
            return x
        x, free = torch.where(beyond, inside, x), free & ~beyond
