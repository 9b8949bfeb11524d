"""The vocabulary cut over 1, 2, 4 and 8 gloo processes: vocab_ranks.py runs them, each through every case."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import vocab_checks
from vocab_cases import CASES

COUNTS = (1, 2, 4, 8)
Results = dict[int, list[dict[str, Any]]]  # of each rank, by the number of ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All numbers of ranks, one after another: starting takes longer than the cases do."""
    program, folder = Path(__file__).with_name("vocab_ranks.py"), tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, str(program), str(folder), *map(str, COUNTS)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    return {
        count: [torch.load(folder / f"{count}-{rank}.pt") for rank in range(count)]
        for count in COUNTS
    }


@pytest.mark.parametrize("case", [*CASES, *vocab_checks.CHECKS])
def test_every_rank_agrees_with_one_process(results: Results, case: str) -> None:
    for count, ranks in results.items():
        for rank, of_rank in enumerate(ranks):
            failure = of_rank[case][0]
            assert failure is None, f"rank {rank} of {count}: {failure}"


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_on_every_rank_and_for_any_number_of_them(
    results: Results, case: str
) -> None:
    """What it gives, where shards end on slices; the gradient of the hidden states on every rank of a group."""
    of_one = results[1][0][case][1]
    for count, ranks in results.items():
        _, of_first, gradients = ranks[0][case]
        for _, found, of_rank in (of_rank[case] for of_rank in ranks):
            assert_same_bits(found, of_first)
            assert_same_bits(of_rank, gradients)
        if not CASES[case].uneven:
            assert_same_bits(of_first, of_one)
        assert of_first, count


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(
            value.view(-1).view(torch.uint8), expected[name].view(-1).view(torch.uint8)
        ), name
