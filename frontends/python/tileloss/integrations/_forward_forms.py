"""The statements that a causal LM's forward is made of, as ``ast.unparse`` prints what ``_forward_source`` makes of them.

A form stands at a stage; statements come in order of their stage, and a stage may repeat where ``REPEATS`` says so. The groups
outputs, hidden and logits are the forward's variables and mean the same name throughout. A path that ends in ``?`` is one whose
value may be None or missing: its step is then left out.
"""

from __future__ import annotations

import re

_PATH = r"self(?:\.\w+|\.get_text_config\(\))+"
_OUTPUT = (
    r"(?P<outputs>\w+)(?:\[0\]|\.last_hidden_state(?: if return_dict else (?P=outputs)\[0\])?)"
)
_VOCAB = r"(?:vocab_size=)?(?:self\.[\w.()]*vocab_size|\w+\.shape\[-1\])"
_LOSS_ARGUMENTS = (
    rf"{_VOCAB}(?:, pad_token_id=self\.config\.pad_token_id)?"  # of no meaning to ForCausalLMLoss
)
_LOSS_CALL = r"loss = self\.loss_function\((?:logits=)?(?P<logits>\w+), "
_LOSS = rf"{_LOSS_CALL}(?:labels=)?labels, {_LOSS_ARGUMENTS}, \*\*kwargs\)"
_LOSS_OF_GIVEN = (
    rf"{_LOSS_CALL}(?:labels=)?labels, {_LOSS_ARGUMENTS}, shift_labels=labels, \*\*kwargs\)"
)
_LOSS_OF_POPPED = (
    rf"{_LOSS_CALL}labels=None, {_LOSS_ARGUMENTS}, "
    r"shift_labels=shift_labels if shift_labels is not None else labels, \*\*kwargs\)"
)

