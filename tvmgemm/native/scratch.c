/* The arena: one block of memory per thread that a kernel packs its operands into.
 *
 * It grows on demand, stays for the next call, and is freed when the thread ends or on request. */
#include <pthread.h>
#include <stdlib.h>
#include "native.h"

/* More than this is given back after the call that needed it: a thread that once multiplied something huge
 * should not hold the memory for ever. Packing buffers that follow the caches stay well below. */
#define KEEP_BYTES ((int64_t)64 << 20)
#define PAGE_BYTES 4096

static pthread_key_t at_thread_exit;
static bool have_key;

__attribute__((constructor)) static void make_key(void)
{
    have_key = pthread_key_create(&at_thread_exit, free) == 0;
}

void tg_release_scratch(void)
{
    if (!tg_self.scratch)
        return;
    if (have_key)
        pthread_setspecific(at_thread_exit, NULL);
    free(tg_self.scratch);
    tg_self.scratch = NULL;
    tg_self.scratch_bytes = 0;
}

void *tg_scratch(int64_t bytes)
{
    tg_thread *self = &tg_self;
    if (TG_LIKELY(bytes <= self->scratch_bytes))
        return self->scratch;
    if (bytes > INT64_MAX - PAGE_BYTES)
        return NULL;
    bytes = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;   /* grow in steps */
    tg_release_scratch();                                         /* first, so that the peak is one block */
    void *block;
    if (posix_memalign(&block, bytes >= 16 * PAGE_BYTES ? PAGE_BYTES : TG_CACHE_LINE, (size_t)bytes) != 0)
        return NULL;
    if (have_key)
        pthread_setspecific(at_thread_exit, block);
    self->scratch = block;
    self->scratch_bytes = bytes;
    return block;
}

void tg_trim_scratch(void)
{
    if (TG_UNLIKELY(tg_self.scratch_bytes > KEEP_BYTES))
        tg_release_scratch();
}

int64_t tg_scratch_bytes(void)
{
    return tg_self.scratch_bytes;
}
