/* The dispatch table: from a problem to the plan that serves it, without a lock and without Python.
 *
 * For each dtype and operation it is an array of pointers to interned plans. A reader scans it from the
 * slot that served it last, then from the start to the first NULL. A removed plan leaves a tombstone that
 * matches nothing, so that a reader never misses a plan that stays. When the array is full, a new plan
 * takes the place of the oldest. Where the boxes of two plans overlap, either may serve. Interned plans are
 * never freed; equal ones are one.
 *
 * Plans for exactly one small shape are not in that array but at their shape, where a reader looks first:
 * there may be thousands, and no box has to be cut around them. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include "native.h"

#define SLOTS 256
#define BUCKETS 256
#define ANY (-1)

/* What there is of one small shape of a dtype, for matmul: its exact plans (of short and of long stacks), and how
 * many products other plans have served. */
typedef struct {
    _Atomic(tg_entry *) plan[2];
    _Atomic int64_t served;
} shape;
#define SHAPES (TG_SMALL * TG_SMALL * TG_SMALL)

typedef struct {
    _Atomic(tg_entry *) slot[SLOTS];
    int oldest;                       /* where a full table is overwritten next; under the lock */
} table;

static table tables[TG_NDTYPES][TG_NOPS];
static _Atomic(shape *) shapes[TG_NDTYPES];   /* SHAPES each, made when the first is needed, never freed */
static tg_entry *interned[BUCKETS];   /* under the lock */
static tg_entry *of_dtype[TG_NDTYPES];/* the same */
static tg_entry tombstone = { .plan = { .m_lo = 1, .m_hi = 0 } };
static _Atomic int64_t declined[TG_NDTYPES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* A fork while another thread publishes must not leave the child with a locked, half-written table. */
static void lock_plans(void) { pthread_mutex_lock(&lock); }
static void unlock_plans(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void survive_fork(void)
{
    pthread_atfork(lock_plans, unlock_plans, unlock_plans);
}

static inline uint32_t packed_layouts(int32_t a, int32_t b, int32_t c, int32_t symmetric, int32_t blas)
{
    return (uint32_t)(a & 255) | (uint32_t)(b & 255) << 8 | (uint32_t)(c & 255) << 16
        | (uint32_t)(symmetric & 15) << 24
        | (uint32_t)(blas & 15) << 28;
}

/* As floating-point numbers: they may be beyond 2**63. */
typedef struct {
    double mn, kn, work;
} products;

static inline bool serves(const tg_entry *entry, const tg_problem *p, uint32_t layouts, const products *of)
{
    const tg_plan *plan = &entry->plan;
    return (layouts & entry->layout_mask) == entry->layout_value
        && p->m >= plan->m_lo && p->m <= plan->m_hi && p->n >= plan->n_lo && p->n <= plan->n_hi
        && p->k >= plan->k_lo && p->k <= plan->k_hi
        && p->batch >= plan->batch_lo && p->batch <= plan->batch_hi
        && of->work >= plan->work_lo && of->work <= plan->work_hi
        && of->mn >= plan->mn_lo && of->mn <= plan->mn_hi && of->kn >= plan->kn_lo && of->kn <= plan->kn_hi;
}

static inline shape *shape_of(int dtype, int64_t m, int64_t n, int64_t k)
{
    shape *all = atomic_load_explicit(&shapes[dtype], memory_order_acquire);
    return all ? &all[((m - 1) * TG_SMALL + n - 1) * TG_SMALL + k - 1] : NULL;
}

static inline tg_entry *find_exact(const tg_problem *p, uint32_t layouts, const products *of)
{
    shape *here = shape_of(p->dtype, p->m, p->n, p->k);
    for (int i = 0; here && i < 2; i++) {
        tg_entry *entry = atomic_load_explicit(&here->plan[i], memory_order_acquire);
        if (entry && serves(entry, p, layouts, of))
            return entry;
    }
    return NULL;
}

/* Several threads may lose counts of each other, but never all: the next one passes the mark then. */
bool tg_turns_hot(const tg_plan *plan, const tg_problem *p)
{
    shape *here = shape_of(p->dtype, p->m, p->n, p->k);
    if (!here)
        return false;
    int64_t before = atomic_load_explicit(&here->served, memory_order_relaxed), after = before + p->batch;
    atomic_store_explicit(&here->served, after, memory_order_relaxed);
    return before < plan->hot_at && after >= plan->hot_at;
}

tg_entry *tg_find(tg_thread *self, const tg_problem *p)
{
    table *t = &tables[p->dtype][p->op];
    uint8_t *hint = &self->hint[p->dtype][p->op];
    uint32_t layouts = packed_layouts(p->a_layout, p->b_layout, p->c_layout, p->symmetric, p->blas);
    double n = (double)p->n, mn = (double)p->m * n;
    const products of = { mn, (double)p->k * n, mn * (double)p->k };
    tg_entry *entry;
    if (tg_small(p) && p->op == TG_MATMUL && (entry = find_exact(p, layouts, &of)))
        return entry;
    entry = atomic_load_explicit(&t->slot[*hint], memory_order_acquire);
    if (TG_LIKELY(entry && serves(entry, p, layouts, &of)))
        return entry;
    for (int i = 0; i < SLOTS; i++) {
        entry = atomic_load_explicit(&t->slot[i], memory_order_acquire);
        if (!entry)
            break;
        if (serves(entry, p, layouts, &of)) {
            *hint = (uint8_t)i;
            return entry;
        }
    }
    return NULL;
}

static uint32_t hash_of(const tg_plan *plan)
{
    uint32_t hash = 2166136261u;      /* FNV-1a */
    const unsigned char *byte = (const unsigned char *)plan;
    for (size_t i = 0; i < sizeof *plan; i++)
        hash = (hash ^ byte[i]) * 16777619u;
    return hash;
}

_Static_assert(sizeof(tg_plan) == 8 * 4 + 8 * 8 + 6 * 8 + 8 + 7 * 8,
               "tg_plan has padding: it can't be compared as bytes");

static tg_entry *intern(const tg_plan *plan)
{
    tg_entry **bucket = &interned[hash_of(plan) % BUCKETS];
    for (tg_entry *entry = *bucket; entry; entry = entry->next)
        if (memcmp(&entry->plan, plan, sizeof *plan) == 0)
            return entry;
    void *memory;
    if (posix_memalign(&memory, _Alignof(tg_entry), sizeof(tg_entry)) != 0)
        return NULL;
    tg_entry *entry = memory;
    memset(entry, 0, sizeof *entry);
    entry->plan = *plan;
    entry->layout_mask = packed_layouts(plan->a_layout == ANY ? 0 : 255, plan->b_layout == ANY ? 0 : 255,
                                        plan->c_layout == ANY ? 0 : 255, plan->symmetric == ANY ? 0 : 255,
                                        plan->blas == ANY ? 0 : 255);
    entry->layout_value = entry->layout_mask
        & packed_layouts(plan->a_layout, plan->b_layout, plan->c_layout, plan->symmetric, plan->blas);
    entry->next = *bucket;
    entry->next_of_dtype = of_dtype[plan->dtype];
    of_dtype[plan->dtype] = entry;
    if (plan->kernel) {
        entry->next_of_kernel = plan->kernel->plans;
        plan->kernel->plans = entry;
    }
    return *bucket = entry;
}

static int place(table *t, tg_entry *entry)
{
    int free_slot = -1;
    for (int i = 0; i < SLOTS; i++) {
        tg_entry *there = atomic_load_explicit(&t->slot[i], memory_order_relaxed);
        if (there == entry)
            return -1;                /* published already */
        if (free_slot < 0 && (!there || there == &tombstone))
            free_slot = i;
        if (!there)
            break;
    }
    if (free_slot < 0) {
        free_slot = t->oldest;
        t->oldest = (t->oldest + 1) % SLOTS;
    }
    return free_slot;
}

/* The small shapes of a dtype, made now if they are not there; under the lock. */
static bool make_shapes(int dtype)
{
    if (!atomic_load_explicit(&shapes[dtype], memory_order_relaxed))
        atomic_store_explicit(&shapes[dtype], calloc(SHAPES, sizeof(shape)), memory_order_release);
    return atomic_load_explicit(&shapes[dtype], memory_order_relaxed);
}

static bool is_small(int64_t m, int64_t n, int64_t k)
{
    const tg_problem p = { .m = m, .n = n, .k = k };
    return tg_small(&p);
}

/* One of the two: an equal one's place, an empty one, or else the second. */
static void put_exact(tg_entry *entry)
{
    shape *here = shape_of(entry->plan.dtype, entry->plan.m_lo, entry->plan.n_lo, entry->plan.k_lo);
    tg_entry *first = atomic_load_explicit(&here->plan[0], memory_order_relaxed);
    atomic_store_explicit(&here->plan[first && first != entry], entry, memory_order_release);
}

int tg_publish(const tg_plan *plan)
{
    if (plan->dtype < 0 || plan->dtype >= TG_NDTYPES || plan->op < 0 || plan->op >= TG_NOPS
        || (plan->exact && (plan->op != TG_MATMUL || !is_small(plan->m_lo, plan->n_lo, plan->k_lo))))
        return -1;
    lock_plans();
    tg_entry *entry = (!plan->exact && !plan->hot_at) || make_shapes(plan->dtype) ? intern(plan) : NULL;
    if (entry && plan->exact) {
        put_exact(entry);
    } else if (entry) {
        table *t = &tables[plan->dtype][plan->op];
        int i = place(t, entry);
        if (i >= 0)
            atomic_store_explicit(&t->slot[i], entry, memory_order_release);
    }
    unlock_plans();
    return entry ? 0 : -1;
}

/* Slots before the first NULL. Under the lock; most tables are empty. */
static int used(table *t)
{
    int i = 0;
    while (i < SLOTS && atomic_load_explicit(&t->slot[i], memory_order_relaxed))
        i++;
    return i;
}

void tg_unpublish(int64_t id)
{
    lock_plans();
    for (table *t = &tables[0][0]; t < &tables[0][0] + TG_NDTYPES * TG_NOPS; t++)
        for (int i = 0; i < used(t); i++) {
            tg_entry *entry = atomic_load_explicit(&t->slot[i], memory_order_relaxed);
            if (entry != &tombstone && entry->plan.id == id)
                atomic_store_explicit(&t->slot[i], &tombstone, memory_order_release);
        }
    unlock_plans();
}

int tg_set_served(int dtype, int64_t m, int64_t n, int64_t k, int64_t served)
{
    if (dtype < 0 || dtype >= TG_NDTYPES || !is_small(m, n, k))
        return -1;
    lock_plans();
    bool there = make_shapes(dtype);
    if (there)
        atomic_store_explicit(&shape_of(dtype, m, n, k)->served, served, memory_order_relaxed);
    unlock_plans();
    return there ? 0 : -1;
}

static void clear_shapes(shape *all)
{
    for (int i = 0; all && i < SHAPES; i++) {
        atomic_store_explicit(&all[i].served, 0, memory_order_relaxed);
        for (int j = 0; j < 2; j++)
            atomic_store_explicit(&all[i].plan[j], NULL, memory_order_release);
    }
}

void tg_clear_plans(void)
{
    lock_plans();
    for (int d = 0; d < TG_NDTYPES; d++)
        clear_shapes(atomic_load_explicit(&shapes[d], memory_order_relaxed));
    for (table *t = &tables[0][0]; t < &tables[0][0] + TG_NDTYPES * TG_NOPS; t++) {
        t->oldest = 0;
        for (int i = used(t) - 1; i >= 0; i--)      /* from the end: what is left is a table */
            atomic_store_explicit(&t->slot[i], NULL, memory_order_release);
    }
    unlock_plans();
}

int64_t tg_lookup(const tg_problem *problem)
{
    if (problem->dtype < 0 || problem->dtype >= TG_NDTYPES || problem->op < 0 || problem->op >= TG_NOPS)
        return -1;
    tg_entry *entry = tg_find(&tg_self, problem);
    return entry ? entry->plan.id : -1;
}

/* Counters: one per interned plan, so that a served call pays for one atomic addition. */
static int64_t calls_of(const tg_entry *entry)
{
    return atomic_load_explicit(&entry->calls, memory_order_relaxed);
}

int64_t tg_kernel_calls(const tg_kernel *kernel)
{
    int64_t sum = 0;
    lock_plans();
    for (const tg_entry *entry = kernel ? kernel->plans : NULL; entry; entry = entry->next_of_kernel)
        sum += calls_of(entry);
    unlock_plans();
    return sum;
}

int64_t tg_served(int dtype)
{
    int64_t sum = 0;
    lock_plans();
    for (const tg_entry *entry = dtype >= 0 && dtype < TG_NDTYPES ? of_dtype[dtype] : NULL; entry; entry = entry->next_of_dtype)
        sum += calls_of(entry);
    unlock_plans();
    return sum;
}

void tg_count_declined(int dtype)
{
    atomic_fetch_add_explicit(&declined[dtype], 1, memory_order_relaxed);
}

int64_t tg_declined(int dtype)
{
    if (dtype < 0 || dtype >= TG_NDTYPES)
        return 0;
    return atomic_load_explicit(&declined[dtype], memory_order_relaxed);
}

void tg_reset_counters(void)
{
    lock_plans();
    for (int i = 0; i < BUCKETS; i++)
        for (tg_entry *entry = interned[i]; entry; entry = entry->next)
            atomic_store_explicit(&entry->calls, 0, memory_order_relaxed);
    for (int d = 0; d < TG_NDTYPES; d++)
        atomic_store_explicit(&declined[d], 0, memory_order_relaxed);
    unlock_plans();
}
