/* A thread that has nothing to do looks for work for a few microseconds, which is as long as the gap between two
 * kernels of a step, and then sleeps in the kernel: the server's own process needs the core between steps.
 *
 * Each thread begins with a range of neighbouring tasks of its own, since neighbours use neighbouring memory, and takes from
 * the far end of another's range when its own is empty. When the system takes one core away, the other threads do the work
 * that is left; only a task begun there is waited for. */

#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#define LOOKS_BEFORE_SLEEP 2000
#define LOOKS_BEFORE_YIELD 200

typedef struct {
    pool_t *pool;
    pthread_t id;
    int number;
} member_t;

/* Tasks low .. high - 1, as high << 32 | low, so that both change at once; a cache line each. */
typedef struct {
    _Alignas(64) atomic_ullong tasks;
} range_t;

struct pool {
    int threads;
    member_t *members; /* [threads - 1] */
    task_fn *task;
    const void *work;
    range_t *ranges; /* [threads]; all empty between jobs */
    atomic_int busy;   /* members that look for tasks or do one */
    atomic_uint job;   /* number of the latest job */
    atomic_int sleepers;
    atomic_int stopping;
    pthread_mutex_t lock;
    pthread_cond_t wake;
};

static void breathe(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The next task of a range, from its low end or its high one; -1: it is empty. */
static int64_t take(range_t *range, int from_high) {
    unsigned long long tasks = atomic_load(&range->tasks);
    for (;;) {
        uint32_t low = (uint32_t)tasks, high = (uint32_t)(tasks >> 32);
        if (low >= high) return -1;
        int64_t task = from_high ? high - 1 : low;
        if (atomic_compare_exchange_weak(&range->tasks, &tasks, tasks + (from_high ? -(1ULL << 32) : 1))) return task;
    }
}

static void take_tasks(pool_t *pool, int thread) {
    for (int i = 0; i < pool->threads; i++) {
        range_t *range = pool->ranges + (thread + i) % pool->threads;
        int64_t task;
        while ((task = take(range, i > 0)) >= 0) pool->task(pool->work, task, thread);
    }
}

/* Until there is a job other than `seen`; returns its number. */
static unsigned wait_for_job(pool_t *pool, unsigned seen) {
    unsigned job;
    for (int look = 0; look < LOOKS_BEFORE_SLEEP; look++) {
        if ((job = atomic_load(&pool->job)) != seen) return job;
        breathe();
    }
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add(&pool->sleepers, 1);
    while ((job = atomic_load(&pool->job)) == seen) pthread_cond_wait(&pool->wake, &pool->lock);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->lock);
    return job;
}

static void *live(void *argument) {
    member_t *self = argument;
    pool_t *pool = self->pool;
    unsigned seen = 0;
    for (;;) {
        seen = wait_for_job(pool, seen);
        if (atomic_load(&pool->stopping)) return NULL;
        /* Counted before it takes a task: whoever waits for the job's end then sees it. */
        atomic_fetch_add(&pool->busy, 1);
        take_tasks(pool, self->number);
        atomic_fetch_sub(&pool->busy, 1);
    }
}

static void publish(pool_t *pool) {
    atomic_fetch_add(&pool->job, 1);
    /* A member that is about to sleep holds the lock from its count on, so it either is counted here or sees the
     * new job before it waits. */
    if (atomic_load(&pool->sleepers)) {
        pthread_mutex_lock(&pool->lock);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->lock);
    }
}

pool_t *pool_start(int threads) {
    pool_t *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    pool->members = calloc((size_t)threads, sizeof *pool->members);
    pool->ranges = aligned_alloc(_Alignof(range_t), (size_t)threads * sizeof *pool->ranges);
    int room = pool->members && pool->ranges;
    for (int i = 0; room && i < threads; i++) atomic_init(&pool->ranges[i].tasks, 0);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->threads = 1;
    for (int i = 0; room && i < threads - 1; i++) {
        pool->members[i] = (member_t){.pool = pool, .number = i + 1};
        if (pthread_create(&pool->members[i].id, NULL, live, &pool->members[i])) break;
        pool->threads++;
    }
    if (room && pool->threads == threads) return pool;
    pool_stop(pool);
    return NULL;
}

void pool_stop(pool_t *pool) {
    atomic_store(&pool->stopping, 1);
    publish(pool);
    for (int i = 0; i < pool->threads - 1; i++) pthread_join(pool->members[i].id, NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->lock);
    free(pool->ranges);
    free(pool->members);
    free(pool);
}

int pool_threads(const pool_t *pool) { return pool->threads; }

void pool_run(pool_t *pool, task_fn *task, const void *work, int64_t count) {
    if (pool->threads == 1 || count < 2) {
        for (int64_t i = 0; i < count; i++) task(work, i, 0);
        return;
    }
    pool->task = task;
    pool->work = work;
    /* A member that comes late from the job before may begin as soon as its range is there: all else is written. */
    for (int64_t i = 0, n = pool->threads; i < n; i++) {
        unsigned long long low = (unsigned long long)(i * count / n), high = (unsigned long long)((i + 1) * count / n);
        atomic_store(&pool->ranges[i].tasks, high << 32 | low);
    }
    publish(pool);
    take_tasks(pool, 0);
    for (int look = 0; atomic_load(&pool->busy); look++) {
        if (look < LOOKS_BEFORE_YIELD) breathe();
        else sched_yield();
    }
}
