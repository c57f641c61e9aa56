"""What a sweep varies: keys of the configuration by their paths, and the values they may take."""

import itertools
import json
from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from ds_bert.errors import UsageError

FORM = "PATH=a,b,c, PATH=lo..hi or PATH=log:lo..hi"


@dataclass(frozen=True)
class Parameter:
    """One key of the configuration."""

    path: str
    """Of its names, with dots between."""
    spec: str
    """As the user wrote it."""
    distribution: BaseDistribution

    @property
    def choices(self) -> tuple | None:
        """The values of a list; None for a range."""
        return self.distribution.choices if isinstance(self.distribution, CategoricalDistribution) else None

    def suggest(self, trial: Trial) -> Any:
        """The value in this trial: queued, already drawn, or drawn now."""
        kind = self.distribution
        if isinstance(kind, CategoricalDistribution):
            return trial.suggest_categorical(self.path, kind.choices)
        draw = trial.suggest_int if isinstance(kind, IntDistribution) else trial.suggest_float
        return draw(self.path, kind.low, kind.high, log=kind.log)


def parse_parameter(text: str) -> Parameter:
    """Read `PATH=SPEC`.

    Args:
        text: SPEC is `a,b,c` (each as in JSON, or a word), `lo..hi` (whole numbers if both are), or `log:lo..hi`.

    Raises:
        UsageError: it cannot be read; says what is wrong.
    """
    path, equals, spec = text.partition("=")
    if not equals or not all(path.split(".")) or not spec:
        raise UsageError(f"--param {text}: write {FORM}")
    logarithmic = spec.startswith("log:")
    low, dots, high = spec.removeprefix("log:").partition("..")
    if not dots:
        values = [_value(word) for word in spec.split(",")]
        repeated = next((value for value in values if values.count(value) > 1), None)
        if repeated is not None or "" in values:
            raise UsageError(
                f"--param {text}: {repeated!r} stands twice" if repeated else f"--param {text}: write {FORM}"
            )
        return Parameter(path, spec, CategoricalDistribution(values))
    low, high = _value(low), _value(high)
    if any(isinstance(end, bool) or not isinstance(end, (int, float)) for end in (low, high)):
        raise UsageError(f"--param {text}: the ends of a range are numbers; write {FORM}")
    if low >= high or (logarithmic and low <= 0):
        needed = "a positive lower end" if logarithmic and low <= 0 else "the lower end first"
        raise UsageError(f"--param {text}: a range needs {needed}")
    kind = IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
    return Parameter(path, spec, kind(low, high, log=logarithmic))


def combinations(parameters: list[Parameter]) -> list[dict[str, Any]]:
    """Every combination of the values of lists, the last parameter changing fastest."""
    paths = [parameter.path for parameter in parameters]
    return [
        dict(zip(paths, values, strict=True))
        for values in itertools.product(*(parameter.choices for parameter in parameters))
    ]


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word.strip()
