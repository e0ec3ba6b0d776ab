/* The thread pool, and the launcher that kernels call for their parallel loop (TVM's T.parallel).
 *
 * One pool per process. The caller works too, so `threads` means caller + workers. A caller that finds the
 * pool at work, or that is itself inside a task, runs all its tasks alone: the number of tasks, and so the
 * partition of the product, comes from the plan and never from how many threads happen to be free.
 *
 * A job is claimed task by task by counting `unclaimed` down. A successful claim keeps the job alive until
 * that task is counted in `done`, so nobody reads a job's fields without a claim on it, and a late worker
 * does no harm. */
#ifdef __linux__
#define _GNU_SOURCE                   /* pthread_setname_np, and what sleepers.h needs */
#endif
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include "native.h"
#include "fpstate.h"
#include "sleepers.h"

#define MAX_THREADS 512
#define SPIN_NS 100000                /* then sleep. The loops of one product, and of most next ones, follow sooner */
#define SPINS_PER_CLOCK 64            /* looks at the state between two looks at the clock */

static struct {
    pthread_mutex_t busy;             /* held by the caller whose job runs, and while the pool is resized */
    pthread_mutex_t lock;             /* for sleeping only */
    pthread_cond_t wake, finished;
    atomic_int threads;               /* wanted, caller included */
    int workers;                      /* running; under `busy` */
    bool short_of_threads;            /* the system refused one: don't ask at every launch */
    tg_sleeper worker[MAX_THREADS];   /* all but its id under `lock` */
    /* the job: written under `busy` before `unclaimed` makes it visible */
    tg_task_fn task;
    void *closure;
    tg_parallel_env env;
    tg_fp_mode mode;
    _Alignas(TG_CACHE_LINE) atomic_int unclaimed;
    _Alignas(TG_CACHE_LINE) atomic_int done;
    atomic_int result, fp_flags, caller_sleeps;
    _Alignas(TG_CACHE_LINE) atomic_int sleepers;
    atomic_int stop;
    int64_t alone_until;              /* when a caller last finished a light product alone; under `busy` */
} pool = {
    .busy = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER, .finished = PTHREAD_COND_INITIALIZER, .threads = 1,
};

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Waits until `ready()`, briefly, awake. False: not yet. */
static inline __attribute__((always_inline)) bool spin_until(bool (*ready)(void))
{
    int64_t end = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < SPINS_PER_CLOCK; i++) {
            if (ready())
                return true;
            relax();
        }
    } while (now_ns() < end);
    return false;
}

/* The number of tasks that were unclaimed, of which the last is now ours; 0: there is none. */
static int claim(void)
{
    int left = atomic_load_explicit(&pool.unclaimed, memory_order_acquire);
    while (left > 0
           && !atomic_compare_exchange_weak_explicit(&pool.unclaimed, &left, left - 1, memory_order_acq_rel,
                                                     memory_order_acquire))
        ;
    return left > 0 ? left : 0;
}

static void run_claimed(int left)
{
    int tasks = pool.env.num_task;    /* read before `done`: after it the job may be gone */
    tg_parallel_env env = pool.env;
    int result = pool.task(tasks - left, &env, pool.closure);
    if (result)
        atomic_store_explicit(&pool.result, result, memory_order_relaxed);
}

/* seq_cst against `caller_sleeps`: either this thread sees the sleeping caller or the caller sees the last
 * task. */
static void count_done(int tasks)
{
    if (atomic_fetch_add(&pool.done, 1) + 1 < tasks || !atomic_load(&pool.caller_sleeps))
        return;
    pthread_mutex_lock(&pool.lock);
    pthread_cond_signal(&pool.finished);
    pthread_mutex_unlock(&pool.lock);
}

static bool work_or_stop(void)
{
    return atomic_load_explicit(&pool.unclaimed, memory_order_acquire) > 0
        || atomic_load_explicit(&pool.stop, memory_order_acquire);
}

