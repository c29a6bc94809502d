/* What an x86 processor's multiplying instructions reach when nothing waits: twelve sums, each in its own register. */

#define REGISTERS                                                                                                      \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13",   \
      "xmm14", "xmm15"
#define ON(name, width, i) name " %%" width "14,%%" width "15,%%" width #i "\n"
#define TWELVE(name, width)                                                                                            \
  ON(name, width, 0) ON(name, width, 1) ON(name, width, 2) ON(name, width, 3) ON(name, width, 4) ON(name, width, 5)    \
  ON(name, width, 6) ON(name, width, 7) ON(name, width, 8) ON(name, width, 9) ON(name, width, 10) ON(name, width, 11)
#define PEAK(function, name, width)                                                                                    \
  void function(long times) {                                                                                          \
    __asm__ volatile("vzeroall" ::: REGISTERS);                                                                        \
    for (long i = 0; i < times; i++) __asm__ volatile(TWELVE(name, width)::: REGISTERS);                               \
  }

PEAK(fp32_256, "vfmadd231ps", "ymm")
PEAK(fp32_512, "vfmadd231ps", "zmm")
PEAK(bf16_512, "vdpbf16ps", "zmm")
PEAK(int16_512, "vpdpwssd", "zmm")
PEAK(int8_512, "vpdpbusd", "zmm")
PEAK(fp16_512, "vfmadd231ph", "zmm")
