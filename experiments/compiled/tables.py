"""Rows of what compiled programs hold, for people."""

from collections import defaultdict

from experiments.compiled.programs import Compiled
from experiments.results.tables import show_bytes

UNKNOWN = "not known"


def numbers(found: Compiled) -> dict:
    """Memory, operations and the time to compile, of one program on one device."""
    return {
        "arguments": show_bytes(found.arguments),
        "temporaries": show_bytes(found.temporaries),
        "outputs": show_bytes(found.outputs),
        "donated": show_bytes(found.donated),
        "peak": show_bytes(found.peak),
        "flops": _known(found.flops),
        "bytes accessed": _known(found.bytes_accessed, show_bytes),
        "cycles": _known(found.contents.cycles),
        "compiled in": f"{found.seconds:.1f} s",
    }


def collectives(found: Compiled) -> list[dict]:
    """A row per kind: how many are carried out, and the bytes of all their results."""
    kinds = defaultdict(list)
    for collective in found.contents.collectives:
        kinds[collective.kind].append(collective)
    return [
        {
            "collective": kind,
            "times": sum(c.times for c in several),
            "bytes": show_bytes(sum(c.times * c.bytes for c in several)),
            "asynchronous": sum(c.times for c in several if c.asynchronous),
        }
        for kind, several in sorted(kinds.items())
    ]


def loops(found: Compiled) -> list[dict]:
    """A row per loop: how often it is entered, its turns, and the cycles of one."""
    return [
        {
            "loop": loop.name.removeprefix("jit(<lambda>)/"),
            "entered": loop.times,
            "turns": UNKNOWN if loop.trips is None else loop.trips,
            "cycles of a turn": _known(loop.cycles),
        }
        for loop in found.contents.loops
    ]


def _known(value, show="{:.4g}".format) -> str:
    return "-" if value is None else show(value)
