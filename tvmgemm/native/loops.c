/* The inner loops: from NumPy's pointers and byte strides to a kernel, for a batch of products.
 *
 * A loop canonicalises its problem, finds the plan, and runs the plan's kernel, which loops over the batch. On a miss it
 * asks Python once (tg_miss). Whatever can't be served goes to NumPy's own loop with the same arguments. */
#include <fenv.h>
#include <stdatomic.h>
#include <string.h>
#include "native.h"

_Thread_local tg_thread tg_self TG_TLS;

#define ALWAYS_INLINE static inline __attribute__((always_inline))

typedef struct {
    const char *base;
    int64_t step, rs, cs;             /* to the next of the batch, row and column stride: in elements */
} operand;

/* A stack of which each matrix of A meets the same B is one product of more rows, if the rows of A and C go on from
 * matrix to matrix in even steps; likewise one A and a B and C whose columns go on. */
ALWAYS_INLINE void join_stack(tg_problem *p, operand *a, operand *b, operand *c)
{
    if (p->m == 1) {                  /* the next row is the next matrix's */
        a->rs = a->step;
        c->rs = c->step;
    }
    if (p->n == 1) {
        b->cs = b->step;
        c->cs = c->step;
    }
    if (b->step == 0 && a->step == p->m * a->rs && c->step == p->m * c->rs) {
        p->m *= p->batch;
        p->batch = 1;
    } else if (a->step == 0 && b->step == p->n * b->cs && c->step == p->n * c->cs) {
        p->n *= p->batch;
        p->batch = 1;
    }
}

/* The stride along a dimension of size 1 or 0 is never used, and NumPy gives anything for it: choose the one
 * that makes the operand contiguous. */
ALWAYS_INLINE void settle_unit_dimensions(operand *x, int64_t rows, int64_t cols)
{
    if (cols <= 1 || rows == 0)
        x->cs = 1;
    if (rows <= 1)
        x->rs = x->cs == 1 ? cols : 1;
}

ALWAYS_INLINE int32_t layout_of(const operand *x)
{
    return x->cs == 1 ? TG_ROW : x->rs == 1 ? TG_COL : TG_STRIDED;
}

/* A vector as the result can be computed either way round. As a row it needs a matrix of contiguous rows, and is then
 * made of whole vectors; as a column it takes any matrix in place. */
ALWAYS_INLINE bool better_transposed(const tg_problem *p, const operand *a, const operand *b, const operand *c)
{
    if (p->m == 1)
        return p->n > 1 && b->cs != 1;
    return p->n == 1 && a->cs != 1 && a->rs == 1 && c->rs == 1;
}

/* Few rows times a large B whose columns are contiguous: packing it would take longer than all products with it, and with
 * resident B each row would be collected from as many lines of cache as it has elements. As C^T = B^T.A^T it is the operand of
 * many rows, which are read in place, if a column is long enough (512 bytes). C^T has gaps, but is small. */
ALWAYS_INLINE bool few_rows_of_columns(const tg_problem *p, const operand *b, const operand *c)
{
    return p->dtype <= TG_FLOAT64 && p->m > 1 && p->m <= 16 && p->n >= 64 && p->k >= (p->dtype == TG_FLOAT64 ? 64 : 128)
        && b->rs == 1 && b->cs != 1 && c->cs == 1;
}

/* A matrix that BLAS takes: no reversed or repeated rows, no gaps between columns, or the same the other way round. */
ALWAYS_INLINE bool is_blas_matrix(const operand *x, int64_t rows, int64_t cols)
{
    return (x->cs == 1 && x->rs >= cols) || (x->rs == 1 && x->cs >= rows);
}

/* Whether NumPy gives a matrix-vector product to BLAS (gemv, which takes no reversed vector either), or a product of two
 * vectors. Elsewhere it runs a plain loop. */
ALWAYS_INLINE bool is_gemv(const tg_problem *p, const operand *a, const operand *b)
{
    if ((p->m != 1) == (p->n != 1))
        return p->m == 1;
    const operand *matrix = p->n == 1 ? a : b;
    const int64_t rows = p->n == 1 ? p->m : p->k, cols = p->n == 1 ? p->k : p->n;
    return p->k > 1 && (p->n == 1 ? b->rs : a->cs) >= 1 && is_blas_matrix(matrix, rows, cols);
}

