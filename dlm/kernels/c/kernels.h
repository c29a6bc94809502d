/* The kernels for a CPU, in fp32: what the Triton kernels are on a GPU. reference.py defines what each computes.

   Why they exist. A row's bits depend neither on how many rows are computed with it nor on the number of threads,
   since every sum runs over the row's own numbers in one order; torch's products promise neither. And all layers are
   one call: where products are small, the host's work between them is most of a step. Decoding takes 0.62 to 0.65 of
   the time of torch's path at width 256 (python benchmarks/paths.py, one thread, AVX-512).

   Nothing whose size depends on a shape lies on the stack, since a thread of OpenMP may have little of it: the caller
   hands over memory to work in, called `room`.

   native.py declares the same structs for Python. dlm_sizes lets it compare their sizes when the library is loaded. */

#pragma once
#include "vectors.h"

enum { FLOAT32, BF16_WIDENED, BF16_DOTS, BF16_TILES, INT8_WIDENED, INT8_DOTS, INT16_DOTS }; /* what is multiplied, and how */

typedef struct { /* y = x w^T + bias */
  const float *w;      /* (n, ld) words of 32 bits: see products.h */
  const float *panels; /* the same as (n / PANEL, words, PANEL), filled up with zeros; 0: made on the way, for more time */
  const float *bias;
  int64_t n, k, ld;
  int64_t kind;
  const float *scales; /* of int8 and int16: (n / PANEL, groups, PANEL) */
} Product;

typedef struct {
  const float *attn_norm, *q_norm, *k_norm, *mlp_norm;
  Product qkv[3], o, gate, up, down; /* qkv: what lies side by side is one, and those after it have n = 0 */
} Layer;

typedef struct { /* what all layers share */
  int64_t layers, d, h, g, e, f, r;
  float eps;
  int32_t threads;
  int64_t half; /* the table of embeddings and the pages hold bfloat16, else float32 */
} Network;

typedef struct { /* what stays as long as the same spans are run */
  int64_t n, spans, page_size, table_width, layer_stride;
  const float *cos, *sin;
  const int64_t *slots, *all_rows; /* all_rows: 0 ... n - 1 */
  const int32_t *starts, *positions, *visible, *tables, *block_lengths;
  void *keys, *values;
  float *room;
  float *projected; /* the first layer's queries, keys and values of tokens, (v, (h + 2 g) e): of the token alone */
  uint8_t *known;   /* (v,): of which tokens they are there; both may be 0 */
} Run;

/* dots.c, tiles.c */
int dlm_has_bf16_dots(void);
int dlm_has_whole_dots(void);
int dlm_has_bf16_tiles(void);

static inline uint32_t bf16(float x) { /* the nearest bfloat16, to even; NaN stays one */
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline void widen(const uint16_t *x, int64_t n, float *out) { /* from bfloat16 */
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    halves_of_words h;
    memcpy(&h, x + i, sizeof(h));
    STORE(out + i, (vec)(__builtin_convertvector(h, uvec) << 16));
  }
  for (; i < n; i++) {
    uint32_t bits = (uint32_t)x[i] << 16;
    memcpy(out + i, &bits, 4);
  }
}

/* products.c */
int64_t dlm_room(int64_t m, int threads);
void dlm_product(const Product *w, const float *x, int64_t ldx, float *y, int64_t ldy, int64_t m, int add, float *room,
                 int threads);
void dlm_gated(const Product *gate, const Product *up, const float *x, int64_t ldx, float *out, int64_t m, float *wide,
               float *room, int threads);

/* rows.c */
void dlm_rms_norm(const float *x, int64_t stride_n, int64_t stride_h, const float *residual, const float *weight,
                  float eps, float *out, float *total, int64_t n, int64_t h, int64_t d, int threads);
void dlm_rotate(const float *q, int64_t stride, const float *cos, const float *sin, float *out, int64_t n, int64_t h,
                int64_t e, int64_t r, int threads);
void dlm_write(const float *k, int64_t stride_k, const float *v, int64_t stride_v, const float *cos, const float *sin,
               const int64_t *slots, float *keys, float *values, int64_t n, int64_t g, int64_t e, int64_t r,
               int threads);
void dlm_narrow(const float *x, int64_t n, uint16_t *out);
void dlm_write_halves(const float *x, int64_t stride, const int64_t *slots, uint16_t *pages, int64_t n, int64_t width,
                      int threads);

/* draws.c */
int64_t dlm_draw(const float *x, int64_t v, int64_t mask, float top, int64_t first, float temperature,
                 const uint32_t *address, uint8_t *unsure);

/* attention.c */
int64_t dlm_attention_room(int64_t spans, int64_t e, int threads);
void dlm_paged_attention(const float *q, int64_t stride_q, const void *k_pages, const void *v_pages, int half,
                         const int32_t *starts, const int32_t *positions, const int32_t *visible, const int32_t *tables,
                         int64_t table_width, const int32_t *block_lengths, const int64_t *rows, float *out,
                         float *room, int64_t spans, int64_t w, int64_t h, int64_t g, int64_t e, int64_t size,
                         float scale, int threads);
