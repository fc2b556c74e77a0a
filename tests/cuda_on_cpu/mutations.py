"""Breaks the CUDA kernels in one way at a time; the ops' tests on the emulator must notice each.

    python tests/cuda_on_cpu/mutations.py [--gate] [OP ...]     OP: or `packed`, those that packed slots alone show

A mutation replaces a piece of text that must occur exactly once in its file, so that it cannot go stale unseen. Each
runs the tests that notice it, in the mode that does; with --gate it runs those of the gate, in the gate's mode.
--gate-tests prints the gate's tests, as an argument of pytest's -k."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from build import CSRC, CXX, ROOT, build_package

HALF = "test_matches and dtype1"  # bfloat16
GATE = f"({HALF}) or (few_rows and dtype1) or (test_groups and dtype1) or test_many_blocks or test_without"
GATE += " or test_in_place or edges or (test_select and test_matches)"
GATE += " or (test_packed and ((test_decode or test_compact) and dtype1 or compact_in_place))"
MOST = "6"  # cases of each test in the gate


class Mutation(NamedTuple):
    op: str
    file: str
    old: str
    new: str
    what: str
    mode: str = "plain"
    tests: str = "test_matches"
    of: str = ""  # the file of the tests; else the op's

    @property
    def source(self):
        """The file that is compiled anew."""
        return self.file if self.file.endswith(".cu") else f"{self.op}_cuda.cu"

    @property
    def variables(self):
        """In which the tests run it."""
        return dict(KVEVICT_WGMMA="1") if self.file.endswith("_sm90.cu") else {}

    @property
    def test_file(self):
        return f"test_{self.of or self.op}.py"


SYNC = "__syncthreads();"
MUTATIONS = [
    Mutation("attend_score", "attend_score_cuda.cu", "min(len[i], span)", "min(len[i], span + (1 << 20))",
             "the observers' softmax spans all stored slots", tests="test_span and dtype1"),
    Mutation("attend_score", "attend_score_cuda.cu", "(a->attend.T - R) * x.attend.q_stride[2]",
             "0 * x.attend.q_stride[2]", "the first rows' lse for the last ones", tests="test_span and dtype1"),
    Mutation("attend_score", "attend_score_cuda.cu", "x.attend.T = R;", "x.attend.T = R + 1;",
             "one row too many attends to the span", tests="test_span and dtype1"),
    Mutation("attend_score", "attend_score_cuda.cu", "(more > bytes ? more : bytes)", "(0 * more + bytes)",
             "no scratch for the span's splits", mode="asan", tests="test_span_of_few_rows"),
    Mutation("attend_score", "kvevict.h", "before * a->q_stride[2] * size", "0 * before * a->q_stride[2] * size",
             "the first rows observe", tests="test_span and dtype1"),
    Mutation("attend_error", "kvevict.h", "(a->T - x->rows.R) * row * size", "0 * row * size",
             "the first rows' outputs for the last ones", tests="test_matches and dtype1", of="attend_score"),
    Mutation("attend_peak", "kvevict.h", "x->lse = a->lse + before", "x->lse = a->lse",
             "the first rows' lse for the last ones", tests="test_matches and dtype1", of="attend_score"),
    Mutation("attend_error", "attend_error_cuda.cu", "kv_last_outputs(&a->attend, &error);\n", "",
             "no outputs", tests="test_opcheck or test_lengths", of="attend_score"),
    Mutation("attend_peak", "attend_peak_cuda.cu", "one > other ? one : other", "one < other ? one : other",
             "too little scratch", mode="asan", tests="test_lengths", of="attend_score"),
    Mutation("probe", "probe_cuda.cu", "a.partner[d]", "d", "no number is paired with another"),
    Mutation("probe", "probe_cuda.cu", "1 - keep", "keep", "the present weighs as much as the past"),
    Mutation("probe", "probe_cuda.cu", "a.cos[b * a.D + d]", "a.cos[d]", "the first batch row's rotation for all"),
    Mutation("attend", "stream.cuh", SYNC + " /* K is there", "/* K is there", "no barrier before V is refilled",
             tests=HALF),
    Mutation("attend", "stream.cuh", "cp_async_wait<0>();\n    __syncthreads();",
             "cp_async_wait<1>();\n    __syncthreads();", "does not wait for K", tests=HALF),
    Mutation("attend", "stream.cuh", "const bool masked = c0 + X::KEYS > fewest", "const bool masked = fewest < -9999",
             "tiles on the diagonal are not masked", tests=HALF),
    Mutation("attend", "attend_cuda.cu", "bounds.seen(rows.step(r)) - c0", "bounds.seen(rows.step(r))",
             "rows see the last split's columns as the first's", tests="few_rows and dtype1"),
    Mutation("attend", "attend_cuda.cu", "(most + size - 1) / size : 1", "(most + size - 1) / size - (most > size) : 1",
             "the last split is not combined", tests="few_rows and dtype1"),
    Mutation("attend", "state.cuh", "sum += weight[i] * mine[i].d;", "sum += mine[i].d;",
             "the splits' sums are not rescaled", tests="few_rows and dtype1"),
    Mutation("attend", "stream.cuh", "__syncthreads();    /* and the caller", "/* and the caller",
             "no barrier before a part takes the tiles' place", mode="race", tests="few_rows and dtype1 and 1-3"),
    Mutation("attend", "tile.cuh", "mma<E>(s[m][n], x[m], y[0], y[1])", "mma<E>(s[m][n], x[m], y[1], y[0])",
             "halves of K's fragment exchanged", tests=HALF),
    Mutation("attend", "tile.cuh", "const float *const from = p[m][2 * k + right] + 2 * half;",
             "const float *const from = p[m][2 * k + half] + 2 * right;",
             "quarters of P's fragment exchanged", tests=HALF),
    Mutation("attend", "tile.cuh", "ldmatrix_x4_trans(", "ldmatrix_x4(", "V not transposed", tests=HALF),
    Mutation("attend", "tile.cuh", "+ j >= seen[m][half]) s", "+ j > seen[m][half]) s",
             "rows see one key too many", tests=HALF),
    Mutation("attend", "tile.cuh", "sum[m][half] * alpha[m][half] + more", "sum[m][half] + more",
             "the sum is not rescaled when the maximum moves", tests="test_many_blocks"),
    Mutation("attend", "tile.cuh", "const bool stored = r0 + count <= rows.len;", "const bool stored = r0 < rows.len;",
             "new rows of a tile are taken for stored ones", tests=HALF),
    Mutation("score", "score.cuh", "8 * half >= row.seen) term", "8 * half > row.seen) term",
             "rows see one key too many", tests=HALF),
    Mutation("score", "score_cuda.cu", "      cp_async_wait<0>();\n      /*", "      /*", "does not wait for the rows",
             tests=HALF),
    Mutation("score", "score_sm90.cu", "    fence_proxy_async();\n", "", "barriers that TMA does not see", tests=HALF),
    Mutation("score", "score_sm90.cu", "if (t < tiles) barrier_wait(", "if (t < 0) barrier_wait(",
             "does not wait for the rows", tests=HALF),
    Mutation("score", "score_sm90.cu", "t / X::STAGES % 2);", "0);", "waits for a stage's first rows alone",
             tests="test_many_blocks"),
    Mutation("score", "score_sm90.cu", "    wgmma_fence();\n", "", "no fence before registers are multiplied",
             tests=HALF),
    Mutation("score", "score_sm90.cu", "    wgmma_wait<0>(next[0]);", "", "does not wait for the next product",
             tests=HALF),
    Mutation("score", "score_sm90.cu", "i % 4 * 32), i > 0);", "i % 4 * 32), true);", "products are added to old ones",
             tests="test_many_blocks"),
    Mutation("score", "score_sm90.cu", "i / 4 * X::ROWS * ATOM_BYTES", "i / 8 * X::ROWS * ATOM_BYTES",
             "the first 64 columns twice", tests=HALF),
    Mutation("score", "score_sm90.cu", "full = __syncthreads_and(thread >= X::ROWS || seen[0] >= c0 + X::KEYS);",
             "full = seen[0] < 0;", "no barrier between tiles", mode="race", tests="test_many_blocks"),
    Mutation("score", "score_sm90.cu", "const RowValues later = load(t + X::STAGES - 1);",
             "const RowValues later = load(t + X::STAGES);", "rows are copied to a stage that is read",
             tests="test_many_blocks"),
    Mutation("score", "score_sm90.cu", "X::ATOMS * tile * ATOM_BYTES", "X::ATOMS * X::ROWS * ATOM_BYTES",
             "waits for rows that a tile has not", tests="do_not_fill_a_tile"),
    Mutation("score", "score_sm90.cu", "thread < tile ? row_values", "thread < X::ROWS ? row_values",
             "rows are added twice", tests="do_not_fill_a_tile"),
    Mutation("score", "score_sm90.cu", "{ATOM, heads, TILE_ROWS / heads, 1}", "{ATOM, TILE_ROWS / heads, heads, 1}",
             "heads and steps exchanged", tests=HALF),
    Mutation("score", "score_sm90.cu", "if (row < all.count || g == x.G) return;", "if (row < all.count) return;",
             "a tile past the last is stored", mode="asan", tests="do_not_fill_a_tile"),
    Mutation("score", "score_sm90.cu", "total[0][0] = total[0][1] = 0, row = 0", "row = 0",
             "a head's sums begin with those of the head before", tests="test_group_term"),
    Mutation("score", "score_sm90.cu", "ldmatrix_x4(keys[i][0], keys[i][1], keys[i][2],",
             "ldmatrix_x4(keys[i][0], keys[i][2], keys[i][1],", "quarters of K's fragment exchanged", tests=HALF),
    Mutation("peak", "peak_cuda.cu", SYNC + " /* the tile is there", "/* the tile is there",
             "no barrier before K is read", tests=HALF),
    Mutation("peak", "peak_cuda.cu", "top[m][half] = max_nan(top[m][half], fmaf",
             "top[m][0] = max_nan(top[m][0], fmaf",
             "the lower rows' maxima go to the upper", tests=HALF),
    Mutation("decode", "decode.cuh", "c1 = min(end, c0 + cut.size)", "c1 = min(end, c0 + cut.size - 1)",
             "the last slot of a split is left out", tests="test_groups and dtype1"),
    Mutation("decode", "state.cuh", SYNC + " /* the parts are there", "/* the parts are there",
             "no barrier before the groups are added", mode="race", tests="test_groups and dtype1 and 5-64"),
    Mutation("decode", "stream.cuh", "? 0 : warp_id() * (X::KEYS / X::KEY_WARPS)", "? 0 : 0",
             "all warps have the first keys of a tile", tests="test_groups and dtype0"),
    Mutation("decode", "stream.cuh", "x.at.len = min(x.at.len - c0, x.at.n);", "x.at.len -= c0;",
             "a tile goes on past a prefix", tests="past_a_prefix"),
    Mutation("decode", "decode_ring.cuh", "    if (s.last && g == 0) append", "    if (s.last && g > 0) append",
             "the new row is not stored", tests="test_groups and dtype1"),
    Mutation("decode", "decode_ring.cuh", "for (int unit = blockIdx.x;; unit += gridDim.x) {",
             "for (int unit = blockIdx.x; unit < (int)gridDim.x; unit += gridDim.x) {",
             "a block has no second split", tests="share_a_prefix"),
    Mutation("decode", "decode_ring.cuh", "n >= before && n < before + splits", "n > before && n < before + splits",
             "a head's first split is not found", tests="test_groups and dtype1"),
    Mutation("decode", "ring.cuh", "__syncwarp(); /* all lanes' copies", "/* all lanes' copies",
             "lanes read what others still copy", tests="test_groups and dtype1"),
    Mutation("decode", "ring.cuh", "__syncwarp(); /* all lanes have", "/* all lanes have",
             "a stage is refilled while lanes read it", mode="race", tests="test_groups and dtype1 and 5-64"),
    Mutation("decode", "ring.cuh", "cp_async_wait_but(ring.stages - 1);", "cp_async_wait_but(ring.stages);",
             "does not wait for the tile", tests="test_groups and dtype1"),
    Mutation("decode", "ring.cuh", "__syncthreads(); /* all warps have", "/* all warps have",
             "parts take the place of stages that are read", mode="race", tests="test_groups and dtype1 and 5-64"),
    Mutation("decode", "ring.cuh", "key(n, i % 2) < count ? s[n][i]", "key(n, i % 2) <= count ? s[n][i]",
             "the column after the last is seen", tests="test_groups and dtype1"),
    Mutation("decode", "ring.cuh", "sum[half] *= factor[half];", "sum[half] *= 1;",
             "the sum is not rescaled when the maximum moves", tests="test_groups and dtype1"),
    Mutation("decode", "decode_ring.cuh", "if (its) return {first +", "if (its) return {0 * first +",
             "a head past the 32nd is not found", tests="test_many_heads"),
    Mutation("decode", "decode_ring.cuh", "r < G ? b : batch[r / G]", "r < G ? b : b",
             "all queries of a tile are one batch row's", tests="share_prefixes and dtype1 and whole and 3-64"),
    Mutation("decode", "decode_ring.cuh", "a.prefix.len[head] == a.prefix.len[one]", "true",
             "prefixes of other lengths are taken for one", tests="share_prefixes and dtype1 and parts and 3-64"),
    Mutation("decode", "decode_ring.cuh", SYNC + " /* the rows are there", "/* the rows are there",
             "what is not cut is written too early", mode="race", tests="test_groups and dtype1 and 5-64"),
    Mutation("decode", "warp.cuh", "uint32_t *flag) {\n  __syncthreads();", "uint32_t *flag) {",
             "a block counts itself before its threads are done", mode="race", tests="decode"),
    Mutation("select", "select_cuda.cu", "shared->count[i] = 0;\n    __syncthreads();", "shared->count[i] = 0;",
             "no barrier before counting"),
    Mutation("select", "select_cuda.cu", "ties + __popc(tied & earlier) < equal",
             "ties + __popc(tied & earlier) <= equal", "one tie too many"),
    Mutation("select", "select_cuda.cu", "key > bar) || (tie", "key >= bar) || (tie", "all ties are kept"),
    Mutation("select", "warp.cuh", "  if (lane_id() >= step) sum += left;", "  sum += left;", "a scan that wraps"),
    Mutation("compact", "compact_cuda.cu", "with these rows */\n    __syncthreads();", "with these rows */",
             "no barrier between reading and writing", mode="race",
             tests="test_in_place"),
    Mutation("compact", "compact_cuda.cu", "from[u] = index && j < keep ? index[j] : j;",
             "from[u] = index && j < keep ? index[j] : j + 1;", "one row off without an index", tests="test_without"),
    Mutation("refine", "refine_cuda.cu", "  __syncthreads();\n  if ((int)threadIdx.x >= D) return;",
             "  if ((int)threadIdx.x >= D) return;", "no barrier before the parts are added", tests="test_lengths"),
    Mutation("norm", "warp.cuh", "for (int step = Width / 2; step > 0; step /= 2) x +=",
             "for (int step = Width / 2; step > 1; step /= 2) x +=", "two halves of a row are not added"),
    Mutation("decode", "columns.cuh", "word[i] >> (high ? 4 : 0)", "word[i] >> (high ? 0 : 4)",
             "halves of bytes exchanged", tests="test_decode and dtype0", of="packed"),
    Mutation("decode", "columns.cuh", "if (step * W >= size) break;", "if (step * W > size) break;",
             "the transform spans two blocks", tests="test_decode and dtype1", of="packed"),
    Mutation("decode", "lanes.cuh", "lanes_sum<L>(sum) + (packed ? more[g] : 0)", "lanes_sum<L>(sum)",
             "the centre is left out", tests="test_decode and dtype0", of="packed"),
    Mutation("decode", "lanes.cuh", "if (kv_is_rotated(v.kind))", "if (false)",
             "outputs are not rotated back", tests="test_decode and dtype0", of="packed"),
    Mutation("decode", "decode.cuh", "packed ? n : n - 1, n}", "packed ? n - 1 : n - 1, n}",
             "a packed new row is read as computed", tests="test_decode and dtype0", of="packed"),
    Mutation("decode", "bytes.cuh", "o[8 * t + 4 + i], p, high_f16(a), high", "o[8 * t + 4 + i], p, low_f16(a), high",
             "high halves of values taken for low ones", tests="test_decode and dtype1", of="packed"),
    Mutation("decode", "bytes.cuh", "step = w / 8 * 2 + w % 2;", "step = w / 8 * 2 + w / 4 % 2;",
             "queries in another order than keys", tests="test_decode and dtype1", of="packed"),
    Mutation("decode", "ring.cuh", "fmaf(ends.y, sum[half], centre[half])", "ends.y * sum[half]",
             "the tensor cores' centre is left out", tests="test_decode and dtype1", of="packed"),
    Mutation("decode", "ring.cuh", "fmaf(factor, x, low)", "factor * x",
             "the values' least numbers are left out", tests="test_decode and dtype1", of="packed"),
    Mutation("decode", "ring_shared.cuh", "min(KEYS, c1 - c0) * x.at", "(KEYS + 0 * c1) * x.at",
             "a packed tile goes on past the last row", mode="asan", tests="test_decode and dtype1", of="packed"),
    Mutation("decode", "ring.cuh", "if (PACKED && stored < c1) pack();", "",
             "a new row is not packed", tests="test_decode and dtype1", of="packed"),
    Mutation("decode", "ring.cuh", "__syncwarp(); /* copies fill", "/* copies fill",
             "a new row is in place before the zeros after the rows", tests="test_decode and dtype1", of="packed"),
    Mutation("decode", "state.cuh", "if (rotated) hadamard", "if (false) hadamard",
             "a ring's outputs are not rotated back", tests="test_decode and dtype1", of="packed"),
    Mutation("score", "tile.cuh", "c0 + r, r < packed, dims", "c0 + r, r + 1 < packed, dims",
             "the last packed row is left out", tests=HALF, of="packed"),
    Mutation("score", "columns.cuh", "y[v][i] += d < D ? x.centre[d] : 0;", "y[v][i] += d < 4 ? x.centre[d] : 0;",
             "only four numbers of the centre are added", tests=HALF, of="packed"),
    Mutation("attend", "stream.cuh", "if (D % 64 && kept[1].packed() > c0) __syncthreads();", "",
             "no barrier before unpacked values are looked at", mode="race", tests=f"{HALF} and 5-", of="packed"),
    Mutation("compact", "compact_cuda.cu", "if (i < done) continue;", "if (i <= done) continue;",
             "the first new row is not packed", tests="test_compact", of="packed"),
    Mutation("compact", "compact_cuda.cu", "? 0 : rows.packed();", "? rows.packed() : rows.packed();",
             "packed rows are not unpacked", tests="test_compact", of="packed"),
    Mutation("compact", "columns.cuh", "other ? 0 : rintf(", "other ? 0 : floorf(", "numbers are rounded down",
             tests="test_compact", of="packed"),
]  # fmt: skip


def tests_pass(package, mutation):
    environment = dict(os.environ, PYTHONSAFEPATH="1", PYTHONPATH=str(package), MALLOC_PERTURB_="1")
    environment |= dict(KVEVICT_MOST=MOST) if mutation.tests == GATE else {}
    environment |= mutation.variables
    environment |= sanitized() if mutation.mode == "asan" else {}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=", "--capture=sys"]
    command += [*map(str, (ROOT / "tests").rglob(mutation.test_file)), "-k", mutation.tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    reasons = ("cuda_on_cpu", "kv_", "E  ")
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith(reasons)]
    if done.returncode > 1:  # neither passed nor failed, nor stopped by a signal
        sys.exit(f"pytest could not run {mutation.what}:\n{done.stdout}{done.stderr}")
    return done.returncode == 0, lines[0] if lines else done.stdout[-200:]


def sanitized():
    """The environment in which Python loads an extension that the sanitizers check, as run.sh has it."""
    names = [[*CXX, f"-print-file-name=lib{name}.so"] for name in ("asan", "ubsan")]
    libraries = [subprocess.run(name, capture_output=True, text=True, check=True).stdout.strip() for name in names]
    options = "detect_leaks=0:max_malloc_fill_size=1000000000:malloc_fill_byte=254"
    return dict(LD_PRELOAD=":".join(libraries), ASAN_OPTIONS=options)


def mutated(mutation, base, folder):
    """base's objects with that of the op compiled anew from a broken csrc; the package."""
    csrc = folder / "csrc"
    shutil.copytree(CSRC, csrc)
    text = (csrc / mutation.file).read_text()
    if text.count(mutation.old) != 1:
        sys.exit(f"{mutation.file} has {text.count(mutation.old)} times: {mutation.old}")
    (csrc / mutation.file).write_text(text.replace(mutation.old, mutation.new))
    for file in base.glob("*.o"):
        if file.name != f"{mutation.source}.o":
            (folder / file.name).hardlink_to(file)
    build_package(mutation.mode, folder, csrc)
    return folder


