"""The audit's tables: a column an implementation, a row a case, and under them what is not a pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tileloss.tools.implementations.contract import in_words
from tileloss.tools.printable import escaped, print_columns

if TYPE_CHECKING:
    from tileloss.tools.audit.cases import AuditCase

_WORDS = {
    "failed": "FAIL",
    "crashed": "CRASH",
    "timeout": "TIMEOUT",
    "refused": "-",
    "not_installed": "n/i",
}


def print_list(cases: Iterable[AuditCase], implementations: Mapping[str, str]) -> None:
    print_columns(["case", "shows"], [[case.name, case.shows] for case in cases])
    print()
    print_columns(["implementation", ""], [[name, text] for name, text in implementations.items()])
    print("module:function, FILE.py:function: a function of yours (docs/users/audit.md)")


def print_table(lines: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(line["implementation"] for line in lines))
    cells: dict[str, dict[str, str]] = {}
    for line in lines:
        cells.setdefault(line["case"], {})[line["implementation"]] = _WORDS.get(
            line["status"], line["status"]
        )
    rows = [[case, *(row.get(name, "") for name in names)] for case, row in cells.items()]
    print_columns(["case", *names], rows)
    print("\n- refused: the implementation does not offer it; n/i: not installed")
    found = [line for line in lines if line["status"] not in ("pass", "refused", "not_installed")]
    if found:
        print()
        print_columns(
            ["implementation", "case", "", ""],
            [[x["implementation"], x["case"], _WORDS[x["status"]], what_failed(x)] for x in found],
        )
    print()
    for name in names:
        own = [line for line in lines if line["implementation"] == name]
        package = own[-1]["package"] if own[-1]["package"] != name else "no version"
        print(f"{name}: {_counts(own)} ({package})")
    contracts = {name: _contract(lines, name) for name in names}
    if any(contracts.values()):
        print(
            "\nWhat the bits of results depend on besides the case, as implementations declare it:"
        )
        print_columns(["implementation", ""], [[n, in_words(x)] for n, x in contracts.items()])


def _contract(lines: Sequence[Mapping[str, Any]], name: str) -> Any:
    return next(
        (x["contract"] for x in lines if x["implementation"] == name and x["contract"]), None
    )


def print_releases(changed: Sequence[tuple[str, str]], not_run: str) -> None:
    """Under the table of several releases."""
    print()
    if changed:
        print_columns(["case", "came and went"], changed)
    else:
        print("no case fared differently in one of these releases")
    if not_run:
        print(f"NOT RUN: {not_run}")


def print_invariance(lines: Sequence[Mapping[str, Any]]) -> None:
    """A row for each implementation, level and dtype; a cell is "same" bits, or how far what moved moves at most. Then a row for
    each two that claim the same bits."""
    pairs = [line for line in lines if line["against"]]
    kinds = list(dict.fromkeys(x["varied"] for x in lines if x["varied"] and not x["against"]))
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for line in lines:
        if line["varied"] not in kinds:
            continue
        quantities = rows.setdefault((line["implementation"], line["level"], line["dtype"]), {})
        quantities.setdefault(line["varied"], []).append(how_it_moved(line))
    print_columns(
        ["implementation", "level", "dtype", *kinds],
        [
            [*key, *(", ".join(_merged(row.get(kind, []))) for kind in kinds)]
            for key, row in rows.items()
        ],
    )
    print(
        "\nsame: the same bits; logp: the largest |ratio - 1| of probabilities; gradients: the relative norm of the difference"
    )
    if pairs:
        print()
        print_columns(["claim the same bits", "level", "dtype", ""], _pair_rows(pairs))
    for line in lines:
        if line["status"] != "measured":
            print(
                escaped(
                    f"{line['implementation']} {line['level'] or ''} {line['varied'] or ''}: {line['message']}"
                )
            )


def _pair_rows(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """ "equal bits as claimed: logp, dlogits", or "claim broken: logp 1e-06"."""
    rows: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for line in lines:
        key = (f"{line['against']}, {line['implementation']}", line["level"], line["dtype"])
        words = "equal bits as claimed" if line["same_bits"] else "claim broken"
        moved = how_it_moved({**line, "claim": None}).removesuffix(" same")
        rows.setdefault(key, {}).setdefault(words, []).append(moved)
    return [
        [*key, "; ".join(f"{words}: {', '.join(moved)}" for words, moved in row.items())]
        for key, row in rows.items()
    ]


def how_it_moved(line: Mapping[str, Any]) -> str:
    """ "logp same", "logp 3e-3 (12 % beyond 1e-3)", "dhead 1e-7", or a status."""
    if line["status"] != "measured":
        return str(line["status"]).replace("_", " ").upper()
    if line["same_bits"]:
        return f"{line['quantity']} same"
    broken = " AGAINST ITS CONTRACT" if line.get("claim") == "broken" else ""
    if line["quantity"] != "logp":
        return f"{line['quantity']} {line['relative_difference']:.0e}{broken}"
    quantiles = line["ratio_quantiles"]
    worst = max(abs(quantiles["0.01"] - 1), abs(quantiles["1"] - 1))
    share = f" ({100 * line['outside_1e-3']:.3g} % beyond 1e-3)" if line["outside_1e-3"] else ""
    return f"logp {worst:.0e}{share}{broken}"


def _merged(cells: list[str]) -> list[str]:
    return ["same"] if cells and all(cell.endswith(" same") for cell in cells) else cells


def what_failed(line: Mapping[str, Any]) -> str:
    """ "dlogits/normwise 3.2 > 1, and 2 more", or the message; and the known bug that it looks like."""
    like = f"; looks like {line['looks_like']}" if line.get("looks_like") else ""
    return f"{_gate(line)}{like}"


def _gate(line: Mapping[str, Any]) -> str:
    if line["gate"] is None:
        return str(line["message"])
    if line["limit"] is None:
        return f"{line['gate']}: {line['message']}"
    value = "NaN" if line["value"] is None else f"{line['value']:.4g}"
    others = len(line["message"].split(", ")) if line["message"] else 0
    more = f", and {others} more" if others else ""
    return f"{line['gate']} {value} > {line['limit']:.4g}{more}"


def _counts(lines: Sequence[Mapping[str, Any]]) -> str:
    statuses = [line["status"] for line in lines]
    return ", ".join(f"{statuses.count(s)} {s.replace('_', ' ')}" for s in dict.fromkeys(statuses))
