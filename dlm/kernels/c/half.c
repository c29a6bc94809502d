/* Products of fp32 matrices whose factors are rounded to half precision, for training on a CPU that multiplies halves
   (avx512_fp16: Xeon from Sapphire Rapids on), where such a product has twice fp32's peak.

   Each factor is scaled by a power of two that brings its largest number near 16, so that neither it nor a sum of DEPTH
   products overflows. Sums of DEPTH products are kept in half precision, their totals in fp32. The relative error is
   1.2e-3 for normal numbers, where bfloat16 has 2.9e-3.

   A is packed as pairs of the same half: a pair is spread over a vector by a load, a single half by a shuffle, which
   would take the multiplier's turn. */

#include "kernels.h"

#if defined(__x86_64__) && defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#pragma GCC target("avx512fp16,avx512f,avx512dq,avx512bw,avx512vl,fma")
#include <immintrin.h>

#define ROWS 12     /* of a tile: ROWS * 2 sums live in registers */
#define COLUMNS 64
#define DEPTH 64    /* products summed in half precision */
#define HEIGHT 96   /* of A, packed at a time */
#define WIDTH 1024  /* of B, packed at a time */
#define LENGTH 512  /* of both */

int dlm_half_available(void) { return __builtin_cpu_supports("avx512fp16") != 0; }

static inline __mmask16 some(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1; }

static float largest(const float *x, int64_t rows, int64_t cols, int64_t ld) {
  __m512 top = _mm512_setzero_ps();
  for (int64_t i = 0; i < rows; i++) {
    int64_t j = 0;
    for (; j + 16 <= cols; j += 16) top = _mm512_max_ps(top, _mm512_abs_ps(_mm512_loadu_ps(x + i * ld + j)));
    if (j < cols) top = _mm512_max_ps(top, _mm512_abs_ps(_mm512_maskz_loadu_ps(some(cols - j), x + i * ld + j)));
  }
  return _mm512_reduce_max_ps(top);
}

static float scale_of(float top) { /* a power of two that brings the largest near 16 */
  if (!(top > 0) || !isfinite(top)) return 1;
  int exponent;
  frexpf(top, &exponent);
  return ldexpf(1, exponent < -56 ? 60 : exponent > 64 ? -60 : 4 - exponent);
}


static inline __m512i halved(__m512 v) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtxps_ph(v)); }

static inline __m512i twice(__m512 v) { /* sixteen numbers as pairs of the same half */
  __m512i h = halved(v);
  return _mm512_or_si512(h, _mm512_slli_epi32(h, 16));
}

