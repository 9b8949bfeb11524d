"""The Python of the documents runs: the README's example, and every python block of docs/."""

import re
import sys
from pathlib import Path

import pytest

from forks import run

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "docs"))
import docs_test  # noqa: E402

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
# What the README's blocks under "<!-- after a model's setup -->" take for granted.
SETUP_MARK, SETUP = (
    "<!-- after a model's setup -->\n",
    """
import tempfile, torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
config = Qwen2Config(vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                     num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None)
model = Qwen2ForCausalLM(config)
ids = torch.randint(0, 100, (4, 12)).tolist()
dataset = Dataset.from_dict({"input_ids": ids, "labels": ids})
common = dict(output_dir=tempfile.mkdtemp(), max_steps=1, use_cpu=True, report_to="none")
arguments = TrainingArguments(**common)
sft_arguments = SFTConfig(bf16=False, **common)
""",
)
AFTER_IT = """
from tileloss.torch import call_counts

assert any(count > 0 for count in call_counts().values()), call_counts()
"""
# Blocks of the README that are files, run by a test of their own.
EXAMPLES = {
    name: (ROOT / "examples" / name).read_text() for name in ("train_pytorch.py", "train_jax.py")
}
TOP_P = (ROOT / "examples" / "train_top_p.py").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(
        SETUP + block[1] + AFTER_IT if text[: block.start()].endswith(SETUP_MARK) else block[1],
        id=f"{document.name}-{number}",
    )
    for document in DOCUMENTS
    for text in [document.read_text()]
    for number, block in enumerate(BLOCK.finditer(text))
    if block[1] not in (*EXAMPLES.values(), TOP_P)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block: str, tmp_path: Path) -> None:
    run(block, tmp_path)


def test_the_page_for_those_who_switch_has_every_option() -> None:
    from tileloss._core.functions import FUNCTIONS

    page = (ROOT / "docs" / "users" / "coming-from.md").read_text()
    options = {name for function in FUNCTIONS.values() for name in function.options}
    assert not {name for name in options if f"`{name}`" not in page}


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_readmes_examples_are_the_files_and_learn(example: str, tmp_path: Path) -> None:
    code = EXAMPLES[example]
    assert code in BLOCK.findall((ROOT / "README.md").read_text())
    printed = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)\n", run(code, tmp_path))
    assert printed is not None
    first, last = map(float, printed.groups())
    assert 6 < first < 7  # log 500 = 6.2
    assert last < 1


def test_the_ratios_of_top_p_are_near_one_with_allowed(tmp_path: Path) -> None:
    lines = (
        r"ratios outside \[0.9, 1.1\]: (\d+) % without allowed, (\d+) % with",
        r"even tokens (\d+) % -> (\d+) %",
    )
    printed = re.fullmatch("\n".join((*lines, "")), run(TOP_P, tmp_path))
    assert printed is not None
    without, among, first, last = map(int, printed.groups())
    assert without > 40 and among < 5
    assert last > first + 20


def test_flax_learns_the_same_with_optax_and_with_tileloss(tmp_path: Path) -> None:
    code = (ROOT / "examples" / "jax" / "train_flax.py").read_text()
    curve = r"loss ([\d.]+) -> ([\d.]+)\n"
    printed = re.fullmatch(
        f"optax: {curve}tileloss: {curve}largest difference (.*)\n", run(code, tmp_path)
    )
    assert printed is not None
    first, last, _, our_last, difference = map(float, printed.groups())
    assert 7 < first < 9  # log 3000 = 8.0
    assert last < 0.1 and our_last < 0.1
    assert difference < 1e-3


@pytest.mark.full
def test_quick_commands_run_as_written() -> None:
    assert docs_test.check_quick_commands(ROOT) == []
