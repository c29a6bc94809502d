/* What is computed row by row: norms, rotations, writes to pages, confidence. */

#include "kernels.h"

/* out (n, h, d) = norm of x (n, h, d) with its own strides, plus a residual (n, d) that is then stored in total. */
void dlm_rms_norm(const float *x, int64_t stride_n, int64_t stride_h, const float *residual, const float *weight,
                  float eps, float *out, float *total, int64_t n, int64_t h, int64_t d, int threads) {
  PARALLEL(n / 64) for (int64_t row = 0; row < n * h; row++) {
    const float *from = x + row / h * stride_n + row % h * stride_h;
    float *to = out + row * d, rest = 0;
    if (residual) {
      float *here = total + row * d;
      for (int64_t i = 0; i < d; i++) here[i] = from[i] + residual[row * d + i];
      from = here;
    }
    vec squares = all(0);
    int64_t i = 0;
    for (; i + W <= d; i += W) squares += LOAD(from + i) * LOAD(from + i);
    for (; i < d; i++) rest += from[i] * from[i];
    float scale = 1.0f / sqrtf((sum(squares) + rest) / (float)d + eps);
    for (i = 0; i + W <= d; i += W) STORE(to + i, LOAD(weight + i) * (LOAD(from + i) * scale));
    for (; i < d; i++) to[i] = weight[i] * (from[i] * scale);
  }
}

static void rotate_head(const float *x, const float *cos, const float *sin, float *restrict out, int64_t e, int64_t r) {
  int64_t half = r / 2;
  for (int64_t i = 0; i < half; i++) out[i] = x[i] * cos[i] - x[i + half] * sin[i];
  for (int64_t i = half; i < r; i++) out[i] = x[i] * cos[i] + x[i - half] * sin[i];
  if (r < e) memcpy(out + r, x + r, (e - r) * sizeof(float));
}

/* out (n, h, e) = q (n, h, e), the first r channels rotated by each row's cos and sin; r = 0 rotates nothing. */
void dlm_rotate(const float *q, int64_t stride, const float *cos, const float *sin, float *out, int64_t n, int64_t h,
                int64_t e, int64_t r, int threads) {
  PARALLEL(n / 64) for (int64_t row = 0; row < n; row++)
    for (int64_t i = 0; i < h; i++)
      rotate_head(q + row * stride + i * e, cos + row * r, sin + row * r, out + (row * h + i) * e, e, r);
}

/* The same of k (n, g, e), each row into its slot, and v into its own; slot -1: nowhere. */
void dlm_write(const float *k, int64_t stride_k, const float *v, int64_t stride_v, const float *cos, const float *sin,
               const int64_t *slots, float *keys, float *values, int64_t n, int64_t g, int64_t e, int64_t r,
               int threads) {
  PARALLEL(n / 64) for (int64_t row = 0; row < n; row++) {
    const float *c = cos + row * r, *s = sin + row * r;
    if (slots[row] < 0) continue;
    for (int64_t i = 0; i < g; i++) rotate_head(k + row * stride_k + i * e, c, s, keys + (slots[row] * g + i) * e, e, r);
    memcpy(values + slots[row] * g * e, v + row * stride_v, g * e * sizeof(float));
  }
}

/* To the nearest bfloat16. */
void dlm_narrow(const float *x, int64_t n, uint16_t *out) {
  for (int64_t i = 0; i < n; i++) out[i] = (uint16_t)bf16(x[i]);
}

/* Rows of x (n, width), `stride` apart, into slots of pages of bfloat16; slot -1: nowhere. */
void dlm_write_halves(const float *x, int64_t stride, const int64_t *slots, uint16_t *pages, int64_t n, int64_t width,
                      int threads) {
  PARALLEL(n / 64) for (int64_t row = 0; row < n; row++)
    if (slots[row] >= 0) dlm_narrow(x + row * stride, width, pages + slots[row] * width);
}

typedef struct {
  float best, second;
  int64_t token;
  int broken;
} Top;

