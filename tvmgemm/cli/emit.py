"""``python -m tvmgemm emit``: a member of the family to look at, for this machine or another; nothing is run
or stored.

``loops`` is the algorithm, ``tir`` what the generator wrote, ``llvm`` and ``asm`` what LLVM made of it,
``counts`` what is in the inner loops of that.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from tvmgemm import settings
from tvmgemm.family.arithmetic import ARITHMETICS, WAYS, arithmetic_of
from tvmgemm.family.inspection import InnerLoop, hottest, inner_loops
from tvmgemm.family.isa import isa_of
from tvmgemm.family.members import default_members, member
from tvmgemm.family.outline import outline
from tvmgemm.family.targets import TARGETS, Target
from tvmgemm.family.tiles import KERNEL_DTYPES
from tvmgemm.family.validity import check
from tvmgemm.family.variants import VARIANTS
from tvmgemm.host import host
from tvmgemm.problem import OPS
from tvmgemm.spec import STEPS, SWITCHES, KernelSpec

SHOWS = {
    "loops": "the loops, packings and buffers, as a figure would show them",
    "tir": "TVM's intermediate code, as TVMScript",
    "llvm": "LLVM's intermediate code, optimised",
    "asm": "the assembly, with the counts in front",
    "counts": "what is in the inner loops, counted; takes 'all' for --variant and --dtype",
}

_COLUMNS = ("FMAs", "loads", "broadcasts", "stores", "prefetches", "other", "registers", "stack")
_AT_EDGES = ("masked", "branches")


def main(argv: list[str]) -> int:
    """Print what is asked for, or write it to a file; returns the exit status."""
    parser = _parser()
    asked = parser.parse_args(argv)
    target = _target(asked.target, asked.dtype, parser)
    specs = _specs(asked, target, parser)
    if asked.show == "loops":
        text = outline(*specs)
    else:
        text = _generated(asked.show, specs, target, own=asked.target == "host")
    if asked.output is None:
        print(text, end="")
        return 0
    try:
        Path(asked.output).write_text(text)
    except OSError as error:
        _fail(f"--output {asked.output!r}: {error.strerror}; pass the path of a file that can be written", 1)
    return 0


# ---- what is asked -----------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tvmgemm emit",
        usage="python -m tvmgemm emit [options]",
        description="Show a member of the family: its loops, its code, what is in its inner loop.\n"
        "Runs nothing. Without options: the loops of B3A2C0, float32, for this machine.",
        epilog=f"targets: host, {', '.join(TARGETS)}",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    shows = "\n".join(f"{name:<7} {what}" for name, what in SHOWS.items())
    loops, steps = ("ic", "jc", "pc", "none"), ", ".join(STEPS)
    # fmt: off
    add("--variant", default="B3A2C0", choices=[*VARIANTS, "all"], metavar="V", help=", ".join(VARIANTS))
    add("--dtype", default="float32", choices=[*KERNEL_DTYPES, "all"], metavar="D", help=", ".join(KERNEL_DTYPES))
    add("--target", default="host", metavar="T", help="host, or one of the targets below")
    add("--op", default=OPS[0], choices=OPS, metavar="O", help="matmul: A.B; gemm: alpha.A.B + beta.C")
    add("--microkernel", type=_tile, metavar="RxC", help="tile of the resident operand, as in 14x32")
    add("--packing", metavar="P", help="operands that are packed: ab, ac, bc, a, b, c, none")
    add("--arithmetic", default="", choices=ARITHMETICS, metavar="A", help="how products are summed (docs/family.md)")
    add("--parallel-loop", default="none", choices=loops, metavar="L", help="what tasks share: ic, jc, pc, none")
    add("--unblocked", action="store_true", help="micro-tiles without loops over cache blocks, for small products")
    add("--symmetric", action="store_true", help="A.A^T: half of C is computed and copied to the other")
    add("--step", default=STEPS[-1], choices=STEPS, metavar="S", help=f"how far to go: {steps}")
    add("--without", type=_switches, default=(), metavar="W,..", help=f"leave out {', '.join(SWITCHES)}")
    add("--show", default="loops", choices=SHOWS, metavar="WHAT", help=shows)
    add("--output", metavar="FILE", help="write to FILE instead of the terminal")
    # fmt: on
    return parser


def _tile(text: str) -> tuple[int, int]:
    try:
        rows, columns = settings.TILE.check(text).split("x")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None
    return int(rows), int(columns)


def _switches(text: str) -> tuple[str, ...]:
    asked = text.split(",")
    for name in asked:
        if name not in SWITCHES:
            raise argparse.ArgumentTypeError(
                f"{name!r} is not one of {', '.join(SWITCHES)}; separate several by commas"
            )
    return tuple(switch for switch in SWITCHES if switch in asked)


def _target(name: str, dtype: str, parser: argparse.ArgumentParser) -> Target:
    if name != "host":
        if name not in TARGETS:
            parser.error(f"argument --target: {name!r} is not one of host, {', '.join(TARGETS)}")
        return TARGETS[name].for_dtype(dtype)
    cap = settings.current().max_isa
    isa = host().isa(cap) if dtype == "all" else host().isa(cap, dtype)
    if isa is None:
        limit = f" up to {cap}" if cap else ""
        parser.error(
            f"argument --target: host has no kernels for {dtype} ({host().arch}{limit}); pass one of {', '.join(TARGETS)}"
        )
    return TARGETS[isa.name]


def _specs(asked: argparse.Namespace, target: Target, parser: argparse.ArgumentParser) -> list[KernelSpec]:
    """The one kernel that is asked for, or the default ones of all variants or dtypes."""
    if asked.dtype not in ("all", *WAYS[target.isa]):
        parser.error(f"argument --dtype: no kernels for {asked.dtype} on {target.isa}; there are some for {', '.join(WAYS[target.isa])}")
    if "all" not in (asked.variant, asked.dtype):
        rest = {
            "arithmetic": asked.arithmetic, "op": asked.op, "symmetric": asked.symmetric, "step": asked.step, "without": asked.without,
            "blocked": not asked.unblocked,
        }  # fmt: skip
        packing = "none" if asked.unblocked and asked.packing is None else asked.packing
        parallel = "" if asked.parallel_loop == "none" else asked.parallel_loop
        spec = member(
            asked.variant,
            asked.dtype,
            target.isa,
            asked.microkernel,
            packing,
            parallel=parallel,
            **rest,
        )
        try:
            check(spec)
        except ValueError as error:
            parser.error(str(error))
        return [spec]
    if asked.show != "counts":
        parser.error(
            f"'all' goes with --show counts only; for --show {asked.show} name one variant and one dtype"
        )
    names = ("op", "microkernel", "packing", "arithmetic", "symmetric", "parallel_loop", "unblocked", "step", "without")
    if changed := [name for name in names if getattr(asked, name) != parser.get_default(name)]:
        option = "--" + changed[0].replace("_", "-")
        parser.error(f"'all' shows default kernels; leave out {option}, or name one variant and one dtype")
    dtypes = WAYS[target.isa] if asked.dtype == "all" else [asked.dtype]
    specs = [spec for dtype in dtypes for spec in default_members(dtype, target.isa)]
    return [spec for spec in specs if asked.variant in ("all", spec.variant)]


# ---- what is shown -----------------------------------------------------------------------------------------


def _generated(show: str, specs: list[KernelSpec], target: Target, own: bool) -> str:
    """What TVM is needed for. ``own``: for this operating system, whose triple the code generator knows."""
    codegen = _compiler()
    spec, where = specs[0], None if own else target
    if show == "tir":
        return _header(spec, target, "#") + codegen.script(spec)
    if show == "llvm":
        return _header(spec, target, ";") + codegen.llvm_ir(spec, where)
    arch = isa_of(target.isa).arch
    if show == "asm":
        text = without_debug_information(codegen.assembly(spec, where))
        comment = "//" if arch == "aarch64" else "#"
        table = "".join(f"{comment} {line}\n" for line in loop_table(inner_loops(text, arch)).splitlines())
        return _header(spec, target, comment) + table + text
    found = [(each, inner_loops(codegen.assembly(each, where), arch)) for each in specs]
    if len(found) == 1:
        return _header(spec, target, "") + loop_table(found[0][1])
    return kernel_table(found, target)


def without_debug_information(assembly: str) -> str:
    """The assembly without its debug sections and line numbers: half as long, and assemblers disagree about
    them."""
    kept, debug = [], False
    for line in assembly.splitlines(keepends=True):
        if re.match(r"\s+\.(section|text|data|bss)\b", line):
            debug = bool(re.match(r"\s+\.section\s+(\.debug_|__DWARF)", line))
        if not debug and not re.match(r"\s+\.(loc|file|cfi_sections)\s|\.?Ltmp\d+:", line):
            kept.append(line)
    return "".join(kept)


def _compiler():
    """The module that drives TVM, once TVM is known to be there and to be the one that kernels are built
    with."""
    from tvmgemm.build.child import BuildRefused, check_versions
    from tvmgemm.store.key import PINS

    try:
        check_versions(PINS)
    except BuildRefused as refusal:
        _fail(str(refusal), 1)
    return import_module("tvmgemm.family.codegen")


def _described(target: Target) -> str:
    """The name of a target, what LLVM is told, and the note if there is one."""
    options = [(key, " ".join(value) if isinstance(value, tuple) else value) for key, value in target.options]
    told = ", ".join(f"{key}={value}" for key, value in options)
    return f"{target.name} ({told})" + (f": {target.note}" if target.note else "")


def _header(spec: KernelSpec, target: Target, comment: str) -> str:
    lines = (f"{spec.name}, for {_described(target)}", "")
    return "".join(f"{comment} {line}".strip() + "\n" for line in lines)


def loop_table(loops: list[InnerLoop]) -> str:
    """The counts of the inner loops with vector FMAs of one kernel, as a Markdown table."""
    vectors = [loop for loop in loops if loop.fmas]
    if not vectors:
        scalar = "one element at a time" if loops else "not at all"
        return f"No inner loop has vector FMAs: they multiply and add {scalar}.\n"
    hot = hottest(vectors)
    columns = (*_COLUMNS, *_AT_EDGES)
    names = [loop.label + " (full tiles)" * (loop is hot) for loop in vectors]
    rows = [[name, *_counts(loop, columns)] for name, loop in zip(names, vectors)]
    return _markdown(["inner loop", *columns], rows)


def kernel_table(found: Iterable[tuple[KernelSpec, list[InnerLoop]]], target: Target) -> str:
    """The counts of the full tiles' inner loop of several kernels, as a Markdown table."""
    rows = []
    for spec, loops in found:
        hot, (height, width) = hottest(loops), spec.tile_sizes
        how = arithmetic_of(spec.isa, spec.dtype, spec.packing, spec.arithmetic)
        steps = hot.fmas * how.at_once(isa_of(spec.isa)) // (height * width)
        kernel = [spec.variant, spec.dtype, spec.tile, spec.packing]
        rows.append([*kernel, str(steps), *_counts(hot, _COLUMNS)])
    head = f"Inner loops for full tiles, default kernels for {_described(target)}\n"
    return head + "\n" + _markdown(["variant", "dtype", "tile", "packed", "steps", *_COLUMNS], rows)


def _counts(loop: InnerLoop, columns: tuple[str, ...]) -> list[str]:
    return [str(getattr(loop, column.lower())) for column in columns]


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    text = [head, ["-" * width for width in widths], *rows]
    return "".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |\n" for row in text
    )


def _fail(message: str, status: int) -> NoReturn:
    print(f"tvmgemm emit: {message}", file=sys.stderr)
    raise SystemExit(status)
