/* Runs a kernel of another architecture, or of another level of this one, in an emulator (see emulation.py).

       harness LIBRARY SYMBOL  < problems  > answers

   A problem is a `struct problem` and the bytes of A, B and C; its answer a `struct answer` and the bytes of C.
   Everything is little-endian. Every buffer lies against a page that cannot be touched, at its end or at its start,
   so a kernel that reads or writes past that side dies; what it writes past the other side is found afterwards. The
   answers end where a kernel died.

   Exit status 2, with a line on stderr, for anything that is not the kernel's fault. */

#include <dlfcn.h>
#include <fenv.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { M, N, K, RSA, CSA, RSB, CSB, RSC, CSC, MC, NC, KC, TASKS, BATCH, SA, SB, SC, NARGS };
enum { ASCENDING, DESCENDING, THREADS };            /* how the tasks of a parallel loop are run */
enum { WORK_OVERRUN = 1, C_OVERRUN = 2, A_CHANGED = 4, B_CHANGED = 8, WORK_SIZE = 16 }; /* answer.faults */
enum { INVALID = 1, DIVBYZERO = 2, OVERFLOW = 4 };  /* answer.flags */
enum { MOST_TASKS = 64 };

struct problem {
    int64_t launch;                 /* ASCENDING, ... */
    int64_t at_end;                 /* 1: buffers end at a forbidden page; 0: they start behind one */
    int64_t bytes[3], offset[3];    /* of A, B, C: size of the buffer, and where element (0, 0) lies in it */
    int64_t args[NARGS];
    unsigned char scale[16];        /* alpha, beta in the dtype */
    unsigned char noise[8];         /* what surrounds buffers and fills the workspace: signalling NaNs */
};

struct answer { int64_t status, flags, faults, work_bytes; };

typedef int32_t kernel_fn(const void *A, const void *B, void *C, void *work, const void *scale, const int64_t *args);
typedef int32_t workspace_fn(const int64_t *args, int64_t *bytes);
typedef struct { void *sync_handle; int32_t num_task; } environment;    /* TVM's TVMParallelGroupEnv */
typedef int task_fn(int task, environment *env, void *closure);
typedef int launch_fn(task_fn *task, void *closure, int num_task);

static struct problem current;      /* the launcher needs to know it; kernels do not pass it on */
static int raised_in_threads;
static pthread_barrier_t started;   /* threads begin together: one alone would be done before the next is there */

static void fail(const char *what, const char *detail)
{
    fprintf(stderr, "harness: %s: %s\n", what, detail);
    exit(2);
}

/* ---- memory between two forbidden pages -------------------------------------------------------------------- */

enum { PAGE = 65536, GUARD = 1024 };    /* PAGE: a multiple of every page size */

struct room { unsigned char *start, *place; size_t capacity, size; };

static void fill(unsigned char *from, const unsigned char *end)
{
    for (; from < end; from++) *from = current.noise[(uintptr_t)from % sizeof current.noise];
}

static int filled(const unsigned char *from, const unsigned char *end)
{
    while (from < end && *from == current.noise[(uintptr_t)from % sizeof current.noise]) from++;
    return from == end;
}

/* GUARD bytes before and behind what was placed, or those that there are. */
static unsigned char *guard(const struct room *room)
{
    return room->place - room->start < GUARD ? room->start : room->place - GUARD;
}

static unsigned char *guard_end(const struct room *room)
{
    unsigned char *end = room->start + room->capacity, *place_end = room->place + room->size;
    return end - place_end < GUARD ? end : place_end + GUARD;
}

