/* kv_select_cpu and kv_compact_cpu against plain loops, on random ragged shapes with poisoned outputs. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvevict.h"

static int failures;

#define EXPECT(condition, ...)                               \
  do {                                                       \
    if (!(condition)) {                                      \
      failures++;                                            \
      printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      printf(__VA_ARGS__);                                   \
      printf("\n");                                          \
    }                                                        \
  } while (0)

static uint32_t seed = 1;
static uint32_t draw(uint32_t n) { /* 0 .. n-1 */
  seed = seed * 1664525u + 1013904223u;
  return (uint32_t)(((uint64_t)seed * n) >> 32);
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* One byte more than asked for, since malloc(0) may be NULL. */
static void *poisoned(int64_t count, size_t size) {
  char *p = malloc((size_t)count * size + 1);
  if (!p) abort();
  memset(p, 0x5a, (size_t)count * size + 1);
  return p;
}

/* Scores where ties, NaN, infinities and both zeros are common. */
static float some_score(uint32_t kind) {
  const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 1e-40f, -1e-40f};
  if (kind == 0) return 0.25f;
  if (kind == 1 || draw(8) == 0) return odd[draw(8)];
  if (kind == 2) return (float)draw(5) - 2.0f;
  return (float)draw(1u << 24) / (1 << 20) - 4.0f;
}

/* Does slot i come before slot j? */
static int before(const float *score, int64_t i, int64_t j) {
  int ni = score[i] != score[i], nj = score[j] != score[j];
  if (ni != nj) return nj;
  if (!ni && score[i] != score[j]) return score[i] > score[j];
  return i < j;
}

static void test_select_random(void) {
  for (int round = 0; round < 400; round++) {
    int64_t B = draw(4), Hkv = 1 + draw(4), K = draw(round % 10 ? 40 : 2000), top = draw(round % 10 ? 60 : 3000);
    int64_t heads = B * Hkv, C = top;
    int32_t *n = poisoned(heads, 4), *keep = poisoned(heads, 4), *first = poisoned(B, 4), *last = poisoned(B, 4);
    for (int64_t b = 0; b < B; b++) {
      first[b] = (int32_t)draw((uint32_t)K / 2 + 1);
      last[b] = (int32_t)draw((uint32_t)(K - first[b]) + 1);
    }
    for (int64_t i = 0; i < heads; i++) {
      n[i] = (int32_t)draw((uint32_t)top + 1);
      if (draw(4) == 0) n[i] = (int32_t)top + last[i / Hkv]; /* protected slots need no score */
      int64_t low = least(n[i], first[i / Hkv] + last[i / Hkv]), high = least(n[i], K);
      keep[i] = (int32_t)(low + draw((uint32_t)(high - low) + 1));
    }
    float *score = poisoned(heads * C, 4);
    uint32_t kind = draw(5);
    for (int64_t i = 0; i < heads * C; i++) score[i] = some_score(kind);
    int32_t *index = poisoned(heads * K, 4), *want = poisoned(heads * K, 4);

    for (int64_t i = 0; i < heads; i++) {
      int64_t to = 0, left = keep[i] - least(n[i], (int64_t)first[i / Hkv] + last[i / Hkv]);
      for (int64_t s = 0; s < n[i]; s++) {
        int kept = s < first[i / Hkv] || s >= n[i] - last[i / Hkv];
        if (!kept) { /* kept if fewer than `left` unprotected slots come before it */
          int64_t rank = 0;
          for (int64_t o = first[i / Hkv]; o < n[i] - last[i / Hkv]; o++) rank += before(score + i * C, o, s);
          kept = rank < left;
        }
        if (kept) want[i * K + to++] = (int32_t)s;
      }
      EXPECT(to == keep[i], "the reference keeps %ld of %d", (long)to, keep[i]);
      while (to < K) want[i * K + to++] = -1;
    }

    kv_select a = {B, Hkv, C, K, score, n, keep, first, last, index};
    kv_status status = kv_select_cpu(&a);
    EXPECT(status == KV_OK, "round %d: %s", round, kv_status_text(status));
    EXPECT(!memcmp(index, want, (size_t)(heads * K) * 4), "round %d, kind %u", round, kind);
    free(n), free(keep), free(first), free(last), free(score), free(index), free(want);
  }
}

