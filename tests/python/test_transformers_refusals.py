"""What tileloss.integrations.transformers refuses, what it reads from a forward, and how a patch ends."""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
import re
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.utils.generic import find_labels

from tileloss.integrations import transformers as integration
from tileloss.integrations._forward_plan import UnknownForward, read_forward
from tileloss.integrations._inner_forward import read_inner
from tileloss.integrations.transformers import make_compute_loss_func, patch, unpatch
from transformers_models import OF_THE_DOCUMENT, batch, build


def test_unpatch_gives_the_own_forward_back_and_may_come_twice() -> None:
    model = patch(build("llama"))
    assert type(model) is not LlamaForCausalLM
    assert unpatch(unpatch(model)) is model
    assert type(model) is LlamaForCausalLM and "_tileloss_patch" not in model.__dict__
    assert model(**batch()).logits is not None
    assert patch(model)(**batch()).logits is None


def test_patching_twice_changes_nothing() -> None:
    model = patch(build("llama"))
    forward = model.forward
    assert patch(model) is model
    assert model.forward == forward
    assert unpatch(model)(**batch()).logits is not None


def test_one_instance_is_patched_and_not_its_class() -> None:
    patched, other = patch(build("llama")), build("llama")
    assert patched(**batch()).logits is None
    assert other(**batch()).logits is not None


def test_unpatch_reaches_through_a_wrapper_put_on_later() -> None:
    """As accelerate wraps a model's forward for mixed precision, and leaves it there."""
    model = patch(build("llama"))
    ours = model.forward
    model.forward = types.MethodType(functools.wraps(ours)(lambda self, **k: ours(**k)), model)
    assert model(**batch()).logits is None
    wrapper = unpatch(model).forward
    assert model.forward == wrapper
    assert model(**batch()).logits is not None


def test_the_signature_is_that_of_the_model_and_what_the_loss_takes_besides() -> None:
    """Trainer keeps a data set's columns by it, and takes what has "label" in its name for labels."""
    model = build("gpt2")
    own = inspect.signature(model.forward).parameters
    parameters = inspect.signature(patch(model).forward).parameters
    assert list(parameters)[: len(own) - 1] == list(own)[:-1] and list(parameters)[-1] == "kwargs"
    assert parameters.keys() - own.keys() == {
        "token_weights",
        "skip_logits",
        "return_token_accuracy",
    }
    assert find_labels(type(model)) == ["labels"]


def lce_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What use_liger_kernel=True puts on a model, in a module of Liger's."""


lce_forward = types.FunctionType(
    lce_forward.__code__, {"__name__": "liger_kernel.transformers.model.llama"}
)


def test_of_liger_and_tileloss_the_one_that_loses_says_so() -> None:
    model = build("llama")
    model.forward = types.MethodType(lce_forward, model)
    with pytest.raises(ValueError, match=r"its forward is Liger's.*use_liger_kernel=True.*use one"):
        patch(model)
    del model.forward
    patch(model)
    with pytest.warns(UserWarning, match=r"replaced by one of liger_kernel.*use_liger_kernel=True"):
        model.forward = types.MethodType(lce_forward, model)


def set_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """transformers puts another module object into sys.modules while it loads lazily."""
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)


@pytest.mark.parametrize("version", ["4.57.6", "6.0.0", "6.1.0.dev0"])
def test_an_unknown_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    set_version(monkeypatch, version)
    with pytest.raises(RuntimeError, match=f"from 5.0 to below 6.0.*got {version}"):
        patch(model)
    assert "forward" not in model.__dict__


@pytest.mark.parametrize("version", ["5.0.0", "5.23.0", "5.99.1"])
def test_a_known_version_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    set_version(monkeypatch, version)
    assert patch(model)(**batch()).logits is None


def test_without_transformers_the_module_imports_and_patch_names_the_package() -> None:
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "from tileloss.integrations.transformers import patch\n"
        "try: patch(object())\n"
        "except ImportError as error: print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "needs the package transformers" in run.stdout


def test_other_modules_are_refused() -> None:
    with pytest.raises(TypeError, match="PreTrainedModel, got Linear"):
        patch(torch.nn.Linear(2, 2))
    with pytest.raises(UnknownForward, match="LlamaModel.forward"):
        patch(build("llama").model)


def test_a_forward_replaced_after_the_patch_is_not_taken_for_patched() -> None:
    model = patch(build("llama"))
    with pytest.warns(UserWarning, match="replaced by one of transformers"):
        model.forward = types.MethodType(LlamaForCausalLM.forward, model)
    assert model(**batch()).logits is not None
    with pytest.raises(ValueError, match="replaced on this instance"):
        patch(model)
    del model.forward
    assert patch(model)(**batch()).logits is None


