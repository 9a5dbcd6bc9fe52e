"""Every other estimator against its reference loop, its identities and an independent second form, on both backends."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from windows import SMALL_CONFIGS, assert_result, examples, windows

import rl_triton as rlt
from rl_triton import reference
from rl_triton._config import configured
from rl_triton.testing import assert_close, make_rollout

NAN, INF = float("nan"), float("inf")


class Op:
    """How a drawn window becomes the arguments of one op: what it lacks is dropped, what it needs is drawn."""

    def __init__(self, name, drop=(), draw=None, carries=True):
        self.name, self.drop, self.carries = name, drop, carries
        self.draw = draw or (lambda data, tensors, options, dtype: None)

    def __repr__(self):
        return self.name

    def arguments(self, data, tensors, options, dtype):
        tensors, options = dict(tensors), dict(options)
        for name in self.drop:
            tensors.pop(name, None)
            options.pop(name, None)
        if not self.carries:
            options.pop("carry", None)
        self.draw(data, tensors, options, dtype)
        return tensors | options

    def both(self, arguments, return_carry=True):
        if self.carries and return_carry:
            arguments = arguments | {"return_carry": True}
        ours, theirs = getattr(rlt, self.name)(**arguments), getattr(reference, self.name)(**arguments)
        if not (self.carries and return_carry):
            ours, theirs = (ours, ()), (theirs, ())
        return [flatten(x) for x in ours], [flatten(x) for x in theirs]


def flatten(x):
    return list(x) if isinstance(x, tuple) else [x]


def like(tensors, data, scale=1.0, actions=None):
    shape = list(tensors["rewards"].shape) + ([actions] if actions else [])
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    rewards = tensors["rewards"]
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(rewards.dtype).to(rewards.device)


def draw_vtrace(data, tensors, options, dtype):
    kind = data.draw(st.sampled_from(["log_rhos", "log_probs"]))
    if kind == "log_rhos":
        tensors["log_rhos"] = like(tensors, data)
    else:
        tensors["target_log_probs"], tensors["behavior_log_probs"] = like(tensors, data), like(tensors, data)
    for bar in ("rho_bar", "c_bar", "pg_rho_bar"):
        options[bar] = data.draw(st.sampled_from([1.0, 0.7, 2.0, INF]))
    poison_gaps(tensors)


def draw_retrace(data, tensors, options, dtype):
    n_actions = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8, 18]))
    next_values = tensors.pop("next_values", None)
    if data.draw(st.booleans()):
        tensors["expected_next_q"] = like(tensors, data) if next_values is None else next_values
    else:
        tensors["next_q_values"] = like(tensors, data, actions=n_actions)
        tensors["next_policy_probs"] = like(tensors, data, actions=n_actions).softmax(-1)
    options["trace"] = data.draw(st.sampled_from(["retrace", "tree_backup", "importance_sampling", "q_lambda"]))
    kind = data.draw(st.sampled_from(["none", "log_rhos", "taken", "all"]))
    if kind == "log_rhos":
        tensors["log_rhos"] = like(tensors, data, 0.3)
    elif kind != "none":
        actions = n_actions if kind == "all" else None
        for name in ("policy_probs", "behavior_probs"):
            probs = like(tensors, data, actions=actions)
            tensors[name] = probs.softmax(-1) if actions else 0.5 + 0.5 * probs.sigmoid()
    if options["trace"] == "tree_backup" and "policy_probs" not in tensors:
        tensors["policy_probs"] = like(tensors, data).sigmoid()
    if kind == "all":
        tensors["actions"] = like(tensors, data, 3.0).abs().long() % n_actions
    for bar in ("rho_bar", "c_bar"):
        options[bar] = data.draw(st.sampled_from([1.0, 0.7, 2.0]))
    if "carry" in options:
        options["carry"] = (options["carry"], 2 * options["carry"])
    poison_gaps(tensors)


def poison_gaps(tensors):
    """An invalid row may hold NaN anywhere but in its flags and in V of a successor that its flag asks for."""
    if "valid" in tensors:
        for name in ("q_values", "log_rhos", "target_log_probs", "behavior_log_probs"):
            if name in tensors:
                tensors[name] = tensors[name].masked_fill(tensors["valid"] == 0, NAN)


def draw_q(data, tensors, options, dtype):
    tensors["q_values"] = tensors.pop("values")
    options.pop("last_values", None)
    tensors.pop("bootstrap_values", None)
    draw_retrace(data, tensors, options, dtype)


def draw_td_lambda(data, tensors, options, dtype):
    if "next_values" in tensors and data.draw(st.booleans()):
        tensors["values"] = None


def draw_n_step(data, tensors, options, dtype):
    if "next_values" in tensors and data.draw(st.booleans()):
        tensors["values"] = None
    options["n"] = data.draw(st.sampled_from([1, 2, 3, 5, 16, 17, 20, 50]))


OPS = [
    Op("discounted_returns", drop=("values", "lambda_")),
    Op("td_lambda_returns", draw=draw_td_lambda),
    Op("n_step_returns", drop=("lambda_",), draw=draw_n_step, carries=False),
    Op("vtrace", draw=draw_vtrace),
    Op("retrace", draw=draw_q),
]


@settings(max_examples=examples(60))
@given(data=st.data())
@pytest.mark.parametrize("op", OPS, ids=repr)
def test_matches_reference(op, data, backend):
    tensors, options, dtype = data.draw(windows(device=backend.device, max_steps=24, max_rows=4))
    arguments = op.arguments(data, tensors, options, dtype)
    with configured(data.draw(st.sampled_from(SMALL_CONFIGS))):
        (results, carry), (expected, expected_carry) = op.both(arguments)
    for k, (actual, want) in enumerate(zip(results, expected, strict=True)):
        assert actual.shape == tensors["rewards"].shape
        assert_result(actual, want, dtype, f"result {k}")
    for k, (actual, want) in enumerate(zip(carry, expected_carry, strict=True)):
        assert_result(actual, want, dtype, f"carry {k}")


@settings(max_examples=examples(60))
@given(data=st.data())
@pytest.mark.parametrize("op", ["accumulating", "replacing", "cumsum"])
def test_forward_ops_match_reference(op, data, backend):
    tensors, options, dtype = data.draw(windows(device=backend.device, max_steps=24, max_rows=4))
    done = tensors["terminated"]
    x, rows = tensors["rewards"], list(done.select(options["time_dim"], 0).shape)
    arguments = {"time_dim": options["time_dim"], "flags_at": options.get("flags_at", "end"), "return_final": True}
    if op == "replacing":
        x = torch.where(x > 0.5, x, 0.0)
    if data.draw(st.booleans()):
        n_features = data.draw(st.integers(1, 3))
        x = torch.stack([x * (k + 1) for k in range(n_features)], dim=-1)
        rows = [*rows, n_features]
    if data.draw(st.booleans()):
        arguments["initial"] = torch.ones(rows, dtype=dtype, device=backend.device)
    if "valid" in tensors:
        arguments["valid"] = tensors["valid"]
    name = "episodic_cumsum" if op == "cumsum" else "eligibility_traces"
    if op != "cumsum":
        arguments |= {"kind": op, "gamma": options["gamma"], "lambda_": options["lambda_"]}
    with configured(data.draw(st.sampled_from(SMALL_CONFIGS))):
        result, final = getattr(rlt, name)(x, done, **arguments)
    expected, expected_final = getattr(reference, name)(x, done, **arguments)
    assert result.shape == x.shape
    assert_result(result, expected, dtype)
    assert_result(final, expected_final, dtype, "final")


# ---------------------------------------------------------------------------------- a second form, from the definition


def window_of(rollout, n, t):
    """The steps from t to the end of its episode or of the window, and the value beyond."""
    n_steps = rollout["rewards"].shape[1]
    for k in range(t, n_steps):
        if rollout["terminated"][n, k]:
            return range(t, k + 1), 0.0
        if rollout["truncated"][n, k]:
            return range(t, k + 1), rollout["bootstrap_values"][n, k].item()
    return range(t, n_steps), rollout["last_values"][n].item()


def v_next(rollout, n, t):
    steps, beyond = window_of(rollout, n, t)
    return beyond if len(steps) == 1 else rollout["values"][n, t + 1].item()


def per_step(rollout, f):
    n_rows, n_steps = rollout["rewards"].shape
    return torch.tensor([[f(n, t) for t in range(n_steps)] for n in range(n_rows)], dtype=torch.float64)


@pytest.fixture
def rollout():
    return make_rollout(3, 18, truncated=0.15, dtype=torch.float64)


def on(device, rollout):
    return {k: x.to(device) for k, x in rollout.items()}


def n_step(rollout, n, t, m, gamma):
    steps, beyond = window_of(rollout, n, t)
    taken = steps[:m]
    v = beyond if len(taken) == len(steps) else rollout["values"][n, t + m].item()
    return sum(gamma**k * rollout["rewards"][n, s].item() for k, s in enumerate(taken)) + gamma ** len(taken) * v


def without(rollout, *names):
    return {k: x for k, x in rollout.items() if k not in names}


def test_discounted_is_a_sum(backend, rollout):
    expected = per_step(rollout, lambda n, t: n_step(rollout, n, t, 10**6, 0.9))
    ours = rlt.discounted_returns(**on(backend.device, without(rollout, "values")), gamma=0.9)
    assert_result(ours, expected, torch.float64)


@pytest.mark.parametrize("m", [1, 2, 5, 17, 18, 100])
def test_n_step_is_a_sum(backend, rollout, m):
    expected = per_step(rollout, lambda n, t: n_step(rollout, n, t, m, 0.9))
    assert_result(rlt.n_step_returns(**on(backend.device, rollout), n=m, gamma=0.9), expected, torch.float64)


@pytest.mark.parametrize("lambda_", [0.0, 0.6, 1.0])
def test_td_lambda_is_a_mixture_of_n_step_returns(backend, rollout, lambda_):
    """Sutton & Barto 2018, eq. 12.3."""

    def mixture(n, t):
        length = len(window_of(rollout, n, t)[0])
        weights = [(1 - lambda_) * lambda_ ** (m - 1) for m in range(1, length)] + [lambda_ ** (length - 1)]
        return sum(w * n_step(rollout, n, t, m, 0.9) for m, w in enumerate(weights, start=1))

    ours = rlt.td_lambda_returns(**on(backend.device, rollout), gamma=0.9, lambda_=lambda_)
    assert_result(ours, per_step(rollout, mixture), torch.float64)


def corrections(rollout, n, t, gamma, rho, c, delta):
    steps, _ = window_of(rollout, n, t)
    return sum(gamma ** (s - t) * math.prod(c(n, k) for k in range(t, s)) * rho(n, s) * delta(n, s) for s in steps)


def test_vtrace_is_a_sum(backend, rollout):
    """Espeholt et al. 2018, eq. 1, and the advantage of section 4.2."""
    gamma, lambda_, bars = 0.9, 0.8, (0.9, 0.7, 1.3)
    log_rhos = torch.randn(3, 18, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def clip(bar):
        return lambda n, t: min(bar, math.exp(log_rhos[n, t]))

    rho, c, pg_rho = map(clip, bars)

    def delta(n, t):
        return rollout["rewards"][n, t].item() + gamma * v_next(rollout, n, t) - rollout["values"][n, t].item()

    def target(n, t):
        v = rollout["values"][n, t].item()
        return v + corrections(rollout, n, t, gamma, rho, lambda n, k: lambda_ * c(n, k), delta)

    def advantage(n, t):
        steps, beyond = window_of(rollout, n, t)
        x = beyond if len(steps) == 1 else target(n, t + 1)
        return pg_rho(n, t) * (rollout["rewards"][n, t].item() + gamma * x - rollout["values"][n, t].item())

    result = rlt.vtrace(
        **on(backend.device, rollout), log_rhos=log_rhos.to(backend.device), gamma=gamma, lambda_=lambda_,
        rho_bar=bars[0], c_bar=bars[1], pg_rho_bar=bars[2],
    )  # fmt: skip
    assert_result(result.targets, per_step(rollout, target), torch.float64)
    assert_result(result.advantages, per_step(rollout, advantage), torch.float64)


@pytest.mark.parametrize("trace", ["retrace", "tree_backup", "importance_sampling", "q_lambda"])
def test_retrace_is_a_sum(backend, rollout, trace):
    """Munos et al. 2016, eq. 3: Σ_s γ^(s-t) (Π_{t<k<=s} c[k]) δ[s]."""
    gamma, lambda_, generator = 0.9, 0.8, torch.Generator().manual_seed(2)
    q, expectation = (torch.randn(3, 18, dtype=torch.float64, generator=generator) for _ in range(2))
    pi, mu = (0.1 + torch.rand(3, 18, dtype=torch.float64, generator=generator) for _ in range(2))

    def c(n, t):
        w = (pi[n, t] / mu[n, t]).item()
        kinds = {"retrace": lambda_ * min(1.0, w), "tree_backup": lambda_ * pi[n, t].item()}
        return kinds.get(trace, w if trace == "importance_sampling" else lambda_)

    def delta(n, t):
        e = 0.0 if rollout["terminated"][n, t] else expectation[n, t].item()
        return rollout["rewards"][n, t].item() + gamma * e - q[n, t].item()

    def target(n, t):
        d = corrections(rollout, n, t, gamma, lambda n, s: 1.0, lambda n, k: c(n, k + 1), delta)
        return q[n, t].item() + d

    def advantage(n, t):
        steps, _ = window_of(rollout, n, t)
        x = (
            delta(n, t)
            if len(steps) == 1
            else rollout["rewards"][n, t].item() + gamma * target(n, t + 1) - q[n, t].item()
        )
        return min(1.0, (pi[n, t] / mu[n, t]).item()) * x

    given = {"rewards": rollout["rewards"], "q_values": q, "expected_next_q": expectation, "policy_probs": pi}
    given |= {"behavior_probs": mu, "terminated": rollout["terminated"], "truncated": rollout["truncated"]}
    result = rlt.retrace(**on(backend.device, given), gamma=gamma, lambda_=lambda_, trace=trace)
    assert_result(result.targets, per_step(rollout, target), torch.float64)
    assert_result(result.advantages, per_step(rollout, advantage), torch.float64)


def test_traces_and_sums_are_sums(backend, rollout):
    x, done = rollout["rewards"], rollout["terminated"]

    def since_start(n, t):
        first = max((k + 1 for k in range(t) if done[n, k]), default=0)
        return range(first, t + 1)

    traces = per_step(rollout, lambda n, t: sum(0.72 ** (t - k) * x[n, k].item() for k in since_start(n, t)))
    sums = per_step(rollout, lambda n, t: sum(x[n, k].item() for k in since_start(n, t)))
    given = x.to(backend.device), done.to(backend.device)
    assert_result(rlt.eligibility_traces(*given, gamma=0.9, lambda_=0.8), traces, torch.float64)
    assert_result(rlt.episodic_cumsum(*given), sums, torch.float64)


# --------------------------------------------------------------------------------------------- identities across ops


def test_identities_across_ops(backend):
    rollout = make_rollout(4, 40, truncated=0.1, dtype=torch.float64, device=backend.device)
    options = {"gamma": 0.93}
    zeros = torch.zeros_like(rollout["rewards"])

    def close(a, b):
        assert_close(a, b, max_error=1e-13)

    monte_carlo = rlt.discounted_returns(**without(rollout, "values"), **options)
    one = rlt.gae(**rollout, **options, lambda_=1.0)
    close(one.advantages + rollout["values"], monte_carlo)
    on_policy = rlt.vtrace(**rollout, **options, log_rhos=zeros)
    close(on_policy.targets, monte_carlo)
    close(on_policy.targets, rlt.n_step_returns(**rollout, **options, n=40))
    some = rlt.gae(**rollout, **options, lambda_=0.7)
    td = rlt.td_lambda_returns(**rollout, **options, lambda_=0.7)
    close(td, some.returns)
    close(td, some.advantages + rollout["values"])
    close(rlt.vtrace(**rollout, **options, log_rhos=zeros, lambda_=0.7).targets, td)
    close(rlt.n_step_returns(**rollout, **options, n=1), rlt.td_lambda_returns(**rollout, **options, lambda_=0.0))
    # Retrace with one action and on policy is TD(λ) of Q, where V of a successor is Q of the next row.
    shifted = torch.cat([rollout["values"][:, 1:], rollout["last_values"][:, None]], dim=1)
    following = torch.where(rollout["truncated"] != 0, rollout["bootstrap_values"], shifted)
    single = torch.ones(4, 40, 1, dtype=torch.float64, device=backend.device)
    flags = {k: rollout[k] for k in ("rewards", "terminated", "truncated")}
    q = rlt.retrace(
        **flags, q_values=rollout["values"], next_q_values=following[..., None], next_policy_probs=single,
        policy_probs=single, behavior_probs=single, actions=zeros.long(), lambda_=0.7, **options,
    )  # fmt: skip
    close(q.targets, td)


@pytest.mark.parametrize("op", OPS, ids=repr)
def test_scalar_gamma_is_a_constant_gamma(op, backend):
    tensors, options = basic(op, backend.device)
    scalar = flatten(getattr(rlt, op.name)(**tensors, **options, gamma=0.5))
    for shape in ((), (1, 1), (3, 20)):
        gamma = torch.full(shape, 0.5, device=backend.device)
        for a, b in zip(scalar, flatten(getattr(rlt, op.name)(**tensors, **options, gamma=gamma)), strict=True):
            assert_close(a, b, max_error=1e-6)


def basic(op, device, dtype=torch.float32, **changes):
    """A small plain call of an op."""
    rollout = make_rollout(3, 20, truncated=0.1, device=device, dtype=dtype, **changes)
    options = {}
    if op.name == "retrace":
        rollout["q_values"] = rollout.pop("values")
        rollout["expected_next_q"] = torch.where(rollout["truncated"] != 0, rollout.pop("bootstrap_values"), 0.5).to(
            dtype
        )
        rollout.pop("last_values")
        rollout["log_rhos"] = torch.full_like(rollout["rewards"], 0.1)
    elif op.name == "vtrace":
        rollout["log_rhos"] = torch.full_like(rollout["rewards"], 0.1)
    elif op.name == "discounted_returns":
        rollout.pop("values")
    elif op.name == "n_step_returns":
        options["n"] = 4
    return rollout, options


@pytest.mark.parametrize("op", OPS, ids=repr)
def test_layouts_agree(op, backend):
    tensors, options = basic(op, backend.device)
    rows = flatten(getattr(rlt, op.name)(**tensors, **options))
    turned = {k: x.t().contiguous() if x.dim() == 2 else x for k, x in tensors.items()}
    columns = flatten(getattr(rlt, op.name)(**turned, **options, time_dim=0))
    for a, b in zip(rows, columns, strict=True):
        assert_close(b.t(), a, max_error=2e-6)


@pytest.mark.parametrize("op", OPS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(op, dtype, backend):
    tensors, options = basic(op, backend.device, dtype)
    (results, _), (expected, _) = op.both(tensors | options, return_carry=False)
    for actual, want in zip(results, expected, strict=True):
        assert_result(actual, want, dtype)


@pytest.mark.parametrize("op", OPS, ids=repr)
def test_single_step_both_flags_and_empty(op, backend):
    for n_steps in (1, 0):
        tensors, options = basic(op, backend.device)
        tensors = {k: x[:, :n_steps] if x.dim() == 2 else x for k, x in tensors.items()}
        for flags in itertools.product((0.0, 1.0), repeat=2):
            for name, flag in zip(("terminated", "truncated"), flags, strict=True):
                tensors[name] = torch.full_like(tensors["rewards"], flag)
            name = "expected_next_q" if op.name == "retrace" else "bootstrap_values"
            read = flags == (0.0, 1.0) or (op.name == "retrace" and flags == (0.0, 0.0))
            tensors[name] = torch.full_like(tensors["rewards"], 5.0 if read else NAN)
            (results, carry), (expected, expected_carry) = op.both(tensors | options)
            for actual, want in zip(results + carry, expected + expected_carry, strict=True):
                assert actual.shape == want.shape
                assert_result(actual, want, torch.float32)


@pytest.mark.parametrize("op", OPS, ids=repr)
def test_out(op, backend):
    tensors, options = basic(op, backend.device)
    expected = flatten(getattr(rlt, op.name)(**tensors, **options))
    out = tuple(torch.full_like(x, NAN) for x in expected)
    result = getattr(rlt, op.name)(**tensors, **options, out=out if len(out) > 1 else out[0])
    for a, b, c in zip(flatten(result), out, expected, strict=True):
        assert a is b
        assert torch.equal(a, c)


# ------------------------------------------------------------------------------------------------- chains and gaps


@settings(max_examples=examples(40))
@given(data=st.data())
@pytest.mark.parametrize("op", [op for op in OPS if op.carries], ids=repr)
def test_two_windows_chained_are_one(op, data, backend):
    """At every cut position, with flags at the seam."""
    n_steps = data.draw(st.integers(2, 12))
    at = data.draw(st.integers(1, n_steps - 1))
    rollout = make_rollout(
        3, n_steps, terminated=0.3, truncated=0.3, dtype=torch.float64, device=backend.device, poison=False,
        seed=data.draw(st.integers(0, 2**31)),
    )  # fmt: skip
    last = rollout.pop("last_values")
    options = {"gamma": 0.9} | ({} if op.name == "discounted_returns" else {"lambda_": 0.8})
    if op.name == "discounted_returns":
        seam_values = rollout.pop("values")[:, at] * NAN  # not read: the carry is all there is
    elif op.name == "retrace":
        rollout["q_values"] = rollout.pop("values")
        rollout["expected_next_q"] = rollout.pop("bootstrap_values")
    if op.name in ("vtrace", "retrace"):
        rollout["log_rhos"] = 0.2 * rollout["rewards"]
    if op.name in ("td_lambda_returns", "vtrace"):
        seam_values = rollout["values"][:, at]
    edges = ({}, {}) if op.name == "retrace" else ({"last_values": last}, {"last_values": seam_values})
    function = getattr(rlt, op.name)
    whole, whole_carry = function(**rollout, **edges[0], **options, return_carry=True)
    early, late = ({k: v[:, part] for k, v in rollout.items()} for part in (slice(at), slice(at, None)))
    with configured(data.draw(st.sampled_from(SMALL_CONFIGS))):
        late_result, carry = function(**late, **edges[0], **options, return_carry=True)
        early_result, early_carry = function(**early, **edges[1], **options, carry=carry, return_carry=True)
    for a, b, c in zip(*map(flatten, (early_result, late_result, whole)), strict=True):
        assert_result(torch.cat([a, b], dim=1), c, torch.float64)
    for a, b in zip(flatten(early_carry), flatten(whole_carry), strict=True):
        assert_result(a, b, torch.float64, "carry")


@settings(max_examples=examples(40))
@given(data=st.data())
def test_forward_windows_chained_are_one(data, backend):
    n_steps = data.draw(st.integers(2, 12))
    at = data.draw(st.integers(1, n_steps - 1))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    x = torch.randn(3, n_steps, dtype=torch.float64, generator=generator).to(backend.device)
    done, valid = (torch.rand(3, n_steps, generator=generator).to(backend.device) < p for p in (0.3, 0.7))
    options = {"flags_at": data.draw(st.sampled_from(["end", "start"])), "return_final": True}
    for function in (rlt.eligibility_traces, rlt.episodic_cumsum):
        whole, whole_final = function(x, done, valid=valid, **options)
        first, state = function(x[:, :at], done[:, :at], valid=valid[:, :at], **options)
        second, final = function(x[:, at:], done[:, at:], valid=valid[:, at:], initial=state, **options)
        assert_result(torch.cat([first, second], dim=1), whole, torch.float64)
        assert_result(final, whole_final, torch.float64)


# ------------------------------------------------------------------------------- points that libraries get wrong today


def vtrace_row(backend, log_rhos, **options):
    x = torch.ones(1, len(log_rhos), device=backend.device)
    log_rhos = torch.tensor([log_rhos], device=backend.device)
    given = {"last_values": None, "gamma": 0.5} | options
    return rlt.vtrace(x, 0 * x, torch.zeros_like(x), log_rhos=log_rhos, **given)


def test_ratios_out_of_range(backend):
    """Overflow clips to the bar, probability zero stays zero, NaN stays visible and in its own episode."""
    result = vtrace_row(backend, [1000.0, -1000.0, INF, -INF, 0.0])
    assert result.targets.tolist() == [[1.0, 0.0, 1.0, 0.0, 1.0]]
    assert result.advantages.tolist() == [[1.0, 0.0, 1.0, 0.0, 1.0]]
    x = torch.ones(2, 6, device=backend.device)
    ends = torch.zeros_like(x)
    ends[:, 1] = 1
    log_rhos = torch.zeros_like(x)
    log_rhos[0, 3] = NAN
    result = rlt.vtrace(x, 0 * x, ends, log_rhos=log_rhos, last_values=None, gamma=0.5)
    assert result.targets.isnan().nonzero().tolist() == [[0, 2], [0, 3]]
    assert result.advantages.isnan().nonzero().tolist() == [[0, 2], [0, 3]]


def test_behavior_probability_zero_is_an_infinite_ratio(backend):
    """Clipped to its bar; 0/0 stays visible."""
    x = torch.ones(1, 3, device=backend.device)
    probs = {"policy_probs": torch.tensor([[0.5, 0.0, 0.5]], device=backend.device), "behavior_probs": x * 0}
    result = rlt.retrace(x, 0 * x, 0 * x, expected_next_q=0 * x, gamma=0.5, **probs)
    expected = torch.tensor([[NAN, 1.5, 1.0]]), torch.tensor([[1.75, NAN, 1.0]])
    for actual, want in zip(result, expected, strict=True):
        torch.testing.assert_close(actual.cpu(), want, equal_nan=True)


def test_actions_of_probability_zero_are_not_read(backend):
    q = torch.tensor([[[1.0, NAN, 3.0], [INF, 2.0, -INF]]], device=backend.device)
    p = torch.tensor([[[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]], device=backend.device)
    x = torch.zeros(1, 2, device=backend.device)
    result = rlt.retrace(x, x, x, next_q_values=q, next_policy_probs=p, gamma=1.0)
    assert result.targets.tolist() == [[2.0 + 2.0, 2.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("n_actions", [1, 2, 3, 4, 6, 8, 18, 130])
def test_actions_anywhere_in_memory(n_actions, dtype, backend):
    """Neighbouring actions are read together only where they lie so; an odd place after an even one is no exception.
    Few are read by the scan, many by a kernel before it, more than 128 in several turns."""
    generator = torch.Generator().manual_seed(n_actions)
    n, n_steps = 3, 9
    memory = {name: torch.randn(n * n_steps * n_actions * 2 + 16, generator=generator).to(dtype) for name in "qp"}
    x = {name: torch.randn(n, n_steps, generator=generator).to(dtype) for name in ("rewards", "q_values")}
    x["terminated"] = torch.rand(n, n_steps, generator=generator) < 0.1
    starts = ((0, 1), (1, 1), (2, 1), (8, 1), (0, 2), (0, 1))
    for start, between in starts[:2] if backend.slow and dtype != torch.float32 else starts:
        place = (n, n_steps, n_actions), (n_steps * n_actions * between, n_actions * between, between), start
        q, p = (memory[name].to(backend.device).as_strided(*place) for name in "qp")
        first = q.movedim(-1, 0).contiguous().movedim(0, -1)  # the action axis before the others
        for values, probs in ((q, p), (q.transpose(0, 1).contiguous().transpose(0, 1), p), (first, p), (first, first)):
            given = {name: y.to(backend.device) for name, y in x.items()}
            given |= {"next_q_values": values, "next_policy_probs": probs}
            result = rlt.retrace(**given, gamma=0.9)
            expected = reference.retrace(**{name: y.cpu().double() for name, y in given.items()}, gamma=0.9)
            for actual, want in zip(result, expected, strict=True):
                assert_close(actual, want, max_error={torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 3e-2))


def test_more_actions_apart_than_32_bits_tell(backend):
    memory = torch.zeros(2**31 + 8, dtype=torch.uint8, device=backend.device)
    q = memory.as_strided((2, 4, 3), (4, 1, 2**30))
    q.copy_(torch.arange(24).view(2, 4, 3))
    x = torch.zeros(2, 4, device=backend.device)
    p = torch.tensor([0.5, 0.25, 0.25], device=backend.device).expand(2, 4, 3)
    result = rlt.retrace(x, x, x, next_q_values=q, next_policy_probs=p, gamma=1.0, lambda_=0.0)
    expected = (q.cpu().double() * p.cpu().double()).sum(-1)
    assert torch.equal(result.targets.cpu().double(), expected)


def test_reference_rounds_no_lambda():
    """1 - λ of a tensor in low precision has no error of its own, as in the kernels."""
    x = torch.ones(1, 3)
    for dtype in (torch.float32, torch.bfloat16):
        lambda_ = torch.full((1, 3), 0.1, dtype=dtype)
        options = {"last_values": torch.ones(1), "gamma": 0.9}
        result = reference.td_lambda_returns(x, x, torch.zeros(1, 3), lambda_=lambda_, **options)
        wanted = reference.td_lambda_returns(x, x, torch.zeros(1, 3), lambda_=float(lambda_[0, 0]), **options)
        torch.testing.assert_close(result, wanted, rtol=1e-15, atol=0)


def test_replacing_traces(backend):
    x = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0]], device=backend.device)
    z = rlt.eligibility_traces(x, torch.zeros_like(x), gamma=0.5, lambda_=1.0, kind="replacing")
    assert z.tolist() == [[1.0, 0.5, 1.0, 0.5, 0.25]]


@pytest.mark.parametrize("config", SMALL_CONFIGS, ids=["axis 1", "axis 0", "split"])
@pytest.mark.parametrize("op", OPS, ids=repr)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_containment(op, bad, config, backend):
    """A bad reward reaches its own episode backwards, and nobody else."""
    tensors, options = basic(op, backend.device, terminated=0.0, poison=False)
    tensors["terminated"][:, 7] = True
    tensors["truncated"][:] = False
    tensors["truncated"][:, 14] = True
    if op.name == "n_step_returns":
        options["n"] = 10
    with configured(config):
        clean = flatten(getattr(rlt, op.name)(**tensors, **options))
        tensors["rewards"][1, 11] = bad
        dirty = flatten(getattr(rlt, op.name)(**tensors, **options))
    for a, b in zip(clean, dirty, strict=True):
        touched = ~torch.isfinite(b)
        assert touched[1, 11]
        assert not touched[[0, 2]].any()
        assert not touched[1, :8].any()
        assert not touched[1, 12:].any()
        assert torch.equal(a[~touched], b[~touched])


# ------------------------------------------------------------------------- (α, β) of the docstrings, by affine_scan


def test_coefficients_by_affine_scan(backend):
    """docs/math.md gives each op as y[t] = α[t] + β[t] y[t±1]: built in float64 and run through the public scan."""
    rollout = make_rollout(3, 30, truncated=0.1, dtype=torch.float64, device=backend.device)
    r, v, term, trunc = (rollout[k] for k in ("rewards", "values", "terminated", "truncated"))
    g, l = 0.9, 0.8
    shifted = torch.cat([v[:, 1:], rollout["last_values"][:, None]], dim=1)
    v1 = torch.where(term, 0.0, torch.where(trunc, rollout["bootstrap_values"], shifted))
    cut = term | trunc
    cut[:, -1] = True
    go_on = torch.where(cut, 0.0, 1.0).double()
    close = dict(max_error=1e-13)

    assert_close(rlt.affine_scan(r + g * v1 - v, g * l * go_on), rlt.gae(**rollout, gamma=g, lambda_=l)[0], **close)
    returns = rlt.discounted_returns(**without(rollout, "values"), gamma=g)
    assert_close(rlt.affine_scan(torch.where(cut, r + g * v1, r), g * go_on), returns, **close)
    returns = rlt.td_lambda_returns(**rollout, gamma=g, lambda_=l)
    alpha = r + g * torch.where(cut, v1, (1 - l) * v1)
    assert_close(rlt.affine_scan(alpha, g * l * go_on), returns, **close)

    log_rhos = 0.5 * r
    w = log_rhos.exp()
    rho, c = w.clamp(max=1.0), l * w.clamp(max=0.8)
    d = rlt.affine_scan(rho * (r + g * v1 - v), g * c * go_on)
    result = rlt.vtrace(**rollout, log_rhos=log_rhos, gamma=g, lambda_=l, c_bar=0.8)
    assert_close(v + d, result.targets, **close)

    e = torch.where(term, 0.0, torch.where(trunc, rollout["bootstrap_values"], 0.3 * r))
    u = rlt.affine_scan(c * (r + g * e - v), g * c * go_on)
    u_next = torch.cat([u[:, 1:], torch.zeros_like(u[:, :1])], dim=1)
    d = r + g * e - v + g * go_on * u_next
    flags = dict(rewards=r, q_values=v, terminated=term, truncated=trunc)
    result = rlt.retrace(**flags, expected_next_q=e, log_rhos=log_rhos, gamma=g, lambda_=l, c_bar=0.8)
    assert_close(v + d, result.targets, **close)

    before = torch.cat([torch.zeros_like(term[:, :1]), term[:, :-1]], dim=1)
    keep = torch.where(before, 0.0, 1.0).double()
    z = rlt.affine_scan(r, g * l * keep, reverse=False)
    assert_close(z, rlt.eligibility_traces(r, term, gamma=g, lambda_=l), **close)
    x = torch.where(r > 0.5, r, 0.0)
    z = rlt.affine_scan(x, g * l * keep * (x == 0), reverse=False)
    assert_close(z, rlt.eligibility_traces(x, term, gamma=g, lambda_=l, kind="replacing"), **close)
    assert_close(rlt.affine_scan(r, keep, reverse=False), rlt.episodic_cumsum(r, term), **close)
