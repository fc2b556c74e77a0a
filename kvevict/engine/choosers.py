"""Who chooses which slots of a call survive, and when. A call has one chooser, which sees its layers in order; what
only one kind of chooser needs lives in it (`Cascade`: cascade.py, `Drafting`: draft.py)."""

import torch

from ..analysis import diagnose
from . import evict, propagate
from .schedule import follows, waits


class Chooser:
    """Everything survives."""

    errors = None  # the kvevict.engine.residual.Errors that the call measures
    onward = None  # the kvevict.engine.propagate.Onward: tokens of the call that upper layers read
    held = 0  # layers whose new slots wait

    def layer(self, view) -> None:
        """The end of one layer's attention."""

    def end(self, chunk_end) -> None:
        """The end of the call, with what a `ChunkEnd` says of it."""


class Append(Chooser):
    """Tokens that may be taken back (assisted decoding's candidates, never under a carried score) are stored."""

    def layer(self, view):
        evict.store(view)


class Group(Chooser):
    """Every layer chooses for itself, or a group's first or last one for all of it (index reuse, TAKE's delay).

    limit: view -> the slots [B] that its layer may keep, None: all.
    """

    def __init__(self, limit, errors=None):
        self.limit, self.errors = limit, errors
        self.waiting = []  # views of layers that wait for a later layer's choice
        self.choice = None  # the evict.Choice of the last layer that chose; None: it kept everything

    held = property(lambda self: len(self.waiting))

    def layer(self, view):
        policy = view.policy
        if follows(policy, view.order):
            evict.store(view, self.choice)
            return
        waiting = waits(policy, view.order, len(view.step.patch.order))
        if not view.decoding and (policy.score.carries or not waiting):
            policy.rows.note(view)
        evict.grow_carry(view)
        if waiting:
            self._wait(view, self.limit(view))
            return
        if view.decoding and policy.decode:
            _remember(view)
        self.cut(view, self.limit(view))

    def _wait(self, view, slots):
        if slots is None or not (slots < view.every.sum(1)).any():
            evict.store(view)
            return
        view.q = diagnose.rows(view) if view.policy.diagnose and not view.decoding else None
        view.lse = view.out = None  # the choice is another layer's: only keys and values wait
        view.__dict__.pop("slots", None)
        self.waiting.append(view)

    def cut(self, view, slots):
        """Cut the layer, and the layers that wait for it, back to `slots` [B] in all; None keeps everything."""
        slots, score = evict.within(view, slots), None
        cuts, propagates = (slots < view.every.sum(1)).any(), propagate.due(view)
        if cuts or propagates or self.errors is not None:
            score = view.policy.score.score(view)
        if self.errors is not None:
            self.errors.note_scores(view, score)
        if propagates:
            self.onward = propagate.choose(view, score)
        self.choice = evict.choose(view, evict.ranked(view, score), slots) if cuts else None
        for each in [*self.waiting, view]:
            evict.store(each, self.choice)
        self.waiting.clear()


def _remember(view) -> None:
    """Keep a decoded row, which will observe."""
    policy, layer = view.policy, view.layer
    if not policy.rows.decoded or policy.rows.newest:
        return
    row = torch.cat([view.q, view.out.transpose(1, 2)], 3) if policy.wants_outputs else view.q
    other = layer.recent is None or layer.recent.shape[3] != row.shape[3]  # of another policy
    rows = row if other else torch.cat([layer.recent, row], 2)
    layer.recent = rows[:, :, -policy.rows.decoded :]
