/* The floating-point state that a worker takes from its caller (mode) and gives back (exception flags), and that a
 * call is asked about.
 *
 * The mode is rounding, flush-to-zero and trap masks, without flags. <fenv.h> would do everywhere, but
 * costs as much as a small task, so the two usual machines have their own lines. */
#ifndef TG_FPSTATE_H
#define TG_FPSTATE_H
#include <fenv.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned int tg_fp_mode;
#define TG_FP_FLAGS 0x3fu             /* the exception flags of MXCSR, which are the FE_ values */
static inline tg_fp_mode tg_fp_current_mode(void) { return _mm_getcsr() & ~TG_FP_FLAGS; }
static inline void tg_fp_adopt(tg_fp_mode mode) { _mm_setcsr(mode); }
static inline int tg_fp_flags(void) { return (int)(_mm_getcsr() & TG_FP_FLAGS); }
static inline void tg_fp_raise(int flags) { if (flags) _mm_setcsr(_mm_getcsr() | (unsigned)flags); }
static inline void tg_fp_clear(int flags) { _mm_setcsr(_mm_getcsr() & ~(unsigned)flags); }

#elif defined(__aarch64__)
typedef unsigned long tg_fp_mode;
#define TG_FP_FLAGS 0x9ful            /* the cumulative flags of FPSR */
static inline tg_fp_mode tg_fp_current_mode(void)
{
    unsigned long fpcr;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(fpcr));
    return fpcr;
}
static inline unsigned long tg_fpsr(void)
{
    unsigned long fpsr;
    __asm__ __volatile__("mrs %0, fpsr" : "=r"(fpsr));
    return fpsr;
}
static inline void tg_set_fpsr(unsigned long fpsr) { __asm__ __volatile__("msr fpsr, %0" : : "r"(fpsr)); }
static inline void tg_fp_adopt(tg_fp_mode mode)
{
    __asm__ __volatile__("msr fpcr, %0" : : "r"(mode));
    tg_set_fpsr(tg_fpsr() & ~TG_FP_FLAGS);
}
static inline int tg_fp_flags(void) { return (int)(tg_fpsr() & TG_FP_FLAGS); }
static inline void tg_fp_raise(int flags) { if (flags) tg_set_fpsr(tg_fpsr() | (unsigned long)flags); }
static inline void tg_fp_clear(int flags) { tg_set_fpsr(tg_fpsr() & ~(unsigned long)flags); }

#else
typedef fenv_t tg_fp_mode;
static inline tg_fp_mode tg_fp_current_mode(void) { fenv_t e; fegetenv(&e); return e; }
static inline void tg_fp_adopt(tg_fp_mode mode) { fesetenv(&mode); feclearexcept(FE_ALL_EXCEPT); }
static inline int tg_fp_flags(void) { return fetestexcept(FE_ALL_EXCEPT); }
static inline void tg_fp_raise(int flags) { if (flags) feraiseexcept(flags); }
static inline void tg_fp_clear(int flags) { feclearexcept(flags); }
#endif

#endif