static void test_select_refuses(void) {
  const float score[4] = {1, 2, 3, 4};
  struct {
    int32_t n, keep, first, last;
    kv_status want;
  } cases[] = {
      {4, 3, 0, 0, KV_OK},
      {4, 4, 0, 0, KV_BAD_COUNT},
      {4, -1, 0, 0, KV_BAD_COUNT},
      {2, 3, 0, 0, KV_BAD_COUNT},
      {-1, 0, 0, 0, KV_BAD_COUNT},
      {4, 1, 1, 1, KV_BAD_COUNT},
      {4, 2, 1, 1, KV_OK},
      {4, 2, -1, 0, KV_BAD_COUNT},
      {4, 2, 0, -1, KV_BAD_COUNT},
      {5, 2, 0, 0, KV_BAD_COUNT},
      {5, 2, 0, 1, KV_OK},
      {7, 2, 1, 1, KV_BAD_COUNT},
      {2, 2, INT32_MAX, INT32_MAX, KV_OK},
      {0, 0, 3, 3, KV_OK},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    int32_t index[3] = {77, 77, 77};
    kv_select a = {1, 1, 4, 3, score, &cases[i].n, &cases[i].keep, &cases[i].first, &cases[i].last, index};
    kv_status status = kv_select_cpu(&a);
    EXPECT(status == cases[i].want, "case %zu: %s", i, kv_status_text(status));
    EXPECT(status == KV_OK || (index[0] == 77 && index[2] == 77), "case %zu wrote", i);
  }
  const int32_t three = 3, none = 0;
  int32_t index[3];
  kv_select unscored = {1, 1, 2, 3, score, &three, &three, &three, &none, index};
  EXPECT(kv_select_cpu(&unscored) == KV_OK && index[2] == 2, "all protected, one without a score");
  kv_select a = {1, -1, 4, 3, score, NULL, NULL, NULL, NULL, NULL};
  EXPECT(kv_select_cpu(&a) == KV_BAD_SHAPE, "negative dimension");
}

/* Flat buffers of one dtype: rows of `width` bytes. */
typedef struct {
  char *k, *v;
  int32_t *pos;
} buffers;

static buffers random_buffers(int64_t rows, int64_t width) {
  buffers s = {poisoned(rows, (size_t)width), poisoned(rows, (size_t)width), poisoned(rows, 4)};
  for (int64_t i = 0; i < rows * width; i++) s.k[i] = (char)draw(256), s.v[i] = (char)draw(256);
  for (int64_t i = 0; i < rows; i++) s.pos[i] = (int32_t)draw(1 << 20);
  return s;
}

static buffers copy_buffers(buffers s, int64_t rows, int64_t width) {
  buffers c = {poisoned(rows, (size_t)width), poisoned(rows, (size_t)width), poisoned(rows, 4)};
  memcpy(c.k, s.k, (size_t)(rows * width)), memcpy(c.v, s.v, (size_t)(rows * width));
  memcpy(c.pos, s.pos, (size_t)rows * 4);
  return c;
}

static void free_buffers(buffers s) { free(s.k), free(s.v), free(s.pos); }

