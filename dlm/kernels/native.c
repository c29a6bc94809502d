/* The kernels for a CPU, in fp32: what the Triton kernels are on a GPU. reference.py defines what each computes.

   Everything is written in GNU vector extensions, so that gcc and clang make AVX-512, AVX2 or NEON of the same lines.
   A row's result never depends on how many rows are computed with it, nor on the number of threads: every sum runs in
   one order, over the row's own numbers.

   Nothing whose size depends on a shape lies on the stack, since a thread of OpenMP may have little of it: the caller
   hands over memory to work in, called `room`. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define W 16    /* floats in a vector */
#define HIGH 14 /* rows of a product's tile: HIGH * 2 sums live in registers */
#define TALL 8  /* the same, of attention's tiles */
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
typedef vec loose __attribute__((aligned(4), may_alias)); /* anywhere in memory */

#define LOAD(p) (*(const loose *)(p))
#define STORE(p, x) (*(loose *)(p) = (x))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define UNROLL _Pragma("GCC unroll 16")
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
static inline vec larger(vec a, vec b) { return pick(a > b, a, b); }

/* exp to 2 units in the last place for x <= 88: 2^n times Cephes' polynomial of the rest; 0 under -87, where fp32 is
   subnormal; NaN stays. n is rounded by adding 1.5 * 2^23, which leaves no bits for a fraction, and 127 with it, so that
   the sum's last bits are the exponent of 2^n. */
static inline vec vexp(vec x) {
  const vec low = all(-87.0f);
  vec y = pick(x < low, low, x), t = y * 1.44269504f + 12583039.0f, n = t - 12583039.0f;
  vec r = y - n * 0.693359375f + n * 2.12194440e-4f;
  vec p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return (vec)((ivec)(p * (vec)((ivec)t << 23)) & ~(x < low));
}

static inline float sum(vec x) {
  float total = 0;
  for (int i = 0; i < W; i++) total += x[i];
  return total;
}

/* ---- matrix products ------------------------------------------------------------------------------------------- */

#define PANEL (2 * W) /* outputs computed together: their weights, (inputs, PANEL), are what a tile reads */
#define STEP ((HIGH + W - 1) / W * W)
#define DEPTH 512     /* inputs taken at a time: a panel then stays in the second cache */

typedef struct { /* y = x w^T + bias */
  const float *w;      /* (n, ld) */
  const float *panels; /* the same as (n / PANEL, k, PANEL), filled up with zeros; 0: made on the way, for more time */
  const float *bias;
  int64_t n, k, ld;
} Product;

#define OWN (2 * DEPTH * PANEL) /* floats that each thread of a product needs: two panels made on the way */

int64_t dlm_panel(void) { return PANEL; }

/* Floats of room for products of m rows: each thread's own, then the tiles of x, which all threads read. */
int64_t dlm_room(int64_t m, int threads) { return threads * OWN + (m + HIGH - 1) / HIGH * STEP * DEPTH; }

/* R rows times a panel. `a` is (depth, STEP); what is read next is fetched meanwhile, PANEL pieces of `ld`. */
#define TILE(R)                                                                                                        \
  static void tile##R(const float *a, const float *panel, int64_t depth, const float *next, int64_t inner,             \
                      int64_t outer, float *y, int64_t ldy, int add) {                                                 \
    vec s[R][2];                                                                                                       \
    UNROLL for (int i = 0; i < R; i++) s[i][0] = s[i][1] = all(0);                                                     \
    _Pragma("GCC unroll 2") for (int64_t p = 0; p < depth; p++, a += STEP, panel += PANEL) {                           \
      vec left = LOAD(panel), right = LOAD(panel + W);                                                                 \
      if (next) {                                                                                                      \
        const float *line = next + p % PANEL * inner + p / PANEL * outer;                                              \
        __builtin_prefetch(line, 0, 2);                                                                                \
        __builtin_prefetch(line + W, 0, 2);                                                                            \
      }                                                                                                                \
      UNROLL for (int i = 0; i < R; i++) {                                                                             \
        vec x = all(a[i]);                                                                                             \
        s[i][0] += x * left;                                                                                           \
        s[i][1] += x * right;                                                                                          \
      }                                                                                                                \
    }                                                                                                                  \
    UNROLL for (int i = 0; i < R; i++) {                                                                               \
      if (add) s[i][0] += LOAD(y + i * ldy), s[i][1] += LOAD(y + i * ldy + W);                                         \
      STORE(y + i * ldy, s[i][0]), STORE(y + i * ldy + W, s[i][1]);                                                    \
    }                                                                                                                  \
  }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if HIGH > 6
TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14)
#endif
typedef void (*Tile)(const float *, const float *, int64_t, const float *, int64_t, int64_t, float *, int64_t, int);
static const Tile tiles[] = {0, tile1, tile2, tile3, tile4, tile5, tile6,
#if HIGH > 6
                             tile7, tile8, tile9, tile10, tile11, tile12, tile13, tile14
#endif
};

