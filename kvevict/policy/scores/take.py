import numbers
from dataclasses import dataclass

from ..checks import count, fraction, one_of
from . import SCORES, Score, check_pool, pool

SPACES = ("aligned", "literal")
PLACES = ("after", "true")


@SCORES.add("take")
@dataclass(frozen=True)
class Take(Score):
    """TAKE (eq. 7-13): the prompt's last tokens, the probe, read every chunk and score its slots.

    probe            the last `probe` prompt tokens, or a span (start, stop) of the prompt as in a Python slice; cut to
                     half of a shorter prompt
    alpha            eq. 9's weight of the accumulated probe; the paper uses 0.2, and 0.32 for retrieval
    kernel           average pooling over slots (eq. 11)
    ema_space        "aligned" rotates the accumulated probe by the distance it moved before it is averaged, "literal"
                     is eq. 9 as printed
    probe_positions  "after" puts the probe right behind the chunk, "true" at its own place in the prompt
    append           False: no probe; the chunk's own last `probe` rows score it (ablation, table 2)
    """

    probe: int | tuple = 32
    alpha: float = 0.2
    kernel: int = 7
    ema_space: str = "aligned"
    probe_positions: str = "after"
    append: bool = True

    @property
    def span(self):
        return self.probe if isinstance(self.probe, tuple) else None

    @property
    def length(self) -> int:
        return self.probe[1] - self.probe[0] if self.span else self.probe

    @property
    def rows(self):
        return self.length

    def smallest_budget(self):
        return self.length + 1

    def check(self, policy):
        if isinstance(self.probe, tuple):
            start, stop = (*self.probe, None, None)[:2]
            if len(self.probe) != 2 or not all(isinstance(end, numbers.Integral) for end in (start, stop)):
                raise TypeError(f"probe must be a number of tokens or a span (start, stop), got {self.probe!r}")
            if start >= stop or (start < 0) != (stop <= 0):
                raise ValueError(
                    f"probe={self.probe!r} is no span: give start < stop, both counted from the start (>= 0) or both "
                    "from the end (start < 0, stop <= 0)"
                )
        else:
            count("probe", self.probe, 1)
        check_pool(self.kernel, "avg")
        fraction("alpha", self.alpha)
        one_of("ema_space", self.ema_space, SPACES)
        one_of("probe_positions", self.probe_positions, PLACES)
        if isinstance(policy.chunk_size, int) and 0 < policy.chunk_size <= self.length:
            raise ValueError(
                f"chunk_size={policy.chunk_size} must be greater than the probe's {self.length} tokens; "
                "give a larger chunk_size or a smaller probe"
            )

    def protect(self, view):
        if view.decoding:  # the rows are a window then, and see each other's slots
            return 0, self.length
        return 0, (view.probe_length if view.ends_with_probe else 0)

    def observe(self, view):
        """Eq. 9: Qa_i = alpha * Qa_{i-1} + (1 - alpha) * Q_i, and Qa_0 = Q_0 for the first chunk that holds a row's
        tokens. fp32 [B, H, p, D]."""
        if not self.append or view.decoding or not view.step.read.probe_rows:
            return
        queries, state = view.probe_queries().float(), view.state
        if state:
            past = state["probe"]
            if self.ema_space == "aligned":
                past = view.rotate(past, state["position"], view.probe_position)
            alpha = (self.alpha * state["started"])[:, None, None, None]
            queries = alpha * past + (1 - alpha) * queries
        started = view.has_tokens | state["started"] if state else view.has_tokens
        state.update(probe=queries, position=view.probe_position, started=started)

    def score(self, view):
        if self.append and not view.decoding:
            return view.probe_attention(view.state["probe"])
        rows = None if view.decoding else view.probe_length
        return view.attention(rows=self.length, reduce="mean", rows_of_row=rows)

    def pooled(self, view, score):
        return pool(score, view, self.kernel, "avg")
