/* The queries of a ring (ring.cuh) as fragments of mma, at the start of shared memory. */
#ifndef KV_RING_QUERIES_CUH
#define KV_RING_QUERIES_CUH
#include "bytes.cuh"

/* ROWS query heads of one kv head. Of packed keys a logit is unit (scale q.k + least sum) + centre, with q the query's
 * numbers over `unit`, a power of two. */
template <class E, int D, int ROWS, bool PACKED>
struct RingQueries {
  static constexpr int PARTS = ROWS / 8, V = (D + 127) / 128;

  float unit[ROWS], sum[ROWS], centre[ROWS];
  Columns keys, values;                             /* registers are scarce */
  alignas(16) uint32_t query[D / 16][PARTS][32][4]; /* fragments of the queries */

  /* Query r, by a warp. */
  __device__ __forceinline__ void put(const E *from, int r, const Columns &k, int dims) {
    float x[V][4], top = 0, centre = 0, sum = 0, unit = 1;
#pragma unroll
    for (int v = 0; v < V; v++)
#pragma unroll
      for (int i = 0; i < 4; i++) x[v][i] = 0;
#pragma unroll
    for (int v = 0; v < V; v++) {
      const int d = (v * 32 + lane_id()) * 4;
      if (d >= dims) continue;
      const uint2 four = *reinterpret_cast<const uint2 *>(from + d);
      const float2 a = unpack<E>(four.x), b = unpack<E>(four.y);
      x[v][0] = a.x, x[v][1] = a.y, x[v][2] = b.x, x[v][3] = b.y;
      if (!k.centre) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) centre += x[v][i] * k.centre[d + i];
    }
    if (PACKED && k.kind != KV_AS_COMPUTED) {
      if (k.kind == KV_INT4) hadamard<4, 32, V>(x, dims);
#pragma unroll
      for (int v = 0; v < V; v++)
#pragma unroll
        for (int i = 0; i < 4; i++) top = fmaxf(top, fabsf(x[v][i])), sum += x[v][i];
      const float power = __uint_as_float(__float_as_uint(lanes_max(top)) & 0x7f800000u);
      if (power > 0 && power < INFINITY) unit = power;
      centre = lanes_sum(centre), sum = lanes_sum(sum);
      if (lane_id() == 0) this->unit[r] = unit, this->sum[r] = sum, this->centre[r] = centre;
    }
    const int row = r % 8 * 4, half = r / 8;
#pragma unroll
    for (int v = 0; v < V; v++) {
      const int d = (v * 32 + lane_id()) * 4;
      if (d >= dims) continue;
      if (!PACKED || k.kind == KV_AS_COMPUTED) {
        uint32_t(*const at)[4] = query[d / 16][0] + row + d % 8 / 2;
        const int i = d % 16 / 8 * 2 + half;
        at[0][i] = pack<E>(x[v][0], x[v][1]), at[1][i] = pack<E>(x[v][2], x[v][3]);
        continue;
      }
      const Word word = word_of(k.kind, d, dims);
      const float over = 1 / unit; /* exact */
#pragma unroll
      for (int i = 0; i < 2; i++) { /* the numbers of bytes 0 and 2, and of 1 and 3 */
        const float a = x[v][i] * over, b = x[v][i + 2] * over;
        const uint32_t near = pack<f16>(a, b);
        const float2 kept = unpack<f16>(near);
        const uint32_t rest = pack<f16>(a - kept.x, b - kept.y);
        query[word.step][0][row + word.lane][2 * i + half] = near;
        if (k.kind == KV_INT4) query[word.step][PARTS - 1][row + word.lane][2 * i + (PARTS == 1 ? 1 : half)] = rest;
      }
    }
  }

  /* What no query fills. By all warps, before a barrier and attend. */
  __device__ __forceinline__ void clear() {
    uint4 *const all = reinterpret_cast<uint4 *>(query);
    for (int i = threadIdx.x; i < D / 16 * PARTS * 32; i += blockDim.x) all[i] = make_uint4(0, 0, 0, 0);
  }

  template <int N>
  __device__ __forceinline__ void get(uint32_t (&x)[N][4], int step) const {
#pragma unroll
    for (int i = 0; i < N; i++) {
      const uint4 part = *reinterpret_cast<const uint4 *>(query[step][i][lane_id()]);
      x[i][0] = part.x, x[i][1] = part.y, x[i][2] = part.z, x[i][3] = part.w;
    }
  }
};
#endif