def test_a_class_whose_forward_is_wrapped_is_refused() -> None:
    own = LlamaForCausalLM.forward

    @functools.wraps(own)
    def doubled(*args: Any, **kwargs: Any) -> Any:
        outputs = own(*args, **kwargs)
        return CausalLMOutputWithPast(loss=outputs.loss * 2, logits=outputs.logits)

    model = build("llama")
    model.__class__ = type("OwnForCausalLM", (LlamaForCausalLM,), {"forward": doubled})
    with pytest.raises(
        UnknownForward,
        match="OwnForCausalLM.forward is wrapped by a function of test_transformers_refusals",
    ):
        patch(model)


def test_unpatch_of_a_wrapper_is_refused() -> None:
    wrapper = torch.compile(patch(build("llama")), backend="eager")
    with pytest.raises(TypeError, match="PreTrainedModel, got OptimizedModule; of a wrapper"):
        unpatch(wrapper)


class Quantized(torch.nn.Linear):
    """It may do more than multiply."""


def half(*call: Any) -> Any:
    return call[-1] * 0.5


def half_forward(head: torch.nn.Linear) -> None:
    head.forward = lambda hidden: torch.nn.Linear.forward(head, hidden) * 0.5


# What is built, what is done to it, and what `patch` says.
MORE_THAN_LINEAR = r"LlamaForCausalLM\.lm_head: .* without hooks.* with "
NOT_POSITIVE = ": expected a scale of the logits above 0, got"
REFUSED: dict[str, tuple[str, dict[str, float], Any, str]] = {
    "forward": ("llama", {}, lambda m: setattr(m, "forward", m.forward), "replaced on this instance"),
    "head's forward": ("llama", {}, lambda m: half_forward(m.lm_head), f"{MORE_THAN_LINEAR}a forward of its own"),
    "hook": ("llama", {}, lambda m: m.lm_head.register_forward_hook(half), f"{MORE_THAN_LINEAR}hooks"),
    "hook before": ("llama", {}, lambda m: m.lm_head.register_forward_pre_hook(print), f"{MORE_THAN_LINEAR}hooks"),
    "float64": ("llama", {}, lambda m: m.double(), r"lm_head: expected a weight in float32.*got torch\.float64"),
    "kind of head": (
        "llama", {}, lambda m: setattr(m, "lm_head", Quantized(32, 96)),
        r"lm_head: expected a plain torch\.nn\.Linear.*Quantized",
    ),
    "loss": (
        "llama", {}, lambda m: setattr(m, "loss_function", lambda logits, *_, **__: logits.sum()),
        "loss_function: expected transformers' ForCausalLMLoss",
    ),
    "scale 0": ("cohere", {"logit_scale": 0.0}, id, f"logit_scale{NOT_POSITIVE}"),
    "scale below 0": ("cohere", {"logit_scale": -0.5}, id, f"logit_scale{NOT_POSITIVE}"),
    "divisor 0": ("granite", {"logits_scaling": 0.0}, id, f"config.logits_scaling{NOT_POSITIVE}"),
    "learnt scale": (
        "cohere", {}, lambda m: setattr(m, "logit_scale", torch.nn.Parameter(torch.tensor(0.3))),
        "logit_scale: expected a number.*Parameter",
    ),
    **{
        f"soft-cap {cap}": (
            "gemma2", {"final_logit_softcapping": cap}, id, "final_logit_softcapping: expected a soft-cap above 0",
        )
        for cap in (0.0, -2.0)
    },
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_does_more_is_refused_and_left_as_it_is(what: str) -> None:
    kind, options, change, message = REFUSED[what]
    model = build(kind, **options)
    change(model)
    own = dict(model.__dict__)
    with pytest.raises(ValueError, match=message):
        patch(model)
    assert model.__dict__ == own


def test_a_head_that_is_wrapped_after_the_patch_is_refused() -> None:
    patched = patch(build("llama"))
    patched.lm_head = Quantized(32, 96)  # such as an adapter that wraps the head after the patch
    with pytest.raises(ValueError, match="Quantized"):
        patched(**batch())


def test_bamba_is_taken_unless_its_loss_has_a_z_term() -> None:
    options = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    options |= {"num_attention_heads": 2, "num_key_value_heads": 2, "attn_layer_indices": [0]}
    options |= {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
    config = transformers.BambaConfig(**options)
    patch(transformers.BambaForCausalLM(config))
    config.z_loss_coefficient = 0.1
    with pytest.raises(ValueError, match="z_loss_coefficient: expected 0, got 0.1"):
        patch(transformers.BambaForCausalLM(config))


def test_labels_of_another_length_are_refused() -> None:
    model = patch(build("llama"))
    with pytest.raises(ValueError, match=r"labels: expected one for each of the \(2, 5\) rows"):
        model(**batch(), logits_to_keep=5)


def test_too_many_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="positional arguments but 30 were given"):
        patch(build("llama"))(*[None] * 30)


def test_an_argument_given_twice_is_refused() -> None:
    model, inputs = patch(build("llama")), batch()
    for given in (model, build("llama")):
        with pytest.raises(TypeError, match="got multiple values for argument 'input_ids'"):
            given(inputs["input_ids"], **inputs)


def test_a_compute_loss_func_needs_a_patched_model_and_labels() -> None:
    model = build("llama")
    with pytest.raises(ValueError, match="unpatched LlamaForCausalLM"):
        make_compute_loss_func(model, label_smoothing=0.1)
    with pytest.raises(ValueError, match="labels: expected a tensor, got None"):
        make_compute_loss_func(patch(model))({"logits": None}, None)


# What the model's forward does to its logits, by hand from transformers' modeling files.
TRANSFORMS: dict[str, dict[str, Any]] = {
    "gemma2.Gemma2ForCausalLM": {"softcap": "config.final_logit_softcapping"},
    "gemma3.Gemma3ForCausalLM": {"softcap": "config.final_logit_softcapping"},
    "nanochat.NanoChatForCausalLM": {"softcap": "config.final_logit_softcapping"},
    "recurrent_gemma.RecurrentGemmaForCausalLM": {"softcap": "config.logits_soft_cap"},
    "cohere.CohereForCausalLM": {"multipliers": ("logit_scale",)},
    "cohere2.Cohere2ForCausalLM": {"multipliers": ("logit_scale",)},
    "granite.GraniteForCausalLM": {"divisors": ("config.logits_scaling",)},
    "granitemoe.GraniteMoeForCausalLM": {"divisors": ("config.logits_scaling",)},
    "falcon_h1.FalconH1ForCausalLM": {"multipliers": ("model.lm_head_multiplier",)},
    "minicpm3.MiniCPM3ForCausalLM": {"hidden_divisors": ("config.logits_scaling",)},
    "bamba.BambaForCausalLM": {"must_be_zero": ("z_loss_coefficient",)},
    "mamba.MambaForCausalLM": {"casts_to_head": True},
    "phi.PhiForCausalLM": {},
    "opt.OPTForCausalLM": {},
    "gpt_neox.GPTNeoXForCausalLM": {},
}
# In older versions it cuts the positions in any case.
GEMMA4 = {
    "gemma4.Gemma4ForCausalLM": {
        "softcap": "config.final_logit_softcapping",
        "keeps_only_whole": True,
    }
}
NO_TRANSFORM = {"softcap": None, "multipliers": (), "divisors": (), "hidden_divisors": ()}
NO_TRANSFORM |= {"must_be_zero": (), "casts_to_head": False, "keeps_only_whole": False}


def model_class(name: str) -> type:
    module, _, model = name.partition(".")
    return getattr(
        importlib.import_module(f"transformers.models.{module}.modeling_{module}"), model
    )


@pytest.mark.parametrize("name", [*TRANSFORMS, pytest.param(*GEMMA4, marks=OF_THE_DOCUMENT)])
def test_the_reader_finds_what_a_forward_does_to_its_logits(name: str) -> None:
    plan = read_forward(model_class(name))
    for field, expected in (NO_TRANSFORM | (TRANSFORMS | GEMMA4)[name]).items():
        assert getattr(plan, field) == expected, field


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        ("xlstm.xLSTMForCausalLM", "max_inference_chunksize"),
        ("doge.DogeForCausalLM", "math.sqrt(self.num_experts)"),
        ("git.GitForCausalLM", "kwargs.pop('shift_labels', None)"),
        ("kosmos2.Kosmos2ForConditionalGeneration", "no statement of the kind hidden, head, loss"),
    ],
)
def test_a_model_whose_forward_does_more_is_refused(name: str, quoted: str) -> None:
    with pytest.raises(UnknownForward) as error:
        read_forward(model_class(name))
    assert name.partition(".")[2] in str(error.value)
    assert quoted in str(error.value)