/* A square of W rows is turned by interleaving its halves log2(W) times. */
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

static inline void turn_vectors(vec a[W]) {
  vec b[W];
  UNROLL for (int round = 0; round < ROUNDS; round++) {
    UNROLL for (int i = 0; i < W / 2; i++) b[2 * i] = LOWER(a[i], a[i + W / 2]), b[2 * i + 1] = UPPER(a[i], a[i + W / 2]);
    UNROLL for (int i = 0; i < W; i++) a[i] = b[i];
  }
}

/* out (W, stride) = the transpose of x (W, ld); of fewer rows the last one stands for those that are missing. */
static inline void turn_square(const float *x, int64_t ld, int64_t rows, float *out, int64_t stride) {
  vec a[W];
  UNROLL for (int i = 0; i < W; i++) a[i] = LOAD(x + MIN(i, rows - 1) * ld);
  turn_vectors(a);
  UNROLL for (int i = 0; i < W; i++) STORE(out + i * stride, a[i]);
}

/* (depth, PANEL) of the first `width` rows of w, zeros in the others. */
static void make_panel(const float *w, int64_t ld, int64_t width, int64_t depth, float *out) {
  int64_t p = 0;
  if (width == PANEL)
    for (; p + W <= depth; p += W) {
      turn_square(w + p, ld, W, out + p * PANEL, PANEL);
      turn_square(w + W * ld + p, ld, W, out + p * PANEL + W, PANEL);
    }
  for (; p < depth; p++)
    for (int64_t i = 0; i < PANEL; i++) out[p * PANEL + i] = i < width ? w[i * ld + p] : 0;
}

/* (depth, STEP) of up to HIGH rows of x. */
static void make_tile(const float *x, int64_t ld, int64_t rows, int64_t depth, float *out) {
  int64_t p = 0;
  for (; p + W <= depth; p += W)
    for (int64_t i = 0; i < rows; i += W) turn_square(x + i * ld + p, ld, MIN(W, rows - i), out + p * STEP + i, STEP);
  for (; p < depth; p++)
    for (int64_t i = 0; i < rows; i++) out[p * STEP + i] = x[i * ld + p];
}

void dlm_panels(const float *w, int64_t ld, int64_t n, int64_t k, float *out, int threads) {
  PARALLEL(n / PANEL) for (int64_t j = 0; j < n; j += PANEL) make_panel(w + j * ld, ld, MIN(PANEL, n - j), k, out + j * k);
}

/* Of the weight's bits, to see whether it is still what its panels were made of. */
uint64_t dlm_checksum(const uint32_t *w, int64_t ld, int64_t n, int64_t k) {
  uint64_t total = 0;
  for (int64_t i = 0; i < n; i++) {
    uint64_t row = 0;
    for (int64_t p = 0; p < k; p++) row += w[i * ld + p];
    total = total * 31 + row;
  }
  return total;
}

/* out = silu(gate) * up; it may be either. */
static inline void swiglu(const float *gate, const float *up, float *out, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    vec g = LOAD(gate + i);
    STORE(out + i, g / (1.0f + vexp(pick(g < -88.0f, all(88.0f), -g))) * LOAD(up + i));
  }
  for (; i < n; i++) out[i] = gate[i] / (1.0f + vexp(all(gate[i] < -88 ? 88 : -gate[i]))[0]) * up[i];
}

/* Rows in tiles of much the same height. */
typedef struct {
  int64_t count, rows, more;
} Tiling;

static Tiling tiling(int64_t m) {
  int64_t count = (m + HIGH - 1) / HIGH;
  return (Tiling){count, m / count, m % count};
}

static void make_tiles(Tiling t, const float *x, int64_t ldx, int64_t depth, float *room) {
  for (int64_t i = 0, at = 0; i < t.count; i++) {
    int64_t rows = t.rows + (i < t.more);
    make_tile(x + at * ldx, ldx, rows, depth, room + i * STEP * DEPTH);
    at += rows;
  }
}

/* A panel of a weight, and where the one after it is. */
typedef struct {
  const float *here, *next;
  int64_t inner, outer, width;
} Panel;

/* The panel of outputs j and on, of inputs `from` and on; where there is no copy it is made in `made`. */
static Panel panel_of(const Product *w, int64_t j, int64_t from, int64_t depth, float *made) {
  int64_t width = MIN(PANEL, w->n - j);
  if (w->panels) {
    const float *here = w->panels + j * w->k + from * PANEL;
    return (Panel){here, here + w->k * PANEL, PANEL, PANEL * PANEL, width};
  }
  make_panel(w->w + j * w->ld + from, w->ld, width, depth, made);
  return (Panel){made, w->w + (j + PANEL) * w->ld + from, w->ld, PANEL, width};
}

/* y (m, n) = x (m, k) w^T + bias, or that added to y. A number's sum runs over the inputs in order, in pieces of DEPTH,
   however many rows there are. `room` holds dlm_room(m, threads) floats. */