static void wait_for_work(int self)
{
    if (spin_until(work_or_stop))
        return;
    pthread_mutex_lock(&pool.lock);
    tg_falls_asleep(&pool.worker[self]);
    atomic_fetch_add(&pool.sleepers, 1);   /* seq_cst against `unclaimed`: see launch_on_pool */
    if (atomic_load(&pool.unclaimed) <= 0 && !atomic_load(&pool.stop))
        pthread_cond_wait(&pool.wake, &pool.lock);  /* not again if it comes too late: the next job is near */
    atomic_fetch_sub(&pool.sleepers, 1);
    tg_woke_up(&pool.worker[self]);
    pthread_mutex_unlock(&pool.lock);
}

static void *worker(void *number)
{
    int self = (int)(intptr_t)number;
#ifdef __linux__
    pthread_setname_np(pthread_self(), "tvmgemm");
#endif
    tg_self.in_task = 1;
    while (!atomic_load_explicit(&pool.stop, memory_order_acquire)) {
        int left = claim();
        if (!left) {
            wait_for_work(self);
            continue;
        }
        int tasks = pool.env.num_task;
        tg_fp_adopt(pool.mode);       /* the caller's rounding and flushing; no flags set */
        run_claimed(left);
        int flags = tg_fp_flags();
        if (flags)
            atomic_fetch_or_explicit(&pool.fp_flags, flags, memory_order_relaxed);
        count_done(tasks);
    }
    return NULL;
}

