/* AMX and AVX-VNNI in software, for tests on CPUs that lack them: a handler of SIGILL that executes the instruction at which the
 * CPU gave up, if it is one of those below, and goes on behind it. Semantics: Intel, Software Developer's Manual, volume 2. What the
 * manual lets fault (no configuration, sizes that do not fit, one register twice) ends in the handler that was there before.
 *
 * The vector registers are those of the signal's frame. Each thread has tile registers of its own. A signal handler runs with the default rounding and its floating-point flags
 * are dropped when it returns, as AMX has it: to nearest, nothing raised. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

enum { TILES = 8, ROWS = 16, BYTES = 64 };
enum { NP, P66, PF3, PF2 };           /* the prefix, as VEX has it */

typedef struct { uint8_t palette, start_row, zero[14]; uint16_t colsb[16]; uint8_t rows[16]; } config;

static __thread config set;
static __thread uint8_t tile[TILES][ROWS][BYTES];
static struct sigaction before;
static long emulated;

typedef struct {
    int pp, opcode, mod, reg, rm, third, wide;   /* wide: 256 bits */
    int64_t address, stride;          /* of a memory operand: base and displacement, index times scale */
    int64_t next;
} instruction;

/* The registers in the order of their numbers. */
static const int GREG[16] = {
    REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
    REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15,
};

static int decode(const greg_t *gregs, instruction *in)
{
    const uint8_t *p = (const uint8_t *)gregs[REG_RIP];
    if (p[0] != 0xc4 || (p[1] & 31) != 2 || p[2] & 0x80)   /* three-byte VEX of map 0F38, W0 */
        return 0;
    int x = ~p[1] >> 6 & 1, b = ~p[1] >> 5 & 1;
    in->pp = p[2] & 3;
    in->third = ~(p[2] >> 3) & 15;
    in->wide = p[2] >> 2 & 1;
    in->opcode = p[3];
    in->mod = p[4] >> 6;
    in->reg = (p[4] >> 3 & 7) | (~p[1] >> 7 & 1) << 3;
    in->rm = p[4] & 7;
    p += 5;
    if (in->mod != 3) {
        int base = in->rm, index = 4, scale = 0;
        if (in->rm == 4) {
            scale = *p >> 6;
            index = (*p >> 3 & 7) | x << 3;
            base = *p++ & 7;
        }
        int none = base == 5 && in->mod == 0;
        int size = in->mod == 1 ? 1 : in->mod == 2 || none ? 4 : 0;
        int32_t displacement = 0;
        if (size == 1)
            displacement = (int8_t)*p;
        else if (size == 4)
            memcpy(&displacement, p, 4);
        p += size;
        int64_t from = !none ? gregs[GREG[base | b << 3]] : in->rm == 4 ? 0 : (int64_t)p;   /* %rip is that of the next */
        in->address = from + displacement;
        in->stride = index == 4 ? 0 : gregs[GREG[index]] << scale;
    } else {
        in->rm |= b << 3;
    }
    in->next = (int64_t)p;
    return 1;
}

static int load_config(const uint8_t *from)
{
    config new;
    memcpy(&new, from, sizeof new);
    memset(tile, 0, sizeof tile);
    if (new.palette == 0) {
        memset(&set, 0, sizeof set);
        return 1;
    }
    if (new.palette != 1 || new.start_row)
        return 0;
    for (int i = 0; i < 14; i++)
        if (new.zero[i])
            return 0;
    for (int t = 0; t < 16; t++)
        if (new.rows[t] > ROWS || new.colsb[t] > BYTES || !new.rows[t] != !new.colsb[t] || (t >= TILES && new.rows[t]))
            return 0;
    set = new;
    return 1;
}

/* Of both products of 16-bit floats the sums by themselves, then all three numbers; subnormal numbers are zeros. */
static uint32_t flushed(uint32_t x)
{
    return x & 0x7f800000 ? x : x & 0x80000000;
}

static float number(uint32_t bits)
{
    float x;
    bits = flushed(bits);
    memcpy(&x, &bits, 4);
    return x;
}

