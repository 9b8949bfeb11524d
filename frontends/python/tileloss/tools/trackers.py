"""Result lines to an experiment tracker: Weights & Biases, Trackio, TensorBoard.

A line is in its results file before a tracker sees it, and what a tracker does wrong is a warning: no verdict and no line depends
on it. Secrets are read from the environment alone (WANDB_API_KEY), and by the tracker itself.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

from tileloss.tools.config import Config

_NAMES = ("wandb", "trackio", "tensorboard", "none")
_MODES = ("online", "offline", "disabled")
_KEY = "WANDB_API_KEY"
_ERROR = 3  # the exit code where none came about

Line = dict[str, Any]


class Settings(NamedTuple):
    """What a config says of its tracker."""

    tracker: str
    project: str
    name: str | None
    mode: str
    config: dict[str, Any]  # the whole of it, as text by dotted keys


def read_settings(config: Config) -> Settings:
    """Before any work. Marks the keys that the judge is to skip.

    Raises:
        ImportError: the tracker is not installed.
        OSError: Weights & Biases is to be online, and there is no key in the environment.
        ValueError: a key is wrong; names it and its line.
    """
    config.skip("tracker", "wandb_project", "wandb_mode", "wandb_name")
    usual = "wandb" if "wandb_project" in config else "none"
    settings = Settings(
        tracker=config.choice("tracker", _NAMES, usual),
        project=config.text("wandb_project") or "tileloss",
        name=config.text("wandb_name"),
        mode=config.choice("wandb_mode", _MODES, "online"),
        config={"config": str(config.file), **config.everything()},
    )
    if settings.tracker != "none":
        importlib.import_module(
            {"tensorboard": "tensorboardX"}.get(settings.tracker, settings.tracker)
        )
    if settings.tracker == "wandb" and settings.mode == "online" and not os.environ.get(_KEY):
        raise OSError(
            f"wandb_mode: online needs {_KEY} in the environment; or use wandb_mode: offline"
        )
    return settings


def run(settings: Settings, work: Callable[[Callable[[Line], None]], int]) -> int:
    """The exit code of ``work``, which is given where its result lines go."""
    tracker, code = _Guarded(settings), _ERROR
    try:
        code = work(tracker.log)
        return code
    finally:
        tracker.finish(code)


class _Guarded:
    """A tracker that fails is told on stderr, once, and left out from there on."""

    def __init__(self, settings: Settings) -> None:
        self._name = settings.tracker
        make = _TRACKERS.get(settings.tracker)
        self._tracker: Any = None if make is None else self._attempt(lambda: make(settings))

    def log(self, line: Line) -> None:
        if self._tracker is not None:
            self._attempt(lambda: self._tracker.log(line))

    def finish(self, code: int) -> None:
        if self._tracker is not None:
            self._attempt(lambda: self._tracker.finish(code))

    def _attempt(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            self._tracker = None
            print(
                f"tileloss: warning: {self._name} failed and is left out: {type(error).__name__}: {error}",
                file=sys.stderr,
            )


class _Wandb:
    """Numbers are history, a step a line; what describes the case goes to the run's config, gates and verdict to its summary."""

    def __init__(self, settings: Settings) -> None:
        import wandb

        if settings.mode != "online":
            os.environ.pop(_KEY, None)  # neither the SDK nor its service needs it
        self._run: Any = wandb.init(
            project=settings.project,
            name=settings.name,
            mode=cast(Any, settings.mode),  # one of _MODES
            config=settings.config,
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                silent=True,
                x_disable_stats=True,
            ),
        )

    def log(self, line: Line) -> None:
        self._run.config.update(descriptions(line), allow_val_change=True)
        self._run.log(numbers(line))
        self._run.summary.update(verdict(line))

    def finish(self, code: int) -> None:
        self._run.finish(exit_code=code)


class _Trackio:
    """The same interface as wandb, into a database of this machine's; it has no summary, so the verdict is history too."""

    def __init__(self, settings: Settings) -> None:
        import trackio

        self._trackio: Any = trackio
        trackio.init(project=settings.project, name=settings.name, config=settings.config)

    def log(self, line: Line) -> None:
        self._trackio.log({**descriptions(line), **numbers(line), **verdict(line)})

    def finish(self, code: int) -> None:
        self._trackio.finish()


class _TensorBoard:
    """Event files under runs/PROJECT/NAME of the working directory, or under TENSORBOARD_DIR."""

    def __init__(self, settings: Settings) -> None:
        import tensorboardX

        folder = Path(os.environ.get("TENSORBOARD_DIR", "runs")) / settings.project
        self._writer: Any = tensorboardX.SummaryWriter(str(folder / (settings.name or "check")))
        self._writer.add_text("config", json.dumps(settings.config, indent=2), 0)
        self._step = 0

    def log(self, line: Line) -> None:
        self._writer.add_text("case", json.dumps(descriptions(line), indent=2), self._step)
        for name, value in {**numbers(line), **verdict(line)}.items():
            self._writer.add_scalar(name, float(value), self._step)
        self._step += 1

    def finish(self, code: int) -> None:
        self._writer.close()


# A tracker's run begins with it. `log` gets each line, `finish` the exit code that the command ends with.
_TRACKERS: dict[str, Any] = {"wandb": _Wandb, "trackio": _Trackio, "tensorboard": _TensorBoard}


def numbers(line: Line) -> dict[str, float]:
    """The metrics under their names; of a sweep's case its numbers too, as "case/threads"."""
    found = {name: value for name, value in line.items() if _is_number(value)}
    case = line.get("case")
    if isinstance(case, dict):
        found |= {f"case/{name}": value for name, value in case.items() if _is_number(value)}
    return found


def descriptions(line: Line) -> dict[str, Any]:
    """What is text: tool, version, loss, dtype, options, ..."""
    own = {"gates", "mutants", "strict", "trace", "case", "pass"}
    found = {k: v for k, v in line.items() if k not in own and not _is_number(v) and v is not None}
    case = line.get("case")
    if isinstance(case, dict):
        found |= {f"case/{name}": v for name, v in case.items() if isinstance(v, str)}
    return found


def verdict(line: Line) -> dict[str, Any]:
    """Each gate's value, limit and result, how many mutants were caught, and the verdict."""
    found: dict[str, Any] = {}
    for gate in line.get("gates", ()):
        for part in ("value", "limit", "pass"):
            if gate.get(part) is not None:
                found[f"gates/{gate['name']}/{part}"] = gate[part]
    planted = [mutant for mutant in line.get("mutants", ()) if mutant["planted"]]
    if planted:
        found["mutants/planted"] = len(planted)
        found["mutants/caught"] = sum(bool(mutant["caught_by"]) for mutant in planted)
    if "pass" in line:
        found["pass"] = line["pass"]
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
