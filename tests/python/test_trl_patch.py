"""tileloss.integrations.trl: putting the patch on, taking it off, and whom it refuses."""

import os
import subprocess
import sys

import pytest
import torch
import trl
from trl.experimental.gkd import GKDTrainer
from trl.experimental.gold import GOLDTrainer
from trl.experimental.iw_opd import IWOPDTrainer
from trl.experimental.sdft import sdft_trainer
from trl.experimental.sdpo import sdpo_trainer
from trl.trainer import distillation_trainer, utils

from tileloss.integrations import trl as integration

LOGPROBS = (utils, "_ChunkedLogProbFunction")
GOLD = (GOLDTrainer, "generalized_jsd_loss")
TWO_HEADS = (distillation_trainer, "_chunked_divergence_loss")
PATCHED = [
    LOGPROBS,
    (utils, "_use_triton"),
    (utils, "DTensor"),
    GOLD,
    *((trainer, GOLD[1]) for trainer in (GKDTrainer, IWOPDTrainer)),
    *((m, "compute_full_logit_self_distillation_loss") for m in (sdft_trainer, sdpo_trainer)),
    TWO_HEADS,
]
OWN = {(owner, name): vars(owner)[name] for owner, name in PATCHED}


class OtherFunction(utils._ChunkedLogProbFunction):
    @staticmethod
    def forward(ctx, hidden, weight, targets):
        raise AssertionError


def other(hidden_states):
    raise AssertionError


def patched():
    return {place for place, own in OWN.items() if vars(place[0])[place[1]] is not own}


@pytest.fixture(autouse=True)
def leaves_trl_as_it_was():
    yield
    integration.unpatch()
    assert not patched()


def test_patch_replaces_the_functions_and_unpatch_gives_them_back():
    assert not integration.is_patched()
    integration.patch()
    assert integration.is_patched()
    assert patched() == set(PATCHED)
    assert utils._ChunkedLogProbFunction is integration.LogProbFunction
    assert utils._use_triton(torch.device("cpu"))
    on_meta = OWN[utils, "_use_triton"](torch.device("meta"))
    assert utils._use_triton(torch.device("meta")) == on_meta
    integration.unpatch()
    assert not integration.is_patched() and not patched()


def test_a_with_block_ends_the_patch_after_an_error_too():
    with pytest.raises(KeyError):
        with integration.patch():
            assert integration.is_patched()
            raise KeyError
    assert not integration.is_patched()


def test_patching_twice_is_harmless_and_the_inner_one_does_not_undo_the_outer():
    with integration.patch():
        with integration.patch() as inner:
            pass
        inner.undo()
        assert integration.is_patched()
    assert not integration.is_patched()


def test_undoing_twice_does_not_undo_somebody_elses_patch():
    first = integration.patch()
    first.undo()
    integration.patch()
    first.undo()
    assert integration.is_patched()


@pytest.mark.parametrize("version", ["1.15.2", "1.17.0", "1.16.0.dev0", "2.16.0", "unknown"])
def test_other_versions_are_refused_by_name(monkeypatch, version):
    monkeypatch.setattr(trl, "__version__", version)
    with pytest.raises(RuntimeError, match=f"expected trl 1.16.x, got trl {version}"):
        integration.patch()
    assert not integration.is_patched()


def test_the_next_patch_release_is_taken(monkeypatch):
    monkeypatch.setattr(trl, "__version__", "1.16.3")
    with integration.patch():
        assert integration.is_patched()


@pytest.mark.parametrize(
    ("place", "function", "message"),
    [
        (LOGPROBS, OtherFunction, r" 1.16's own .* got .*Other.* with \(hidden, weight, targets\)"),
        (GOLD, staticmethod(other), rf" own trl.*gold_trainer.GOLDTrainer.{GOLD[1]} with .*other"),
        (TWO_HEADS, other, rf" own trl.trainer.distillation_trainer.{TWO_HEADS[1]} with .* got "),
    ],
)
def test_a_function_with_other_parameters_is_refused(monkeypatch, place, function, message):
    monkeypatch.setattr(*place, function)
    with pytest.raises(RuntimeError, match=f"expected trl.*{message}"):
        integration.patch()
    assert not integration.is_patched() and patched() == {place}
    monkeypatch.undo()


@pytest.mark.parametrize("place", [LOGPROBS, GOLD])
def test_a_later_replacement_is_not_overwritten_and_may_be_undone(monkeypatch, place):
    patch = integration.patch()
    monkeypatch.setattr(*place, OWN[place])
    left = rf"{place[1]} as patch\(\) left it, got .*undo the later replacement first"
    for undo in (integration.unpatch, patch.undo):
        with pytest.raises(RuntimeError, match=left):
            undo()
    assert integration.is_patched()
    monkeypatch.undo()
    patch.undo()
    assert not integration.is_patched()


def test_without_trl_the_module_imports_and_patch_names_the_package():
    code = (
        "import sys; sys.modules['trl'] = sys.modules['transformers'] = None\n"
        "from tileloss.integrations import trl\n"
        "try:\n    trl.patch()\nexcept ImportError as error:\n    print(error)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert "the package trl is not installed; expected trl 1.16.x" in result.stdout
