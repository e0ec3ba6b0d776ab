/* What the C files of tvmgemm._native share among themselves. Python sees tvmgemm.h only. */
#ifndef TG_NATIVE_H
#define TG_NATIVE_H
#include <stdbool.h>
#include "tvmgemm.h"

/* What products are made of, one row each: id, log2 of the bytes of an element of A, B and C, and whether A
 * and B have one element type. A product whose A and B differ is never computed transposed. */
#define TG_DTYPES(ROW) \
    ROW(TG_FLOAT32,          2, 2, 2, true) \
    ROW(TG_FLOAT64,          3, 3, 3, true) \
    ROW(TG_INT8,             0, 0, 0, true) \
    ROW(TG_UINT8,            0, 0, 0, true) \
    ROW(TG_INT16,            1, 1, 1, true) \
    ROW(TG_UINT16,           1, 1, 1, true) \
    ROW(TG_INT32,            2, 2, 2, true) \
    ROW(TG_UINT32,           2, 2, 2, true) \
    ROW(TG_INT64,            3, 3, 3, true) \
    ROW(TG_UINT64,           3, 3, 3, true) \
    ROW(TG_FLOAT16,          1, 1, 1, true) \
    ROW(TG_COMPLEX64,        3, 3, 3, true) \
    ROW(TG_COMPLEX128,       4, 4, 4, true) \
    ROW(TG_BOOL,             0, 0, 0, true) \
    ROW(TG_INT8_INT32,       0, 0, 2, true) \
    ROW(TG_UINT8_INT8_INT32, 0, 0, 2, false) \
    ROW(TG_UINT8_INT32,      0, 0, 2, true) \
    ROW(TG_UINT8_UINT32,     0, 0, 2, true) \
    ROW(TG_INT16_INT32,      1, 1, 2, true) \
    ROW(TG_FLOAT16_FLOAT32,  1, 1, 2, true) \
    ROW(TG_BFLOAT16_FLOAT32, 1, 1, 2, true) \
    ROW(TG_BFLOAT16,         1, 1, 1, true)

/* C's integer types by their width: two of them are 64 bits wide, and NumPy has loops for both. */
#define TG_INT_OF(type)  (sizeof(type) == 8 ? TG_INT64 : sizeof(type) == 4 ? TG_INT32 : TG_INT16)
#define TG_UINT_OF(type) (sizeof(type) == 8 ? TG_UINT64 : sizeof(type) == 4 ? TG_UINT32 : TG_UINT16)

/* NumPy's loops that ours take the place of, one row each: NumPy's type number, id, name of our loop. */
#define TG_LOOPS(ROW) \
    ROW(NPY_FLOAT,     TG_FLOAT32,            float) \
    ROW(NPY_DOUBLE,    TG_FLOAT64,            double) \
    ROW(NPY_BOOL,      TG_BOOL,               bool) \
    ROW(NPY_BYTE,      TG_INT8,               byte) \
    ROW(NPY_UBYTE,     TG_UINT8,              ubyte) \
    ROW(NPY_SHORT,     TG_INT_OF(short),      short) \
    ROW(NPY_USHORT,    TG_UINT_OF(short),     ushort) \
    ROW(NPY_INT,       TG_INT_OF(int),        int) \
    ROW(NPY_UINT,      TG_UINT_OF(int),       uint) \
    ROW(NPY_LONG,      TG_INT_OF(long),       long) \
    ROW(NPY_ULONG,     TG_UINT_OF(long),      ulong) \
    ROW(NPY_LONGLONG,  TG_INT_OF(long long),  longlong) \
    ROW(NPY_ULONGLONG, TG_UINT_OF(long long), ulonglong) \
    ROW(NPY_HALF,      TG_FLOAT16,            half) \
    ROW(NPY_CFLOAT,    TG_COMPLEX64,          cfloat) \
    ROW(NPY_CDOUBLE,   TG_COMPLEX128,         cdouble)

/* The loops that only our own ufunc has, for products whose output has another type: NumPy's type numbers of A,
 * B and C, id, name; C types of A, B and C; and the loop of the output's type, for what has no kernel. */
#define TG_MIXED_LOOPS(ROW) \
    ROW(NPY_BYTE,  NPY_BYTE,  NPY_INT,   TG_INT8_INT32,       byte_int,       int8_t,  int8_t,  int32_t,  int) \
    ROW(NPY_UBYTE, NPY_BYTE,  NPY_INT,   TG_UINT8_INT8_INT32, ubyte_byte_int, uint8_t, int8_t,  int32_t,  int) \
    ROW(NPY_UBYTE, NPY_UBYTE, NPY_INT,   TG_UINT8_INT32,      ubyte_int,      uint8_t, uint8_t, int32_t,  int) \
    ROW(NPY_UBYTE, NPY_UBYTE, NPY_UINT,  TG_UINT8_UINT32,     ubyte_uint,     uint8_t, uint8_t, uint32_t, uint) \
    ROW(NPY_SHORT, NPY_SHORT, NPY_INT,   TG_INT16_INT32,      short_int,      int16_t, int16_t, int32_t,  int) \
    ROW(NPY_HALF,  NPY_HALF,  NPY_FLOAT, TG_FLOAT16_FLOAT32,  half_float,     half,    half,    float,    float)

#define TG_LOOP_NUMBER(npy, id, name) TG_LOOP_##name,
enum { TG_LOOPS(TG_LOOP_NUMBER) TG_NLOOPS };

