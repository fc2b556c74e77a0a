/* A state is the softmax of a row over some of its slots, in a form that can be merged with the row's states of other
 * slots. m is the largest logit in log2 units, -inf if no slot was seen; d the sum of the weights 2^(logit - m); o the
 * sum of these weights times the values. States are merged in the order of the slots, so the result has the same bits
 * every time. */
#ifndef KVEVICT_STATE_H
#define KVEVICT_STATE_H
#include "simd.h"

/* The state of one row, or the states of several consecutive rows. */
typedef struct {
  float *o, *m, *d; /* o [rows, width], m [rows], d [rows] */
} kv_state;

/* Returns the i-th group of `rows` states in memory, counted from 0; a row's state takes width + 2 floats. */
static inline kv_state kv_state_in(float *memory, int64_t i, int64_t rows, int64_t width) {
  memory += i * rows * (width + 2);
  return (kv_state){memory, memory + rows * width, memory + rows * (width + 1)};
}

/* Returns the states of rows r, r + 1, ... of x. */
static inline kv_state kv_state_from(kv_state x, int64_t width, int64_t r) {
  return (kv_state){x.o + r * width, x.m + r, x.d + r};
}

/* Initialises the states of `rows` rows: no slot is seen yet. */
static inline void kv_state_start(kv_state x, int64_t rows, int64_t width) {
  memset(x.o, 0, (size_t)(rows * width) * sizeof *x.o);
  for (int64_t r = 0; r < rows; r++) x.m[r] = -INFINITY, x.d[r] = 0;
}

static inline float kv_exp2(float x) { return vf_exp2(vf_set1(x))[0]; }

/* Does one step of a row's online softmax. Computes the weights p = 2^(s - m) of the logits s [width], with m the
 * maximum so far, and adds the sum of p to d; p may be s. If `pairs`, p is then rounded to pairs of bf16. Returns
 * alpha, by which the caller must multiply o. While m is -inf, since no column was seen, 0 is subtracted in place of
 * m. */
static inline float kv_softmax(int pairs, const float *s, float *p, int64_t width, float *m, float *d) {
  const vf none = vf_set1(-INFINITY);
  vf top[2] = {none, none}, sum[2] = {vf_set1(0), vf_set1(0)}; /* two independent chains, to hide latency */
  for (int64_t c = 0; c < width; c += 2 * VL) {
    top[0] = vf_max(vf_load(s + c), top[0]);
    if (c + VL < width) top[1] = vf_max(vf_load(s + c + VL), top[1]);
  }
  const float most = vf_largest(vf_max(top[0], top[1])), before = *m;
  if (most > before) *m = most;
  const float at = *m == -INFINITY ? 0 : *m;
  for (int64_t c = 0; c < width; c += 2 * VL) {
    const int both = c + VL < width;
    const vf one = vf_exp2(vf_load(s + c) - at), next = vf_exp2((both ? vf_load(s + c + VL) : none) - at);
    vf_store(p + (pairs ? c / 2 : c), pairs ? vf_pairs(one, next) : one);
    if (both && !pairs) vf_store(p + c + VL, next);
    sum[0] += one, sum[1] += next;
  }
  const float alpha = kv_exp2(before - at);
  *d = *d * alpha + vf_sum(sum[0] + sum[1]);
  return alpha;
}

/* Merges n states of one row into the state y. The first of the n is x, the others follow `step` floats apart; `sink`
 * is one more logit, without a value. y.o may be NULL. */
static inline void kv_state_merge(kv_state x, int64_t step, int64_t n, int64_t width, float sink, kv_state y) {
  *y.m = sink;
  for (int64_t i = 0; i < n; i++)
    if (x.m[i * step] > *y.m) *y.m = x.m[i * step];
  const float at = *y.m == -INFINITY ? 0 : *y.m;
  *y.d = kv_exp2(sink - at);
  for (int64_t d = 0; y.o && d < width; d++) y.o[d] = 0;
  for (int64_t i = 0; i < n; i++, x.o += step) {
    const float weight = kv_exp2(x.m[i * step] - at);
    *y.d += weight * x.d[i * step];
    for (int64_t d = 0; y.o && d < width; d++) y.o[d] += weight * x.o[d];
  }
}

/* Divides o of one row by d, so that o becomes the weighted mean of the values; 0 if no slot was seen. */
static inline void kv_state_normalize(kv_state x, int64_t width) {
  for (int64_t d = 0; d < width; d++) x.o[d] = *x.d == 0 ? 0 : x.o[d] / *x.d;
}

/* Returns one row's log-sum-exp in log2 units. */
static inline float kv_state_lse(kv_state x) { return *x.m + log2f(*x.d); }
#endif
