/* Reads and packs the rows of one head's alive keys or values on a GPU (formats: kvevict.h). L lanes of a warp share
 * a row, each with V vectors of W numbers: vector v of lane i begins with number (v * L + i) * W of the row. W
 * unpacked numbers take 16 bytes. */
#ifndef KV_COLUMNS_CUH
#define KV_COLUMNS_CUH
#include <math.h>

#include <type_traits>

#include "vector.cuh"
#include "warp.cuh"

/* The keys or the values of one head. Column c of the head's attention matrix is slot c. */
struct Columns {
  kv_segments at;
  kv_kind kind;        /* how stored rows are packed, or KV_AS_COMPUTED */
  const float *centre; /* [D] what was subtracted before rows were packed, or NULL */

  /* Returns the number of packed columns. They are the first ones: new rows are not packed. */
  __device__ __forceinline__ int packed() const { return kind == KV_AS_COMPUTED ? 0 : at.len; }
};

/* Makes columns from the addresses `at` of unpacked rows. For packed rows the stored addresses are computed here:
 * slot 0 is row `offset` of the layer's array `rows`. */
KV_DEVICE Columns columns_of(kv_segments at, const void *rows, int64_t offset, kv_kind kind, const float *centre,
                             int64_t D) {
  if (kind != KV_AS_COMPUTED) {
    const int64_t bytes = kv_packed_bytes(kind, D);
    at.stored = (uint64_t)rows + (uint64_t)(offset * bytes), at.stored_stride = (int)bytes;
  }
  return {at, kind, centre};
}

/* Returns the centre [D] of one kv head's packed keys, or NULL. */
KV_DEVICE const float *centre_of(const kv_slots &slots, int64_t head, int64_t D) {
  return slots.centre ? slots.centre + head * D : nullptr;
}

/* Returns the keys or values [stored | new] of head h of batch row b. New ones from row `stop` of the chunk on are
 * left out. */
template <class E>
KV_DEVICE Columns head_columns(kv_side side, const kv_slots &slots, const kv_new &chunk, int64_t b, int64_t h,
                               int64_t Hkv, int64_t stop, int64_t D) {
  const int64_t head = b * Hkv + h;
  const kv_segments at = kv_rows_of(side, &slots, &chunk, b, h, Hkv, stop, D, sizeof(E));
  if (side == KV_VALUES) return columns_of(at, slots.v, slots.offset[head], slots.v_kind, nullptr, D);
  return columns_of(at, slots.k, slots.offset[head], slots.k_kind, centre_of(slots, head, D), D);
}

/* Loads numbers d .. d + W - 1 of the packed row at `row`, with W = VECTOR<E>, yet without undoing the rotation or
 * adding the centre. Of the result, x and y hold one byte (0..255) a number, z the row's scale and w its offset. If
 * not `wanted`, and from number D on, nothing is read and packed_numbers makes zeros of the result. */
template <class E>
KV_DEVICE uint4 packed_part(uint64_t row, kv_kind kind, int d, int D, bool wanted) {
  const bool eight = kind == KV_INT8;
  const int half = (int)kv_packed_bytes(kind, D) - 4; /* bytes that a row's numbers take; its scale follows */
  wanted &= d < D;
  const uint32_t ends = load_once_4_if(reinterpret_cast<const void *>(row + half), wanted);
  uint32_t word[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < VECTOR<E> / 4; i++) {
    /* 4-bit rows only: whether these four numbers lie in the high halves of their bytes */
    const int from = d + 4 * i, high = from >= half;
    word[i] = load_once_4_if(reinterpret_cast<const void *>(row + (high ? from - half : from)), wanted);
    word[i] = eight ? word[i] ^ 0x80808080u : word[i] >> (high ? 4 : 0) & 0x0f0f0f0fu;
  }
  if (eight) return make_uint4(word[0], word[1], ends, 0);
  const float2 two = unpack<f16>(ends);
  return make_uint4(word[0], word[1], __float_as_uint(two.x), __float_as_uint(two.y));
}

/* y [W] = the numbers that packed_part loaded, as floats. A byte is converted as the low 8 bits of the float 2^23 +
 * byte, from which 2^23 (for 8-bit rows 2^23 + 128) is subtracted. */
