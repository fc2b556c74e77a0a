/* Packed rows (8-bit or 4-bit numbers, kvevict.h) as operands of tensor cores. Rows lie in shared memory as they are
 * stored, aligned to 4 bytes. They are an odd number of 4-byte words apart, except 4-bit rows with an odd D / 8, so
 * the lanes of a warp have no bank conflicts when they read 4 words of each of 8 rows. Numbers are converted to fp16
 * exactly: a byte in the low mantissa bits of fp16's 1024 makes 1024 + byte, from which 1024 is subtracted; for int8
 * the sign bit is flipped first and 1152 is subtracted.
 *
 * A sum over D may add its terms in any order that keys and queries share. Here lane j = lane % 4 reads word 2 j + s
 * % 2 + 8 (s / 2) of a row in step s. Four words of 8-bit numbers are one mma step of 16 numbers. Four words of
 * 4-bit numbers are two: the low halves of the bytes, then the high halves. Bytes 0 and 2 of a word fill one
 * register of the fragment, bytes 1 and 3 the other. */
#ifndef KV_BYTES_CUH
#define KV_BYTES_CUH
#include "tile.cuh"

/* Returns the key at place p of a tile of KEYS keys; place p is row p of K and V and column p of the logits. Over
 * all 8-column blocks of the logits, lane j (lane % 4) has KEYS / 4 consecutive keys, so that lanes read words of
 * values from different banks. */
template <int KEYS>
KV_DEVICE int key_of(int p) {
  return KEYS / 4 * (p % 8 / 2) + 2 * (p / 8) + p % 2;
}

/* Returns bytes 0 and 2 of x, which are int8, as two fp16 numbers. */
KV_DEVICE uint32_t bytes_f16(uint32_t x) {
  /* (1024 + (byte ^ 128)) * 1 - 1152 */
  return fma_f16x2((x & 0x00ff00ffu) ^ 0x64806480u, 0x3c003c00u, 0xe480e480u);
}
/* low_f16 returns the low halves of bytes 0 and 2 of x as two fp16 numbers, high_f16 their high halves. */
KV_DEVICE uint32_t low_f16(uint32_t x) {
  return fma_f16x2((x & 0x000f000fu) | 0x64006400u, 0x3c003c00u, 0xe400e400u); /* (1024 + number) * 1 - 1024 */
}
KV_DEVICE uint32_t high_f16(uint32_t x) {
  /* (1024 + 16 number) / 16 - 64 */
  return fma_f16x2((x & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, 0xd400d400u);
}

/* Packed rows of one kv head, `stride` 4-byte words apart. */
struct PackedTile {
  const uint32_t *words;
  int stride;
  kv_kind kind;

  __device__ __forceinline__ const uint32_t *row(int r) const { return words + r * stride; }

  /* Returns {scale, offset} of row r: a stored number u means scale * u + offset. The offset of 8-bit rows is 0. */
  __device__ __forceinline__ float2 ends(int r) const {
    const uint32_t last = row(r)[stride - 1];
    return kind == KV_INT8 ? make_float2(__uint_as_float(last), 0) : unpack<f16>(last);
  }
};

/* Which word of a packed key of D numbers is multiplied with number d of a query: `step` is the mma step that uses
 * the word, `lane` the one of a fragment row's four lanes that reads it. */
struct Word {
  int step, lane;
};
KV_DEVICE Word word_of(kv_kind kind, int d, int D) {
  const int high = kind == KV_INT4 && d >= D / 2, w = (high ? d - D / 2 : d) / 4, step = w / 8 * 2 + w % 2;
  return {kind == KV_INT4 ? 2 * step + high : step, w % 8 / 2};
}

/* d += A B, where A is the sum of PARTS fragments. */
template <class F, int PARTS>
KV_DEVICE void mma_parts(float (&d)[4], const uint32_t (&a)[PARTS][4], uint32_t b0, uint32_t b1) {
#pragma unroll
  for (int i = 0; i < PARTS; i++) mma<F>(d, a[i], b0, b1);
}

/* s += Q K^T for a tile of packed keys, yet without the scales and offsets of the keys. q(x, step) loads the
 * queries' fragments of mma step `step` into x. */
template <int D, int PARTS, int NT, class Query>
KV_DEVICE void packed_products(float (&s)[NT][4], const PackedTile &k, Query q) {
  const uint32_t *row[NT];
#pragma unroll
  for (int n = 0; n < NT; n++) row[n] = k.row(key_of<8 * NT>(8 * n + fragment_row())) + lane_id() % 4 * 2;
  if (k.kind == KV_INT8) {
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
      uint32_t x[1][4];
      q(x, step);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const uint32_t w = row[n][step % 2 + step / 2 * 8];
        mma_parts<f16>(s[n], x, bytes_f16(w), bytes_f16(w >> 8));
      }
    }
  } else {
#pragma unroll
    for (int step = 0; step < D / 32; step++) {
      uint32_t low[PARTS][4], high[PARTS][4];
      q(low, 2 * step), q(high, 2 * step + 1);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const uint32_t w = row[n][step % 2 + step / 2 * 8];
        mma_parts<f16>(s[n], low, low_f16(w), low_f16(w >> 8));
        mma_parts<f16>(s[n], high, high_f16(w), high_f16(w >> 8));
      }
    }
  }
}

/* o += P V over places 16 k .. 16 k + 15 of a tile of packed values (key_of). p: fragments of the attention weights
 * times the scales of the values. Column c of the n-th 8-column block of o is dimension packed_place(kind, n, c, D). */
template <int D, int KEYS, int PARTS>
KV_DEVICE void packed_add(float (&o)[D / 8][4], const uint32_t (&p)[PARTS][4], const PackedTile &v, int k) {
  const uint32_t *const row = v.row(KEYS / 4 * (lane_id() % 4) + 4 * k) + fragment_row();
#pragma unroll
  for (int t = 0; t < D / 32; t++) {
    if (v.kind == KV_INT4 && t >= D / 64) break;
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = row[i * v.stride + 8 * t];
#pragma unroll
    for (int half = 0; half < 2; half++) { /* bytes 0 and 1 of each row's word, then bytes 2 and 3 */
      const uint32_t x = permute(w[0], w[1], half ? 0x7632 : 0x5410), y = permute(w[2], w[3], half ? 0x7632 : 0x5410);
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const uint32_t a = odd ? x >> 8 : x, b = odd ? y >> 8 : y;
        const int i = 2 * half + odd;
        if (v.kind == KV_INT8) {
          mma_parts<f16>(o[4 * t + i], p, bytes_f16(a), bytes_f16(b));
        } else if (t < D / 64) {
          mma_parts<f16>(o[8 * t + i], p, low_f16(a), low_f16(b));
          mma_parts<f16>(o[8 * t + 4 + i], p, high_f16(a), high_f16(b));
        }
      }
    }
  }
}

/* Returns which dimension column c of the n-th 8-column block of packed_add's o is; D or more if it is none. */
KV_DEVICE int packed_place(kv_kind kind, int n, int c, int D) {
  if (kind == KV_AS_COMPUTED) return 8 * n + c;
  if (kind == KV_INT8) return n / 4 * 32 + 4 * c + n % 4;
  const int at = n / 8 * 32 + 4 * c + n % 4;
  return at >= D / 2 ? D : n / 4 % 2 ? at + D / 2 : at;
}
#endif
