"""The search for the fastest mix of precisions that is accurate enough.

Speed is what this machine measures: the model is compiled once in each precision, and every operation takes the fastest that is measured
to be faster than the more accurate ones. Accuracy is what the simulation of a mix gives, or its code where that is at hand or soon made;
what the simulation finds good is judged once more as code before it is relied on, and when the code is not good, only code is judged from
then on.
When the mix is not accurate enough, operations move to more accurate precisions, those first whose move takes the most error off per
second lost. How many have to is found by a galloping search, and afterwards each is tried in its fast precision again while time is left.
At last the mix is timed against bf16 and fp32, and the fastest that keeps the bound wins; a mix has to be faster by a margin.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .found import Candidate, Trial
from .judge import Judge, Verdict
from .levels import FINE, FLOAT, LEVELS, NARROW, QUANTIZED, Lab, Mix, Unit, in_words
from .measure import Timer
from .mixing import MARGIN, Move, Rung, fewest, hull, moved, moves, worthwhile
from .model import CompiledModel

_SENSITIVITY_SHARE = 0.5
"""Of the time that is left, how much may go into asking what each operation does to the result."""
_SAFE_SHARE = 0.5
"""Of the error that seems to be allowed, how much the first mix after the fastest is given."""
MIXED = "mix"


@dataclass
class Budget:
    """Seconds from its making. reserve: what the end of the search will need."""

    seconds: float
    reserve: float = 0.0
    start: float = field(default_factory=time.perf_counter)

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.start

    @property
    def left(self) -> float:
        return self.seconds - self.reserve - self.spent


@dataclass(frozen=True)
class Found:
    """The answer: a mix, and what was learnt on the way.

    chosen: the name of the candidate that won; mixes: of all candidates, by name. fastest: where the search began. score: what eval_fn
    gives for the answer, None without one.
    times: seconds for each unit and level. errors: squared error of the results with one unit alone at a level, where it was measured.
    """

    chosen: str
    mixes: Mapping[str, Mix]
    fastest: Mix
    score: float | None
    candidates: tuple[Candidate, ...]
    trials: tuple[Trial, ...]
    units: tuple[Unit, ...]
    times: Mapping[str, Mapping[str, float]]
    errors: Mapping[tuple[str, str], float]
    notes: tuple[str, ...]

    @property
    def mix(self) -> Mix:
        return self.mixes[self.chosen]


class Search:
    """One search. narrow: whether bf16 may be used.

    The first mix is judged whatever the budget, bf16 when it would win, and the code of a mix that is to be the answer; what else makes
    it better is done while time is left. When nothing else is accurate enough, or nothing is faster, the answer is fp32.
    """

    def __init__(self, lab: Lab, judge: Judge, timer: Timer, budget: Budget, narrow: bool = True) -> None:
        self.lab, self.judge, self.timer, self.budget, self.narrow = lab, judge, timer, budget, narrow
        self.units: tuple[Unit, ...] = ()
        self.times: dict[str, dict[str, float]] = {}
        self.errors: dict[tuple[str, str], float] = {}
        self.measured: frozenset[tuple[str, str]] = frozenset()
        self.trials: list[Trial] = []
        self.notes: list[str] = []
        self._verdicts: dict[tuple[str, ...], Verdict] = {}
        self._simulated: set[tuple[str, ...]] = set()  # of the verdicts
        self._judging = judge.took
        self._compiling = 0.0
        self._refused = False  # whether code was called with other shapes
        self._doubted = False  # whether code lost more than its simulation had promised
        self._hurried = False

    def run(self) -> Found:
        """Raises InputError when eval_fn fails."""
        found = self._timed(FLOAT, QUANTIZED, *((NARROW,) if self.narrow else ()))
        self.units = self.lab.units(found[FLOAT].keys())
        for level, seconds in found.items():
            self._take_down(level, seconds)
        fastest = {unit.name: self._rungs(unit)[0].level for unit in self.units}
        levels = fastest if self._holds(fastest) else self._repaired()
        return self._decided(self._mix(fastest), self._mix(levels))

    def _timed(self, *levels: str) -> Mapping[str, Mapping[str, float]]:
        """For each level the time of each operation in the model with everything at it."""
        models: dict[str, CompiledModel] = {}
        for level in levels:
            before = self.budget.spent
            models[level] = self.lab.compiled(self.lab.all_at(level))
            self._compiling = max(self._compiling, self.budget.spent - before)
        before = self.budget.spent
        found = self.timer.products(models)
        # At the end the answer is compiled and timed in the same way.
        self.budget.reserve = max(self.budget.reserve, self._compiling + self.budget.spent - before)
        return found

    def _take_down(self, level: str, found: Mapping[str, float]) -> None:
        """Keeps the times of the units that have a level."""
        for unit in self.units:
            parts = [found[site.name] for site in unit.sites if site.name in found]
            if parts and self.lab.level_of(unit, level) and self.lab.is_own(unit, level):
                self.times.setdefault(unit.name, {})[level] = sum(parts)

    def _mix(self, levels: Mapping[str, str]) -> Mix:
        return {site.name: levels[unit.name] for unit in self.units for site in unit.sites}

    def _rungs(self, unit: Unit) -> tuple[Rung, ...]:
        """The levels worth their error, from the fastest. Without times: what the scheme says, and fp32 after everything that has."""
        times = self.times.get(unit.name, {})
        if FLOAT not in times:
            given = [level for level in (QUANTIZED, FLOAT) if self.lab.level_of(unit, level)]
            return tuple(Rung(level, float(n), self._error(unit.name, level)) for n, level in enumerate(given))
        return worthwhile([Rung(level, times[level], self._error(unit.name, level)) for level in LEVELS if level in times])

    def _error(self, name: str, level: str) -> float:
        """Squared error with one unit alone at a level; nothing for floating point, which is tried before it is given up."""
        return self.errors.get((name, level), 1.0) if level in (QUANTIZED, FINE) else 0.0

    def _holds(self, levels: Mapping[str, str]) -> bool:
        """Whether levels keep the bound as code, which is made when their simulation does."""
        mix = self._mix(levels)
        if not self._meets(mix):
            return False
        self.lab.compiled(mix)
        return self._meets(mix)

    def _meets(self, mix: Mix) -> bool:
        """Whether a mix keeps the bound, as far as is known now; fp32 does by definition."""
        if not self._known(mix):
            self._judge(mix)
        return set(mix.values()) <= {FLOAT} or self._verdicts[self._key(mix)].meets

    def _judge(self, mix: Mix) -> None:
        """Finds the verdict on a mix, and what one takes, without the time to compile."""
        key, words, as_code = self._key(mix), in_words(mix, self.lab), self._as_code(mix)
        runnable = self.lab.runnable(mix) if as_code else None
        before = self.budget.spent
        found = self.judge.verdict(runnable or self.lab.judged(mix), f"the mix {words}")
        self._judging = max(self._judging, self.budget.spent - before)
        self.trials.append(Trial(words, found.meets, found.score, found.error, not as_code))
        if runnable is None:
            self._simulated.add(key)
        else:
            self._refused |= runnable.refused > 0
            self._doubted |= key in self._simulated and not found.meets
            self._simulated.discard(key)
        self._verdicts[key] = found

    def _as_code(self, mix: Mix) -> bool:
        """Whether a mix is judged as code: where that is at hand, or is made for that; else it is simulated.

        The code is of no use where calls depend on what others wrote: some might be simulated.
        """
        return not self.lab.compiled(self.lab.all_at(FLOAT)).stateful and (self._makes_code or self.lab.has_compiled(mix))

    @property
    def _makes_code(self) -> bool:
        """Whether mixes are compiled to be judged: when the simulation was found too good, or where that takes less time than to judge the
        model itself, unless eval_fn's calls have other shapes."""
        return self._doubted or (self._compiling <= self.judge.took and not self._refused)

    def _known(self, mix: Mix) -> bool:
        """Whether there is a verdict on a mix. That of a simulation that was found good does not count where there is to be code."""
        found = self._verdicts.get(self._key(mix))
        if found is None:
            return set(mix.values()) <= {FLOAT}
        return not (found.meets and self._key(mix) in self._simulated and self._as_code(mix))

    def _key(self, mix: Mix) -> tuple[str, ...]:
        return tuple(mix[site.name] for site in self.lab.sites)

    def _affordable(self, mix: Mix) -> bool | None:
        """As `_meets`; None when there is no time left to find out."""
        if not self._known(mix) and self.budget.left < self._cost:
            self._hurried = True
            return None
        return self._meets(mix)

    @property
    def _cost(self) -> float:
        """About the seconds that a verdict on another mix takes."""
        return self._judging + (self._compiling if self._makes_code else 0.0)

    def _repaired(self) -> Mapping[str, str]:
        """Levels that keep the bound, when the fastest do not. Without time to judge a single mix, those of fp32."""
        if self.budget.left < self._cost:
            self._hurried = True
            return {unit.name: FLOAT for unit in self.units}
        if any(self.lab.level_of(unit, FINE) for unit in self.units) and self.budget.left > self.budget.reserve:
            self._take_down(FINE, self._timed(FINE)[FINE])
        self._ask_each()
        ladders = {unit.name: hull(self._rungs(unit)) for unit in self.units}
        start = {name: rungs[0].level for name, rungs in ladders.items()}
        steps = moves(ladders)
        guess = self._guess(sum(rungs[0].error for rungs in ladders.values()), steps)

        def passes(n: int) -> bool | None:
            return self._affordable(self._mix(moved(start, steps[:n])))

        count = fewest(len(steps), guess, passes)
        if not self._holds(moved(start, steps[:count])):
            count = fewest(len(steps), count + 1, passes)
        good = moved(start, steps[:count])
        better = self._refined(good)
        return better if self._holds(better) else self._refined(good)

    def _guess(self, whole: float, steps: Sequence[Move]) -> int:
        """How many steps will hardly be too few: squared errors add up, and what a metric loses grows with them.

        A guess on the safe side leaves something to return when the time runs out. whole: the squared error with no step.
        """
        first = next(iter(self._verdicts.values()))
        least = _SAFE_SHARE * whole * self.judge.share(first)
        left = itertools.accumulate((step.error for step in steps), operator.sub, initial=whole)
        return next((n for n, error in enumerate(left) if error <= least), len(steps))

    def _refined(self, levels: Mapping[str, str]) -> Mapping[str, str]:
        """Takes single units back to faster levels, those that gave up most first, as long as the bound is kept and time is left.

        Levels off the hull are among them: what the error says of each alone is not all that counts.
        """
        ladders = {unit.name: {rung.level: rung.seconds for rung in self._rungs(unit)} for unit in self.units}
        lost = {name: rungs[levels[name]] - min(rungs.values()) for name, rungs in ladders.items()}
        for name in sorted(lost, key=lambda n: (-lost[n], n)):
            rungs = ladders[name]
            tried = ({**levels, name: level} for level in rungs if rungs[level] < rungs[levels[name]])
            levels = next((mix for mix in tried if self._affordable(self._mix(mix))), levels)
        return levels

    def _ask_each(self) -> None:
        """What each unit alone does to the model's results in its integer levels, those that promise most first.

        Their order comes from the noise on their own results, and so do the answers for which there is no time.
        """
        end = self.budget.spent + _SENSITIVITY_SHARE * max(self.budget.left, 0.0)
        asked = [(unit, rung.level) for unit in self.units for rung in self._rungs(unit) if rung.level in (QUANTIZED, FINE)]
        noise = {level: self.lab.noise(level, self.judge.sample[:1]) for level in sorted({level for _, level in asked})}
        own = {(unit.name, level): sum(noise[level].get(site.name, 0.0) for site in unit.sites) for unit, level in asked}
        asked.sort(key=lambda pair: (-own[pair[0].name, pair[1]] / self._saved(pair[0].name, pair[1]), pair[0].name, pair[1]))
        known: dict[tuple[str, str], float] = {}
        for unit, level in asked:
            if self.budget.spent >= end:
                self.notes.append(f"{len(asked) - len(known)} of {len(asked)} sensitivities were estimated, for want of time")
                break
            alone = {other.name: level if other is unit else FLOAT for other in self.units}
            known[unit.name, level] = self.judge.error(self.lab.simulated(self._mix(alone)), 1) ** 2
        scale = sum(known.values()) / (sum(own[key] for key in known) or 1.0) if known else 1.0
        self.errors = {key: scale * value for key, value in own.items()} | known
        self.measured = frozenset(known)

    def _saved(self, name: str, level: str) -> float:
        """Seconds that a level saves; what is not timed counts as little."""
        times = self.times.get(name, {})
        return times[FLOAT] - times[level] if FLOAT in times and level in times else 1.0

    def _decided(self, fastest: Mix, mix: Mix) -> Found:
        """Times the mix, bf16 and fp32 against each other and takes the fastest that keeps the bound; a mix must be so clearly."""
        mixes: dict[str, Mix] = {FLOAT: self.lab.all_at(FLOAT)}
        if self.narrow:
            mixes[NARROW] = self.lab.all_at(NARROW)
        if mix not in mixes.values():
            mixes[MIXED] = mix
        seconds = self.timer.paired({name: self.lab.compiled(m) for name, m in mixes.items()})
        candidates: list[Candidate] = []
        for name in sorted(mixes, key=lambda n: seconds[n] / (MARGIN if n == MIXED else 1.0)):
            late = any(c.meets for c in candidates) and not self._known(mixes[name])
            candidates.append(Candidate(name, seconds[name], None if late else self._meets(mixes[name])))
        chosen = next(c.name for c in candidates if c.meets)
        self._tell(chosen, candidates, mixes, fastest)
        errors = {key: error for key, error in self.errors.items() if key in self.measured}
        verdict = self._verdicts.get(self._key(mixes[chosen]))
        score = self.judge.baseline if verdict is None else verdict.score
        return Found(
            chosen, mixes, fastest, score, tuple(candidates), tuple(self.trials), self.units, self.times, errors, tuple(self.notes)
        )

    def _tell(self, chosen: str, candidates: list[Candidate], mixes: Mapping[str, Mix], fastest: Mix) -> None:
        """Says what the user should know of the answer."""
        seconds = {c.name: c.seconds for c in candidates}
        if set(fastest.values()) <= {FLOAT, NARROW}:
            self.notes.append("no operation was measured to be faster quantized")
        elif MIXED not in mixes:
            self.notes.append("no mix with a quantized operation was found to keep the bound")
        elif chosen == MIXED and mixes[MIXED] == fastest:
            self.notes.append("every operation has the precision that was measured to be fastest; accuracy did not limit the speed")
        if MIXED in mixes and chosen != MIXED:
            self.notes.append(f"the best mix takes {seconds[MIXED] * 1e3:.3g} ms, {chosen} takes {seconds[chosen] * 1e3:.3g} ms")
        if self._hurried:
            self.notes.append("the time for the search ran out; with more of it a faster mix may be found")
        if self._hurried and self._refused:
            self.notes.append("eval_fn's calls do not have the shapes that were compiled, so mixes were simulated; give dynamic_shapes")
