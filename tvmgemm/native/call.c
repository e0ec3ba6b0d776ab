/* The way in for plain operands: a product of two matrices or vectors that needs nothing of what NumPy's ufunc
 * machinery can do beyond it.
 *
 * For a product of 4 x 4 that machinery takes five times as long as the product. Objects of type ufunc are
 * called through a pointer that each of them has; ours and a patched np.matmul get `call`, which leaves
 * everything else to NumPy: subclasses, other dtypes than one that we serve, byte orders, stacks, keywords, an
 * output that overlaps an input, empty operands, errors. It calls the ufunc's inner loop as NumPy would, so a
 * product that no kernel serves runs NumPy's loop here too. */
#include <Python.h>
#include <fenv.h>
#include <stdbool.h>
#define NO_IMPORT_ARRAY
#define NO_IMPORT_UFUNC
#include "numpy_api.h"
#include "fpstate.h"
#include "native.h"

/* m.n.k from which other Python threads may run meanwhile. */
#define LONG_WORK (1 << 15)

/* A flag that NumPy's public headers leave out: np.broadcast_arrays gives arrays that warn when they are written. */
#define WARN_ON_WRITE ((int)(1u << 31))

enum { N_TYPES = NPY_HALF + 1 };

/* By type number: the one object of each dtype that we serve (NULL: another dtype), and its loop in the ufunc. */
static PyArray_Descr *plain_dtype[N_TYPES];
static int loop_index[N_TYPES];
static PyObject *out_keyword;
static vectorcallfunc numpys_call;

void tg_call_serve(int type, int loop)
{
    if (type < N_TYPES && !plain_dtype[type]) {
        loop_index[type] = loop;
        plain_dtype[type] = PyArray_DescrFromType(type);
    }
}

/* A matrix, or a vector as a matrix of one row or one column; strides in bytes. */
typedef struct {
    char *data;
    npy_intp rows, columns, row_stride, column_stride;
} matrix;

static inline bool is_plain(PyObject *object, PyArray_Descr *dtype)
{
    return PyArray_CheckExact(object) && PyArray_DESCR((PyArrayObject *)object) == dtype
        && PyArray_ISALIGNED((PyArrayObject *)object);
}

static inline bool as_matrix(PyArrayObject *array, bool row, matrix *x)
{
    const npy_intp *shape = PyArray_DIMS(array), *strides = PyArray_STRIDES(array);
    const npy_intp itemsize = PyArray_ITEMSIZE(array);
    char *data = PyArray_BYTES(array);
    switch (PyArray_NDIM(array)) {
    case 2:
        *x = (matrix){ data, shape[0], shape[1], strides[0], strides[1] };
        return true;
    case 1:
        *x = row ? (matrix){ data, 1, shape[0], itemsize, strides[0] }
                 : (matrix){ data, shape[0], 1, strides[0], itemsize };
        return true;
    default:
        return false;
    }
}

/* The bytes between which all elements lie. */
static inline void extent(const matrix *x, npy_intp itemsize, const char **low, const char **high)
{
    const npy_intp down = (x->rows - 1) * x->row_stride, across = (x->columns - 1) * x->column_stride;
    *low = x->data + (down < 0 ? down : 0) + (across < 0 ? across : 0);
    *high = x->data + (down > 0 ? down : 0) + (across > 0 ? across : 0) + itemsize;
}

static inline bool apart(const matrix *x, const matrix *y, npy_intp itemsize)
{
    const char *x_low, *x_high, *y_low, *y_high;
    extent(x, itemsize, &x_low, &x_high);
    extent(y, itemsize, &y_low, &y_high);
    return x_high <= y_low || y_high <= x_low;
}

/* Whether `object` can be written as it is: an array of that shape (a `row` if it is a vector) whose elements are
 * apart from one another and from both operands. */
static bool is_plain_out(PyObject *object, PyArray_Descr *dtype, int ndim, bool row, const matrix *a, const matrix *b,
                         matrix *c)
{
    PyArrayObject *array = (PyArrayObject *)object;
    if (!is_plain(object, dtype) || PyArray_NDIM(array) != ndim)
        return false;
    const npy_intp itemsize = PyArray_ITEMSIZE(array);
    if (!as_matrix(array, row, c))
        *c = (matrix){ PyArray_BYTES(array), 1, 1, itemsize, itemsize };
    if (c->rows != a->rows || c->columns != b->columns
        || (PyArray_FLAGS(array) & (NPY_ARRAY_WRITEABLE | WARN_ON_WRITE)) != NPY_ARRAY_WRITEABLE)
        return false;
    const npy_intp down = c->row_stride < 0 ? -c->row_stride : c->row_stride;
    const npy_intp across = c->column_stride < 0 ? -c->column_stride : c->column_stride;
    const bool by_rows = across >= itemsize && (c->rows == 1 || down >= across * c->columns);
    const bool by_columns = down >= itemsize && (c->columns == 1 || across >= down * c->rows);
    return (by_rows || by_columns) && apart(c, a, itemsize) && apart(c, b, itemsize);
}

#define CHECKED (FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW | FE_INVALID)

