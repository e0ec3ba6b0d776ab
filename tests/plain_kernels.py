"""Kernels for tests of the native part: plain C, compiled by the system's compiler, with TVM's ABI.

They need neither TVM nor a planner. Import ``native`` (a fixture) and publish what a test needs:
``native.publish(native.kernel("plain_float32"), dtype=0)``.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
from types import SimpleNamespace

import pytest
from tvmgemm._native import ffi, lib

from tvmgemm import frontend

SOURCE = r"""
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct { void *sync_handle; int32_t num_task; } env_t;
typedef int (*task_t)(int, env_t *, void *);
typedef int (*launch_t)(task_t, void *, int);
void *__TVMBackendParallelLaunch;     /* as in a library that TVM compiled with T.parallel */
#define LAUNCH(task, closure) ((launch_t)__TVMBackendParallelLaunch)(task, closure, 0)

atomic_int entered, threads_wanted;   /* a meeting point: tasks wait until this many threads are inside */
atomic_int tasks_seen, nested_tasks_seen, worker_rounds_up, late;
typedef struct { const char *a, *b; char *c; const int64_t *args; pthread_t caller; } closure_t;

static void meet(void)
{
    time_t end = time(NULL) + 20;
    atomic_fetch_add(&entered, 1);
    while (atomic_load(&entered) < atomic_load(&threads_wanted))
        if (time(NULL) > end) { atomic_store(&late, 1); break; }
}

