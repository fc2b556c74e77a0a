/* Products of pairs of bf16 in Intel's tile registers: one instruction multiplies 16 x 32 by 32 x 16 numbers of bf16
 * and adds the products to 16 x 16 sums of fp32. A word is a pair of bf16. The packed blocks of tile.h are operands
 * without further rearrangement. */
#ifndef KVEVICT_AMX_H
#define KVEVICT_AMX_H
#include "simd.h"

enum { SQUARE = 16 /* rows, columns and words of a tile register */ };

#if KV_AMX
/* Assembly, since GCC's intrinsics do not tell the compiler that they read memory. */
#define KV_TILE(name, ...) __asm__ volatile(name ::__VA_ARGS__ : "memory")
#define KV_TILE_LOAD(tile, x, stride) KV_TILE("tileloadd (%0,%1,1), %%tmm" #tile, "r"(x), "r"(stride))
#define KV_TILE_STORE(tile, x, stride) KV_TILE("tilestored %%tmm" #tile ", (%0,%1,1)", "r"(x), "r"(stride))
#define KV_TILE_ADD(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c :)
#define KV_TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile :)

/* The configuration of a thread's tile registers. */
typedef struct {
  uint8_t bytes[64];
} kv_amx;

/* Configures all tile registers as 16 rows of 64 bytes. Returns the previous configuration, which kv_amx_end restores:
 * another library may have left one for its next call. */
static inline kv_amx kv_amx_begin(void) {
  kv_amx before, squares = {{1}}; /* byte 0: palette 1 */
  for (int i = 0; i < 8; i++) squares.bytes[16 + 2 * i] = 64, squares.bytes[48 + i] = SQUARE;
  KV_TILE("sttilecfg (%0)", "r"(&before));
  KV_TILE("ldtilecfg (%0)", "r"(&squares));
  return before;
}

static inline void kv_amx_end(kv_amx before) {
  if (before.bytes[0])
    KV_TILE("ldtilecfg (%0)", "r"(&before));
  else
    __asm__ volatile("tilerelease" :);
}

/* Computes C = A B, or C += A B if `add`, with A [rows, words], B [words, 32] and C [rows, 32]; rows is 32 if `both`,
 * else 16. words is a multiple of 16; every sum runs over the words in ascending order. */
KV_INLINE void kv_amx_block(int both, int add, const float *a, int64_t lda, const float *b, int64_t ldb, int64_t words,
                            float *c, int64_t ldc) {
  const int64_t as = 4 * lda, bs = 4 * ldb, cs = 4 * ldc;
  float *const lower = c + SQUARE * ldc;
  if (add) {
    KV_TILE_LOAD(0, c, cs);
    KV_TILE_LOAD(1, c + SQUARE, cs);
  } else {
    KV_TILE_ZERO(0);
    KV_TILE_ZERO(1);
  }
  if (both && add) {
    KV_TILE_LOAD(2, lower, cs);
    KV_TILE_LOAD(3, lower + SQUARE, cs);
  } else if (both) {
    KV_TILE_ZERO(2);
    KV_TILE_ZERO(3);
  }
  for (int64_t i = 0; i < words; i += SQUARE) {
    KV_TILE_LOAD(4, a + i, as);
    KV_TILE_LOAD(6, b + i * ldb, bs);
    KV_TILE_LOAD(7, b + i * ldb + SQUARE, bs);
    KV_TILE_ADD(0, 4, 6);
    KV_TILE_ADD(1, 4, 7);
    if (!both) continue;
    KV_TILE_LOAD(5, a + SQUARE * lda + i, as);
    KV_TILE_ADD(2, 5, 6);
    KV_TILE_ADD(3, 5, 7);
  }
  KV_TILE_STORE(0, c, cs);
  KV_TILE_STORE(1, c + SQUARE, cs);
  if (both) {
    KV_TILE_STORE(2, lower, cs);
    KV_TILE_STORE(3, lower + SQUARE, cs);
  }
}

/* Multiplies as kv_amx_block does, for any number of rows and columns, which are rounded up to multiples of 16 and of
 * 32. */
static inline void kv_amx_multiply(int add, int64_t rows, int64_t columns, const float *a, int64_t lda, const float *b,
                                   int64_t ldb, int64_t words, float *c, int64_t ldc) {
  for (int64_t j = 0; j < columns; j += 2 * SQUARE)
    for (int64_t r = 0; r < rows; r += 2 * SQUARE)
      if (rows - r > SQUARE)
        kv_amx_block(1, add, a + r * lda, lda, b + j, ldb, words, c + r * ldc + j, ldc);
      else
        kv_amx_block(0, add, a + r * lda, lda, b + j, ldb, words, c + r * ldc + j, ldc);
}
/* Computes C [64, 16] = A [64, words] B [words, 16], summed as in kv_amx_block. A is read once, in order; B stays
 * cached. */
static inline void kv_amx_column(const float *a, int64_t words, const float *b, float *c) {
  const int64_t as = 4 * words, step = SQUARE * words, size = sizeof *c * SQUARE;
  KV_TILE_ZERO(0);
  KV_TILE_ZERO(1);
  KV_TILE_ZERO(2);
  KV_TILE_ZERO(3);
  for (int64_t i = 0; i < words; i += SQUARE) {
    KV_TILE_LOAD(7, b + i * SQUARE, size);
    KV_TILE_LOAD(4, a + i, as);
    KV_TILE_ADD(0, 4, 7);
    KV_TILE_LOAD(5, a + step + i, as);
    KV_TILE_ADD(1, 5, 7);
    KV_TILE_LOAD(6, a + 2 * step + i, as);
    KV_TILE_ADD(2, 6, 7);
    KV_TILE_LOAD(4, a + 3 * step + i, as);
    KV_TILE_ADD(3, 4, 7);
  }
  KV_TILE_STORE(0, c, size);
  KV_TILE_STORE(1, c + SQUARE * SQUARE, size);
  KV_TILE_STORE(2, c + 2 * SQUARE * SQUARE, size);
  KV_TILE_STORE(3, c + 3 * SQUARE * SQUARE, size);
}
#else /* without tile registers these are never called */
typedef int kv_amx;
static inline kv_amx kv_amx_begin(void) { return 0; }
static inline void kv_amx_end(kv_amx before) { (void)before; }
static inline void kv_amx_column(const float *a, int64_t words, const float *b, float *c) {
  (void)a, (void)words, (void)b, (void)c;
}
static inline void kv_amx_multiply(int add, int64_t rows, int64_t columns, const float *a, int64_t lda, const float *b,
                                   int64_t ldb, int64_t words, float *c, int64_t ldc) {
  (void)add, (void)rows, (void)columns, (void)a, (void)lda, (void)b, (void)ldb, (void)words, (void)c, (void)ldc;
}
#endif
#endif