static void product(const Product *w, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t m, int add,
                    float *room, int threads) {
  Tiling t = tiling(m);
  float *tiles_of_x = room + threads * OWN;
  int64_t pieces = (w->k + DEPTH - 1) / DEPTH, most = (w->k + pieces * W - 1) / (pieces * W) * W;
  for (int64_t from = 0; from < w->k; from += most) {
    int64_t depth = MIN(most, w->k - from);
    int adding = add || from, last = from + most >= w->k;
    make_tiles(t, x + from, ldx, depth, tiles_of_x);
    PARALLEL(w->n / PANEL) for (int64_t j = 0; j < w->n; j += PANEL) {
      float edge[HIGH * PANEL];
      Panel p = panel_of(w, j, from, depth, room + THREAD * OWN);
      for (int64_t i = 0, at = 0; i < t.count; i++) {
        int64_t r = t.rows + (i < t.more);
        const float *a = tiles_of_x + i * STEP * DEPTH, *ahead = i == t.count - 1 && j + PANEL < w->n ? p.next : 0;
        float *to = y + at * ldy + j;
        if (p.width == PANEL) {
          tiles[r](a, p.here, depth, ahead, p.inner, p.outer, to, ldy, adding);
        } else {
          tiles[r](a, p.here, depth, ahead, p.inner, p.outer, edge, PANEL, 0);
          for (int64_t e = 0; e < r; e++)
            for (int64_t c = 0; c < p.width; c++) to[e * ldy + c] = edge[e * PANEL + c] + (adding ? to[e * ldy + c] : 0);
        }
        if (w->bias && last)
          for (int64_t e = 0; e < r; e++)
            for (int64_t c = 0; c < p.width; c++) to[e * ldy + c] += w->bias[j + c];
        at += r;
      }
    }
  }
}

/* out (m, f) = silu(x gate^T) * (x up^T), panel by panel of both: neither is ever whole. `wide` is (m, f), for when the
   inputs are too many for that. */
static void gated(const Product *gate, const Product *up, const float *x, int64_t ldx, float *out, int64_t m,
                  float *wide, float *room, int threads) {
  int64_t f = gate->n, depth = gate->k;
  if (depth > DEPTH || gate->bias || up->bias) {
    product(gate, x, ldx, wide, f, m, 0, room, threads);
    product(up, x, ldx, out, f, m, 0, room, threads);
    PARALLEL(m / 64) for (int64_t i = 0; i < m; i++) swiglu(wide + i * f, out + i * f, out + i * f, f);
    return;
  }
  Tiling t = tiling(m);
  float *tiles_of_x = room + threads * OWN;
  make_tiles(t, x, ldx, depth, tiles_of_x);
  PARALLEL(f / PANEL) for (int64_t j = 0; j < f; j += PANEL) {
    float *made = room + THREAD * OWN, g[HIGH * PANEL], u[HIGH * PANEL];
    Panel p = panel_of(gate, j, 0, depth, made), q = panel_of(up, j, 0, depth, made + DEPTH * PANEL);
    for (int64_t i = 0, at = 0; i < t.count; i++) {
      int64_t r = t.rows + (i < t.more), ahead = i == t.count - 1 && j + PANEL < f;
      const float *a = tiles_of_x + i * STEP * DEPTH;
      tiles[r](a, p.here, depth, ahead ? p.next : 0, p.inner, p.outer, g, PANEL, 0);
      tiles[r](a, q.here, depth, ahead ? q.next : 0, q.inner, q.outer, u, PANEL, 0);
      for (int64_t e = 0; e < r; e++) swiglu(g + e * PANEL, u + e * PANEL, out + (at + e) * f + j, p.width);
      at += r;
    }
  }
}

void dlm_gated(const Product *gate, const Product *up, const float *x, int64_t ldx, float *out, int64_t m, float *wide,
               float *room, int threads) {
  if (m) gated(gate, up, x, ldx, out, m, wide, room, threads);
}

void dlm_linear(const Product *w, const float *x, int64_t ldx, float *y, int64_t m, float *room, int threads) {
  if (m) product(w, x, ldx, y, w->n, m, 0, room, threads);
}

/* ---- row by row ------------------------------------------------------------------------------------------------ */

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

static void turn(const float *x, const float *cos, const float *sin, float *restrict out, int64_t e, int64_t r) {
  int64_t half = r / 2;
  for (int64_t i = 0; i < half; i++) out[i] = x[i] * cos[i] - x[i + half] * sin[i];
  for (int64_t i = half; i < r; i++) out[i] = x[i] * cos[i] + x[i - half] * sin[i];
  if (r < e) memcpy(out + r, x + r, (e - r) * sizeof(float));
}

