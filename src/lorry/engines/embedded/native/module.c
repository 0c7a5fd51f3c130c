/* lorry.engines.embedded._native: the kernels for Python. Tensors come as addresses; kernels.py, the only caller, checks
 * their types and shapes. Every function lets other Python threads run while it computes. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

#include "kernels.h"
#include "pack.h"
#include "pool.h"

#if defined(__x86_64__)
extern const isa_t isa_avx512, isa_avx2;
#endif
extern const isa_t isa_portable;

typedef struct {
    const isa_t *isa;
    pool_t *pool;
    float *scratch;
    int64_t scratch_floats;
} machine_t;

#define MACHINE "lorry.machine"

static const isa_t *supported(int number) {
    int found = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && found++ == number)
        return &isa_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && found++ == number) return &isa_avx2;
#endif
    return found == number ? &isa_portable : NULL;
}

static PyObject *isas(PyObject *self, PyObject *ignored) {
    (void)self, (void)ignored;
    PyObject *names = PyList_New(0);
    const isa_t *isa;
    for (int i = 0; names && (isa = supported(i)); i++) {
        PyObject *entry = Py_BuildValue("(si)", isa->name, isa->lanes);
        if (!entry || PyList_Append(names, entry)) Py_CLEAR(names);
        Py_XDECREF(entry);
    }
    return names;
}

static void release(PyObject *capsule) {
    machine_t *machine = PyCapsule_GetPointer(capsule, MACHINE);
    pool_stop(machine->pool);
    free(machine->scratch);
    free(machine);
}

static PyObject *start(PyObject *self, PyObject *args) {
    (void)self;
    int number, threads;
    if (!PyArg_ParseTuple(args, "ii", &number, &threads)) return NULL;
    const isa_t *isa = supported(number);
    if (!isa || threads < 1) return PyErr_Format(PyExc_ValueError, "no instruction set %d or no thread", number);
    machine_t *machine = calloc(1, sizeof *machine);
    if (!machine) return PyErr_NoMemory();
    machine->isa = isa;
    machine->pool = pool_start(threads);
    if (!machine->pool) {
        free(machine);
        return PyErr_Format(PyExc_OSError, "the system gave no %d threads to compute; lower --threads", threads);
    }
    PyObject *capsule = PyCapsule_New(machine, MACHINE, release);
    if (!capsule) {
        pool_stop(machine->pool);
        free(machine);
    }
    return capsule;
}

typedef union {
    int64_t whole;
    double real;
    void *at;
} value_t;

/* The machine, then `count` numbers or addresses. NULL: an exception is set. */
static machine_t *take(PyObject *const *args, Py_ssize_t given, Py_ssize_t count, value_t *values) {
    if (given != count + 1) {
        PyErr_Format(PyExc_TypeError, "%zd arguments expected, found %zd", count + 1, given);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyFloat_Check(args[i + 1])) values[i].real = PyFloat_AsDouble(args[i + 1]);
        else values[i].whole = PyLong_AsLongLong(args[i + 1]);
    }
    return PyErr_Occurred() ? NULL : PyCapsule_GetPointer(args[0], MACHINE);
}

static float *scratch(machine_t *machine, int64_t floats) {
    if (floats > machine->scratch_floats) {
        free(machine->scratch);
        machine->scratch = aligned_alloc(64, (size_t)((floats + 15) / 16 * 64));
        machine->scratch_floats = machine->scratch ? floats : 0;
    }
    return machine->scratch;
}

static PyObject *no_room(void) {
    PyErr_SetString(PyExc_MemoryError, "no memory for the rows of a step; lower --max-num-batched-tokens or --max-num-seqs");
    return NULL;
}

/* So much of packed rows stays in the cache next to the core while panels pass by. */
#define GROUP_BYTES (1 << 20)

static void run_product(machine_t *machine, product_t p) {
    const isa_t *isa = machine->isa;
    p.blocks = (p.rows + isa->tile_rows - 1) / isa->tile_rows;
    p.groups = (p.rows * p.inner * 4 + GROUP_BYTES - 1) / GROUP_BYTES;
    if (p.groups > p.blocks) p.groups = p.blocks;
    p.panel_count = (p.outer + 2 * isa->lanes - 1) / (2 * isa->lanes);
    pool_run(machine->pool, isa->pack_rows, &p, p.blocks);
    pool_run(machine->pool, isa->multiply, &p, p.groups * p.panel_count);
}

