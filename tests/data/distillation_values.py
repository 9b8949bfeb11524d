"""Writes distillation-values.json: values and gradients of the distillation losses, for the oracle's tests.

All from the definitions: float64 autograd of PyTorch for ordinary cases, checked on the way against TRL's own functions where it
has them; 80 digits of mpmath, derivatives by differences, for rows where doubles cancel or overflow.

    python tests/data/distillation_values.py     (PyTorch 2.15, TRL 1.16, mpmath)
"""

import itertools
import json
import pathlib
import warnings

import mpmath
import torch
import torch.nn.functional as F
from torch import Tensor

warnings.simplefilter("ignore")

ROWS, COLUMNS, VALID = 4, 7, 6
LABELS = [2, -100, 0, 5]
WEIGHTS = [1.0, 2.0, 0.5, 3.0]
IDS = [[4, 1, 3], [0, 2, 5], [5, 0, 1], [2, 3, 4]]
USED = [0, 2, 3]
DIVERGENCES = {
    "forward_kl": [0.5],
    "reverse_kl": [0.5],
    "jsd": [0.5, 0.1],
    "jeffreys": [0.5],
    "skew_forward": [0.1, 0.0],
    "skew_reverse": [0.1, 0.0],
    "total_variation": [0.5],
}
KINDS = [(name, beta) for name, betas in DIVERGENCES.items() for beta in betas]
PLAIN = {"scale": 1.0, "softcap": 0.0, "temperature": 1.0}


