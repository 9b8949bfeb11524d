"""The losses of TRL's trainers that are replaced, each where its module looks it up at every call."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from tileloss.integrations._replacements import Replacement
from tileloss.integrations._trl_checks import check_parameters, parameters_of
from tileloss.integrations._trl_distillation import (
    divergence_of_heads,
    generalized_jsd,
    self_distillation,
)
from tileloss.integrations._trl_sft import with_token_weights

Function = Callable[..., Any]


class Spot(NamedTuple):
    """Where a module of TRL looks its loss up."""

    trainer: str | None  # the class of which it is a method; None: the module's own name
    name: str
    stand_in: Callable[[Function], Function]  # made of TRL's own, for what TileLoss has no loss for
    parameters: tuple[str, ...] = ()  # TRL 1.16's; (): those of the stand-in


_JSD = ("student_logits", "teacher_logits", "labels", "beta", "temperature", "reduction")
_SELF = Spot(None, "compute_full_logit_self_distillation_loss", self_distillation)


def _jsd_of(trainer: str, *more: str) -> Spot:
    return Spot(trainer, "generalized_jsd_loss", generalized_jsd, (*_JSD, *more))


# By module.
SPOTS = {
    "trl.trainer.sft_trainer": Spot("SFTTrainer", "compute_loss", with_token_weights),
    "trl.trainer.distillation_trainer": Spot(None, "_chunked_divergence_loss", divergence_of_heads),
    "trl.experimental.gkd.gkd_trainer": _jsd_of("GKDTrainer", "num_items_in_batch"),
    "trl.experimental.gold.gold_trainer": _jsd_of(
        "GOLDTrainer", "logits_are_probs", "num_items_in_batch"
    ),
    "trl.experimental.iw_opd.iw_opd_trainer": _jsd_of(
        "IWOPDTrainer", "top_k", "add_tail", "num_items_in_batch"
    ),
    "trl.experimental.sdft.sdft_trainer": _SELF,
    "trl.experimental.sdpo.sdpo_trainer": _SELF,
}


def replacement_in(module: ModuleType) -> Replacement:
    """What to replace in one of the modules of `SPOTS`.

    Raises:
        RuntimeError: its function is not the one of TRL 1.16, because somebody else has replaced it.
    """
    spot = SPOTS[module.__name__]
    owner = module if spot.trainer is None else getattr(module, spot.trainer)
    found: Any = vars(owner).get(spot.name)
    own: Any = found.__func__ if isinstance(found, staticmethod) else found
    path = ".".join(filter(None, (module.__name__, spot.trainer, spot.name)))
    expected = spot.parameters or parameters_of(spot.stand_in(own), is_ours=True)
    check_parameters(path, found, parameters_of(own), expected)
    function = spot.stand_in(own)
    is_static = isinstance(found, staticmethod)
    return Replacement(owner, spot.name, staticmethod(function) if is_static else function)