FORMS: tuple[tuple[int, str, re.Pattern[str]], ...] = tuple(
    (stage, kind, re.compile(pattern))
    for stage, kind, pattern in (
        # kwargs then hold no shift_labels for the base model
        (0, "pop_shift_labels", r"shift_labels = kwargs\.pop\('shift_labels', None\)"),
        (1, "base", rf"(?P<outputs>\w+) = (?P<base>{_PATH})\(.*\)"),
        (2, "hidden", rf"(?P<hidden>\w+) = {_OUTPUT}(?: / (?P<divisor>{_PATH}))?"),
        (3, "divide_hidden", rf"(?P<hidden>\w+) = (?P=hidden) / (?P<divisor>{_PATH})"),
        (4, "keep", r"(?P<hidden>\w+) = slice_logits_to_keep\((?P=hidden), logits_to_keep\)"),
        (
            4,
            "keep_unless_kept",
            r"if (?P<hidden>\w+)\.shape\[1\] == \(input_ids if input_ids is not None else inputs_embeds\)\.shape\[1\]:\n"
            r"    (?P=hidden) = slice_logits_to_keep\((?P=hidden), logits_to_keep\)",
        ),
        (
            4,  # transformers 5.0 to 5.12
            "slice",
            r"slice_indices = slice\(-logits_to_keep, None\) if isinstance\(logits_to_keep, int\) else logits_to_keep",
        ),
        (
            5,
            "head",
            r"(?P<logits>\w+) = self\.(?P<head>\w+)\((?P<hidden>\w+)(?P<slice>\[:, slice_indices, :\])?"
            r"(?P<cast>\.to\((?:dtype=)?self\.(?P=head)\.weight\.dtype\))?\)"
            rf"(?:\.float\(\)|\.contiguous\(\))?(?: (?P<operator>[*/]) (?P<factor>{_PATH}))?",
        ),
        (
            5,
            "head_after_module",
            r"(?P<logits>\w+) = self\.(?P<head>\w+)\(self\.(?P<before>\w+)\((?P<hidden>\w+)\)\)",
        ),
        (6, "scale", rf"(?P<logits>\w+) = (?P=logits) (?P<operator>[*/]) (?P<factor>{_PATH})"),
        (
            6,
            "scale_unless_none",
            rf"if (?P<factor>{_PATH}) is not None:\n    (?P<logits>\w+) = (?P=logits) (?P<operator>[*/]) (?P=factor)",
        ),
        (
            7,
            "softcap",
            rf"if (?P<cap>{_PATH}\??) is not None:\n    (?P<logits>\w+) = (?P=logits)(?:\.float\(\))? / (?P=cap)\n"
            r"    (?P=logits) = torch\.tanh\((?P=logits)\)\n    (?P=logits) = (?P=logits) \* (?P=cap)",
        ),
        (
            7,
            "softcap",
            rf"if \((?P<variable>\w+) := (?P<cap>{_PATH})\) is not None:\n    (?P<logits>\w+) = (?P=logits) / (?P=variable)\n"
            r"    (?P=logits) = torch\.tanh\((?P=logits)\)\n    (?P=logits) = (?P=logits) \* (?P=variable)",
        ),
        (
            7,
            "softcap",
            rf"(?P<logits>\w+) = nn\.functional\.tanh\((?P=logits) / (?P<cap>{_PATH})\) \* (?P=cap)",
        ),
        (8, "cut", rf"(?P<logits>\w+) = (?P=logits)\[\.\.\., :(?P<vocab>{_PATH})\]"),
        (
            8,
            "cut",
            rf"if (?P<vocab>{_PATH}) is not None and (?P=vocab) < (?P<logits>\w+)\.shape\[-1\]:\n"
            r"    (?P=logits) = (?P=logits)\[\.\.\., :(?P=vocab)\]",
        ),
        (9, "no_loss", r"loss = None"),
        (10, "loss", rf"if labels is not None:\n    {_LOSS}"),
        (
            10,
            "loss_with_z",
            rf"if labels is not None:\n    {_LOSS}\n    if (?P<zero>{_PATH}) > 0:\n"
            r"        z_loss = (?P=logits)\.logsumexp\(dim=-1\)\.to\(dtype=loss\.dtype\)\.pow\(2\)\.mean\(\)\n"
            r"        loss = loss \+ (?P=zero) \* z_loss",
        ),
        (10, "loss_of_given", rf"if labels is not None:\n    {_LOSS_OF_GIVEN}"),
        (10, "loss_of_popped", rf"if labels is not None:\n    {_LOSS_OF_POPPED}"),
        (
            10,
            "loss_of_torch",
            r"if labels is not None:\n(?:    labels = labels\.to\(\w+\.device\)\n)?    (?P<function>\w+) = CrossEntropyLoss\(\)\n"
            r"    loss = (?P=function)\((?P<logits>\w+)\.view\(-1, (?:self\.(?P<view>[\w.]*vocab_size)|(?P=logits)\.size\(-1\))"
            r"\), labels\.view\(-1\)\)",
        ),
        (11, "no_router", r"aux_loss = None"),
        (
            12,
            "router",
            r"if output_router_logits:\n    aux_loss = (?P<function>\w+)\((?P<outputs>\w+)\.router_logits, "
            rf"(?P<arguments>(?:{_PATH}, )*)attention_mask\)\n"
            rf"    if labels is not None:\n        loss \+= (?P<weight>{_PATH}) \* aux_loss\.to\(loss\.device\)",
        ),
        (
            13,
            "tuple",
            r"if not return_dict:\n    output = \((?P<logits>\w+),\) \+ (?P<outputs>\w+)\[\d+:\]\n"
            r"    return \(loss,\) \+ output if loss is not None else output",
        ),
        (14, "return", r"return \w+\(.*\)"),
    )
)
REPEATS = (0, 3, 6)
VARIABLES = ("outputs", "hidden", "logits")
REQUIRED = (  # one of each
    ("base",),
    ("hidden",),
    ("head", "head_after_module"),
    ("loss", "loss_with_z", "loss_of_given", "loss_of_popped", "loss_of_torch"),
    ("return",),
)
