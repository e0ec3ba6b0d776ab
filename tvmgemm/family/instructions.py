"""What instructions look like in the assembly that LLVM prints, per architecture, as a table of regular
expressions.

Only what matters in the inner loops of kernels: vector arithmetic, loads, broadcasts, stores, prefetches,
jumps and what refers to the stack.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Syntax:
    """How an instruction set is read: regular expressions on ``mnemonic operands``, single-spaced, without
    comments.

    ``branch``: mnemonics that may jump to the label they end with; ``leaves``: those that never go on.
    ``vector`` finds a vector register's number. ``fma``, ``multiply``, ``add`` are vector arithmetic (of
    booleans: and, or), ``matrix`` those of ``fma`` that are a matrix unit's, ``scalar_fma`` is of one element.
    ``load``, ``store`` count a vector for each match of ``moved`` (or one),
    ``element`` finds what an FMA takes a single element from and ``define`` what an instruction overwrites.
    ``framed`` is what sets up a frame pointer: only then ``frame`` operands are on the stack as ``stack``
    operands are.
    """

    comment: str
    branch: str
    leaves: str
    vector: str
    fma: str
    matrix: str
    multiply: str
    add: str
    scalar_fma: str
    load: str
    store: str
    moved: str
    broadcast: str
    element: str
    define: str
    prefetch: str
    masked: str
    stack: str
    framed: str
    frame: str


_NEVER = r"(?!)"

#: Architecture -> syntax.
SYNTAX: dict[str, Syntax] = {
    # AT&T: the destination stands last.
    "x86_64": Syntax(
        comment="#",
        branch=r"j\w+ ",
        leaves=r"ret|ud2|jmp",
        vector=r"%[txyz]mm(\d+)",
        fma=r"vfn?m(add|sub)\d*p[sd] |(\{vex\} )?vpdp(busd|wssd) |vdpbf16ps |vpternlog[dq] |tdp\w+ ",
        matrix=r"tdp",
        multiply=r"v?mulp[sd] |v?pmul(l[wdq]|udq) |v?pmaddwd |v?pandd? ",
        add=r"v?addp[sd] |v?padd[wdq] |v?pord? ",
        scalar_fma=r"(vfn?m(add|sub)\d*|v?mul)s[sd] ",
        load=r"(?!\S*(broadcast|movddup|s[sd] |mov[dqhl]p?[sd]? ))"
        r".*\([^%]*%[^)]*\)(?! *\{1to).*, *%[txyz]mm\d+",
        store=r"(?!v?movs[sd] ).*%[txyz]mm\d+, *[^%]*\([^)]*\)(?: *\{%k\d\})?$",
        moved=_NEVER,
        broadcast=r"v?p?broadcast(s[sd]|[bwdq]) |v?movddup |v?p?shuf\w+ \$0, %xmm\d+, %xmm\d+|.*\{1to\d+\}",
        element=_NEVER,
        define=_NEVER,
        prefetch=r"prefetch",
        masked=r".*\(.*\{%k[1-7]\}|vp?maskmov",
        stack=r".*\(%rsp[,)]",
        framed=r"movq %rsp, %rbp",
        frame=r".*\(%rbp[,)]",
    ),
    "aarch64": Syntax(
        comment=r"//|;",
        branch=r"(b|bc?\.\w+|cbn?z|tbn?z) ",
        leaves=r"ret|br |b ",
        vector=r"\b[vqdsz](\d+)\b",
        fma=r"f?ml[as](\.\w+)? |[su]dot(\.\w+)? |fmad z",
        matrix=_NEVER,
        multiply=r"(f?mul|and)(\.\w+ | [vz])",
        add=r"(f?add|orr)(\.\w+ | [vz])",
        scalar_fma=r"(fn?madd|fmul) [sdh]\d",
        load=r"(ldu?r|ldn?p) q|ld[1-4](\.\w+)? |ld[1-4][bhwd] ",
        store=r"(stu?r|stn?p) q|st[1-4](\.\w+)? |st[1-4][bhwd] ",
        moved=r"\bq\d+|\b[vz]\d+(?=[^\[]*\})",
        broadcast=r"ld1r|dup(\.\w+)? [vz]|ld1rw|ld1rd",
        element=r"v\d+(?:\.\w+)?\[\d+\]",
        define=r"(?!st)(?:ldn?p [qsd](\d+), [qsd](\d+)|\S+ \{? *[vqsdz](\d+))",
        prefetch=r"prfu?m",
        masked=r".*\[.*, p\d/[mz]|ld1\w .*p\d/z",
        stack=r".*\[sp[\],]",
        framed=r"(mov|add) (x29|fp), sp",
        frame=r".*\[(x29|fp)[\],]",
    ),
    "riscv64": Syntax(
        comment="#",
        branch=r"(j|b\w+) ",
        leaves=r"ret|jr |j ",
        vector=r"\bv(\d+)\b",
        fma=r"vfn?m(acc|add|sac|sub)\.v[vf] ",
        matrix=_NEVER,
        multiply=r"vfmul\.v[vf] ",
        add=r"vfadd\.v[vf] ",
        scalar_fma=r"(fn?m(add|sub)|fmul)\.[sd] ",
        load=r"vle\d+\.v |vl\dr\w*\.v ",
        store=r"vse\d+\.v |vs\dr\.v ",
        moved=_NEVER,
        broadcast=r"vfmv\.v\.f |vmv\.v\.x |vrgather\.vi |vlse\d+\.v .*, zero",
        element=r"(?<=, )f[ats]\d+",
        define=r"(?!fs[wdh] )\S+ (f[ats]\d+)",
        prefetch=r"prefetch\.",
        masked=r".*v0\.t",
        stack=r".*(\(sp\)|, sp\b)",
        framed=r"addi s0, sp, ",
        frame=r".*(\(s0\)|, s0\b)",
    ),
    # Registers are bare numbers: which of them are vectors depends on the instruction.
    "powerpc64le": Syntax(
        comment="#",
        branch=r"(b|bc|bdn?z[ft]?|b(lt|gt|le|ge|eq|ne|un|nu)[+-]?) ",
        leaves=r"blr|b |bctr$",
        vector=r"^(?:lxv|stxv|xx)\S* (\d+)|^xv\S* (\d+), (\d+)(?:, (\d+))?",
        fma=r"xvn?m(add|sub)[am][sd]p ",
        matrix=_NEVER,
        multiply=r"xvmul[sd]p ",
        add=r"xvadd[sd]p ",
        scalar_fma=r"xsn?m(add|sub|ul)\w* |fn?m(add|sub|ul)s? ",
        load=r"lxv(x|d2x|w4x)? ",
        store=r"stxv(x|d2x|w4x)? ",
        moved=_NEVER,
        broadcast=r"lxv[wd]sx |xxsplt[wd] ",
        element=_NEVER,
        define=_NEVER,
        prefetch=r"dcbt",
        masked=_NEVER,
        stack=r".*\(1\)",
        framed=r"mr 31, 1$",
        frame=r".*\(31\)",
    ),
}
