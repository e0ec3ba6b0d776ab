/* NumPy's C API, for the files that use it: ufunc.c imports it for all of them. Included after Python.h. */
#ifndef TG_NUMPY_API_H
#define TG_NUMPY_API_H
#define PY_ARRAY_UNIQUE_SYMBOL tg_numpy_array_api
#define PY_UFUNC_UNIQUE_SYMBOL tg_numpy_ufunc_api
#include <numpy/arrayobject.h>
#include <numpy/ufuncobject.h>

/* call.c: products of plain operands without the ufunc machinery. Loop `loop` of np.matmul, and of any ufunc made
 * like it, is that of dtype number `type`; a ufunc gets that way in, or NumPy's own back. */
void tg_call_serve(int type, int loop);
bool tg_call_install(PyUFuncObject *ufunc, int on);

#endif