static void test_compact_random(void) {
  for (int round = 0; round < 400; round++) {
    kv_dtype dtype = (kv_dtype)draw(3);
    int64_t B = 1 + draw(3), Hkv = 1 + draw(3), S = draw(20), D = 8 * (1 + draw(4)), heads = B * Hkv;
    int64_t size = dtype == KV_F32 ? 4 : 2, width = D * size;
    int in_place = draw(2), no_index = draw(4) == 0, dense = draw(4); /* dense 0: keep nearly all */
    int32_t *len = poisoned(heads, 4), *keep = poisoned(heads, 4), *first = poisoned(B, 4);
    int64_t *offset = poisoned(heads, 8), *to = poisoned(heads, 8), rows = draw(4), to_rows = draw(4), K = 0;
    for (int64_t b = 0; b < B; b++) first[b] = (int32_t)draw((uint32_t)S + 1);
    int32_t **chosen = poisoned(heads, sizeof *chosen);
    for (int64_t i = heads - 1; i >= 0; i--) { /* offsets in falling order: heads may lie anywhere */
      len[i] = (int32_t)draw(20);
      int32_t n = len[i] + (int32_t)S - first[i / Hkv];
      chosen[i] = poisoned(n, 4);
      keep[i] = 0;
      for (int32_t s = 0; s < n; s++)
        if (no_index ? draw(9) != 0 : draw(dense ? 2 : 16) != 0) chosen[i][keep[i]++] = s;
      if (no_index)
        for (int32_t s = 0; s < keep[i]; s++) chosen[i][s] = s;
      offset[i] = rows, rows += most(len[i], keep[i]) + draw(3);
      to[i] = in_place ? offset[i] : to_rows, to_rows += keep[i] + draw(3);
      K = most(K, keep[i]);
    }
    if (in_place) to_rows = rows;
    K += draw(3);
    int32_t *index = poisoned(heads * K, 4); /* columns from keep on stay poisoned: they are not read */
    for (int64_t i = 0; i < heads; i++) memcpy(index + i * K, chosen[i], (size_t)keep[i] * 4);

    /* new rows as a model leaves them: [B, S, Hkv, D] or [B, Hkv, S, D], with a gap after each row or none */
    int64_t pitch = D + 8 * draw(2), swapped = draw(2);
    buffers new = random_buffers(B * Hkv * S, pitch * size);
    free(new.pos), new.pos = poisoned(B * S, 4);
    for (int64_t i = 0; i < B * S; i++) new.pos[i] = (int32_t)draw(1 << 20);
    kv_new chunk = {new.k,   new.v, {Hkv * S * pitch, S * pitch, pitch}, {Hkv * S * pitch, S * pitch, pitch},
                    new.pos, first};
    if (swapped) chunk.k_stride[1] = chunk.v_stride[1] = pitch, chunk.k_stride[2] = chunk.v_stride[2] = Hkv * pitch;

    buffers src = random_buffers(rows, width), old = copy_buffers(src, rows, width);
    buffers dst = in_place ? src : random_buffers(to_rows, width), want = copy_buffers(dst, to_rows, width);
    for (int64_t i = 0; i < heads; i++)
      for (int64_t j = 0; j < keep[i]; j++) {
        int64_t s = chosen[i][j], row = offset[i] + s, b = i / Hkv, h = i % Hkv, column = first[b] + s - len[i];
        int64_t element = b * chunk.k_stride[0] + h * chunk.k_stride[1] + column * chunk.k_stride[2];
        int stored = s < len[i];
        memcpy(want.k + (to[i] + j) * width, stored ? old.k + row * width : new.k + element *size, (size_t)width);
        memcpy(want.v + (to[i] + j) * width, stored ? old.v + row * width : new.v + element *size, (size_t)width);
        want.pos[to[i] + j] = stored ? old.pos[row] : new.pos[b * S + column];
      }

    kv_compact a = {dtype,
                    B,
                    Hkv,
                    S,
                    D,
                    K,
                    {.k = src.k, .v = src.v, .pos = src.pos, .offset = offset, .len = len},
                    chunk,
                    no_index ? NULL : index,
                    keep,
                    {.k = dst.k, .v = dst.v, .pos = dst.pos, .offset = to}};
    kv_status status = kv_compact_cpu(&a);
    EXPECT(status == KV_OK, "round %d: %s", round, kv_status_text(status));
    EXPECT(!memcmp(dst.k, want.k, (size_t)(to_rows * width)), "round %d, in place %d", round, in_place);
    EXPECT(!memcmp(dst.v, want.v, (size_t)(to_rows * width)), "round %d, in place %d", round, in_place);
    EXPECT(!memcmp(dst.pos, want.pos, (size_t)to_rows * 4), "round %d, in place %d", round, in_place);

    for (int64_t i = 0; i < heads; i++) free(chosen[i]);
    free(chosen), free(len), free(keep), free(first), free(offset), free(to), free(index);
    if (!in_place) free_buffers(dst);
    free_buffers(src), free_buffers(old), free_buffers(want), free_buffers(new);
  }
}

