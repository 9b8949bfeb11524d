"""Who runs the sweeps: implementations by name, and the choice among them by platform, at lowering.

For which platforms a program is, is known no sooner than it is lowered: what runs on none of them is an error in words there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from tileloss.jax._devices import varying_alike
from tileloss.jax._sweeps import library, tpu, xla, xla_targets, xla_targets_head
from tileloss.jax._sweeps.operands import Logits, Operand, Spec, Target

_Tree = TypeVar("_Tree")


class Implementation(NamedTuple):
    """Two sweeps, as jax/_sweeps/operands.py has them, and for some calls all in one pass."""

    name: str
    platform: str | None  # where it runs: "cpu", "cuda", "tpu", ...; None: everywhere
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    # The whole of a scalar loss with its gradient, where the target is labels; None: there is no more to it than the sweeps.
    value_and_grad: Callable[..., Any] | None
    # The rows' outputs with the gradient, where it is not; None: there are no kernels for such a target.
    rows_and_grad: Callable[..., Any] | None
    # What it cannot do of a call, in words that end a sentence "implementation ...: "; "": nothing.
    refusal: Callable[[Operand, Spec], str]


def _on_tpu(sweep: Callable[..., Any]) -> Callable[..., Any]:
    """Pallas has no words for a program that is for other platforms as well."""
    return lambda operand, *rest: sweep(_only_on(("tpu",), "pallas_tpu", operand), *rest)


def _in_xla(sweep: str) -> Callable[..., Any]:
    """Of plain XLA's modules that of the target and the operand."""

    def call(operand: Operand, target: Target, *rest: Any) -> Any:
        of_targets = xla_targets if isinstance(operand, Logits) else xla_targets_head
        return getattr(xla if target.options is None else of_targets, sweep)(operand, target, *rest)

    return call


_LIBRARY = (library.forward, library.backward, library.value_and_grad, library.rows_and_grad)
# In order of preference.
IMPLEMENTATIONS = {
    one.name: one
    for one in (
        Implementation("cpu", "cpu", *_LIBRARY, library.refusal),
        Implementation("cuda", "cuda", *_LIBRARY, library.refusal_on_cuda),
        Implementation("pallas_tpu", "tpu", _on_tpu(tpu.forward), _on_tpu(tpu.backward), None, None, tpu.refusal),
        Implementation("xla", None, _in_xla("forward"), _in_xla("backward"), None, _in_xla("rows_and_grad"), lambda *_: ""),
    )
}  # fmt: skip
DEFAULT = tuple(IMPLEMENTATIONS)


def check_names(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """The names, in order of preference; none: all there are.

    Raises:
        ValueError: a name of no implementation, or no name.
    """
    if given is None:
        _warn_where_the_handler_is_missing()
        return DEFAULT
    names = (given,) if isinstance(given, str) else tuple(given)
    unknown = [name for name in names if name not in IMPLEMENTATIONS]
    if unknown or not names:
        raise ValueError(
            f"implementation: expected names among {', '.join(IMPLEMENTATIONS)}, got {', '.join(unknown) or 'none'}"
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
    one_pass: str  # the name of what makes all in one pass; "": that may not be taken

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
                operand = _only_on(tuple(branches), names, operand)
            return _by_platform(branches, partial(getattr(last, sweep), operand, *arguments[1:]))

        return _differentiated_as(_in_xla(sweep), dispatch, arguments)

    def run_whole(
        self, by_sweeps: Callable[..., Any], in_one_pass: Callable[..., Any], *arguments: Any
    ) -> Any:
        """``in_one_pass(value_and_grad, *arguments)`` on platforms whose implementation has one; elsewhere
        ``by_sweeps(*arguments)``."""

        def dispatch(*arguments: Any) -> Any:
            passes = {at: partial(in_one_pass, f, *arguments) for at, f in self._passes().items()}
            default = partial(by_sweeps, *arguments)
            if f := self._pass_of(self.otherwise):
                default = partial(in_one_pass, f, *arguments)
            return _by_platform(passes, default)

        return _differentiated_as(by_sweeps, dispatch, arguments)

    def has_one_pass(self, backend: str) -> bool:
        """``backend``: as jax.default_backend says it."""
        return ("cuda" if backend == "gpu" else backend) in self._passes()

    def _passes(self) -> dict[str, Callable[..., Any]]:
        found = {platform: self._pass_of(one) for platform, one in self.by_platform}
        return {platform: f for platform, f in found.items() if f}

    def _pass_of(self, one: Implementation | None) -> Callable[..., Any] | None:
        return getattr(one, self.one_pass) if one and self.one_pass else None


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
    one_pass = "value_and_grad" if is_of_labels else "rows_and_grad"
    for name in names:
        one = IMPLEMENTATIONS[name]
        if not is_of_labels and one.rows_and_grad is None:
            refusals.append(f"{name} has no kernels of this loss")
        elif refusal := one.refusal(operand, spec):
            refusals.append(f"{name} {refusal}")
        elif one.platform is None:
            return Choice(tuple(by_platform.items()), one, one_pass)
        else:
            by_platform.setdefault(one.platform, one)
    if not by_platform:
        raise ValueError(f"implementation: none of those named can do this: {'; '.join(refusals)}")
    return Choice(tuple(by_platform.items()), None, one_pass)


def _only_on(platforms: tuple[str, ...], name: str, arrays: _Tree) -> _Tree:
    """The arrays, in programs that are for ``platforms`` alone.

    Raises:
        ValueError: as the program is lowered: it is for another one as well. ``name``: of the implementation.
    """
    found: _Tree = jax.tree.map(
        lambda x: _only_on_p.bind(x, platforms=platforms, name=name),  # type: ignore[no-untyped-call]
        arrays,
    )
    return found


def _check_platforms(found: tuple[str, ...], platforms: tuple[str, ...], name: str) -> None:
    if not {*found} <= {*platforms}:
        others = "" if len(found) == 1 else ' ("xla" is for several at once)'
        raise ValueError(
            f"implementation: {name} runs on {', '.join(platforms)}, the program is for {', '.join(found)}{others}"
        )


def _run_only_on(x: Array, *, platforms: tuple[str, ...], name: str) -> Array:
    """Outside of jit."""
    found = {"gpu": "cuda"}.get(platform := next(iter(x.devices())).platform, platform)
    _check_platforms((found,), platforms, name)
    return x


def _lower_only_on(ctx: Any, x: Any, *, platforms: tuple[str, ...], name: str) -> Any:
    _check_platforms(tuple(ctx.platforms or ctx.module_context.platforms), platforms, name)
    return [x]


_only_on_p = Primitive("tileloss_only_on")
_only_on_p.def_impl(_run_only_on)  # type: ignore[no-untyped-call]
_only_on_p.def_abstract_eval(lambda x, **_: x)  # type: ignore[no-untyped-call]
mlir.register_lowering(_only_on_p, _lower_only_on)
batching.defvectorized(_only_on_p)  # type: ignore[no-untyped-call]