static float kept(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return number(bits);
}

/* Loops over the columns of C, which the compiler vectorises: tests execute millions of these. */
#define FAST __attribute__((target("avx2,fma")))

FAST static void floats(int c, int a, int b)
{
    float right[BYTES / 4][2][BYTES / 4];
    for (int k = 0; k < set.colsb[a] / 4; k++)
        for (int n = 0; n < BYTES / 4; n++)
            for (int q = 0; q < 2; q++) {
                uint16_t x;
                memcpy(&x, tile[b][k] + 4 * n + 2 * q, 2);
                right[k][q][n] = number((uint32_t)x << 16);
            }
    for (int m = 0; m < set.rows[c]; m++) {
        float sum[2][BYTES / 4] = { { 0 } }, total[BYTES / 4];
        for (int k = 0; k < set.colsb[a] / 4; k++)
            for (int q = 0; q < 2; q++) {
                uint16_t x;
                memcpy(&x, tile[a][m] + 4 * k + 2 * q, 2);
                float left = number((uint32_t)x << 16);
                for (int n = 0; n < BYTES / 4; n++)
                    sum[q][n] = kept(__builtin_fmaf(left, right[k][q][n], sum[q][n]));
            }
        memcpy(total, tile[c][m], BYTES);
        for (int n = 0; n < BYTES / 4; n++)
            total[n] = kept(kept(total[n]) + kept(sum[0][n] + sum[1][n]));
        memcpy(tile[c][m], total, set.colsb[c]);
    }
}

FAST static void bytes(int c, int a, int b, int a_signed, int b_signed)
{
    int32_t right[BYTES][BYTES / 4];
    for (int k = 0; k < set.colsb[a]; k++)
        for (int n = 0; n < BYTES / 4; n++) {
            uint8_t x = tile[b][k / 4][4 * n + k % 4];
            right[k][n] = b_signed ? (int8_t)x : x;
        }
    for (int m = 0; m < set.rows[c]; m++) {
        uint32_t sum[BYTES / 4];
        memcpy(sum, tile[c][m], BYTES);
        for (int k = 0; k < set.colsb[a]; k++) {
            uint8_t x = tile[a][m][k];
            int32_t left = a_signed ? (int8_t)x : x;
            for (int n = 0; n < BYTES / 4; n++)
                sum[n] += (uint32_t)(left * right[k][n]);
        }
        memcpy(tile[c][m], sum, set.colsb[c]);
    }
}

static int multiply(const instruction *in)
{
    int c = in->reg, a = in->rm, b = in->third;
    if (in->mod != 3 || a == b || a == c || b == c || !set.rows[a] || !set.rows[b] || !set.rows[c]
        || set.rows[a] != set.rows[c] || set.colsb[b] != set.colsb[c] || set.colsb[a] != 4 * set.rows[b]
        || set.colsb[c] % 4)
        return 0;
    if (in->opcode == 0x5e)
        bytes(c, a, b, in->pp >= PF3, in->pp == P66 || in->pp == PF2);
    else if (in->pp == PF3)
        floats(c, a, b);
    else
        return 0;
    return 1;
}

static int move(const instruction *in)
{
    int t = in->reg;
    if (in->mod == 3 || in->rm != 4 || !set.rows[t])
        return 0;
    if (in->pp != PF3)
        memset(tile[t], 0, sizeof tile[t]);
    for (int m = 0; m < set.rows[t]; m++) {
        uint8_t *memory = (uint8_t *)(in->address + m * in->stride);
        if (in->pp == PF3)            /* tilestored */
            memcpy(memory, tile[t][m], set.colsb[t]);
        else                          /* tileloadd, tileloaddt1 */
            memcpy(tile[t][m], memory, set.colsb[t]);
    }
    return in->pp != NP;
}

/* Where a 16-byte half of a vector register is in the frame (XSAVE's standard format). A component that the frame leaves out is
 * all zeros, until it is written. */