/* Whether it is one of matrices, for which OpenBLAS has kernels of their own on AVX-512: of so few multiply-adds, but enough for
 * the planner to ask. */
ALWAYS_INLINE bool is_small_gemm(const tg_problem *p, const operand *a, const operand *b)
{
    if (p->dtype > TG_FLOAT64 || p->m <= 1 || p->n <= 1)
        return false;
    double work = (double)p->m * (double)p->n * (double)p->k;
    return work > TG_SMALL_GEMM_LO && work <= TG_SMALL_GEMM_HI && is_blas_matrix(a, p->m, p->k) && is_blas_matrix(b, p->k, p->n);
}

/* What there is to know of the elements of a dtype, see TG_DTYPES. */
typedef struct { int a_shift, b_shift, c_shift; bool same_inputs; } elements;
static const elements ELEMENTS[TG_NDTYPES] = {
#define ROW(id, a, b, c, same) [id] = { a, b, c, same },
    TG_DTYPES(ROW)
#undef ROW
};

/* Fills the problem and the operands. False: a stride is not a multiple of the item size. */
ALWAYS_INLINE bool canonicalise(char **args, const intptr_t *dims, const intptr_t *steps, elements e,
                                tg_problem *p, operand *a, operand *b, operand *c)
{
    intptr_t in_a = steps[TG_STEP_RSA] | steps[TG_STEP_CSA], in_b = steps[TG_STEP_RSB] | steps[TG_STEP_CSB],
             in_c = steps[TG_STEP_RSC] | steps[TG_STEP_CSC];
    p->batch = dims[TG_DIM_BATCH];
    if (p->batch > 1) {               /* of a single product the steps may be anything */
        in_a |= steps[TG_STEP_A];
        in_b |= steps[TG_STEP_B];
        in_c |= steps[TG_STEP_C];
    }
    if (TG_UNLIKELY((in_a & (((intptr_t)1 << e.a_shift) - 1)) | (in_b & (((intptr_t)1 << e.b_shift) - 1))
                    | (in_c & (((intptr_t)1 << e.c_shift) - 1))))
        return false;
    p->m = dims[TG_DIM_M];
    p->k = dims[TG_DIM_K];
    p->n = dims[TG_DIM_N];
    *a = (operand){ args[0], steps[TG_STEP_A] >> e.a_shift, steps[TG_STEP_RSA] >> e.a_shift, steps[TG_STEP_CSA] >> e.a_shift };
    *b = (operand){ args[1], steps[TG_STEP_B] >> e.b_shift, steps[TG_STEP_RSB] >> e.b_shift, steps[TG_STEP_CSB] >> e.b_shift };
    *c = (operand){ args[2], steps[TG_STEP_C] >> e.c_shift, steps[TG_STEP_RSC] >> e.c_shift, steps[TG_STEP_CSC] >> e.c_shift };
    if (p->batch > 1)
        join_stack(p, a, b, c);
    p->symmetric = e.same_inputs && a->base == b->base && p->m == p->n && a->rs == b->cs && a->cs == b->rs
        && (p->batch == 1 || a->step == b->step);
    settle_unit_dimensions(a, p->m, p->k);
    settle_unit_dimensions(b, p->k, p->n);
    settle_unit_dimensions(c, p->m, p->n);
    p->transposed = e.same_inputs
        && ((c->rs == 1 && c->cs != 1) || better_transposed(p, a, b, c) || few_rows_of_columns(p, b, c));
    if (p->transposed) {              /* C^T = B^T.A^T: the result of a column-major C is row-major */
        operand old = *a;
        int64_t m = p->m;
        *a = (operand){ b->base, b->step, b->cs, b->rs };
        *b = (operand){ old.base, old.step, old.cs, old.rs };
        *c = (operand){ c->base, c->step, c->cs, c->rs };
        p->m = p->n;
        p->n = m;
        settle_unit_dimensions(a, p->m, p->k);
        settle_unit_dimensions(b, p->k, p->n);
        settle_unit_dimensions(c, p->m, p->n);
    }
    /* NumPy does not join stacks: what is one product for us is many calls of BLAS there. */
    bool joined = p->batch != dims[TG_DIM_BATCH];
    p->blas = is_gemv(p, a, b) ? TG_GEMV : !joined && is_small_gemm(p, a, b) ? TG_SMALL_GEMM : 0;
    p->a_layout = layout_of(a);
    p->b_layout = layout_of(b);
    p->c_layout = c->cs == 1 ? TG_ROW : TG_STRIDED;
    return true;
}

