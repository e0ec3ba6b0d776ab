/* The meeting point with NumPy: a ufunc made of np.matmul's signature and loops with ours among them, and
 * the replacement of loops in np.matmul itself.
 *
 * cffi releases the GIL around every call, so each entry takes it back. No entry leaves a Python exception
 * set: the caller in Python knows from the result, and checks np.matmul beforehand. */
#include <Python.h>
#include <string.h>
#include "native.h"
#include "numpy_api.h"

#define OPERANDS 3
#define MAX_LOOPS 64
static const char SIGNATURE[] = "(n?,k),(k,m?)->(n?,m?)";
static const char DOCUMENTATION[] =
    "Matrix product of two arrays: a np.matmul whose inner loops run kernels that TVM\n"
    "generated.\n"
    "\n"
    "Shapes, keywords, promotion, casting, broadcasting, ``out=`` and errors are those of\n"
    ":func:`numpy.matmul`: it is a ufunc made of the same parts. Products of bool, integers,\n"
    "float16, float32, float64, complex64 and complex128 are served by kernels; all other\n"
    "dtypes, and any product that no kernel serves, run NumPy's own loop.\n"
    "\n"
    "``dtype=`` of a wider type is as with :func:`numpy.matmul`, but without converting the\n"
    "operands first: int8 by int8, uint8 by int8, uint8 by uint8 and int16 by int16 with\n"
    "``dtype=int32``, uint8 by uint8 with ``dtype=uint32``, float16 with ``dtype=float32``.\n"
    "The product of bfloat16 of ml_dtypes is float32 as with :func:`numpy.matmul`; with\n"
    "``dtype=bfloat16``, which NumPy does not know, it is rounded once, at the end.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "x1, x2 : array_like\n"
    "    Input arrays, (..., n, k) and (..., k, m). Scalars are not allowed.\n"
    "out : ndarray, optional\n"
    "    Where to store the result, of a shape to which (..., n, m) can be broadcast.\n"
    "**kwargs\n"
    "    As for :func:`numpy.matmul`.\n"
    "\n"
    "Returns\n"
    "-------\n"
    "y : ndarray\n"
    "    The product, (..., n, m); a scalar only when both inputs are 1-D.\n"
    "\n"
    "See Also\n"
    "--------\n"
    "tvmgemm.gemm : C = alpha*A@B + beta*C in place.\n"
    "tvmgemm.patch_numpy : the same kernels behind the ``@`` operator.\n"
    "\n"
    "Examples\n"
    "--------\n"
    ">>> import numpy as np, tvmgemm\n"
    ">>> a = np.full((2, 3), 100, np.int8)\n"
    ">>> tvmgemm.matmul(a, a.T)                  # integers wrap around, as NumPy's do\n"
    "array([[48, 48],\n"
    "       [48, 48]], dtype=int8)\n"
    ">>> tvmgemm.matmul(a, a.T, dtype=np.int32)  # a wider result\n"
    "array([[30000, 30000],\n"
    "       [30000, 30000]], dtype=int32)\n";

static const struct { int type; tg_loop_fn loop; } OURS[TG_NLOOPS] = {
#define ROW(npy, id, name) [TG_LOOP_##name] = { npy, tg_loop_##name },
    TG_LOOPS(ROW)
};

/* Rows that our own ufunc has after NumPy's. dtype= chooses them; without it two rows fit the inputs, and then
 * NumPy leaves the choice to the type resolver. So that this holds for uint8.int8 too, whose result is int16,
 * there is a second row for it. */
static const struct { char types[OPERANDS]; tg_loop_fn loop; } MIXED[] = {
#define MIXED_ROW(npy_a, npy_b, npy_c, id, name, a, b, c, loop) { { npy_a, npy_b, npy_c }, tg_loop_##name },
    TG_MIXED_LOOPS(MIXED_ROW)
    { { NPY_UBYTE, NPY_BYTE, NPY_SHORT }, tg_loop_ubyte_byte_short },
};
enum { N_MIXED = sizeof MIXED / sizeof *MIXED };

tg_numpy_loop tg_numpy_loops[TG_NLOOPS];
static bool known;                    /* tg_numpy_loops is filled */

static int import_numpy(void)
{
    import_array1(-1);
    import_umath1(-1);
    return 0;
}

