"""The tree of what is in memory against a comparison with every sequence."""

import numpy as np
import pytest

from kvevict.serve.radix import Radix


def common(one, other) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def nodes(tree) -> list:
    found, left = [], [tree._root]
    while left:
        found.append(left.pop())
        left += found[-1].children.values()
    return found


@pytest.mark.parametrize("seed", range(4))
def test_as_compared_with_every_sequence(seed):
    """Few numbers, so that sequences begin alike; sequences that are beginnings of others; all removed at last."""
    random, tree, known = np.random.default_rng(seed), Radix(), {}

    def drawn():
        own = random.integers(0, 2, random.integers(1, 12))
        if known and random.random() < 0.5:  # goes on from a part of another one
            other = list(known)[random.integers(len(known))]
            own = np.array([*other[: random.integers(len(other) + 1)], *own])
        return own.astype(np.int64)

    for step in range(300):
        if known and random.random() < (0.4 if step < 200 else 0.7):
            gone = list(known)[random.integers(len(known))]
            tree.remove(np.array(gone))
            del known[gone]
        else:
            sequence = drawn()
            known[tuple(sequence)] = step
            tree.add(sequence, step)
        asked = drawn()
        length, node = tree.longest(asked)
        lengths = {item: common(asked, sequence) for sequence, item in known.items()}
        assert length == max(lengths.values(), default=0)
        assert {*node.items()} == {item for item, each in lengths.items() if each == length}
        inner = {item: len(sequence) for sequence, item in known.items() if lengths[item] == len(sequence)}
        assert tree.within(asked) == sorted(inner, key=inner.get)
        own = [each for each in nodes(tree) if each is not tree._root]
        assert all(each.item is not None or len(each.children) > 1 for each in own)  # none that tells nothing
        assert all(len(each.numbers) and each.parent.children[each.numbers[0]] is each for each in own)
    for gone in known:
        tree.remove(np.array(gone))
    assert len(nodes(tree)) == 1