/* Exceptions in NumPy's numbers. */
static inline int in_numpys_numbers(int flags)
{
    return (flags & FE_DIVBYZERO ? NPY_FPE_DIVIDEBYZERO : 0) | (flags & FE_OVERFLOW ? NPY_FPE_OVERFLOW : 0)
        | (flags & FE_UNDERFLOW ? NPY_FPE_UNDERFLOW : 0) | (flags & FE_INVALID ? NPY_FPE_INVALID : 0);
}

/* The exceptions that have been raised, of those that are checked. Only NumPy's loop for float16 raises them in the
 * x87 unit, too, and to ask that takes as long as all other checks of a call. */
static inline int raised(bool half)
{
    return (half ? fetestexcept(CHECKED) : tg_fp_flags()) & CHECKED;
}

static inline void forget(bool half)
{
    if (half)
        feclearexcept(CHECKED);
    else
        tg_fp_clear(CHECKED);
}

/* Runs the loop of a dtype. */
static int multiply(PyUFuncObject *ufunc, int type, const matrix *a, const matrix *b, const matrix *c)
{
    const bool exact = PyTypeNum_ISINTEGER(type) || PyTypeNum_ISBOOL(type), half = type == NPY_HALF;
    const int loop = loop_index[type];
    char *args[] = { a->data, b->data, c->data };
    const npy_intp dims[] = { 1, a->rows, a->columns, b->columns };
    const npy_intp steps[] = { 0, 0, 0, a->row_stride, a->column_stride, b->row_stride, b->column_stride,
                               c->row_stride, c->column_stride };
    const double work = (double)a->rows * (double)a->columns * (double)b->columns;
    PyThreadState *others = work >= LONG_WORK ? PyEval_SaveThread() : NULL;
    if (!exact && TG_UNLIKELY(raised(half)))
        forget(half);
    ufunc->functions[loop](args, dims, steps, ufunc->data ? ufunc->data[loop] : NULL);
    const int errors = exact ? 0 : raised(half);
    if (TG_UNLIKELY(errors))
        forget(half);
    if (others)
        PyEval_RestoreThread(others);
    return TG_LIKELY(!errors) ? 0 : PyUFunc_GiveFloatingpointErrors("matmul", in_numpys_numbers(errors));
}

static PyObject *call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *keywords)
{
    const Py_ssize_t given = PyVectorcall_NARGS(nargsf);
    PyObject *out = given == 3 ? args[2] : NULL;
    if (keywords && PyTuple_GET_SIZE(keywords) > 0) {
        if (given != 2 || PyTuple_GET_SIZE(keywords) != 1 || PyTuple_GET_ITEM(keywords, 0) != out_keyword)
            return numpys_call(self, args, nargsf, keywords);
        out = args[2];
    } else if (given != 2 && given != 3) {
        return numpys_call(self, args, nargsf, keywords);
    }
    if (!PyArray_CheckExact(args[0]) || !PyArray_CheckExact(args[1]))
        return numpys_call(self, args, nargsf, keywords);
    PyArrayObject *x = (PyArrayObject *)args[0], *y = (PyArrayObject *)args[1];
    PyArray_Descr *dtype = PyArray_DESCR(x);
    const int type = PyArray_TYPE(x);
    matrix a, b, c;
    if (type >= N_TYPES || dtype != plain_dtype[type] || !is_plain(args[0], dtype) || !is_plain(args[1], dtype)
        || !as_matrix(x, true, &a) || !as_matrix(y, false, &b) || a.columns != b.rows
        || a.rows == 0 || a.columns == 0 || b.columns == 0)
        return numpys_call(self, args, nargsf, keywords);
    const bool rows = PyArray_NDIM(x) == 2;
    const int ndim = rows + (PyArray_NDIM(y) == 2);
    const npy_intp itemsize = PyArray_ITEMSIZE(x);
    PyObject *result = NULL;
    npy_cdouble scalar;               /* room for one of any dtype */
    if (out && out != Py_None) {
        if (!PyArray_CheckExact(out) || !is_plain_out(out, dtype, ndim, !rows, &a, &b, &c))
            return numpys_call(self, args, nargsf, keywords);
        Py_INCREF(out);
        result = out;
    } else if (ndim == 0) {
        c = (matrix){ (char *)&scalar, 1, 1, itemsize, itemsize };
    } else {
        npy_intp shape[] = { a.rows, b.columns };
        Py_INCREF(dtype);
        result = PyArray_NewFromDescr(&PyArray_Type, dtype, ndim, rows ? shape : shape + 1, NULL, NULL, 0, NULL);
        if (!result)
            return NULL;
        c = (matrix){ PyArray_BYTES((PyArrayObject *)result), a.rows, b.columns, b.columns * itemsize, itemsize };
    }
    if (TG_UNLIKELY(multiply((PyUFuncObject *)self, type, &a, &b, &c) < 0)) {
        Py_XDECREF(result);
        return NULL;
    }
    return result ? result : PyArray_Scalar(&scalar, dtype, NULL);
}

bool tg_call_install(PyUFuncObject *ufunc, int on)
{
    if (!out_keyword && !(out_keyword = PyUnicode_InternFromString("out"))) {
        PyErr_Clear();
        return false;
    }
    if (on && ufunc->vectorcall != call) {
        numpys_call = ufunc->vectorcall;
        ufunc->vectorcall = call;
    } else if (!on && ufunc->vectorcall == call) {
        ufunc->vectorcall = numpys_call;
    }
    return true;
}
