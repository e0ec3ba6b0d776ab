/* Where the pool's sleeping threads wake up. All under the pool's lock for sleeping. */
#ifndef TG_SLEEPERS_H
#define TG_SLEEPERS_H
#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif
#include <stdbool.h>

typedef struct {
    pthread_t id;
    int cpu;                          /* where it sleeps, else -1 */
    bool moved;                       /* it was kept off its caller's CPU, and has to take back: */
#ifdef __linux__
    cpu_set_t affinity;
#endif
} tg_sleeper;

void tg_falls_asleep(tg_sleeper *self);
void tg_woke_up(tg_sleeper *self);    /* it may run everywhere again */
void tg_keep_off_callers_cpu(tg_sleeper *all, int count);

#endif
