"""tileloss.integrations.trl: putting the patch on, taking it off, and whom it refuses."""

import os
import subprocess
import sys

import pytest
import torch
import trl
from trl.trainer import utils

from tileloss.integrations import trl as integration

OWN_FUNCTION = utils._ChunkedLogProbFunction
OWN_USE_TRITON = utils._use_triton
OWN_DTENSOR = utils.DTensor


@pytest.fixture(autouse=True)
def leaves_trl_as_it_was():
    yield
    integration.unpatch()
    assert utils._ChunkedLogProbFunction is OWN_FUNCTION
    assert utils._use_triton is OWN_USE_TRITON
    assert utils.DTensor is OWN_DTENSOR


def test_patch_replaces_the_function_and_unpatch_gives_it_back():
    assert not integration.is_patched()
    integration.patch()
    assert integration.is_patched()
    assert utils._ChunkedLogProbFunction is integration.LogProbFunction
    assert utils._use_triton(torch.device("cpu"))
    assert utils._use_triton(torch.device("meta")) == OWN_USE_TRITON(torch.device("meta"))
    integration.unpatch()
    assert not integration.is_patched()
    assert utils._ChunkedLogProbFunction is OWN_FUNCTION
    assert utils._use_triton is OWN_USE_TRITON
    assert utils.DTensor is OWN_DTENSOR


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


def test_a_function_with_other_parameters_is_refused(monkeypatch):
    class Other(OWN_FUNCTION):
        @staticmethod
        def forward(ctx, hidden, weight, targets):
            raise AssertionError

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Other)
    with pytest.raises(
        RuntimeError,
        match=r"expected trl 1.16's own .* got .*Other.* with \(hidden, weight, targets\)",
    ):
        integration.patch()
    monkeypatch.undo()


def test_unpatch_does_not_overwrite_a_later_replacement(monkeypatch):
    integration.patch()
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", OWN_FUNCTION)
    with pytest.raises(
        RuntimeError,
        match=r"expected trl.trainer.utils._ChunkedLogProbFunction as patch\(\) left it, got",
    ):
        integration.unpatch()
    assert integration.is_patched()
    monkeypatch.undo()


def test_an_undo_that_was_refused_may_be_repeated(monkeypatch):
    patch = integration.patch()
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", OWN_FUNCTION)
    with pytest.raises(RuntimeError, match="undo the later replacement first"):
        patch.undo()
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