/* One head with 3 slots and 2 new columns, first[0] = 1: 4 alive slots. */
static void test_compact_refuses(void) {
  struct {
    int32_t index[3], keep, len, first;
    int64_t D;
    int dtype;
    kv_status want;
  } cases[] = {
      {{0, 2, 3}, 3, 3, 1, 8, KV_F32, KV_OK},          {{0, 2, 4}, 3, 3, 1, 8, KV_F32, KV_BAD_COUNT},
      {{0, 2, 2}, 3, 3, 1, 8, KV_F32, KV_BAD_COUNT},   {{-1, 2, 3}, 3, 3, 1, 8, KV_F32, KV_BAD_COUNT},
      {{2, 1, 3}, 3, 3, 1, 8, KV_F32, KV_BAD_COUNT},   {{0, 2, -1}, 2, 3, 1, 8, KV_F32, KV_OK},
      {{0, 2, 3}, 4, 3, 1, 8, KV_F32, KV_BAD_COUNT},   {{0, 2, 3}, -1, 3, 1, 8, KV_F32, KV_BAD_COUNT},
      {{0, 2, 3}, 3, -1, 1, 8, KV_F32, KV_BAD_COUNT},  {{0, 2, 3}, 3, 3, 3, 8, KV_F32, KV_BAD_COUNT},
      {{0, 2, 3}, 3, 3, -1, 8, KV_F32, KV_BAD_COUNT},  {{0, 2, 3}, 3, 3, 1, 12, KV_F32, KV_BAD_SHAPE},
      {{0, 2, 3}, 3, 3, 1, 520, KV_F32, KV_BAD_SHAPE}, {{0, 2, 3}, 3, 3, 1, 8, 3, KV_BAD_DTYPE},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    float src[3 * 8] = {0}, new[2 * 8] = {0}, dst[4 * 8];
    int32_t src_pos[3] = {0}, new_pos[2] = {0}, dst_pos[4] = {77, 77, 77, 77};
    int64_t offset = 0;
    memset(dst, 0x5a, sizeof dst);
    kv_compact a = {(kv_dtype)cases[i].dtype,
                    1,
                    1,
                    2,
                    cases[i].D,
                    3,
                    {.k = src, .v = src, .pos = src_pos, .offset = &offset, .len = &cases[i].len},
                    {new, new, {16, 16, 8}, {16, 16, 8}, new_pos, &cases[i].first},
                    cases[i].index,
                    &cases[i].keep,
                    {.k = dst, .v = dst, .pos = dst_pos, .offset = &offset}};
    kv_status status = kv_compact_cpu(&a);
    EXPECT(status == cases[i].want, "case %zu: %s", i, kv_status_text(status));
    EXPECT(status == KV_OK || (dst_pos[0] == 77 && dst[0] != 0), "case %zu wrote", i);
  }
}

int main(void) {
  test_select_random();
  test_select_refuses();
  test_compact_random();
  test_compact_refuses();
  printf("test_select: %s\n", failures ? "FAILED" : "ok");
  return failures != 0;
}
