/* Vectors of fp32 numbers, as wide as the processor's, and the loops over threads.

   Everything is written in GNU vector extensions, so that gcc and clang make AVX-512, AVX2 or NEON of the same lines. */

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define W 16    /* floats in a vector */
#define HIGH 14 /* rows of a product's tile: HIGH * 2 sums live in registers */
#define TALL 8  /* keys or channels in a tile of attention.c: a divisor of its CHUNK */
#elif defined(__AVX2__)
#define W 8
#define HIGH 6
#define TALL 4
#else
#define W 4
#define HIGH 14
#define TALL 8
#endif

typedef float vec __attribute__((vector_size(W * 4)));
typedef int32_t ivec __attribute__((vector_size(W * 4)));
typedef uint32_t uvec __attribute__((vector_size(W * 4)));
typedef uint16_t halves_of_words __attribute__((vector_size(W * 2)));
typedef vec loose __attribute__((aligned(4), may_alias)); /* anywhere in memory */

#define LOAD(p) (*(const loose *)(p))
#define STORE(p, x) (*(loose *)(p) = (x))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(a, b, ...) __builtin_shuffle(a, b, (ivec){__VA_ARGS__})
#endif
#define PRAGMA(words) _Pragma(#words)
#define SPLIT(condition) PRAGMA(omp parallel for schedule(static) num_threads(threads) if (condition))
#define PARALLEL(n) SPLIT(threads > 1 && (n) > 1)

#ifdef _OPENMP
int omp_get_thread_num(void);
#define THREAD omp_get_thread_num()
#else
#define THREAD 0
#endif

static inline vec all(float x) { return x - (vec){0}; }
static inline vec pick(ivec which, vec yes, vec no) { return (vec)((which & (ivec)yes) | (~which & (ivec)no)); }

/* a > b ? a : b, so b where one of them is NaN. x86 has an instruction for it that compilers do not find. */
static inline vec larger(vec a, vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__x86_64__)
  return _mm_max_ps(a, b);
#else
  return pick(a > b, a, b);
#endif
}

/* exp to 2 units in the last place for x <= 88: 2^n times Cephes' polynomial of the rest; 0 under -87, where fp32 is
   subnormal and the polynomial's answer is masked; NaN stays. n is rounded by adding 1.5 * 2^23, which leaves no bits for
   a fraction, and 127 with it, so that the sum's last bits are the exponent of 2^n. */
static inline vec vexp(vec x) {
  vec t = x * 1.44269504f + 12583039.0f, n = t - 12583039.0f;
  vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return (vec)((ivec)(p * (vec)((ivec)t << 23)) & ~(x < -87.0f));
}

static inline float sum(vec x) {
  float total = 0;
  for (int i = 0; i < W; i++) total += x[i];
  return total;
}
/* A square of W rows is transposed by interleaving its halves log2(W) times. */
#if W == 16
#define ROUNDS 4
#define LOWER(a, b) MIX(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define UPPER(a, b) MIX(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif W == 8
#define ROUNDS 3
#define LOWER(a, b) MIX(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define UPPER(a, b) MIX(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define ROUNDS 2
#define LOWER(a, b) MIX(a, b, 0, 4, 1, 5)
#define UPPER(a, b) MIX(a, b, 2, 6, 3, 7)
#endif

static inline void transpose(vec a[W]) {
  vec b[W];
  UNROLL for (int round = 0; round < ROUNDS; round++) {
    UNROLL for (int i = 0; i < W / 2; i++) b[2 * i] = LOWER(a[i], a[i + W / 2]), b[2 * i + 1] = UPPER(a[i], a[i + W / 2]);
    UNROLL for (int i = 0; i < W; i++) a[i] = b[i];
  }
}