/* The loop of a dtype that takes and gives only this dtype; -1: none. */
static int loop_of(const PyUFuncObject *ufunc, int type)
{
    for (int i = 0; i < ufunc->ntypes; i++) {
        const char *types = ufunc->types + OPERANDS * i;
        if (types[0] == type && types[1] == type && types[2] == type)
            return i;
    }
    return -1;
}

static bool is_matmul(const PyUFuncObject *ufunc)
{
    if (!PyObject_TypeCheck(ufunc, &PyUFunc_Type) || ufunc->nin != 2 || ufunc->nout != 1
        || ufunc->ntypes > MAX_LOOPS - N_MIXED || !ufunc->core_signature
        || strcmp(ufunc->core_signature, SIGNATURE) != 0)
        return false;
    for (int l = 0; l < TG_NLOOPS; l++)
        if (loop_of(ufunc, OURS[l].type) < 0)
            return false;
    return true;
}

/* Remembers NumPy's own loops, once, before any of ours can be in their place. False: this isn't np.matmul.
 */
static bool know(const PyUFuncObject *ufunc)
{
    if (!known && import_numpy() < 0) {
        PyErr_Clear();
        return false;
    }
    if (!is_matmul(ufunc))
        return false;
    for (int l = 0; l < TG_NLOOPS && !known; l++) {
        int i = loop_of(ufunc, OURS[l].type);
        tg_numpy_loops[l] = (tg_numpy_loop){ ufunc->functions[i], ufunc->data ? ufunc->data[i] : NULL };
        tg_call_serve(OURS[l].type, i);
    }
    known = true;
    return true;
}

/* bfloat16 is a type that a package, ml_dtypes, registers with NumPy at run time. */
static PyUFuncObject *numpys_matmul;
static int bfloat16 = NPY_NOTYPE;     /* its type number, once our ufunc has loops for it */

static bool is_bfloat16(PyArray_Descr *dtype)
{
    if (!dtype || dtype->type_num < NPY_USERDEF)
        return false;
    if (bfloat16 != NPY_NOTYPE)
        return dtype->type_num == bfloat16;
    PyObject *name = PyUnicode_FromString("ml_dtypes"), *module = name ? PyImport_GetModule(name) : NULL;
    PyObject *scalar = module ? PyObject_GetAttrString(module, "bfloat16") : NULL;
    bool same = scalar == (PyObject *)dtype->typeobj;
    Py_XDECREF(scalar);
    Py_XDECREF(module);
    Py_XDECREF(name);
    PyErr_Clear();
    return same;
}

static int register_bfloat16(PyUFuncObject *ufunc, int type)
{
    const int to_float[OPERANDS] = { type, type, NPY_FLOAT }, rounded[OPERANDS] = { type, type, type };
    if (PyUFunc_RegisterLoopForType(ufunc, type, tg_loop_bfloat16_float, to_float, NULL) < 0
        || PyUFunc_RegisterLoopForType(ufunc, type, tg_loop_bfloat16, rounded, NULL) < 0)
        return -1;
    bfloat16 = type;
    return 0;
}

/* What NumPy asks where no single row of ours fits the dtypes (given: those of dtype= or signature=, or NULL).
 * The answer is that for np.matmul, so our additional rows change nothing; but bfloat16 by bfloat16 is not
 * converted to float32 first, and dtype=bfloat16 is possible. */
static int resolve(PyUFuncObject *ufunc, NPY_CASTING casting, PyArrayObject **operands, PyObject *given,
                   PyArray_Descr **result)
{
    PyArray_Descr *in[OPERANDS];
    for (int i = 0; i < OPERANDS; i++) {
        PyObject *asked = given ? PyTuple_GET_ITEM(given, i) : Py_None;
        in[i] = asked != Py_None ? (PyArray_Descr *)asked : i < 2 ? PyArray_DESCR(operands[i]) : NULL;
    }
    const bool rounded = is_bfloat16(in[2]);
    for (int i = 0; i < 2 && rounded; i++)            /* dtype= alone converts the inputs, too */
        if (PyTuple_GET_ITEM(given, i) == Py_None)
            in[i] = in[2];
    if (!is_bfloat16(in[0]) || !is_bfloat16(in[1]) || (in[2] && !rounded && in[2]->type_num != NPY_FLOAT))
        return numpys_matmul->type_resolver(numpys_matmul, casting, operands, given, result);
    if (bfloat16 == NPY_NOTYPE && register_bfloat16(ufunc, in[0]->type_num) < 0)
        return -1;
    for (int i = 0; i < 2; i++) {
        Py_INCREF(in[i]);
        result[i] = in[i];
    }
    result[2] = PyArray_DescrFromType(rounded ? bfloat16 : NPY_FLOAT);
    return 0;
}