/* out (w, h, e) = q (w, h, e), the first r channels rotated as those of the given rows are; r = 0 turns nothing. */
static void rotate(const float *q, int64_t stride, const float *cos, const float *sin, const int64_t *rows, float *out,
                   int64_t w, int64_t h, int64_t e, int64_t r, int threads) {
  PARALLEL(w / 64) for (int64_t i = 0; i < w; i++)
    for (int64_t j = 0; j < h; j++)
      turn(q + i * stride + j * e, cos + rows[i] * r, sin + rows[i] * r, out + (i * h + j) * e, e, r);
}

/* The same of k (n, g, e), each row into its slot, and v into its own. */
static void write(const float *k, int64_t stride_k, const float *v, int64_t stride_v, const float *cos, const float *sin,
                  const int64_t *slots, float *keys, float *values, int64_t n, int64_t g, int64_t e, int64_t r,
                  int threads) {
  PARALLEL(n / 64) for (int64_t row = 0; row < n; row++) {
    const float *c = cos + row * r, *s = sin + row * r;
    if (slots[row] < 0) continue;
    for (int64_t i = 0; i < g; i++) turn(k + row * stride_k + i * e, c, s, keys + (slots[row] * g + i) * e, e, r);
    memcpy(values + slots[row] * g * e, v + row * stride_v, g * e * sizeof(float));
  }
}

void dlm_rope_write(const float *q, int64_t stride_q, const float *k, int64_t stride_k, const float *v,
                    int64_t stride_v, const float *cos, const float *sin, const int64_t *slots, const int64_t *all_rows,
                    float *out, float *keys, float *values, int64_t n, int64_t h, int64_t g, int64_t e, int64_t r,
                    int threads) {
  rotate(q, stride_q, cos, sin, all_rows, out, n, h, e, r, threads);
  write(k, stride_k, v, stride_v, cos, sin, slots, keys, values, n, g, e, r, threads);
}

/* ---- attention ------------------------------------------------------------------------------------------------- */

#define KEYS 64 /* looked at together: their scores and values stay in the first cache */

/* Query rows are the lanes of vectors, so keys are read where they lie, number by number: nothing of them is transposed,
   and the softmax runs down the lanes. (R, V): so many keys or channels at a time, for V vectors of rows. */
#define LOOK(R, V)                                                                                                     \
  static void score##R##_##V(const float *const *keys, int64_t ahead, const float *q, int64_t e, float *out) {         \
    vec s[R][V];                                                                                                       \
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < V; j++) s[i][j] = all(0);                            \
    _Pragma("GCC unroll 4") for (int64_t p = 0; p < e; p++) {                                                          \
      vec b[V];                                                                                                        \
      if (p % 16 == 0)                                                                                                 \
        UNROLL for (int i = 0; i < R; i++) __builtin_prefetch(keys[i] + ahead + p), __builtin_prefetch(keys[i + R] + p); \
      UNROLL for (int j = 0; j < V; j++) b[j] = LOAD(q + (p * V + j) * W);                                             \
      UNROLL for (int i = 0; i < R; i++) {                                                                             \
        vec x = all(keys[i][p]);                                                                                       \
        UNROLL for (int j = 0; j < V; j++) s[i][j] += x * b[j];                                                        \
      }                                                                                                                \
    }                                                                                                                  \
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < V; j++) STORE(out + (i * V + j) * W, s[i][j]);       \
  }                                                                                                                    \
  static void blend##R##_##V(const float *v, int64_t e, const float *p, int64_t count, float *out) {                   \
    vec s[R][V];                                                                                                       \
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < V; j++) s[i][j] = LOAD(out + (i * V + j) * W);       \
    _Pragma("GCC unroll 2") for (int64_t k = 0; k < count; k++) {                                                      \
      vec b[V];                                                                                                        \
      UNROLL for (int j = 0; j < V; j++) b[j] = LOAD(p + (k * V + j) * W);                                             \
      UNROLL for (int i = 0; i < R; i++) {                                                                             \
        vec x = all(v[k * e + i]);                                                                                     \
        UNROLL for (int j = 0; j < V; j++) s[i][j] += x * b[j];                                                        \
      }                                                                                                                \
    }                                                                                                                  \
    UNROLL for (int i = 0; i < R; i++) UNROLL for (int j = 0; j < V; j++) STORE(out + (i * V + j) * W, s[i][j]);       \
  }
LOOK(1, 1) LOOK(1, 2)
#if TALL == 8
LOOK(8, 1) LOOK(8, 2)
#define SCORE(V) score8_##V
#define BLEND(V) blend8_##V
#else
LOOK(4, 1) LOOK(4, 2)
#define SCORE(V) score4_##V
#define BLEND(V) blend4_##V
#endif

/* V * W query rows of one key head over some of the keys, `count` of them from number `from` on; lane i sees those under
   until[i]. q and o are (e, lanes); o, best and total (of the softmax) go on from the keys before. The first piece of
   the rows copies the values, `ahead` of the keys, side by side: apart by a power of two they would share a few lines of
   the cache. */