static inline void transpose16(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) t[2*i] = _mm512_unpacklo_epi32(r[2*i], r[2*i+1]), t[2*i+1] = _mm512_unpackhi_epi32(r[2*i], r[2*i+1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[4*i] = _mm512_unpacklo_epi64(t[4*i], t[4*i+2]); r[4*i+1] = _mm512_unpackhi_epi64(t[4*i], t[4*i+2]);
    r[4*i+2] = _mm512_unpacklo_epi64(t[4*i+1], t[4*i+3]); r[4*i+3] = _mm512_unpackhi_epi64(t[4*i+1], t[4*i+3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i+4], 0x88); t[i+4] = _mm512_shuffle_i32x4(r[i], r[i+4], 0xdd);
    t[i+8] = _mm512_shuffle_i32x4(r[i+8], r[i+12], 0x88); t[i+12] = _mm512_shuffle_i32x4(r[i+8], r[i+12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) r[i] = _mm512_shuffle_i32x4(t[i], t[i+8], 0x88), r[i+8] = _mm512_shuffle_i32x4(t[i], t[i+8], 0xdd);
}

/* rows of A as (panels, k, ROWS) pairs of the same half */
static void pack_a(const float *a, int64_t ri, int64_t rk, int64_t m, int64_t k, float s, uint32_t *out) {
  const __m512 by = _mm512_set1_ps(s);
  if (ri == 1) {
    for (int64_t p = 0; p < k; p++)
      for (int64_t i = 0; i < m; i += ROWS) {
        int64_t high = m - i < ROWS ? m - i : ROWS;
        __m512 v = _mm512_maskz_loadu_ps(some(high), a + i + p * rk);
        _mm512_mask_storeu_epi32(out + i * k + p * ROWS, (1 << ROWS) - 1, twice(_mm512_mul_ps(v, by)));
      }
    return;
  }
  for (int64_t i = 0; i < m; i += ROWS, out += ROWS * k) {
    int64_t high = m - i < ROWS ? m - i : ROWS;
    for (int64_t p = 0; p < k; p += 16) {
      int64_t left = k - p < 16 ? k - p : 16;
      __mmask16 mask = some(left);
      __m512i r[16];
#pragma GCC unroll 16
      for (int q = 0; q < 16; q++)
        r[q] = q < high ? twice(_mm512_mul_ps(_mm512_maskz_loadu_ps(mask, a + (i + q) * ri + p), by)) : _mm512_setzero_si512();
      transpose16(r);
      for (int q = 0; q < left; q++) _mm512_mask_storeu_epi32(out + (p + q) * ROWS, (1 << ROWS) - 1, r[q]);
    }
  }
}

/* columns of B as (panels, k, COLUMNS) halves */
static void pack_b(const float *b, int64_t rk, int64_t rj, int64_t k, int64_t n, float s, uint16_t *out) {
  const __m512 by = _mm512_set1_ps(s);
  for (int64_t j = 0; j < n; j += COLUMNS, out += COLUMNS * k) {
    int64_t wide = n - j < COLUMNS ? n - j : COLUMNS;
    if (rj == 1) {
      for (int64_t p = 0; p < k; p++)
        for (int64_t q = 0; q < COLUMNS; q += 16) {
          int64_t left = wide - q;
          __mmask16 mask = some(left);
          __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, b + p * rk + j + q), by);
          _mm256_storeu_si256((__m256i *)(out + p * COLUMNS + q), (__m256i)_mm512_cvtxps_ph(v));
        }
    } else {
      for (int64_t q = 0; q < COLUMNS; q += 16)
        for (int64_t p = 0; p < k; p += 16) {
          const int64_t left = MIN(16, k - p);
          __m512i r[16];
#pragma GCC unroll 16
          for (int i = 0; i < 16; i++)
            r[i] = q + i < wide ? halved(_mm512_mul_ps(_mm512_maskz_loadu_ps(some(left), b + (j + q + i) * rj + p), by))
                                : _mm512_setzero_si512();
          transpose16(r);
          for (int i = 0; i < left; i++)
            _mm256_storeu_si256((__m256i *)(out + (p + i) * COLUMNS + q), _mm512_cvtepi32_epi16(r[i]));
        }
    }
  }
}

