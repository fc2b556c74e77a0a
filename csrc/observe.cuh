/* Observing rows and their attention weights a[r,i] = exp(logit[r,i] - lse[r]) over the alive slots, for score,
 * peak, error and kl. */
#ifndef KV_OBSERVE_CUH
#define KV_OBSERVE_CUH
#include "attention.cuh"

/* lse_scratch returns the bytes of scratch that lse_given needs: 0 if `a` has an lse. If `a` has none, lse_given
 * computes it in scratch and makes a->lse point to it; it returns 0 or a CUDA error. Both are in peak_cuda.cu. */
int64_t lse_scratch(const kv_observers *a);
int lse_given(kv_observers *a, void *scratch, void *stream);

/* Returns the larger of two numbers, or NaN if either is NaN. */
KV_DEVICE float max_nan(float x, float y) { return isnan(y) || y > x ? y : x; }
/* Returns the largest number of the 4 lanes that hold a row of a fragment, or NaN if one of them is NaN. */
KV_DEVICE float row_max_nan(float x) {
  x = max_nan(x, __shfl_xor_sync(ALL_LANES, x, 1));
  return max_nan(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

/* One (batch row, kv head): its keys k, and how many of them (`bounds`) each of the R observing rows sees. */
struct Observed {
  int b, h, G, row_first;
  Columns k;
  Bounds bounds;
};

template <class E>
KV_DEVICE Observed observed(const kv_observers &a, int head) {
  const int b = head / a.Hkv, h = head % a.Hkv;
  const Columns k = head_columns<E>(KV_KEYS, a.slots, a.chunk, b, h, a.Hkv, a.stop[b], a.D);
  const int n = k.at.n;
  return {b, h, (int)(a.H / a.Hkv), a.row_first[b], k, {(int)(n - a.R), a.causal ? 0 : n, n}};
}

/* What a kernel needs of an observing row beside its query. seen: how many slots the row sees, 0 if it does not
 * observe. If the row's lse is NaN or its weight is not finite, lse is NaN and weight 1 here, so that only slots
 * that the row sees become NaN. */
struct alignas(16) RowValues {
  float lse, weight; /* lse is in log2 units */
  int seen;
};

KV_DEVICE RowValues row_values(const kv_observers &a, const Observed &x, const Rows &rows, int r) {
  if (r >= rows.count) return {0, 0, 0};
  const int t = rows.step(r), head = rows.head_of(r);
  const float lse = a.lse[x.b * a.lse_stride[0] + head * a.lse_stride[1] + t];
  const float weight = a.weight ? a.weight[x.b * a.weight_stride[0] + head * a.weight_stride[1] + t] : 1;
  const bool bad = isnan(lse) || !isfinite(weight);
  return {bad ? NAN : lse * LOG2E, bad ? 1 : weight, lse == -INFINITY || t < x.row_first ? 0 : x.bounds.seen(t)};
}

/* Returns how many of a group's G query heads are reduced as one set of rows: all G if only the sum over all their
 * rows is wanted, else 1. rows, group: the reductions over rows and over heads. */
static __host__ __device__ __forceinline__ int heads_together(kv_reduce rows, kv_reduce group, int G) {
  return rows != KV_MAX && (group == KV_SUM || group == KV_MEAN) ? G : 1;
}

/* Results of a warp's 16 MT columns, reduced over the query heads of the group; the lane's part. */
template <int MT>
struct Group {
  float total[MT][2];

  /* Adds x, the results of heads g .. g + heads - 1 of the G heads, equal in the 4 lanes of a fragment row. With
   * KV_NONE each call stores its results to out, else the call with the last heads does. over: divisor of the
   * results; column: the warp's first column. */
  __device__ __forceinline__ void add(const float (&x)[MT][2], kv_reduce how, int g, int heads, int G, float over,
                                      float *out, int64_t C, int column) {
    each_row<MT>([&](int m, int half) {
      float &sum = total[m][half];
      const float y = x[m][half];
      sum = g == 0 || how == KV_NONE ? y : how == KV_MAX ? max_nan(sum, y) : sum + y;
      const int c = column + fragment_row() + 16 * m + 8 * half;
      if (fragment_column() || c >= C) return;
      if (how == KV_NONE)
        out[g * C + c] = sum / over;
      else if (g + heads == G)
        out[c] = sum / (how == KV_MEAN ? G * over : over);
    });
  }
};

/* Returns where the results of kv head `head` = b * Hkv + h start in out: [B, Hkv, C], or [B, H, C] if group is
 * KV_NONE. */
KV_DEVICE float *group_out(float *out, int head, int G, kv_reduce group, int64_t C) {
  return out + head * (group == KV_NONE ? G * C : C);
}
#endif