#define ATTEND(V)                                                                                                      \
  static void attend##V(const float *q, const ivec *until, int64_t least, vec *best, vec *total,                       \
                        const float *const *keys, int64_t ahead, float *values, int first, int64_t from,               \
                        int64_t count, int64_t e, float *o) {                                                          \
    float s[KEYS * V * W] __attribute__((aligned(64)));                                                                \
    int64_t i = 0, c = 0;                                                                                              \
    for (; i + TALL <= count; i += TALL) SCORE(V)(keys + i, ahead, q, e, s + i * V * W);                               \
    for (; i < count; i++) score1_##V(keys + i, ahead, q, e, s + i * V * W);                                           \
    for (int j = 0; j < V; j++) {                                                                                      \
      vec top = best[j], mass = all(0);                                                                                \
      for (int64_t k = 0; k < count; k++) {                                                                            \
        vec x = LOAD(s + (k * V + j) * W);                                                                             \
        if (from + k >= least) {                                                                                       \
          x = pick(until[j] > (int32_t)(from + k), x, all(-INFINITY));                                                 \
          STORE(s + (k * V + j) * W, x);                                                                               \
        }                                                                                                              \
        top = larger(x, top);                                                                                          \
      }                                                                                                                \
      vec shrink = vexp(best[j] - top);                                                                                \
      for (int64_t k = 0; k < count; k++) {                                                                            \
        vec p = vexp(LOAD(s + (k * V + j) * W) - top);                                                                 \
        STORE(s + (k * V + j) * W, p);                                                                                 \
        mass += p;                                                                                                     \
      }                                                                                                                \
      total[j] = total[j] * shrink + mass;                                                                             \
      best[j] = top;                                                                                                   \
      if (from) for (int64_t c = 0; c < e; c++) STORE(o + (c * V + j) * W, LOAD(o + (c * V + j) * W) * shrink);        \
    }                                                                                                                  \
    for (int64_t k = 0; first && k < count; k++) memcpy(values + k * e, keys[k] + ahead, e * sizeof(float));           \
    for (; c + TALL <= e; c += TALL) BLEND(V)(values + c, e, s, count, o + c * V * W);                                 \
    for (; c < e; c++) blend1_##V(values + c, e, s, count, o + c * V * W);                                             \
  }
ATTEND(1) ATTEND(2)

/* here (e, wide), the lanes from `lane` on = W query rows, each times scale. */
static void take_lanes(const float *const *rows, float scale, int64_t e, float *here, int64_t wide, int64_t lane) {
  int64_t c = 0;
  for (; c + W <= e; c += W) {
    vec a[W];
    UNROLL for (int i = 0; i < W; i++) a[i] = LOAD(rows[i] + c) * scale;
    turn_vectors(a);
    UNROLL for (int i = 0; i < W; i++) STORE(here + (c + i) * wide + lane, a[i]);
  }
  for (; c < e; c++)
    for (int i = 0; i < W; i++) here[c * wide + lane + i] = rows[i][c] * scale;
}

/* The way back, of `count` lanes, each over its mass. */
static void give_lanes(const float *found, int64_t wide, int64_t lane, vec mass, int64_t e, float *const *rows,
                       int64_t count) {
  vec over = pick(mass == 0.0f, all(0), 1.0f / mass);
  int64_t c = 0;
  for (; c + W <= e; c += W) {
    vec a[W];
    UNROLL for (int i = 0; i < W; i++) a[i] = LOAD(found + (c + i) * wide + lane) * over;
    turn_vectors(a);
    for (int64_t i = 0; i < count; i++) STORE(rows[i] + c, a[i]);
  }
  for (; c < e; c++)
    for (int64_t i = 0; i < count; i++) rows[i][c] = found[c * wide + lane + i] * over[i];
}

#define LANES (2 * W)
#define PIECES 8 /* of so many lanes that one task takes: keys and values are then fetched once for all of them */
#define TASK(e) ((2 * PIECES * LANES + KEYS) * (e)) /* floats that a thread works in */
#define BOUNDS(spans) (((spans) + 8) / 8 * 8)       /* 64-bit numbers, one more than there are spans */

/* Floats of room for attention: two lists of bounds, then each thread's own. */
int64_t dlm_attention_room(int64_t spans, int64_t e, int threads) { return 4 * BOUNDS(spans) + threads * TASK(e); }

/* One task: rows (own of them, LANES at a time) of one key head, `group` query heads each, over all they see. `room`
   holds TASK(e) floats. */
