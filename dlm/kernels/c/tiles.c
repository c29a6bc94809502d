/* Products of bfloat16 by AMX (Xeon from Sapphire Rapids on): a tile register holds 16 rows of 64 bytes. Whether the
   processor has it, and the system lets this process use it, is asked at run time.

   Compiled with -DEMULATED the instructions are plain C, written from Intel's manual, so that tests run these lines on
   any processor. */

#include "products.h"

#if W == 16 && (defined(EMULATED) || (defined(__x86_64__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)))
#ifdef EMULATED
#define TARGET
static _Thread_local char registers[8][16][64];
static _Thread_local int configured;
static void _tile_loadconfig(const void *config) { configured = ((const uint8_t *)config)[0] == 1; }
static void _tile_release(void) { configured = 0; }
static void tile_load(int tile, const void *from, int64_t stride) {
  for (int row = 0; row < 16; row++) memcpy(registers[tile][row], (const char *)from + row * stride, configured ? 64 : 0);
}
static void tile_store(int tile, void *to, int64_t stride) {
  for (int row = 0; row < 16; row++) memcpy((char *)to + row * stride, registers[tile][row], configured ? 64 : 0);
}
static float wide(uint32_t half) {
  float x;
  return half <<= 16, memcpy(&x, &half, 4), x;
}
static void tile_dot(int c, int a, int b) {
  for (int m = 0; m < 16; m++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 16; n++) {
        uint16_t *x = (uint16_t *)registers[a][m] + 2 * k, *w = (uint16_t *)registers[b][k] + 2 * n;
        float *sum = (float *)registers[c][m] + n;
        *sum += wide(x[0]) * wide(w[0]) + wide(x[1]) * wide(w[1]);
      }
}
#define _tile_zero(t) memset(registers[t], 0, sizeof registers[t])
#define _tile_loadd(t, from, stride) tile_load(t, from, stride)
#define _tile_stored(t, to, stride) tile_store(t, to, stride)
#define _tile_dpbf16ps(c, a, b) tile_dot(c, a, b)
int dlm_has_bf16_tiles(void) { return 1; }
#else
#include <sys/syscall.h>
#include <unistd.h>
#define TARGET __attribute__((target("amx-tile,amx-bf16")))

int dlm_has_bf16_tiles(void) { /* cpuid's AMX-TILE and AMX-BF16; then the system's leave to use their registers */
  int a = 7, b, c = 0, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return (d >> 22 & 1) && (d >> 24 & 1) && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
}
#endif

static int64_t pairs(const float *x, int64_t depth, uint32_t *out) {
  for (int64_t i = 0; i < depth / 2; i++) out[i] = bf16(x[2 * i]) | bf16(x[2 * i + 1]) << 16;
  return depth / 2;
}

TARGET static void begin(void) { /* registers 0 to 3: 16 rows of 64 bytes */
  uint8_t config[64] __attribute__((aligned(64))) = {1};
  for (int tile = 0; tile < 4; tile++) config[16 + 2 * tile] = 64, config[48 + tile] = 16;
  _tile_loadconfig(config);
}

TARGET static void end(void) { _tile_release(); }

/* Of `rows` rows; those up to 16 are read and computed too, and go nowhere. */
TARGET static void tile(const float *a, const Panel *p, int64_t depth, int ahead, float *y, int64_t ldy, int add, int rows) {
  float sums[2][16][W] __attribute__((aligned(64)));
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t at = 0; at < depth; at += 16) {
    const float *panel = p->here + at * PANEL;
    for (int64_t i = at; i < at + 16; i++) FETCH(p, i)
    _tile_loadd(2, a + at, LINE * 4);
    _tile_loadd(3, panel, PANEL * 4);
    _tile_dpbf16ps(0, 2, 3);
    _tile_loadd(3, panel + W, PANEL * 4);
    _tile_dpbf16ps(1, 2, 3);
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  for (int i = 0; i < rows; i++)
    for (int half = 0; half < 2; half++) {
      vec sum = LOAD(sums[half][i]);
      float *to = y + i * ldy + half * W;
      if (add) sum += LOAD(to);
      STORE(to, sum);
    }
}

#define TILE(R)                                                                                                        \
  static void NAME(R)(const float *a, const Panel *p, int64_t depth, int ahead, float *y, int64_t ldy, int add) {      \
    tile(a, p, depth, ahead, y, ldy, add, R);                                                                          \
  }
#define NAME(R) tile##R
#define ALL tiles
#include "heights.h"
const Multiplier dlm_bf16_tiles = {2, tiles, pairs, 1, begin, end};
#else
const Multiplier dlm_bf16_tiles = {2};
int dlm_has_bf16_tiles(void) { return 0; }
#endif
