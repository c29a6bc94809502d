/* Attention of packed query rows to keys and values on pages. */

#include "kernels.h"

#define KEYS 64 /* taken at a time: their scores and values stay in the first cache */
#define EARLY 8 /* keys ahead, of bfloat16, that are fetched */

/* Query rows are the lanes of vectors, so keys are read where they lie, number by number: nothing of them is transposed,
   and the softmax runs down the lanes. (R, V): so many keys or channels at a time, for V vectors of rows. */
#define BLOCK(R, V)                                                                                                     \
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
BLOCK(1, 1) BLOCK(1, 2)
#if TALL == 8
BLOCK(8, 1) BLOCK(8, 2)
#define SCORE(V) score8_##V
#define BLEND(V) blend8_##V
#else
BLOCK(4, 1) BLOCK(4, 2)
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
    transpose(a);
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
    transpose(a);
    for (int64_t i = 0; i < count; i++) STORE(rows[i] + c, a[i]);
  }
  for (; c < e; c++)
    for (int64_t i = 0; i < count; i++) rows[i][c] = found[c * wide + lane + i] * over[i];
}

#define LANES (2 * W)
#define PIECES 8 /* of so many lanes that one task takes: keys and values are then fetched once for all of them */
#define TASK(e) ((2 * PIECES * LANES + 2 * KEYS) * (e)) /* floats that a thread works in */
#define BOUNDS(spans) (((spans) + 8) / 8 * 8)       /* 64-bit numbers, one more than there are spans */

/* Floats of room for attention: two lists of bounds, then each thread's own. */
int64_t dlm_attention_room(int64_t spans, int64_t e, int threads) { return 4 * BOUNDS(spans) + threads * TASK(e); }

/* One task: rows (own of them, LANES at a time) of one key head, `group` query heads each, over all they see. `room`
   holds TASK(e) floats. */
static void attend(const float *q, int64_t stride_q, const void *k_pages, const void *v_pages, int half, const int32_t *table,
                   const int32_t *positions, int32_t visible, int32_t block_length,
                   const int64_t *rows, int64_t first, int64_t own, int64_t group, int64_t e, int64_t size,
                   int64_t step, float scale, float *out, int64_t stride_out, float *room) {
  float *queries = room, *found = queries + PIECES * LANES * e, *values = found + PIECES * LANES * e, *widened = values + KEYS * e;
  const float *keys[KEYS + TALL]; /* and those of the block after it, which are fetched early */
  vec best[PIECES][2], total[PIECES][2];
  ivec until[PIECES][2];
  int64_t least[PIECES], most[PIECES], all_most = 0, page = 0, place = 0;
  const int64_t ahead = half ? 0 : (const float *)v_pages - (const float *)k_pages;
  for (int64_t piece = 0; piece * LANES < own; piece++) {
    int64_t lanes = MIN(LANES, own - piece * LANES), wide = lanes > W ? LANES : W;
    const float *from[LANES];
    memset(found + piece * LANES * e, 0, wide * e * sizeof(float));
    least[piece] = INT32_MAX, most[piece] = 0;
    for (int j = 0; j < 2; j++) best[piece][j] = all(-1e30f), total[piece][j] = all(0);
    for (int64_t i = 0; i < wide; i++) {
      int64_t at = first + piece * LANES + MIN(i, lanes - 1), row = rows[at / group];
      from[i] = q + row * stride_q + at % group * e;
      int32_t limit = block_length > 0 ? MIN(visible, (positions[row] / block_length + 1) * block_length) : visible;
      until[piece][i / W][i % W] = limit;
      least[piece] = MIN(least[piece], limit), most[piece] = limit > most[piece] ? limit : most[piece];
    } /* lanes without a row do as the last one does: nobody reads them */
    for (int64_t i = 0; i < wide; i += W) take_lanes(from + i, scale, e, queries + piece * LANES * e, wide, i);
    if (most[piece] > all_most) all_most = most[piece];
  }
  for (int64_t from = 0; from < all_most; from += KEYS) {
    int first_piece = !half;
    for (int64_t k = from && !half ? TALL : 0; k < KEYS + TALL; k++) {
      if (half && k < KEYS && from + k < all_most) { /* widened here: keys and values then lie side by side */
        int64_t at = (table[page] * size + place) * step;
        const uint16_t *key = (const uint16_t *)k_pages + at, *value = (const uint16_t *)v_pages + at;
        for (int64_t c = 0; c < e; c += 32) __builtin_prefetch(key + EARLY * step + c), __builtin_prefetch(value + EARLY * step + c);
        widen(key, e, widened + k * e);
        widen(value, e, values + k * e);
        keys[k] = widened + k * e;
        if (++place == size) place = 0, page++;
      } else if (!half && from + k < all_most) {
        keys[k] = (const float *)k_pages + (table[page] * size + place) * step;
        if (++place == size) place = 0, page++;
      } else keys[k] = keys[k - 1];
    }
    for (int64_t piece = 0; piece * LANES < own; piece++) {
      if (from >= most[piece]) continue;
      (own - piece * LANES > W ? attend2 : attend1)(
          queries + piece * LANES * e, until[piece], least[piece], best[piece], total[piece], keys, ahead,
          values, first_piece, from, MIN(KEYS, all_most - from), e, found + piece * LANES * e);
      first_piece = 0;
    }
    memcpy(keys, keys + KEYS, sizeof(float *) * TALL);
  }
  for (int64_t i = 0; i < own; i += W) {
    int64_t piece = i / LANES, wide = own - piece * LANES > W ? LANES : W, count = MIN(W, own - i);
    float *to[W];
    for (int64_t lane = 0, at = first + i; lane < count; lane++, at++) to[lane] = out + at / group * stride_out + at % group * e;
    give_lanes(found + piece * LANES * e, wide, i % LANES, total[piece][i % LANES / W], e, to, count);
  }
}

/* out (w, h, e): of the packed rows those in `rows`, (w,) ascending. Spans and pages as in spans.py. `room` holds
   dlm_attention_room(spans, e, threads) floats. Pages hold bfloat16 if `half`, else float32. */
void dlm_paged_attention(const float *q, int64_t stride_q, const void *k_pages, const void *v_pages, int half,
                         const int32_t *starts, const int32_t *positions, const int32_t *visible, const int32_t *tables,
                         int64_t table_width, const int32_t *block_lengths, const int64_t *rows, float *out,
                         float *room, int64_t spans, int64_t w, int64_t h, int64_t g, int64_t e, int64_t size,
                         float scale, int threads) {
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
    int64_t apart = head * e * (half ? 2 : 4);
    attend(q + head * group * e, stride_q, (const char *)k_pages + apart, (const char *)v_pages + apart, half, tables + span * table_width,
           positions, visible[span], block_lengths[span], rows + begin[span], first,
           MIN(PIECES * LANES, lanes - first), group, e, size, g * e, scale,
           out + (begin[span] * h + head * group) * e, h * e, own + THREAD * TASK(e));
  }
}
