/* Where torch and Python meet the kernels; with tensors.h the only file that sees torch. Each op's schema stands above
 * the function that turns its tensors into the struct of kvevict.h and calls the kernel. Shapes are in kvevict.h and in
 * kvevict/_ops.py; an empty one-dimensional tensor stands for an array that may be NULL.
 *
 * Built on torch's stable headers and the limited C API, one binary serves every torch and CPython that is new enough.
 * Everything a kernel will read or write is checked here against the size of its tensor, or by the kernel against its
 * struct, so a wrong call raises. What only the values of tensors tell is checked on the CPU alone. */
#include <Python.h>

#include <cstdlib>
#include <tuple>

#include "tensors.h"

namespace {

#ifdef KVEVICT_CUDA_ARCHS
constexpr const char *cuda_archs = KVEVICT_CUDA_ARCHS;
#define KV_KERNELS(op) \
  Kernels<kv_##op> { kv_##op##_check, kv_##op##_cpu, kv_##op##_cuda_scratch, kv_##op##_cuda }
#else
constexpr const char *cuda_archs = "";
#define KV_KERNELS(op) \
  Kernels<kv_##op> { kv_##op##_check, kv_##op##_cpu, nullptr, nullptr }
#endif

constexpr const char *attend_schema =
    "attend(Tensor q, Tensor k_slots, Tensor v_slots, Tensor offset, Tensor len, Tensor k, Tensor v, Tensor first, "
    "Tensor stop, Tensor sinks, float scale, float softcap) -> (Tensor, Tensor)";

std::tuple<Tensor, Tensor> attend(Tensor q, Tensor k_slots, Tensor v_slots, Tensor offset, Tensor len, Tensor k,
                                  Tensor v, Tensor first, Tensor stop, Tensor sinks, double scale, double softcap) {
  const Call call(q);
  const int64_t *qs = sizes4("q", q), *ks = sizes4("k", k);
  int64_t B = qs[0], H = qs[1], T = qs[2], D = qs[3], Hkv = ks[1], S = ks[2], n = k_slots.size(0);
  ScalarType type = q.scalar_type();
  Tensor out = call.empty(type, {B, T, H, D}), lse = call.empty(ScalarType::Float, {B, H, T});
  kv_attend a = {};
  a.dtype = dtype_of(q);
  a.B = B, a.H = H, a.Hkv = Hkv, a.T = T, a.S = S, a.D = D;
  a.scale = static_cast<float>(scale), a.softcap = static_cast<float>(softcap);
  a.q = call.rows("q", q, type, {B, H, T, D}, a.q_stride);
  a.slots.k = call.slots("k_slots", k_slots, type, n, D);
  a.slots.v = call.slots("v_slots", v_slots, type, n, D);
  a.slots.offset = call.array<int64_t>("offset", offset, {B, Hkv});
  a.slots.len = call.array<int32_t>("len", len, {B, Hkv});
  a.chunk.k = call.rows("k", k, type, {B, Hkv, S, D}, a.chunk.k_stride);
  a.chunk.v = call.rows("v", v, type, {B, Hkv, S, D}, a.chunk.v_stride);
  a.chunk.first = call.array<int32_t>("first", first, {B});
  a.stop = is_none(stop) ? nullptr : call.array<int32_t>("stop", stop, {B});
  a.sinks = is_none(sinks) ? nullptr : call.array<float>("sinks", sinks, {H});
  a.out = out.data_ptr();
  a.lse = static_cast<float *>(lse.data_ptr());
  call.check_slots("k_slots", a.slots.offset, a.slots.len, B * Hkv, n, 0);
  call.run(a, KV_KERNELS(attend));
  return {out, lse};
}

/* What score, peak and error share. q and k may become dense copies, which must live until the kernel is done. */
kv_observers observers(const Call &call, Tensor &q, const Tensor &row_first, const Tensor &k_slots,
                       const Tensor &offset, const Tensor &len, Tensor &k, const Tensor &first, const Tensor &stop,
                       const Tensor &lse, const Tensor &sinks, double scale, double softcap, bool causal) {
  const int64_t *qs = sizes4("q", q), *ks = sizes4("k", k);
  ScalarType type = q.scalar_type();
  kv_observers a = {};
  a.dtype = dtype_of(q);
  a.B = qs[0], a.H = qs[1], a.Hkv = ks[1], a.R = qs[2], a.S = ks[2], a.D = qs[3];
  a.scale = static_cast<float>(scale), a.softcap = static_cast<float>(softcap);
  a.causal = causal;
  a.q = call.rows("q", q, type, {a.B, a.H, a.R, a.D}, a.q_stride);
  a.row_first = call.array<int32_t>("row_first", row_first, {a.B});
  a.slots.k = call.slots("k_slots", k_slots, type, k_slots.size(0), a.D);
  a.slots.offset = call.array<int64_t>("offset", offset, {a.B, a.Hkv});
  a.slots.len = call.array<int32_t>("len", len, {a.B, a.Hkv});
  a.chunk.k = call.rows("k", k, type, {a.B, a.Hkv, a.S, a.D}, a.chunk.k_stride);
  a.chunk.first = call.array<int32_t>("first", first, {a.B});
  a.stop = call.array<int32_t>("stop", stop, {a.B});
  if (!is_none(lse)) a.lse = call.per_row("lse", lse, a, a.lse_stride);
  a.sinks = is_none(sinks) ? nullptr : call.array<float>("sinks", sinks, {a.H});
  call.check_slots("k_slots", a.slots.offset, a.slots.len, a.B * a.Hkv, k_slots.size(0), 0);
  return a;
}

/* A result per slot: of the kv heads, or of the query heads where they are not reduced. */
Tensor per_slot(const Call &call, const kv_observers &a, kv_reduce group, int64_t columns) {
  STD_TORCH_CHECK(columns >= 0, "columns is ", columns);
  return call.empty(ScalarType::Float, {a.B, group == KV_NONE ? a.H : a.Hkv, columns});
}

constexpr const char *score_schema =
    "score(Tensor q, Tensor row_first, Tensor k_slots, Tensor offset, Tensor len, Tensor k, Tensor first, Tensor stop, "
    "Tensor lse, Tensor sinks, Tensor weight, float scale, float softcap, bool causal, int term, int reduce, "
    "int group, int columns) -> Tensor";

Tensor score(Tensor q, Tensor row_first, Tensor k_slots, Tensor offset, Tensor len, Tensor k, Tensor first, Tensor stop,
             Tensor lse, Tensor sinks, Tensor weight, double scale, double softcap, bool causal, int64_t term,
             int64_t reduce, int64_t group, int64_t columns) {
  const Call call(q);
  kv_score a = {};
  a.rows = observers(call, q, row_first, k_slots, offset, len, k, first, stop, lse, sinks, scale, softcap, causal);
  if (!is_none(weight)) a.rows.weight = call.per_row("weight", weight, a.rows, a.rows.weight_stride);
  a.term = option("term", term, KV_ENTROPY);
  a.reduce = option("reduce", reduce, KV_MAX), a.group = option("group", group, KV_NONE);
  a.C = columns;
  Tensor out = per_slot(call, a.rows, a.group, columns);
  a.out = static_cast<float *>(out.data_ptr());
  call.run(a, KV_KERNELS(score));
  return out;
}

constexpr const char *peak_schema =
    "peak(Tensor q, Tensor row_first, Tensor k_slots, Tensor offset, Tensor len, Tensor k, Tensor first, Tensor stop, "
    "Tensor lo, Tensor hi, Tensor lse, Tensor sinks, float scale, float softcap, bool causal) -> Tensor";

Tensor peak(Tensor q, Tensor row_first, Tensor k_slots, Tensor offset, Tensor len, Tensor k, Tensor first, Tensor stop,
            Tensor lo, Tensor hi, Tensor lse, Tensor sinks, double scale, double softcap, bool causal) {
  const Call call(q);
  kv_peak a = {};
  a.rows = observers(call, q, row_first, k_slots, offset, len, k, first, stop, lse, sinks, scale, softcap, causal);
  Tensor out = call.empty(ScalarType::Float, {a.rows.B, a.rows.H, a.rows.R});
  a.lo = call.array<int32_t>("lo", lo, {a.rows.B, a.rows.Hkv});
  a.hi = call.array<int32_t>("hi", hi, {a.rows.B, a.rows.Hkv});
  a.out = static_cast<float *>(out.data_ptr());
  call.run(a, KV_KERNELS(peak));
  return out;
}

constexpr const char *error_schema =
    "error(Tensor q, Tensor row_first, Tensor k_slots, Tensor v_slots, Tensor offset, Tensor len, Tensor k, Tensor v, "
    "Tensor first, Tensor stop, Tensor o, Tensor lse, Tensor sinks, Tensor weight, float scale, float softcap, "
    "bool causal, int kind, float alpha, int group, int columns) -> Tensor";

Tensor error(Tensor q, Tensor row_first, Tensor k_slots, Tensor v_slots, Tensor offset, Tensor len, Tensor k, Tensor v,
             Tensor first, Tensor stop, Tensor o, Tensor lse, Tensor sinks, Tensor weight, double scale, double softcap,
             bool causal, int64_t kind, double alpha, int64_t group, int64_t columns) {
  const Call call(q);
  kv_error a = {};
  a.rows = observers(call, q, row_first, k_slots, offset, len, k, first, stop, lse, sinks, scale, softcap, causal);
  if (!is_none(weight)) a.rows.weight = call.per_row("weight", weight, a.rows, a.rows.weight_stride);
  ScalarType type = q.scalar_type();
  a.rows.slots.v = call.slots("v_slots", v_slots, type, k_slots.size(0), a.rows.D);
  a.rows.chunk.v = call.rows("v", v, type, {a.rows.B, a.rows.Hkv, a.rows.S, a.rows.D}, a.rows.chunk.v_stride);
  a.o = call.rows("o", o, type, {a.rows.B, a.rows.R, a.rows.H, a.rows.D}, a.o_stride);
  a.kind = option("kind", kind, KV_L2);
  a.group = option("group", group, KV_NONE);
  a.C = columns;
  Tensor out = per_slot(call, a.rows, a.group, columns);
  a.alpha = static_cast<float>(alpha);
  a.out = static_cast<float *>(out.data_ptr());
  call.run(a, KV_KERNELS(error));
  return out;
}

constexpr const char *kl_schema =
    "kl(Tensor q, Tensor k, Tensor target, Tensor row_first, Tensor k_slots, Tensor offset, Tensor len, Tensor first, "
    "Tensor stop, Tensor sinks, float scale, float softcap, bool causal, int columns) -> (Tensor, Tensor, Tensor)";

std::tuple<Tensor, Tensor, Tensor> kl(Tensor q, Tensor k, Tensor target, Tensor row_first, Tensor k_slots,
                                      Tensor offset, Tensor len, Tensor first, Tensor stop, Tensor sinks, double scale,
                                      double softcap, bool causal, int64_t columns) {
  const Call call(q);
  const Tensor none = call.empty(ScalarType::Float, {0});
  kv_kl a = {};
  a.rows = observers(call, q, row_first, k_slots, offset, len, k, first, stop, none, sinks, scale, softcap, causal);
  STD_TORCH_CHECK(target.dim() == 3, "target has ", target.dim(), " dimensions, expected 3");
  a.N = target.size(2), a.C = columns;
  Tensor loss = call.empty(ScalarType::Float, {a.rows.B, a.rows.H});
  Tensor lse = call.empty(ScalarType::Float, {a.rows.B, a.rows.H, a.rows.R});
  Tensor paid = per_slot(call, a.rows, KV_NONE, columns);
  a.target = call.array<float>("target", target, {a.rows.B, a.rows.H, a.N});
  a.loss = static_cast<float *>(loss.data_ptr());
  a.lse = static_cast<float *>(lse.data_ptr());
  a.paid = static_cast<float *>(paid.data_ptr());
  call.run(a, KV_KERNELS(kl));
  return {loss, lse, paid};
}

constexpr const char *kl_grad_schema =
    "kl_grad(Tensor q, Tensor k, Tensor target, Tensor row_first, Tensor k_slots, Tensor offset, Tensor len, "
    "Tensor first, Tensor stop, Tensor lse, Tensor paid, Tensor grad, float scale, float softcap, bool causal) -> "
    "(Tensor, Tensor)";

std::tuple<Tensor, Tensor> kl_grad(Tensor q, Tensor k, Tensor target, Tensor row_first, Tensor k_slots, Tensor offset,
                                   Tensor len, Tensor first, Tensor stop, Tensor lse, Tensor paid, Tensor grad,
                                   double scale, double softcap, bool causal) {
  const Call call(q);
  const Tensor none = call.empty(ScalarType::Float, {0});
  kv_kl_grad a = {};
  a.rows = observers(call, q, row_first, k_slots, offset, len, k, first, stop, none, none, scale, softcap, causal);
  a.rows.lse = call.per_row("lse", lse, a.rows, a.rows.lse_stride);
  STD_TORCH_CHECK(target.dim() == 3 && paid.dim() == 3, "target and paid must have 3 dimensions");
  a.N = target.size(2), a.C = paid.size(2);
  Tensor dq = call.empty(ScalarType::Float, {a.rows.B, a.rows.H, a.rows.R, a.rows.D});
  Tensor dk = call.empty(ScalarType::Float, {a.rows.B, a.rows.Hkv, a.rows.S, a.rows.D});
  a.target = call.array<float>("target", target, {a.rows.B, a.rows.H, a.N});
  a.paid = call.array<float>("paid", paid, {a.rows.B, a.rows.H, a.C});
  a.grad = call.array<float>("grad", grad, {a.rows.B, a.rows.H});
  a.dq = static_cast<float *>(dq.data_ptr());
  a.dk = static_cast<float *>(dk.data_ptr());
  call.run(a, KV_KERNELS(kl_grad));
  return {dq, dk};
}

constexpr const char *refine_schema =
    "refine(Tensor v_slots, Tensor offset, Tensor len, Tensor v, Tensor first, Tensor stop, Tensor score, bool fast, "
    "bool squared) -> Tensor";

Tensor refine(Tensor v_slots, Tensor offset, Tensor len, Tensor v, Tensor first, Tensor stop, Tensor score, bool fast,
              bool squared) {
  const Call call(v);
  const int64_t *vs = sizes4("v", v);
  int64_t B = vs[0], Hkv = vs[1], S = vs[2], D = vs[3], n = v_slots.size(0);
  STD_TORCH_CHECK(score.dim() == 3, "score has ", score.dim(), " dimensions, expected 3");
  kv_refine a = {};
  a.dtype = dtype_of(v);
  a.B = B, a.Hkv = Hkv, a.S = S, a.D = D, a.C = score.size(2);
  a.fast = fast, a.squared = squared;
  Tensor out = call.empty(ScalarType::Float, {B, Hkv, a.C});
  a.score = call.array<float>("score", score, {B, Hkv, a.C});
  a.slots.v = call.slots("v_slots", v_slots, v.scalar_type(), n, D);
  a.slots.offset = call.array<int64_t>("offset", offset, {B, Hkv});
  a.slots.len = call.array<int32_t>("len", len, {B, Hkv});
  a.chunk.v = call.rows("v", v, v.scalar_type(), {B, Hkv, S, D}, a.chunk.v_stride);
  a.chunk.first = call.array<int32_t>("first", first, {B});
  a.stop = call.array<int32_t>("stop", stop, {B});
  a.out = static_cast<float *>(out.data_ptr());
  call.check_slots("v_slots", a.slots.offset, a.slots.len, B * Hkv, n, 0);
  call.run(a, KV_KERNELS(refine));
  return out;
}

constexpr const char *norm_schema =
    "norm(Tensor x_slots, Tensor offset, Tensor len, Tensor x, Tensor first, Tensor stop, int p, int columns) -> "
    "Tensor";

Tensor norm(Tensor x_slots, Tensor offset, Tensor len, Tensor x, Tensor first, Tensor stop, int64_t p,
            int64_t columns) {
  const Call call(x);
  const int64_t *xs = sizes4("x", x);
  int64_t B = xs[0], Hkv = xs[1], S = xs[2], D = xs[3], n = x_slots.size(0);
  STD_TORCH_CHECK(columns >= 0, "columns is ", columns);
  kv_norm a = {};
  a.dtype = dtype_of(x);
  a.B = B, a.Hkv = Hkv, a.S = S, a.D = D, a.C = columns;
  a.p = option("p", p, 2);
  Tensor out = call.empty(ScalarType::Float, {B, Hkv, columns});
  a.slots.k = call.slots("x_slots", x_slots, x.scalar_type(), n, D);
  a.slots.offset = call.array<int64_t>("offset", offset, {B, Hkv});
  a.slots.len = call.array<int32_t>("len", len, {B, Hkv});
  a.chunk.k = call.rows("x", x, x.scalar_type(), {B, Hkv, S, D}, a.chunk.k_stride);
  a.chunk.first = call.array<int32_t>("first", first, {B});
  a.stop = call.array<int32_t>("stop", stop, {B});
  a.out = static_cast<float *>(out.data_ptr());
  call.check_slots("x_slots", a.slots.offset, a.slots.len, B * Hkv, n, 0);
  call.run(a, KV_KERNELS(norm));
  return out;
}

constexpr const char *select_schema =
    "select(Tensor score, Tensor n, Tensor keep, Tensor protect_first, Tensor protect_last, int columns) -> Tensor";

Tensor select(Tensor score, Tensor n, Tensor keep, Tensor protect_first, Tensor protect_last, int64_t columns) {
  const Call call(score);
  STD_TORCH_CHECK(score.dim() == 3, "score has ", score.dim(), " dimensions, expected 3");
  STD_TORCH_CHECK(columns >= 0, "columns is ", columns);
  int64_t B = score.size(0), Hkv = score.size(1), C = score.size(2);
  Tensor index = call.empty(ScalarType::Int, {B, Hkv, columns});
  kv_select a = {};
  a.B = B, a.Hkv = Hkv, a.C = C, a.K = columns;
  a.score = call.array<float>("score", score, {B, Hkv, C});
  a.n = call.array<int32_t>("n", n, {B, Hkv});
  a.keep = call.array<int32_t>("keep", keep, {B, Hkv});
  a.protect_first = call.array<int32_t>("protect_first", protect_first, {B});
  a.protect_last = call.array<int32_t>("protect_last", protect_last, {B});
  a.index = static_cast<int32_t *>(index.data_ptr());
  call.run(a, KV_KERNELS(select));
  return index;
}

/* dst is src, head by head, or shares no row with it. */
void check_alias(const char *name, const void *src, int64_t src_rows, const void *dst, int64_t dst_rows, int64_t width,
                 bool same_offsets) {
  const char *s = static_cast<const char *>(src), *d = static_cast<const char *>(dst);
  bool apart = s + src_rows * width <= d || d + dst_rows * width <= s;
  STD_TORCH_CHECK(apart || (s == d && same_offsets), name, "_dst shares memory with ", name,
                  "_src, but is not the same buffer with the same offsets");
}

constexpr const char *compact_schema =
    "compact(Tensor k_src, Tensor v_src, Tensor pos_src, Tensor src_offset, Tensor src_len, Tensor k, Tensor v, "
    "Tensor pos, Tensor first, Tensor index, Tensor keep, Tensor(a!) k_dst, Tensor(b!) v_dst, Tensor(c!) pos_dst, "
    "Tensor dst_offset) -> ()";

void compact(Tensor k_src, Tensor v_src, Tensor pos_src, Tensor src_offset, Tensor src_len, Tensor k, Tensor v,
             Tensor pos, Tensor first, Tensor index, Tensor keep, Tensor k_dst, Tensor v_dst, Tensor pos_dst,
             Tensor dst_offset) {
  const Call call(k);
  const int64_t *ks = sizes4("k", k);
  int64_t B = ks[0], Hkv = ks[1], S = ks[2], D = ks[3], n = k_src.size(0), m = k_dst.size(0);
  ScalarType type = k.scalar_type();
  kv_compact a = {};
  a.dtype = dtype_of(k);
  a.B = B, a.Hkv = Hkv, a.S = S, a.D = D;
  a.src.k = call.slots("k_src", k_src, type, n, D);
  a.src.v = call.slots("v_src", v_src, type, n, D);
  a.src.pos = call.array<int32_t>("pos_src", pos_src, {n});
  a.src.offset = call.array<int64_t>("src_offset", src_offset, {B, Hkv});
  a.src.len = call.array<int32_t>("src_len", src_len, {B, Hkv});
  a.chunk.k = call.rows("k", k, type, {B, Hkv, S, D}, a.chunk.k_stride);
  a.chunk.v = call.rows("v", v, type, {B, Hkv, S, D}, a.chunk.v_stride);
  a.chunk.pos = call.array<int32_t>("pos", pos, {B, S});
  a.chunk.first = call.array<int32_t>("first", first, {B});
  if (!is_none(index)) {
    STD_TORCH_CHECK(index.dim() == 3, "index has ", index.dim(), " dimensions, expected 3");
    a.K = index.size(2);
    a.index = call.array<int32_t>("index", index, {B, Hkv, a.K});
  }
  a.keep = call.array<int32_t>("keep", keep, {B, Hkv});
  for (int64_t i = 0; !is_none(index) && call.on_cpu() && i < B * Hkv; i++)
    STD_TORCH_CHECK(a.keep[i] <= a.K, "keep is ", a.keep[i], ", but index has ", a.K, " columns");
  a.dst.k = call.slots("k_dst", k_dst, type, m, D);
  a.dst.v = call.slots("v_dst", v_dst, type, m, D);
  a.dst.pos = call.array<int32_t>("pos_dst", pos_dst, {m});
  a.dst.offset = call.array<int64_t>("dst_offset", dst_offset, {B, Hkv});
  call.check_slots("k_src", a.src.offset, a.src.len, B * Hkv, n, 0);
  call.check_slots("k_dst", a.dst.offset, a.keep, B * Hkv, m, 0);
  call.check_apart("k_dst", a.dst.offset, a.keep, B * Hkv, 0);
  bool same = !call.on_cpu() || std::equal(a.src.offset, a.src.offset + B * Hkv, a.dst.offset);
  int64_t width = D * static_cast<int64_t>(k.element_size());
  check_alias("k", a.src.k, n, a.dst.k, m, width, same);
  check_alias("v", a.src.v, n, a.dst.v, m, width, same);
  check_alias("pos", a.src.pos, n, a.dst.pos, m, sizeof(int32_t), same);
  const int64_t size = static_cast<int64_t>(k.element_size());
  check_disjoint({dense_bytes(a.dst.k, m * width), dense_bytes(a.dst.v, m * width), dense_bytes(a.dst.pos, m * 4)},
                 {row_bytes(a.chunk.k, {B, Hkv, S, D}, a.chunk.k_stride, size),
                  row_bytes(a.chunk.v, {B, Hkv, S, D}, a.chunk.v_stride, size), dense_bytes(a.chunk.pos, B * S * 4),
                  dense_bytes(a.index, B * Hkv * a.K * 4)});
  if (!is_none(index) && a.K == 0) return;  // an empty index has no address, which C would read as no index
  call.run(a, KV_KERNELS(compact));
}

constexpr const char *decode_schema =
    "decode(Tensor q, Tensor k, Tensor v, Tensor pos, Tensor(a!) k_slots, Tensor(b!) v_slots, Tensor(c!) pos_slots, "
    "Tensor offset, Tensor len, Tensor sinks, float scale, float softcap, int columns) -> (Tensor, Tensor, Tensor)";

std::tuple<Tensor, Tensor, Tensor> decode(Tensor q, Tensor k, Tensor v, Tensor pos, Tensor k_slots, Tensor v_slots,
                                          Tensor pos_slots, Tensor offset, Tensor len, Tensor sinks, double scale,
                                          double softcap, int64_t columns) {
  const Call call(q);
  const int64_t *qs = sizes4("q", q), *ks = sizes4("k", k);
  int64_t B = qs[0], H = qs[1], D = qs[3], Hkv = ks[1], n = k_slots.size(0);
  STD_TORCH_CHECK(columns >= 0, "columns is ", columns);
  ScalarType type = q.scalar_type();
  Tensor out = call.empty(type, {B, 1, H, D}), lse = call.empty(ScalarType::Float, {B, H, 1});
  Tensor probs = call.empty(ScalarType::Float, {B, Hkv, columns});
  kv_decode a = {};
  a.dtype = dtype_of(q);
  a.B = B, a.H = H, a.Hkv = Hkv, a.D = D, a.C = columns, a.rows = n;
  a.scale = static_cast<float>(scale), a.softcap = static_cast<float>(softcap);
  a.q = call.rows("q", q, type, {B, H, 1, D}, a.q_stride);
  a.chunk.k = call.rows("k", k, type, {B, Hkv, 1, D}, a.chunk.k_stride);
  a.chunk.v = call.rows("v", v, type, {B, Hkv, 1, D}, a.chunk.v_stride);
  a.chunk.pos = call.array<int32_t>("pos", pos, {B, 1});
  a.slots.k = call.slots("k_slots", k_slots, type, n, D);
  a.slots.v = call.slots("v_slots", v_slots, type, n, D);
  a.slots.pos = call.array<int32_t>("pos_slots", pos_slots, {n});
  a.slots.offset = call.array<int64_t>("offset", offset, {B, Hkv});
  a.slots.len = call.array<int32_t>("len", len, {B, Hkv});
  a.sinks = is_none(sinks) ? nullptr : call.array<float>("sinks", sinks, {H});
  a.out = out.data_ptr();
  a.lse = static_cast<float *>(lse.data_ptr());
  a.probs = columns ? static_cast<float *>(probs.data_ptr()) : nullptr;
  call.check_slots("k_slots", a.slots.offset, a.slots.len, B * Hkv, n, 1);
  call.check_apart("k_slots", a.slots.offset, a.slots.len, B * Hkv, 1);
  const int64_t size = static_cast<int64_t>(q.element_size()), bytes = n * D * size;
  check_disjoint(
      {dense_bytes(a.slots.k, bytes), dense_bytes(a.slots.v, bytes), dense_bytes(a.slots.pos, n * 4)},
      {row_bytes(a.q, {B, H, 1, D}, a.q_stride, size), row_bytes(a.chunk.k, {B, Hkv, 1, D}, a.chunk.k_stride, size),
       row_bytes(a.chunk.v, {B, Hkv, 1, D}, a.chunk.v_stride, size)});
  call.run(a, KV_KERNELS(decode));
  return {out, lse, probs};
}

#define KV_DEFINE(op, with) m.def(op##_schema);
#define KV_IMPLEMENT(op, with) m.impl(#op, TORCH_BOX(&op));

using Library = torch::stable::detail::StableLibrary;

void define(Library &m) { KV_OPS(KV_DEFINE, ) }
void implement(Library &m) { KV_OPS(KV_IMPLEMENT, ) }

/* The ops are registered once, by the first import: STABLE_TORCH_LIBRARY would do it when the library is loaded, where
 * a second copy of it, whose name torch refuses, can only crash. Returns whether it is this copy that is registered. */
bool registered() {
  static const bool done = [] {
    TorchLibraryHandle name;
    if (aoti_torch_library_init_def("kvevict", __FILE__, __LINE__, &name) != 0) return false;
    static Library all(Library::Kind::FRAGMENT, "kvevict", nullptr, __FILE__, __LINE__);
    static Library cpu(Library::Kind::IMPL, "kvevict", "CPU", __FILE__, __LINE__);
    define(all), implement(cpu);
#ifdef KVEVICT_CUDA_ARCHS
    static Library cuda(Library::Kind::IMPL, "kvevict", "CUDA", __FILE__, __LINE__);
    implement(cuda);
#endif
    return true;
  }();
  return done;
}

PyObject *cpu_isa(PyObject *, PyObject *) {
  const char *name = kv_cpu_isa();
  if (name) return PyUnicode_FromString(name);
  return PyErr_Format(PyExc_ValueError, "KVEVICT_CPU_ISA is '%s', expected one of: %s", std::getenv("KVEVICT_CPU_ISA"),
                      kv_cpu_isas());
}

PyObject *cpu_isas(PyObject *, PyObject *) { return PyUnicode_FromString(kv_cpu_isas()); }

PyObject *build_info(PyObject *, PyObject *) {
  return Py_BuildValue("{s:O,s:s,s:s}", "cuda", *cuda_archs ? Py_True : Py_False, "cuda_archs", cuda_archs,
                       "torch_target", "2.10");
}

PyMethodDef methods[] = {
    {"cpu_isa", cpu_isa, METH_NOARGS,
     "Instruction set that the CPU kernels run with, of avx512bf16, avx512, avx2, scalar or neonbf16, neon."},
    {"cpu_isas", cpu_isas, METH_NOARGS, "Those that this build has, from the least to the most, between spaces."},
    {"build_info", build_info, METH_NOARGS, "What this binary was built with: {cuda, cuda_archs, torch_target}."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "kvevict._C", nullptr, 0, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

/* Importing again only makes another module object. */
PyMODINIT_FUNC PyInit__C() {
  if (registered()) return PyModuleDef_Init(&module);
  PyErr_SetString(PyExc_ImportError, "another copy of kvevict's compiled part is in use in this process");
  return nullptr;
}