/* Under `busy`. The system may refuse threads: then there are fewer workers. */
static void start_workers(int wanted)
{
    /* Signals belong to the program's own threads, but for those that an instruction raises: blocked, they would end the
     * process without a word from handlers such as Python's faulthandler. */
    static const int OF_INSTRUCTIONS[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP };
    sigset_t others, before;
    sigfillset(&others);
    for (size_t i = 0; i < sizeof OF_INSTRUCTIONS / sizeof *OF_INSTRUCTIONS; i++)
        sigdelset(&others, OF_INSTRUCTIONS[i]);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    while (pool.workers < wanted) {
        pool.worker[pool.workers].cpu = -1;
        pool.worker[pool.workers].moved = false;
        if (pthread_create(&pool.worker[pool.workers].id, NULL, worker, (void *)(intptr_t)pool.workers) != 0) {
            pool.short_of_threads = true;
            break;
        }
        pool.workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Under `busy`, so that no job runs. */
static void stop_workers(void)
{
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.stop, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    while (pool.workers > 0)
        pthread_join(pool.worker[--pool.workers].id, NULL);
    atomic_store(&pool.stop, 0);
    pool.short_of_threads = false;
}

static int run_serially(tg_task_fn task, void *closure, int tasks)
{
    tg_parallel_env env = { NULL, tasks };
    int result = 0;
    for (int i = 0; i < tasks && !result; i++)
        result = task(i, &env, closure);
    return result;
}

static void wake_workers(int wanted)
{
    int sleepers = atomic_load(&pool.sleepers);
    if (!sleepers)
        return;
    pthread_mutex_lock(&pool.lock);       /* whoever counted itself as asleep waits by now */
    tg_keep_off_callers_cpu(pool.worker, pool.workers);
    pthread_mutex_unlock(&pool.lock);     /* before they wake, or they would wait for it */
    if (wanted >= sleepers)
        pthread_cond_broadcast(&pool.wake);
    else
        while (wanted-- > 0)
            pthread_cond_signal(&pool.wake);
}

static bool all_done(void)
{
    return atomic_load_explicit(&pool.done, memory_order_acquire) == pool.env.num_task;
}

static void wait_for_tasks(void)
{
    if (spin_until(all_done))
        return;
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.caller_sleeps, 1);
    while (atomic_load(&pool.done) < pool.env.num_task)
        pthread_cond_wait(&pool.finished, &pool.lock);
    atomic_store(&pool.caller_sleeps, 0);
    pthread_mutex_unlock(&pool.lock);
}

/* Under `busy`, with at least one worker. */
static int launch_on_pool(tg_task_fn task, void *closure, int tasks)
{
    pool.task = task;
    pool.closure = closure;
    pool.env = (tg_parallel_env){ NULL, tasks };
    pool.mode = tg_fp_current_mode();
    atomic_store_explicit(&pool.done, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.result, 0, memory_order_relaxed);
    atomic_store_explicit(&pool.fp_flags, 0, memory_order_relaxed);
    atomic_store(&pool.unclaimed, tasks);   /* seq_cst: a worker going to sleep sees it, or we see that */
    wake_workers(tasks - 1);
    for (int left; (left = claim()); ) {
        run_claimed(left);
        atomic_fetch_add_explicit(&pool.done, 1, memory_order_relaxed);
    }
    wait_for_tasks();
    tg_fp_raise(atomic_load_explicit(&pool.fp_flags, memory_order_relaxed));
    return atomic_load_explicit(&pool.result, memory_order_relaxed);
}

/* Under `busy`: whether workers that sleep are to be woken for this product. Waking one costs its caller 15 us
 * (measured on a virtual machine), so light products do without, unless they come in quick succession: then the
 * first of them pays for all. */
static bool worth_waking(tg_thread *self)
{
    if (self->light == TG_LIGHT_UNDECIDED)
        self->light = now_ns() - pool.alone_until < SPIN_NS ? TG_LIGHT_NO : TG_LIGHT_ALONE;
    return self->light == TG_LIGHT_NO;
}

/* Under `busy`, with more than one task and thread. */
static int share_out(tg_thread *self, tg_task_fn task, void *closure, int tasks, int threads)
{
    bool asleep = pool.workers == 0 || atomic_load_explicit(&pool.sleepers, memory_order_relaxed) > 0;
    if (asleep && !worth_waking(self)) {
        int result = run_serially(task, closure, tasks);
        pool.alone_until = now_ns();
        return result;
    }
    if (pool.workers < threads - 1 && !pool.short_of_threads)
        start_workers(threads - 1);
    return pool.workers ? launch_on_pool(task, closure, tasks) : run_serially(task, closure, tasks);
}

/* TVM gives num_task = 0: as many as the runtime likes. Here the plan of the current call says how many. */
int tg_launch(tg_task_fn task, void *closure, int num_task)
{
    tg_thread *self = &tg_self;
    if (self->in_task)                /* nested: one task, on whichever thread it is */
        return run_serially(task, closure, 1);
    int tasks = self->tasks > 0 ? (int)self->tasks : num_task > 0 ? num_task : 1;
    int threads = atomic_load_explicit(&pool.threads, memory_order_relaxed);
    int result;
    self->in_task = 1;
    if (tasks == 1 || threads == 1 || pthread_mutex_trylock(&pool.busy) != 0) {
        result = run_serially(task, closure, tasks);
    } else {
        result = share_out(self, task, closure, tasks, threads);
        pthread_mutex_unlock(&pool.busy);
    }
    self->in_task = 0;
    return result;
}

void tg_pool_set_threads(int threads)
{
    threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    pthread_mutex_lock(&pool.busy);
    if (threads - 1 < pool.workers)
        stop_workers();
    pool.short_of_threads = false;
    atomic_store(&pool.threads, threads);
    pthread_mutex_unlock(&pool.busy);
}

int tg_pool_threads(void)
{
    return atomic_load(&pool.threads);
}

/* After fork the child has no workers, and a job of another thread of the parent may be half done: start
 * anew. */
static void forget_workers(void)
{
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.finished, NULL);
    pool.workers = 0;
    pool.short_of_threads = false;
    pool.alone_until = 0;
    atomic_store(&pool.unclaimed, 0);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.caller_sleeps, 0);
    atomic_store(&pool.stop, 0);
}

__attribute__((constructor)) static void survive_fork(void)
{
    pthread_atfork(NULL, NULL, forget_workers);
}
