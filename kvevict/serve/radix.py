"""A radix tree over sequences of numbers, such as token ids: which of them have the longest beginning in common with
another sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class Node(Generic[T]):
    """A node of the tree: the numbers between its parent and itself, which no other child of the parent begins with."""

    def __init__(self, numbers: np.ndarray, parent: Node[T] | None = None) -> None:
        self.numbers, self.parent = numbers, parent  # int64 [n], n > 0 except in the root
        self.children: dict[int, Node[T]] = {}  # first number of a child -> the child
        self.item: T | None = None  # the item of the sequence that ends here

    def link(self, parent: Node[T], numbers: np.ndarray) -> Node[T]:
        """Put this node under `parent`, `numbers` after it."""
        self.numbers, self.parent, parent.children[int(numbers[0])] = numbers, parent, self
        return self

    def items(self) -> Iterator[T]:
        """Yield the items of this node and of those below it."""
        nodes = [self]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if node.item is not None:
                yield node.item


class Radix(Generic[T]):
    """Items by their sequences, int64 [n] each, n > 0. A search takes time for the sequence that is given, not for the
    number of items."""

    def __init__(self) -> None:
        self._root: Node[T] = Node(np.zeros(0, np.int64))

    def _path(self, sequence: np.ndarray) -> list[tuple[Node[T], int]]:
        """Return the nodes along a sequence, from the root on, each with the number of its numbers that are in the
        sequence; those of the last node may be fewer than it has."""
        found, at = [(self._root, 0)], 0
        while at < len(sequence) and (child := found[-1][0].children.get(int(sequence[at]))) is not None:
            common = _common(child.numbers, sequence[at:])
            found.append((child, common))
            at += common
            if common < len(child.numbers):
                break
        return found

    def longest(self, sequence: np.ndarray) -> tuple[int, Node[T]]:
        """Return (length of the longest beginning of `sequence` with which a sequence of the tree begins, node with
        all items of such sequences)."""
        path = self._path(sequence)
        return sum(common for _, common in path), path[-1][0]

    def within(self, sequence: np.ndarray) -> list[T]:
        """Return the items of the sequences with which `sequence` begins, its own included."""
        path = self._path(sequence)
        return [node.item for node, common in path if node.item is not None and common == len(node.numbers)]

    def add(self, sequence: np.ndarray, item: T) -> None:
        """Add an item, in place of the item that the sequence may have had."""
        path = self._path(sequence)
        node, common = path[-1]
        if common < len(node.numbers):  # the sequence ends within the node, or leaves it there
            assert node.parent is not None
            upper = Node[T](node.numbers).link(node.parent, node.numbers[:common])
            node.link(upper, node.numbers[common:])
            node = upper
        if rest := len(sequence) - sum(common for _, common in path):
            node = Node[T](sequence).link(node, sequence[-rest:].copy())
        node.item = item

    def remove(self, sequence: np.ndarray) -> None:
        """Remove the item of a sequence of the tree."""
        node, _ = self._path(sequence)[-1]
        node.item = None
        if not node.children and node.parent is not None:
            del node.parent.children[int(node.numbers[0])]
            node = node.parent
        if node.item is None and len(node.children) == 1 and node.parent is not None:
            [child] = node.children.values()
            child.link(node.parent, np.concatenate([node.numbers, child.numbers]))


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Return the length of the longest common beginning of two arrays."""
    least = min(len(one), len(other))
    differ = one[:least] != other[:least]
    return int(differ.argmax()) if differ.any() else least
