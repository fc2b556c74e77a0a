/* How error reduces the errors of the observing rows' attention outputs when one alive slot is removed, on a CPU.
 * observe.h has the loops.
 *
 * KV_EDIE needs the 1-norms of the block's values and of the tile's outputs. KV_L1 and KV_L2 need the distance of every
 * output o from every value v. It is summed from their differences, since ||v||^2 - 2 v.o + ||o||^2 would cancel. */
#ifndef KVEVICT_ERROR_H
#define KVEVICT_ERROR_H
#include "observe.h"

/* Computes e [MR, nv * VL] = the sum over D of |v - o| (p = 1) or (v - o)^2 (p = 2), with outputs o [MR, D] and values
 * v, a packed panel. nv and p are constants at every call, so that the sums stay in registers. */
KV_INLINE void kv_error_pairs(int nv, int p, const float *o, int64_t D, const float *v, float *e) {
  vf acc[MR][NV] = {{{0}}};
  for (int64_t d = 0; d < D; d++, v += PANEL) {
    vf x[NV];
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) x[j] = vf_load(v + j * VL);
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
      for (int j = 0; j < nv; j++) {
        const vf by = x[j] - o[r * D + d];
        acc[r][j] += p == 2 ? by * by : vf_abs(by);
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) vf_store(e + r * KEYS + j * VL, acc[r][j]);
}

/* Computes e [rows, KEYS] = ||v - o||_p for outputs o [rows, D] and the first n packed values v. rows is a multiple of
 * MR. */
KV_INLINE void kv_error_distances(int p, const float *o, int64_t rows, int64_t D, const float *v, int64_t n, float *e) {
  for (int64_t c = 0, nv; c < n; c += nv * VL) {
    nv = kv_round_up(n - c, VL) >= PANEL && c % PANEL == 0 ? NV : 1;
    const float *panel = v + c / PANEL * PANEL * D + c % PANEL;
    for (int64_t r = 0; r < rows; r += MR)
      if (nv == NV)
        kv_error_pairs(NV, p, o + r * D, D, panel, e + r * KEYS + c);
      else
        kv_error_pairs(1, p, o + r * D, D, panel, e + r * KEYS + c);
  }
  for (int64_t r = 0; r < rows && p == 2; r++)
    for (int64_t c = 0; c < n; c++) e[r * KEYS + c] = sqrtf(e[r * KEYS + c]);
}

/* Loads the attention outputs of steps t0 .. t0 + n - 1. Computes their 1-norms o_sum (KV_EDIE) or their distances e to
 * the block's first `most` values (KV_L1, KV_L2). */
static void kv_error_outputs(const kv_error *a, const kv_observed *head, kv_tile *x, int64_t t0, int64_t n,
                             int64_t most) {
  const int64_t G = head->query.G, D = a->rows.D, rows = G * n, padded = kv_round_up(rows, MR);
  const int64_t size = kv_size(a->rows.dtype), *stride = a->o_stride;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t at = head->b * stride[0] + (t0 + r % n) * stride[1] + (head->h * G + r / n) * stride[2];
    float *o = a->kind == KV_EDIE ? x->row : x->o + r * D;
    kv_load_row(a->rows.dtype, (const char *)a->o + at * size, o, D);
    if (a->kind == KV_EDIE) x->o_sum[r] = kv_norm_of(o, D, 1);
  }
  if (a->kind == KV_EDIE) return;
  memset(x->o + rows * D, 0, (size_t)((padded - rows) * D) * sizeof *x->o);
  if (a->kind == KV_L1) kv_error_distances(1, x->o, padded, D, x->v, most, x->e);
  if (a->kind == KV_L2) kv_error_distances(2, x->o, padded, D, x->v, most, x->e);
}

/* Adds the errors of the tile's rows to total [G, most]. A row adds nothing to a slot that it does not see, even if the
 * norm is inf. all: 1 + alpha for EDIE, else 1. */
KV_INLINE void kv_error_reduce(int edie, const kv_tile *x, int64_t G, int64_t n, int64_t most, float all) {
  for (int64_t g = 0; g < G; g++)
    for (int64_t c = 0; c < most; c += VL) {
      const vf v_sum = edie ? vf_load(x->v_sum + c) : vf_set1(0);
      vf acc = vf_set1(0);
      for (int64_t r = g * n; r < (g + 1) * n; r++) {
        const vf s = vf_load(x->s + g * x->by_head + (r - g * n) * x->by_step + c), p = vf_exp2(s - x->lse[r]);
        const vf size = edie ? v_sum + x->o_sum[r] : vf_load(x->e + r * KEYS + c);
        const vf term = x->w[r] * size * p / vf_max(all - p, vf_set1(1e-6f));
        acc += (vf)((vu)term & ~(vu)(s == vf_set1(-INFINITY)));
      }
      vf_store(x->total + g * KEYS + c, vf_load(x->total + g * KEYS + c) + acc);
    }
}

/* Packs the values of the block of columns from c0 on (KV_L1, KV_L2), or computes the values' 1-norms v_sum
 * (KV_EDIE). */
static void kv_error_values(const kv_observe *job, const kv_observed *head, kv_tile *x, int64_t c0, int64_t columns) {
  const kv_error *a = job->op;
  const kv_observers *rows = job->a;
  const kv_columns v = kv_head_columns(KV_VALUES, rows->dtype, rows->D, &rows->slots, &rows->chunk, head->b, head->h,
                                       rows->Hkv, rows->stop[head->b]);
  if (a->kind != KV_EDIE) kv_pack_k(&v, 0, c0, columns, x->v, x->row);
  for (int64_t c = 0; c < KEYS && a->kind == KV_EDIE; c++)
    x->v_sum[c] = c < columns ? kv_norm_of(kv_column_floats(&v, c0 + c, x->row), rows->D, 1) : 0;
}

static void kv_error_tile(const kv_observe *job, const kv_observed *head, kv_tile *x, int64_t t, int64_t n,
                          int64_t most) {
  const kv_error *a = job->op;
  kv_error_outputs(a, head, x, t, n, most);
  if (a->kind == KV_EDIE)
    kv_error_reduce(1, x, head->query.G, n, most, 1 + a->alpha);
  else
    kv_error_reduce(0, x, head->query.G, n, most, 1);
}

/* Returns how the op reduces the rows; job->op must be `a`. */
static kv_reduction kv_error_how(const kv_error *a) {
  return (kv_reduction){.C = a->C,
                        .group = a->group,
                        .distances = a->kind != KV_EDIE,
                        .out = a->out,
                        .block = kv_error_values,
                        .tile = kv_error_tile};
}
#endif
