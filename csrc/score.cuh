/* The terms of score, which a tile of S^T = K Q^T adds to each key's sum, for both of score's kernels. Keys are rows in
 * the layout of mma's fragments (ptx.cuh). */
#ifndef KV_SCORE_CUH
#define KV_SCORE_CUH
#include "observe.cuh"

/* How a tile is reduced: a sum where every row sees every key, or where some do not; of -a ln a; the largest a. */
enum Terms { ALL_SEE, SOME_SEE, ENTROPY, LARGEST };

/* Adds to total the sum over the tile's rows of weight * 2^x, with x = scale s - lse, or of -weight * 2^x ln 2^x; or
 * makes total the largest 2^x of the rows that see the key. */
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

/* Reduces a tile's rows into each key's total. full: all rows see all keys of the tile; key: the thread's first key. */
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

/* Reduces the totals of `heads` heads from g on, of all their rows, into the group. column: the warp's first column. */
template <int MT>
KV_DEVICE void add_heads(const kv_score &a, const Observed &x, Group<MT> &group, float (&total)[MT][2], int head, int g,
                         int heads, int column) {
  each_row<MT>([&](int m, int half) {
    total[m][half] = a.reduce == KV_MAX ? row_max_nan(total[m][half]) : lanes_sum<4>(total[m][half]);
  });
  const float over = a.reduce == KV_MEAN ? max((int)a.rows.R - x.row_first, 1) : 1;
  group.add(total, a.group, g, heads, x.G, over, group_out(a.out, head, x.G, a.group, a.C), a.C, column);
}

/* Returns the rows that see a key from c0 on, of the first head or of all heads that are reduced together. */
KV_DEVICE Rows seeing(const kv_score &a, const Observed &x, int c0) {
  const int heads = heads_together(a.reduce, a.group, x.G), R = (int)a.rows.R;
  const int from = max(x.row_first, a.rows.causal ? c0 - x.bounds.shift : 0);
  return {x.h * x.G, from, c0 < x.k.at.n && from < R ? (R - from) * heads : 0, divisor(heads)};
}

/* Computes score with wgmma (score_sm90.cu); a has its lse. Returns -1 if it cannot, else as kv_score_cuda. */
int score_sm90(const kv_score &a, const Logits &logits, float power, void *stream);
#endif