static uint8_t *half(ucontext_t *context, int reg, int upper)
{
    enum { SSE = 160, HEADER = 512, AVX = 576 };
    uint8_t *frame = (uint8_t *)context->uc_mcontext.fpregs, *all = frame + (upper ? AVX : SSE);
    uint64_t present, bit = upper ? 4 : 2;
    memcpy(&present, frame + HEADER, sizeof present);
    if (!(present & bit)) {
        memset(all, 0, 16 * 16);
        present |= bit;
        memcpy(frame + HEADER, &present, sizeof present);
    }
    return all + 16 * reg;
}

/* vpdpbusd, vpdpwssd: products of unsigned by signed bytes, of 16-bit integers, added up in 32 bits. */
static int dot(const instruction *in, ucontext_t *context)
{
    const uint8_t *memory = (const uint8_t *)(in->address + in->stride);
    for (int upper = 0; upper < 2; upper++) {
        uint8_t a[16], b[16], *c = half(context, in->reg, upper);
        if (upper && !in->wide) {
            memset(c, 0, 16);
            break;
        }
        memcpy(a, half(context, in->third, upper), 16);
        memcpy(b, in->mod == 3 ? half(context, in->rm, upper) : memory + 16 * upper, 16);
        for (int i = 0; i < 16; i += 4) {
            uint32_t sum;
            memcpy(&sum, c + i, 4);
            for (int q = i; q < i + 4; q += in->opcode == 0x50 ? 1 : 2) {
                int16_t x, y;
                memcpy(&x, a + (q & ~1), 2);
                memcpy(&y, b + (q & ~1), 2);
                sum += in->opcode == 0x50 ? (uint32_t)(a[q] * (int8_t)b[q]) : (uint32_t)(x * y);
            }
            memcpy(c + i, &sum, 4);
        }
    }
    return 1;
}

static int execute(const instruction *in, ucontext_t *context)
{
    if ((in->opcode == 0x50 || in->opcode == 0x52) && in->pp == P66)
        return dot(in, context);
    if (in->wide || in->reg >= TILES || in->third >= TILES || (in->mod == 3 && in->rm >= TILES))
        return 0;
    if (in->opcode == 0x5e || in->opcode == 0x5c)
        return set.palette && multiply(in);
    if (in->opcode == 0x4b)
        return set.palette && move(in);
    if (in->opcode != 0x49)
        return 0;
    if (in->mod == 3 && in->pp == NP && in->reg == 0 && in->rm == 0) {   /* tilerelease */
        memset(&set, 0, sizeof set);
        memset(tile, 0, sizeof tile);
        return 1;
    }
    if (in->mod == 3 && in->pp == PF2 && in->rm == 0 && set.palette && set.rows[in->reg]) {
        memset(tile[in->reg], 0, sizeof tile[0]);
        return 1;
    }
    if (in->mod == 3 || in->reg)
        return 0;
    if (in->pp == P66) {              /* sttilecfg */
        memcpy((void *)(in->address + in->stride), &set, sizeof set);
        return 1;
    }
    return in->pp == NP && load_config((const uint8_t *)(in->address + in->stride));
}

static void handle(int signal, siginfo_t *info, void *context)
{
    greg_t *gregs = ((ucontext_t *)context)->uc_mcontext.gregs;
    instruction in = { 0 };
    (void)info;
    if (decode(gregs, &in) && execute(&in, context)) {
        gregs[REG_RIP] = in.next;
        __atomic_fetch_add(&emulated, 1, __ATOMIC_RELAXED);
    } else {
        sigaction(signal, &before, NULL);   /* and again, from the same place */
    }
}

int amx_begin(void)
{
    struct sigaction action = { .sa_sigaction = handle, .sa_flags = SA_SIGINFO };
    return sigaction(SIGILL, &action, &before);
}

int amx_end(void)
{
    return sigaction(SIGILL, &before, NULL);
}

/* Instructions so far, and whether this thread's registers are in use: a kernel leaves them released. */
long amx_emulated(void)
{
    return emulated;
}

int amx_configured(void)
{
    return set.palette;
}
