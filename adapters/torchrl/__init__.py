"""TorchRL: its value estimators, computed by rl_triton, by one patch or by classes of the same names.

TorchRL computes advantages and returns in a handful of functions (`torchrl.objectives.value.functional`), each in a
form that loops over time in Python and in a vectorised one that pads trajectories. Its estimators, losses, trainers
and transforms call these by name, so two ways lead in:

- `patch()` replaces the functions in every module that bound them. What exists already follows: estimators, losses,
  trainers.
- `GAE`, `TDLambdaEstimator`, `TD1Estimator`, `VTrace` and `MultiAgentGAE` here are TorchRL's classes but for the
  computation, `Retrace` is one that TorchRL lacks; `register()` makes losses build these by default.

Calls that the library does not serve run TorchRL's own code and are counted with the reason in
`rl_triton.adapters.status()`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_triton.adapters._functions import FunctionPatch
from rl_triton.adapters._patching import framework_function, patch_of, patch_under, restore_bindings

if TYPE_CHECKING:
    from rl_triton.adapters.torchrl._estimators import (
        GAE,
        MultiAgentGAE,
        Retrace,
        TD1Estimator,
        TDLambdaEstimator,
        VTrace,
        register,
        registered,
        unregister,
    )

__all__ = [
    "GAE",
    "MultiAgentGAE",
    "Retrace",
    "TD1Estimator",
    "TDLambdaEstimator",
    "VTrace",
    "is_patched",
    "patch",
    "patched",
    "register",
    "registered",
    "unpatch",
    "unregister",
]

TESTED_VERSIONS = "0.14"

_FUNCTIONAL = "torchrl.objectives.value.functional"
# The modules whose own code calls the functions. The last exists since 0.14.
_CALLERS = (_FUNCTIONAL, "torchrl.objectives.value.advantages", "torchrl.objectives.dreamer_v3")
# What is patched is still patched when this module is reloaded.
_patches: dict[tuple[ModuleType, str], FunctionPatch] = globals().get("_patches", {})
_fix_vtrace: bool = globals().get("_fix_vtrace", False)


def patch(*, fix_vtrace: bool = False) -> None:
    """Compute TorchRL's advantages and returns with rl_triton, in the whole process.

    Replaces, for both families (the Python loops and the vectorised forms), generalized advantages, TD(λ) and TD(1)
    returns, and V-trace and rewards to go, in `torchrl.objectives.value.functional`, in `….advantages`, in
    `torchrl.objectives.dreamer_v3` where it exists, and in every other module of TorchRL that is loaded and bound
    them. The TD advantages call the returns by name and follow. A name that your own code imported from TorchRL before
    stays TorchRL's; imported after, it follows the patch until `unpatch()`. Calling it again patches what was loaded or
    reloaded meanwhile. Undo it with `unpatch()`, or use `with patched():`.

    Args:
        fix_vtrace: before 0.14, TorchRL's V-trace advantage at a truncation inside the window looked at the next
            trajectory. Its numbers are kept unless this is True. The same for every later version.

    Raises:
        ImportError: TorchRL is not installed.
        RuntimeError: the installed TorchRL computes something else, or another copy of rl_triton patched it.
    """
    targets = _targets()
    _use(fix_vtrace)
    for target in targets:
        target.on()


def unpatch() -> None:
    """Put TorchRL's own functions back, in every module that has ours, your own too. Does nothing if they are not
    patched."""
    for existing in _patches.values():
        existing.off()
    restore_bindings()


@contextlib.contextmanager
def patched(*, fix_vtrace: bool = False) -> Iterator[None]:
    """`patch()` inside a `with` block. Blocks nest; the last one to end restores the identical originals."""
    before = _fix_vtrace
    with contextlib.ExitStack() as stack:
        stack.callback(restore_bindings)
        for target in _targets():
            stack.enter_context(target.scope())
        _use(fix_vtrace)
        try:
            yield
        finally:
            _use(before)


def is_patched() -> bool:
    """Whether every function, in every module that calls it, computes with rl_triton."""
    _import(_FUNCTIONAL)
    patches = [patch_under(vars(module)[name]) for module, name in _bindings()]
    return all(existing is not None and existing.wanted for existing in patches)


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError("rl_triton.adapters.torchrl needs TorchRL: pip install 'rl-triton[torchrl]'") from error


def _bindings() -> list[tuple[ModuleType, str]]:
    """(module, name) of each binding that TorchRL's code reads."""
    from rl_triton.adapters.torchrl._functionals import NAMES

    stock = {name: _stock_function(name) for name in NAMES}
    for name in _CALLERS[1:]:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    found = []
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != "torchrl" or not isinstance(module, ModuleType):
            continue
        for name in NAMES:
            bound = vars(module).get(name)
            if bound is None:
                continue
            if module_name in _CALLERS or bound is stock[name] or patch_of(bound) is not None:
                found.append((module, name))
    return found


def _targets() -> list[FunctionPatch]:
    bindings = _bindings()
    functions = _functions()
    for module, name in bindings:
        if (module, name) not in _patches:
            _patches[module, name] = FunctionPatch(module, name, functions[name])
    return list(_patches.values())


def _use(fix_vtrace: bool) -> None:
    global _fix_vtrace
    from rl_triton.adapters.torchrl._functionals import NAMES

    _fix_vtrace = fix_vtrace
    served = NAMES if fix_vtrace else _functions()
    for (_, name), existing in _patches.items():
        existing.serve = served[name]


def _stock_function(name: str) -> Any:
    """TorchRL's own, whether or not it is patched."""
    return framework_function(getattr(_import(_FUNCTIONAL), name))


def _functions() -> dict[str, Any]:
    """What stands in for each function of the installed TorchRL, once it is known to compute what we know."""
    from rl_triton.adapters.torchrl._functionals import NAMES

    return _checked(_import("torchrl").__version__, *map(_stock_function, NAMES))


@functools.cache
def _checked(version: str, *stock: Any) -> dict[str, Any]:
    """Once for the functions that there are; reloading TorchRL's module makes others."""
    from rl_triton.adapters.torchrl._behaviour import functions

    served = functions(_import(_FUNCTIONAL), version)
    if not version.startswith(TESTED_VERSIONS):
        warnings.warn(
            f"rl_triton.adapters.torchrl was tested with TorchRL {TESTED_VERSIONS}; the functions of {version} compute "
            "the same on the numbers that were tried",
            stacklevel=5,
        )
    return served


def __getattr__(name: str) -> Any:
    if name in __all__:
        version = _import("torchrl").__version__
        estimators = importlib.import_module("rl_triton.adapters.torchrl._estimators")
        if not hasattr(estimators, name):
            raise AttributeError(f"TorchRL {version} has no {name}")
        return getattr(estimators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