static void run_lowrank(machine_t *machine, lowrank_t p) {
    int threads = pool_threads(machine->pool);
    int64_t rows = 0, tasks = 0;
    for (int64_t i = 0; i < p.count; i++) rows += p.segments[i].stop - p.segments[i].start;
    p.rows_each = (rows + 2 * threads - 1) / (2 * threads);
    if (p.rows_each > LOWRANK_ROWS) p.rows_each = LOWRANK_ROWS;
    if (!rows) return;
    for (int64_t i = 0; i < p.count; i++)
        tasks += (p.segments[i].stop - p.segments[i].start + p.rows_each - 1) / p.rows_each;
    pool_run(machine->pool, machine->isa->lowrank, &p, tasks);
}

static PyObject *product(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    (void)self;
    value_t v[10];
    machine_t *machine = take(args, given, 10, v);
    if (!machine) return NULL;
    product_t p = {
        .x = v[0].at, .rows = v[1].whole, .inner = v[2].whole, .outer = v[3].whole, .form = v[4].at ? INPUT_NORM : INPUT_PLAIN,
        .norm = v[4].at, .eps = (float)v[5].real, .panels = v[6].at, .bf16 = (int)v[7].whole, .bias = v[8].at, .out = v[9].at,
    };
    p.packed = scratch(machine, 2 * p.rows * p.inner);
    if (!p.packed) return no_room();
    p.input = p.packed + p.rows * p.inner;
    Py_BEGIN_ALLOW_THREADS
    run_product(machine, p);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Where a step keeps what lies between two kernels. */
typedef struct {
    float *packed, *input, *wide, *mixed, *threads;
} space_t;

static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* 0: no memory. */
static int make_space(machine_t *machine, const model_t *model, const step_t *step, space_t *space) {
    int64_t q = model->heads * model->dim, widest = most(model->inner, most(q, model->hidden));
    int64_t wide = most(2 * model->inner, q + 2 * model->kv_heads * model->dim);
    int64_t own = most(machine->isa->attend_floats(CHUNK_ROWS * (model->heads / model->kv_heads), model->dim),
                       LOWRANK_ROWS * step->ranks_max);
    int64_t sizes[] = {step->rows * widest, step->rows * widest, step->rows * wide, step->rows * q,
                       own * pool_threads(machine->pool)};
    float **places[] = {&space->packed, &space->input, &space->wide, &space->mixed, &space->threads};
    int64_t all = 0;
    for (int i = 0; i < 5; i++) all += (sizes[i] + 15) / 16 * 16;
    float *at = scratch(machine, all);
    for (int i = 0; at && i < 5; at += (sizes[i++] + 15) / 16 * 16) *places[i] = at;
    return at != NULL;
}

typedef struct {
    machine_t *machine;
    const model_t *model;
    const step_t *step;
    float eps;
    space_t space;
} run_t;

static void times(const run_t *r, int form, const float *x, const float *norm, float *input, int64_t inner,
                  const matrix_t *matrix, const float *residual, float *out) {
    product_t p = {
        .x = x, .rows = r->step->rows, .inner = inner, .outer = matrix->outer, .form = form, .norm = norm, .eps = r->eps,
        .input = input, .packed = r->space.packed, .panels = matrix->panels, .bf16 = (int)matrix->bf16,
        .bias = matrix->bias, .residual = residual, .out = out,
    };
    run_product(r->machine, p);
}

static void adapt(const run_t *r, int64_t layer, int group, const float *x, int64_t inner, float *out, int64_t outer) {
    lowrank_t p = {
        .x = x, .inner = inner, .out = out, .outer = outer, .segments = r->step->segments,
        .count = r->step->segment_count, .entry = layer * GROUPS + group, .scratch = r->space.threads,
        .ranks_max = r->step->ranks_max,
    };
    if (p.count) run_lowrank(r->machine, p);
}

static void mix(const run_t *r, const layer_t *layer, int64_t index) {
    const model_t *m = r->model;
    const step_t *s = r->step;
    cache_t cache = {s->cache + index * s->layer_floats, s->block_size, m->kv_heads, m->dim};
    rotate_t turn = {
        .qkv = r->space.wide, .heads = m->heads, .norm = layer->qk_norm, .eps = r->eps, .cos = s->cos, .sin = s->sin,
        .positions = s->positions, .writes = s->writes, .cache = cache,
    };
    attend_t attend = {
        .qkv = r->space.wide, .heads = m->heads, .cache = cache, .tables = s->tables, .chunks = s->chunks,
        .out = r->space.mixed, .scratch = r->space.threads,
    };
    pool_run(r->machine->pool, r->machine->isa->rotate, &turn, s->rows);
    pool_run(r->machine->pool, r->machine->isa->attend, &attend, s->chunk_count * m->kv_heads);
}

static void run_layer(const run_t *r, int64_t index) {
    const model_t *m = r->model;
    const layer_t *layer = m->layers + index;
    const space_t *space = &r->space;
    float *x = r->step->x;
    int64_t q = m->heads * m->dim;
    times(r, INPUT_NORM, x, layer->input_norm, space->input, m->hidden, &layer->qkv, NULL, space->wide);
    adapt(r, index, GROUP_QKV, space->input, m->hidden, space->wide, layer->qkv.outer);
    mix(r, layer, index);
    times(r, INPUT_PLAIN, space->mixed, NULL, NULL, q, &layer->o, x, x);
    adapt(r, index, GROUP_OUT, space->mixed, q, x, m->hidden);
    times(r, INPUT_NORM, x, layer->post_norm, space->input, m->hidden, &layer->gate_up, NULL, space->wide);
    adapt(r, index, GROUP_GATE_UP, space->input, m->hidden, space->wide, layer->gate_up.outer);
    times(r, INPUT_GATE, space->wide, NULL, space->input, m->inner, &layer->down, x, x);
    adapt(r, index, GROUP_DOWN, space->input, m->inner, x, m->hidden);
}

static PyObject *forward(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    (void)self;
    value_t v[3];
    run_t run = {.machine = take(args, given, 3, v)};
    if (!run.machine) return NULL;
    run.model = v[0].at;
    run.eps = (float)v[1].real;
    run.step = v[2].at;
    if (!make_space(run.machine, run.model, run.step, &run.space)) return no_room();
    Py_BEGIN_ALLOW_THREADS
    for (int64_t index = 0; index < run.model->count; index++) run_layer(&run, index);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *pack_adapter(PyObject *self, PyObject *args) {
    (void)self;
    Py_buffer file;
    long long moves, count, buffer;
    if (!PyArg_ParseTuple(args, "y*LLL", &file, &moves, &count, &buffer)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    pack(file.buf, (const move_t *)(intptr_t)moves, count, (float *)(intptr_t)buffer);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&file);
    Py_RETURN_NONE;
}

static PyObject *are_finite(PyObject *self, PyObject *args) {
    (void)self;
    long long values, count;
    int found;
    if (!PyArg_ParseTuple(args, "LL", &values, &count)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    found = all_finite((const float *)(intptr_t)values, count);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(found);
}

static PyMethodDef methods[] = {
    {"isas", isas, METH_NOARGS, "(name, lanes) of each instruction set that this machine has, best first."},
    {"start", start, METH_VARARGS, "A machine: which instruction set, how many threads."},
    {"product", (PyCFunction)(void (*)(void))product, METH_FASTCALL,
     "machine, x, rows, inner, outer, norm or 0, eps, panels, bf16, bias or 0, out; see product_t."},
    {"forward", (PyCFunction)(void (*)(void))forward, METH_FASTCALL,
     "machine, model_t, eps, step_t: all layers of one step, in place on the step's x."},
    {"pack_adapter", pack_adapter, METH_VARARGS, "file, move_t, count, buffer: an adapter's matrices from file to buffer."},
    {"all_finite", are_finite, METH_VARARGS, "values, count: whether none of them is infinite or NaN."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "Kernels of the embedded engine.", -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
