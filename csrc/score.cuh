/* The terms of score: what a tile of S^T = K Q^T adds to each key's sum. Shared by its kernels, whose keys' rows have
 * the layout of mma's fragments (ptx.cuh). */
#ifndef KV_SCORE_CUH
#define KV_SCORE_CUH
#include "observe.cuh"

/* How a tile is summed: every row sees every key; some rows do not; -a ln a in place of a. */
enum Terms { ALL_SEE, SOME_SEE, ENTROPY };

/* total gains the sum over the tile's rows of weight * 2^x, with x = scale s - lse, or of -weight * 2^x ln 2^x. */
template <Terms terms, int MT, int NT>
static __device__ __forceinline__ void add_rows(float (&total)[MT][2], const float (&s)[MT][NT][4],
                                                const RowValues *values, float scale, int key) {
  float sum[MT][2] = {};
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const RowValues row = values[8 * n + fragment_column() + j];
      each_row<MT>([&](int m, int half) {
        const float x = fmaf(s[m][n][2 * half + j], scale, -row.lse);
        float term = exp2_approx(x);
        if (terms == ENTROPY) term *= (x < -127 ? -127 : x) * -LN2;
        if (terms != ALL_SEE && key + 16 * m + 8 * half >= row.seen) term = 0;
        sum[m][half] = fmaf(row.weight, term, sum[m][half]);
      });
    }
  each_row<MT>([&](int m, int half) { total[m][half] += sum[m][half]; });
}

/* total becomes the largest 2^x over the keys that the rows see. */
template <int MT, int NT>
static __device__ __forceinline__ void max_rows(float (&total)[MT][2], const float (&s)[MT][NT][4],
                                                const RowValues *values, float scale, int key) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const RowValues row = values[8 * n + fragment_column() + j];
      each_row<MT>([&](int m, int half) {
        const float p = exp2_approx(fmaf(s[m][n][2 * half + j], scale, -row.lse));
        if (key + 16 * m + 8 * half < row.seen) total[m][half] = max_nan(total[m][half], p);
      });
    }
}

/* A tile's rows, `full` if all of them see all of its keys, into each key's total. key: the thread's first. */
template <int MT, int NT>
static __device__ __forceinline__ void add_tile(const kv_score &a, float (&total)[MT][2], float (&s)[MT][NT][4],
                                                const RowValues *values, const Logits &logits, int key, bool full) {
  transform(s, logits);
  if (a.reduce == KV_MAX)
    max_rows(total, s, values, logits.scale, key);
  else if (a.term == KV_ENTROPY)
    add_rows<ENTROPY>(total, s, values, logits.scale, key);
  else if (full)
    add_rows<ALL_SEE>(total, s, values, logits.scale, key);
  else
    add_rows<SOME_SEE>(total, s, values, logits.scale, key);
}

/* The totals of `heads` heads from g on, whose rows have all been added, into the group; column: the warp's first. */
template <int MT>
static __device__ __forceinline__ void add_heads(const kv_score &a, const Observed &x, Group<MT> &group,
                                                 float (&total)[MT][2], int head, int g, int heads, int column) {
  each_row<MT>([&](int m, int half) {
    total[m][half] = a.reduce == KV_MAX ? row_max_nan(total[m][half]) : lanes_sum<4>(total[m][half]);
  });
  const float over = a.reduce == KV_MEAN ? max((int)a.rows.R - x.row_first, 1) : 1;
  group.add(total, a.group, g, heads, x.G, over, group_out(a.out, head, x.G, a.group, a.C), a.C, column);
}

/* The rows of the first head, or of all that are reduced together, that see a key from c0 on. */
static __device__ __forceinline__ Rows seeing(const kv_score &a, const Observed &x, int c0) {
  const int heads = heads_together(a.reduce, a.group, x.G), R = (int)a.rows.R;
  const int from = max(x.row_first, a.rows.causal ? c0 - x.bounds.shift : 0);
  return {x.h * x.G, from, c0 < x.k.at.n && from < R ? (R - from) * heads : 0, divisor(heads)};
}

/* With wgmma (score_sm90.cu): -1 where the other kernel has to compute it, else as kv_score_cuda. a: with its lse. */
int score_sm90(const kv_score &a, const Logits &logits, float power, void *stream);
#endif
