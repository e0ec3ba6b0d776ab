/* Linux wakes a thread where it fell asleep or where its waker is. If that is its caller's CPU, it waits there until the
 * scheduler parts them, for milliseconds or longer (measured: products at half speed while another CPU was idle). A
 * sleeper that may not run there wakes elsewhere at once. */
#ifdef __linux__
#define _GNU_SOURCE                   /* sched_getcpu, cpu_set_t */
#endif
#include "sleepers.h"

/* In a larger pool few are woken on one CPU, and asking for the affinity of all would take long. */
#define FEW 7

static int current_cpu(void)
{
#ifdef __linux__
    return sched_getcpu();
#else
    return -1;
#endif
}

void tg_falls_asleep(tg_sleeper *self)
{
    self->cpu = current_cpu();
}

void tg_woke_up(tg_sleeper *self)
{
    self->cpu = -1;
#ifdef __linux__
    if (self->moved)
        pthread_setaffinity_np(pthread_self(), sizeof self->affinity, &self->affinity);
#endif
    self->moved = false;
}

void tg_keep_off_callers_cpu(tg_sleeper *all, int count)
{
#ifdef __linux__
    int cpu = current_cpu();
    for (tg_sleeper *x = all; x < all + count && cpu >= 0; x++) {
        if (x->cpu < 0 || (count > FEW && x->cpu != cpu && !x->moved))
            continue;
        if (!x->moved && pthread_getaffinity_np(x->id, sizeof x->affinity, &x->affinity) != 0)
            continue;
        cpu_set_t others = x->affinity;
        CPU_CLR(cpu, &others);
        if (CPU_COUNT(&others) && pthread_setaffinity_np(x->id, sizeof others, &others) == 0)
            x->moved = true;
    }
#else
    (void)all, (void)count;
#endif
}
