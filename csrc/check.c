/* The checks of every op's struct, on any device: shapes and dtypes and, if `counts` is set, the arrays of lengths,
 * counts and indices, which must then be in the CPU's memory. */
#include "kvevict.h"

const char *kv_status_text(kv_status status) {
  static const char *const texts[] = {
      [KV_OK] = "ok",
      [KV_BAD_SHAPE] =
          "shapes do not fit: expected dimensions >= 0, H a multiple of Hkv, D a multiple of 8 in 8..512 "
          "(on a GPU 8..256), K of linear a multiple of 32",
      [KV_BAD_DTYPE] = "this op does not take this dtype, kind or reduction",
      [KV_BAD_COUNT] = "keep, len, first, stop, lo, hi or an index is out of range: it must lie within the alive slots",
      [KV_NO_MEMORY] = "out of memory: scratch could not be allocated",
      [KV_BAD_KIND] = "slots that are moved into others or read together with them must be of the same kind",
      [KV_NO_KIND] = "the gradient of kl reads packed slots on the CPU only; give it slots as computed",
      [KV_BAD_ISA] =
          "the environment variable KVEVICT_CPU_ISA is not an instruction set of this build; unset it or "
          "name one of cpu_isas()",
  };
  return (unsigned)status < sizeof texts / sizeof *texts ? texts[status] : "unknown status";
}

/* Returns whether B, H, Hkv or D is invalid. `counts` is set for calls on a CPU, where D may be larger than on a
 * GPU. */
static int kv_bad_heads(int64_t B, int64_t H, int64_t Hkv, int64_t D, int counts) {
  if (B < 0 || H < 0 || Hkv < 0 || D < 8 || D > (counts ? KV_MOST_D : KV_MOST_D_CUDA) || D % 8) return 1;
  return Hkv == 0 ? H != 0 : H == 0 || H % Hkv;
}

static int kv_bad_dtype(kv_dtype dtype) { return dtype != KV_F32 && dtype != KV_F16 && dtype != KV_BF16; }

static int kv_bad_kinds(const kv_slots *slots) {
  return (unsigned)slots->k_kind >= KV_KIND_COUNT || (unsigned)slots->v_kind >= KV_KIND_COUNT;
}

static int kv_bad_reduce(kv_reduce reduce) { return reduce != KV_SUM && reduce != KV_MEAN && reduce != KV_MAX; }

/* Returns whether any of x[0] .. x[n - 1] is outside 0..most. */
static int kv_outside(const int32_t *x, int64_t n, int64_t most) {
  int bad = 0;
  for (int64_t i = 0; i < n; i++) bad |= x[i] < 0 || x[i] > most;
  return bad;
}

/* Checks the arguments of an op over the alive slots [stored | new]. New slots end at stop[b], or at S if stop is NULL.
 * C is the most slots that a head may have. */
static kv_status kv_alive_check(kv_dtype dtype, int64_t B, int64_t H, int64_t Hkv, int64_t S, int64_t D, int64_t C,
                                const kv_slots *slots, const kv_new *chunk, const int32_t *stop, int counts) {
  if (kv_bad_heads(B, H, Hkv, D, counts) || S < 0 || C < 0) return KV_BAD_SHAPE;
  if (kv_bad_dtype(dtype) || kv_bad_kinds(slots)) return KV_BAD_DTYPE;
  if (!counts) return KV_OK;
  if (kv_outside(slots->len, B * Hkv, C) || kv_outside(chunk->first, B, S)) return KV_BAD_COUNT;
  if (stop && kv_outside(stop, B, S)) return KV_BAD_COUNT;
  for (int64_t i = 0; stop && i < B * Hkv; i++) {
    const int64_t b = i / Hkv, count = (int64_t)stop[b] - chunk->first[b];
    if (count < 0 || slots->len[i] + count > C) return KV_BAD_COUNT;
  }
  return KV_OK;
}
#define KV_ALIVE_CHECK(a, H, C, counts) \
  kv_alive_check(a->dtype, a->B, H, a->Hkv, a->S, a->D, C, &a->slots, &a->chunk, a->stop, counts)

