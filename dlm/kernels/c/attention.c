/* Attention of packed query rows to keys and values on pages. */

#include "kernels.h"

#define KEYS 64    /* in a block: what is read again and again stays in the first cache */
#define CHUNK 16   /* numbers of a key or value that lie side by side: a line of the cache */
#define WIDE 3     /* vectors of query rows in a piece: TALL * WIDE sums live in registers */
#define LANES (WIDE * W)
#define PIECES 12  /* in a task, at most: each block is copied once for all of them */
#define CHUNKED(e) (((e) + CHUNK - 1) / CHUNK * CHUNK)
#define TASK(e) ((2 * PIECES * LANES + 2 * KEYS) * CHUNKED(e)) /* floats that a thread works in */
#define BOUNDS(spans) (((spans) + 8) / 8 * 8) /* 64-bit numbers, one more than there are spans */

/* Query rows that are attended for together: the lanes of up to WIDE vectors. So the softmax runs down the lanes, and
   keys and values are read number by number. Every sum of a lane runs over the keys in their order. */
typedef struct {
  int64_t lanes;
  float *q, *found;            /* (e, lanes) and (CHUNKED(e), lanes) */
  ivec until[WIDE];            /* a lane sees the keys before this one */
  int64_t least, most;         /* of `until` */
  vec best[WIDE], total[WIDE]; /* of the softmax over the blocks so far */
} Piece;

/* Up to KEYS keys and their values, on pages. */
typedef struct {
  const void *k_pages, *v_pages; /* of one head; a position's are `step` numbers after those of the one before */
  int half;                      /* they are bfloat16, else float32 */
  const int32_t *table;
  int64_t size, step, e, from, count; /* from: the first one's number in the context */
  int64_t ahead, end, early;          /* of the block after it: what is not yet fetched, and how many at a time */
} Block;

/* out (CHUNKED(e) / CHUNK, KEYS, CHUNK) = a block's keys or values. Apart by a power of two, as they lie on pages, they
   would share a few lines of the cache. */
static void take(const Block *block, const void *pages, float *out) {
  int64_t page = block->from / block->size, place = block->from % block->size, e = block->e;
  for (int64_t k = 0; k < block->count; k++, out += CHUNK) {
    int64_t at = (block->table[page] * block->size + place) * block->step;
    for (int64_t c = 0; c < e; c += CHUNK)
      if (block->half) widen((const uint16_t *)pages + at + c, MIN(CHUNK, e - c), out + c * KEYS);
      else if (c + CHUNK <= e) memcpy(out + c * KEYS, (const float *)pages + at + c, CHUNK * sizeof(float));
      else memcpy(out + c * KEYS, (const float *)pages + at + c, (e - c) * sizeof(float));
    if (++place == block->size) place = 0, page++;
  }
}

/* Fetch so many more of the next block's keys and values into the second cache. */
static inline void fetch(Block *block, int64_t keys) {
  int64_t width = block->half ? 2 : 4;
  for (; keys > 0 && block->ahead < block->end; keys--, block->ahead++) {
    int64_t at = (block->table[block->ahead / block->size] * block->size + block->ahead % block->size) * block->step * width;
    for (int64_t byte = 0; byte < block->e * width; byte += 64) {
      __builtin_prefetch((const char *)block->k_pages + at + byte, 0, 2);
      __builtin_prefetch((const char *)block->v_pages + at + byte, 0, 2);
    }
  }
}

/* out (TALL, V) = scores of V vectors of rows and TALL keys, number `from` on; they go into piece->best. */
INLINE void score(int V, Piece *piece, const float *keys, int64_t from, int64_t e, float *out) {
  const float *q = piece->q;
  vec s[TALL][WIDE];
  UNROLL for (int i = 0; i < TALL; i++) UNROLL for (int j = 0; j < V; j++) s[i][j] = all(0);
  for (int64_t c = 0; c < e; c += CHUNK, keys += KEYS * CHUNK) {
    int64_t width = MIN(CHUNK, e - c);
    _Pragma("GCC unroll 4") for (int64_t p = 0; p < width; p++, q += V * W) {
      vec b[WIDE];
      UNROLL for (int j = 0; j < V; j++) b[j] = LOAD(q + j * W);
      UNROLL for (int i = 0; i < TALL; i++) {
        vec x = all(keys[i * CHUNK + p]);
        UNROLL for (int j = 0; j < V; j++) s[i][j] += x * b[j];
      }
    }
  }
  if (from + TALL > piece->least) /* keys after the block's last one are masked too: nobody sees them */
    UNROLL for (int i = 0; i < TALL; i++)
      UNROLL for (int j = 0; j < V; j++) s[i][j] = pick(piece->until[j] > (int32_t)(from + i), s[i][j], all(-INFINITY));
  UNROLL for (int j = 0; j < V; j++) {
    vec top = piece->best[j];
    UNROLL for (int i = 0; i < TALL; i++) top = larger(s[i][j], top), STORE(out + (i * V + j) * W, s[i][j]);
    piece->best[j] = top;
  }
}

