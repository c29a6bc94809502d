/* Products by instructions that multiply pairs of bfloat16 (avx512_bf16: AMD from Zen 4 on), pairs of int16 or quads of int8
   (both avx512_vnni or avx_vnni) and sum them in 32 bits. Whether the processor has them is asked at run time. */

#include "products.h"

#if defined(__x86_64__) && W >= 8

#define WORD(p) (*(const word *)(p) - (ivec){0})

#if W == 16
static int64_t pairs(const float *x, int64_t depth, uint32_t *out) {
  for (int64_t i = 0; i < depth / 2; i++) out[i] = bf16(x[2 * i]) | bf16(x[2 * i + 1]) << 16;
  return depth / 2;
}

#define SUM(s, x, w) s = (vec)_mm512_dpbf16_ps((__m512)s, (__m512bh)x, (__m512bh)w)
#define NAME(R) pairs##R
#define ALL tiles_of_pairs
#define TARGET __attribute__((target("avx512bf16")))
#define PARTS 1
#define SPREAD(p) (vec)WORD(p)
#define PART(words, part, scale) (vec) words
#define MAC SUM
#define SCALED 0
#include "tile.h"

const Multiplier dlm_bf16_dots = {2, tiles_of_pairs, pairs};
int dlm_has_bf16_dots(void) { return __builtin_cpu_supports("avx512bf16") != 0; }
#define QUADS(s, w, x) (ivec) _mm512_dpbusd_epi32((__m512i)s, (__m512i)w, (__m512i)x)
#define PAIRS(s, w, x) (ivec) _mm512_dpwssd_epi32((__m512i)s, (__m512i)w, (__m512i)x)
#define WHOLE_TARGET __attribute__((target("avx512vnni")))
int dlm_has_whole_dots(void) { return __builtin_cpu_supports("avx512vnni") != 0; }
#else
const Multiplier dlm_bf16_dots = {2};
int dlm_has_bf16_dots(void) { return 0; }
#define QUADS(s, w, x) (ivec) _mm256_dpbusd_avx_epi32((__m256i)s, (__m256i)w, (__m256i)x)
#define PAIRS(s, w, x) (ivec) _mm256_dpwssd_avx_epi32((__m256i)s, (__m256i)w, (__m256i)x)
#define WHOLE_TARGET __attribute__((target("avxvnni")))
int dlm_has_whole_dots(void) { /* cpuid: gcc 12 does not know the feature's name */
  int a = 7, b, c = 1, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return a >> 4 & 1;
}
#endif

#define LARGER(a, b) (((a) & ((a) > (b))) | ((b) & ~((a) > (b))))
#define ADDED(a, b) ((a) + (b))
#define ACROSS(x, f) /* all its lanes become f of all of them */                                                       \
  for (int round = 0; round < ROUNDS; round++) {                                                                       \
    ivec low = LOWER(x, x), high = UPPER(x, x);                                                                        \
    x = f(low, high);                                                                                                  \
  }
typedef int8_t bytes __attribute__((vector_size(W)));
typedef int16_t halves __attribute__((vector_size(2 * W)));

/* Each GROUP of a row: a scale, what sums begin with, and whole numbers of up to `most`, `per` of them in a word. int8 weights
   are multiplied as w + 128, for which a beginning of -128 times the sum makes up. A row with NaN or infinity gives such a
   scale. `n` of them are made here. */
