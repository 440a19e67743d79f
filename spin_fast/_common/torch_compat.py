"""What is used of torch beyond its documented interface, all of it here. Tried on torch 2.13 alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

Function = TypeVar("Function", bound=Callable[..., Any])

# A context below autograd's dispatch keys: a call in it has none of the overhead of ``register_autograd``.
below_autograd = torch._C._AutoDispatchBelowAutograd

BatchNorm = torch.nn.modules.batchnorm._BatchNorm  # base of BatchNorm1d, BatchNorm2d, ...
Dropout = torch.nn.modules.dropout._DropoutNd  # base of Dropout, Dropout1d, AlphaDropout, ...


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is active."""
    if torch._C._are_functorch_transforms_active():
        return True
    return not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0


def is_batched(value: Tensor) -> bool:
    """Whether ``vmap`` maps over ``value``."""
    return torch._C._functorch.is_batchedtensor(value)


def constant_while_compiling(function: Function) -> Function:
    """``torch.compiler.assume_constant_result``, which would import the whole compiler with this package."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def assert_on_device(condition: Tensor, message: str) -> None:
    """Assert in an exported program, too."""
    torch._assert_async(condition, message)


def exported_long(values: Tensor) -> Tensor:
    """``Tensor.long``, which an exported program has as a check of the type where that is int64 already."""
    return torch.ops.aten._to_copy.default(values, dtype=torch.int64)


def parameters_by_name(module: nn.Module, prefix: str = "") -> dict[str, nn.Parameter]:
    """``dict(module.named_parameters(remove_duplicate=False))`` in a third of the time."""
    found = {}
    for name, value in module._parameters.items():
        if value is not None:
            found[prefix + name] = value
    for name, child in module._modules.items():
        if child is not None:
            found.update(parameters_by_name(child, f"{prefix}{name}."))
    return found


def is_evaluating(module: nn.Module) -> bool:
    """Whether no module in it is in training mode: what ``module.modules()`` tells more slowly."""
    return not module.training and all(child is None or is_evaluating(child) for child in module._modules.values())


def first_parameter(module: nn.Module) -> nn.Parameter | None:
    """``next(module.parameters(), None)``, which takes longer."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    of_children = (first_parameter(child) for child in module._modules.values() if child is not None)
    return next((parameter for parameter in of_children if parameter is not None), None)


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module runs hooks, forward or backward, that were registered on it."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def module_calls_are_observed() -> bool:
    """Whether hooks are registered for the calls of all modules (``register_module_forward_hook``, ...)."""
    return torch_module._has_any_global_hook()


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether a backward pass runs hooks of the parameter (``register_hook`` and others)."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def has_optimizer_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step runs hooks, of this optimiser or of all."""
    own: Iterable[Any] = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    every = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    return any((*own, *every))


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """As ``optimizer.step`` does: learning-rate schedulers ask for it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


ADAM_PIECES = 32
"""Of a parameter on a GPU: as many as one launch of torch's takes."""


def fused_adam(parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """The kernel of ``torch.optim.Adam(fused=True)`` for one parameter, whose ``step`` has been counted.

    A GPU updates 64 Ki values of a tensor on a single multiprocessor, so there it gets pieces, all in one launch.
    """
    beta1, beta2 = group["betas"]
    size = 1024 * -(-parameter.numel() // (1024 * ADAM_PIECES))

    def pieces(value: Tensor) -> tuple[Tensor, ...]:
        return value.split(size) if value.is_cuda else (value,)

    parameters = pieces(parameter)
    torch._fused_adam_(
        parameters,
        pieces(grad),
        pieces(state["exp_avg"]),
        pieces(state["exp_avg_sq"]),
        [],
        [state["step"]] * len(parameters),
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
