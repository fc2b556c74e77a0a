/* kl and kl_grad on every instruction set of this processor against loops in double, written from the comments of
 * kvevict.h and the formulas of kl_grad_cpu.c. Outputs start as NaN; each result is computed again with threads and
 * must have the same bits. See run.sh. */
#include "problem.h"

typedef struct {
  problem p;
  kv_observers rows;
  int64_t N, C;
  float *target, *grad;
} compared;

static compared make_compared(kv_dtype dtype, int64_t R, int64_t S, int64_t longest) {
  compared x = {.p = make(dtype, R, S, longest, 1), .N = below(longest + S + 3), .C = longest + S + below(9)};
  const problem *p = &x.p;
  int32_t *row_first = need((size_t)p->B, sizeof *row_first);
  for (int64_t b = 0; b < p->B; b++) row_first[b] = (int32_t)(below(2) ? 0 : below(R + 1));
  x.rows = (kv_observers){.dtype = dtype, .B = p->B, .H = p->H, .Hkv = p->Hkv, .R = R, .S = S, .D = p->D};
  x.rows.scale = p->scale, x.rows.softcap = p->softcap, x.rows.causal = below(4) != 0;
  x.rows.q = p->q, x.rows.row_first = row_first, x.rows.sinks = p->sinks;
  x.rows.slots = p->slots, x.rows.chunk = p->chunk, x.rows.stop = p->stop;
  memcpy(x.rows.q_stride, p->q_stride, sizeof p->q_stride);
  x.target = nans(p->B * p->H * x.N), x.grad = nans(p->B * p->H);
  for (int64_t i = 0; i < p->B * p->H * x.N; i++) x.target[i] = below(3) ? (float)fabs(normal()) : 0;
  for (int64_t i = 0; i < p->B * p->H; i++) x.grad[i] = (float)normal();
  return x;
}

static void drop_compared(compared *x) {
  free((void *)x->rows.row_first), free(x->target), free(x->grad);
  drop(&x->p);
}

/* a [R, n] of query head h and their mean p [n]; returns a bound of fp32's relative error. */
static double attention(const compared *x, int64_t b, int64_t h, int64_t n, double *a, double *p) {
  const int64_t R = x->rows.R, from = x->rows.row_first[b];
  double error = 1e-6;
  memset(a, 0, (size_t)(R * n) * sizeof *a), memset(p, 0, (size_t)n * sizeof *p);
  for (int64_t r = from; r < R; r++) {
    const int64_t most = x->rows.causal ? n - R + r + 1 : n, seen = most < 0 ? 0 : most;
    for (int64_t i = 0; i < seen; i++) a[r * n + i] = logit_of(&x->p, b, h, r, i, &error);
    const double lse = softmax(a + r * n, seen, x->rows.sinks ? x->rows.sinks[h] : -INFINITY);
    error = fmax(error, 2e-7 * fabs(isfinite(lse) ? lse : 0));
    for (int64_t i = 0; i < seen; i++) p[i] += a[r * n + i] / (double)(R - from);
  }
  return 4 * error;
}

/* One query head: the loss; adds its gradient to dq [R, D] and dk [n, D]. Returns a bound of fp32's error in these. */
static double head_of(const compared *x, int64_t b, int64_t h, int64_t n, double *loss, double *dq, double *dk) {
  const int64_t R = x->rows.R, D = x->rows.D, N = n < x->N ? n : x->N, head = b * x->rows.H + h;
  double *a = need((size_t)(R * n), sizeof *a), *p = need((size_t)n, sizeof *p), *g = need((size_t)n, sizeof *g);
  const double *q = x->p.qs + head * R * D, *k = x->p.ks + (b * x->p.Hkv + h / x->p.G) * x->p.most * D;
  const float *t = x->target + head * x->N;
  double error = attention(x, b, h, n, a, p), ts = 0, ps = 0, largest = 0, unused = 0;
  for (int64_t i = 0; i < N; i++) ts += t[i], ps += p[i];
  *loss = 0;
  for (int64_t i = 0; i < N && ts > 0 && ps > 0; i++) {
    if (t[i] > 0) *loss += t[i] / ts * log(t[i] / ts / (fmax(p[i], KV_KL_LEAST) / ps));
    g[i] = x->grad[head] / (double)(R - x->rows.row_first[b]) * (1 / ps - (p[i] < KV_KL_LEAST ? 0 : t[i] / ts / p[i]));
    if (t[i] > 0 && p[i] < 1e-25) error = INFINITY; /* near KV_KL_LEAST rounding decides */
  }
  for (int64_t r = 0; r < R; r++) {
    double c = 0, size = 0;
    for (int64_t i = 0; i < n; i++) c += a[r * n + i] * g[i], size += a[r * n + i] * fabs(g[i]);
    largest = fmax(largest, size);
    for (int64_t i = 0; i < n; i++) {
      double w = a[r * n + i] * (g[i] - c) * x->p.scale;
      const double y = w != 0 && x->p.softcap > 0 ? logit_of(&x->p, b, h, r, i, &unused) / x->p.softcap : 0;
      w *= 1 - y * y;
      for (int64_t d = 0; d < D && w != 0; d++) dq[r * D + d] += w * k[i * D + d], dk[i * D + d] += w * q[r * D + d];
    }
  }
  free(a), free(p), free(g);
  return error * largest * 8 * x->p.scale * (x->p.G + (double)R / 8);
}