kv_status kv_attend_check(const kv_attend *a, int counts) {
  return a->T < 0 ? KV_BAD_SHAPE : KV_ALIVE_CHECK(a, a->H, INT32_MAX, counts);
}

static kv_status kv_observers_check(const kv_observers *a, int64_t C, int counts) {
  const kv_status status = a->R < 0 ? KV_BAD_SHAPE : KV_ALIVE_CHECK(a, a->H, C, counts);
  return status == KV_OK && counts && kv_outside(a->row_first, a->B, a->R) ? KV_BAD_COUNT : status;
}

kv_status kv_score_check(const kv_score *a, int counts) {
  if (kv_bad_reduce(a->reduce) || (kv_bad_reduce(a->group) && a->group != KV_NONE)) return KV_BAD_DTYPE;
  if (a->term != KV_A && a->term != KV_SQUARE && a->term != KV_ENTROPY) return KV_BAD_DTYPE;
  if (a->reduce == KV_MAX && (a->rows.weight || a->term == KV_ENTROPY)) return KV_BAD_DTYPE;
  return kv_observers_check(&a->rows, a->C, counts);
}

kv_status kv_peak_check(const kv_peak *a, int counts) {
  const kv_observers *x = &a->rows;
  const kv_status status = kv_observers_check(x, INT32_MAX, counts);
  if (status != KV_OK || !counts) return status;
  for (int64_t i = 0; i < x->B * x->Hkv; i++) {
    const int64_t b = i / x->Hkv, n = (int64_t)x->slots.len[i] + x->stop[b] - x->chunk.first[b];
    if (a->lo[i] < 0 || a->lo[i] > a->hi[i] || a->hi[i] > n) return KV_BAD_COUNT;
  }
  return KV_OK;
}

kv_status kv_error_check(const kv_error *a, int counts) {
  if (kv_bad_reduce(a->group) && a->group != KV_NONE) return KV_BAD_DTYPE;
  if (a->kind != KV_EDIE && a->kind != KV_L1 && a->kind != KV_L2) return KV_BAD_DTYPE;
  return kv_observers_check(&a->rows, a->C, counts);
}

/* Checks attend, whose rows must be causal, and that it has R rows to observe. */
static kv_status kv_observed_attend_check(const kv_attend *a, int64_t R, int counts) {
  return R > a->T || a->stop ? KV_BAD_SHAPE : kv_attend_check(a, counts);
}

kv_status kv_attend_score_check(const kv_attend_score *a, int counts) {
  const kv_status status = kv_observed_attend_check(&a->attend, a->score.rows.R, counts);
  kv_score score = a->score;
  if (status) return status;
  kv_last_rows(&a->attend, &score.rows);
  return kv_score_check(&score, counts);
}

kv_status kv_attend_error_check(const kv_attend_error *a, int counts) {
  const kv_status status = kv_observed_attend_check(&a->attend, a->error.rows.R, counts);
  kv_error error = a->error;
  if (status) return status;
  kv_last_rows(&a->attend, &error.rows);
  return kv_error_check(&error, counts);
}

kv_status kv_attend_peak_check(const kv_attend_peak *a, int counts) {
  const kv_status status = kv_observed_attend_check(&a->attend, a->peak.rows.R, counts);
  kv_peak peak = a->peak;
  if (status) return status;
  kv_last_rows(&a->attend, &peak.rows);
  return kv_peak_check(&peak, counts);
}

kv_status kv_kl_check(const kv_kl *a, int counts) {
  return a->N < 0 ? KV_BAD_SHAPE : kv_observers_check(&a->rows, a->C, counts);
}

kv_status kv_kl_grad_check(const kv_kl_grad *a, int counts) {
  if (!counts && a->rows.slots.k_kind != KV_AS_COMPUTED) return KV_NO_KIND;
  return a->N < 0 ? KV_BAD_SHAPE : kv_observers_check(&a->rows, a->C, counts);
}

kv_status kv_refine_check(const kv_refine *a, int counts) { return KV_ALIVE_CHECK(a, a->Hkv, a->C, counts); }

kv_status kv_norm_check(const kv_norm *a, int counts) {
  return a->p != 1 && a->p != 2 ? KV_BAD_DTYPE : KV_ALIVE_CHECK(a, a->Hkv, a->C, counts);
}

