"""The inner loops of a kernel, read from its assembly: what a micro-kernel's iteration consists of, counted.

Speed of a GEMM kernel is decided in one loop of a few dozen instructions. Its counts tell whether the code is
what the tile promises: all of the tile in registers, one load per vector, nothing on the stack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from .instructions import SYNTAX, Syntax


@dataclass(frozen=True)
class InnerLoop:
    """One iteration of a loop that contains multiply-adds and no other loop.

    ``fmas``: vector multiply-adds, fused or as pairs of a multiply and an add. ``loads``: vectors read from
    memory, also as an operand of an FMA. ``broadcasts``: elements brought to all lanes, by an instruction, as
    an operand of an FMA or by naming their lane in FMAs (then each element counts once). ``stores``: vectors
    written. ``masked``: memory operands under a mask, and ``branches`` besides the one that closes the loop:
    those are at the edges of the matrix. ``registers``: vector registers named. ``stack``: operands on the
    stack. ``matrix``: those of ``fmas`` that a matrix unit does. ``scalar_fmas``: those of one element.
    ``other``: instructions that are none of these: addresses, the loop's count, moves, scalar loads.
    ``text``: the instructions, one a line, with the labels between them.
    """

    function: str
    label: str
    fmas: int
    loads: int
    broadcasts: int
    stores: int
    prefetches: int
    masked: int
    branches: int
    registers: int
    stack: int
    matrix: int
    scalar_fmas: int
    other: int
    instructions: int
    text: str = field(repr=False)


def inner_loops(assembly: str, arch: str) -> list[InnerLoop]:
    """The innermost loops of ``assembly`` (as LLVM prints it) that multiply and add, in the order of the
    text.

    ``arch``: a key of ``instructions.SYNTAX``; ValueError otherwise.
    """
    if arch not in SYNTAX:
        raise ValueError(f"arch {arch!r} is not one of {', '.join(SYNTAX)}")
    syntax = SYNTAX[arch]
    found = []
    for name, blocks in _functions(assembly, syntax):
        framed = any(re.match(syntax.framed, line) for block in blocks for line in block.lines)
        for header, body in _innermost(blocks):
            loop = _count(name, [blocks[i] for i in sorted(body)], blocks[header].labels[-1], syntax, framed)
            if loop.fmas or loop.scalar_fmas:
                found.append(loop)
    return found


def hottest(loops: Iterable[InnerLoop]) -> InnerLoop:
    """The loop that runs for full tiles: of those with the most vector FMAs, the one that does least besides.

    Edges of the matrix have loops of their own: narrower ones, which broadcast more elements per FMA, and
    ones with masks, branches or more addresses than registers. LLVM may have unrolled some twice and others
    not, so half of the most FMAs is enough. Of what is left it is the one that loads most: the first block of
    k may have nothing to load. ValueError if there are no loops.
    """
    loops = tuple(loops)
    if not loops:
        raise ValueError(
            "no inner loop multiplies and adds: this is not the assembly of a kernel, or of another arch"
        )
    most = max(loop.fmas for loop in loops)

    def besides(loop: InnerLoop) -> tuple[float, ...]:
        each = max(1, loop.fmas)
        rest: tuple[int, ...] = (loop.broadcasts, loop.stack, loop.other, -loop.loads)
        if loop.matrix:  # no masks: at the edges it has fewer registers, and loads more for each product
            rest = (loop.loads, loop.stack, loop.other)
        # Without broadcasts it is not a micro-kernel, but sums on their way to C; with more loads than FMAs dot
        # products.
        other = loop.broadcasts == 0 or loop.loads > loop.fmas
        return not loop.matrix, other, loop.masked, loop.branches, *(count / each for count in rest)

    return min((loop for loop in loops if 2 * loop.fmas >= most), key=besides)


# ---- the text as blocks ------------------------------------------------------------------------------------


@dataclass
class _Block:
    """Instructions that run one after the other; ``next``: numbers of the blocks that may follow."""

    labels: list[str]
    lines: list[str]
    next: list[int] = field(default_factory=list)


_LABEL = re.compile(r"([\w.$@]+):")
#: Labels inside functions, and of functions that nobody else sees.
_PRIVATE = re.compile(r"[.$]|L[A-Z]|Ltmp|Lfunc|l?CPI")


def _functions(assembly: str, syntax: Syntax) -> list[tuple[str, list[_Block]]]:
    """Name and basic blocks of each function. Labels that nothing jumps to (line numbers) start no block."""
    bare = (re.split(syntax.comment, line, maxsplit=1)[0] for line in assembly.splitlines())
    lines = [" ".join(line.split()) for line in bare]
    targets = {_target(line) for line in lines if re.match(syntax.branch, line)}
    entries = _entries(lines)
    functions: list[tuple[str, list[_Block]]] = []
    for i, line in enumerate(lines):
        label = _LABEL.match(line)
        if label and i in entries:
            functions.append((label[1], [_Block([], [])]))
        elif not functions:
            continue
        elif label and label[1] in targets:
            blocks = functions[-1][1]
            if blocks[-1].lines:
                blocks.append(_Block([], []))
            blocks[-1].labels.append(label[1])
        elif line and not label and not line.startswith("."):
            blocks = functions[-1][1]
            if blocks[-1].lines and re.match(f"{syntax.branch}|{syntax.leaves}", blocks[-1].lines[-1]):
                blocks.append(_Block([], []))
            blocks[-1].lines.append(line)
    for _, blocks in functions:
        _connect(blocks, syntax)
    return functions


def _entries(lines: list[str]) -> set[int]:
    """Numbers of the lines with labels of functions. (TVM's parallel regions are functions with private
    names.)"""
    entries: set[int] = set()
    latest = None
    for i, line in enumerate(lines):
        label = _LABEL.match(line)
        if label and "func_begin" not in label[1]:
            latest = i
            if not _PRIVATE.match(label[1]):
                entries.add(i)
        elif line == ".cfi_startproc" and latest is not None:
            entries.add(latest)
    return entries


def _target(jump: str) -> str:
    """The label that a jump goes to: its last operand."""
    return re.split(r"[ ,]+", jump)[-1]


def _connect(blocks: list[_Block], syntax: Syntax) -> None:
    number = {label: i for i, block in enumerate(blocks) for label in block.labels}
    for i, block in enumerate(blocks):
        last = block.lines[-1] if block.lines else ""
        if re.match(syntax.branch, last):
            number[".+8"] = i + 2  # far jumps of PowerPC: over the next instruction, which is a jump
            if (target := number.get(_target(last))) is not None:
                block.next.append(target)
        if i + 1 < len(blocks) and not re.match(syntax.leaves, last):
            block.next.append(i + 1)


# ---- loops -------------------------------------------------------------------------------------------------


def _innermost(blocks: list[_Block]) -> list[tuple[int, set[int]]]:
    """(header, blocks) of the natural loops that contain no other one."""
    parent = _dominators(blocks)
    previous: list[list[int]] = [[] for _ in blocks]
    for i, block in enumerate(blocks):
        for successor in block.next:
            previous[successor].append(i)

    def dominates(a: int, b: int) -> bool:
        while b != a and parent[b] != b:
            b = parent[b]
        return a == b

    loops: dict[int, set[int]] = {}
    for i, block in enumerate(blocks):
        for header in block.next:
            if i in parent and dominates(header, i):
                body = loops.setdefault(header, {header})
                pending = [i]
                while pending:
                    at = pending.pop()
                    if at not in body and at in parent:
                        body.add(at)
                        pending += previous[at]
    return [(h, body) for h, body in sorted(loops.items()) if not any(o in body for o in loops if o != h)]


def _dominators(blocks: list[_Block]) -> dict[int, int]:
    """Immediate dominator of each block that can be reached; the first block's is itself. (Cooper, Harvey,
    Kennedy, "A Simple, Fast Dominance Algorithm", 2001.)"""
    order: list[int] = []  # postorder
    stack, seen = [(0, iter(blocks[0].next))], {0}
    while stack:
        block, successors = stack[-1]
        for successor in successors:
            if successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(blocks[successor].next)))
                break
        else:
            order.append(block)
            stack.pop()
    rank = {block: i for i, block in enumerate(order)}
    previous: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for successor in blocks[block].next:
            previous[successor].append(block)
    parent = {0: 0}
    changed = True
    while changed:
        changed = False
        for block in reversed(order[:-1]):
            known = [p for p in previous[block] if p in parent]
            common = known[0]
            for other in known[1:]:
                while common != other:
                    if rank[common] < rank[other]:
                        common = parent[common]
                    else:
                        other = parent[other]
            if parent.get(block) != common:
                parent[block], changed = common, True
    return parent


# ---- counting ----------------------------------------------------------------------------------------------


#: The fields of ``Syntax`` that sort instructions; one may be of several kinds.
_KINDS = ("fma", "matrix", "multiply", "add", "scalar_fma", "load", "store", "broadcast", "prefetch", "masked", "branch")


def _count(function: str, blocks: list[_Block], label: str, syntax: Syntax, framed: bool) -> InnerLoop:
    """The counts of a loop made of ``blocks``."""
    lines = [line for block in blocks for line in block.lines]
    count = dict.fromkeys((*_KINDS, "stack", "other"), 0)
    for line in lines:
        kinds = _kinds(line, syntax)
        for kind in kinds:
            moved = len(re.findall(syntax.moved, line)) if kind in ("load", "store") else 0
            count[kind] += moved or 1
        count["stack"] += bool(re.match(syntax.stack, line) or framed and re.match(syntax.frame, line))
        count["other"] += not kinds
    registers = {number for line in lines for found in re.finditer(syntax.vector, line) for number in found.groups() if number}
    text = []
    for block in blocks:
        text += [f"{name}:" for name in block.labels] + [f"    {line}" for line in block.lines]
    return InnerLoop(
        function=function,
        label=label,
        fmas=count["fma"] + min(count["multiply"], count["add"]),
        loads=count["load"],
        broadcasts=count["broadcast"] + _elements_named(lines, syntax),
        stores=count["store"],
        prefetches=count["prefetch"],
        masked=count["masked"],
        branches=max(0, count["branch"] - 1),
        registers=len(registers),
        stack=count["stack"],
        matrix=count["matrix"],
        scalar_fmas=count["scalar_fma"],
        other=count["other"],
        instructions=len(lines),
        text="\n".join(text),
    )


def _kinds(line: str, syntax: Syntax) -> set[str]:
    """Of which kinds an instruction is."""
    return {kind for kind in _KINDS if re.match(getattr(syntax, kind), line)}


def _elements_named(lines: list[str], syntax: Syntax) -> int:
    """Single elements of vector registers that FMAs multiply by: each counts once until its register is written
    again."""
    count = 0
    known: set[str] = set()
    for line in lines:
        if _kinds(line, syntax) & {"fma", "multiply"}:
            new = set(re.findall(syntax.element, line)) - known
            count += len(new)
            known |= new
        if written := re.match(syntax.define, line):
            names = {name for name in written.groups() if name}
            known = {each for each in known if not names & {each, *re.findall(r"\d+", each)[:1]}}
    return count