/* out (TALL, V) = itself * shrink + TALL channels of `count` values, each times its weights p. */
INLINE void blend(int V, const float *values, const float *p, int64_t count, const vec *shrink, float *out) {
  vec s[TALL][WIDE];
  UNROLL for (int i = 0; i < TALL; i++)
    UNROLL for (int j = 0; j < V; j++) s[i][j] = LOAD(out + (i * V + j) * W) * shrink[j];
  _Pragma("GCC unroll 2") for (int64_t k = 0; k < count; k++, p += V * W, values += CHUNK) {
    vec b[WIDE];
    UNROLL for (int j = 0; j < V; j++) b[j] = LOAD(p + j * W);
    UNROLL for (int i = 0; i < TALL; i++) {
      vec x = all(values[i]);
      UNROLL for (int j = 0; j < V; j++) s[i][j] += x * b[j];
    }
  }
  UNROLL for (int i = 0; i < TALL; i++) UNROLL for (int j = 0; j < V; j++) STORE(out + (i * V + j) * W, s[i][j]);
}

/* A piece of V vectors over a block, whose keys are taken; its values are too, unless this is the `first` piece. */
INLINE void attend(int V, Piece *piece, Block *block, int first, const float *keys, float *values) {
  float s[KEYS * LANES] __attribute__((aligned(64)));
  vec before[WIDE], shrink[WIDE], mass[WIDE];
  UNROLL for (int j = 0; j < V; j++) before[j] = piece->best[j], mass[j] = all(0);
  for (int64_t k = 0; k < block->count; k += TALL) {
    fetch(block, block->early);
    score(V, piece, keys + k * CHUNK, block->from + k, block->e, s + k * V * W);
  }
  for (int64_t k = 0; k < block->count; k++)
    UNROLL for (int j = 0; j < V; j++) {
      vec p = vexp(LOAD(s + (k * V + j) * W) - piece->best[j]);
      STORE(s + (k * V + j) * W, p);
      mass[j] += p;
    }
  UNROLL for (int j = 0; j < V; j++) {
    shrink[j] = vexp(before[j] - piece->best[j]);
    piece->total[j] = piece->total[j] * shrink[j] + mass[j];
  }
  if (first) take(block, block->v_pages, values);
  for (int64_t c = 0; c < block->e; c += TALL) {
    fetch(block, block->early);
    blend(V, values + c / CHUNK * KEYS * CHUNK + c % CHUNK, s, block->count, shrink, piece->found + c * V * W);
  }
}

typedef void (*Attend)(Piece *piece, Block *block, int first, const float *keys, float *values);
#define ATTEND(V)                                                                                                      \
  static void attend##V(Piece *piece, Block *block, int first, const float *keys, float *values) {                     \
    attend(V, piece, block, first, keys, values);                                                                      \
  }
ATTEND(1) ATTEND(2) ATTEND(3)
static const Attend by_width[] = {0, attend1, attend2, attend3};

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

/* Floats of room for attention: two lists of bounds, then each thread's own. */
int64_t dlm_attention_room(int64_t spans, int64_t e, int threads) { return 4 * BOUNDS(spans) + threads * TASK(e); }

/* One task: query rows `first` to `last` of one key head, `group` query heads for each of `rows`, over all keys they see.
   `block` lacks from and count; `room` holds TASK(e) floats. */
