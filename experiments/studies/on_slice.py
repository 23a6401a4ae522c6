"""What the arms of a study cost on a slice of TPUs or GPUs that need not be there.

Every program of a run is compiled with one worker per device: a fresh step, an echoed one, the sync
and the epoch's end. A run calls each as often as its plans say; what it takes per step, over the
whole run, is compared with the same run without one of its three decisions.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from experiments.compiled import tables
from experiments.compiled.chips import CHIPS
from experiments.compiled.hlo import Contents
from experiments.compiled.lowering import shapes_of, tree_bytes
from experiments.compiled.programs import Compiled, Refused, available_memory, compile_or_refuse
from experiments.compiled.slices import Slice
from experiments.results.tables import markdown, show_bytes
from experiments.studies.tables import ORDERS, SYNC_RULES
from experiments.tasks.base import Recipe, Task

# The row of each table that decides nothing.
WITHOUT = {"order": "rr", "sync": "parallel", "echo": "none"}
COLUMNS = {"order": "order costs", "sync": "plan costs", "echo": "echo costs"}
SKETCH = "sketch1024"  # what is proposed where an exact order's state does not fit
QUANTITIES = ("flops", "bytes", "cycles")


class Calls(NamedTuple):
    """What a run takes of its programs."""

    steps: int  # fresh and echoed ones
    loads: int  # fresh steps
    rounds: int
    epochs: int  # that have ended
    fresh: int  # calls of fresh steps: one may hold many
    echoed: int  # calls of echoed steps


class Key(NamedTuple):
    """Which program: arms share those that are equal."""

    order: str
    rounds: Callable
    proximal: float
    program: str  # of PROGRAMS


class Use(NamedTuple):
    """How a run uses a program: steps in calls; a sync or an epoch's end is a call without any."""

    key: Key
    steps: int
    calls: int


PROGRAMS = {
    "fresh step": lambda shapes: shapes.step(True),
    "echoed step": lambda shapes: shapes.step(False),
    "sync": lambda shapes: shapes.end(True, False),
    "epoch's end": lambda shapes: shapes.end(False, True),
}