INLINE void group(const float *x, int64_t n, float most, int per, uint32_t *out) {
  const int64_t count = (n + W - 1) / W;
  float rest[W] = {0}, top, scale, over;
  ivec tops = {0}, totals = {0};
  memcpy(rest, x + n / W * W, n % W * sizeof(float));
  for (int64_t i = 0; i < count; i++) { /* sizes are ordered as their bits are */
    ivec size = (ivec)LOAD((i + 1) * W <= n ? x + i * W : rest) & 0x7fffffff;
    tops = LARGER(size, tops);
  }
  ACROSS(tops, LARGER)
  int32_t first = tops[0];
  memcpy(&top, &first, 4);
  scale = top / most, over = top > 1e-30f ? most / top : 0;
  for (int64_t i = 0; i < count; i++) {
    vec shifted = LOAD((i + 1) * W <= n ? x + i * W : rest) * over + 12582912.0f;
    ivec bits = (ivec)shifted; /* 1.5 * 2^23 leaves the whole number in the last of them */
    int64_t size = MIN(W, n - i * W) * 4 / per;
    char *to = (char *)(out + 2 + i * W / per);
    if (per == 4) {
      bytes made = __builtin_convertvector(bits, bytes);
      memcpy(to, &made, size), totals += bits << 24 >> 24;
    } else {
      halves made = __builtin_convertvector(bits, halves);
      memcpy(to, &made, size);
    }
  }
  if (per == 4) ACROSS(totals, ADDED)
  int32_t total = -128 * totals[0];
  memcpy(out, &scale, 4), memcpy(out + 1, &total, 4);
}

static inline int64_t whole(const float *x, int64_t depth, float most, int per, uint32_t *out) {
  uint32_t *start = out;
  int64_t from = 0;
  for (; from + GROUP <= depth; from += GROUP, out += 2 + GROUP / per) group(x + from, GROUP, most, per, out);
  if (from < depth) group(x + from, depth - from, most, per, out), out += 2 + (depth - from) / per;
  return out - start;
}

static int64_t eighths(const float *x, int64_t depth, uint32_t *out) { return whole(x, depth, 127, 4, out); }

/* GROUP products with weights of up to 4095 stay under 2^31. */
static int64_t sixteenths(const float *x, int64_t depth, uint32_t *out) { return whole(x, depth, 8191, 2, out); }

#define TILE(R)                                                                                                        \
  WHOLE_TARGET static void NAME(R)(const float *a, const Panel *p, int64_t depth, int ahead, float *y, int64_t ldy, int add) { \
    const float *panel = p->here, *scales = p->scales;                                                                 \
    vec s[R][2];                                                                                                       \
    UNROLL for (int i = 0; i < R; i++) s[i][0] = s[i][1] = all(0);                                                     \
    for (int64_t from = 0; from < depth; from += GROUP / PER, scales += PANEL) {                                       \
      const float *sizes = a;                                                                                          \
      ivec t[R][2];                                                                                                    \
      a += 2 * STEP;                                                                                                   \
      UNROLL for (int i = 0; i < R; i++) t[i][0] = t[i][1] = WORD(sizes + STEP + i);                                   \
      for (int64_t at = from; at < MIN(depth, from + GROUP / PER); at++, panel += PANEL, a += STEP) {                  \
        ivec left = WORDS(panel) ^ TURNED, right = WORDS(panel + W) ^ TURNED;                                          \
        FETCH(p, at)                                                                                                   \
        UNROLL for (int i = 0; i < R; i++) {                                                                           \
          ivec x = WORD(a + i);                                                                                        \
          t[i][0] = DOT(t[i][0], left, x);                                                                             \
          t[i][1] = DOT(t[i][1], right, x);                                                                            \
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
#define PER 4
#define TURNED (int32_t)0x80808080
#define DOT QUADS
#include "heights.h"
#undef NAME
#undef ALL
#undef PER
#undef TURNED
#undef DOT
#define NAME(R) doubles##R
#define ALL tiles_of_doubles
#define PER 2
#define TURNED 0
#define DOT PAIRS
#include "heights.h"
const Multiplier dlm_int8_dots = {4, tiles_of_quads, eighths}, dlm_int16_dots = {2, tiles_of_doubles, sixteenths};
#else
const Multiplier dlm_bf16_dots = {2}, dlm_int8_dots = {4}, dlm_int16_dots = {2};
int dlm_has_bf16_dots(void) { return 0; }
int dlm_has_whole_dots(void) { return 0; }
#endif