/* The arrays stay with the ufunc, which NumPy never frees either. */
static uintptr_t make_ufunc(PyUFuncObject *matmul)
{
    static PyUFuncGenericFunction loops[MAX_LOOPS];
    static void *data[MAX_LOOPS];
    static char types[OPERANDS * MAX_LOOPS];
    if (!know(matmul))
        return 0;
    memcpy(types, matmul->types, (size_t)(OPERANDS * matmul->ntypes));
    for (int i = 0; i < matmul->ntypes; i++) {
        loops[i] = matmul->functions[i];
        data[i] = matmul->data ? matmul->data[i] : NULL;
    }
    for (int l = 0; l < TG_NLOOPS; l++)
        loops[loop_of(matmul, OURS[l].type)] = OURS[l].loop;
    for (int l = 0; l < N_MIXED; l++) {
        loops[matmul->ntypes + l] = MIXED[l].loop;
        memcpy(types + OPERANDS * (matmul->ntypes + l), MIXED[l].types, OPERANDS);
    }
    PyObject *made = PyUFunc_FromFuncAndDataAndSignature(loops, data, types, matmul->ntypes + N_MIXED, 2, 1,
                                                         PyUFunc_None, "matmul", DOCUMENTATION, 0, SIGNATURE);
    if (!made) {
        PyErr_Clear();
        return 0;
    }
    PyUFuncObject *ufunc = (PyUFuncObject *)made;
    for (int i = 0; i < OPERANDS; i++)
        ufunc->op_flags[i] = matmul->op_flags[i];      /* an output that overlaps an input is copied */
    Py_INCREF(matmul);
    numpys_matmul = matmul;
    ufunc->type_resolver = resolve;
    return tg_call_install(ufunc, 1) ? (uintptr_t)made : 0;
}

/* Replaces what is there only if it is what we expect: a third party's loop stays. */
static int patch(PyUFuncObject *matmul, int on)
{
    if (!know(matmul))
        return -1;
    for (int l = 0; l < TG_NLOOPS; l++) {
        PyUFuncGenericFunction there = matmul->functions[loop_of(matmul, OURS[l].type)];
        if (there != OURS[l].loop && there != tg_numpy_loops[l].run)
            return -1;
    }
    for (int l = 0; l < TG_NLOOPS; l++) {
        const int signature[OPERANDS] = { OURS[l].type, OURS[l].type, OURS[l].type };
        PyUFuncGenericFunction old, new = on ? OURS[l].loop : tg_numpy_loops[l].run;
        if (PyUFunc_ReplaceLoopBySignature(matmul, new, signature, &old) != 0)
            return -1;
    }
    return tg_call_install(matmul, on) ? 0 : -1;
}

uintptr_t tg_make_ufunc(uintptr_t np_matmul)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    uintptr_t made = make_ufunc((PyUFuncObject *)np_matmul);
    PyGILState_Release(gil);
    return made;
}

int tg_patch(uintptr_t np_matmul, int on)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    int result = patch((PyUFuncObject *)np_matmul, on);
    PyGILState_Release(gil);
    return result;
}

bool tg_python_finalizing(void)
{
#if PY_VERSION_HEX >= 0x030d0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

static int raise_interrupt(void *unused)
{
    (void)unused;
    PyObject *frontend = PyImport_ImportModule("tvmgemm.frontend");
    PyObject *none = frontend ? PyObject_CallMethod(frontend, "raise_interrupt", NULL) : NULL;
    Py_XDECREF(frontend);
    Py_XDECREF(none);
    return none ? 0 : -1;
}

/* Not PyErr_SetInterrupt, which does nothing where SIGINT is ignored, as in a shell's background job. */
void tg_python_interrupt(void)
{
    Py_AddPendingCall(raise_interrupt, NULL);   /* needs no GIL */
}