HEAD_FORWARD = """\
def forward(self, input_ids=None, labels=None, **kwargs):
    outputs = self.model(input_ids=input_ids, **kwargs)
    hidden_states = outputs.last_hidden_state
    logits = self.lm_head(hidden_states)
    loss = None
    if labels is not None:
        loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
    return CausalLMOutputWithPast(loss=loss, logits=logits)
"""
INNER_FORWARD = HEAD_FORWARD.replace("self.model(", "self.language_model(").replace(
    "    hidden_states = outputs.last_hidden_state\n    logits = self.lm_head(hidden_states)\n",
    "    logits = outputs.logits\n",
)
CAPPED_THEN_SCALED = """\
    if self.config.cap is not None:
        logits = logits / self.config.cap
        logits = torch.tanh(logits)
        logits = logits * self.config.cap
    logits = logits * self.config.scale
    loss = None
"""
LOSS = HEAD_FORWARD[HEAD_FORWARD.index("    loss = None") : HEAD_FORWARD.index("    return")]


def own_class(source: str, old: str = "", new: str = "") -> type:
    """A causal LM whose forward has that source, with ``new`` in place of ``old``."""
    assert old in source
    text, name = source.replace(old, new), f"a forward with {new!r}"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    found: dict[str, Any] = {}
    exec(compile(text, name, "exec"), globals(), found)
    return own_model(found["forward"])


