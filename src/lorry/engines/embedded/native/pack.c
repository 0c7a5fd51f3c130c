#include "pack.h"

#include <string.h>

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* IEEE half. Shifted into place, its exponent is too small by 112; what is infinite or NaN stays so. */
static inline float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
    if (rest >= 0x0f800000) return from_bits(sign | rest | 0x7f800000);
    float value = from_bits(rest) * 0x1p112f;
    memcpy(&rest, &value, sizeof rest);
    return from_bits(sign | rest);
}

static inline float read_one(const uint8_t *file, int64_t dtype, int64_t index) {
    uint32_t whole;
    uint16_t half;
    if (dtype == FLOAT32) {
        memcpy(&whole, file + 4 * index, sizeof whole);
        return from_bits(whole);
    }
    memcpy(&half, file + 2 * index, sizeof half);
    return dtype == FLOAT16 ? from_half(half) : from_bits((uint32_t)half << 16);
}

/* Inlined once for each dtype and direction, so that neither is looked at inside the loops. */
static inline __attribute__((always_inline)) void move(const uint8_t *file, const move_t *m, int64_t dtype, float *out) {
    float scale = (float)m->scale;
    if (!m->turned) {
        for (int64_t i = 0; i < m->rows * m->columns; i++) out[i] = read_one(file, dtype, i) * scale;
        return;
    }
    for (int64_t column = 0; column < m->columns; column++)
        for (int64_t row = 0; row < m->rows; row++)
            out[column * m->rows + row] = read_one(file, dtype, row * m->columns + column) * scale;
}

int all_finite(const float *values, int64_t count) {
    uint32_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        found |= (bits & 0x7f800000) == 0x7f800000;
    }
    return !found;
}

void pack(const uint8_t *file, const move_t *moves, int64_t count, float *buffer) {
    for (int64_t i = 0; i < count; i++) {
        const move_t *m = moves + i;
        const uint8_t *from = file + m->start;
        float *out = buffer + m->to;
        if (m->dtype == FLOAT32) move(from, m, FLOAT32, out);
        else if (m->dtype == FLOAT16) move(from, m, FLOAT16, out);
        else move(from, m, BFLOAT16, out);
    }
}
