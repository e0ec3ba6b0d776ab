/* native/cpu.c with a CPU and a system made up: arguments are XCR0, the CPU's AMX (0 or 1) and what the system answers when
 * asked for it. Prints the features, then how often it was asked. */
#define _GNU_SOURCE
#include <cpuid.h>
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static unsigned long long xcr0;
static int has_amx, answer, asked;

static int cpuid_of(unsigned leaf, unsigned subleaf, unsigned *a, unsigned *b, unsigned *c, unsigned *d)
{
    *a = *b = *c = *d = 0;
    if (leaf == 1)
        *c = 1u << 27;
    if (leaf == 7 && subleaf == 0) {
        *b = 1u << 16;
        *d = has_amx ? 1u << 22 | 3u << 24 : 0;
    }
    return 1;
}

static long ask(long number, long what, long feature)
{
    asked++;
    return number == SYS_arch_prctl && what == 0x1023 && feature == 18 ? answer : 1;
}

#define __get_cpuid(leaf, a, b, c, d) cpuid_of(leaf, 0, a, b, c, d)
#define __get_cpuid_count cpuid_of
#define _xgetbv(register) xcr0
#define syscall ask
#include "../tvmgemm/native/cpu.c"

int main(int count, char **argument)
{
    char text[4096];
    (void)count;
    xcr0 = strtoull(argument[1], NULL, 0);
    has_amx = atoi(argument[2]);
    answer = atoi(argument[3]);
    tg_cpu_features(text, sizeof text);
    tg_cpu_features(text, sizeof text);
    printf("%s\n%d\n", text, asked);
    return 0;
}
