"""Inner loops read from assembly: the reading, on small texts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tvmgemm.family.inspection import hottest, inner_loops
from tvmgemm.family.instructions import SYNTAX
from tvmgemm.family.isa import isa_of
from tvmgemm.family.targets import TARGETS

AVX512 = """
kernel:
	.cfi_startproc
	testq	%rcx, %rcx
	jle	.LBB0_3
	.p2align	4
.LBB0_1:
	prefetcht0	512(%rsi)
	vmovups	(%rsi), %zmm8
.Ltmp1:
	vbroadcastss	-4(%rdi), %zmm9                 # a comment, (%rsp)
	vfmadd231ps	%zmm9, %zmm8, %zmm0
	vfmadd231ps	(%rdi){1to16}, %zmm8, %zmm1
	vfmadd213ps	64(%rsi), %zmm8, %zmm2
	vmovups	(%rdx), %zmm10 {%k1} {z}
	vmovups	%zmm10, (%rdx) {%k1}
	movq	24(%rsp), %rax
	addq	$8, %rdi
	decq	%rcx
	jne	.LBB0_1
.LBB0_3:
	vzeroupper
	retq
"""

SSE = """
kernel:
.LBB0_1:
	movups	(%rsi), %xmm2
	movss	(%rdi), %xmm4
	shufps	$0, %xmm4, %xmm4
	movaps	%xmm2, %xmm3
	mulps	%xmm4, %xmm3
	addps	%xmm3, %xmm1
	mulps	16(%rsi), %xmm4
	addps	%xmm4, %xmm0
	movups	%xmm0, (%rdx)
	decq	%rcx
	jne	.LBB0_1
	retq
