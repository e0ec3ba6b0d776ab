/* The interface between Python and C: what tvmgemm._native.lib offers.
 *
 * build_native.py gives this file to cffi without its lines that start with '#', and the C files include it,
 * so every declaration is written once. Keep it to what cffi can parse: plain C declarations. */
#ifndef TVMGEMM_H
#define TVMGEMM_H
#include <stddef.h>
#include <stdint.h>

/* What a product is made of; native.h says more. Named by their elements; a mixed one by those of A and B
 * (one name where they agree), then that of C. In the order of problem.DTYPES. */
enum { TG_FLOAT32, TG_FLOAT64, TG_INT8, TG_UINT8, TG_INT16, TG_UINT16, TG_INT32, TG_UINT32, TG_INT64, TG_UINT64,
       TG_FLOAT16, TG_COMPLEX64, TG_COMPLEX128, TG_BOOL, TG_INT8_INT32, TG_UINT8_INT8_INT32, TG_UINT8_INT32,
       TG_UINT8_UINT32, TG_INT16_INT32, TG_FLOAT16_FLOAT32, TG_BFLOAT16_FLOAT32, TG_BFLOAT16, TG_NDTYPES };
enum { TG_MATMUL = 0, TG_GEMM = 1, TG_NOPS = 2 };   /* C = A.B, C is write-only | C = alpha.A.B + beta.C */
enum { TG_ROW = 0, TG_COL = 1, TG_STRIDED = 2 };    /* unit column stride | unit row stride | neither */

/* A product that NumPy has BLAS compute, if BLAS knows the dtype: m or n is 1 | neither is, and m.n.k is within these bounds. */
enum { TG_GEMV = 1, TG_SMALL_GEMM = 2 };
enum { TG_SMALL_GEMM_LO = 8000, TG_SMALL_GEMM_HI = 1000000 };

/* What an inner loop was asked, after canonicalisation: c_layout is never TG_COL (see loops.c). */
typedef struct {
    int32_t dtype, op;
    int32_t a_layout, b_layout, c_layout;
    int32_t transposed;   /* 1: computed as C^T = B^T.A^T; layouts, m and n here are those of that product */
    int32_t symmetric;    /* 1: B is A^T in the same buffer, so the product is symmetric */
    int32_t blas;         /* TG_GEMV, TG_SMALL_GEMM or 0 */
    int64_t m, n, k, batch;
} tg_problem;

/* A kernel: compiled code of one KernelSpec. It computes a stack of `batch` products, SA, SB, SC apart. All
 * sizes, strides and steps come at run time, strides and steps in elements. */
enum { TG_ARG_M, TG_ARG_N, TG_ARG_K, TG_ARG_RSA, TG_ARG_CSA, TG_ARG_RSB, TG_ARG_CSB, TG_ARG_RSC, TG_ARG_CSC,
       TG_ARG_MC, TG_ARG_NC, TG_ARG_KC, TG_ARG_TASKS, TG_ARG_BATCH, TG_ARG_SA, TG_ARG_SB, TG_ARG_SC, TG_NARGS };
typedef int32_t (*tg_kernel_fn)(const void *a, const void *b, void *c, void *work, const void *scale,
                                const int64_t *args);
/* Exported as <symbol>_workspace, where a kernel needs `work`: its bytes for these args. Both return 0 for
 * success, which is all that a function compiled by TVM can return. */
typedef int32_t (*tg_workspace_fn)(const int64_t *args, int64_t *bytes);
typedef struct tg_kernel tg_kernel;

/* A published decision: every problem inside the box is served by this kernel with these block sizes. */
typedef struct {
    int32_t dtype, op, a_layout, b_layout, c_layout;                  /* layouts: -1 = any */
    int32_t symmetric, blas;                                          /* -1 = any */
    int32_t exact;                    /* 1: for one small shape (TG_SMALL), looked up before all boxes */
    int64_t m_lo, m_hi, n_lo, n_hi, k_lo, k_hi, batch_lo, batch_hi;   /* inclusive */
    double mn_lo, mn_hi, kn_lo, kn_hi, work_lo, work_hi;              /* inclusive bounds on m*n, k*n, m*n*k */
    tg_kernel *kernel;                                                /* NULL: decline, NumPy's loop runs */
    int64_t mc, nc, kc, tasks;
    int64_t stack_tasks;              /* share out the products of a stack, each with `tasks` = 1; 1: nothing does */
    int64_t hot_at;                   /* ask Python once a small shape has come to so many products; 0: do not count */
    int64_t id;
} tg_plan;

enum { TG_SMALL = 16 };               /* the largest m, n and k of shapes that have plans and counts of their own */

/* kernels.c. Loading the same function twice gives the same kernel; a kernel is never unloaded. */
tg_kernel *tg_kernel_load(const char *path, const char *symbol, const char *name, char *error,
                          size_t error_size);
const char *tg_kernel_name(const tg_kernel *kernel);

/* plans.c. tg_publish: 0, or -1 when the plan's dtype or op is unknown or memory is short. */
int tg_publish(const tg_plan *plan);
void tg_unpublish(int64_t id);
void tg_clear_plans(void);
int tg_set_served(int dtype, int64_t m, int64_t n, int64_t k, int64_t served);   /* products of a small shape, so far */
int64_t tg_lookup(const tg_problem *problem);   /* id of the plan that would serve it, -1 for none */
int64_t tg_kernel_calls(const tg_kernel *kernel);
int64_t tg_served(int dtype);
int64_t tg_declined(int dtype);
void tg_reset_counters(void);

/* loops.c. Between tg_probe_begin and tg_probe_end this thread's loops record their problem and compute
 * nothing; tg_probe_end gives how many there were, and the first (dtype -1: its strides rule kernels out). */
void tg_probe_begin(void);
int tg_probe_end(tg_problem *first);
/* Strides in bytes. 0 served; 1 declined, C untouched; -1 no memory for packing, C untouched; -2 the kernel
 * failed and C holds anything. */
int tg_gemm(int dtype, int64_t m, int64_t n, int64_t k, const char *a, int64_t rsa, int64_t csa,
            const char *b, int64_t rsb, int64_t csb, char *c, int64_t rsc, int64_t csc, const void *scale);

/* ufunc.c. Both take the address of np.matmul; 0 and -1 mean that it is not the ufunc that we know. */
uintptr_t tg_make_ufunc(uintptr_t np_matmul);   /* a new reference */
int tg_patch(uintptr_t np_matmul, int on);      /* 0 done */

/* pool.c. The number of threads counts the caller: 1 means no workers. */
void tg_pool_set_threads(int threads);
int tg_pool_threads(void);

/* scratch.c: the calling thread's arena. */
void tg_release_scratch(void);
int64_t tg_scratch_bytes(void);

/* cpu.c: space-separated names as in Linux's /proc/cpuinfo. Returns the length that the whole text has. */
int64_t tg_cpu_features(char *out, size_t size);

#endif
