/* The instruction sets that this process may use, by the names of Linux's /proc/cpuinfo.
 *
 * On x86 both the CPU (CPUID) and the operating system (XCR0, by XGETBV) must agree: a register that isn't
 * saved at a task switch must not be used. Linux wants to be asked besides before a process uses AMX. On ARM the kernel
 * says it. */
#include <stdbool.h>
#include <string.h>
#include "native.h"

typedef struct { char *out; size_t size; int64_t length; } text;

/* Like snprintf: counts everything, writes what fits, ends with a zero byte. */
static void append(text *t, const char *name)
{
    const char *parts[] = { t->length ? " " : "", name };
    for (int i = 0; i < 2; i++)
        for (const char *p = parts[i]; *p; p++, t->length++)
            if ((size_t)t->length + 1 < t->size)
                t->out[t->length] = *p;
}

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#include <immintrin.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { EAX, EBX, ECX, EDX };
enum {                                /* state that the operating system must save: bits of XCR0 */
    NONE = 0, YMM = 0x6, ZMM = 0xe6, TILE = 0x60006,
};
static const struct { const char *name; unsigned leaf, subleaf; int reg, bit; unsigned state; } FEATURES[] = {
    { "sse2",             1,          0, EDX, 26, NONE },
    { "ssse3",            1,          0, ECX,  9, NONE },
    { "sse4_1",           1,          0, ECX, 19, NONE },
    { "sse4_2",           1,          0, ECX, 20, NONE },
    { "movbe",            1,          0, ECX, 22, NONE },
    { "popcnt",           1,          0, ECX, 23, NONE },
    { "abm",              0x80000001, 0, ECX,  5, NONE },
    { "bmi1",             7,          0, EBX,  3, NONE },
    { "bmi2",             7,          0, EBX,  8, NONE },
    { "avx",              1,          0, ECX, 28, YMM },
    { "f16c",             1,          0, ECX, 29, YMM },
    { "fma",              1,          0, ECX, 12, YMM },
    { "avx2",             7,          0, EBX,  5, YMM },
    { "avx_vnni",         7,          1, EAX,  4, YMM },
    { "avx_ifma",         7,          1, EAX, 23, YMM },
    { "avx_vnni_int8",    7,          1, EDX,  4, YMM },
    { "avx_ne_convert",   7,          1, EDX,  5, YMM },
    { "avx512f",          7,          0, EBX, 16, ZMM },
    { "avx512dq",         7,          0, EBX, 17, ZMM },
    { "avx512ifma",       7,          0, EBX, 21, ZMM },
    { "avx512cd",         7,          0, EBX, 28, ZMM },
    { "avx512bw",         7,          0, EBX, 30, ZMM },
    { "avx512vl",         7,          0, EBX, 31, ZMM },
    { "avx512vbmi",       7,          0, ECX,  1, ZMM },
    { "avx512_vbmi2",     7,          0, ECX,  6, ZMM },
    { "avx512_vnni",      7,          0, ECX, 11, ZMM },
    { "avx512_bitalg",    7,          0, ECX, 12, ZMM },
    { "avx512_vpopcntdq", 7,          0, ECX, 14, ZMM },
    { "avx512_fp16",      7,          0, EDX, 23, ZMM },
    { "avx512_bf16",      7,          1, EAX,  5, ZMM },
    { "amx_tile",         7,          0, EDX, 24, TILE },
    { "amx_int8",         7,          0, EDX, 25, TILE },
    { "amx_bf16",         7,          0, EDX, 22, TILE },
    { "amx_fp16",         7,          1, EAX, 21, TILE },
};

__attribute__((target("xsave"))) static unsigned state_saved_by_system(void)
{
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & 1u << 27))   /* OSXSAVE */
        return 0;
    return (unsigned)_xgetbv(0);
}

/* Tile registers are 8 KiB of state. Linux reserves it for processes that ask, for all threads and children at once, and
 * refuses where a policy says so or a thread's signal stack has no room for it (or knows no such call). Asked once. */
static bool tiles_permitted(void)
{
#ifdef __linux__
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    static int answer;                /* 1 granted, -1 refused; the same whoever writes it */
    int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (!known) {
        known = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 ? 1 : -1;
        __atomic_store_n(&answer, known, __ATOMIC_RELAXED);
    }
    return known > 0;
#else
    return false;
#endif
}

static void append_features(text *t)
{
    unsigned saved = state_saved_by_system();
    for (size_t i = 0; i < sizeof FEATURES / sizeof *FEATURES; i++) {
        unsigned reg[4] = { 0 };
        /* A subleaf that the CPU lacks may repeat another's bits: leaf 7 says in EAX how many it has. */
        if (FEATURES[i].subleaf && (!__get_cpuid_count(7, 0, &reg[0], &reg[1], &reg[2], &reg[3])
                                    || reg[EAX] < FEATURES[i].subleaf))
            continue;
        if (__get_cpuid_count(FEATURES[i].leaf, FEATURES[i].subleaf, &reg[0], &reg[1], &reg[2], &reg[3])
            && reg[FEATURES[i].reg] >> FEATURES[i].bit & 1
            && (saved & FEATURES[i].state) == FEATURES[i].state
            && (FEATURES[i].state != TILE || tiles_permitted()))
            append(t, FEATURES[i].name);
    }
}

#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

static const struct { const char *name; int word, bit; } FEATURES[] = {   /* AT_HWCAP, AT_HWCAP2 */
    { "fp",       1,  0 }, { "asimd",    1,  1 }, { "fphp",     1,  9 }, { "asimdhp",  1, 10 },
    { "asimddp",  1, 20 }, { "sve",      1, 22 }, { "asimdfhm", 1, 23 }, { "sve2",     2,  1 },
    { "svei8mm",  2,  9 }, { "svebf16",  2, 12 }, { "i8mm",     2, 13 }, { "bf16",     2, 14 },
    { "sme",      2, 23 },
};

static void append_features(text *t)
{
    const unsigned long word[] = { 0, getauxval(AT_HWCAP), getauxval(AT_HWCAP2) };
    for (size_t i = 0; i < sizeof FEATURES / sizeof *FEATURES; i++)
        if (word[FEATURES[i].word] >> FEATURES[i].bit & 1)
            append(t, FEATURES[i].name);
}

#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

static const struct { const char *name, *key; } FEATURES[] = {
    { "fphp",     "hw.optional.arm.FEAT_FP16" },
    { "asimdhp",  "hw.optional.arm.FEAT_FP16" },
    { "asimddp",  "hw.optional.arm.FEAT_DotProd" },
    { "asimdfhm", "hw.optional.arm.FEAT_FHM" },
    { "i8mm",     "hw.optional.arm.FEAT_I8MM" },
    { "bf16",     "hw.optional.arm.FEAT_BF16" },
};

static void append_features(text *t)
{
    append(t, "fp");
    append(t, "asimd");
    for (size_t i = 0; i < sizeof FEATURES / sizeof *FEATURES; i++) {
        int value = 0;
        size_t size = sizeof value;
        if (sysctlbyname(FEATURES[i].key, &value, &size, NULL, 0) == 0 && value)
            append(t, FEATURES[i].name);
    }
}

#else
static void append_features(text *t) { (void)t; (void)append; }
#endif

int64_t tg_cpu_features(char *out, size_t size)
{
    text t = { out, size, 0 };
    append_features(&t);
    if (size)
        out[(size_t)t.length < size ? (size_t)t.length : size - 1] = 0;
    return t.length;
}