/* `size` bytes in `room`; at its end, rounded down to `alignment`, or at its start. */
static unsigned char *place(struct room *room, size_t size, size_t alignment)
{
    if (room->capacity < size + GUARD || !room->start) {
        if (room->start) munmap(room->start - PAGE, room->capacity + 2 * PAGE);
        room->capacity = (size + GUARD + PAGE) / PAGE * PAGE;
        unsigned char *all = mmap(NULL, room->capacity + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (all == MAP_FAILED || mprotect(all + PAGE, room->capacity, PROT_READ | PROT_WRITE))
            fail("mmap", "no memory");
        room->start = all + PAGE;
    }
    room->place = room->start + (current.at_end ? (room->capacity - size) / alignment * alignment : 0);
    room->size = size;
    fill(guard(room), guard_end(room));
    return room->place;
}

/* Whether the bytes on either side of what was placed are as they were. */
static int untouched(const struct room *room)
{
    return filled(guard(room), room->place) && filled(room->place + room->size, guard_end(room));
}

/* ---- the launcher ---------------------------------------------------------------------------------------------- */

struct job { task_fn *task; void *closure; int id, status, flags; };

static void *run_task(void *pointer)
{
    struct job *job = pointer;
    environment env = { NULL, (int32_t)current.args[TASKS] };
    if (current.launch == THREADS) pthread_barrier_wait(&started);
    feclearexcept(FE_ALL_EXCEPT);
    job->status = job->task(job->id, &env, job->closure);
    job->flags = fetestexcept(FE_ALL_EXCEPT);
    return NULL;
}

static int launch(task_fn *task, void *closure, int num_task)
{
    int tasks = (int)current.args[TASKS], status = 0;
    struct job jobs[MOST_TASKS];
    pthread_t threads[MOST_TASKS];
    fenv_t callers;
    (void)num_task;                 /* always 0: "as many as there are" */
    if (tasks > MOST_TASKS) fail("too many tasks", "at most 64");
    fegetenv(&callers);
    if (current.launch == THREADS) pthread_barrier_init(&started, NULL, (unsigned)tasks);
    for (int i = 0; i < tasks; i++) {
        int id = current.launch == DESCENDING ? tasks - 1 - i : i;
        jobs[i] = (struct job){ task, closure, id, 0, 0 };
        if (current.launch != THREADS) run_task(&jobs[i]);
        else if (pthread_create(&threads[i], NULL, run_task, &jobs[i])) fail("pthread_create", "refused");
    }
    for (int i = 0; i < tasks; i++) {
        if (current.launch == THREADS) pthread_join(threads[i], NULL);
        status = status ? status : jobs[i].status;
        raised_in_threads |= jobs[i].flags;
    }
    if (current.launch == THREADS) pthread_barrier_destroy(&started);
    fesetenv(&callers);
    return status;
}

/* ---- kernels ----------------------------------------------------------------------------------------------------- */

struct kernel { kernel_fn *run; workspace_fn *workspace; };

static void *symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (!found) fail(name, dlerror());
    return found;
}

static struct kernel load(const char *path, const char *name)
{
    char workspace[512];
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) fail(path, dlerror());
    snprintf(workspace, sizeof workspace, "%s_workspace", name);
    launch_fn **launcher = dlsym(library, "__TVMBackendParallelLaunch");    /* only parallel kernels have it */
    if (launcher) *launcher = launch;
    return (struct kernel){ (kernel_fn *)symbol(library, name), (workspace_fn *)symbol(library, workspace) };
}

/* ---- one problem ------------------------------------------------------------------------------------------------- */

static void receive(void *bytes, size_t size)
{
    if (fread(bytes, 1, size, stdin) != size) fail("stdin", "ends inside a problem");
}

static struct answer solve(struct kernel kernel, struct room *operands, struct room *work)
{
    struct answer answer = { 0 };
    unsigned char *copy[2], *at[3];
    int64_t args[NARGS], needed = -1;
    for (int i = 0; i < 3; i++) {
        at[i] = place(&operands[i], (size_t)current.bytes[i], 1) + current.offset[i];
        receive(operands[i].place, operands[i].size);
    }
    for (int i = 0; i < 2; i++) {
        copy[i] = malloc(operands[i].size + 1);
        if (!copy[i]) fail("malloc", "no memory");
        memcpy(copy[i], operands[i].place, operands[i].size);
    }
    memcpy(args, current.args, sizeof args);
    answer.status = kernel.workspace(args, &needed);
    answer.work_bytes = needed;
    if (answer.status || needed < 0 || needed % 64) {
        answer.faults = WORK_SIZE;
    } else {
        place(work, (size_t)needed, 64);
        raised_in_threads = 0;
        feclearexcept(FE_ALL_EXCEPT);
        answer.status = kernel.run(at[0], at[1], at[2], work->place, current.scale, args);
        int raised = fetestexcept(FE_ALL_EXCEPT) | raised_in_threads;
        answer.flags = (raised & FE_INVALID ? INVALID : 0) | (raised & FE_DIVBYZERO ? DIVBYZERO : 0)
                     | (raised & FE_OVERFLOW ? OVERFLOW : 0);
        answer.faults = (untouched(work) ? 0 : WORK_OVERRUN) | (untouched(&operands[2]) ? 0 : C_OVERRUN);
    }
    for (int i = 0; i < 2; i++) {
        if (memcmp(copy[i], operands[i].place, operands[i].size)) answer.faults |= i ? B_CHANGED : A_CHANGED;
        free(copy[i]);
    }
    return answer;
}

int main(int argc, char **argv)
{
    struct room operands[3] = { { 0 } }, work = { 0 };
    if (argc != 3) fail("arguments", "LIBRARY SYMBOL");
    struct kernel kernel = load(argv[1], argv[2]);
    while (fread(&current, 1, sizeof current, stdin) == sizeof current) {
        struct answer answer = solve(kernel, operands, &work);
        fwrite(&answer, sizeof answer, 1, stdout);
        fwrite(operands[2].place, 1, operands[2].size, stdout);
        fflush(stdout);             /* whatever happens to the next one */
    }
    return 0;
}
