/* A token drawn from logits: the highest sum of score and addressed Gumbel noise, as dlm/diffusion/rng.py defines it. */

#include "kernels.h"

typedef uint64_t pairs __attribute__((vector_size(W * 4)));

#define BLOCK (4 * W)     /* tokens whose words one call of Philox gives */
#define LARGEST 22.9f     /* no noise is: -log(-log1p(-2^-33)) */
#define MARGIN 1e-3f      /* what comes so near to the best is looked at */
#define UNSURE 3e-5f      /* two sums so near each other: the logarithms' last bits decide, and they are torch's */

static inline pairs wide(pairs x, uint64_t y) { /* of the lower halves */
#if W == 16
  return (pairs)_mm512_mul_epu32((__m512i)x, (__m512i)(y - (pairs){0}));
#elif W == 8
  return (pairs)_mm256_mul_epu32((__m256i)x, (__m256i)(y - (pairs){0}));
#elif defined(__SSE2__)
  return (pairs)_mm_mul_epu32((__m128i)x, (__m128i)(y - (pairs){0}));
#else
  return (x & 0xffffffff) * y;
#endif
}

static inline void multiply(uvec x, uint32_t y, uvec *high, uvec *low) {
  pairs even = wide((pairs)x, y), odd = wide((pairs)x >> 32, y);
  *high = (uvec)(even >> 32 | (odd & ~0xffffffffull));
  *low = (uvec)((even & 0xffffffff) | odd << 32);
}

typedef struct {
  uint32_t seed, sample, step, position;
} Address;

/* The words of BLOCK tokens from number 4 * group on, in order. Philox4x32-10: Salmon et al., SC'11. */
static inline void words_of(const Address *at, uint32_t group, uvec out[4]) {
  uvec c0 = {0}, c1 = at->step - (uvec){0}, c2 = at->position - (uvec){0}, c3;
  uint32_t k0 = at->seed, k1 = at->sample;
  for (int i = 0; i < W; i++) c3[i] = group + (uint32_t)i;
  UNROLL for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    uvec high0, low0, high1, low1;
    multiply(c0, 0xD2511F53u, &high0, &low0);
    multiply(c2, 0xCD9E8D57u, &high1, &low1);
    c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
  }
  vec a = LOWER((vec)c0, (vec)c2), b = LOWER((vec)c1, (vec)c3), c = UPPER((vec)c0, (vec)c2), d = UPPER((vec)c1, (vec)c3);
  out[0] = (uvec)LOWER(a, b), out[1] = (uvec)UPPER(a, b), out[2] = (uvec)LOWER(c, d), out[3] = (uvec)UPPER(c, d);
}

/* log of normal positive numbers, to about an ulp: Cephes' polynomial. */
static inline vec vlog(vec x) {
  ivec bits = (ivec)x, exponent = (bits >> 23) - 126;
  vec m = (vec)((bits & 0x7fffff) | 0x3f000000); /* in [0.5, 1) */
  ivec small = m < 0.707106781f;
  vec e = __builtin_convertvector(exponent + small, vec); /* true is -1 */
  m = pick(small, m + m, m) - 1.0f;
  vec z = m * m, p = all(7.0376836292e-2f);
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  return m + (m * z * p - e * 2.12194440e-4f - 0.5f * z) + e * 0.693359375f;
}

/* -log(-log1p(-s)) of s = (word + 1/2) / 2^32, rounded once to fp32 and kept below 1. */
static inline vec gumbel(uvec word) {
  uvec below25 = (uvec)(word < (1u << 25)), even = (below25 & (word + (word & 1))) | (~below25 & (word | 1));
  vec half = pick((ivec)(word < (1u << 23)), __builtin_convertvector(word, vec) + 0.5f, __builtin_convertvector(even, vec));
  vec s = half * (1.0f / 4294967296.0f);
  s = pick(s > 1.0f - 1.0f / 16777216.0f, all(1.0f - 1.0f / 16777216.0f), s);
  vec z = s / (2.0f - s), z2 = z * z; /* 2 artanh(z) = -log(1 - s) */
  vec p = 1.0f / 11.0f + z2 * (1.0f / 13.0f + z2 * (1.0f / 15.0f));
  p = 1.0f / 3.0f + z2 * (1.0f / 5.0f + z2 * (1.0f / 7.0f + z2 * (1.0f / 9.0f + z2 * p)));
  return -vlog(pick(s < 0.5f, 2.0f * z * (1.0f + z2 * p), -vlog(pick(s < 0.5f, all(0.5f), 1.0f - s))));
}

static inline int any(ivec x) {
  pairs halves = (pairs)x;
  uint64_t found = 0;
  for (int i = 0; i < W / 2; i++) found |= halves[i];
  return found != 0;
}

/* A token that might win or come close is looked at; of the others nothing but Philox's words is computed. */
typedef struct {
  float best, second;
  int64_t token;
  uint32_t most; /* words above give too little noise, even for the highest score */
} Race;

static Race look(Race race, const Address *at, const float *x, int64_t from, int64_t count, int64_t mask, float top, float temperature) {
  float own[BLOCK];
  uvec word[4];
  if (count < BLOCK || (mask >= from && mask < from + count)) {
    for (int64_t i = 0; i < BLOCK; i++) own[i] = i < count && from + i != mask ? x[from + i] : -INFINITY;
    x = own;
  } else {
    x += from;
  }
  vec high = LOAD(x);
  for (int j = 1; j < 4; j++) high = larger(LOAD(x + j * W), high);
  if (!any(high > top + temperature * (race.best - LARGEST - MARGIN))) return race;
  words_of(at, (uint32_t)(from / 4), word);
  ivec few = (ivec)(word[0] <= race.most) | (ivec)(word[1] <= race.most) | (ivec)(word[2] <= race.most) | (ivec)(word[3] <= race.most);
  if (!any(few)) return race;
  float before = race.best;
  for (int j = 0; j < 4; j++) {
    vec sum = (LOAD(x + j * W) - top) / temperature + gumbel(word[j]);
    if (!any(sum > race.best - MARGIN)) continue;
    for (int i = 0; i < W; i++) {
      if (sum[i] > race.best) race.second = race.best, race.best = sum[i], race.token = from + j * W + i;
      else if (sum[i] > race.second) race.second = sum[i];
    }
  }
  if (race.best == before) return race;
  double share = -expm1(-exp(-(double)(race.best - MARGIN))); /* of words that give more noise than that */
  race.most = share > 0.999 ? UINT32_MAX : (uint32_t)(share * 1.001 * 4294967296.0);
  return race;
}

/* The token of logits x (v,) that wins, never the mask; `top` is the highest candidate and `first` its number. *unsure
   where another comes so close that rounding decides. */
int64_t dlm_draw(const float *x, int64_t v, int64_t mask, float top, int64_t first, float temperature, const uint32_t *address, uint8_t *unsure) {
  Address at = {address[0], address[1], address[2], address[3]};
  Race race = {-INFINITY, -INFINITY, first, UINT32_MAX};
  int64_t likely = first / BLOCK * BLOCK;
  race = look(race, &at, x, likely, MIN(BLOCK, v - likely), mask, top, temperature);
  for (int64_t from = 0; from < v; from += BLOCK)
    if (from != likely) race = look(race, &at, x, from, MIN(BLOCK, v - from), mask, top, temperature);
  *unsure = !(race.best - race.second > UNSURE);
  return race.token;
}
