"""What a claim is, and what the recorded runs say of it, look after look."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from experiments.results.statistics import Comparison
from experiments.verdict_parts import looks, rule
from experiments.verdict_parts.rule import Verdict


class Claim(NamedTuple):
    text: str  # of CD-GraB against D-RR, where it does not say more
    paper: str  # the published numbers; "-": no paper says it, it is ours
    runs: tuple[str, ...] = ()  # of `RUNS`, which `judge` takes; the first one's command is shown
    judge: Callable | None = None  # `(look, *comparisons) -> Verdict`; None: not testable here
    scaled: str = ""  # what was scaled down, or is missing, where it is not what the run says
    setting: str = ""  # at which learning rate
    command: str = ""  # what shows it, where no recorded run does


def decide(claim: Claim, recorded: Mapping[str, Comparison]) -> Verdict:
    """The verdict of the latest look, from the comparisons of runs by name."""
    return history(claim, recorded)[-1]


def history(claim: Claim, recorded: Mapping[str, Comparison]) -> list[Verdict]:
    """The verdicts of all looks, each at its own level and from the seeds that it had.

    A look at which nothing of this claim had changed is none, nor is one with too few seeds.
    """
    if claim.judge is None:
        return [Verdict(rule.UNTESTABLE)]
    if not set(claim.runs) <= set(recorded):
        return [Verdict(rule.NOT_RUN)]
    found, compared = [], [recorded[name] for name in claim.runs]
    for seeds in looks.states([looks.of(one) for one in compared]):
        then = [looks.first(one, count) for one, count in zip(compared, seeds, strict=True)]
        if found and found[-1].word == rule.NOT_RUN:
            found.pop()
        if not found or claim.judge(len(found), *then) != found[-1]:
            found.append(claim.judge(len(found) + 1, *then))
    return found


def seconds_per_seed(claim: Claim, recorded: Mapping[str, Comparison]) -> float | None:
    """Of both arms at their own rates in all phases, in all of its runs; None: unknown."""
    if not claim.runs or not set(claim.runs) <= set(recorded):
        return None
    each = [
        looks.seconds_per_seed(recorded[name], asked_of(claim, name, recorded))
        for name in dict.fromkeys(claim.runs)
    ]
    return None if None in each else sum(each)


def asked_of(claim: Claim, name: str, recorded: Mapping[str, Comparison]) -> set[tuple]:
    """(arm, speed, learning rate) of all that a claim compares in one of its runs."""
    places = [place for place, run in enumerate(claim.runs) if run == name]
    return {run for place in places for run in claim.judge.asked(place, recorded[name])}