class OnSlice:
    """Compiles programs as arms ask for them, and tells of all in the end.

    Args:
      task, recipe: as of a dry run; on: the slice.
      calls_of: `(arm, speed) -> Calls` of its run.
      reads: batches are handed over; else the data stay on the devices.
    """

    def __init__(self, task: Task, recipe: Recipe, on: Slice, calls_of: Callable, *, reads: bool):
        self._reads = reads
        self._task, self._recipe, self._on, self._calls_of = task, recipe, on, calls_of
        self._shapes = functools.cache(self._make_shapes)
        self._compiled: dict[Key, Compiled | Refused] = {}
        given = available_memory(on.mesh) if on.chip.compiler.plans else None
        self._memory = given or on.chip.memory

    def facts(self) -> list[dict]:
        """Rows of the facts of a dry run."""
        on, train = self._on, tree_bytes(dict(self._task.train))
        share, given = show_bytes(train / self._recipe.workers), show_bytes(self._memory)
        return [
            {"what": "slice", "value": f"{on.name}, {on.mesh.size} x {on.kind}, a worker each"},
            {
                "what": "memory of a device",
                "value": f"{given} for programs, of {show_bytes(on.chip.memory)}",
            },
            {"what": "training set on a device", "value": f"{share}; dealt, {show_bytes(train)}"},
        ]

    def cells(self, arm, speed) -> dict:
        """Cells of an arm's row in the table of a dry run."""
        found = {"peak of a device": self._peak(arm, speed)}
        for field, plain in WITHOUT.items():
            found[COLUMNS[field]] = self._ratio(arm, speed, field, plain)
        return found

    def details(self) -> list[str]:
        """Markdown: all programs that were compiled, their collectives, loops, and what fits."""
        programs, collectives, loops = [], [], []
        for key, found in self._compiled.items():
            if isinstance(found, Compiled):
                name = _name(key)
                programs.append(name | tables.numbers(found))
                collectives.extend(name | row for row in tables.collectives(found))
                loops.extend(name | row for row in tables.loops(found))
        parts = [markdown(rows) for rows in (programs, collectives, loops) if rows]
        return [*parts, *self._verdicts()]

    def _verdicts(self) -> list[str]:
        lacking = [(k, found) for k, found in self._compiled.items() if isinstance(found, Refused)]
        if lacking:
            return [self._lacking(key, found) for key, found in lacking]
        peak = max(found.peak for found in self._compiled.values())
        return [f"All programs fit: {show_bytes(peak)} of {show_bytes(self._memory)} at most."]

    def _lacking(self, key: Key, found: Refused) -> str:
        shapes = self._shapes(*key[:3])
        params, opt_state, orders = (_on_device(shapes, field) for field in range(3))
        return (
            f"{', '.join(_name(key).values())}: does not fit. It needs {show_bytes(found.needed)} "
            f"of {show_bytes(found.available)}; {show_bytes(found.needed - found.available)} are "
            f"missing. Parameters take {show_bytes(params)}, the optimizer {show_bytes(opt_state)},"
            f" the order {show_bytes(orders)}; the rest is the batch and what the program computes."
            f" Change: {'; '.join(self._changes(key, found, params + opt_state + orders))}."
        )

    def _changes(self, key: Key, found: Refused, state: float) -> list[str]:
        """What may make a program fit."""
        row, recipe, changes = ORDERS[key.order], self._recipe, []
        held = tree_bytes(dict(self._task.train)) / (1 if row.deals else recipe.workers)
        if not self._reads and held > found.needed / 100:
            changes.append(f"--input=thread, which leaves {show_bytes(held)} of data with the host")
        if row.observes and row.sketch is None:
            own = show_bytes(_on_device(self._shapes(SKETCH, *key[1:3]), 2))
            changes.append(f"the order {SKETCH}, whose state takes {own}")
        if state < found.available:
            changes.extend(
                f"--{name}={getattr(recipe, name) // 2}, a smaller batch"
                for name in ("unit_size", "units_per_step")
                if getattr(recipe, name) > 1
            )
        else:
            changes.append("a smaller model, for its state alone does not fit")
        larger = [name for name, chip in CHIPS.items() if chip.memory > found.needed]
        return changes + [f"another chip: {', '.join(larger)}"] * bool(larger)

    def _make_shapes(self, order, rounds, proximal):
        strength = proximal * self._recipe.proximal
        return shapes_of(
            self._task, self._recipe, ORDERS[order], rounds, proximal=strength,
            mesh=self._on.mesh, reads=self._reads,
        )  # fmt: skip

    def _uses(self, arm, speed) -> list[Use]:
        """The programs of a run."""
        kind = (arm.order, SYNC_RULES[arm.sync].rounds, arm.proximal)
        shapes, calls = self._shapes(*kind), self._calls_of(arm, speed)
        found = [
            Use(Key(*kind, "fresh step"), calls.loads, calls.fresh),
            Use(Key(*kind, "echoed step"), calls.steps - calls.loads, calls.echoed),
            Use(Key(*kind, "sync"), 0, 0 if shapes.sync_in_step else calls.rounds),
            Use(Key(*kind, "epoch's end"), 0, 0 if shapes.on_host else calls.epochs),
        ]
        return [use for use in found if use.calls]

    def _program(self, key: Key) -> Compiled | Refused:
        if key not in self._compiled:
            lowered = PROGRAMS[key.program](self._shapes(*key[:3]))
            compiler = self._on.chip.compiler
            self._compiled[key] = compile_or_refuse(
                lowered,
                options=compiler.options,
                memory=None if compiler.plans else self._memory,
            )
        return self._compiled[key]

    def _peak(self, arm, speed) -> str:
        found = [self._program(use.key) for use in self._uses(arm, speed)]
        if refused := [f for f in found if isinstance(f, Refused)]:
            return f"does not fit: {show_bytes(max(f.needed for f in refused))}"
        peak = max(f.peak for f in found)
        return f"{show_bytes(peak)}, {peak / self._memory:.1%}"

    def _ratio(self, arm, speed, field, plain) -> str:
        if field == "order" and not ORDERS[arm.order].observes:
            return "-"
        other = arm._replace(**{field: plain})
        if other == arm:
            return "-"
        one, two = self._per_step(arm, speed), self._per_step(other, speed)
        if one is None or two is None:
            return "-"
        ratios = [
            f"{a / b:.2f} x {name}"
            for name, a, b in zip(QUANTITIES, one, two, strict=True)
            if a and b
        ]
        return ", ".join(ratios) or "-"

    def _per_step(self, arm, speed) -> np.ndarray | None:
        """float64[3], flops, bytes and cycles of a mean step; None if a program was refused."""
        total = np.zeros(len(QUANTITIES))
        for use in self._uses(arm, speed):
            found = self._program(use.key)
            if isinstance(found, Refused):
                return None
            times = use.steps or use.calls  # XLA counts a call with one step
            cycles = cycles_of(found.contents, use)
            total += times * (found.flops or 0), times * (found.bytes_accessed or 0), cycles
        return total / self._calls_of(arm, speed).steps


def cycles_of(contents: Contents, use: Use) -> float:
    """Of all a run's uses of a program: its steps, and what every call does around them.

    Args:
      contents: of a call with one step, a turn of the first loop whose turns are not known.
    """
    whole = contents.cycles or 0
    unknown = [loop.cycles for loop in contents.loops if loop.trips is None]
    turn = (unknown[0] or 0) if unknown and use.steps else 0
    return use.steps * turn + use.calls * (whole - turn)


def _name(key: Key) -> dict:
    rounds = key.rounds.__name__.replace("_", " ")
    pull = ", proximal" if key.proximal else ""
    return {"program": key.program, "order": ORDERS[key.order].label, "rounds": rounds + pull}


def _on_device(shapes, field: int) -> float:
    """Bytes of a field of the state, on one device."""
    whole = tree_bytes(shapes.state[field])
    return whole / shapes.sizes.workers if shapes.owned[field] else whole