/* Python's code changes the floating-point flags, and may change the mode: the caller must see neither. */
static __attribute__((noinline, cold)) tg_entry *ask(tg_thread *self, const tg_problem *p,
                                                    int (*python)(const tg_problem *))
{
    if (self->in_miss || tg_python_finalizing())
        return NULL;
    fenv_t environment;
    fegetenv(&environment);
    self->in_miss = 1;
    int again = python(p);
    self->in_miss = 0;
    fesetenv(&environment);
    if (again < 0)
        tg_python_interrupt();        /* here, where no Python code of ours can swallow it */
    return again > 0 ? tg_find(self, p) : NULL;
}

/* The plan of a problem that has none, or of a small shape for which a better one than `entry` may be had. */
static __attribute__((noinline)) tg_entry *asked(tg_thread *self, const tg_problem *p, tg_entry *entry)
{
    tg_entry *found = ask(self, p, entry ? tg_hot : tg_miss);
    return found ? found : entry;
}

static __attribute__((noinline, cold)) void record(tg_thread *self, const tg_problem *p)
{
    if (self->probed++ == 0)
        self->probe = *p;
}

ALWAYS_INLINE int compute(const tg_kernel *kernel, const char *a, const char *b, char *c, const void *scale,
                          const int64_t *args)
{
    void *work = NULL;
    if (kernel->workspace) {
        int64_t bytes = 0;
        if (kernel->workspace(args, &bytes) != 0 || (bytes > 0 && !(work = tg_scratch(bytes))))
            return TG_NO_MEMORY;
    }
    int32_t failed = kernel->run(a, b, c, work, scale, args);
    if (work)
        tg_trim_scratch();
    return TG_UNLIKELY(failed) ? TG_KERNEL_FAILED : TG_SERVED;
}

/* Bytes of C times k, of all products of a call, up to which it is over sooner than a sleeping worker is awake (some
 * 70 us at the FMA peak of float32 and float64). */
#define LIGHT 0x1p24

/* What the tasks that share out a stack need to know; steps in bytes. */
typedef struct {
    const tg_kernel *kernel;
    const char *a, *b;
    char *c;
    int64_t step_a, step_b, step_c;
    const void *scale;
    const int64_t *args;
} stack;

/* One task's part of a stack, contiguous, in scratch memory of its own thread. */
static int part_of_stack(int task, tg_parallel_env *env, void *closure)
{
    const stack *s = closure;
    int64_t args[TG_NARGS], whole = s->args[TG_ARG_BATCH], even = whole / env->num_task, rest = whole % env->num_task;
    int64_t first = even * task + (task < rest ? task : rest);
    memcpy(args, s->args, sizeof args);
    args[TG_ARG_BATCH] = even + (task < rest);
    if (args[TG_ARG_BATCH] == 0)
        return TG_SERVED;
    return compute(s->kernel, s->a + first * s->step_a, s->b + first * s->step_b, s->c + first * s->step_c, s->scale,
                   args);
}

