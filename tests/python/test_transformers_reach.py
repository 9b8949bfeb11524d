"""How many of transformers' classes `patch` takes, and that docs/users/huggingface.md lists the others by the right reason."""

from __future__ import annotations

import contextlib
import functools
import re
from pathlib import Path

import pytest
import transformers
from transformers.models.auto import modeling_auto

from tileloss.integrations._forward_plan import UnknownForward, read_forward
from tileloss.integrations._inner_forward import read_inner
from tileloss.integrations.transformers import patch
from transformers_models import OF_THE_DOCUMENT, VOCAB

DOCUMENT = Path(__file__).parents[2] / "docs/users/huggingface.md"
MAPPINGS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
AT_LEAST = {"causal": 150, "image-text": 75}
REFUSED_HEADS = ["IdeficsForVisionText2Text"]  # refused for the head that a model of it has


def classes_of(mapping: str) -> list[str]:
    values = MAPPINGS[mapping].values()
    return sorted({name for v in values for name in ([v] if isinstance(v, str) else v)})


def read(model_class: type) -> None:
    """As `patch` does. Raises UnknownForward."""
    try:
        read_forward(model_class)
    except UnknownForward as error:
        with contextlib.suppress(UnknownForward):
            read_inner(model_class)
            return
        raise error


@functools.cache
def refusals(mapping: str) -> dict[str, str]:
    """The message by class."""
    found = dict.fromkeys(set(REFUSED_HEADS) & set(classes_of(mapping)), "its head")
    for name in classes_of(mapping):
        try:
            read(getattr(transformers, name))
        except UnknownForward as error:
            found[name] = str(error)
    return found


def documented() -> dict[str, list[str]]:
    """Classes by what the message quotes, of the table in the document."""
    section = DOCUMENT.read_text().split("### Classes that are refused")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!reason|-)[^|]*\| ([^|]*)\| ([^|]*) \|$", section, re.M)
    return {quoted.strip().strip("`"): re.findall(r"`(\w+)`", classes) for quoted, classes in rows}


@OF_THE_DOCUMENT
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_as_many_classes_are_taken_as_the_document_says(mapping: str) -> None:
    every = len(classes_of(mapping))
    taken = every - len(refusals(mapping))
    assert taken >= AT_LEAST[mapping]
    text = " ".join(DOCUMENT.read_text().split())
    assert f"{taken} of the {every} {mapping} classes" in text


@OF_THE_DOCUMENT
def test_the_document_lists_every_refused_class_with_its_reason() -> None:
    messages = refusals("causal") | refusals("image-text")
    listed = [name for names in documented().values() for name in names]
    assert sorted(listed) == sorted(messages)
    for quoted, names in documented().items():
        for name in names:
            assert quoted in messages[name], name


def test_a_head_of_two_parts_is_refused() -> None:
    config = transformers.IdeficsConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        vision_config={
            "embed_dim": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
        },
        use_resampler=False,
    )
    with pytest.raises(
        ValueError, match=r"plain torch\.nn\.Linear .* got .*IdeficsDecoupledLinear"
    ):
        patch(transformers.IdeficsForVisionText2Text(config))
