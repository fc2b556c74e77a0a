/* What one core of this machine can do at most, for tests/bench_ops.py: multiply-adds a second and bytes read a second.
 * Compiled for the instruction set of the kernels beside which it is printed. */
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16, CHAINS = 24 };
#elif defined(__AVX2__)
enum { LANES = 8, CHAINS = 12 };
#else
enum { LANES = 4, CHAINS = 12 };
#endif
typedef float vector __attribute__((vector_size(4 * LANES)));
#if defined(__x86_64__)
#define KEEP(x) __asm__ volatile("" : "+v"(x)) /* in a register, whatever the compiler knows of it */
#else
#define KEEP(x) __asm__ volatile("" : "+w"(x))
#endif

static double now(void) {
  struct timespec t;
  timespec_get(&t, TIME_UTC);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The best of some runs of about a millisecond, until `seconds` are over. */
#define BEST(seconds, amount, run)                          \
  double best = 0;                                          \
  for (double end = now() + (seconds); now() < end;) {      \
    const double start = now();                             \
    run;                                                    \
    const double rate = (double)(amount) / (now() - start); \
    if (rate > best) best = rate;                           \
  }                                                         \
  return best

static void multiply_add(vector *acc, int rounds) {
  vector a[CHAINS], x = acc[0], y = acc[1];
#pragma GCC unroll 24
  for (int i = 0; i < CHAINS; i++) a[i] = acc[i];
  for (int round = 0; round < rounds; round++)
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++) {
      a[i] = a[i] * x + y;
      KEEP(a[i]);
    }
#pragma GCC unroll 24
  for (int i = 0; i < CHAINS; i++) acc[i] = a[i];
}

/* Floating-point operations a second in fp32. */
double peak_fp32(double seconds) {
  enum { ROUNDS = 50000 };
  vector acc[CHAINS] = {{0}};
  BEST(seconds, 2.0 * LANES * CHAINS * ROUNDS, multiply_add(acc, ROUNDS));
}

#ifdef __AMX_BF16__
/* Four tile registers of 16 x 16 sums, in a process that may use them: kvevict has asked for it. */
static void multiply_tiles(int rounds) {
  unsigned char squares[64] = {1};
  for (int i = 0; i < 8; i++) squares[16 + 2 * i] = 64, squares[48 + i] = 16;
  __asm__ volatile("ldtilecfg (%0)" ::"r"(squares) : "memory");
  for (int round = 0; round < rounds; round++)
    __asm__ volatile(
        "tdpbf16ps %tmm7, %tmm6, %tmm0\n tdpbf16ps %tmm7, %tmm6, %tmm1\n"
        "tdpbf16ps %tmm7, %tmm6, %tmm2\n tdpbf16ps %tmm7, %tmm6, %tmm3");
  __asm__ volatile("tilerelease");
}
#elif defined(__AVX512BF16__)
static void dot_pairs(__m512 *acc, int rounds) {
  __m512 a[CHAINS];
  const __m512bh x = (__m512bh)acc[0], y = (__m512bh)acc[1];
#pragma GCC unroll 24
  for (int i = 0; i < CHAINS; i++) a[i] = acc[i];
  for (int round = 0; round < rounds; round++)
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++) {
      a[i] = _mm512_dpbf16_ps(a[i], x, y);
      KEEP(a[i]);
    }
#pragma GCC unroll 24
  for (int i = 0; i < CHAINS; i++) acc[i] = a[i];
}
#endif

/* The same of bf16, summed in fp32; 0 where the instruction set does not multiply it. */
double peak_bf16(double seconds) {
#ifdef __AMX_BF16__
  enum { ROUNDS = 50000 };
  BEST(seconds, 2.0 * 16 * 16 * 32 * 4 * ROUNDS, multiply_tiles(ROUNDS));
#elif defined(__AVX512BF16__)
  enum { ROUNDS = 50000 };
  __m512 acc[CHAINS] = {{0}};
  BEST(seconds, 4.0 * LANES * CHAINS * ROUNDS, dot_pairs(acc, ROUNDS));
#else
  (void)seconds;
  return 0;
#endif
}

static void read_all(const vector *x, size_t n, vector *sum) {
  vector a[8] = {{0}};
  for (size_t i = 0; i + 8 <= n; i += 8)
#pragma GCC unroll 8
    for (size_t j = 0; j < 8; j++) a[j] += x[i + j];
  for (int j = 0; j < 8; j++) *sum += a[j];
}

/* Bytes a second of a buffer that is read in order, the best of its pieces: other work may interrupt the rest. */
double peak_read(const char *x, size_t bytes, double seconds) {
  enum { PIECE = 8 << 20 };
  vector sum = {0};
  size_t at = 0;
  BEST(seconds, PIECE, read_all((const vector *)(x + at), PIECE / sizeof sum, &sum); KEEP(sum);
       at = at + 2 * PIECE > bytes ? 0 : at + PIECE);
}

/* The same over all of the time and of the buffer, as a kernel reads that has to read all of it. */
double sustained_read(const char *x, size_t bytes, double seconds) {
  vector sum = {0};
  double total = 0, start = now(), end;
  do {
    read_all((const vector *)x, bytes / sizeof sum, &sum);
    KEEP(sum);
    total += (double)bytes, end = now();
  } while (end - start < seconds);
  return total / (end - start);
}