static void attend_all(const float *q, int64_t stride_q, Block block, const int32_t *positions, int32_t visible,
                       int32_t block_length, const int64_t *rows, int64_t first, int64_t last, int64_t group,
                       float scale, float *out, int64_t stride_out, float *room) {
  int64_t e = block.e, vectors = (last - first + W - 1) / W, count = (vectors + WIDE - 1) / WIDE, most = 0;
  float *keys = room, *values = count == 1 ? keys : keys + KEYS * CHUNKED(e), *free = keys + 2 * KEYS * CHUNKED(e);
  Piece pieces[PIECES];
  for (int64_t i = 0, begin = first; i < count; begin += pieces[i++].lanes) {
    Piece *piece = pieces + i;
    const float *from[LANES];
    piece->lanes = ((i + 1) * vectors / count - i * vectors / count) * W;
    piece->q = free, piece->found = free + piece->lanes * CHUNKED(e), free += 2 * piece->lanes * CHUNKED(e);
    memset(piece->found, 0, piece->lanes * CHUNKED(e) * sizeof(float));
    piece->least = INT32_MAX, piece->most = 0;
    for (int j = 0; j < WIDE; j++) piece->best[j] = all(-1e30f), piece->total[j] = all(0);
    for (int64_t lane = 0; lane < piece->lanes; lane++) { /* without a row it does as the last one: nobody reads it */
      int64_t at = MIN(begin + lane, last - 1), row = rows[at / group];
      from[lane] = q + row * stride_q + at % group * e;
      int32_t limit = block_length > 0 ? MIN(visible, (positions[row] / block_length + 1) * block_length) : visible;
      piece->until[lane / W][lane % W] = limit;
      piece->least = MIN(piece->least, limit), piece->most = limit > piece->most ? limit : piece->most;
    }
    for (int64_t lane = 0; lane < piece->lanes; lane += W) take_lanes(from + lane, scale, e, piece->q, piece->lanes, lane);
    if (piece->most > most) most = piece->most;
  }
  block.early = (TALL / 2 + count - 1) / count; /* asked for in every tile of every piece, of scores and of channels */
  for (block.from = 0; block.from < most; block.from += KEYS) {
    int first_piece = 1;
    block.count = MIN(KEYS, most - block.from), block.ahead = block.from + KEYS, block.end = MIN(most, block.from + 2 * KEYS);
    take(&block, block.k_pages, keys);
    for (Piece *piece = pieces; piece < pieces + count; piece++)
      if (block.from < piece->most) by_width[piece->lanes / W](piece, &block, first_piece, keys, values), first_piece = 0;
  }
  for (int64_t i = 0, at = first; i < count; i++)
    for (int64_t lane = 0; lane < pieces[i].lanes; lane += W) {
      float *to[W];
      int64_t filled = 0;
      for (; filled < W && at < last; at++) to[filled++] = out + at / group * stride_out + at % group * e;
      give_lanes(pieces[i].found, pieces[i].lanes, lane, pieces[i].total[lane / W], e, to, filled);
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
    int64_t pieces = ((at - begin[i]) * group + LANES - 1) / LANES, parts = (pieces + PIECES - 1) / PIECES;
    if (threads > 1 && parts * g * spans < 4 * threads) parts = MIN(pieces, (4 * threads + g * spans - 1) / (g * spans));
    task_of[i + 1] = task_of[i] + g * parts;
  }
  PARALLEL(task_of[spans]) for (int64_t task = 0; task < task_of[spans]; task++) {
    int64_t span = 0;
    while (task_of[span + 1] <= task) span++;
    int64_t lanes = (begin[span + 1] - begin[span]) * group, parts = (task_of[span + 1] - task_of[span]) / g;
    int64_t head = (task - task_of[span]) / parts, part = (task - task_of[span]) % parts, vectors = (lanes + W - 1) / W;
    int64_t first = part * vectors / parts * W, last = MIN(lanes, (part + 1) * vectors / parts * W);
    int64_t apart = head * e * (half ? 2 : 4);
    Block block = {(const char *)k_pages + apart, (const char *)v_pages + apart, half, tables + span * table_width,
                   size, g * e, e};
    attend_all(q + head * group * e, stride_q, block, positions, visible[span], block_lengths[span], rows + begin[span],
               first, last, group, scale, out + (begin[span] * h + head * group) * e, h * e, own + THREAD * TASK(e));
  }
}