static void attend(const float *q, int64_t stride_q, const float *k_pages, const float *v_pages, const int32_t *table,
                   const int32_t *positions, int32_t visible, int32_t sight, const int64_t *rows,
                   const int64_t *places, int64_t first,
                   int64_t own, int64_t group, int64_t e, int64_t size, int64_t step, float scale, float *out,
                   int64_t stride_out, float *room) {
  float *turned = room, *found = turned + PIECES * LANES * e, *values = found + PIECES * LANES * e;
  const float *keys[KEYS + TALL]; /* and those of the block after it, which are fetched early */
  vec best[PIECES][2], total[PIECES][2];
  ivec until[PIECES][2];
  int64_t least[PIECES], most[PIECES], all_most = 0, page = 0, place = 0;
  for (int64_t piece = 0; piece * LANES < own; piece++) {
    int64_t lanes = MIN(LANES, own - piece * LANES), wide = lanes > W ? LANES : W;
    const float *from[LANES];
    memset(found + piece * LANES * e, 0, wide * e * sizeof(float));
    least[piece] = INT32_MAX, most[piece] = 0;
    for (int j = 0; j < 2; j++) best[piece][j] = all(-1e30f), total[piece][j] = all(0);
    for (int64_t i = 0; i < wide; i++) {
      int64_t at = first + piece * LANES + MIN(i, lanes - 1), row = rows[at / group];
      from[i] = q + places[at / group] * stride_q + at % group * e;
      int32_t limit = sight > 0 ? MIN(visible, (positions[row] / sight + 1) * sight) : visible;
      until[piece][i / W][i % W] = limit;
      least[piece] = MIN(least[piece], limit), most[piece] = limit > most[piece] ? limit : most[piece];
    } /* lanes without a row do as the last one does: nobody reads them */
    for (int64_t i = 0; i < wide; i += W) take_lanes(from + i, scale, e, turned + piece * LANES * e, wide, i);
    if (most[piece] > all_most) all_most = most[piece];
  }
  for (int64_t from = 0; from < all_most; from += KEYS) {
    int first_piece = 1;
    for (int64_t k = from ? TALL : 0; k < KEYS + TALL; k++) {
      if (from + k < all_most) {
        keys[k] = k_pages + (table[page] * size + place) * step;
        if (++place == size) place = 0, page++;
      } else keys[k] = keys[k - 1];
    }
    for (int64_t piece = 0; piece * LANES < own; piece++) {
      if (from >= most[piece]) continue;
      (own - piece * LANES > W ? attend2 : attend1)(
          turned + piece * LANES * e, until[piece], least[piece], best[piece], total[piece], keys, v_pages - k_pages,
          values, first_piece, from, MIN(KEYS, all_most - from), e, found + piece * LANES * e);
      first_piece = 0;
    }
    memcpy(keys, keys + KEYS, sizeof(float *) * TALL);
  }
  for (int64_t i = 0; i < own; i += W) {
    int64_t piece = i / LANES, wide = own - piece * LANES > W ? LANES : W, count = MIN(W, own - i);
    float *to[W];
    for (int64_t lane = 0; lane < count; lane++) to[lane] = out + (first + i + lane) / group * stride_out + (first + i + lane) % group * e;
    give_lanes(found + piece * LANES * e, wide, i % LANES, total[piece][i % LANES / W], e, to, count);
  }
}

/* out (w, h, e): of the packed rows those in `rows`, (w,) ascending, which are in q at `places`, (w,). Spans and pages
   as in spans.py. `room` holds dlm_attention_room(spans, e, threads) floats. */
void dlm_paged_attention(const float *q, int64_t stride_q, const float *k_pages, const float *v_pages,
                         const int32_t *starts, const int32_t *positions, const int32_t *visible, const int32_t *tables,
                         int64_t table_width, const int32_t *sights, const int64_t *rows, const int64_t *places,
                         float *out, float *room, int64_t spans,
                         int64_t w, int64_t h, int64_t g, int64_t e, int64_t size, float scale, int threads) {
  int64_t group = h / g, at = 0;
  int64_t *begin = (int64_t *)room, *task_of = begin + BOUNDS(spans); /* first of each span's rows, and of its tasks */
  float *own = room + 4 * BOUNDS(spans);
  begin[0] = task_of[0] = 0;
  for (int64_t i = 0; i < spans; i++) {
    while (at < w && rows[at] < starts[i + 1]) at++;
    begin[i + 1] = at;
    task_of[i + 1] = task_of[i] + g * (((at - begin[i]) * group + PIECES * LANES - 1) / (PIECES * LANES));
  }
  PARALLEL(task_of[spans]) for (int64_t task = 0; task < task_of[spans]; task++) {
    int64_t span = 0;
    while (task_of[span + 1] <= task) span++;
    int64_t lanes = (begin[span + 1] - begin[span]) * group, parts = (task_of[span + 1] - task_of[span]) / g;
    int64_t head = (task - task_of[span]) / parts, first = (task - task_of[span]) % parts * PIECES * LANES;
    attend(q + head * group * e, stride_q, k_pages + head * e, v_pages + head * e, tables + span * table_width,
           positions, visible[span], sights[span], rows + begin[span], places + begin[span], first, MIN(PIECES * LANES, lanes - first), group,
           e, size, g * e, scale, out + (begin[span] * h + head * group) * e, h * e, own + THREAD * TASK(e));
  }
}