template <class E>
KV_DEVICE void packed_numbers(uint4 part, kv_kind kind, float (&y)[VECTOR<E>]) {
  const uint32_t word[2] = {part.x, part.y};
  const float zero = kind == KV_INT8 ? 8388736.0f : 8388608.0f, scale = __uint_as_float(part.z);
#pragma unroll
  for (int i = 0; i < VECTOR<E>; i++)
    y[i] = fmaf(scale, __uint_as_float(0x4b000000u | (word[i / 4] >> 8 * (i % 4) & 0xffu)) - zero,
                __uint_as_float(part.w));
}

/* Multiplies a row x, spread over L lanes, by an orthonormal Hadamard matrix, block by block. A block's size is the
 * largest power of two that divides D. All lanes of the warp must call it together. */
template <int W, int L, int V>
KV_DEVICE void hadamard(float (&x)[V][W], int D) {
  const int size = D & -D;
  const float scale = 1 / sqrtf((float)size);
#pragma unroll
  for (int v = 0; v < V; v++)
#pragma unroll
    for (int step = 1; step < W; step *= 2)
#pragma unroll
      for (int i = 0; i < W; i++) {
        if (i & step) continue;
        const float a = x[v][i], b = x[v][i + step];
        x[v][i] = a + b, x[v][i + step] = a - b;
      }
  unrolled<V, W>([&](int v, int i) { x[v][i] *= scale; });
#pragma unroll
  for (int step = 1; step < L; step *= 2) {
    if (step * W >= size) break;
    const float sign = threadIdx.x & step ? -1 : 1;
    unrolled<V, W>([&](int v, int i) { x[v][i] = fmaf(sign, x[v][i], __shfl_xor_sync(ALL_LANES, x[v][i], step)); });
  }
#pragma unroll
  for (int step = 1; step < V; step *= 2) {
    if (step * L * W >= size) break;
    unrolled<V, W>([&](int v, int i) {
      if (v & step) return;
      const float a = x[v][i], b = x[v + step][i];
      x[v][i] = a + b, x[v + step][i] = a - b;
    });
  }
}

/* y [V][W] = this lane's numbers of packed column c; zeros if not `wanted`, and from number D on. All lanes of the
 * warp must call it together; the L lanes that share a row pass the same c. */
template <class E, int L, int V>
KV_DEVICE void packed_column(const Columns &x, int c, bool wanted, int D, float (&y)[V][VECTOR<E>]) {
  const uint64_t row = x.at.stored + (uint64_t)(kv_unsigned)c * (kv_unsigned)x.at.stored_stride;
  const int first = threadIdx.x % L * VECTOR<E>;
#pragma unroll
  for (int v = 0; v < V; v++)
    packed_numbers<E>(packed_part<E>(row, x.kind, first + v * L * VECTOR<E>, D, wanted), x.kind, y[v]);
  if (kv_is_rotated(x.kind)) hadamard<VECTOR<E>, L, V>(y, D);
  if (!wanted || !x.centre) return;
  unrolled<V, VECTOR<E>>([&](int v, int i) {
    const int d = first + v * L * VECTOR<E> + i;
    y[v][i] += d < D ? x.centre[d] : 0;
  });
}

/* y [V][W] = this lane's numbers of column c, packed or not; zeros if not `wanted`, and from number D on. All lanes
 * of the warp must call it together; the L lanes that share a row pass the same c. */
template <class E, int L, int V>
KV_DEVICE void column_numbers(const Columns &x, int c, bool wanted, int D, float (&y)[V][VECTOR<E>]) {
  const bool packed = c < x.packed();
  if (x.kind != KV_AS_COMPUTED) packed_column<E, L, V>(x, c, wanted && packed, D, y);
  if (packed) return;
  const E *const row = reinterpret_cast<const E *>(kv_segments_at(&x.at, c));
#pragma unroll
  for (int v = 0; v < V; v++) {
    const int d = (v * L + (int)threadIdx.x % L) * VECTOR<E>;
    vector_floats<E>(load_once_16_if(row + d, wanted && d < D), y[v]);
  }
}

