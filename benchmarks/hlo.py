"""Reads the text of compiled programs (scheduled HLO): their collectives and how they are sent."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from local_opt.costs import KINDS


class Collective(NamedTuple):
    """An instruction of a compiled program."""

    kind: str  # of KINDS
    bytes: int  # of its result on one device, without the padding of tiles
    asynchronous: bool  # the program computes between its start and its end
    where: str  # the computation that holds it
    line: str  # as printed


def collectives_of(text: str) -> list[Collective]:
    """The collectives of scheduled HLO (`as_text`). A pair of start and done counts once."""
    instruction = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(%?([\w.\-]*)")
    # CUDA splits every collective in two, and says where nothing runs between them.
    blocking = {m[1] for m in re.finditer(r'%?([\w.\-]+) = [^\n]*"is_sync":true', text)}
    asynchronous = set(re.findall(r" async-start\([^\n]*calls=%?([\w.\-]+)", text))
    collectives = []
    for name, lines in computations(text):
        # libtpu splits a collective into fusions of this name, between a start and a done.
        ends = any('"AsyncCollectiveDone"' in line for line in lines)
        starts = any('"AsyncCollectiveStart"' in line for line in lines)
        if (starts or "async_collective" in name) and not ends:
            continue
        for line in lines:
            if not (match := instruction.match(line)):
                continue
            result, operation, operand = match.groups()
            kind = operation.removesuffix("-done")
            if kind in KINDS:
                halves = kind != operation and operand not in blocking
                beside = halves or ends or name in asynchronous
                collectives.append(Collective(kind, result_bytes(result), beside, name, line))
    return collectives


def result_bytes(result: str) -> int:
    """Bytes of an array type, such as `(f32[4,5]{1,0:T(4,128)}, u32[])`; tokens have none."""
    bits = 0
    for kind, width, shape in re.findall(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", result):
        each = 8 if kind == "pred" else int(width)
        bits += each * math.prod(int(n) for n in shape.split(",") if n)
    return -(-bits // 8)


def computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """(name, lines) of each computation."""
    for part in re.split(r"\n(?=\S)", text):
        head, *lines = part.split("\n")
        if start := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{\s*$", head):
            yield start[1], lines