"""

NEON = """
kernel:
.LBB0_1:
	prfm	pldl1keep, [x14, #384]
	ldp	q25, q1, [x14]
	ldp	s15, s2, [x2, #-16]
	fmla	v14.4s, v25.4s, v15.s[0]
	fmla	v27.4s, v1.4s, v15.s[0]
	fmla	v13.4s, v25.4s, v2.s[0]
	ldr	s15, [x2, #-8]
	fmla	v12.4s, v25.4s, v15.s[0]
	ld1r	{ v3.4s }, [x7], #4
	fmla	v11.4s, v25.4s, v3.4s
	stp	q11, q12, [x9]
	subs	x21, x21, #1
	b.ne	.LBB0_1
	ret
"""

RISCV = """
kernel:
.LBB0_1:
	vsetivli	zero, 4, e32, m1, ta, ma
	vle32.v	v20, (a3)
	flw	fa5, -16(a1)
	vfmacc.vf	v24, fa5, v20
	vfmacc.vf	v25, fa5, v20
	flw	fa5, -12(a1)
	vfmacc.vf	v26, fa5, v20
	vse32.v	v26, (a4)
	addi	a0, sp, 16
	vl1r.v	v8, (a0)
	addi	s1, s1, -1
	bnez	s1, .LBB0_1
	ret
"""

POWER = """
kernel:
	bgt 0, .+8
	b .LBB0_2
.LBB0_1:
	lxv 28, 0(16)
	lxvwsx 26, 15, 24
	xvmaddasp 30, 28, 26
	xvmaddasp 31, 28, 26
	stxv 31, 0(17)
	dcbt 5, 19
	ld 5, 1568(1)
	bdnz .LBB0_1
.LBB0_2:
	blr
"""

#: architecture -> (text, counts of its loop)
SAMPLES = {
    "x86_64": [
        (AVX512, "fmas=3 loads=3 broadcasts=2 stores=1 prefetches=1 masked=2 registers=6 stack=1 other=3"),
        (SSE, "fmas=2 loads=2 broadcasts=1 stores=1 prefetches=0 masked=0 registers=5 stack=0 other=3"),
    ],
    "aarch64": [
        (NEON, "fmas=5 loads=2 broadcasts=4 stores=2 prefetches=1 masked=0 registers=10 stack=0 other=3")
    ],
    "riscv64": [
        (RISCV, "fmas=3 loads=2 broadcasts=2 stores=1 prefetches=0 masked=0 registers=5 stack=1 other=5")
    ],
    "powerpc64le": [
        (POWER, "fmas=2 loads=1 broadcasts=1 stores=1 prefetches=1 masked=0 registers=4 stack=1 other=1")
    ],
}


@pytest.mark.parametrize(
    "arch, text, counts", [(arch, *sample) for arch, samples in SAMPLES.items() for sample in samples]
)
def test_an_iteration_is_counted(arch, text, counts):
    (loop,) = inner_loops(text, arch)
    expected = {name: int(value) for name, value in (part.split("=") for part in counts.split())}
    assert {name: getattr(loop, name) for name in expected} == expected
    assert (loop.function, loop.label, loop.branches, loop.scalar_fmas) == ("kernel", ".LBB0_1", 0, 0)
    assert loop.text.splitlines()[0] == ".LBB0_1:" and len(loop.text.splitlines()) == 1 + loop.instructions
    assert hottest([loop]) is loop


def test_every_architecture_has_a_sample():
    assert set(SAMPLES) == set(SYNTAX) == {isa_of(target.isa).arch for target in TARGETS.values()}


def test_apple_dialect():
    apple = NEON.replace(".LBB", "LBB").replace("kernel:", "_kernel:")
    apple = (
        apple.replace("fmla\t", "fmla.4s\t").replace(".4s,", ",").replace(".4s\n", "\n").replace(".s[", "[")
    )
    apple = apple.replace("ld1r\t{ v3.4s }", "ld1r.4s\t{ v3 }")
    (plain,), (loop,) = inner_loops(NEON, "aarch64"), inner_loops(apple, "aarch64")
    assert loop == replace(plain, function="_kernel", label="LBB0_1", text=loop.text)


def test_a_frame_pointer_is_on_the_stack_only_where_there_is_one():
    text = AVX512.replace("24(%rsp)", "24(%rbp)")
    assert inner_loops(text, "x86_64")[0].stack == 0
    framed = text.replace("\ttestq", "\tpushq\t%rbp\n\tmovq\t%rsp, %rbp\n\ttestq")
    assert inner_loops(framed, "x86_64")[0].stack == 1
    other_function = "other:\n\tmovq\t%rsp, %rbp\n\tretq\n" + text
    assert inner_loops(other_function, "x86_64")[0].stack == 0


NESTED = """
kernel:
.LBB0_1:
	vmovups	(%rsi), %ymm8
.LBB0_2:
	vfmadd231ps	%ymm9, %ymm8, %ymm0
	testq	%rax, %rax
	je	.LBB0_4
	vmovups	(%rdi), %ymm9
.LBB0_4:
	decq	%rcx
	jne	.LBB0_2
	vfmadd231ps	%ymm0, %ymm1, %ymm2
	decq	%rdx
	jne	.LBB0_1
	retq
"""


def test_only_the_innermost_of_nested_loops_counts():
    (loop,) = inner_loops(NESTED, "x86_64")
    assert (loop.label, loop.fmas, loop.loads, loop.branches) == (".LBB0_2", 1, 1, 1)


ROTATED = """
kernel:
	jmp	.LBB0_2
.LBB0_1:
	vfmadd231ps	%ymm9, %ymm8, %ymm0
.LBB0_2:
	decq	%rcx
	jne	.LBB0_1
	retq
"""


def test_a_loop_may_begin_in_the_middle():
    (loop,) = inner_loops(ROTATED, "x86_64")
    assert (loop.label, loop.fmas, loop.instructions) == (".LBB0_2", 1, 3)


BACKWARDS = """
kernel:
	testq	%rax, %rax
	je	.LBB0_2
.LBB0_1:
	vfmadd231ps	%ymm9, %ymm8, %ymm0
	retq
.LBB0_2:
	vmovups	(%rsi), %ymm8
	jmp	.LBB0_1
"""


def test_a_jump_backwards_is_not_yet_a_loop():
    assert inner_loops(BACKWARDS, "x86_64") == []


def test_functions_with_private_names():
    text = AVX512.replace("kernel:", "\t.type\t.Lregion.1,@function\n.Lregion.1:\n.Lfunc_begin2:")
    assert [loop.function for loop in inner_loops("entry:\n\tretq\n" + text, "x86_64")] == [".Lregion.1"]


def test_scalar_loops_are_told_apart():
    text = "kernel:\n.LBB0_1:\n\tvfmadd231ss\t(%rsi), %xmm1, %xmm0\n\tdecq\t%rcx\n\tjne\t.LBB0_1\n\tretq\n"
    (loop,) = inner_loops(text, "x86_64")
    assert (loop.fmas, loop.scalar_fmas, loop.loads) == (0, 1, 0)
    copying = "kernel:\n.LBB0_1:\n\tvmovups\t(%rsi), %ymm0\n\tdecq\t%rcx\n\tjne\t.LBB0_1\n\tretq\n"
    assert inner_loops(copying, "x86_64") == []


def test_the_full_tile_is_the_hottest():
    (loop,) = inner_loops(AVX512, "x86_64")
    full = replace(loop, masked=0, stack=0)
    edge = replace(full, masked=2, other=0)
    branching = replace(full, branches=1, other=0)
    unrolled_but_worse = replace(full, fmas=6, broadcasts=4, other=9)
    small = replace(full, fmas=1, other=0)
    assert hottest([edge, small, branching, unrolled_but_worse, full]) is full
    narrow = replace(full, fmas=full.fmas * 2, broadcasts=full.broadcasts * 3, other=0)
    first_block = replace(full, loads=full.loads - 1)
    to_c = replace(full, broadcasts=0, other=0)
    dot_products = replace(full, broadcasts=1, loads=full.fmas + 1, other=0)
    assert hottest([narrow, first_block, to_c, dot_products, full]) is full


def test_refusals():
    with pytest.raises(ValueError, match="arch 'vax' is not one of x86_64, aarch64, riscv64, powerpc64le"):
        inner_loops(AVX512, "vax")
    with pytest.raises(ValueError, match="no inner loop multiplies and adds"):
        hottest(inner_loops(AVX512, "aarch64"))