def own_model(forward: Any) -> type:
    return type("OwnForCausalLM", (LlamaForCausalLM,), {"forward": forward})


def test_a_cap_counts_only_where_it_is_applied() -> None:
    unused = "    cap = self.config.cap\n    loss = None\n"
    assert read_forward(own_class(HEAD_FORWARD, "    loss = None\n", unused)).softcap is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    loss = None\n", CAPPED_THEN_SCALED, "`logits = logits * self.config.scale`"),
        ("head(hidden_states)", "head(other_states)", "`logits = self.lm_head(other_states)`"),
        ("logits=logits)", "logits=logits, hidden_states=logits.exp())", "returns hidden_states=logits.exp()"),
        (LOSS, "    loss = None\n", "no statement of the kind loss"),
        ("=input_ids,", "=input_ids.flip(1),", "hands `input_ids=input_ids.flip(1)` to its base model"),
        ("    outputs =", "    self.config.cap = 3\n    outputs =", "the statement `self.config.cap = 3`"),
    ],
)  # fmt: skip
def test_a_forward_of_ones_own_is_refused_where_it_differs(
    old: str, new: str, message: str
) -> None:
    with pytest.raises(UnknownForward, match=re.escape(message)):
        read_forward(own_class(HEAD_FORWARD, old, new))


def test_a_subclass_with_the_known_forward_is_taken() -> None:
    model = build("llama")
    model.__class__ = type("OwnForCausalLM", (LlamaForCausalLM,), {})
    assert patch(model)(**batch()).logits is None
    assert integration.unpatch(model)(**batch()).logits is not None


def wrapped_again(model_class: type) -> Any:
    """The class's forward under one of transformers' decorators that its source does not name."""
    from transformers.utils.generic import merge_with_config_defaults

    return merge_with_config_defaults(model_class.forward)


def deprecating(*given: Any) -> Any:
    """A decorator of one's own that has the name of one of transformers'."""
    return lambda function: function


deprecate_kwarg = deprecating


@deprecate_kwarg("old")
def decorated_by_a_namesake(self: Any, input_ids=None, labels=None, **kwargs):
    return None


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lce_forward, r"is Liger's.*liger_kernel"),
        (eval("lambda self, labels: None"), "no source to read"),
        (wrapped_again(LlamaForCausalLM), "is wrapped by functions of .*other than its decorators"),
        (decorated_by_a_namesake, r"is decorated with @deprecate_kwarg\('old'\)"),
    ],
    ids=["Liger", "source", "wrapper", "namesake"],
)
def test_a_forward_that_is_not_known_or_stands_in_what_is_not_known_is_refused(
    forward: Any, message: str
) -> None:
    with pytest.raises(UnknownForward, match=message):
        read_forward(own_model(forward))


def test_statements_before_the_base_model_run_as_they_stand() -> None:
    first = "    if labels is not None:\n        labels = labels.masked_fill(labels < 40, -100)\n"
    model = build("llama")
    model.__class__ = own_class(HEAD_FORWARD, "    outputs =", f"{first}    outputs =")
    want = model(**batch()).loss
    got = patch(model)(**batch())
    assert got.logits is None
    torch.testing.assert_close(got.loss, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("outputs.logits", "outputs.logits * 0.5"),
        ("input_ids=input_ids,", "input_ids=input_ids, weights=labels.ne(3),"),
        ("logits=logits)", "logits=logits, hidden_states=logits.exp())"),
        ("    return", "    loss = loss + outputs.more\n    return"),
    ],
)
def test_a_forward_around_a_causal_lm_that_does_more_is_refused(old: str, new: str) -> None:
    own = own_class(INNER_FORWARD, old, new)
    with pytest.raises(UnknownForward):
        read_inner(own)
    model = build("llama")
    model.__class__ = own
    with pytest.raises(UnknownForward, match="OwnForCausalLM.forward"):
        patch(model)


def test_a_forward_around_a_causal_lm_that_does_no_more_is_read() -> None:
    assert read_inner(own_class(INNER_FORWARD)) == "language_model"
