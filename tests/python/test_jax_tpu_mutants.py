"""Known bugs, planted in the TPU kernels: what checks them must catch each one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tileloss.jax._sweeps.tpu import calls, logits, tiles
from tpu_checks import (
    assert_forward_agrees,
    assert_logits_agree,
    logits_problem,
    strict,
    tied_problem,
    use_small_blocks,
)


@pytest.fixture(autouse=True)
def strict_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_small_blocks(monkeypatch)
    with strict():
        yield


def test_without_a_bug_nothing_is_caught() -> None:
    assert_logits_agree(logits_problem())
    assert_forward_agrees(tied_problem())


def test_a_tail_that_is_not_masked_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles.Tiles, "visit", lambda self, j, step: step(None))
    with pytest.raises(AssertionError, match="sum|max"):
        assert_forward_agrees(logits_problem())


def test_a_block_past_the_array_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class Beside(calls.Blocked):
        @property
        def specs(self) -> object:
            at = self.at
            moved = self._replace(at=lambda i, j: (at(i, j)[0] + 1, at(i, j)[1]))
            return calls.Blocked(*(moved if at else self)).specs

    monkeypatch.setattr(logits, "Blocked", Beside)
    with pytest.raises(Exception, match="[Oo]ut-of-bounds"):
        assert_forward_agrees(logits_problem())


def test_a_state_that_is_not_cleared_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "clear", lambda state, columns: None)
    with pytest.raises(AssertionError, match="max"):
        assert_forward_agrees(logits_problem())


def test_a_label_in_the_wrong_tile_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    width = 128
    monkeypatch.setattr(logits, "Columns", lambda start, left: tiles.Columns(start + width, left))
    with pytest.raises(AssertionError, match="sum"):
        assert_forward_agrees(logits_problem())


def test_the_last_of_equal_columns_as_argmax_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_is_above", lambda x, largest: x >= largest)
    with pytest.raises(AssertionError, match="argmax"):
        assert_forward_agrees(tied_problem())


def test_cores_that_share_a_row_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "PARALLEL", "arbitrary")
    monkeypatch.setattr(logits, "IN_ORDER", "parallel")
    with pytest.raises(Exception, match="[Rr]ace"):
        assert_forward_agrees(logits_problem())
