"""What the text of a compiled program holds: collectives, loops, estimated cycles.

Pure functions of the scheduled HLO that `compiled.as_text()` prints. What stands in a loop counts
as often as the loop turns; a loop whose turns the program does not know counts one of them.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

KINDS = (
    "all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute",
    "collective-broadcast", "ragged-all-to-all",
)  # fmt: skip


class Collective(NamedTuple):
    """Fields:
    kind: of KINDS.
    bytes: of its result on one device, without the padding of tiles.
    asynchronous: the program computes between its start and its end.
    times: it is carried out.
    """

    kind: str
    bytes: int
    asynchronous: bool
    times: int


class Loop(NamedTuple):
    """Fields:
    trips: turns; None where the program does not know them.
    cycles: of one turn, estimated; None where the compiler says nothing.
    times: it is entered.
    name: where it comes from, as the tracer named it.
    """

    trips: int | None
    cycles: int | None
    times: int
    name: str


class Contents(NamedTuple):
    """Of a program: cycles is None where the compiler estimates none."""

    collectives: tuple[Collective, ...]
    loops: tuple[Loop, ...]
    cycles: int | None


class Instruction(NamedTuple):
    name: str
    result: str  # types and shapes, as printed
    operation: str
    line: str

    def called(self, field: str) -> str | None:
        """The computation that a field such as body= names."""
        found = re.search(rf"\b{field}=%?([\w.\-]+)", self.line)
        return found and found[1]


NOTHING = Contents((), (), None)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")


def contents(text: str) -> Contents:
    """What a program does from its entry on.

    Args:
      text: scheduled HLO, as of `jax.stages.Compiled.as_text`.

    Raises:
      ValueError: for a text without an entry.
    """
    computations, entry = _computations(text)
    if entry is None:
        raise ValueError(
            f"a text of {len(text)} characters has no ENTRY computation: pass what as_text() of a "
            "compiled program returns."
        )
    return _walk(computations, entry, 1, apart=False)


def result_bytes(result: str) -> int:
    """Bytes of the arrays of a type, such as `(f32[4,5]{1,0:T(4,128)}, u32[])`; tokens have none.

    Example:
      >>> result_bytes("(f32[4,5]{1,0}, bf16[3], pred[], token[])")
      87
    """
    bits = 0
    for kind, width, shape in re.findall(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", result):
        each = 8 if kind == "pred" else int(width)
        bits += each * math.prod(int(n) for n in shape.split(",") if n)
    return -(-bits // 8)


def _computations(text: str) -> tuple[dict[str, list[Instruction]], str | None]:
    """({name: its instructions}, name of the entry)."""
    found, entry, current = {}, None, None
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            current = found.setdefault(start[2], [])
            entry = start[2] if start[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(Instruction(*match.groups(), line))
    return {name: _joined(steps) for name, steps in found.items()}, entry


def _joined(steps: list[Instruction]) -> list[Instruction]:
    """CUDA splits every collective in two; one that nothing runs beside becomes whole again."""
    blocking = {step.name for step in steps if '"is_sync":true' in step.line}
    starts = (re.search(r"-done\(%?([\w.\-]+)", step.line) for step in steps)
    return [
        step._replace(operation=step.operation.removesuffix("-done"))
        if start and start[1] in blocking
        else step
        for step, start in zip(steps, starts, strict=True)
    ]


def _walk(computations: Mapping, name: str, times: int, *, apart: bool) -> Contents:
    """What a computation holds that is carried out so often.

    Args:
      apart: it runs beside other instructions, so that its collectives are asynchronous.
    """
    total = NOTHING
    for instruction in computations.get(name, ()):
        total = _add(total, _one(computations, instruction, times, apart))
    return total


def _one(computations, instruction: Instruction, times: int, apart: bool) -> Contents:
    operation, called = instruction.operation, instruction.called
    if operation == "while":
        return _while(computations, instruction, times, apart)
    if operation == "conditional":
        return _conditional(computations, instruction, times, apart)
    if operation in ("call", "async-start"):
        inner = called("to_apply") or called("calls")
        return _walk(computations, inner, times, apart=apart or operation == "async-start")
    estimated = re.search(r'"estimated_cycles":"(\d+)"', instruction.line)
    cycles = int(estimated[1]) if estimated else None
    if operation == "fusion":
        return Contents(_fused(computations, called("calls"), times), (), cycles)
    kind = operation.removesuffix("-done")
    if kind not in KINDS:
        return Contents((), (), cycles)
    return Contents(
        (_collective(kind, instruction, times, apart or kind != operation),), (), cycles
    )


def _collective(kind: str, instruction: Instruction, times: int, asynchronous: bool) -> Collective:
    return Collective(kind, result_bytes(instruction.result), asynchronous, times)


def _fused(computations, name: str, times: int) -> tuple[Collective, ...]:
    """The collectives of a fusion.

    libtpu spreads one over several: a start, computations beside it, all named async_collective,
    and a done. Each of them repeats it; the done counts.
    """
    steps = computations.get(name, ())
    start, done = (
        any(f'"AsyncCollective{end}"' in step.line for step in steps) for end in ("Start", "Done")
    )
    if (start or "async_collective" in name) and not done:
        return ()
    return tuple(
        _collective(step.operation, step, times, done) for step in steps if step.operation in KINDS
    )


def _while(computations, instruction: Instruction, times: int, apart: bool) -> Contents:
    trips = _trips(computations, instruction)
    turns = 1 if trips is None else trips
    body, condition = (
        _walk(computations, instruction.called(part), times * turns, apart=apart)
        for part in ("body", "condition")
    )
    turn = _add(body, condition)
    name = re.search(r'op_name="([^"]*)"', instruction.line)
    loop = Loop(trips, turn.cycles, times, name[1] if name else instruction.name)
    cycles = None if turn.cycles is None else turns * turn.cycles
    return Contents(turn.collectives, (loop, *turn.loops), cycles)


def _conditional(computations, instruction: Instruction, times: int, apart: bool) -> Contents:
    """All collectives and loops of the branches, and the cycles of the dearest one."""
    listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.line)
    names = (
        [name.strip().lstrip("%") for name in listed[1].split(",")]
        if listed
        else [instruction.called(f"{way}_computation") for way in ("true", "false")]
    )
    branches = [_walk(computations, name, times, apart=apart) for name in names]
    total = NOTHING
    for branch in branches:
        total = _add(total, branch)
    known = [branch.cycles for branch in branches if branch.cycles is not None]
    return total._replace(cycles=max(known, default=None))


def _trips(computations, instruction: Instruction) -> int | None:
    """As XLA notes them; else of a counter from 0 on, as all loops of JAX have: `i < constant`."""
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.line):
        return int(noted[1])
    condition = computations.get(instruction.called("condition"), ())
    bounds = {
        step.name: int(match[1])
        for step in condition
        if (match := re.search(r" [su]\d+\[\]\S* constant\((\d+)\)", step.line))
    }
    tests = [step for step in condition if "direction=LT" in step.line]
    if len(tests) != 1 or len(condition) > len(bounds) + 3:
        return None
    operands = re.search(r" compare\(([^)]*)\)", tests[0].line)
    limit = operands[1].split(",")[-1].split()[-1].lstrip("%") if operands else None
    return bounds.get(limit)


def _add(one: Contents, other: Contents) -> Contents:
    known = [part.cycles for part in (one, other) if part.cycles is not None]
    return Contents(
        one.collectives + other.collectives,
        one.loops + other.loops,
        sum(known) if known else None,
    )