/* State of one thread. Small, because glibc's room for the fast TLS model in an extension module is small. */
typedef struct {
    int32_t probing, probed;          /* tg_probe_begin was called; inner loops seen since */
    int32_t in_miss;                  /* inside tg_miss: Python code of the planner is running */
    int32_t in_task;                  /* running a task of a parallel kernel: nested launches run serially */
    int64_t tasks;                    /* of the plan being run, for the launcher */
    int32_t light;                    /* the same, a TG_LIGHT_... */
    uint8_t hint[TG_NDTYPES][TG_NOPS];/* slot that served last */
    void *scratch;
    int64_t scratch_bytes;
    tg_problem probe;
} tg_thread;

/* initial-exec: one instruction instead of a call to __tls_get_addr. musl and macOS can't do it for a module
 * that is loaded at run time. */
#if defined(__GLIBC__)
#define TG_TLS __attribute__((tls_model("initial-exec")))
#else
#define TG_TLS
#endif
extern _Thread_local tg_thread tg_self TG_TLS;

#define TG_LIKELY(x) __builtin_expect(!!(x), 1)
#define TG_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define TG_CACHE_LINE 64

struct tg_kernel {
    tg_kernel_fn run;
    tg_workspace_fn workspace;        /* NULL: needs none */
    char *name;
    struct tg_kernel *next;
    struct tg_entry *plans;           /* of it, to sum up their calls; under the lock of plans.c */
};

/* plans.c: an interned plan. Never freed, so a reader needs no lock; `calls` has a cache line of its own,
 * because every caller writes it while all read the rest. */
typedef struct tg_entry {
    tg_plan plan;
    uint32_t layout_mask, layout_value;   /* layouts, symmetric and blas; mask 0: any will do */
    struct tg_entry *next, *next_of_kernel, *next_of_dtype;   /* same hash, kernel, dtype */
    _Alignas(TG_CACHE_LINE) _Atomic int64_t calls;
} tg_entry;

tg_entry *tg_find(tg_thread *self, const tg_problem *problem);
void tg_count_declined(int dtype);

/* Whether the shape is one that is counted and may have plans of its own. */
static inline bool tg_small(const tg_problem *p)
{
    return ((uint64_t)(p->m - 1) | (uint64_t)(p->n - 1) | (uint64_t)(p->k - 1)) < TG_SMALL;
}

/* Adds a small problem's products to what its shape has come to. True: that has just passed the plan's `hot_at`. */
bool tg_turns_hot(const tg_plan *plan, const tg_problem *problem);

/* loops.c: the inner loops that we put in a ufunc, NumPy's ABI (npy_intp is intptr_t). */
typedef void (*tg_loop_fn)(char **args, const intptr_t *dims, const intptr_t *steps, void *data);
#define TG_DECLARE_LOOP(npy, id, name) \
    void tg_loop_##name(char **args, const intptr_t *dims, const intptr_t *steps, void *data);
TG_LOOPS(TG_DECLARE_LOOP)
#define TG_DECLARE_MIXED_LOOP(npy_a, npy_b, npy_c, id, name, a, b, c, loop) TG_DECLARE_LOOP(npy_c, id, name)
TG_MIXED_LOOPS(TG_DECLARE_MIXED_LOOP)
TG_DECLARE_LOOP(NPY_SHORT, none, ubyte_byte_short)   /* has no kernels; see ufunc.c */
TG_DECLARE_LOOP(NPY_USERDEF, TG_BFLOAT16_FLOAT32, bfloat16_float)
TG_DECLARE_LOOP(NPY_USERDEF, TG_BFLOAT16, bfloat16)

/* Indices into a loop's arrays: dims, and steps (to the next of the batch, then row and column strides). */
enum { TG_DIM_BATCH, TG_DIM_M, TG_DIM_K, TG_DIM_N };
enum { TG_STEP_A, TG_STEP_B, TG_STEP_C, TG_STEP_RSA, TG_STEP_CSA, TG_STEP_RSB, TG_STEP_CSB, TG_STEP_RSC,
       TG_STEP_CSC };

/* Serves a call of a loop if a kernel can: what tg_gemm returns. The caller does what is declined, and counts
 * it. */
enum { TG_SERVED = 0, TG_DECLINED = 1, TG_NO_MEMORY = -1, TG_KERNEL_FAILED = -2 };
int tg_serve(char **args, const intptr_t *dims, const intptr_t *steps, int dtype, int op, const void *scale);

/* ufunc.c: NumPy's own loops, to decline to; set before any of ours is installed and never changed. */
typedef struct { tg_loop_fn run; void *data; } tg_numpy_loop;
extern tg_numpy_loop tg_numpy_loops[TG_NLOOPS];
bool tg_python_finalizing(void);
void tg_python_interrupt(void);       /* have the main thread raise what ended planning, as soon as it runs Python code */

/* scratch.c: at least `bytes`, aligned to a cache line, valid until this thread asks again; or NULL. */
void *tg_scratch(int64_t bytes);
void tg_trim_scratch(void);           /* after a call: give back a block that is too large to keep */

/* pool.c: what kernels find in __TVMBackendParallelLaunch. The layout of TVM's TVMParallelGroupEnv. */
typedef struct { void *sync_handle; int32_t num_task; } tg_parallel_env;
typedef int (*tg_task_fn)(int task_id, tg_parallel_env *env, void *closure);
/* Whether a product is over before a sleeping worker would be at work, and then whether the caller does it alone:
 * all of it, whatever number of parallel loops it has. */
enum { TG_LIGHT_NO, TG_LIGHT_UNDECIDED, TG_LIGHT_ALONE };
int tg_launch(tg_task_fn task, void *closure, int num_task);

/* Defined by the module that cffi generates: calls the Python function tvmgemm.frontend.tg_miss.
 * 1: a plan may have been published; 0: decline; -1: decline, and Ctrl-C arrived. */
int tg_miss(const tg_problem *problem);
int tg_hot(const tg_problem *problem);    /* the same for a small shape that many products have: 1: look again */

#endif
