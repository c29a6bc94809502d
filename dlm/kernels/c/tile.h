/* Tiles of 1 to HIGH rows for one way to multiply. Included with these defined:

   NAME(rows)         a tile's name              ALL     the name of their table
   TARGET             the function's attribute   PARTS   vectors of weights in a vector of words
   SPREAD(p)          a vector of the number (or word) of x at p
   PART(words, part, scale)   one of these       MAC(sum, x, weight)
   SCALED             1: each GROUP of inputs has its scales */

#define TILE(R)                                                                                                        \
  TARGET static void NAME(R)(const float *a, const Panel *p, int64_t depth, int ahead, float *y, int64_t ldy, int add) { \
    const float *panel = p->here, *scales = p->scales;                                                                 \
    vec s[R][2], by[2];                                                                                                \
    UNROLL for (int i = 0; i < R; i++) s[i][0] = s[i][1] = all(0);                                                     \
    by[0] = by[1] = all(0);                                                                                            \
    _Pragma("GCC unroll 2") for (int64_t at = 0; at < depth; at++, panel += PANEL) {                                   \
      ivec left = WORDS(panel), right = WORDS(panel + W);                                                              \
      if (SCALED && at % (GROUP / PARTS) == 0) by[0] = LOAD(scales), by[1] = LOAD(scales + W), scales += PANEL;        \
      FETCH(p, at)                                                                                                     \
      UNROLL for (int part = 0; part < PARTS; part++, a += STEP) {                                                     \
        vec l = PART(left, part, by[0]), r = PART(right, part, by[1]);                                                 \
        UNROLL for (int i = 0; i < R; i++) {                                                                           \
          vec x = SPREAD(a + i);                                                                                       \
          MAC(s[i][0], x, l);                                                                                          \
          MAC(s[i][1], x, r);                                                                                          \
        }                                                                                                              \
      }                                                                                                                \
    }                                                                                                                  \
    UNROLL for (int i = 0; i < R; i++) {                                                                               \
      if (add) s[i][0] += LOAD(y + i * ldy), s[i][1] += LOAD(y + i * ldy + W);                                         \
      STORE(y + i * ldy, s[i][0]), STORE(y + i * ldy + W, s[i][1]);                                                    \
    }                                                                                                                  \
  }
#include "heights.h"
#undef TILE
#undef NAME
#undef ALL
#undef TARGET
#undef PARTS
#undef SPREAD
#undef PART
#undef MAC
#undef SCALED
