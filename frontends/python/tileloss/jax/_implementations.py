"""Who runs the sweeps: implementations by name, and the choice among them by platform, at lowering."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from tileloss.jax._devices import may_be_cut, varying_alike
from tileloss.jax._platforms import only_on
from tileloss.jax._sweeps import library, tpu, xla, xla_head, xla_targets, xla_targets_head
from tileloss.jax._sweeps.operands import Logits, Operand, Spec


class Implementation(NamedTuple):
    """Two sweeps, as jax/_sweeps/operands.py has them."""

    name: str
    platform: str | None  # where it runs: "cpu", "cuda", "tpu", ...; None: everywhere
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    # The gradient in one pass with the whole of a scalar loss where there is more to it than the sweeps; where the target is not
    # labels, with the rows' outputs.
    value_and_grad: Callable[..., Any] | None
    # What it cannot do of a call, in words that end a sentence "implementation ...: "; "": nothing.
    refusal: Callable[[Operand, Spec], str]


def _by_operand(name: str, of_logits: Any, of_head: Any) -> Callable[..., Any]:
    """One function made of two modules'."""

    def call(operand: Operand, *arguments: Any) -> Any:
        return getattr(of_logits if isinstance(operand, Logits) else of_head, name)(
            operand, *arguments
        )

    return call


def _on_tpu(sweep: Callable[..., Any]) -> Callable[..., Any]:
    """Pallas has no words for a program that is for other platforms as well."""
    return lambda operand, *rest: sweep(only_on(("tpu",), "pallas_tpu", operand), *rest)


def _refuses_nothing(operand: Operand, spec: Spec) -> str:
    return ""


_CPU = Implementation(
    "cpu",
    "cpu",
    library.forward,
    library.backward,
    library.value_and_grad,
    library.refusal,
)
_CUDA = _CPU._replace(name="cuda", platform="cuda", refusal=library.refusal_on_cuda)
IMPLEMENTATIONS = (
    _CPU,
    _CUDA,
    Implementation(
        "pallas_tpu", "tpu", _on_tpu(tpu.forward), _on_tpu(tpu.backward), None, tpu.refusal
    ),
    Implementation(
        "xla",
        None,
        _by_operand("forward", xla, xla_head),
        _by_operand("backward", xla, xla_head),
        None,
        _refuses_nothing,
    ),
)
_BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}
DEFAULT = tuple(_BY_NAME)  # in order of preference
# Of the targets that are not labels.
_TARGET_IMPLEMENTATIONS = {
    "cpu": _CPU._replace(value_and_grad=library.rows_and_grad),
    "cuda": _CUDA._replace(value_and_grad=library.rows_and_grad),
    "xla": Implementation(
        "xla",
        None,
        _by_operand("forward", xla_targets, xla_targets_head),
        _by_operand("backward", xla_targets, xla_targets_head),
        _by_operand("rows_and_grad", xla_targets, xla_targets_head),
        _refuses_nothing,
    ),
}