kv_status kv_quadratic_check(const kv_quadratic *a, int counts) { return KV_ALIVE_CHECK(a, a->H, a->C, counts); }

kv_status kv_probe_check(const kv_probe *a, int counts) {
  if (a->R < 0 || kv_bad_heads(a->B, a->H, a->H, a->D, 1)) return KV_BAD_SHAPE;
  if (kv_bad_dtype(a->dtype)) return KV_BAD_DTYPE;
  return counts && a->partner && kv_outside(a->partner, a->D, a->D - 1) ? KV_BAD_COUNT : KV_OK;
}

kv_status kv_select_check(const kv_select *a, int counts) {
  if (a->B < 0 || a->Hkv < 0 || a->C < 0 || a->K < 0) return KV_BAD_SHAPE;
  for (int64_t head = 0; counts && head < a->B * a->Hkv; head++) {
    const int64_t n = a->n[head], keep = a->keep[head], most = n < a->K ? n : a->K;
    const int64_t first = a->protect_first[head / a->Hkv], last = a->protect_last[head / a->Hkv];
    if (n < 0 || first < 0 || last < 0) return KV_BAD_COUNT;
    if (keep < (n < first + last ? n : first + last) || keep > most) return KV_BAD_COUNT;
    if (n - last > a->C && n - last > first) return KV_BAD_COUNT; /* else an unprotected slot would have no score */
  }
  return KV_OK;
}

kv_status kv_compact_check(const kv_compact *a, int counts) {
  if (a->B < 0 || a->Hkv < 0 || a->S < 0 || a->K < 0 || a->D < 8 || a->D > KV_MOST_D || a->D % 8) return KV_BAD_SHAPE;
  if (kv_bad_dtype(a->dtype) || kv_bad_kinds(&a->src) || kv_bad_kinds(&a->dst)) return KV_BAD_DTYPE;
  if (a->src.k_kind && a->dst.k_kind && a->src.k_kind != a->dst.k_kind) return KV_BAD_KIND;
  if (a->src.v_kind && a->dst.v_kind && a->src.v_kind != a->dst.v_kind) return KV_BAD_KIND;
  for (int64_t head = 0; counts && head < a->B * a->Hkv; head++) {
    const int64_t first = a->chunk.first[head / a->Hkv], len = a->src.len[head], keep = a->keep[head];
    if (first < 0 || first > a->S || len < 0) return KV_BAD_COUNT;
    const int64_t n = len + a->S - first;
    if (keep < 0 || keep > n || (a->index && keep > a->K)) return KV_BAD_COUNT;
    if (!a->index || keep == 0) continue;
    const int32_t *index = a->index + head * a->K;
    int bad = index[0] < 0 || index[keep - 1] >= n;
    for (int64_t j = 1; j < keep; j++) bad |= index[j] <= index[j - 1];
    if (bad) return KV_BAD_COUNT;
  }
  return KV_OK;
}

kv_status kv_decode_check(const kv_decode *a, int counts) {
  if (kv_bad_heads(a->B, a->H, a->Hkv, a->D, counts) || a->C < 0) return KV_BAD_SHAPE;
  if (kv_bad_dtype(a->dtype) || kv_bad_kinds(&a->slots)) return KV_BAD_DTYPE;
  const kv_slots *prefix = &a->prefix;
  if (prefix->k && (prefix->k_kind != a->slots.k_kind || prefix->v_kind != a->slots.v_kind)) return KV_BAD_KIND;
  for (int64_t i = 0; counts && i < a->B * a->Hkv; i++) {
    const int64_t before = a->prefix.len ? a->prefix.len[i] : 0, len = a->slots.len[i];
    if (before < 0 || len < 0 || before + len >= (a->probs ? a->C : INT32_MAX)) return KV_BAD_COUNT;
  }
  return KV_OK;
}

kv_status kv_linear_check(const kv_linear *a, int counts) {
  (void)counts;
  if (a->B < 0 || a->T < 0 || a->N < 0 || a->K < 0 || a->K % 32) return KV_BAD_SHAPE;
  return kv_bad_dtype(a->dtype) ? KV_BAD_DTYPE : KV_OK;
}
