"""A campaign counts its cases and failures, and continues after a failure."""

from __future__ import annotations

import json
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Limits:
    """How long a campaign runs.

    Attributes:
        seed: Seed of all campaigns; a case's randomness depends on it, on the campaign and on the case's number only.
        count: Number of cases.
        seconds: Runs until this many seconds are over instead; None = `count` decides.
        first: Number of the first case.
        only: Number of the only case.
    """

    seed: int
    count: int
    seconds: float | None = None
    first: int = 0
    only: int | None = None


@dataclass
class Failure:
    """A failed case. `seed` and `case` repeat it."""

    case: int
    seed: int
    what: str
    details: str = ""


@dataclass
class Result:
    """Result of a campaign.

    Attributes:
        seconds: Wall-clock time.
        figures: Measurements, and counts of kinds.
        left_out: Why it did not run; "" = it did.
    """

    name: str
    seed: int
    cases: int = 0
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    load: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    left_out: str = ""

    @classmethod
    def read(cls, path: Path) -> Result:
        """Return a result that `Campaign` has written."""
        content = json.loads(path.read_text())
        return cls(**content | {"failures": [Failure(**failure) for failure in content["failures"]]})

    def write(self, path: Path) -> None:
        """Write it as JSON, in one step."""
        path.with_suffix(".tmp").write_text(json.dumps(asdict(self), indent=1))
        path.with_suffix(".tmp").replace(path)


class Campaign:
    """One campaign of a run.

    Attributes:
        folder: Empty folder for its stores.
        out: Folder of the reports.
        options: Settings of the command line that only some campaigns use.
    """

    def __init__(self, name: str, limits: Limits, folder: Path, out: Path, options: dict[str, Any]) -> None:
        self.name, self.limits, self.folder, self.out, self.options = name, limits, folder, out, options
        self._file, self._current = out / f"{name}.json", out / f"{name}.current"
        self.result = Result.read(self._file) if limits.first else Result(name, limits.seed)
        self._before = self.result.seconds
        self._begun = self._written = time.monotonic()
        self.kinds: Counter[str] = Counter(self.result.figures.get("kinds", {}))

    def numbers(self) -> Iterator[int]:
        """Yield the number of each case until the count or the time is used up."""
        limits = self.limits
        if limits.only is not None:
            yield limits.only
            return
        number = limits.first
        while self.seconds < limits.seconds if limits.seconds else number < limits.count:
            yield number
            number += 1

    @property
    def seconds(self) -> float:
        """Seconds since the campaign began."""
        return self._before + time.monotonic() - self._begun

    def random(self, number: int) -> random.Random:
        """Return the source of a case's random choices."""
        return random.Random(f"{self.limits.seed} {self.name} {number}")

    @contextmanager
    def case(self, number: int, cases: int = 1) -> Iterator[None]:
        """Count a case (or several that are checked together); an exception is recorded as its failure."""
        self._current.write_text(f"{number} {self.result.cases}")
        try:
            yield
        except Exception as error:
            self.fail(number, describe(error), traceback.format_exc())
        finally:
            self.result.cases += cases
            if time.monotonic() > self._written + 1:
                self.save()

    def fail(self, number: int, what: str, details: str = "") -> None:
        """Record a failure."""
        self.result.failures.append(Failure(number, self.limits.seed, what, details))
        print(f"{self.name}: case {number} of seed {self.limits.seed} failed: {what}", flush=True)
        self.save()

    def save(self) -> None:
        """Write the result so far, which survives this process."""
        self._written = time.monotonic()
        self.result.seconds, self.result.load = round(self.seconds, 1), round(os.getloadavg()[0], 1)
        if self.kinds:
            self.result.figures["kinds"] = dict(sorted(self.kinds.items()))
        self.result.write(self._file)


def describe(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
