/* Vectors of four floats: what every 64-bit x86 and Arm machine has. */
#define ISA portable
#define LANES 4
#define TILE_ROWS 6
#include "kernels.inc"