def check_names(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """The names, in order of preference; none: all there are.

    Raises:
        ValueError: a name of no implementation, or no name.
    """
    if given is None:
        _warn_where_the_handler_is_missing()
        return DEFAULT
    names = (given,) if isinstance(given, str) else tuple(given)
    unknown = [name for name in names if name not in _BY_NAME]
    if unknown or not names:
        raise ValueError(
            f"implementation: expected names among {', '.join(_BY_NAME)}, got {', '.join(unknown) or 'none'}"
        )
    return names


@cache
def _warn_where_the_handler_is_missing() -> None:
    """Once."""
    if "cpu" in DEFAULT and library.missing() and jax.default_backend() == "cpu":
        warnings.warn(
            f'tileloss.jax: "cpu" {library.missing()}: "xla" runs in its place, slower. A build that finds a jaxlib has it '
            "(docs/users/install.md); who names an implementation is not told",
            RuntimeWarning,
            stacklevel=2,
        )


class Choice(NamedTuple):
    """The first implementation in order of preference that can do a call, for each platform."""

    by_platform: tuple[tuple[str, Implementation], ...]
    otherwise: Implementation | None
    # Whether one pass may be taken: of labels it needs all rows and the whole vocabulary in one place.
    may_be_whole: bool
    plain: Implementation  # in plain XLA: what second derivatives are made of

    def run(self, sweep: str, *arguments: Any) -> Any:
        """``sweep``: "forward" or "backward", with its arguments."""

        def dispatch(*arguments: Any) -> Any:
            branches = {
                platform: partial(getattr(one, sweep), *arguments)
                for platform, one in self.by_platform
            }
            last, operand = self.otherwise, arguments[0]
            if last is None:  # elsewhere an error
                _, last = self.by_platform[0]
                names = ", ".join(one.name for _, one in self.by_platform)
                operand = only_on(tuple(branches), names, operand)
            return _by_platform(branches, partial(getattr(last, sweep), operand, *arguments[1:]))

        return _differentiated_as(getattr(self.plain, sweep), dispatch, arguments)

    def run_whole(
        self, by_sweeps: Callable[..., Any], in_one_pass: Callable[..., Any], *arguments: Any
    ) -> Any:
        """``in_one_pass(value_and_grad, *arguments)`` on platforms whose implementation has one; elsewhere
        ``by_sweeps(*arguments)``."""

        def dispatch(*arguments: Any) -> Any:
            passes = {
                platform: partial(in_one_pass, f, *arguments)
                for platform, f in self._passes().items()
            }
            default = partial(by_sweeps, *arguments)
            if self.may_be_whole and self.otherwise and self.otherwise.value_and_grad:
                default = partial(in_one_pass, self.otherwise.value_and_grad, *arguments)
            return _by_platform(passes, default)

        return _differentiated_as(by_sweeps, dispatch, arguments)

    def has_one_pass(self, backend: str) -> bool:
        """``backend``: as jax.default_backend says it."""
        return ("cuda" if backend == "gpu" else backend) in self._passes()

    def _passes(self) -> dict[str, Callable[..., Any]]:
        if not self.may_be_whole:
            return {}
        return {name: one.value_and_grad for name, one in self.by_platform if one.value_and_grad}


def _differentiated_as(
    plain: Callable[..., Any], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """function(*arguments), whose derivatives, where somebody asks for second ones, are those of ``plain``. Kernels have none."""
    leaves, tree = jax.tree.flatten(arguments)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    # JAX keeps the functions, which are to keep no tracers.
    plain_leaves = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]

    def with_arrays(call: Callable[..., Any], arrays: tuple[Array, ...]) -> Any:
        filled = list(plain_leaves)
        for i, array in zip(places, arrays, strict=True):
            filled[i] = array
        return call(*jax.tree.unflatten(tree, filled))

    @jax.custom_jvp
    def run(*arrays: Array) -> Any:
        return with_arrays(function, arrays)

    def jvp(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> Any:
        def wide(*arrays: Array) -> Any:
            # Sweeps that go over bfloat16 as integers have no derivative.
            found = with_arrays(plain, tuple(_widened(x) for x in arrays))
            like = jax.eval_shape(run, *arrays)
            return jax.tree.map(lambda x, of: x.astype(of.dtype), found, like)

        return jax.jvp(wide, primals, tangents)

    run.defjvp(jvp)
    return run(*(leaves[i] for i in places))


def _widened(x: Array) -> Array:
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def _by_platform(branches: Mapping[str, Callable[[], Any]], default: Callable[[], Any]) -> Any:
    """The branch of the platform at lowering. Their results are of one type, inside of shard_map too."""
    if not branches:
        return default()

    def alike(branch: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: varying_alike(branch())

    of_platforms = {platform: alike(branch) for platform, branch in branches.items()}
    return lax.platform_dependent(default=alike(default), **of_platforms)


def choose(names: tuple[str, ...], operand: Operand, spec: Spec, is_of_labels: bool) -> Choice:
    """``is_of_labels``: whether the target is labels. Raises ValueError when none of ``names`` can do the call."""
    by_platform: dict[str, Implementation] = {}
    refusals = []
    table = _BY_NAME if is_of_labels else _TARGET_IMPLEMENTATIONS
    may_be_whole = not is_of_labels or not may_be_cut(operand)
    for name in names:
        one = table.get(name)
        if one is None:
            refusals.append(f"{name} has no kernels of this loss")
        elif refusal := one.refusal(operand, spec):
            refusals.append(f"{name} {refusal}")
        elif one.platform is None:
            return Choice(tuple(by_platform.items()), one, may_be_whole, table["xla"])
        else:
            by_platform.setdefault(one.platform, one)
    if not by_platform:
        raise ValueError(f"implementation: none of those named can do this: {'; '.join(refusals)}")
    return Choice(tuple(by_platform.items()), None, may_be_whole, table["xla"])
