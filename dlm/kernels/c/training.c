/* What a training step computes beside products, and its gradients: norms, gates and rotations in one pass each. */

#include "kernels.h"

#define CHUNK 256 /* rows whose share of a weight's gradient is summed together, whatever the threads */

static inline vec smaller(vec a, vec b) { return pick(a < b, a, b); }
static inline vec sigmoid(vec x) { return 1.0f / (1.0f + vexp(smaller(-x, all(87.0f)))); }

/* out (n, d) = weight * x * scale, and each row's scale = 1 / sqrt(mean of squares + eps). */
void dlm_norm(const float *x, const float *weight, float eps, float *out, float *scales, int64_t n, int64_t d,
              int threads) {
  PARALLEL(n / 64) for (int64_t row = 0; row < n; row++) {
    const float *from = x + row * d;
    float *to = out + row * d, rest = 0;
    vec squares = all(0);
    int64_t i = 0;
    for (; i + W <= d; i += W) squares += LOAD(from + i) * LOAD(from + i);
    for (; i < d; i++) rest += from[i] * from[i];
    const float scale = scales[row] = 1.0f / sqrtf((sum(squares) + rest) / (float)d + eps);
    for (i = 0; i + W <= d; i += W) STORE(to + i, LOAD(weight + i) * (LOAD(from + i) * scale));
    for (; i < d; i++) to[i] = weight[i] * (from[i] * scale);
  }
}

/* From dy, the gradient of out: dx = scale (weight dy - x scale^2 mean(weight dy x)), and dweight (chunks, d), to be summed. */
void dlm_norm_back(const float *x, const float *weight, const float *scales, const float *dy, float *dx, float *dweight,
                   int64_t n, int64_t d, int threads) {
  PARALLEL(n / CHUNK) for (int64_t chunk = 0; chunk < (n + CHUNK - 1) / CHUNK; chunk++) {
    float *share = dweight + chunk * d;
    for (int64_t row = chunk * CHUNK; row < MIN(n, (chunk + 1) * CHUNK); row++) {
      const float *from = x + row * d, *slope = dy + row * d, scale = scales[row];
      float *to = dx + row * d, rest = 0;
      vec dots = all(0);
      int64_t i = 0;
      for (; i + W <= d; i += W) dots += LOAD(weight + i) * LOAD(slope + i) * LOAD(from + i);
      for (; i < d; i++) rest += weight[i] * slope[i] * from[i];
      const float mean = (sum(dots) + rest) / (float)d * scale * scale;
      for (i = 0; i + W <= d; i += W) {
        vec a = LOAD(from + i), b = LOAD(slope + i);
        STORE(to + i, scale * (LOAD(weight + i) * b - a * mean));
        STORE(share + i, LOAD(share + i) + b * a * scale);
      }
      for (; i < d; i++) {
        to[i] = scale * (weight[i] * slope[i] - from[i] * mean);
        share[i] += slope[i] * from[i] * scale;
      }
    }
  }
}

/* out (n,) = silu(gate) * up. */
void dlm_gate(const float *gate, const float *up, float *out, int64_t n, int threads) {
  PARALLEL(n / 65536) for (int64_t i = 0; i < n; i += W) {
    if (i + W <= n) {
      vec g = LOAD(gate + i);
      STORE(out + i, g * sigmoid(g) * LOAD(up + i));
    } else {
      for (int64_t j = i; j < n; j++) out[j] = gate[j] / (1.0f + expf(-gate[j])) * up[j];
    }
  }
}

/* dgate = dy up s (1 + gate (1 - s)) and dup = dy gate s, with s = sigmoid(gate). */
void dlm_gate_back(const float *gate, const float *up, const float *dy, float *dgate, float *dup, int64_t n,
                   int threads) {
  PARALLEL(n / 65536) for (int64_t i = 0; i < n; i += W) {
    if (i + W <= n) {
      vec g = LOAD(gate + i), s = sigmoid(g), slope = LOAD(dy + i) * s;
      STORE(dup + i, slope * g);
      STORE(dgate + i, slope * LOAD(up + i) * (1.0f + g * (1.0f - s)));
    } else {
      for (int64_t j = i; j < n; j++) {
        float s = 1.0f / (1.0f + expf(-gate[j])), slope = dy[j] * s;
        dup[j] = slope * gate[j], dgate[j] = slope * up[j] * (1.0f + gate[j] * (1.0f - s));
      }
    }
  }
}
