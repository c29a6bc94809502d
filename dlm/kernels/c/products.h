/* What the files of matrix products share.

   A weight is read in words of 32 bits, which hold one float32, two bfloat16 or int16, or four int8 of neighbouring inputs; so one
   layout in panels serves all, and processors that multiply pairs or quads read the same words. */

#pragma once
#include "kernels.h"

#define PANEL (2 * W) /* outputs computed together: their weights, (words, PANEL), are what a tile reads */
#define STEP ((HIGH + W - 1) / W * W)
#define DEPTH 512     /* inputs taken at a time: a panel then stays in the second cache */
#define GROUP 64      /* inputs of one output whose int8 or int16 weights share a scale */
#define LINE (DEPTH / 2 + 2 * DEPTH / GROUP) /* words of a row of pairs, with what its groups need */
#define TILE_WORDS (2 * STEP * LINE)         /* of rows as they are made, and turned */

typedef int32_t word __attribute__((may_alias));
typedef ivec loose_words __attribute__((aligned(4), may_alias));
#define WORDS(p) (*(const loose_words *)(p))

/* A panel of a weight, and where the one after it is: PANEL pieces, `inner` apart, and so on after `outer`. */
typedef struct {
  const float *here, *next;
  const float *scales; /* of int8, (groups, PANEL) */
  int64_t inner, outer, width;
} Panel;

/* y (rows, PANEL) = a tile of x times `depth` words of a panel, or that added to y; `ahead`: fetch the next panel meanwhile. */
typedef void (*Tile)(const float *a, const Panel *p, int64_t depth, int ahead, float *y, int64_t ldy, int add);

/* A way to multiply. */
typedef struct {
  int64_t per;       /* inputs in a word of the weight */
  const Tile *tiles; /* by their rows */
  int64_t (*narrow)(const float *x, int64_t depth, uint32_t *out); /* of a row the words that tiles read, and how many; 0:
                                                                      they read floats */
  int by_rows;                     /* a tile is rows as narrow makes them, LINE words apart; else columns, STEP apart */
  void (*begin)(void), (*end)(void); /* around the tiles of a panel; may be 0 */
} Multiplier;

extern const Multiplier dlm_bf16_dots, dlm_bf16_tiles, dlm_int8_dots, dlm_int16_dots;

#define FETCH(p, at)                                                                                                   \
  if (ahead) {                                                                                                         \
    const float *line = (p)->next + (at) % PANEL * (p)->inner + (at) / PANEL * (p)->outer;                             \
    __builtin_prefetch(line, 0, 2);                                                                                    \
    __builtin_prefetch(line + W, 0, 2);                                                                                \
  }