/* ---- a network's layers ---------------------------------------------------------------------------------------- */

typedef struct {
  const float *attn_norm, *q_norm, *k_norm, *mlp_norm;
  Product qkv[3], o, gate, up, down; /* qkv: what lies side by side is one, and those after it have n = 0 */
  int64_t apart;                     /* whether the first of qkv is the queries' alone */
} Layer;

typedef struct { /* what all layers share */
  int64_t layers, d, h, g, e, f, r;
  float eps;
  int32_t threads;
} Network;

typedef struct { /* what stays as long as the same spans are run */
  int64_t n, spans, page_size, table_width, layer_stride;
  const float *cos, *sin;
  const int64_t *slots, *all_rows; /* all_rows: 0 ... n - 1 */
  const int32_t *starts, *positions, *visible, *tables, *sights;
  float *keys, *values, *room;
  float *first;   /* the first layer's projections of tokens, (v, (h + 2 g) e): they depend on the token alone */
  uint8_t *known; /* (v,): of which tokens; first and known may be 0 */
} Run;

/* qkv (n, width) of the first layer, of n ids: computed for tokens that are new, and kept. normed and few are (n, d),
   fresh (n,). */
static void first_projections(const Network *net, const Layer *layer, const Run *run, const float *table,
                              const int64_t *ids, int64_t *fresh, float *few, float *normed, float *qkv) {
  int64_t n = run->n, d = net->d, width = (net->h + 2 * net->g) * net->e, m = 0;
  for (int64_t i = 0; i < n; i++)
    if (!run->known[ids[i]]) {
      run->known[ids[i]] = 1;
      memcpy(few + m * d, table + ids[i] * d, d * sizeof(float));
      fresh[m++] = ids[i];
    }
  if (m) dlm_rms_norm(few, d, d, 0, layer->attn_norm, net->eps, normed, 0, m, 1, d, net->threads);
  for (int64_t i = 0, at = 0; m && i < 3 && layer->qkv[i].n; at += layer->qkv[i++].n)
    product(layer->qkv + i, normed, d, qkv + at, width, m, 0, run->room, net->threads);
  for (int64_t i = 0; i < m; i++) memcpy(run->first + fresh[i] * width, qkv + i * width, width * sizeof(float));
  for (int64_t i = 0; i < n; i++) memcpy(qkv + i * width, run->first + ids[i] * width, width * sizeof(float));
}

/* Floats of room for dlm_layers with n rows in so many spans. */
int64_t dlm_layers_room(const Network *net, int64_t n, int64_t spans) {
  int64_t shared = dlm_room(n, net->threads) + dlm_attention_room(spans, net->e, net->threads) + 2 * n;
  return shared + n * (3 * net->d + (3 * net->h + 2 * net->g) * net->e + 2 * net->f);
}

/* Final hidden states (w, d) of the wanted rows, after the last norm, from the rows of a table (v, d) that n ids name;
   returns the place of an id that is not in it, or -1. run->room holds dlm_layers_room(net, n, spans) floats. */
