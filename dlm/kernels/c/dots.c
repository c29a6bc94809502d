/* Products by instructions that multiply pairs of bfloat16 (avx512_bf16: AMD from Zen 4 on) or quads of int8 (avx512_vnni,
   avx_vnni) and sum them in 32 bits. Whether the processor has them is asked at run time. */

#include "products.h"

#if defined(__x86_64__) && W >= 8
#include <immintrin.h>

#define WORD(p) (*(const word *)(p) - (ivec){0})

#if W == 16
static int64_t pairs(const float *x, int64_t depth, uint32_t *out) {
  for (int64_t i = 0; i < depth / 2; i++) out[i] = bf16(x[2 * i]) | bf16(x[2 * i + 1]) << 16;
  return depth / 2;
}

#define DOT(s, x, w) s = (vec)_mm512_dpbf16_ps((__m512)s, (__m512bh)x, (__m512bh)w)
#define NAME(R) pairs##R
#define ALL tiles_of_pairs
#define TARGET __attribute__((target("avx512bf16")))
#define PARTS 1
#define SPREAD(p) (vec)WORD(p)
#define PART(words, part, scale) (vec) words
#define MAC DOT
#define SCALED 0
#include "tile.h"

const Multiplier dlm_bf16_dots = {2, tiles_of_pairs, pairs};
int dlm_has_bf16_dots(void) { return __builtin_cpu_supports("avx512bf16") != 0; }
#define QUADS(s, w, x) (ivec) _mm512_dpbusd_epi32((__m512i)s, (__m512i)w, (__m512i)x)
#define QUADS_TARGET __attribute__((target("avx512vnni")))
int dlm_has_int8_dots(void) { return __builtin_cpu_supports("avx512vnni") != 0; }
#else
const Multiplier dlm_bf16_dots = {2};
int dlm_has_bf16_dots(void) { return 0; }
#define QUADS(s, w, x) (ivec) _mm256_dpbusd_avx_epi32((__m256i)s, (__m256i)w, (__m256i)x)
#define QUADS_TARGET __attribute__((target("avxvnni")))
int dlm_has_int8_dots(void) { /* cpuid: gcc 12 does not know the feature's name */
  int a = 7, b, c = 1, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return a >> 4 & 1;
}
#endif

/* Each GROUP of a row: a scale, -128 times the sum, which makes up for weights that are multiplied as w + 128, and the
   numbers as int8, four to a word. A row with NaN or infinity gives such a scale. */
static int64_t quads(const float *x, int64_t depth, uint32_t *out) {
  uint32_t *start = out;
  for (int64_t from = 0; from < depth; from += GROUP) {
    int64_t n = MIN(GROUP, depth - from);
    float top = 0, strange = 0;
    for (int64_t i = 0; i < n; i++) {
      float size = fabsf(x[from + i]);
      top = size > top ? size : top, strange += x[from + i] - x[from + i];
    }
    float scale = top / 127 + strange, over = top > 1e-30f ? 127 / top : 0;
    int8_t *bytes = (int8_t *)(out + 2);
    int32_t total = 0;
    for (int64_t i = 0; i < n; i++) {
      float shifted = x[from + i] * over + 12582912.0f; /* 1.5 * 2^23: the whole number is in the last bits */
      int32_t bits;
      memcpy(&bits, &shifted, 4);
      bytes[i] = (int8_t)bits, total += bytes[i];
    }
    total *= -128;
    memcpy(out, &scale, 4), memcpy(out + 1, &total, 4);
    out += 2 + n / 4;
  }
  return out - start;
}

#define TILE(R)                                                                                                        \
  QUADS_TARGET static void NAME(R)(const float *a, const Panel *p, int64_t depth, int ahead, float *y, int64_t ldy, int add) { \
    const float *panel = p->here, *scales = p->scales;                                                                 \
    vec s[R][2];                                                                                                       \
    UNROLL for (int i = 0; i < R; i++) s[i][0] = s[i][1] = all(0);                                                     \
    for (int64_t from = 0; from < depth; from += GROUP / 4, scales += PANEL) {                                         \
      const float *sizes = a;                                                                                          \
      ivec t[R][2];                                                                                                    \
      a += 2 * STEP;                                                                                                   \
      UNROLL for (int i = 0; i < R; i++) t[i][0] = t[i][1] = WORD(sizes + STEP + i);                                   \
      for (int64_t at = from; at < MIN(depth, from + GROUP / 4); at++, panel += PANEL, a += STEP) {                    \
        ivec left = WORDS(panel) ^ (int32_t)0x80808080, right = WORDS(panel + W) ^ (int32_t)0x80808080;                \
        FETCH(p, at)                                                                                                   \
        UNROLL for (int i = 0; i < R; i++) {                                                                           \
          ivec x = WORD(a + i);                                                                                        \
          t[i][0] = QUADS(t[i][0], left, x);                                                                           \
          t[i][1] = QUADS(t[i][1], right, x);                                                                          \
        }                                                                                                              \
      }                                                                                                                \
      vec left = LOAD(scales), right = LOAD(scales + W);                                                               \
      UNROLL for (int i = 0; i < R; i++) {                                                                             \
        s[i][0] += __builtin_convertvector(t[i][0], vec) * (left * sizes[i]);                                          \
        s[i][1] += __builtin_convertvector(t[i][1], vec) * (right * sizes[i]);                                         \
      }                                                                                                                \
    }                                                                                                                  \
    UNROLL for (int i = 0; i < R; i++) {                                                                               \
      if (add) s[i][0] += LOAD(y + i * ldy), s[i][1] += LOAD(y + i * ldy + W);                                         \
      STORE(y + i * ldy, s[i][0]), STORE(y + i * ldy + W, s[i][1]);                                                    \
    }                                                                                                                  \
  }
#define NAME(R) quads##R
#define ALL tiles_of_quads
#include "heights.h"
const Multiplier dlm_int8_dots = {4, tiles_of_quads, quads};
#else
const Multiplier dlm_bf16_dots = {2}, dlm_int8_dots = {4};
int dlm_has_bf16_dots(void) { return 0; }
int dlm_has_int8_dots(void) { return 0; }
#endif
