/* Matrix products: y = x w^T + bias, and the gated feed-forward. */

#include "products.h"

#define OWN (2 * DEPTH * PANEL) /* floats that each thread of a product needs: two panels made on the way */

int64_t dlm_panel(void) { return PANEL; }

/* Floats of room for products of m rows: each thread's own, then the tiles of x, which all threads read. */
int64_t dlm_room(int64_t m, int threads) { return threads * OWN + (m + HIGH - 1) / HIGH * TILE_WORDS; }

#define PLAIN(s, x, w) s += x * w

#define NAME(R) floats##R
#define ALL floats
#define TARGET
#define PARTS 1
#define SPREAD(p) all(*(p))
#define PART(words, part, scale) (vec) words
#define MAC PLAIN
#define SCALED 0
#include "tile.h"

/* bfloat16 are the upper halves of floats: the first of a pair is shifted there, the second lies there. */
#define NAME(R) halves##R
#define ALL halves
#define TARGET
#define PARTS 2
#define SPREAD(p) all(*(p))
#define PART(words, part, scale) (vec)(part ? words & (int32_t)0xffff0000 : words << 16)
#define MAC PLAIN
#define SCALED 0
#include "tile.h"

#define NAME(R) bytes##R
#define ALL bytes
#define TARGET
#define PARTS 4
#define SPREAD(p) all(*(p))
#define PART(words, part, scale) (__builtin_convertvector(words << (24 - 8 * part) >> 24, vec) * scale)
#define MAC PLAIN
#define SCALED 1
#include "tile.h"

/* By a product's kind. */
static const Multiplier plain = {1, floats}, wide_bf16 = {2, halves}, wide_int8 = {4, bytes};
static const Multiplier *const multipliers[] = {&plain, &wide_bf16, &dlm_bf16_dots, &dlm_bf16_tiles, &wide_int8, &dlm_int8_dots, &dlm_int16_dots};

/* Whether this processor, as the library was compiled, can multiply so. */
int dlm_multiplies(int64_t kind) {
  switch (kind) {
    case BF16_DOTS: return dlm_has_bf16_dots();
    case BF16_TILES: return dlm_has_bf16_tiles();
    case INT8_DOTS:
    case INT16_DOTS: return dlm_has_whole_dots();
    default: return 1;
  }
}

/* Whether BF16_DOTS beat BF16_WIDENED: on Intel's processors a dot product takes the time of four sums of products (2.7 GHz
   Emerald Rapids: 1.3 against 5.4 G a second), on AMD's that of one. */
int dlm_half_dots_pay(void) {
#ifdef __x86_64__
  return dlm_has_bf16_dots() && !__builtin_cpu_is("intel");
#else
  return 0;
#endif
}

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

/* The panels of w (n, k), k in words. */
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

/* Tile i of x as `how` reads it; its words are made in its second half, where they are turned. */
static void tile_of(const Multiplier *how, Tiling t, int64_t i, const float *x, int64_t ldx, int64_t depth, float *out) {
  int64_t rows = t.rows + (i < t.more), words = 0;
  x += (i * t.rows + MIN(i, t.more)) * ldx;
  if (!how->narrow) {
    make_tile(x, ldx, rows, depth, out);
    return;
  }
  float *made = how->by_rows ? out : out + STEP * LINE;
  for (int64_t row = 0; row < rows; row++)
    words = how->narrow(x + row * ldx, depth, (uint32_t *)(made + row * LINE));
  if (!how->by_rows) make_tile(made, LINE, rows, words, out);
}

static void make_tiles(const Multiplier *how, Tiling t, const float *x, int64_t ldx, int64_t depth, float *room,
                       int threads) {
  PARALLEL(t.count / 4) for (int64_t i = 0; i < t.count; i++) tile_of(how, t, i, x, ldx, depth, room + i * TILE_WORDS);
}

/* The panel of outputs j and on, of inputs `from` and on; where there is no copy it is made in `made`. */
static Panel panel_of(const Product *w, int64_t j, int64_t from, int64_t depth, float *made) {
  int64_t per = multipliers[w->kind]->per, width = MIN(PANEL, w->n - j), words = w->k / per;
  const float *scales = w->scales + j * ((w->k + GROUP - 1) / GROUP) + from / GROUP * PANEL;
  if (w->panels) {
    const float *here = w->panels + j * words + from / per * PANEL;
    return (Panel){here, here + words * PANEL, scales, PANEL, PANEL * PANEL, width};
  }
  make_panel(w->w + j * w->ld + from / per, w->ld, width, depth / per, made);
  return (Panel){made, w->w + (j + PANEL) * w->ld + from / per, scales, w->ld, PANEL, width};
}