/* The two highest of the candidates x[from:to] and those before them; the lowest index among equals. */
static Top candidates(Top top, const float *x, int64_t from, int64_t to) {
  vec best = all(-INFINITY), second = best, strange = all(0);
  ivec at = (ivec){0};
  int64_t i = from;
  for (; i + W <= to; i += W) {
    vec v = LOAD(x + i);
    ivec higher = v > best;
    second = pick(higher, best, larger(v, second));
    best = pick(higher, v, best);
    at = (higher & ((int32_t)(i - from))) | (~higher & at);
    strange += v - v; /* NaN where v is, or is infinite */
  }
  for (int lane = 0; lane < W; lane++) {
    int64_t token = from + at[lane] + lane;
    if (best[lane] > top.best || (best[lane] == top.best && best[lane] > -INFINITY && token < top.token)) {
      if (top.best > top.second) top.second = top.best;
      top.best = best[lane], top.token = token;
    } else if (best[lane] > top.second) {
      top.second = best[lane];
    }
    if (second[lane] > top.second) top.second = second[lane];
    if (strange[lane] != 0) top.broken = 2; /* to be looked at: -inf is allowed */
  }
  for (; i < to; i++) {
    if (x[i] > top.best) top.second = top.best, top.best = x[i], top.token = i;
    else if (x[i] > top.second) top.second = x[i];
    if (x[i] != x[i] || x[i] == INFINITY) top.broken = 1;
  }
  if (top.broken == 2) {
    top.broken = 0;
    for (i = from; i < to; i++) top.broken |= x[i] != x[i] || x[i] == INFINITY;
  }
  return top;
}

/* Sums of exp(d) and of d exp(d) over x[from:to], d = (x - highest) / temperature; temperature 0 divides by nothing. */
static void masses(const float *x, int64_t from, int64_t to, float highest, float temperature, float *mass, float *moment) {
  vec m = all(0), t = all(0);
  int64_t i = from;
  for (; i < to; i += W) {
    vec d = all(-100.0f); /* of no weight */
    if (i + W <= to) d = LOAD(x + i) - highest;
    else {
      d = all(-INFINITY);
      for (int64_t j = i; j < to; j++) d[j - i] = x[j] - highest;
    }
    if (temperature > 0) d = d / temperature;
    d = pick(d < -100.0f, all(-100.0f), d);
    vec p = vexp(d);
    m += p, t += p * d;
  }
  *mass += sum(m), *moment += sum(t);
}

static inline float share(float x, float highest, float temperature, float mass) {
  float d = x - highest;
  return vexp(all(temperature > 0 ? d / temperature : d))[0] / mass;
}

/* Of logits (n, v): the likeliest token that is not the mask (mask < 0: there is none) and its p, the runner-up's p, the
   entropy; `keep` leaves the mask in the softmax. At a temperature above 0 all p are after it, and `chosen` is drawn with
   each row's seed, sample, step and position, p its own; at 0 none of these is read or written. Returns how many rows are
   unsure. */
int64_t dlm_confidence(const float *logits, int64_t ld, int64_t mask, int keep, float temperature, const int64_t *seed,
                       const int64_t *sample, const int64_t *step, const int64_t *position, int64_t *token, float *first,
                       float *second, float *entropy, uint8_t *finite, int64_t *chosen, float *p, uint8_t *unsure, int64_t n,
                       int64_t v, int threads) {
  PARALLEL(n) for (int64_t row = 0; row < n; row++) {
    const float *x = logits + row * ld;
    Top top = {-INFINITY, -INFINITY, 0, 0};
    top = candidates(top, x, 0, mask < 0 ? v : mask);
    int broken = top.broken;
    if (mask >= 0) {
      top = candidates(top, x, mask + 1, v);
      broken |= top.broken | (x[mask] != x[mask]) | (x[mask] == INFINITY);
    }
    float highest = top.best, mass = 0, moment = 0;
    int with = mask >= 0 && keep;
    if (with && x[mask] > highest) highest = x[mask];
    masses(x, 0, mask < 0 ? v : mask, highest, temperature, &mass, &moment);
    if (mask >= 0) masses(x, mask + 1, v, highest, temperature, &mass, &moment);
    if (with) masses(x, mask, mask + 1, highest, temperature, &mass, &moment);
    token[row] = top.token;
    first[row] = share(top.best, highest, temperature, mass);
    second[row] = top.second > -INFINITY ? share(top.second, highest, temperature, mass) : 0;
    entropy[row] = logf(mass) - moment / mass;
    finite[row] = !broken && top.best > -INFINITY;
    if (temperature > 0) {
      unsure[row] = 0, chosen[row] = top.token;
      const uint32_t address[] = {(uint32_t)seed[row], (uint32_t)sample[row], (uint32_t)step[row], (uint32_t)position[row]};
      if (finite[row]) chosen[row] = dlm_draw(x, v, mask, top.best, top.token, temperature, address, unsure + row);
      p[row] = share(x[chosen[row]], highest, temperature, mass);
    }
  }
  int64_t found = 0;
  for (int64_t row = 0; temperature > 0 && row < n; row++) found += unsure[row];
  return found;
}