static void check_head(const compared *x, int64_t at, const float *loss, const float *dq, const float *dk) {
  const problem *p = &x->p;
  const int64_t b = at / p->Hkv, n = p->slots.len[at] + p->stop[b] - p->chunk.first[b], R = p->T, D = p->D;
  double *want = need((size_t)(n * D), sizeof *want), total = 1e-30;
  for (int64_t g = 0; g < p->G; g++) {
    const int64_t h = at % p->Hkv * p->G + g, head = b * p->H + h;
    double *rows = need((size_t)(R * D), sizeof *rows), value;
    const double error = head_of(x, b, h, n, &value, rows, want) + 1e-30;
    total += error;
    check_close(loss[head], value, isfinite(error) ? 1e-4 * (1 + fabs(value)) : INFINITY, "loss", head);
    for (int64_t i = 0; i < R * D; i++) check_close(dq[head * R * D + i], rows[i], error, "dq", head * R * D + i);
    free(rows);
  }
  for (int64_t i = 0; i < p->S * D; i++) {
    const int64_t slot = i / D - p->chunk.first[b] + p->slots.len[at];
    const int alive = i / D >= p->chunk.first[b] && i / D < p->stop[b];
    check_close(dk[at * p->S * D + i], alive ? want[slot * D + i % D] : 0, alive ? total : 1e-30, "dk", i);
  }
  free(want);
}

static void test_kl(kv_dtype dtype, int64_t R, int64_t S, int64_t longest) {
  compared x = make_compared(dtype, R, S, longest);
  const problem *p = &x.p;
  const int64_t sizes[] = {p->B * p->H, p->B * p->H * R, p->B * p->H * x.C, p->B * p->H * R * p->D,
                           p->B * p->Hkv * S * p->D};
  float *out[2][5];
  for (int i = 0; i < 2; i++) {
    for (int j = 0; j < 5; j++) out[i][j] = nans(sizes[j]);
    const kv_kl a = {x.rows, x.N, x.C, x.target, out[i][0], out[i][1], out[i][2]};
    kv_kl_grad g = {x.rows, x.N, x.C, x.target, out[i][2], x.grad, out[i][3], out[i][4]};
    g.rows.lse = out[i][1], g.rows.lse_stride[0] = p->H * R, g.rows.lse_stride[1] = R;
    kv_set_parallel(i ? threads_hook : NULL, 3);
    check(kv_kl_cpu(&a) == KV_OK && kv_kl_grad_cpu(&g) == KV_OK, "status");
  }
  for (int j = 0; j < 5; j++) check_same(out[0][j], out[1][j], sizes[j], "serial and parallel");
  for (int64_t i = 0; i < p->B * p->Hkv && !p->wild && !p->huge; i++)
    check_head(&x, i, out[0][0], out[0][3], out[0][4]);
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 5; j++) free(out[i][j]);
  drop_compared(&x);
}

static int test_isa(void) {
  static const int64_t lengths[] = {0, 1, 2, 5, 17, 33, 50}, slots[] = {0, 1, 3, 40, 64, 255, 300, 600};
  const int n = rounds(60);
  for (int i = 0; i < n; i++) test_kl((kv_dtype)(i % 3), one_of(7, lengths), one_of(7, lengths), one_of(8, slots));
  report("kl", 0);
  return failures > 0;
}

int main(void) { return run_isas(test_isa); }
