/* What the kernels of one instruction set work on. All matrices are float32 and row-major, unless said. */
#ifndef LORRY_KERNELS_H
#define LORRY_KERNELS_H

#include <stdint.h>

enum { INPUT_PLAIN, INPUT_NORM, INPUT_GATE };

/* out [rows, outer] = input(x) @ W^T (+ bias) (+ residual), in two phases.
 *
 * input: plain x [rows, inner]; its RMS norm times `norm`; or silu(gate) * up of x = gate, up [rows, 2 * inner].
 * Phase one, task = block of rows: writes `input` (unless plain) and `packed`.
 * Phase two, task = (group of row blocks, panel of outputs). */
typedef struct {
    const float *x;
    int64_t rows, inner, outer;
    int form;
    const float *norm; /* [inner] */
    float eps;
    float *input;  /* [rows, inner] */
    float *packed; /* [rows, inner], block by block, each [inner, rows of the block] */
    const void *panels;
    int bf16;
    const float *bias;     /* [outer] or NULL */
    const float *residual; /* [rows, outer] or NULL; may be out */
    float *out;
    int64_t blocks, groups, panel_count;
} product_t;

/* One low-rank part of a group: out[:, column .. column + width] += low[:, rank .. rank + ranks] @ b. */
typedef struct {
    const float *b; /* [ranks, width] */
    int64_t column, width, rank, ranks;
} part_t;

#define PARTS_MAX 3
/* What an adapter adds to one group of one layer; `a` NULL: nothing. The Python side writes these as int64. */
typedef struct {
    const float *a; /* [ranks, inner] */
    int64_t ranks, parts;
    part_t part[PARTS_MAX];
} entry_t;

typedef struct {
    const entry_t *entries; /* of one adapter, [layers * groups] */
    int64_t start, stop;    /* its rows */
} segment_t;

/* out += (x @ A^T) @ B for each segment's rows. Task = some rows of one segment. */
typedef struct {
    const float *x; /* [rows, inner] */
    int64_t inner;
    float *out; /* [rows, outer] */
    int64_t outer;
    const segment_t *segments;
    int64_t count, entry, rows_each;
    float *scratch; /* per thread [LOWRANK_ROWS, ranks_max] */
    int64_t ranks_max;
} lowrank_t;
#define LOWRANK_ROWS 8

/* One layer's cache: of each block the keys [kv_heads, dim, block_size], so that scores of neighbouring positions are
 * neighbours, then the values [kv_heads, block_size, dim]. */
typedef struct {
    float *keys;
    int64_t block_size, kv_heads, dim;
} cache_t;

static inline float *block_keys(const cache_t *cache, int64_t block, int64_t head) {
    return cache->keys + (block * 2 * cache->kv_heads + head) * cache->block_size * cache->dim;
}
static inline float *block_values(const cache_t *cache, int64_t block, int64_t head) {
    return block_keys(cache, block, cache->kv_heads + head);
}

/* Norm of heads, rotary positions, and keys and values into the cache. Task = row. */
typedef struct {
    float *qkv; /* [rows, (heads + 2 * kv_heads) * dim] */
    int64_t heads;
    const float *norm; /* [heads + kv_heads, dim] or NULL */
    float eps;
    const float *cos, *sin;   /* [positions, dim]; sin of the first half negated */
    const int64_t *positions; /* [rows] */
    const int64_t *writes;    /* [rows] places in the cache, counted over blocks */
    cache_t cache;
} rotate_t;

typedef struct {
    int64_t row, rows; /* neighbouring rows of one sequence */
    int64_t context;   /* positions that the first of them sees, itself included; each further row one more */
    int64_t table;     /* where in `tables` its blocks begin */
} chunk_t;
#define CHUNK_ROWS 4

/* Causal attention over paged keys and values. Task = (chunk, key head). */
typedef struct {
    const float *qkv;
    int64_t heads;
    cache_t cache;
    const int64_t *tables;
    const chunk_t *chunks;
    float *out;     /* [rows, heads * dim] */
    float *scratch; /* per thread `attend_floats` */
} attend_t;

/* A whole model and a step of it, as Python writes them: numbers and addresses, 8 bytes each. */
typedef struct {
    const void *panels;
    int64_t bf16, outer;
    const float *bias; /* or NULL */
} matrix_t;

typedef struct {
    const float *input_norm;
    matrix_t qkv;
    const float *qk_norm; /* or NULL */
    matrix_t o;
    const float *post_norm;
    matrix_t gate_up, down;
} layer_t;

typedef struct {
    const layer_t *layers;
    int64_t count, hidden, heads, kv_heads, dim, inner;
} model_t;

typedef struct {
    float *x; /* [rows, hidden]: embeddings before, what the last layer leaves after */
    int64_t rows;
    const int64_t *positions, *writes, *tables;
    const chunk_t *chunks;
    int64_t chunk_count;
    const segment_t *segments;
    int64_t segment_count, ranks_max;
    float *cache; /* of all layers */
    int64_t layer_floats, block_size;
    const float *cos, *sin;
} step_t;

/* Groups of projections that share an input, in the order of the Python side. */
enum { GROUP_QKV, GROUP_OUT, GROUP_GATE_UP, GROUP_DOWN, GROUPS };

typedef void task_fn(const void *work, int64_t task, int thread);

typedef struct {
    const char *name;
    int lanes, tile_rows;
    int64_t (*attend_floats)(int64_t queries, int64_t dim);
    task_fn *pack_rows, *multiply, *lowrank, *rotate, *attend;
} isa_t;

/* Blocks of rows are as even as can be, so that no tile is nearly empty. */
static inline int64_t block_start(int64_t rows, int64_t blocks, int64_t block) {
    int64_t each = rows / blocks, more = rows % blocks;
    return block * each + (block < more ? block : more);
}

#endif
