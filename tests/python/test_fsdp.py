"""FSDP2 on two processes: patched transformers models, TRL's fused head, linear_cross_entropy of DTensors."""

from __future__ import annotations

from two_ranks import on_two_ranks


def test_two_processes_do_what_one_does() -> None:
    """Losses and gradients to 1e-6 (one run of all cases: starting takes longer than they do)."""
    for cases in on_two_ranks("fsdp_losses.py"):
        rounded = {
            case: cases.pop(case) for case in list(cases) if case.startswith("mixed precision")
        }
        wrong = {case: found for case, found in cases.items() if max(found.values()) > 1e-6}
        assert wrong == {}
        assert len(cases) == 49
        assert len(rounded) == 12
        # Against float32. bfloat16 rounds to 2^-9; the unpatched model rounds its logits too.
        for case, own in rounded.items():
            ours = rounded[case.replace(", unpatched", "")]
            assert ours["gradient"] <= 1.25 * own["gradient"] + 2.0**-8, case
            assert ours["loss"] <= own["loss"] + 2.0**-8, case