static void tile(const uint32_t *a, const uint16_t *b, int64_t k, float *c /* (ROWS, COLUMNS) */) {
  for (int64_t start = 0; start < k; start += DEPTH) {
    int64_t end = start + DEPTH < k ? start + DEPTH : k;
    __m512h acc[ROWS][2];
    for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ph();
    for (int64_t p = start; p < end; p++) {
      __m512h b0 = (__m512h)_mm512_loadu_si512(b + p * COLUMNS), b1 = (__m512h)_mm512_loadu_si512(b + p * COLUMNS + 32);
#pragma GCC unroll 12
      for (int r = 0; r < ROWS; r++) {
        __m512h x = (__m512h)_mm512_set1_epi32((int)a[p * ROWS + r]);
        acc[r][0] = _mm512_fmadd_ph(x, b0, acc[r][0]);
        acc[r][1] = _mm512_fmadd_ph(x, b1, acc[r][1]);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        float *to = c + r * COLUMNS + h * 32;
        __m512 low = _mm512_cvtxph_ps((__m256h)_mm512_castsi512_si256((__m512i)acc[r][h]));
        __m512 up = _mm512_cvtxph_ps((__m256h)_mm512_extracti64x4_epi64((__m512i)acc[r][h], 1));
        if (start) low = _mm512_add_ps(low, _mm512_load_ps(to)), up = _mm512_add_ps(up, _mm512_load_ps(to + 16));
        _mm512_store_ps(to, low), _mm512_store_ps(to + 16, up);
      }
  }
}


int64_t dlm_half_room(int threads) {
  return (int64_t)WIDTH * LENGTH * sizeof(uint16_t) + (int64_t)threads * HEIGHT * LENGTH * sizeof(uint32_t) + 64;
}

/* The largest absolute value of x (rows, columns), its rows ld apart; infinite or NaN where one is. */
float dlm_largest(const float *x, int64_t rows, int64_t columns, int64_t ld) { return largest(x, rows, columns, ld); }

/* c (m, n) = a b. Element (i, p) of a is a[i ri + p rp], (p, j) of b is b[p sp + j sj]; one of each two is 1. */
void dlm_half_product(const float *a, int64_t ri, int64_t rp, const float *b, int64_t sp, int64_t sj, float *c,
                      int64_t m, int64_t n, int64_t k, float largest_a, float largest_b, char *room, int threads) {
  const float scale_a = scale_of(largest_a), scale_b = scale_of(largest_b);
  const __m512 back = _mm512_set1_ps(1 / scale_a), again = _mm512_set1_ps(1 / scale_b);
  uint16_t *packed_b = (uint16_t *)(((uintptr_t)room + 63) & ~(uintptr_t)63);
  uint32_t *all_a = (uint32_t *)(packed_b + WIDTH * LENGTH);
  for (int64_t j0 = 0; j0 < n; j0 += WIDTH) {
    const int64_t wide = MIN(WIDTH, n - j0);
    for (int64_t p0 = 0; p0 < k; p0 += LENGTH) {
      const int64_t deep = MIN(LENGTH, k - p0);
      pack_b(b + p0 * sp + j0 * sj, sp, sj, deep, wide, scale_b, packed_b);
      PARALLEL(m / HEIGHT) for (int64_t i0 = 0; i0 < m; i0 += HEIGHT) {
        uint32_t *packed_a = all_a + (int64_t)THREAD * HEIGHT * LENGTH;
        const int64_t high = MIN(HEIGHT, m - i0);
        float sums[ROWS * COLUMNS] __attribute__((aligned(64)));
        pack_a(a + i0 * ri + p0 * rp, ri, rp, high, deep, scale_a, packed_a);
        for (int64_t j = 0; j < wide; j += COLUMNS)
          for (int64_t i = 0; i < high; i += ROWS) {
            tile(packed_a + i * deep, packed_b + j * deep, deep, sums);
            const int64_t rows = MIN(ROWS, high - i), columns = MIN(COLUMNS, wide - j);
            for (int64_t r = 0; r < rows; r++)
              for (int64_t q = 0; q < columns; q += 16) {
                const __mmask16 mask = some(columns - q);
                float *to = c + (i0 + i + r) * n + j0 + j + q;
                __m512 x = _mm512_mul_ps(_mm512_mul_ps(_mm512_load_ps(sums + r * COLUMNS + q), back), again);
                if (p0) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, to));
                _mm512_mask_storeu_ps(to, mask, x);
              }
          }
      }
    }
  }
}
#else
int dlm_half_available(void) { return 0; }
int64_t dlm_half_room(int threads) { return 0; }
float dlm_largest(const float *x, int64_t rows, int64_t columns, int64_t ld) { return 0; }
void dlm_half_product(const float *a, int64_t ri, int64_t rp, const float *b, int64_t sp, int64_t sj, float *c,
                      int64_t m, int64_t n, int64_t k, float largest_a, float largest_b, char *room, int threads) {}
#endif
