"""What a row of the tables of decisions is, and how further words and their flags change one."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from absl import flags

import local_opt
import ordering
from experiments.tasks.ranges import COUNT
from experiments.training.config import OrderSetting, RunConfig
from syncopate.refusals import UserError


class Order(NamedTuple):
    """A row of ORDERS: which unit comes next."""

    label: str  # for people
    make: Callable[[OrderSetting], ordering.Ordering]
    observes: bool = True  # False: it looks at no gradient, and is made beside the steps
    coordinated: bool = False  # its running sum is of all workers
    sketch: int | None = None  # numbers of the sketches that it looks at; None: at gradients
    scaled: float | None = None  # power of the second moment that divides what it looks at
    deals: str | None = None  # EXAMPLES or UNITS of the whole set; None: units of the worker's own
    recut: str | None = None  # how a text is cut anew in every epoch, of `text.CUTS`; None: never
    takes: tuple[str, ...] = ()  # flags of further words that may change it, or some of the words


class SyncRule(NamedTuple):
    """A row of SYNC_RULES: `plan` gives the SyncPlan, and `rounds` what a step and a sync do."""

    label: str
    plan: Callable[[RunConfig], local_opt.SyncPlan]
    # (inner optimizer, axis_name=) -> Rounds
    rounds: Callable = functools.partial(local_opt.local_rounds, drift=True)
    wire: local_opt.Wire | None = None  # in which `rounds` sends changes
    fragments: int = 1  # of the parameters; a sync sends one
    takes: tuple[str, ...] = ()


class EchoPolicy(NamedTuple):
    """A row of ECHO_POLICIES; an `online` one decides while the run goes on."""

    label: str
    make: Callable[[RunConfig], Any]
    online: bool = False
    takes: tuple[str, ...] = ()


class Word(NamedTuple):
    """What a row is called and does besides: `change` makes the other row."""

    label: str
    change: Callable


class Choice(NamedTuple):
    """The words of one flag: a table, or what makes one of a whole number, as of "sketch256"."""

    text: str
    words: Mapping[str, Word] | Callable[[int], Word]


class Table(dict):
    """Rows by name; `table["name+word+word"]` is a row that further words have changed.

    Args:
      flag: that names a row; text: what it decides; rows: by name; choices: by flag.
    """

    def __init__(self, flag: str, text: str, rows: Mapping, choices: Mapping[str, Choice]):
        super().__init__(rows)
        self.flag, self.text, self.choices = flag, text, choices
        self._changed = functools.cache(self._change)  # equal words give the same row

    def __missing__(self, text: str):
        return self._changed(text)

    def find(self, word: str) -> tuple[str, Word] | None:
        """The flag of a further word, and its row; None if there is none."""
        for flag, choice in self.choices.items():
            if not callable(choice.words):
                if word in choice.words:
                    return flag, choice.words[word]
            elif number := re.fullmatch(rf"{flag}([1-9]\d*)", word):
                COUNT.check(flag, int(number[1]))
                return flag, choice.words(int(number[1]))
        return None

    def known(self) -> str:
        """All words, for people."""
        return f"{', '.join(self)}, and of {self.further()}"

    def further(self) -> str:
        return ", ".join(
            f"+{word}"
            for flag, choice in self.choices.items()
            for word in ([f"{flag}N"] if callable(choice.words) else choice.words)
        )

    def define_flags(self, define: Callable, default: str) -> None:
        """Its flag, and one for each kind of its further words; `define` as of `flags.definer`."""
        define(flags.DEFINE_string, self.flag, default, f"{self.text}: {self.known()}")
        for flag, choice in self.choices.items():
            text, words = f"of --{self.flag}: {choice.text}", choice.words
            if callable(words):
                define(COUNT, flag, None, text)
            else:
                define(flags.DEFINE_enum, flag, None, text, [*words])

    def words_of(self, values: flags.FlagValues) -> str:
        """The words that its flags say; ValueError where there is no such row."""
        given = {flag: values[flag].value for flag in self.choices}
        words = [f"{k}{v}" if callable(self.choices[k].words) else v for k, v in given.items() if v]
        text = "+".join([values[self.flag].value, *words])
        self[text]  # refuses what does not fit together
        return text

    def _change(self, text: str):
        name, *further = text.split("+")
        begin = f"--{self.flag} is {text}: "
        if name not in self:
            raise UserError(f"{begin}{name!r} is not one of {self.known()}.")
        row, taken = self[name], []
        for word in further:
            if (found := self.find(word)) is None:
                raise UserError(f"{begin}{word!r} is no further word: choose of {self.further()}.")
            flag, (label, change) = found
            if flag in taken or not {flag, word} & {*row.takes}:
                able = [n for n, other in self.items() if {flag, word} & {*other.takes}]
                raise UserError(
                    f"{begin}{name} cannot be {word} (--{flag}, once): choose one of "
                    f"{', '.join(able)}, or leave {word} out."
                )
            taken.append(flag)
            row = change(row)._replace(label=f"{row.label}, {label}")
        return row
