"""The generator of src/schema: what is checked in is what it writes, and a wrong table is refused by the entry's name."""

from __future__ import annotations

from pathlib import Path

import pytest

import generate
import write_c
from option_table import TABLE, TableError, read

TEXT = TABLE.read_text()
Z_LOSS = (
    'z_loss = { type = "double", default = 0, range = ">= 0", doc = "zeta: adds zeta * lse^2" }'
)
OPTIONS = "function.cross_entropy.options"
VALUES = "    **options: Unpack[{}Arguments[Tensor]],\n    Values of {}:\n"


def test_generating_again_changes_nothing() -> None:
    for path, text in generate.outputs(read(TEXT), generate.ROOT).items():
        assert path.read_text() == text, f"{path}: run ./dev generate"


def test_what_is_stale_is_named_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, text in generate.outputs(read(TEXT), generate.ROOT).items():
        copy = tmp_path / path.relative_to(generate.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    assert generate.main(["--check"], tmp_path) == 0
    header = tmp_path / "include" / "tileloss" / "tileloss.h"
    right = header.read_text()
    header.write_text(right.replace("double z_loss", "float z_loss"))
    assert generate.main(["--check"], tmp_path) == 1
    printed = capsys.readouterr().out
    assert "include/tileloss/tileloss.h: stale" in printed and "-  float z_loss" in printed
    assert generate.main([], tmp_path) == 0
    assert header.read_text() == right


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("z_loss = {", "z_loss = ", r"table\.toml: .*line \d+"),
        ('z_loss = { type = "double"', 'z_loss = { type = "real"', rf"{OPTIONS}\.z_loss: type: .*got 'real'"),
        ('z_loss = { type', 'z_loss = { typ', rf"{OPTIONS}\.z_loss: type is missing"),
        (Z_LOSS, Z_LOSS.replace("doc", "docs"), rf"{OPTIONS}\.z_loss: expected keys among .*, got docs"),
        (Z_LOSS, Z_LOSS.replace("zeta: adds zeta * lse^2", ""), rf"{OPTIONS}\.z_loss: doc: .*got none"),
        (Z_LOSS, Z_LOSS.replace(">= 0", "0.."), rf"{OPTIONS}\.z_loss: range: .*got '0\.\.'"),
        (Z_LOSS, Z_LOSS.replace("default = 0", 'default = "0"'), rf"{OPTIONS}\.z_loss: default: .*got '0'"),
        (Z_LOSS, Z_LOSS.replace("default = 0, ", ""), rf"{OPTIONS}\.z_loss: default: .*got None"),
        (Z_LOSS, Z_LOSS.replace("doc", 'absent = "off", doc'), rf"{OPTIONS}\.z_loss: absent: .*got 'off'"),
        (Z_LOSS, Z_LOSS.replace("doc", 'needs = ["z"], doc'), rf"{OPTIONS}\.z_loss: needs: .*got z"),
        ('only_with = ["reduction", "mean"]', 'only_with = ["shrink", "mean"]', r"only_with: expected reduction, got 'shrink'"),
        ('only_with = ["reduction", "mean"]', 'only_with = ["reduction", "mode"]', r"only_with: .*got mode"),
        ('"reduction", default = "mean"', '"reduction", default = "median"', r"default: .*got 'median'"),
        ('accumulate = { type = "flag", default = false', 'accumulate = { type = "flag", default = 0', r"accumulate: default"),
        ('gspo = { kind = "clip"', 'gspo = { kind = "clop"', r"presets\.gspo\.kind: expected clip, .*got 'clop'"),
        ('label_smoothing = { type', 'lse = { like = "logprobs" }\nlabel_smoothing = { type', rf"{OPTIONS}\.lse: like"),
        ('"labels_per_row", "logp_grad"', '"labels_per_row", "gradient"', r"function\.logprobs\.tensors: .*got gradient"),
        ('lse_grad = { shape', 'lse_grad = { shap', r"arguments\.lse_grad: shape is missing"),
        ('lse_grad = { shape = "N"', 'lse_grad = { shape = "n"', r"arguments\.lse_grad: shape: .*got 'n'"),
        ('labels = { shape = "N", dtypes = "integers"', 'labels = { shape = "N", dtypes = "int"', r"labels: dtypes: .*got 'int'"),
        ('role = "gradient"', 'role = "grad"', r"arguments\.dlogits: role: .*got 'grad'"),
        ('needs = ["entropy_sum"], doc = "nats"', 'needs = ["H"], doc = "nats"', r"arguments\.entropy: needs: .*got H"),
        ('rows = ["divergence",', 'rows = ["loss",', r"function\.distillation\.rows: .*got loss"),
        ('tensor_order = [', 'tensor_order = ["row_state",', r"tensor_order: expected the names of all tensors"),
        ('prefix = "TAIL_"', "", r"enum\.tail: prefix is missing"),
        ('["lump", ', '["lump", 1, ', r"enum\.tail: expected \[name"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_named(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(TableError, match=message):
        read(TEXT.replace(old, new, 1))


def test_a_region_that_nothing_fills_or_no_file_has_is_named(tmp_path: Path) -> None:
    table = read(TEXT)
    with pytest.raises(TableError, match="no file has the region 'options'"):
        generate.outputs(table, tmp_path)
    with pytest.raises(TableError, match="file: no region 'nothing', there are options"):
        generate.with_regions("file", "// generated: nothing\n// end of generated\n", table)
    with pytest.raises(TableError, match='file: a region without "end of generated"'):
        generate.with_regions("file", "// generated: options\n", table)
    for name, message in [
        ("enums tail, nothing", "no enum nothing, there are temperature_on, "),
        ("row_inputs of nothing", "no function nothing, there are logprobs, "),
        ("options of logprobs but z_loss", "logprobs has no option z_loss"),
    ]:
        with pytest.raises(TableError, match=f"file: {message}"):
            generate.with_regions("file", f"# generated: {name}\n# end of generated\n", table)
    for name in ("tail", "softcap"):
        with pytest.raises(TableError, match=f"f.py: logprobs has no option {name} with values"):
            generate.with_regions("f.py", VALUES.format("Logprobs", name), table)


def test_python_gets_the_types_of_arguments_and_what_is_said_of_them() -> None:
    text = '''
class Arguments:
    # generated: row_inputs of soft_cross_entropy
    # end of generated
    # generated: options of soft_cross_entropy but temperature, valid_vocab
    # end of generated

def f(
    **options: Unpack[SoftCrossEntropyArguments[Tensor]],
):
    """F.

    Tensors of f:

    Options of f:

    More.
    """
'''
    made = generate.with_regions("f.py", text, read(TEXT))
    fields, said = made.split("\ndef f(")
    assert "    ignore_index: int\n    label_smoothing: float\n" in fields
    assert "    num_items: float | Array | None\n" in fields
    assert "temperature:" not in fields and "valid_vocab:" not in fields
    rows = "    mask: Array | None\n    token_weights: Array | None\n    allowed: Array | None\n"
    assert f"generated: row_inputs of soft_cross_entropy\n{rows}    # end" in fields
    assert (
        "    Options of f:\n        logit_scale: multiplies the logits; > 0; default 1.\n" in said
    )
    assert (
        "        num_items: mean's denominator; >= 0; None: the weights are summed; only with"
        in said
    )
    assert "        mask: [...] or flat [N], any numbers; rows with 0 are neither read" in said
    assert "labels:" not in made and "target_probs:" not in made
    assert generate.with_regions("f.py", made, read(TEXT)) == made
    assert "default 1; static.\n" in generate.with_regions("tileloss/jax/f.py", text, read(TEXT))
    made = generate.with_regions("f.py", VALUES.format("SparseDistillation", "tail"), read(TEXT))
    assert "    Values of tail:\n        lump: as one more class: " in made
    text = VALUES.format("SparseDistillation", "tail").replace("Values of tail", "Options")
    made = generate.with_regions("f.py", text, read(TEXT))
    assert "        temperature: T" in made and "temperature_on" not in made


def test_with_presets_an_option_may_be_left_to_them() -> None:
    region = "# generated: {} of policy_loss\n# end of generated\n"
    text = region.format("options") + region.format("row_inputs")
    made = generate.with_regions("f.py", text, read(TEXT))
    own, of_rows = made.split("# generated: row_inputs")
    assert "preset" not in own and "mask" not in own and "temperature: float | Array | None" in own
    assert "allowed: Array | None\npreset: str | None\n" in of_rows


def test_comments_stand_as_clang_format_has_them() -> None:
    widest = "x" * (write_c.WIDTH - len("  int a;  // "))
    rows = [("  int a;", "one"), ("  int bcd;", "two"), ("  int e;", ""), ("  int f;", widest)]
    assert write_c.aligned([*rows, ("  int g;", f"{widest} more")]) == (
        "  int a;    // one\n  int bcd;  // two\n  int e;\n"
        f"  int f;  // {widest}\n  // {widest} more\n  int g;\n"
    )
