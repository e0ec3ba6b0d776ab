/* The inner loops that only our own ufunc has, NumPy has none: products whose output has another type than
 * their inputs, int8.int8 -> int32 and such, and those of bfloat16.
 *
 * NumPy converts the operands as a whole first. So does a declined call here, one product of the batch after
 * the other, and goes on in the loop of a type that NumPy knows, which may be served by a kernel or NumPy's own. */
#include <Python.h>
#include <stdlib.h>
#include <string.h>
#include "native.h"

/* An IEEE half as a float, exactly and without a floating-point exception. */
static inline float float_of_half(uint16_t bits16)
{
    uint32_t sign = (uint32_t)(bits16 & 0x8000) << 16, exponent = bits16 >> 10 & 31, fraction = bits16 & 1023, bits;
    float value;
    if (exponent == 0) {                              /* zero, or fraction * 2^-24 */
        value = (float)(int32_t)fraction * 0x1p-24f;
        memcpy(&bits, &value, sizeof bits);
    } else {
        bits = (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13;
    }
    bits |= sign;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float float_of_bfloat16(uint16_t bits16)
{
    uint32_t bits = (uint32_t)bits16 << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* To the nearest, ties to even; NaNs stay NaNs. */
static inline uint16_t bfloat16_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(value != value ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

typedef struct { uint16_t bits; } half;
typedef struct { uint16_t bits; } bfloat16;

#define AS_int8_t(to, x) ((to)(x))
#define AS_uint8_t(to, x) ((to)(x))
#define AS_int16_t(to, x) ((to)(x))
#define AS_half(to, x) float_of_half((x).bits)
#define AS_bfloat16(to, x) float_of_bfloat16((x).bits)

/* GCC makes vectors of loops from -O3 on (of its version 12 on from -O2, but only where they have no rest). */
#if defined(__GNUC__) && !defined(__clang__)
#define IN_VECTORS __attribute__((optimize("O3")))
#else
#define IN_VECTORS
#endif

/* A matrix of `from` with byte strides, to one of `to` without gaps. */
typedef void (*convert_fn)(const char *x, intptr_t rs, intptr_t cs, int64_t rows, int64_t cols, void *result);
#define CONVERT(from, to) \
    static IN_VECTORS void from##_to_##to(const char *x, intptr_t rs, intptr_t cs, int64_t rows, int64_t cols, void *result) \
    { \
        to *restrict out = result; \
        for (int64_t i = 0; i < rows; i++, x += rs, out += cols) { \
            const from *restrict row = (const from *)x; \
            if (cs == sizeof(from))                   /* in vectors */ \
                for (int64_t j = 0; j < cols; j++) \
                    out[j] = AS_##from(to, row[j]); \
            else \
                for (int64_t j = 0; j < cols; j++) \
                    out[j] = AS_##from(to, *(const from *)(x + j * cs)); \
        } \
    }
CONVERT(int8_t, int16_t)
CONVERT(uint8_t, int16_t)
CONVERT(int8_t, int32_t)
CONVERT(uint8_t, int32_t)
CONVERT(uint8_t, uint32_t)
CONVERT(int16_t, int32_t)
CONVERT(half, float)
CONVERT(bfloat16, float)

static IN_VECTORS void round_to_bfloat16(const float *x, char *result, intptr_t rs, intptr_t cs, int64_t rows, int64_t cols)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            *(uint16_t *)(result + i * rs + j * cs) = bfloat16_of_float(*x++);
}

static void out_of_memory(void)
{
    PyGILState_STATE gil = PyGILState_Ensure();   /* NumPy calls loops with and without the GIL */
    PyErr_SetString(PyExc_MemoryError, "Out of memory in matmul");
    PyGILState_Release(gil);
}

/* Adds rows * cols to *elements. False: that is more than an integer can count. */
static bool add_matrix(int64_t *elements, int64_t rows, int64_t cols)
{
    int64_t size;
    return !__builtin_mul_overflow(rows, cols, &size) && !__builtin_add_overflow(*elements, size, elements);
}

/* Converts the matrix in the order in which it lies in memory; `strides` are those of the result. */
static void convert_as_it_lies(convert_fn convert, const char *x, intptr_t rs, intptr_t cs, int64_t rows, int64_t cols,
                               intptr_t size, char *result, intptr_t strides[2])
{
    const bool by_columns = rows > 1 && (cols == 1 || (rs < 0 ? -rs : rs) < (cs < 0 ? -cs : cs));
    if (by_columns)
        convert(x, cs, rs, cols, rows, result);
    else
        convert(x, rs, cs, rows, cols, result);
    strides[0] = by_columns ? size : cols * size;
    strides[1] = by_columns ? rows * size : size;
}

/* Converts A and B to elements of `size` bytes and calls `loop` for each product of the batch. With `rounded`
 * those elements are floats, and so are the results, until they are rounded to C's bfloat16. */
static void convert_and_call(char **args, const intptr_t *dims, const intptr_t *steps, convert_fn convert_a,
                             convert_fn convert_b, intptr_t size, tg_loop_fn loop, bool rounded)
{
    const intptr_t m = dims[TG_DIM_M], k = dims[TG_DIM_K], n = dims[TG_DIM_N];
    const intptr_t rsc = steps[TG_STEP_RSC], csc = steps[TG_STEP_CSC];
    int64_t elements = 1, bytes;
    char *a = NULL;
    if (add_matrix(&elements, m, k) && add_matrix(&elements, k, n) && (!rounded || add_matrix(&elements, m, n))
        && !__builtin_mul_overflow(elements, size, &bytes))
        a = malloc((size_t)bytes);
    if (!a) {
        out_of_memory();
        return;
    }
    char *b = a + m * k * size, *sums = b + k * n * size;
    const intptr_t one[] = { 1, m, k, n };
    intptr_t dense[] = { 0, 0, 0, 0, 0, 0, 0, rounded ? n * size : rsc, rounded ? size : csc };
    for (intptr_t i = 0; i < dims[TG_DIM_BATCH]; i++) {
        if (i == 0 || steps[TG_STEP_A])               /* else the same matrix again */
            convert_as_it_lies(convert_a, args[0] + i * steps[TG_STEP_A], steps[TG_STEP_RSA], steps[TG_STEP_CSA], m, k, size, a,
                               dense + TG_STEP_RSA);
        if (i == 0 || steps[TG_STEP_B])
            convert_as_it_lies(convert_b, args[1] + i * steps[TG_STEP_B], steps[TG_STEP_RSB], steps[TG_STEP_CSB], k, n, size, b,
                               dense + TG_STEP_RSB);
        char *c = args[2] + i * steps[TG_STEP_C], *operands[] = { a, b, rounded ? sums : c };
        loop(operands, one, dense, NULL);
        if (rounded)
            round_to_bfloat16((const float *)sums, c, rsc, csc, m, n);
    }
    free(a);
}

#define LOOP(id, name, from_a, from_b, to, loop, rounded) \
    void tg_loop_##name(char **args, const intptr_t *dims, const intptr_t *steps, void *data) \
    { \
        (void)data; \
        if (tg_serve(args, dims, steps, id, TG_MATMUL, NULL) != TG_SERVED) { \
            tg_count_declined(id); \
            convert_and_call(args, dims, steps, from_a##_to_##to, from_b##_to_##to, sizeof(to), tg_loop_##loop, \
                             rounded); \
        } \
    }
#define MIXED_LOOP(npy_a, npy_b, npy_c, id, name, a, b, c, loop) LOOP(id, name, a, b, c, loop, false)
TG_MIXED_LOOPS(MIXED_LOOP)
LOOP(TG_BFLOAT16_FLOAT32, bfloat16_float, bfloat16, bfloat16, float, float, false)
LOOP(TG_BFLOAT16, bfloat16, bfloat16, bfloat16, float, float, true)

void tg_loop_ubyte_byte_short(char **args, const intptr_t *dims, const intptr_t *steps, void *data)
{
    (void)data;
    convert_and_call(args, dims, steps, uint8_t_to_int16_t, int8_t_to_int16_t, sizeof(int16_t), tg_loop_short, false);
}
