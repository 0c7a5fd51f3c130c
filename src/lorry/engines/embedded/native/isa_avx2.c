#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define ISA avx2
#define LANES 8
#define TILE_ROWS 6
#include "kernels.inc"
#endif
