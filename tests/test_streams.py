"""Streams, devices and their guards."""

import threading

import pytest
import torch
from calls import FUNCTIONS, NAMES, calls, flat

from rl_triton.testing import assert_close

pytestmark = pytest.mark.gpu_only
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def equal(results, expected):
    return all(torch.equal(x, y) for x, y in zip(flat(results), flat(expected), strict=True))


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_calls_run_on_the_current_stream(name, differentiable):
    """The inputs arrive late, on the call's stream alone: a launch on any other stream would meet the old ones."""
    late = calls(64, 32, "cuda", seed=1)[name]
    expected = late(differentiable=differentiable)
    call = calls(64, 32, "cuda")[name]
    before = {k: x.clone() for k, x in call.tensors.items()}
    stream = torch.cuda.Stream()
    for _ in range(3):  # the ordinary path, and plans
        for k, x in before.items():
            call.tensors[k].copy_(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            for k, x in late.tensors.items():
                call.tensors[k].copy_(x, non_blocking=True)
            result = call(differentiable=differentiable)
            assert torch.cuda.current_stream() == stream
        stream.synchronize()
        assert equal(result, expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_do_not_wait(name):
    """Neither a call nor its gradient waits for the device: the kernel that sleeps in front still does after it."""
    call = calls(64, 32, "cuda")[name]
    leaves = {k: x.clone().requires_grad_() for k, x in call.tensors.items() if x.is_floating_point()}

    def both():
        call()
        flat(call(**leaves, differentiable=True))[0].sum().backward()

    with torch.cuda.stream(torch.cuda.Stream()):
        both()  # compiles, and leaves memory to this stream
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(1_000_000_000)
        both()
        done.record()
        assert not done.query()
    torch.cuda.synchronize()


def test_each_thread_has_its_stream():
    windows = [calls(64, 256, "cuda", seed=seed)["vtrace"] for seed in range(4)]
    expected = [flat(call()) for call in windows]
    torch.cuda.synchronize()
    wrong = []

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                if not equal(windows[i](), expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ------------------------------------------------------------------------------------------------------- two devices


@needs_two
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_another_device(name, differentiable):
    """On cuda:1 while cuda:0 is current, between calls the other way round; the current device stays."""
    expected = [x.cpu() for x in flat(calls(64, 32, "cuda:0")[name](differentiable=differentiable))]
    for current, device in ((0, 1), (0, 0), (1, 0), (1, 1), (0, 1)):
        with torch.cuda.device(current):
            call = calls(64, 32, f"cuda:{device}")[name]
            for _ in range(3):
                results = flat(call(differentiable=differentiable))
                assert torch.cuda.current_device() == current
                assert all(x.device == torch.device("cuda", device) for x in results)
                assert equal([x.cpu() for x in results], expected)


@needs_two
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_on_another_device(name):
    found = []
    for device in ("cuda:0", "cuda:1"):
        call = calls(64, 32, device, torch.float64)[name]
        leaves = {k: x.requires_grad_() for k, x in call.tensors.items() if x.is_floating_point()}
        sum(x.square().sum() for x in flat(call(**leaves, differentiable=True))).backward()
        found.append([x.grad.cpu() for x in leaves.values()])
    assert torch.cuda.current_device() == 0
    for x, want in zip(*found, strict=True):
        assert_close(x, want, max_error=1e-12)


@needs_two
@pytest.mark.parametrize("name", FUNCTIONS)
def test_mixed_devices(name):
    call = calls(64, 32, "cuda:0")[name]
    call()
    first = next(iter(call.tensors))
    for k, x in call.tensors.items():
        device = "cuda:0" if k == first else "cuda:1"
        with pytest.raises(ValueError, match=rf"is on {device}, but .* must be on one device"):
            call(**{k: x.to("cuda:1")})


@needs_two
def test_streams_of_another_device():
    late, call = (calls(64, 32, "cuda:1", seed=seed)["gae"] for seed in (1, 0))
    expected = late()
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
    for _ in range(3):
        torch.cuda.synchronize(1)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            for k, x in late.tensors.items():
                call.tensors[k].copy_(x)
            with torch.cuda.device(0):
                result = call()
        stream.synchronize()
        assert equal(result, expected)
