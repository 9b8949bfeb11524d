"""The child of an audit: one implementation, which takes case after case.

Requests and replies are a line of JSON each, on standard input and output; what the implementation prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tileloss.testing._judge import end_with_parent
from tileloss.tools.implementations import hide_gpus


def main(name: str, cpus: int = 0, device: str = "cpu") -> None:
    """``cpus``: the number of CPUs to run on, 0: all. ``device``: of PyTorch's tensors."""
    if device == "cpu":
        hide_gpus()
    if cpus:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])
    end_with_parent()  # a case that hangs, too
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def reply(**answer: Any) -> None:
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    from tileloss.testing.outputs import describe
    from tileloss.tools.implementations import NotInstalled, load

    try:
        implementation = load(name, device)
    except NotInstalled as error:
        return reply(status="not_installed", message=str(error))
    except ValueError as error:
        return reply(status="usage", message=str(error))
    except Exception as error:
        return reply(status="crashed", message=describe(error))
    reply(status="ready", package=implementation.package, contract=implementation.contract)
    for line in sys.stdin:
        reply(**_answer(implementation, json.loads(line), device))


def _answer(implementation: Any, request: dict[str, Any], device: str) -> dict[str, Any]:
    from tileloss.testing.case import Refused
    from tileloss.testing.outputs import Missing, describe, prepare
    from tileloss.tools.audit.calls import Misbehaved, call
    from tileloss.tools.case_file import read_case, write_tensors

    case = read_case(Path(request["inputs"]))
    case = replace(
        case,
        backwards=request.get("backwards", 1),
        knobs=request.get("knobs", {}),
        device=device,
    )
    case = case.with_numbers() if implementation.reads_ignored else case
    try:
        outputs = prepare(case, call(implementation.compute, case, request.get("calls", "")))
    except Refused as error:
        return {"status": "refused", "message": str(error)}
    except Missing as error:
        return {"status": "failed", "gate": f"{error.output}/missing", "message": str(error)}
    except Misbehaved as error:
        return {"status": "failed", "gate": error.gate, "message": str(error)}
    except Exception as error:
        return {"status": "crashed", "message": describe(error)}
    judged = request.get("judged") or outputs
    write_tensors(
        Path(request["outputs"]), {name: x for name, x in outputs.items() if name in judged}
    )
    return {"status": "done"}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