def main():
    if sys.argv[1:] == ["--gate-tests"]:
        print(GATE)
        return
    gate, ops = "--gate" in sys.argv, [word for word in sys.argv[1:] if word != "--gate"]
    wanted = [m for m in MUTATIONS if not ops or m.op in ops or m.of in ops]
    wanted = [m._replace(mode="plain", tests=GATE) for m in wanted] if gate else wanted
    survived = 0
    with tempfile.TemporaryDirectory() as name:
        for mode in sorted({m.mode for m in wanted}):
            build_package(mode, Path(name) / mode)
        for each in {(m.test_file, m.mode, m.tests, *m.variables): m for m in wanted}.values():
            passed, why = tests_pass(Path(name) / each.mode, each)
            if not passed:
                sys.exit(f"{each.test_file} -k '{each.tests}' fails as it is, {each.mode}: {why}")
        for number, mutation in enumerate(wanted):
            folder = Path(name) / str(number)
            folder.mkdir()
            passed, why = tests_pass(mutated(mutation, Path(name) / mutation.mode, folder), mutation)
            survived += passed
            said = "NOT NOTICED" if passed else "noticed"
            print(f"{said:<12}{mutation.op:<8}{mutation.what}: {why.strip()[:120]}", flush=True)
            shutil.rmtree(folder)
    print(f"{len(wanted)} mutations, {survived} not noticed")
    sys.exit(bool(survived))


if __name__ == "__main__":
    main()