int64_t dlm_layers(const Network *net, const Layer *layers, const Run *run, const float *last_norm, const float *table,
                   int64_t v, const int64_t *ids, const int64_t *wanted, int64_t w, float *out) {
  int64_t n = run->n, d = net->d, h = net->h, g = net->g, e = net->e, f = net->f, width = (h + 2 * g) * e;
  int threads = net->threads;
  float *room = run->room, *attention = room + dlm_room(n, threads);
  int64_t *fresh = (int64_t *)(attention + dlm_attention_room(run->spans, e, threads));
  float *normed = (float *)(fresh + n), *qkv = normed + n * d, *turned = qkv + n * width;
  float *seen = turned + n * h * e, *wide = seen + n * h * e, *act = wide + n * f, *few = act + n * f;
  float *x = few + n * d;
  for (int64_t i = 0; i < n; i++) {
    if (ids[i] < 0 || ids[i] >= v) return i;
    memcpy(x + i * d, table + ids[i] * d, d * sizeof(float));
  }
  for (int64_t number = 0; number < net->layers; number++) {
    const Layer *layer = layers + number;
    float *keys = run->keys + number * run->layer_stride, *values = run->values + number * run->layer_stride;
    int last = number == net->layers - 1, apart = last && number > 0 && layer->apart;
    const int64_t *asked = last ? wanted : run->all_rows, *places = apart ? run->all_rows : asked;
    if (number == 0 && run->first) {
      first_projections(net, layer, run, table, ids, fresh, few, normed, qkv);
    } else if (apart) { /* queries only of the wanted rows */
      dlm_rms_norm(x, d, d, 0, layer->attn_norm, net->eps, normed, 0, n, 1, d, threads);
      for (int64_t i = 1, at = h * e; i < 3 && layer->qkv[i].n; at += layer->qkv[i++].n)
        product(layer->qkv + i, normed, d, qkv + at, width, n, 0, room, threads);
      for (int64_t i = 0; i < w; i++) memcpy(few + i * d, normed + wanted[i] * d, d * sizeof(float));
      product(layer->qkv, few, d, qkv, width, w, 0, room, threads);
    } else {
      dlm_rms_norm(x, d, d, 0, layer->attn_norm, net->eps, normed, 0, n, 1, d, threads);
      for (int64_t i = 0, at = 0; i < 3 && layer->qkv[i].n; at += layer->qkv[i++].n)
        product(layer->qkv + i, normed, d, qkv + at, width, n, 0, room, threads);
    }
    int64_t queries = apart ? w : n;
    if (layer->q_norm) {
      dlm_rms_norm(qkv, width, e, 0, layer->q_norm, net->eps, turned, 0, queries, h, e, threads);
      for (int64_t i = 0; i < queries; i++) memcpy(qkv + i * width, turned + i * h * e, h * e * sizeof(float));
      dlm_rms_norm(qkv + h * e, width, e, 0, layer->k_norm, net->eps, turned, 0, n, g, e, threads);
      for (int64_t i = 0; i < n; i++) memcpy(qkv + i * width + h * e, turned + i * g * e, g * e * sizeof(float));
    }
    rotate(qkv, width, run->cos, run->sin, apart ? wanted : run->all_rows, turned, queries, h, e, net->r, threads);
    write(qkv + h * e, width, qkv + (h + g) * e, width, run->cos, run->sin, run->slots, keys, values, n, g, e, net->r,
          threads);
    if (last) { /* from here on only the wanted rows */
      for (int64_t i = 0; i < w; i++) memcpy(few + i * d, x + wanted[i] * d, d * sizeof(float));
      x = few, n = w;
    }
    dlm_paged_attention(turned, h * e, keys, values, run->starts, run->positions, run->visible, run->tables,
                        run->table_width, run->sights, asked, places, seen, attention, run->spans, n, h, g, e,
                        run->page_size, 1.0f / sqrtf((float)e), threads);
    product(&layer->o, seen, h * e, x, d, n, 1, room, threads);
    dlm_rms_norm(x, d, d, 0, layer->mlp_norm, net->eps, normed, 0, n, 1, d, threads);
    gated(&layer->gate, &layer->up, normed, d, act, n, wide, room, threads);
    product(&layer->down, act, f, x, d, n, 1, room, threads);
  }
  dlm_rms_norm(x, d, d, 0, last_norm, net->eps, out, 0, n, 1, d, threads);
  return -1;
}

/* ---- decisions -------------------------------------------------------------------------------------------------- */

/* taken (b, l): of the masked places of each row the `count` with the highest score; of equals the first. */
void dlm_first(const float *score, const uint8_t *masked, const int64_t *count, uint8_t *taken, int64_t b, int64_t l) {
  for (int64_t row = 0; row < b; row++, score += l, masked += l, taken += l)
    for (int64_t i = 0; i < l; i++) {
      int64_t better = 0;
      for (int64_t j = 0; j < l; j++) better += masked[j] & ((score[j] > score[i]) | ((score[j] == score[i]) & (j < i)));
      taken[i] = masked[i] && better < count[row];
    }
}

/* ---- confidence ------------------------------------------------------------------------------------------------ */

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

/* Sums of exp(x - highest) and of that times (x - highest) over x[from:to]. */
static void masses(const float *x, int64_t from, int64_t to, float highest, float *mass, float *moment) {
  vec m = all(0), t = all(0);
  int64_t i = from;
  for (; i < to; i += W) {
    vec d = all(-100.0f); /* of no weight */
    if (i + W <= to) d = LOAD(x + i) - highest;
    else for (int64_t j = i; j < to; j++) d[j - i] = x[j] - highest;
    d = pick(d < -100.0f, all(-100.0f), d);
    vec p = vexp(d);
    m += p, t += p * d;
  }
  *mass += sum(m), *moment += sum(t);
}

/* Of logits (n, v): the likeliest token that is not the mask (mask < 0: there is none), its p and the runner-up's, the
   entropy; `keep` leaves the mask in the softmax. */
void dlm_confidence(const float *logits, int64_t ld, int64_t mask, int keep, int64_t *token, float *first,
                    float *second, float *entropy, uint8_t *finite, int64_t n, int64_t v, int threads) {
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
    masses(x, 0, mask < 0 ? v : mask, highest, &mass, &moment);
    if (mask >= 0) masses(x, mask + 1, v, highest, &mass, &moment);
    if (with) masses(x, mask, mask + 1, highest, &mass, &moment);
    token[row] = top.token;
    first[row] = vexp(all(top.best - highest))[0] / mass;
    second[row] = top.second > -INFINITY ? vexp(all(top.second - highest))[0] / mass : 0;
    entropy[row] = logf(mass) - moment / mass;
    finite[row] = !broken && top.best > -INFINITY;
  }
}
