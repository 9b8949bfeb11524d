"""What gradcheck and judge have in common: a case from its config to its line of results, and what is printed of it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tileloss
from tileloss.testing._judge import Answer, Crashed, Event, Tensors, ask
from tileloss.tools import trackers
from tileloss.tools.config import Config, translate_old_keys
from tileloss.tools.printable import compact, escaped, print_columns, print_options
from tileloss.tools.progress import Progress
from tileloss.tools.requests import run_request, shown_progress
from tileloss.tools.results import ResultWriter

PASS, FAILED = 0, 1
_DESCRIBED = ("loss", "options", "preset", "dtype", "seed")  # of a case, in a line of results


class Job:
    """A config's case, which is asked about once its results file is open.

    Raises:
        JudgeError, OSError, ValueError: the config is wrong; names the key and its line. Before a model is loaded.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        sets: Sequence[str] = (),
        inputs: Iterable[Path] = (),
        *,
        strict: bool = False,
    ) -> None:
        """``sets``: overrides besides --set. ``inputs``: files that are read besides the config's."""
        self.config = config = Config(options.config, [*options.set, *sets])
        self.is_quiet = options.quiet
        self._settings = trackers.read_settings(config)
        self._overrides = translate_old_keys(config)
        self._has_model = "model_path" in config
        if self._has_model:
            from tileloss.tools import model_case

            self._overrides += model_case.prepare(config)
        config.skip("output")
        ask(self._request("read", strict=strict))
        self._files: dict[str, Tensors] = {} if self._has_model else config.files()
        self._facts: dict[str, Any] = {}  # of a model, for the report
        self.inputs = [config.file, *map(Path, self._files), *inputs]
        self._output = _output(config)
        self._write: Callable[[dict[str, Any]], None]

    def run(self, work: Callable[[], int]) -> int:
        """The exit code of ``work``, which may ask. What is found goes to the results file, then to the tracker."""
        place = self.config.place("output")
        with ResultWriter(self._output, place, self.inputs) as results:

            def tracked(log: Callable[[dict[str, Any]], None]) -> int:
                def write(line: dict[str, Any]) -> None:
                    results.write(line)
                    log(line)

                self._write = write
                self.load()
                return work()

            return trackers.run(self._settings, tracked)

    def load(self) -> None:
        """The model, if the config has one, becomes the case's tensors."""
        if not self._has_model:
            return
        from tileloss.tools import model_case

        with Progress("model", quiet=self.is_quiet) as progress:
            made = model_case.make(self.config, progress)
        self._overrides += made.overrides
        self._facts = made.facts
        self._files = {os.path.join(Path.cwd(), made.facts["model"]): made.tensors}

    def draw(self) -> Answer:
        """The case's inputs, in this process: they are not copied from another."""
        with shown_progress("draw", is_quiet=self.is_quiet) as told:
            return ask(self._request("draw"), self._files, told=told)

    def check(self, do: str, **more: Any) -> int:
        """The exit code of the request "gradcheck" or "trace": of the kernels, which may crash."""
        told: dict[str, Event] = {}

        def tell(event: Event) -> None:
            told[event["event"]] = event
            if event["event"] == "case":
                self._print_case("gradcheck", event)
            elif event["event"] == "strict":
                print(f"\n{event['text']}", end="", flush=True)

        try:
            answer = run_request(
                self._request(do, **more), self._files, told=tell, is_quiet=self.is_quiet
            )
        except Crashed as error:
            return self._finish_crashed(told, str(error))
        return self._finish(answer.event("result"))

    def judge(self, outputs: Tensors, producer: str = "", path: str = "", **more: Any) -> int:
        """The exit code of outputs, of a file or of an implementation."""
        if producer:
            more["producer"] = producer
        if path:
            more["outputs"] = path

        def tell(event: Event) -> None:
            if event["event"] == "case":
                self._print_case("judge", event)
                made_by = [f"made by {producer}"] if producer else []
                print("outputs", escaped(", ".join([path, *made_by] if path else made_by)))

        try:
            answer = run_request(
                self._request("judge", **more), self._files, outputs, tell, is_quiet=self.is_quiet
            )
        except Crashed as error:
            raise RuntimeError(f"what judges crashed ({error})") from error
        return self._finish(answer.event("result"))

    def _request(self, do: str, **more: Any) -> dict[str, Any]:
        tree = self.config.tree(*self._overrides)
        return {"do": do, "config": tree, "name": str(self.config.file), **more}

    def _print_case(self, tool: str, case: Event) -> None:
        preset = f" {case['preset']}" if case["preset"] else ""
        shape = [str(case[name]) for name in ("batch_size", "seq_len", "vocab_size")]
        shape += [f"hidden {case['hidden_size']}"] if "hidden_size" in case else []
        source = escaped(str(self._facts.get("model", case["source"])))
        print(
            f"{tool} {escaped(str(self.config.file))}: {case['loss']}{preset} [{', '.join(shape)}] {case['dtype']}"
            f"{', in place' if case['in_place'] else ''}; {source}; seed {case['seed']}"
        )
        print_options(case["options"])

    def _finish(self, result: Event) -> int:
        line: dict[str, Any] = {}
        for name, value in result["line"].items():
            line |= self._facts if name in ("gates", "trace") else {}
            line[name] = value
        if "trace" in line:
            _print_trace(line["trace"], result["rows"])
        else:
            _print_metrics(result["metrics"] | self._facts)
            _print_gates(line["gates"])
        if "mutants" in line:
            _print_mutants(line["mutants"], result)
        self._write(line)
        return _print_verdict(result["failures"])

    def _finish_crashed(self, told: dict[str, Event], how: str) -> int:
        case = told.get("case", {})
        line: dict[str, Any] = {"tool": "gradcheck", "version": tileloss.__version__}
        line |= {"config": str(self.config.file)}
        if case:
            described = {name: case[name] for name in _DESCRIBED}
            line |= described | {"preset": case["preset"] or None}
        line |= self._facts
        line |= {"strict": told["strict"]["report"]} if "strict" in told else {}
        self._write(line | {"crashed": how, "pass": False})
        return _print_verdict([f"crashed ({how})"])


