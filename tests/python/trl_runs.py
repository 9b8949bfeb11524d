"""Short, repeatable runs of TRL's trainers on a tiny random Qwen2, with and without TileLoss.

Nothing is fetched: model and tokenizer are made here and stored in a temporary folder, from which
the trainers load their reference model.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer

from tileloss.integrations import trl as integration
from tileloss.torch import call_counts

VOCAB = 199
HIDDEN = 32
PAD, EOS = 0, 1


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: "w2" to "w198", besides <pad> and <eos>."""
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="w2"
    )


def make_model(folder: Path, seed: int = 20261121, **config: Any) -> Path:
    """Stores a random Qwen2 (hidden 32, 2 layers, vocabulary 199) and its tokenizer in `folder`.

    The head is scaled up so that the probabilities are far from uniform: near 1/V every loss looks
    alike.
    """
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCAB,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
            **({"hidden_size": HIDDEN, "tie_word_embeddings": False} | config),
        )
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(15)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def text(generator: torch.Generator, shortest: int, longest: int) -> str:
    """Between `shortest` and `longest` random words, each preceded by a space."""
    count = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
    return "".join(f" w{int(i)}" for i in torch.randint(2, VOCAB, (count,), generator=generator))


def prompts_and(*columns: str, rows: int = 24) -> Dataset:
    """Rows of a prompt of 2 to 6 words and, per column, a text of 3 to 9 ("label": a boolean)."""
    generator = torch.Generator().manual_seed(7)
    rows_made = []
    for row in range(rows):
        made: dict[str, Any] = {"prompt": text(generator, 2, 6)}
        for column in columns:
            made[column] = row % 2 == 0 if column == "label" else text(generator, 3, 9)
        rows_made.append(made)
    return Dataset.from_list(rows_made)


def counted(function: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """What it returns, and the calls of TileLoss that it made."""
    start = call_counts()
    result = function()
    new = {name: count - start.get(name, 0) for name, count in call_counts().items()}
    return result, {name: count for name, count in new.items() if count}


@dataclass
class Run:
    """What a run left: each step's gradients, each log's numbers, the weights, lm_head's calls."""

    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    head_calls: int = 0


class _Recorder(TrainerCallback):
    def __init__(self, run: Run) -> None:
        self.run = run

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        self.run.gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        self.run.logs.append({name: float(value) for name, value in logs.items()})


class FixedCompletions:
    """Stands before a trainer's class: completions come from a seeded generator, not the model.

    So two runs see the same ones whatever the last bits of their weights are, and nothing but a
    loss could call lm_head.
    """

    def _generate_single_turn(self, prompt_ids: list, *args: Any, **kwargs: Any) -> list[list[int]]:
        if not hasattr(self, "_random"):
            self._random = torch.Generator().manual_seed(11)
        lengths = torch.randint(2, 9, (len(prompt_ids),), generator=self._random).tolist()
        return [
            [*torch.randint(2, VOCAB, (n,), generator=self._random).tolist(), EOS] for n in lengths
        ]


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Any reward that differs within a group would do: this one likes length and even tokens."""
    return [len(ids) / 8 + sum(1 - i % 2 for i in ids) / len(ids) for ids in completion_ids]


class FixedGRPO(FixedCompletions, GRPOTrainer):
    """GRPOTrainer with given completions, without the sampler's log-probabilities."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
        return super()._generate_single_turn(*args, **kwargs), None


class FixedRLOO(FixedCompletions, RLOOTrainer):
    """RLOOTrainer with given completions."""


def move_away_from_reference(model: torch.nn.Module) -> None:
    """Changes each weight by some 1 %, the same way every time.

    A model that is still its own reference has rewards that are 0 but for rounding, and what
    compares them (accuracies, a sort) then differs from machine to machine.
    """
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(1 + 0.01 * noise.to(parameter.dtype))


def train(
    trainer_class: type, config_class: type, folder: Path, data: Dataset, **options: Any
) -> Run:
    """Trains the model stored in `folder` for 3 steps of 2 micro-batches, and records it.

    `options` are the configuration's, model_dtype, and teacher, the folder of a teacher in the same
    type. The optimizer is plain SGD, since Adam makes a full step of a gradient that is 0 but for
    rounding. DPO's and KTO's model begins away from its reference.
    """
    options = {
        "output_dir": str(folder / "out"),
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.02,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "disable_tqdm": True,
        "seed": 3,
    } | options
    run = Run()
    dtype = options.pop("model_dtype", torch.float32)
    more: dict[str, Any] = {}
    if "reward_funcs" in inspect.signature(trainer_class).parameters:
        more["reward_funcs"] = reward
    if teacher := options.pop("teacher", None):
        more["teacher_model"] = AutoModelForCausalLM.from_pretrained(teacher, dtype=dtype)
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
        args=config_class(**options),
        train_dataset=data,
        eval_dataset=data.select(range(4)) if options.get("eval_strategy") else None,
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
        callbacks=[_Recorder(run)],
        **more,
    )
    trainer.remove_callback(PrinterCallback)
    if issubclass(trainer_class, (DPOTrainer, KTOTrainer)):
        move_away_from_reference(trainer.model)

    def count(*_: Any) -> None:
        run.head_calls += 1

    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            model.get_output_embeddings().register_forward_hook(count)
    trainer.train()
    run.weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return run


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm())