/* Calls f(L, V) with two integral constants that suit rows of D numbers: L lanes share a row, with V vectors each. */
template <class E, class F>
static int with_lanes(int64_t D, F f) {
  constexpr int W = VECTOR<E>;
  using std::integral_constant;
  if (D <= 64) return f(integral_constant<int, 64 / W>{}, integral_constant<int, 1>{});
  if (D <= 128) return f(integral_constant<int, 128 / W>{}, integral_constant<int, 1>{});
  return f(integral_constant<int, 32>{}, integral_constant<int, 8 / W>{});
}

/* Packs the D numbers at `from` into a row of `kind` (kvevict.h) at `to`. All lanes of one warp must call it
 * together. */
template <class E>
KV_DEVICE void pack_row(const E *from, kv_kind kind, const float *centre, int D, unsigned char *to) {
  constexpr int W = 4, V = KV_MOST_D / (32 * W);
  const int lane = lane_id(), half = D / 2;
  float x[V][W], least = INFINITY, most = -INFINITY;
  int other = 0; /* whether the row has an inf or a NaN and is packed as NaN */
#pragma unroll
  for (int v = 0; v < V; v++)
#pragma unroll
    for (int i = 0; i < W; i++) {
      const int d = (v * 32 + lane) * W + i;
      x[v][i] = d < D ? to_float(from[d]) - (centre ? centre[d] : 0) : 0;
    }
  if (kv_is_rotated(kind)) hadamard<W, 32, V>(x, D);
#pragma unroll
  for (int v = 0; v < V; v++)
#pragma unroll
    for (int i = 0; i < W; i++) {
      if ((v * 32 + lane) * W >= D) continue;
      least = fminf(least, x[v][i]), most = fmaxf(most, x[v][i]);
      other |= !isfinite(x[v][i]);
    }
  least = -lanes_max(-least), most = lanes_max(most), other = __any_sync(ALL_LANES, other);
  uint32_t ends, word[V];
  float by, zero; /* the row stores round((x - zero) / by) */
  if (kind == KV_INT8) {
    const float scale = other ? NAN : fmaxf(-least, most) / 127;
    by = scale > 0 ? scale : 1, zero = 0, ends = __float_as_uint(scale);
  } else {
    const f16 low = from_float<f16>(least);
    zero = to_float(low);
    const float span = to_float(from_float<f16>((most - zero) / 15));
    other |= !isfinite(zero) || !isfinite(span);
    by = span > 0 && !other ? span : 1;
    ends = from_float<f16>(other ? NAN : span > 0 ? span : 0).bits | (other ? 0u : (uint32_t)low.bits << 16);
  }
  const float lowest = kind == KV_INT8 ? -127 : 0, highest = kind == KV_INT8 ? 127 : 15;
#pragma unroll
  for (int v = 0; v < V; v++) {
    word[v] = 0;
#pragma unroll
    for (int i = 0; i < W; i++) {
      const float number = other ? 0 : rintf(fminf(fmaxf((x[v][i] - zero) / by, lowest), highest));
      word[v] |= ((uint32_t)(int)number & 0xffu) << 8 * i;
    }
  }
  uint32_t *const words = reinterpret_cast<uint32_t *>(to);
  if (kind == KV_INT4) { /* number i + D / 2 goes into the high half of number i's byte */
    const int vectors = half / W;
    uint32_t high[V];
#pragma unroll
    for (int v = 0; v < V; v++) {
      high[v] = 0;
#pragma unroll
      for (int u = 0; u < V; u++) {
        const uint32_t other_word = __shfl_sync(ALL_LANES, word[u], (lane + vectors) % 32);
        if (u == (v * 32 + lane + vectors) / 32) high[v] = other_word;
      }
    }
#pragma unroll
    for (int v = 0; v < V; v++) word[v] |= high[v] << 4;
  }
  const int bytes = (int)kv_packed_bytes(kind, D) - 4;
#pragma unroll
  for (int v = 0; v < V; v++)
    if ((v * 32 + lane) * W < bytes) words[v * 32 + lane] = word[v];
  if (lane == 0) words[bytes / 4] = ends;
}
#endif
