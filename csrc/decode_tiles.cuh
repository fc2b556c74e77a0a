/* Decode in fp32 of GQA groups with more than 4 heads: the group's query heads are the rows of a tile (stream.cuh). */
#ifndef KV_DECODE_TILES_CUH
#define KV_DECODE_TILES_CUH
#include "decode.cuh"

/* Block (kv head, split, tile) computes one tile of the group's query heads against one split of the head's slots. */
template <class E, int D, class X>
static __global__ void __launch_bounds__(X::THREADS, 1)
    tiles_kernel(const kv_decode a, const Scratch x, const Logits logits) {
  E *const q = shared_memory<E>();
  const int head = blockIdx.x, split = blockIdx.y, unit = head * x.parts.tiles + blockIdx.z;
  const int b = head / (int)a.Hkv, h = head % (int)a.Hkv, G = (int)(a.H / a.Hkv), g = blockIdx.z * X::ROWS;
  const Cut cut = cut_of<X::KEYS>(a, x.parts, head);
  if (split >= cut.splits) return;
  if (split == 0 && threadIdx.x == 0) x.parts.count[unit] = cut.splits;
  const Split<E> s = split_of<E>(a, cut, head, split, 0);
  if (s.last && g == 0) append(a, head, s);

  const int stride = (int)a.q_stride[1] * (int)sizeof(E), rows = min(G - g, X::ROWS), count = s.c1 - s.c0;
  const E *query = static_cast<const E *>(a.q) + b * a.q_stride[0] + (h * G + g) * a.q_stride[1];
  const kv_segments queries = {(uint64_t)query, 0, stride, 0, rows, rows};
  const int first = s.c0 + (s.own ? prefix_len(a, head) : 0);
  const auto keep = [&](const auto &products, int c) {
    if (!x.logit) return;
    float *const logit = x.logit + ((int64_t)head * G + g) * a.C + first + c;
    each_number<X::MT, X::KEYS / X::KEY_WARPS / 8>([&](int m, int n, int half, int j) {
      const int r = warp_row<X>() + 16 * m + 8 * half + fragment_row(), column = 8 * n + fragment_column() + j;
      if (r < rows && c + column < count) logit[r * a.C + column] = logits.scale * products[m][n][2 * half + j];
    });
  };
  Attended<X::MT, D> done;
  attend_columns<E, D, X, true>(
      done, q, queries, 0, between(s.k, s.c0, s.c1), between(s.v, s.c0, s.c1), count, (int)a.D, logits,
      [&](int, int) { return count; }, keep);
  const int64_t at = ((int64_t)unit * x.parts.splits + split) * x.parts.rows;
  put_part<E, D, X>(done, q, x.parts.rows, (int)a.D, x.parts.o + at * a.D, x.parts.states + at);
}

/* Calls f(e, d, x) for fp32: d is the padded head dimension, x the tile that suits the number of heads in a group.
 * For 256 dimensions the tile has 16 rows, since registers hold no more. */
template <class F>
static int with_tile(const kv_decode *a, F f) {
  return dispatch(KV_F32, a->D, [&](auto e, auto d) {
    using E = decltype(e);
    constexpr int D = decltype(d)::value;
    if constexpr (sizeof(E) == 4) {
      if constexpr (D < 256)
        if (a->H / a->Hkv > NarrowTile<E, D>::ROWS) return f(e, d, MediumTile<E, D>{});
      return f(e, d, NarrowTile<E, D>{});
    }
    return 0;
  });
}

static int run_tiles(const kv_decode *a, const Scratch &x, void *stream) {
  return with_tile(a, [&](auto e, auto d, auto tile) {
    using E = decltype(e);
    using X = decltype(tile);
    const dim3 grid((unsigned)(a->B * a->Hkv), (unsigned)x.parts.splits, (unsigned)x.parts.tiles);
    const int error = launch<tiles_kernel<E, decltype(d)::value, X>>(grid, X::THREADS, X::SHARED, stream, *a, x,
                                                                     logits_of(a->scale, a->softcap));
    return error ? error : combine<E>(x.parts, outputs_of(a), stream);
  });
}
#endif