def assert_same(own: Run, ours: Run, tolerance: float) -> None:
    """`ours` has the losses, metrics, gradients and weights of `own`, TRL's own run.

    A gradient may be off by `tolerance` times its norm plus a hundredth of that times the norm of
    all gradients of the step (some are 0 but for rounding); a logged number by `tolerance` times
    its size, or absolutely if that is below 1.
    """
    assert len(own.gradients) == len(ours.gradients) > 0
    for step, (theirs, mine) in enumerate(zip(own.gradients, ours.gradients, strict=True)):
        assert theirs.keys() == mine.keys()
        everything = sum(float(g.double().square().sum()) for g in theirs.values()) ** 0.5
        assert everything > 1e-3, f"step {step} has no gradient to compare"
        for name, gradient in theirs.items():
            allowed = tolerance * (float(gradient.norm()) + 0.01 * everything)
            off = distance(mine[name], gradient)
            assert off <= allowed, (
                f"gradient of {name} at step {step}: off by {off:.3g}, allowed {allowed:.3g}"
            )
    assert len(own.logs) == len(ours.logs)
    for step, (theirs, mine) in enumerate(zip(own.logs, ours.logs, strict=True)):
        assert theirs.keys() == mine.keys()
        for name, value in theirs.items():
            if "time" not in name and "per_second" not in name:
                off = abs(mine[name] - value)
                assert off <= tolerance * max(1.0, abs(value)), (
                    f"{name} at log {step}: {mine[name]}, expected {value}"
                )
    for name, weight in own.weights.items():
        assert distance(ours.weights[name], weight) <= tolerance * float(weight.norm()), name


# Three steps in float32. Seen: 5e-7 to 8e-6; a temperature that is off by 1e-3 gives 1e-3 and more.
TOLERANCE = 5e-5


def train_twice(
    trainer: type,
    config: type,
    folder: Path,
    data: Dataset,
    function: str,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> tuple[Run, Run, dict[str, int]]:
    """TRL's own run and the same one on TileLoss, and the calls that this one made.

    Each micro-batch took its gradient by `function`, and where that is a linear one, nobody called
    the LM head.
    """
    own, counts = counted(lambda: train(trainer, config, folder, data, **options))
    assert counts == {}
    with integration.patch():
        ours, counts = counted(lambda: train(trainer, config, folder, data, **options))
    gradients = sum(counts.get(f"{function}/{each}", 0) for each in ("value_and_grad", "backward"))
    assert gradients == 2 * options.get("max_steps", 3)
    if function.startswith("linear"):
        assert own.head_calls == ours.head_calls == 0
    assert_same(own, ours, tolerance)
    return own, ours, counts
