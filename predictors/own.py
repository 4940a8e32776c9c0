"""A user's own predictor: an object, the import path of one, or a stored profile."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxllm.errors import ConfigError, path_of, shown
from jaxllm.predictors.base import CheckedCosts, CostModel, asked, seconds_of
from jaxllm.predictors.online import OnlineCalibration
from jaxllm.predictors.store import Profile
from jaxllm.system.import_path import imported

_PROBES: dict[str, tuple[tuple[int, ...], ...]] = {
    "step_seconds": ((1, 1), (8, 4096), (0, 0, 512, 1, 0), (8, 4096, 512, 2, 64), (256, 500_000)),
    "swap_out_seconds": ((1,), (64,), (4096,)),
    "swap_in_seconds": ((1,), (64,), (4096,)),
}
"""What a predictor is asked when it is given."""


class OwnCosts(NamedTuple):
    """A predictor, whose it is, and the profile that it is of, if it is of one."""

    model: CostModel
    source: str
    profile: Profile | None = None


def own_costs(given: CostModel | str | os.PathLike[str]) -> OwnCosts:
    """The predictor that an option `costs` stands for; probed before anything depends on it.

    Args:
        given: an object with the methods of `CostModel`; "module:attribute" of one, or of a class or function
            that makes one without arguments; or the path of what `jaxllm profile` stored.

    Raises:
        ConfigError: it is none, importing or calling it fails, or a probe is not answered with seconds.
        ProfileError: the profile is missing or damaged.
    """
    if isinstance(given, os.PathLike) or (isinstance(given, str) and ":" not in given):
        profile = Profile.load(os.path.expanduser(given))
        return OwnCosts(profile.table, f"profile {os.path.basename(given)}", profile)
    source, found = type_name(given), given
    if isinstance(given, str):
        source, found = given, imported(given, "the costs")
        if inspect.isclass(found) or not hasattr(found, "step_seconds"):
            found = _made(given, found)
    model = check_costs(found, source)
    return OwnCosts(model if isinstance(model, OnlineCalibration) else CheckedCosts(model), source)


def checked(costs: CostModel) -> CostModel:
    """A predictor that was probed (`check_costs`), and whose answers are checked (`CheckedCosts`)."""
    return costs if isinstance(costs, CheckedCosts) else CheckedCosts(check_costs(costs))


def check_costs(costs: Any, name: str | None = None) -> CostModel:
    """Verify that an object answers as a `CostModel` does, by its signatures and a few questions.

    Args:
        costs: is asked.
        name: what messages call it; by default its class.

    Returns:
        The same object.

    Raises:
        ConfigError: a method is missing, takes other arguments, raises, or answers with no seconds.
    """
    if inspect.isclass(costs):
        raise ConfigError(
            f"{name or 'costs'} is the class {costs.__name__}, and must be an object: give {costs.__name__}()"
        )
    missing = [method for method in _PROBES if not callable(getattr(costs, method, None))]
    if missing:
        raise ConfigError(
            f"{name or 'costs'} is {shown(costs)}, which has no {', '.join(missing)}: a predictor has "
            f"{', '.join(_PROBES)} (jaxllm.predictors.base.CostModel)"
        )
    for method, probes in _PROBES.items():
        for work in probes:
            _probe(
                f"{name or type(costs).__name__}.{method}",
                getattr(costs, method),
                work,
                getattr(CostModel, method),
            )
    return costs


def _probe(
    name: str, method: Callable[..., object], work: tuple[int, ...], expected: Callable[..., object]
) -> None:
    """Ask a method once.

    Raises:
        ConfigError: it does not take the work, raises, or answers with no seconds.
    """
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # one of a compiled module
        signature = inspect.signature(lambda *work: None)
    try:
        signature.bind(*work)
    except TypeError as error:
        wanted = str(inspect.signature(expected)).replace("(self, ", "(")
        raise ConfigError(
            f"{name}{signature} cannot be asked {work}: {error}; it must take {wanted}"
        ) from error
    try:
        seconds = method(*work)
    except Exception as error:
        raise ConfigError(f"{asked(name, work)} raised {type(error).__name__}: {error}") from error
    seconds_of(asked(name, work), seconds)


def type_name(costs: object) -> str:
    """What messages and records call a predictor that was given as an object."""
    while isinstance(costs, CheckedCosts | OnlineCalibration):
        costs = costs.model
    return path_of(costs)


def _made(path: str, found: Any) -> Any:
    """What a class or function makes."""
    if not callable(found):
        return found  # and will be refused
    try:
        return found()
    except Exception as error:
        raise ConfigError(
            f"the costs {path!r} must be an object, or be made without arguments: "
            f"{type(error).__name__}: {error}"
        ) from error
