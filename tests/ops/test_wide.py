"""Heads wider than 256, which the CPU's kernels take: the ops' own tests, run again at such dimensions, so that the
modules of tests are imported."""

import problems
import pytest
import test_attend
import test_compact
import test_decode
import test_error
import test_kl
import test_norm
import test_peak
import test_quadratic
import test_refine
import test_score
import torch
from problems import DTYPES

from kvevict.ops import _ops as ops

MATCHES = {
    "attend": test_attend.test_matches, "not causal": test_attend.test_matches_not_causal,
    "score": test_score.test_matches, "peak": test_peak.test_matches, "compact": test_compact.test_matches,
    "decode": test_decode.test_matches, "kl": test_kl.test_matches, "quadratic": test_quadratic.test_matches,
    "error": lambda case, dtype: test_error.test_matches(case, dtype, test_error.KINDS[case % 3]),
    "norm": lambda case, dtype: test_norm.test_matches(case, dtype, 1 + case % 2, "kv"[case // 2 % 2]),
    "refine": lambda case, dtype: test_refine.test_matches(case, dtype, *test_refine.FORMS[case % 3]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("op", MATCHES)
def test_matches(op, case, dtype, monkeypatch):
    monkeypatch.setattr(problems, "DIMS", [264, 384, 440, 512])
    MATCHES[op](case, dtype)


def test_wider_still():
    q, slots, one = torch.zeros(1, 1, 1, 520), torch.zeros(0, 520), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"D a multiple of 8 in 8\.\.512"):
        ops.attend(q, ops.Held(slots, slots, offset=one.long(), len=one), q, q, one[0], scale=1.0)
