"""Gradients of entries that a call does not read, for every function and kind of argument.

Which these are is found by trying: an entry is unread if no result changes when it is NaN.
"""

import pytest
import torch
from calls import NAMES, calls, flat

NAN = float("nan")


def with_gaps(name, seed):
    """A call with steps that are no transition, where its function knows them."""
    call = calls(2, 6, dtype=torch.float64, seed=seed)[name]
    if "done" in call.tensors or "terminated" in call.tensors:
        shape = call.tensors["done" if "done" in call.tensors else "terminated"].shape
        generator = torch.Generator().manual_seed(seed)
        call.tensors["valid"] = torch.rand(shape, generator=generator) < 0.7
        flags = call.tensors.get("terminated", call.tensors.get("done"))
        flags |= torch.rand(shape, generator=generator) < 0.2
    return call


@pytest.mark.parametrize("name", NAMES)
def test_unread_entries_may_be_nan_and_have_no_gradient(name):
    found = 0
    for seed in range(3):
        call = with_gaps(name, seed)
        expected = flat(call())
        assert all(x.isfinite().all() for x in expected)
        leaves = {k: x.clone() for k, x in call.tensors.items() if x.is_floating_point()}
        unread = {k: torch.zeros(x.shape, dtype=torch.bool) for k, x in leaves.items()}
        for k, x in leaves.items():
            for i in range(x.numel()):
                spoilt = x.clone().flatten()
                spoilt[i] = NAN
                results = flat(call(**{k: spoilt.view(x.shape)}))
                unread[k].view(-1)[i] = all(torch.equal(y, want) for y, want in zip(results, expected, strict=True))
        found += sum(int(mask.sum()) for mask in unread.values())
        leaves = {k: x.masked_fill(unread[k], NAN).requires_grad_() for k, x in leaves.items()}
        assert all(torch.equal(y, want) for y, want in zip(flat(call(**leaves)), expected, strict=True))
        loss = sum((k + 1) * y.square().sum() for k, y in enumerate(flat(call(**leaves, differentiable=True))))
        loss.backward()
        for k, x in leaves.items():
            assert x.grad.isfinite().all(), k
            assert not x.grad[unread[k]].any(), k
    assert found or not any(flag in call.tensors for flag in ("done", "terminated"))
