/* Kernels: opening compiled libraries and finding the functions in them.
 *
 * A library is opened privately and never closed: a call in flight, or a plan that a reader still holds,
 * may point into it. If it uses T.parallel it exports the pointer __TVMBackendParallelLaunch, which gets
 * our launcher: no part of TVM is needed to run it. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "native.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static tg_kernel *kernels;

/* A fork while another thread adds a kernel must not leave the child with a locked list. */
static void lock_list(void) { pthread_mutex_lock(&lock); }
static void unlock_list(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void survive_fork(void)
{
    pthread_atfork(lock_list, unlock_list, unlock_list);
}

static void *symbol_of(void *library, const char *symbol, const char *suffix)
{
    char name[512];
    int length = snprintf(name, sizeof name, "%s%s", symbol, suffix);
    return length > 0 && (size_t)length < sizeof name ? dlsym(library, name) : NULL;
}

static tg_kernel *add(tg_kernel_fn run, tg_workspace_fn workspace, const char *name)
{
    tg_kernel *kernel;
    lock_list();
    for (kernel = kernels; kernel; kernel = kernel->next)
        if (kernel->run == run)
            break;
    if (!kernel && (kernel = calloc(1, sizeof *kernel))) {
        *kernel = (tg_kernel){ .run = run, .workspace = workspace, .name = strdup(name), .next = kernels };
        if (kernel->name) {
            kernels = kernel;
        } else {
            free(kernel);
            kernel = NULL;
        }
    }
    unlock_list();
    return kernel;
}

tg_kernel *tg_kernel_load(const char *path, const char *symbol, const char *name, char *error,
                          size_t error_size)
{
    if (error_size)
        error[0] = 0;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        snprintf(error, error_size, "%s", reason ? reason : "dlopen failed");
        return NULL;
    }
    void *run = symbol_of(library, symbol, "");
    if (!run) {
        snprintf(error, error_size, "%s has no symbol '%s'", path, symbol);
        dlclose(library);   /* nothing points into it yet */
        return NULL;
    }
    void **launch = dlsym(library, "__TVMBackendParallelLaunch");
    if (launch)                       /* atomic: the library may be open, and in use, already */
        __atomic_store_n(launch, (void *)tg_launch, __ATOMIC_RELEASE);
    void *workspace = symbol_of(library, symbol, "_workspace");
    tg_kernel *kernel = add((tg_kernel_fn)run, (tg_workspace_fn)workspace, name);
    if (!kernel)
        snprintf(error, error_size, "no memory to register '%s'", symbol);
    return kernel;
}

const char *tg_kernel_name(const tg_kernel *kernel)
{
    return kernel->name;
}