def table(a: int, b: int, c: int, modulus: int) -> list[list[float]]:
    """Logits in quarters, exact in every format."""
    return [
        [((a * i + b * j + c * i * j * j) % modulus - modulus // 2) / 4 for j in range(COLUMNS)]
        for i in range(ROWS)
    ]


STUDENT, TEACHER = table(7, 5, 3, 23), table(3, 11, 1, 19)


def divergence(name: str, beta: float, log_p: Tensor, log_q: Tensor) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    forward = (q * (log_q - log_p)).sum(-1)
    reverse = (p * (log_p - log_q)).sum(-1)
    if name == "total_variation":
        return (p - q).abs().sum(-1) / 2
    if name in ("forward_kl", "reverse_kl", "jeffreys"):
        return {"forward_kl": forward, "reverse_kl": reverse, "jeffreys": forward + reverse}[name]
    log_m = (beta * q + (1 - beta) * p).log()
    if name == "jsd":
        return (beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)).sum(-1)
    if name == "skew_forward":
        return (q * (log_q - log_m)).sum(-1)
    return (p * (log_p - (beta * p + (1 - beta) * q).log())).sum(-1)


def transformed(x: Tensor, transform: dict[str, float]) -> Tensor:
    x, cap = transform["scale"] * x, transform["softcap"]
    return (cap * torch.tanh(x / cap) if cap else x) / transform["temperature"]


def result(loss: Tensor, student: Tensor) -> dict[str, object]:
    (gradient,) = torch.autograd.grad(loss, student)
    return {"loss": loss.item(), "dlogits": gradient.tolist()}


def dense(options: dict, student: Tensor, teacher: Tensor) -> Tensor:
    z = transformed(student[:, :VALID], options["student"])
    zt = transformed(teacher[:, :VALID], options["teacher"])
    d = divergence(options["divergence"], options["beta"], z.log_softmax(-1), zt.log_softmax(-1))
    if options["temperature_squared"]:
        d = d * options["student"]["temperature"] ** 2
    ce = F.cross_entropy(z, torch.tensor(LABELS), reduction="none")
    loss = options["label_weight"] * ce + options["divergence_weight"] * d
    weights = torch.tensor(WEIGHTS if options["weighted"] else [1.0] * ROWS, dtype=torch.float64)
    total = (weights * loss)[USED].sum()
    if options["reduction"] == "mean":
        total = total / (options["num_items"] or weights[USED].sum())
    return total


def dense_cases() -> list[dict]:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    plain = {
        "student": PLAIN,
        "teacher": PLAIN,
        "label_weight": 0.0,
        "divergence_weight": 1.0,
        "weighted": False,
        "num_items": None,
    }
    plain |= {"temperature_squared": False, "reduction": "sum"}
    full = {
        "student": {"scale": 0.75, "softcap": 3.0, "temperature": 2.0},
        "teacher": {"scale": 1.25, "softcap": 0.0, "temperature": 1.5},
        "label_weight": 0.25,
        "divergence_weight": 0.75,
        "weighted": True,
        "num_items": None,
        "temperature_squared": True,
        "reduction": "mean",
    }
    hot = {"scale": 1.0, "softcap": 0.0, "temperature": 0.7}
    items = plain | {"student": hot, "teacher": hot, "reduction": "mean", "num_items": 8.0}
    cases = []
    for (name, beta), options in itertools.product(KINDS, (plain, full, items)):
        case = options | {"divergence": name, "beta": beta}
        student = torch.tensor(STUDENT, dtype=torch.float64, requires_grad=True)
        teacher = torch.tensor(TEACHER, dtype=torch.float64)
        loss = dense(case, student, teacher)
        trl_beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": beta}.get(name)
        if options is items and trl_beta is not None:
            theirs = GKDTrainer.generalized_jsd_loss(
                student[None, :, :VALID],
                teacher[None, :, :VALID],
                torch.tensor([LABELS]),
                trl_beta,
                0.7,
                num_items_in_batch=8,
            )
            assert abs(theirs.item() - loss.item()) < 1e-14, (name, beta)
        cases.append(case | result(loss, student))
    return cases


def sparse_cases() -> list[dict]:
    from trl.experimental.sdpo.loss_utils import add_tail_bucket, compute_divergence

    cases = []
    ids = torch.tensor(IDS)
    log_q_all = torch.tensor(TEACHER, dtype=torch.float64)[:, :VALID].log_softmax(-1)
    log_q_listed = log_q_all.gather(-1, ids)
    for (name, beta), tail in itertools.product(KINDS, ("ignore", "lump", "renormalise")):
        student = torch.tensor(STUDENT, dtype=torch.float64, requires_grad=True)
        log_p = (student[:, :VALID] / 0.7).log_softmax(-1).gather(-1, ids)
        log_q = log_q_listed
        if tail == "lump":
            log_p, log_q = (
                torch.cat([v, (1 - v.exp().sum(-1, keepdim=True)).log()], -1)
                for v in (log_p, log_q)
            )
        if tail == "renormalise":
            log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
        loss = divergence(name, beta, log_p, log_q)[USED].sum()
        alpha = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": beta}.get(name)
        if tail != "ignore" and alpha is not None:
            raw = (student[:, :VALID] / 0.7).log_softmax(-1).gather(-1, ids)
            pair = (
                (add_tail_bucket(raw), add_tail_bucket(log_q_listed))
                if tail == "lump"
                else (log_p, log_q)
            )
            assert abs(compute_divergence(*pair, alpha)[USED].sum().item() - loss.item()) < 1e-13, (
                name,
                tail,
            )
        case = {"divergence": name, "beta": beta, "tail": tail, "log_q": log_q_listed.tolist()}
        cases.append(case | result(loss, student))
    return cases


def soft_cases() -> list[dict]:
    cases = []
    q = torch.tensor(TEACHER, dtype=torch.float64)[:, :VALID].softmax(-1)
    for scale, smoothing in ((1.0, 0.0), (1.0, 0.1), (0.5, 0.2)):
        student = torch.tensor(STUDENT, dtype=torch.float64, requires_grad=True)
        loss = F.cross_entropy(
            student[:, :VALID] / 0.7, scale * q, reduction="sum", label_smoothing=smoothing
        )
        cases.append({"smoothing": smoothing, "q": (scale * q).tolist()} | result(loss, student))
    return cases


def exact_loss(
    name: str, beta: float, transform: dict[str, float], x: list, xt: list
) -> mpmath.mpf:
    def softmax(row: list) -> list:
        cap = mpmath.mpf(transform["softcap"])
        z = [mpmath.mpf(transform["scale"]) * v for v in row]
        z = [
            (cap * mpmath.tanh(v / cap) if cap else v) / mpmath.mpf(transform["temperature"])
            for v in z
        ]
        total = mpmath.fsum(mpmath.exp(v) for v in z)
        return [mpmath.exp(v) / total for v in z]

    def kl(a: list, b: list) -> mpmath.mpf:
        return mpmath.fsum(u * mpmath.log(u / v) for u, v in zip(a, b, strict=True))

    p, q = softmax(x), softmax(xt)
    b = mpmath.mpf(beta)
    m = [b * v + (1 - b) * u for u, v in zip(p, q, strict=True)]
    turned = [b * u + (1 - b) * v for u, v in zip(p, q, strict=True)]
    return {
        "forward_kl": lambda: kl(q, p),
        "reverse_kl": lambda: kl(p, q),
        "jeffreys": lambda: kl(p, q) + kl(q, p),
        "jsd": lambda: b * kl(q, m) + (1 - b) * kl(p, m),
        "skew_forward": lambda: kl(q, m),
        "skew_reverse": lambda: kl(p, turned),
        "total_variation": lambda: mpmath.fsum(abs(u - v) for u, v in zip(p, q, strict=True)) / 2,
    }[name]()


def exact_cases() -> list[dict]:
    mpmath.mp.dps = 80
    base = [0.5, -1.25, 2.0, 0.0, -3.5]
    turn = [1.0, -2.0, 0.5, 3.0, 1.0]
    capped = {"scale": 0.75, "softcap": 4.0, "temperature": 1.5}
    rows = [
        (
            "p and q 1e-6 apart",
            base,
            [u + v * 2.0**-20 for u, v in zip(base, turn, strict=True)],
            PLAIN,
        ),
        (
            "p and q 1e-10 apart",
            base,
            [u + v * 2.0**-33 for u, v in zip(base, turn, strict=True)],
            PLAIN,
        ),
        (
            "1e-6 apart, capped",
            base,
            [u + v * 2.0**-20 for u, v in zip(base, turn, strict=True)],
            capped,
        ),
        (
            "1e-6 apart at different offsets",
            base,
            [u + v * 2.0**-20 + 512.0 for u, v in zip(base, turn, strict=True)],
            PLAIN,
        ),
        ("wide", [300.0, -200.0, 5.0, 299.0, -1000.0], [-150.0, 280.0, 281.5, -900.0, 0.0], PLAIN),
        (
            "two columns alike, one far",
            [0.0, 0.0, 30.0, -40.0, 1.0],
            [0.0, 2.0**-20, 30.0, 10.0, 1.0],
            PLAIN,
        ),
    ]
    cases = []
    for (row, x, xt, transform), (name, beta) in itertools.product(rows, KINDS):
        x_exact, xt_exact = [mpmath.mpf(v) for v in x], [mpmath.mpf(v) for v in xt]

        def moved(
            j: int, step: mpmath.mpf, of: tuple = (name, beta, transform, x_exact, xt_exact)
        ) -> mpmath.mpf:
            there = [v + (step if k == j else 0) for k, v in enumerate(of[3])]
            return exact_loss(of[0], of[1], of[2], there, of[4])

        step = mpmath.mpf(10) ** -26
        gradient = [float((moved(j, step) - moved(j, -step)) / (2 * step)) for j in range(len(x))]
        case = {
            "row": row,
            "divergence": name,
            "beta": beta,
            "transform": transform,
            "student": x,
            "teacher": xt,
        }
        cases.append(case | {"loss": float(moved(0, mpmath.mpf(0))), "dlogits": gradient})
    return cases


def main() -> None:
    values = {
        "student": STUDENT,
        "teacher": TEACHER,
        "valid_vocab": VALID,
        "labels": LABELS,
        "token_weights": WEIGHTS,
        "ids": IDS,
        "dense": dense_cases(),
        "sparse": sparse_cases(),
        "soft": soft_cases(),
        "exact": exact_cases(),
    }
    lines = []
    for key, value in values.items():
        cases = key in ("dense", "sparse", "soft", "exact")
        text = (
            "[\n" + ",\n".join(json.dumps(case) for case in value) + "\n]"
            if cases
            else json.dumps(value)
        )
        lines.append(f'"{key}": {text}')
    path = pathlib.Path(__file__).parent / "distillation-values.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
