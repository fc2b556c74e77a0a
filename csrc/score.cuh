/* What the two kernels of score share: how the terms of a tile S^T = K Q^T are reduced into a total for each key.
 * Keys are the rows of mma's fragments (ptx.cuh), observing rows the columns. */
#ifndef KV_SCORE_CUH
#define KV_SCORE_CUH
#include "observe.cuh"

/* How a tile is reduced over its rows. ALL_SEE and SOME_SEE: the sum of the attention weights a (or a^2), where all
 * rows see all keys of the tile or some rows do not. ENTROPY: the sum of -a ln a. LARGEST: the largest a (or a^2). */
enum Terms { ALL_SEE, SOME_SEE, ENTROPY, LARGEST };

/* Adds to each key's total the sum over the tile's rows of weight * 2^x, with x = scale * s - lse, or for ENTROPY of
 * -weight * 2^x ln 2^x. For LARGEST, total becomes the largest 2^x of the rows that see the key. key: the thread's
 * first key. */
template <Terms terms, int MT, int NT>
KV_DEVICE void add_rows(float (&total)[MT][2], const float (&s)[MT][NT][4], const RowValues *values, float scale,
                        int key) {
  float sum[MT][2] = {};
  unrolled<NT, 2>([&](int n, int j) {
    const RowValues row = values[8 * n + fragment_column() + j];
    each_row<MT>([&](int m, int half) {
      const float x = fmaf(s[m][n][2 * half + j], scale, -row.lse);
      float term = exp2_approx(x);
      if (terms == LARGEST) {
        if (key + 16 * m + 8 * half < row.seen) total[m][half] = max_nan(total[m][half], term);
        return;
      }
      if (terms == ENTROPY) term *= (x < -127 ? -127 : x) * -LN2;
      if (terms != ALL_SEE && key + 16 * m + 8 * half >= row.seen) term = 0;
      sum[m][half] = fmaf(row.weight, term, sum[m][half]);
    });
  });
  if (terms != LARGEST) each_row<MT>([&](int m, int half) { total[m][half] += sum[m][half]; });
}

/* Reduces a tile's rows into each key's total, as `a` asks. full: all rows see all keys of the tile; key: the
 * thread's first key. */
template <int MT, int NT>
KV_DEVICE void add_tile(const kv_score &a, float (&total)[MT][2], float (&s)[MT][NT][4], const RowValues *values,
                        const Logits &logits, int key, bool full) {
  transform(s, logits);
  if (a.reduce == KV_MAX)
    add_rows<LARGEST>(total, s, values, logits.scale, key);
  else if (a.term == KV_ENTROPY)
    add_rows<ENTROPY>(total, s, values, logits.scale, key);
  else if (full)
    add_rows<ALL_SEE>(total, s, values, logits.scale, key);
  else
    add_rows<SOME_SEE>(total, s, values, logits.scale, key);
}

/* Adds the totals of heads g .. g + heads - 1, complete over all their rows, to the group's results. column: the
 * warp's first column. */
template <int MT>
KV_DEVICE void add_heads(const kv_score &a, const Observed &x, Group<MT> &group, float (&total)[MT][2], int head, int g,
                         int heads, int column) {
  each_row<MT>([&](int m, int half) {
    total[m][half] = a.reduce == KV_MAX ? row_max_nan(total[m][half]) : lanes_sum<4>(total[m][half]);
  });
  const float over = a.reduce == KV_MEAN ? max((int)a.rows.R - x.row_first, 1) : 1;
  group.add(total, a.group, g, heads, x.G, over, group_out(a.out, head, x.G, a.group, a.C), a.C, column);
}

/* Returns the rows that see a key from c0 on: those of the group's first head, or of all its heads if these are
 * reduced together. */
KV_DEVICE Rows seeing(const kv_score &a, const Observed &x, int c0) {
  const int heads = heads_together(a.reduce, a.group, x.G), R = (int)a.rows.R;
  const int from = max(x.row_first, a.rows.causal ? c0 - x.bounds.shift : 0);
  return {x.h * x.G, from, c0 < x.k.at.n && from < R ? (R - from) * heads : 0, divisor(heads)};
}

/* Computes score with wgmma (score_sm90.cu). `a` must have an lse; power multiplies lse, as it already multiplies
 * logits.scale. Returns -1 if the kernel cannot be used for this call or GPU, else 0 or a CUDA error. */
int score_sm90(const kv_score &a, const Logits &logits, float power, void *stream);
#endif
