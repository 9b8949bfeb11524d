"""The child of an audit: one implementation, which takes case after case.

Requests and replies are JSON, over a pipe that it inherits.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tileloss.testing._judge import end_with_parent
from tileloss.tools.implementations import hide_gpus


def main(name: str, descriptor: int, cpus: int, device: str) -> None:
    """``descriptor``: of the pipe. ``cpus``: the number of CPUs to run on, 0: all. ``device``: of PyTorch's tensors."""
    os.set_inheritable(descriptor, False)
    pipe = Connection(descriptor)
    if device == "cpu":
        hide_gpus()
    if cpus:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cpus])
    end_with_parent()  # a case that hangs, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def reply(**answer: Any) -> None:
        pipe.send_bytes(json.dumps(answer).encode())

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
    with suppress(EOFError):
        while True:
            reply(**_answer(implementation, json.loads(pipe.recv_bytes()), device))


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
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
