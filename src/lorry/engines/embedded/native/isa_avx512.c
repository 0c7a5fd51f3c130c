#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
#define ISA avx512
#define LANES 16
#define TILE_ROWS 12
#include "kernels.inc"
#endif
