/* Decode by lanes: the kernel around lanes.cuh. Whichever block finishes a head's last split merges all of them. */
#ifndef KV_DECODE_LANES_CUH
#define KV_DECODE_LANES_CUH
#include "decode.cuh"
#include "lanes.cuh"

/* HEADS heads a group; PACKED: keys, values or both are packed. Asked for two blocks an SM, ptxas does not spill
 * registers to make room for four. */
template <class E, int L, int V, int HEADS, bool PACKED>
static __global__ void __launch_bounds__(THREADS, 2)
    lanes_kernel(const kv_decode a, const Scratch x, const Logits logits) {
  using R = HeadRows<E, L, V, HEADS, PACKED>;
  const int64_t head = blockIdx.x, b = head / a.Hkv, h = head % a.Hkv;
  const int D = (int)a.D;
  const Cut cut = cut_of<STEP>(a, x.parts, head);
  float *shared = shared_memory<float>() + 4;
  for (int split = blockIdx.y; split < cut.splits; split += gridDim.y) {
    const Split<E> s = split_of<E>(a, cut, head, split, R::element(0));
    if (s.last) append(a, head, s);
    const int64_t at = (head * x.parts.splits + split) * HEADS;
    float *logit = x.logit ? x.logit + head * HEADS * a.C + (s.own ? prefix_len(a, head) : 0) : nullptr;
    const E *query = static_cast<const E *>(a.q) + b * a.q_stride[0] + h * HEADS * a.q_stride[1];
    R rows;
    rows.start(query, a.q_stride[1], D, logits.of_query(), s.k);
    rows.attend(s.k, s.v, s.c0, s.c1, D, logits, logit, a.C);
    rows.merge(shared, D, x.parts.o + at * D, x.parts.states + at);
    if (!block_is_last(x.parts.count + head, cut.splits, shared_memory<uint32_t>())) continue;
    for (int g = warp_id(); g < HEADS; g += THREADS / 32) {
      const int64_t from = head * x.parts.splits * HEADS + g, to = b * a.H + h * HEADS + g;
      const float sink = a.sinks ? a.sinks[h * HEADS + g] * LOG2E : -INFINITY;
      finish<E>(x.parts.o + from * D, HEADS * D, x.parts.states + from, HEADS, cut.splits, D, sink,
                static_cast<E *>(a.out) + to * D, a.lse + to);
    }
  }
}

template <class E, int L, int V, int HEADS>
static int run(const kv_decode *a, const Scratch &x, void *stream) {
  const int64_t heads = a->B * a->Hkv,
                mean = (a->rows_prefix + a->rows) / (heads * 2 * STEP) + 1;     /* splits of a head */
  const int64_t blocks = 4 * mean < x.parts.splits ? 4 * mean : x.parts.splits; /* a longer head's take several */
  const dim3 grid((unsigned)heads, (unsigned)blocks);
  const auto shared = (size_t)HeadRows<E, L, V, HEADS, false>::shared_bytes(a->D);
  const Logits logits = logits_of(a->scale, a->softcap);
  if constexpr (HEADS <= most_lanes(sizeof(E) == 2, false))
    if (!is_packed(*a))
      return launch<lanes_kernel<E, L, V, HEADS, false>>(grid, THREADS, shared, stream, *a, x, logits);
  if constexpr (HEADS <= most_lanes(sizeof(E) == 2, true))
    return launch<lanes_kernel<E, L, V, HEADS, true>>(grid, THREADS, shared, stream, *a, x, logits);
  return 0; /* 16 bits: run_ring */
}

template <class E, int HEADS>
static int run_width(const kv_decode *a, const Scratch &x, void *stream) {
  return with_lanes<E>(
      a->D, [&](auto l, auto v) { return run<E, decltype(l)::value, decltype(v)::value, HEADS>(a, x, stream); });
}

static int run_lanes(const kv_decode *a, const Scratch &x, void *stream) {
  const int64_t G = a->H / a->Hkv, heads = a->B * a->Hkv;
  const int error = (int)cudaMemsetAsync(x.parts.count, 0, heads * sizeof *x.parts.count, (cudaStream_t)stream);
  if (error) return error;
  return dispatch(a->dtype, [&](auto e) {
    using E = decltype(e);
    if (G == 1) return run_width<E, 1>(a, x, stream);
    if (G == 2) return run_width<E, 2>(a, x, stream);
    return G == 3 ? run_width<E, 3>(a, x, stream) : run_width<E, 4>(a, x, stream);
  });
}
#endif
