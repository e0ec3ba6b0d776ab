/* The inner loops of products whose output has another type than their inputs: int8.int8 -> int32 and such.
 *
 * Only our own ufunc has them, and runs them where dtype= asks for the output's type. NumPy has no such loop:
 * it converts the operands as a whole first. So does a declined call here, one product of the batch after the
 * other, and goes on in the loop of the output's type, which may be served by a kernel or NumPy's own. */
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

typedef struct { uint16_t bits; } half;

#define AS_int8_t(to, x) ((to)(x))
#define AS_uint8_t(to, x) ((to)(x))
#define AS_int16_t(to, x) ((to)(x))
#define AS_half(to, x) float_of_half((x).bits)

/* A matrix of `from` with byte strides, to one of `to` without gaps. */
typedef void (*convert_fn)(const char *x, intptr_t rs, intptr_t cs, int64_t rows, int64_t cols, void *result);
#define CONVERT(from, to) \
    static void from##_to_##to(const char *x, intptr_t rs, intptr_t cs, int64_t rows, int64_t cols, void *result) \
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

static void out_of_memory(void)
{
    PyGILState_STATE gil = PyGILState_Ensure();   /* NumPy calls loops with and without the GIL */
    PyErr_SetString(PyExc_MemoryError, "Out of memory in matmul");
    PyGILState_Release(gil);
}

static char *room_for(int64_t a, int64_t b, int64_t size)
{
    int64_t elements, bytes;
    if (__builtin_add_overflow(a, b, &elements) || __builtin_mul_overflow(elements, size, &bytes))
        return NULL;
    return malloc((size_t)bytes + 1);
}

/* Converts A and B to elements of `size` bytes and calls `loop` for each product of the batch. */
static void convert_and_call(char **args, const intptr_t *dims, const intptr_t *steps, convert_fn convert_a,
                             convert_fn convert_b, intptr_t size, tg_loop_fn loop)
{
    const intptr_t m = dims[TG_DIM_M], k = dims[TG_DIM_K], n = dims[TG_DIM_N];
    int64_t of_a, of_b;
    char *a = __builtin_mul_overflow(m, k, &of_a) || __builtin_mul_overflow(k, n, &of_b)
        ? NULL : room_for(of_a, of_b, size);
    if (!a) {
        out_of_memory();
        return;
    }
    char *b = a + of_a * size;
    const intptr_t one[] = { 1, m, k, n };
    const intptr_t dense[] = { 0, 0, 0, k * size, size, n * size, size, steps[TG_STEP_RSC], steps[TG_STEP_CSC] };
    for (intptr_t i = 0; i < dims[TG_DIM_BATCH]; i++) {
        if (i == 0 || steps[TG_STEP_A])               /* else the same matrix again */
            convert_a(args[0] + i * steps[TG_STEP_A], steps[TG_STEP_RSA], steps[TG_STEP_CSA], m, k, a);
        if (i == 0 || steps[TG_STEP_B])
            convert_b(args[1] + i * steps[TG_STEP_B], steps[TG_STEP_RSB], steps[TG_STEP_CSB], k, n, b);
        char *operands[] = { a, b, args[2] + i * steps[TG_STEP_C] };
        loop(operands, one, dense, NULL);
    }
    free(a);
}

#define LOOP(npy_a, npy_b, npy_c, id, name, from_a, from_b, to, loop) \
    void tg_loop_##name(char **args, const intptr_t *dims, const intptr_t *steps, void *data) \
    { \
        (void)data; \
        if (tg_serve(args, dims, steps, id, TG_MATMUL, NULL) != TG_SERVED) { \
            tg_count_declined(id); \
            convert_and_call(args, dims, steps, from_a##_to_##to, from_b##_to_##to, sizeof(to), tg_loop_##loop); \
        } \
    }
TG_MIXED_LOOPS(LOOP)

void tg_loop_ubyte_byte_short(char **args, const intptr_t *dims, const intptr_t *steps, void *data)
{
    (void)data;
    convert_and_call(args, dims, steps, uint8_t_to_int16_t, int8_t_to_int16_t, sizeof(int16_t), tg_loop_short);
}
