"""The emulator of tests/cuda_on_cpu must pass correct kernels and catch wrong ones (broken.cu), in every mode."""

import re
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cuda_on_cpu"))
import build

pytestmark = pytest.mark.skipif(not which(build.CXX[0]), reason=f"no {build.CXX[0]}")

WRONG = "wrong result"
# The outcome of each broken kernel in the modes plain, asan and race, with threads in a random order: a wrong result, a
# message, or None where the mode cannot see the fault. Only asan sees accesses out of bounds, only race a race without
# effect.
RACE = "race on byte .* of shared"
CAUGHT = {
    "missing_barrier": (WRONG, WRONG, RACE), "missing_warp_barrier": (WRONG, WRONG, RACE),
    "two_writers": (WRONG, WRONG, RACE), "never_written": (WRONG, WRONG, WRONG), "order_of_sum": (WRONG, WRONG, WRONG),
    "some_skip_barrier": ("not all threads came: 64 wait for __syncthreads at broken.cu",) * 3,
    "some_return": ("not all threads came: .* 64 of 128 have returned",) * 3,
    "different_barriers": ("threads met at different barriers",) * 3,
    "some_lanes_shuffle": ("not all threads came: .* shfl_xor",) * 3,
    "different_shuffles": ("lanes of a warp parted",) * 3,
    "shuffle_mask": ("only to be called with all lanes, not 0xffff",) * 3,
    "missing_wait": (WRONG, WRONG, "has a copy under way"), "wait_for_too_few": (WRONG, WRONG, "has a copy under way"),
    "missing_commit": (WRONG, WRONG, "has a copy under way"), "wait_without_barrier": (WRONG, WRONG, RACE),
    "refill_too_early": (WRONG, WRONG, RACE), "source_changes": (None, None, "race on .* in global"),
    "writes_past_shared": ("wrote outside of its shared memory", "heap-buffer-overflow", "wrote outside"),
    "reads_past_global": (None, "heap-buffer-overflow", None),
    "copies_past_global": (None, "heap-buffer-overflow", None), "misaligned_vector": (None, "misaligned address", None),
    "misaligned_copy": ("cp_async_16 at line .* is not a multiple of 16",) * 3,
    "misaligned_matrix": ("ldmatrix at line .* is not a multiple of 16",) * 3, "exchanged_b": (WRONG, WRONG, WRONG),
    "exchanged_a": (WRONG, WRONG, WRONG), "not_transposed": (WRONG, WRONG, WRONG),
    "wrong_row_of_d": (WRONG, WRONG, "race on .* in global"),
    "wgmma_without_proxy_fence": (None, None, "called no fence_proxy_async before TMA or wgmma"),
    "wgmma_without_fence": ("registers without wgmma_fence",) * 3, "wgmma_not_waited": (WRONG, WRONG, WRONG),
    "wgmma_wait_for_too_few": (WRONG, WRONG, WRONG),
    "wgmma_b_changes": ("wgmma's B was written", "wgmma's B was written", RACE),
    "wgmma_a_changes": ("a register of A was written",) * 3, "wgmma_d_changes": ("an accumulator was written",) * 3,
    "wgmma_misaligned": ("do not start at a multiple of 1024 bytes",) * 3, "wgmma_not_swizzled": (WRONG, WRONG, WRONG),
    "wgmma_warps_differ": ("another operand than other warps'",) * 3, "box_not_waited": (WRONG, WRONG, RACE),
    "box_one_waits": (WRONG, WRONG, RACE), "box_wrong_parity": (WRONG, WRONG, RACE),
    "box_expects_less": ("a barrier gets 128 bytes more than it expects",) * 3,
    "box_expects_more": ("not all threads came: 128 wait for barrier_wait",) * 3,
    "box_expects_twice": ("nobody has waited for the phase before",) * 3,
    "box_barrier_not_fenced": ("no fence_proxy_async after barrier_init",) * 3,
    "box_misaligned": ("not to a multiple of 128 bytes",) * 3,
    "box_refilled_too_early": ("wait for barrier_wait", "wait for barrier_wait", RACE),
    "box_source_changes": ("what TMA reads was changed",) * 3, "mask_off_by_one": (WRONG, WRONG, WRONG),
    "last_block_relaxed": (None, None, "of another block wrote it"),
    "reads_other_block": (None, None, "of another block"),
    "too_much_shared": ("no GPU can run a grid of 1 x 1 x 1 blocks of 128 threads with 101377",) * 3,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", build.MODES)
def test_broken_kernels(mode, tmp_path):
    source = build.HERE / "broken.cu"
    assert set(CAUGHT) == set(re.findall(r"^  CASE\((\w+)", source.read_text(), re.M))
    assert all(any(messages) for messages in CAUGHT.values())
    program = build.build_program(mode, source, tmp_path)

    def ended(*arguments):
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)
        return done.returncode, done.stderr

    for name, expected in CAUGHT.items():
        for order in "01":
            assert ended(name, "right", order) == (0, ""), f"{name}, order {order}"
        code, text = ended(name, "broken", "1")
        message = expected[list(build.MODES).index(mode)]
        if message == WRONG:
            assert (code, text) == (1, ""), f"{name}: {code} {text}"
        elif message:
            assert code != 0, f"{name} was not caught"
            assert re.search(message, text), f"{name}: {text}"


def test_mutations_are_not_stale():
    """What a mutation replaces occurs once in its file."""
    from mutations import MUTATIONS

    times = {each.what: (build.CSRC / each.file).read_text().count(each.old) for each in MUTATIONS}
    assert not [what for what, n in times.items() if n != 1]
