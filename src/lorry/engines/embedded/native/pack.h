/* An adapter's matrices from the bytes of its file to the decoder's buffer, in one pass. */
#ifndef LORRY_PACK_H
#define LORRY_PACK_H

#include <stdint.h>

/* One matrix. The Python side (packing.py) writes these as int64 and has checked them against the file's size. */
typedef struct {
    int64_t start; /* its first byte in the file */
    int64_t dtype; /* below */
    int64_t rows, columns;
    int64_t to;     /* its first element in the buffer */
    int64_t turned; /* whether the buffer has it as [columns, rows] */
    double scale;
} move_t;

enum { FLOAT32, FLOAT16, BFLOAT16 };

void pack(const uint8_t *file, const move_t *moves, int64_t count, float *buffer);
int all_finite(const float *values, int64_t count);

#endif
