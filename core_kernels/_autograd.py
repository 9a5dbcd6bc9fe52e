"""Differentiable building blocks that select like the kernels do: products, quotients, exponentials and the scan.

Autograd multiplies: where a result does not depend on an entry it forms 0 * x, which is NaN if x is. These functions
have the same values and derivatives, but a zero selects in every order of differentiation: a zero factor reads nothing,
and a zero gradient reads neither what it would be multiplied with nor what it would flow into. The derivative with
respect to a zero factor itself is that of the product where it is finite, else 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch.utils import unwrap_dead_wrappers

from rl_triton import _backend, _library


def _readable(x: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """x, but 0 for what is not finite where the product is zero by selection."""
    return torch.where(zero & ~x.isfinite(), 0.0, x)


class Function(torch.autograd.Function):
    """One whose calls name every argument of `forward` by its place: PyTorch would bind them to its signature first,
    which takes longer than all else that a small call does."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return cls.apply_untransformed(*unwrap_dead_wrappers(args))

    @classmethod
    def apply_untransformed(cls, *args: Any) -> Any:
        """`apply` where no transform is active and no tensor is left of one."""
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _Product(Function):
    """factor * x, and 0 where factor (with `either`, also where x) is zero."""

    generate_vmap_rule = True

    @staticmethod
    def _zero(factor: torch.Tensor, x: torch.Tensor, either: bool) -> torch.Tensor:
        return (factor == 0) | (x == 0) if either else factor == 0

    @staticmethod
    def forward(factor: torch.Tensor, x: torch.Tensor, either: bool) -> torch.Tensor:
        return torch.where(_Product._zero(factor, x, either), 0.0, factor * x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        factor, x, ctx.either = inputs
        ctx.save_for_backward(factor, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        factor, x = ctx.saved_tensors
        zero = _Product._zero(factor, x, ctx.either)
        wants_factor, wants_x, _ = ctx.needs_input_grad
        return (
            _Product.apply(grad, _readable(x, zero), True) if wants_factor else None,
            _Product.apply(grad, _readable(factor, zero), True) if wants_x else None,
            None,
        )


class _Quotient(Function):
    """x / y."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x / y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1], output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        y, quotient = ctx.saved_tensors
        inverse = _Quotient.apply(torch.ones_like(y), y)
        grad_x = _Product.apply(grad, inverse, True)
        return grad_x, -_Product.apply(grad_x, quotient, True) if ctx.needs_input_grad[1] else None


class _Exponential(Function):
    """exp(x)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _Product.apply(grad, ctx.saved_tensors[0], True)


class _Scan(Function):
    """y[t] = α[t] + β[t] y[t+1] (t-1 where not `reverse`), on the backend that serves the tensors.

    Its backward is one scan in the other direction: with g[t] the gradient of y[t] and μ[t] all of what depends on it,

        μ[t] = g[t] + β[t-1] μ[t-1],   ∂α[t] = μ[t],   ∂β[t] = μ[t] y[t+1],   ∂initial = β[T-1] μ[T-1].

    Where it is differentiated again, it is written with these functions. Kept for it: β, y and initial.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        alpha: torch.Tensor, beta: torch.Tensor, initial: torch.Tensor | None, dim: int, reverse: bool
    ) -> torch.Tensor:
        from rl_triton.estimators.affine import affine_scan

        return affine_scan(alpha, beta, initial=initial, reverse=reverse, time_dim=dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        _, beta, initial, ctx.dim, ctx.reverse = inputs
        ctx.save_for_backward(beta, initial, output)
        ctx.backend = _backend.chosen()  # a backward may run in another thread, or after the `with` block

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        beta, initial, y = ctx.saved_tensors
        dim, reverse = ctx.dim, ctx.reverse
        n_steps = grad.shape[dim]
        if n_steps == 0:
            return grad, torch.zeros_like(beta), None if initial is None else torch.zeros_like(initial), None, None
        if not torch.is_grad_enabled() and not _library.watched():
            with _backend.backend(ctx.backend):
                return *_Scan.gradients(grad, beta, initial, y, dim, reverse, *ctx.needs_input_grad[1:3]), None, None
        # The part of a tensor without its last step in time, and without its first.
        early, late = (0, n_steps - 1), (1, n_steps - 1)
        first, last, readers, read = (0, -1, early, late) if reverse else (-1, 0, late, early)
        with _backend.backend(ctx.backend):
            rest = _Scan.apply(
                grad.narrow(dim, *read), beta.narrow(dim, *readers), grad.select(dim, first), dim, not reverse
            )
        mu = joined(grad.select(dim, first), rest, dim, reverse)
        grad_beta = grad_initial = None
        if ctx.needs_input_grad[1]:
            beyond = torch.zeros_like(grad.select(dim, 0)) if initial is None else initial
            ahead = joined(beyond, y.narrow(dim, *read), dim, not reverse)
            grad_beta = _Product.apply(mu, _readable(ahead, beta == 0), True)
        if initial is not None and ctx.needs_input_grad[2]:
            grad_initial = _Product.apply(beta.select(dim, last), mu.select(dim, last), True)
        return mu, grad_beta, grad_initial, None, None

    @staticmethod
    def gradients(
        grad: torch.Tensor,
        beta: torch.Tensor,
        initial: torch.Tensor | None,
        y: torch.Tensor,
        dim: int,
        reverse: bool,
        wants_beta: bool,
        wants_initial: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """∂α, ∂β, ∂initial without a graph: one kernel, and what concerns the edges."""
        from rl_triton.estimators.adjoint import transposed_scan

        n_others = grad.shape[dim] - 1
        read, readers, first, last = (1, 0, 0, -1) if reverse else (0, 1, -1, 0)
        grad_alpha, grad_beta = torch.empty_like(y), torch.empty_like(y) if wants_beta else None
        grad_alpha.select(dim, first).copy_(grad.select(dim, first))
        if n_others:
            transposed_scan(
                grad.narrow(dim, read, n_others),
                beta.narrow(dim, readers, n_others),
                y.narrow(dim, read, n_others),
                initial=grad.select(dim, first),
                reverse=not reverse,
                time_dim=dim,
                out=(
                    grad_alpha.narrow(dim, read, n_others),
                    None if grad_beta is None else grad_beta.narrow(dim, readers, n_others),
                ),
            )
        beta, mu = beta.select(dim, last), grad_alpha.select(dim, last)
        if grad_beta is not None:
            at_edge = grad_beta.select(dim, last)
            if initial is None:
                at_edge.zero_()
            else:
                at_edge.copy_(_Product.forward(mu, _readable(initial, beta == 0), True))
        return grad_alpha, grad_beta, _Product.forward(beta, mu, True) if wants_initial else None


def joined(row: torch.Tensor, x: torch.Tensor, dim: int, in_front: bool) -> torch.Tensor:
    """One more step in front of x or behind it."""
    row = row.unsqueeze(dim)
    return torch.cat([row, x] if in_front else [x, row], dim)


def scaled(factor: float | torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """factor * x, where a zero factor does not read x."""
    if not isinstance(factor, torch.Tensor):
        factor = x.new_full((), factor).expand(x.shape)
    return _Product.apply(factor, x, False)


def quotient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _Quotient.apply(x, y)


def exponential(x: torch.Tensor) -> torch.Tensor:
    return _Exponential.apply(x)


def clipped(x: torch.Tensor, bar: float | torch.Tensor) -> torch.Tensor:
    """min(x, bar), but NaN stays visible; where the bar clips, the gradient is the bar's."""
    return torch.where(x > bar, bar, x)


def scan(
    alpha: torch.Tensor, beta: float | torch.Tensor, initial: torch.Tensor | None, dim: int, reverse: bool
) -> torch.Tensor:
    """y[t] = α[t] + β[t] y[t+1], or y[t-1] where not `reverse`; without `initial`, the edge's β is not read."""
    if not isinstance(beta, torch.Tensor):
        beta = alpha.new_full((), beta).expand(alpha.shape)
    return _Scan.apply(alpha, beta, initial, dim, reverse)


def one_scan(*arguments: Any) -> tuple[torch.Tensor]:
    """`scan` of arguments that were one's before, outside of all transforms."""
    return (_Scan.apply_untransformed(*arguments),)