def _output(config: Config) -> Path | None:
    text = config.text("output")
    if text in (None, "-"):
        return None if text is None else Path(text)  # which is refused
    return config.path_from("output", text)


def _print_metrics(metrics: dict[str, Any]) -> None:
    print()
    print_columns(["metric", "value"], [[name, _shown(x)] for name, x in metrics.items()], 1)


def _print_gates(gates: list[dict[str, Any]]) -> None:
    print()
    rows = [
        [gate["name"], _shown(gate["value"], ".4g"), _shown(gate["limit"], ".4g"), _result(gate)]
        for gate in gates
    ]
    print_columns(["gate", "value", "limit", "result"], rows, 1)


def _print_mutants(mutants: list[dict[str, Any]], result: Event) -> None:
    if not result["mutants_judged"]:
        print("\nmutants: not judged, as gates fail without any")
        return
    rows = result["mutant_rows"]
    print(f"\nmutants{'' if rows is None else f', planted in the first {rows} used rows'}")
    caught = [
        ", ".join(mutant["caught_by"]) or "NOT CAUGHT"
        if mutant["planted"]
        else "(no effect on this config)"
        for mutant in mutants
    ]
    names = [mutant["name"] for mutant in mutants]
    print_columns(["mutant", "caught by"], list(zip(names, caught, strict=True)))


def _print_trace(trace: dict[str, Any], rows: int) -> None:
    ignored = (
        f": ignored, {trace['ignored']}; all its outputs are 0 (argmax -1)"
        if trace["ignored"]
        else ""
    )
    print(f"\nrow {trace['row']} of {rows}, label {trace['label']}{ignored}\n")

    def cells(stage: dict[str, Any]) -> list[str]:
        numbers = [(stage["column"], "d"), (stage["kernel"], ".9g"), (stage["oracle"], ".9g")]
        numbers += [(stage["difference"], ".3g"), (stage["allowed"], ".3g")]
        texts = ["-" if value is None else format(value, how) for value, how in numbers]
        return [stage["stage"], *texts, "-" if stage["allowed"] is None else _result(stage)]

    head = ["stage", "column", "kernel", "oracle", "difference", "allowed", "result"]
    print_columns(head, [cells(stage) for stage in trace["stages"]], 1)


def _print_verdict(failures: Sequence[str]) -> int:
    print(f"\nFAIL: {', '.join(failures)}" if failures else "\nPASS")
    return FAILED if failures else PASS


def _result(gate: dict[str, Any]) -> str:
    return "pass" if gate["pass"] else "FAIL"


def _shown(value: Any, how: str = ".6g") -> str:
    if value is None:  # JSON has no NaN and no infinity
        return "not finite"
    if isinstance(value, float):
        return format(value, how)
    return value if isinstance(value, str) else compact(value)