/* y (m, n) = x (m, k) w^T + bias, or that added to y. A number's sum runs over the inputs in order, in pieces of DEPTH,
   however many rows there are. `room` holds dlm_room(m, threads) floats. */
void dlm_product(const Product *w, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t m, int add, float *room,
                 int threads) {
  Tiling t = tiling(m);
  const Multiplier *how = multipliers[w->kind];
  float *tiles_of_x = room + threads * OWN;
  int64_t whole = w->kind ? GROUP : W, pieces = (w->k + DEPTH - 1) / DEPTH;
  int64_t most = (w->k + pieces * whole - 1) / (pieces * whole) * whole;
  for (int64_t from = 0; from < w->k; from += most) {
    int64_t depth = MIN(most, w->k - from);
    int adding = add || from, last = from + most >= w->k;
    make_tiles(how, t, x + from, ldx, depth, tiles_of_x, threads);
    PARALLEL(w->n / PANEL) for (int64_t j = 0; j < w->n; j += PANEL) {
      float edge[HIGH * PANEL];
      Panel p = panel_of(w, j, from, depth, room + THREAD * OWN);
      if (how->begin) how->begin();
      for (int64_t i = 0, at = 0; i < t.count; i++) {
        int64_t r = t.rows + (i < t.more), ahead = i == t.count - 1 && j + PANEL < w->n;
        const float *a = tiles_of_x + i * TILE_WORDS;
        float *to = y + at * ldy + j;
        if (p.width == PANEL) {
          how->tiles[r](a, &p, depth / how->per, ahead, to, ldy, adding);
        } else {
          how->tiles[r](a, &p, depth / how->per, ahead, edge, PANEL, 0);
          for (int64_t e = 0; e < r; e++)
            for (int64_t c = 0; c < p.width; c++) to[e * ldy + c] = edge[e * PANEL + c] + (adding ? to[e * ldy + c] : 0);
        }
        if (w->bias && last)
          for (int64_t e = 0; e < r; e++)
            for (int64_t c = 0; c < p.width; c++) to[e * ldy + c] += w->bias[j + c];
        at += r;
      }
      if (how->end) how->end();
    }
  }
}

/* out (m, f) = silu(x gate^T) * (x up^T), panel by panel of both: neither is ever whole. `wide` is (m, f), for when the
   inputs are too many for that. Both are of one kind. */
void dlm_gated(const Product *gate, const Product *up, const float *x, int64_t ldx, float *out, int64_t m, float *wide,
               float *room, int threads) {
  if (!m) return;
  const Multiplier *how = multipliers[gate->kind];
  int64_t f = gate->n, depth = gate->k;
  if (depth > DEPTH || gate->bias || up->bias || gate->kind != up->kind) {
    dlm_product(gate, x, ldx, wide, f, m, 0, room, threads);
    dlm_product(up, x, ldx, out, f, m, 0, room, threads);
    PARALLEL(m / 64) for (int64_t i = 0; i < m; i++) swiglu(wide + i * f, out + i * f, out + i * f, f);
    return;
  }
  Tiling t = tiling(m);
  float *tiles_of_x = room + threads * OWN;
  make_tiles(how, t, x, ldx, depth, tiles_of_x, threads);
  PARALLEL(f / PANEL) for (int64_t j = 0; j < f; j += PANEL) {
    float *made = room + THREAD * OWN, g[HIGH * PANEL], u[HIGH * PANEL];
    Panel p = panel_of(gate, j, 0, depth, made), q = panel_of(up, j, 0, depth, made + DEPTH * PANEL);
    if (how->begin) how->begin();
    for (int64_t i = 0, at = 0; i < t.count; i++) {
      int64_t r = t.rows + (i < t.more), ahead = i == t.count - 1 && j + PANEL < f;
      const float *a = tiles_of_x + i * TILE_WORDS;
      how->tiles[r](a, &p, depth / how->per, ahead, g, PANEL, 0);
      how->tiles[r](a, &q, depth / how->per, ahead, u, PANEL, 0);
      for (int64_t e = 0; e < r; e++) swiglu(g + e * PANEL, u + e * PANEL, out + (at + e) * f + j, p.width);
      at += r;
    }
    if (how->end) how->end();
  }
}

void dlm_linear(const Product *w, const float *x, int64_t ldx, float *y, int64_t m, float *room, int threads) {
  if (m) dlm_product(w, x, ldx, y, w->n, m, 0, room, threads);
}
