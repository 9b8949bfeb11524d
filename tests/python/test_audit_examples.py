"""The reproducers of docs/users/audit.md: each shows what the document says, with the version that is pinned."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

import forks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "audit"
DOCUMENT = ROOT / "docs" / "users" / "audit.md"
NUMBER = r"(-?[\d.]+)"
PACKAGES = {
    "liger": ("liger_kernel", "liger-kernel"),
    "tokamax": ("tokamax",) * 2,
    "torch": ("torch",) * 2,
    "trl": ("trl",) * 2,
}


Numbers = Callable[[str, str], list[float]]


@pytest.fixture
def numbers(tmp_path: Path) -> Numbers:
    def printed_numbers(name: str, pattern: str) -> list[float]:
        """Those that the example prints where the pattern has NUMBER."""
        module, package = PACKAGES[name.partition("_")[0]]
        if find_spec(module) is None:
            pytest.skip(f"NOT RUN: {package} could not be installed")
        printed = forks.run(EXAMPLES / f"{name}.py", tmp_path)
        assert printed.startswith(f"{package} {version(package).partition('+')[0]}")
        found = re.search(pattern.replace("NUMBER", NUMBER), printed, re.S)
        assert found is not None, printed
        return [float(each) for each in found.groups()]

    return printed_numbers


def test_every_example_is_in_the_document_and_short() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert len(names) == 8
    text = DOCUMENT.read_text()
    for name in names:
        assert f"examples/audit/{name}" in text
        assert len((EXAMPLES / name).read_text().splitlines()) < 40


def test_torch_rounds_losses_of_bfloat16_logits(numbers: Numbers) -> None:
    mean, exact, worst = numbers(
        "torch_bfloat16_loss", "torch.bfloat16, mean NUMBER, exact NUMBER\nworst row off by NUMBER"
    )
    assert 0.001 < abs(mean - exact) < 0.0625 and 0.03 < worst < 0.07 + 0.01


def test_trls_log_probabilities_are_off(numbers: Numbers) -> None:
    off, least, most = numbers(
        "trl_bfloat16_logprobs", "off by up to NUMBER\nratios between NUMBER and NUMBER,"
    )
    assert 0.06 < off < 0.08 and least < 0.95 and most > 1.05


def test_trls_head_gradient_is_not_reduced_under_fsdp2(numbers: Numbers) -> None:
    norm, head = numbers(
        "trl_fsdp2_head", "norm.weight off by NUMBER%.*lm_head.weight off by NUMBER%"
    )
    assert norm < 0.01 and head > 30


def test_liger_gives_the_head_no_gradient_when_the_input_is_frozen(numbers: Numbers) -> None:
    (norm,) = numbers("liger_frozen_input", "gradient of the head None\nexpected .* norm NUMBER")
    assert norm > 1


def test_ligers_second_backward_is_doubled(numbers: Numbers) -> None:
    assert numbers("liger_second_backward", "second gradient / first = NUMBER") == [2]


def test_masked_tokens_count_in_ligers_luspo_with_kl(numbers: Numbers) -> None:
    a, b, c, d = numbers(
        "liger_luspo_kl",
        "grpo: NUMBER, and .* NUMBER\n.*luspo: NUMBER, and with other masked tokens NUMBER",
    )
    assert a == b and c != d


def test_tokamaxs_kernels_where_blocks_do_not_divide_the_vocabulary(numbers: Numbers) -> None:
    right, exact, wrong, expected = numbers(
        "tokamax_vocab_blocks",
        "256 classes: loss NUMBER, exact NUMBER.*200 classes: loss NUMBER, exact NUMBER\nbackward: Out-of-bounds write",
    )
    assert right == pytest.approx(exact, rel=1e-5) and abs(wrong / expected - 1) > 0.01


def test_the_loss_of_ones_own_stands_in_the_document() -> None:
    code = (EXAMPLES / "my_loss.py").read_text()
    assert f"<!-- examples/audit/my_loss.py -->\n```python\n{code}```" in DOCUMENT.read_text()
