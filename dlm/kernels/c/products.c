/* Matrix products: y = x w^T + bias, and the gated feed-forward. */

#include "kernels.h"

#define PANEL (2 * W) /* outputs computed together: their weights, (inputs, PANEL), are what a tile reads */
#define STEP ((HIGH + W - 1) / W * W)
#define DEPTH 512     /* inputs taken at a time: a panel then stays in the second cache */

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

/* out (W, stride) = the transpose of x (W, ld); of fewer rows the last one stands for those that are missing. */
static inline void transpose_square(const float *x, int64_t ld, int64_t rows, float *out, int64_t stride) {
  vec a[W];
  UNROLL for (int i = 0; i < W; i++) a[i] = LOAD(x + MIN(i, rows - 1) * ld);
  transpose(a);
  UNROLL for (int i = 0; i < W; i++) STORE(out + i * stride, a[i]);
}

/* (depth, PANEL) of the first `width` rows of w, zeros in the others. */
static void make_panel(const float *w, int64_t ld, int64_t width, int64_t depth, float *out) {
  int64_t p = 0;
  if (width == PANEL)
    for (; p + W <= depth; p += W) {
      transpose_square(w + p, ld, W, out + p * PANEL, PANEL);
      transpose_square(w + W * ld + p, ld, W, out + p * PANEL + W, PANEL);
    }
  for (; p < depth; p++)
    for (int64_t i = 0; i < PANEL; i++) out[p * PANEL + i] = i < width ? w[i * ld + p] : 0;
}

/* (depth, STEP) of up to HIGH rows of x. */
static void make_tile(const float *x, int64_t ld, int64_t rows, int64_t depth, float *out) {
  int64_t p = 0;
  for (; p + W <= depth; p += W)
    for (int64_t i = 0; i < rows; i += W) transpose_square(x + i * ld + p, ld, MIN(W, rows - i), out + p * STEP + i, STEP);
  for (; p < depth; p++)
    for (int64_t i = 0; i < rows; i++) out[p * STEP + i] = x[i * ld + p];
}

void dlm_panels(const float *w, int64_t ld, int64_t n, int64_t k, float *out, int threads) {
  PARALLEL(n / PANEL) for (int64_t j = 0; j < n; j += PANEL) make_panel(w + j * ld, ld, MIN(PANEL, n - j), k, out + j * k);
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
void dlm_product(const Product *w, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t m, int add, float *room,
                 int threads) {
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
void dlm_gated(const Product *gate, const Product *up, const float *x, int64_t ldx, float *out, int64_t m, float *wide,
               float *room, int threads) {
  if (!m) return;
  int64_t f = gate->n, depth = gate->k;
  if (depth > DEPTH || gate->bias || up->bias) {
    dlm_product(gate, x, ldx, wide, f, m, 0, room, threads);
    dlm_product(up, x, ldx, out, f, m, 0, room, threads);
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

void dlm_linear(const Product *w, const float *x, int64_t ldx, float *y, int64_t m, float *room, int threads) {
  if (m) dlm_product(w, x, ldx, y, w->n, m, 0, room, threads);
}