#define KERNELS(T, S) \
static void rows_##S(const T *A, const T *B, T *C, const int64_t *g, int64_t lo, int64_t hi, \
                     T alpha, T beta) \
{ \
    for (int64_t q = 0; q < g[13]; q++, A += g[14], B += g[15], C += g[16]) \
    for (int64_t i = lo; i < hi; i++) for (int64_t j = 0; j < g[1]; j++) { \
        T sum = 0; \
        for (int64_t p = 0; p < g[2]; p++) sum += A[i*g[3] + p*g[4]] * B[p*g[5] + j*g[6]]; \
        T *c = &C[i*g[7] + j*g[8]]; \
        *c = alpha * sum + (beta == 0 ? 0 : beta * *c); \
    } \
} \
int32_t plain_##S(const void *A, const void *B, void *C, void *work, const void *scale, const int64_t *g) \
{ rows_##S(A, B, C, g, 0, g[0], 1, 0); return 0; } \
int32_t gemm_##S(const void *A, const void *B, void *C, void *work, const void *scale, const int64_t *g) \
{ const T *s = scale; rows_##S(A, B, C, g, 0, g[0], s[0], s[1]); return 0; } \
int32_t empty_##S(const void *A, const void *B, void *C, void *work, const void *scale, const int64_t *g) \
{ return 0; } \
int32_t failing_##S(const void *A, const void *B, void *C, void *work, const void *scale, const int64_t *g) \
{ *(T *)C = 77; return 1; } \
/* packs A into the work space */ \
int32_t packing_##S(const void *A, const void *B, void *C, void *work, const void *scale, const int64_t *g) \
{ \
    T *packed = work; int64_t h[17]; memcpy(h, g, sizeof h); h[3] = g[2]; h[4] = 1; h[13] = 1; \
    if ((uintptr_t)work % 64) return 1; \
    for (int64_t q = 0; q < g[13]; q++) { \
        for (int64_t i = 0; i < g[0]; i++) for (int64_t p = 0; p < g[2]; p++) \
            packed[i*g[2] + p] = ((const T *)A)[q*g[14] + i*g[3] + p*g[4]]; \
        rows_##S(packed, (const T *)B + q*g[15], (T *)C + q*g[16], h, 0, g[0], 1, 0); \
    } \
    return 0; \
} \
int32_t packing_##S##_workspace(const int64_t *g, int64_t *bytes) \
{ *bytes = g[0] * g[2] * sizeof(T); return 0; } \
/* mc = 1: more than there is; mc = 2: fails */ \
int32_t empty_##S##_workspace(const int64_t *g, int64_t *bytes) \
{ *bytes = g[9] ? INT64_MAX : 0; return g[9] == 2; } \
/* T.parallel over chunks of rows, cut as TVM cuts them */ \
static int task_##S(int id, env_t *env, void *closure) \
{ \
    closure_t *s = closure; int64_t m = s->args[0], step = (m + env->num_task - 1) / env->num_task; \
    int64_t lo = id * step < m ? id * step : m, hi = lo + step < m ? lo + step : m; \
    atomic_store(&tasks_seen, env->num_task); \
    rows_##S((const T *)s->a, (const T *)s->b, (T *)s->c, s->args, lo, hi, 1, 0); return 0; \
} \
int32_t parallel_##S(const void *A, const void *B, void *C, void *work, const void *scale, const int64_t *g) \
{ closure_t s = { A, B, C, g, pthread_self() }; return LAUNCH(task_##S, &s); } \
/* each task waits for another thread; workers overflow and tell how they round */ \
static int meeting_task_##S(int id, env_t *env, void *closure) \
{ \
    closure_t *s = closure; meet(); \
    if (!pthread_equal(s->caller, pthread_self())) { \
        volatile float big = 3e38f, one = 1, tiny = 1e-10f; big = big * 10; \
        atomic_store(&worker_rounds_up, one + tiny > 1); \
    } \
    return task_##S(id, env, closure); \
} \
int32_t meeting_##S(const void *A, const void *B, void *C, void *work, const void *scale, const int64_t *g) \
{ closure_t s = { A, B, C, g, pthread_self() }; return LAUNCH(meeting_task_##S, &s); } \
/* counts the tasks that another thread than the caller's runs, for which the caller waits a little */ \
static int where_task_##S(int id, env_t *env, void *closure) \
{ \
    closure_t *s = closure; \
    if (!pthread_equal(s->caller, pthread_self())) atomic_fetch_add(&entered, 1); \
    else for (volatile int i = 0; i < 20000 && !atomic_load(&entered); i++) ; \
    return task_##S(id, env, closure); \
} \
int32_t where_##S(const void *A, const void *B, void *C, void *work, const void *scale, const int64_t *g) \
{ closure_t s = { A, B, C, g, pthread_self() }; return LAUNCH(where_task_##S, &s); } \
/* a task that launches again */ \
static int inner_##S(int id, env_t *env, void *closure) \
{ atomic_store(&nested_tasks_seen, env->num_task); return 0; } \
static int outer_##S(int id, env_t *env, void *closure) \
{ int result = LAUNCH(inner_##S, closure); return result ? result : task_##S(id, env, closure); } \
int32_t nested_##S(const void *A, const void *B, void *C, void *work, const void *scale, const int64_t *g) \
{ closure_t s = { A, B, C, g, pthread_self() }; return LAUNCH(outer_##S, &s); } \
/* task 1 fails */ \
static int bad_task_##S(int id, env_t *env, void *closure) \
{ return id == 1 ? 5 : task_##S(id, env, closure); } \
int32_t badtask_##S(const void *A, const void *B, void *C, void *work, const void *scale, const int64_t *g) \
{ closure_t s = { A, B, C, g, pthread_self() }; return LAUNCH(bad_task_##S, &s); }
KERNELS(float, float32)
KERNELS(double, float64)

/* The other dtypes: products alone, summed up as SUM. */
#define PRODUCTS(TA, TB, TC, SUM, S) \
static int32_t rows_##S(const TA *A, const TB *B, TC *C, const int64_t *g, SUM alpha, SUM beta) \
{ \
    for (int64_t q = 0; q < g[13]; q++, A += g[14], B += g[15], C += g[16]) \
    for (int64_t i = 0; i < g[0]; i++) for (int64_t j = 0; j < g[1]; j++) { \
        SUM sum = 0; \
        for (int64_t p = 0; p < g[2]; p++) sum += (SUM)A[i*g[3] + p*g[4]] * (SUM)B[p*g[5] + j*g[6]]; \
        TC *c = &C[i*g[7] + j*g[8]]; \
        *c = alpha * sum + (beta == 0 ? 0 : beta * (SUM)*c); \
    } \
    return 0; \
} \
int32_t plain_##S(const void *A, const void *B, void *C, void *work, const void *scale, const int64_t *g) \
{ return rows_##S(A, B, C, g, 1, 0); } \
int32_t gemm_##S(const void *A, const void *B, void *C, void *work, const void *scale, const int64_t *g) \
{ const SUM *s = scale; return rows_##S(A, B, C, g, s[0], s[1]); }
#define INTEGERS(bits) \
    PRODUCTS(int##bits##_t, int##bits##_t, int##bits##_t, int##bits##_t, int##bits) \
    PRODUCTS(uint##bits##_t, uint##bits##_t, uint##bits##_t, uint##bits##_t, uint##bits)
INTEGERS(8) INTEGERS(16) INTEGERS(32) INTEGERS(64)
PRODUCTS(_Float16, _Float16, _Float16, float, float16)
PRODUCTS(float _Complex, float _Complex, float _Complex, float _Complex, complex64)
PRODUCTS(double _Complex, double _Complex, double _Complex, double _Complex, complex128)
PRODUCTS(_Bool, _Bool, _Bool, _Bool, bool)
PRODUCTS(int8_t, int8_t, int32_t, int32_t, int8_int32)
PRODUCTS(uint8_t, int8_t, int32_t, int32_t, uint8_int8_int32)
PRODUCTS(uint8_t, uint8_t, int32_t, int32_t, uint8_int32)
PRODUCTS(uint8_t, uint8_t, uint32_t, uint32_t, uint8_uint32)
PRODUCTS(int16_t, int16_t, int32_t, int32_t, int16_int32)
PRODUCTS(_Float16, _Float16, float, float, float16_float32)

typedef struct { uint16_t bits; } bfloat16;
static float wide(bfloat16 x)
{ uint32_t bits = (uint32_t)x.bits << 16; float value; memcpy(&value, &bits, 4); return value; }
static void put_float(float *c, float x) { *c = x; }
static void put_bfloat16(bfloat16 *c, float x)        /* to nearest even; no NaN here */
{ uint32_t bits; memcpy(&bits, &x, 4); c->bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16; }
#define BFLOAT16(TC, S) \
int32_t plain_##S(const void *a, const void *b, void *c, void *work, const void *scale, const int64_t *g) \
{ \
    const bfloat16 *A = a, *B = b; TC *C = c; \
    for (int64_t q = 0; q < g[13]; q++, A += g[14], B += g[15], C += g[16]) \
    for (int64_t i = 0; i < g[0]; i++) for (int64_t j = 0; j < g[1]; j++) { \
        float sum = 0; \
        for (int64_t p = 0; p < g[2]; p++) sum += wide(A[i*g[3] + p*g[4]]) * wide(B[p*g[5] + j*g[6]]); \
        put_##TC(&C[i*g[7] + j*g[8]], sum); \
    } \
    return 0; \
}
BFLOAT16(float, bfloat16_float32)
BFLOAT16(bfloat16, bfloat16)
"""

COUNTERS = ("entered", "threads_wanted", "tasks_seen", "nested_tasks_seen", "worker_rounds_up", "late")
_PLAN_IDS = itertools.count(1_000_000)


def compiler() -> str:
    """The system's C compiler; skips the test where there is none."""
    found = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if not found:
        pytest.skip("needs a C compiler")
    return found.split()[0]


@functools.lru_cache(maxsize=None)
def library() -> str:
    """The path of the compiled test kernels, a file that stays until the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="tvmgemm-test-")
    library.keep = folder
    source, path = os.path.join(folder.name, "kernels.c"), os.path.join(folder.name, "kernels.so")
    with open(source, "w", encoding="utf-8") as file:
        file.write(SOURCE)
    options = ["-O2", "-fwrapv", "-std=gnu11", "-frounding-math", "-fPIC", "-shared", "-pthread"]
    subprocess.run([compiler(), *options, "-o", path, source], check=True, timeout=120)
    return path


@functools.lru_cache(maxsize=None)
def kernel(symbol: str):
    """The loaded kernel ``<kind>_<dtype>``. Kinds: plain, gemm, empty, failing, packing, parallel, meeting,
    nested, badtask."""
    error = ffi.new("char[400]")
    loaded = lib.tg_kernel_load(library().encode(), symbol.encode(), symbol.encode(), error, 400)
    assert loaded, ffi.string(error)
    return loaded


def counters() -> SimpleNamespace:
    """The library's global counters, as ctypes integers."""
    opened = ctypes.CDLL(library())
    return SimpleNamespace(**{name: ctypes.c_int.in_dll(opened, name) for name in COUNTERS})


def plan(kernel, dtype: int = 0, op: int = 0, **fields):
    """A tg_plan for every problem of a dtype; ``fields`` narrow it."""
    everything = dict(
        dtype=dtype, op=op, a_layout=-1, b_layout=-1, c_layout=-1, symmetric=-1, blas=-1,
        m_lo=0, m_hi=2**62, n_lo=0, n_hi=2**62, k_lo=0, k_hi=2**62, batch_lo=0, batch_hi=2**62,
        mn_lo=0.0, mn_hi=float("inf"), kn_lo=0.0, kn_hi=float("inf"),
        work_lo=0.0, work_hi=float("inf"), kernel=kernel or ffi.NULL, mc=0, nc=0, kc=0, tasks=1,
    )
    everything["id"] = fields.pop("id", None) or next(_PLAN_IDS)
    return ffi.new("tg_plan *", {**everything, **fields})


def publish(kernel, dtype: int = 0, op: int = 0, **fields) -> int:
    """Publishes ``plan(...)`` and returns its id."""
    made = plan(kernel, dtype, op, **fields)
    assert lib.tg_publish(made) == 0
    return made.id


def problem(dtype: int = 0, op: int = 0, m: int = 8, n: int = 8, k: int = 8, batch: int = 1, **fields):
    return ffi.new("tg_problem *", dict(dtype=dtype, op=op, m=m, n=n, k=k, batch=batch, **fields))


def probe(call):
    """The number of inner loops that ``call()`` runs and the first one's problem; they compute nothing."""
    first = ffi.new("tg_problem *")
    lib.tg_probe_begin()
    try:
        call()
    finally:
        count = lib.tg_probe_end(first)
    return count, first


@pytest.fixture
def native(monkeypatch):
    """Empty dispatch tables, one thread, and misses that decline; all as it was afterwards."""
    threads = lib.tg_pool_threads()
    monkeypatch.setattr(frontend, "on_miss", lambda problem: 0)
    lib.tg_clear_plans()
    lib.tg_pool_set_threads(1)
    for counter in vars(counters()).values():
        counter.value = 0
    yield SimpleNamespace(kernel=kernel, plan=plan, publish=publish, problem=problem, probe=probe,
                          counters=counters(), lib=lib, ffi=ffi)
    lib.tg_clear_plans()
    lib.tg_pool_set_threads(threads)
