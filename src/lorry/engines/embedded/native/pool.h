/* A few threads that share out the tasks of one job at a time. */
#ifndef LORRY_POOL_H
#define LORRY_POOL_H

#include "kernels.h"

typedef struct pool pool_t;

/* NULL: no memory or no more threads. The caller's thread is one of `threads`. */
pool_t *pool_start(int threads);
/* Ends the threads and waits for them. */
void pool_stop(pool_t *pool);
int pool_threads(const pool_t *pool);
/* Does tasks 0 .. count - 1 of `work`, each once, in any order; returns when all are done. One caller at a time. */
void pool_run(pool_t *pool, task_fn *task, const void *work, int64_t count);

#endif