ALWAYS_INLINE int run(tg_thread *self, tg_entry *entry, const tg_problem *p, const operand *a,
                      const operand *b, const operand *c, elements e, const void *scale)
{
    const tg_plan *plan = &entry->plan;
    const tg_kernel *kernel = plan->kernel;
    const int64_t args[TG_NARGS] = {
        p->m, p->n, p->k, a->rs, a->cs, b->rs, b->cs, c->rs, c->cs, plan->mc, plan->nc, plan->kc, plan->tasks,
        p->batch, a->step, b->step, c->step,
    };
    int status;
    if (plan->tasks > 1 || plan->stack_tasks > 1) {
        double work = (double)p->m * (double)p->n * (double)p->k * (double)p->batch;
        self->light = work * (1 << e.c_shift) < LIGHT ? TG_LIGHT_UNDECIDED : TG_LIGHT_NO;
    }
    if (TG_LIKELY(p->batch == 1 || plan->stack_tasks <= 1)) {
        self->tasks = plan->tasks;
        status = compute(kernel, a->base, b->base, (char *)c->base, scale, args);
    } else {
        stack all = { kernel, a->base, b->base, (char *)c->base, a->step * ((int64_t)1 << e.a_shift),
                      b->step * ((int64_t)1 << e.b_shift), c->step * ((int64_t)1 << e.c_shift), scale, args };
        self->tasks = plan->stack_tasks;
        status = tg_launch(part_of_stack, &all, 0);
    }
    if (TG_UNLIKELY(status != TG_SERVED))
        return status;
    atomic_fetch_add_explicit(&entry->calls, 1, memory_order_relaxed);
    return TG_SERVED;
}

ALWAYS_INLINE int serve(char **args, const intptr_t *dims, const intptr_t *steps, int dtype, elements e,
                        int op, const void *scale)
{
    tg_thread *self = &tg_self;
    tg_problem p;
    operand a, b, c;
    p.dtype = dtype;
    p.op = op;
    bool possible = canonicalise(args, dims, steps, e, &p, &a, &b, &c);
    if (TG_UNLIKELY(self->probing)) {
        if (!possible)
            p = (tg_problem){ .dtype = -1 };
        record(self, &p);
        return TG_SERVED;
    }
    if (TG_UNLIKELY(!possible))
        return TG_DECLINED;
    if (TG_UNLIKELY(p.batch <= 0 || p.m <= 0 || p.n <= 0))
        return TG_SERVED;                /* no result to compute; k == 0 has one: zeros */
    tg_entry *entry = tg_find(self, &p);
    if (TG_UNLIKELY(!entry) || (entry->plan.hot_at && tg_small(&p) && TG_UNLIKELY(tg_turns_hot(&entry->plan, &p))))
        entry = asked(self, &p, entry);
    if (!entry || !entry->plan.kernel)
        return TG_DECLINED;
    return run(self, entry, &p, &a, &b, &c, e, scale);
}

/* C is write-only here, so after a failure NumPy's loop can compute everything again. */
#define LOOP(npy, id, name) \
    void tg_loop_##name(char **args, const intptr_t *dims, const intptr_t *steps, void *data) \
    { \
        (void)data;                   /* a loop put into np.matmul gets NumPy's */ \
        if (serve(args, dims, steps, id, ELEMENTS[id], TG_MATMUL, NULL) != TG_SERVED) { \
            const tg_numpy_loop *numpys = &tg_numpy_loops[TG_LOOP_##name]; \
            tg_count_declined(id); \
            numpys->run(args, dims, steps, numpys->data); \
        } \
    }
TG_LOOPS(LOOP)

int tg_serve(char **args, const intptr_t *dims, const intptr_t *steps, int dtype, int op, const void *scale)
{
    return serve(args, dims, steps, dtype, ELEMENTS[dtype], op, scale);
}

int tg_gemm(int dtype, int64_t m, int64_t n, int64_t k, const char *a, int64_t rsa, int64_t csa,
            const char *b, int64_t rsb, int64_t csb, char *c, int64_t rsc, int64_t csc, const void *scale)
{
    char *args[] = { (char *)a, (char *)b, c };
    const intptr_t dims[] = { 1, m, k, n };
    const intptr_t steps[] = { 0, 0, 0, rsa, csa, rsb, csb, rsc, csc };
    if (dtype < 0 || dtype >= TG_NDTYPES)
        return TG_DECLINED;
    int status = tg_serve(args, dims, steps, dtype, TG_GEMM, scale);
    if (status != TG_SERVED)
        tg_count_declined(dtype);
    return status;
}

void tg_probe_begin(void)
{
    tg_self.probing = 1;
    tg_self.probed = 0;
}

int tg_probe_end(tg_problem *first)
{
    tg_self.probing = 0;
    if (first && tg_self.probed)
        *first = tg_self.probe;
    return tg_self.probed;
}
