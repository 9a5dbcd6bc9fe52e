"""`differentiable=True`: gradients against finite differences, and against autograd through plain loops written here
from the papers; what is not read has none; values are those of the ordinary call."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_estimators import OPS, Op, flatten
from windows import SMALL, assert_result, windows

import rl_triton as rlt
from rl_triton import _autograd, _backend, _cpu, _plan
from rl_triton._config import configured
from rl_triton.estimators.retrace import TRACES
from rl_triton.testing import assert_close

NAN, INF = float("nan"), float("inf")
BACKWARD_OPS = [Op("gae"), *OPS]
DOUBLE = dict(dtype=torch.float64)


def on_backends(name, everything, one):
    """Parametrize a test over `everything`, but over `one` alone in Triton's interpreter: what differs is the scan."""
    cases = {"cpu": everything, "triton": everything if torch.cuda.is_available() else [one]}
    pairs = [(backend, case) for backend, some in cases.items() for case in some]
    ids = [" ".join([backend, *([case] if isinstance(case, str) else case)]) for backend, case in pairs]
    return pytest.mark.parametrize(("backend", name), pairs, indirect=["backend"], ids=ids)


@pytest.fixture(autouse=True)
def small_tiles():
    with configured(SMALL):
        yield


# ------------------------------------------------------------------------------------------------- finite differences


def normal(*shape, seed=0):
    return torch.randn(*shape, **DOUBLE, generator=torch.Generator().manual_seed(seed))


def flags(*rows):
    return torch.tensor([[c == "1" for c in row] for row in rows])


ENDS = flags("010000", "000001")
CUTS = flags("000100", "010001")
# Gaps at the front, in the middle and at the end; flags on rows that are no transition, one of both kinds.
VALID = flags("011010", "110011")
GAP_ENDS = flags("100100", "000001")
GAP_CUTS = flags("000101", "001000")

WINDOWS = {
    "plain": ({}, {"terminated": ENDS}, ("last_values",)),
    "truncated": ({}, {"terminated": ENDS, "truncated": CUTS}, ("last_values", "bootstrap_values")),
    "next values": ({}, {"terminated": ENDS, "truncated": CUTS}, ("next_values",)),
    "gaps": ({}, {"terminated": GAP_ENDS, "truncated": GAP_CUTS, "valid": VALID}, ("last_values", "bootstrap_values")),
    "gaps, next values": ({}, {"terminated": GAP_ENDS, "truncated": GAP_CUTS, "valid": VALID}, ("next_values",)),
    "start flags": (
        {"flags_at": "start"},
        {"terminated": ENDS, "last_done": torch.tensor([True, False]), "valid": VALID},
        ("last_values",),
    ),
    "carry": ({}, {"terminated": ENDS & False, "truncated": CUTS}, ("last_values", "bootstrap_values", "carry")),
    "gaps, carry": ({}, {"terminated": GAP_ENDS & False, "valid": VALID}, ("last_values", "carry")),
    "tensor factors": ({}, {"terminated": ENDS}, ("last_values", "gamma", "lambda_")),
    "time first": ({"time_dim": 0}, {"terminated": ENDS, "truncated": CUTS}, ("last_values", "bootstrap_values")),
}


def call_of(op, window, device):
    """(constants, inputs that require a gradient) of a small call in float64."""
    options, given, names = WINDOWS[window]
    constants = dict(options) | {name: x.to(device) for name, x in given.items()}
    inputs = {"rewards": normal(2, 6, seed=1), "values": normal(2, 6, seed=2)}
    for k, name in enumerate(names):
        if name in ("last_values", "carry"):
            inputs[name] = normal(2, seed=3 + k)
        elif name == "gamma":
            inputs[name] = torch.rand(2, 1, **DOUBLE, generator=torch.Generator().manual_seed(9)) + 0.1
        elif name == "lambda_":
            inputs[name] = torch.tensor(0.7, **DOUBLE)
        else:
            inputs[name] = normal(2, 6, seed=3 + k)
    if op in ("discounted_returns", "n_step_returns"):
        inputs.pop("lambda_", None)
    if op == "discounted_returns":
        inputs.pop("values")
    if op in ("td_lambda_returns", "n_step_returns") and "next_values" in inputs:
        inputs["values"] = None  # not read
    if op == "n_step_returns":
        constants["n"] = 3
        inputs.pop("carry", None)
    if op == "vtrace":
        inputs |= {"log_rhos": 0.5 * normal(2, 6, seed=11), "c_bar": torch.tensor(0.9, **DOUBLE)}
    if op == "retrace":
        inputs["q_values"] = inputs.pop("values")
        inputs.pop("last_values", None)
        inputs.pop("bootstrap_values", None)
        inputs["expected_next_q"] = inputs.pop("next_values", normal(2, 6, seed=12))
        inputs["log_rhos"] = 0.5 * normal(2, 6, seed=11)
        if "carry" in inputs:
            inputs["carry"], inputs["second_carry"] = inputs["carry"], normal(2, seed=13)
    if options.get("time_dim") == 0:
        constants, inputs = ({k: turned(x) for k, x in d.items()} for d in (constants, inputs))
    return constants, {k: x.to(device).requires_grad_() for k, x in inputs.items() if x is not None}


def turned(x):
    return x.t() if isinstance(x, torch.Tensor) and x.dim() == 2 else x


def flat(x):
    """The tensors of a nested result."""
    return [y for part in x for y in flat(part)] if isinstance(x, tuple) else [x]


def of_inputs(op, constants, names, carries, **changes):
    """A function of the named inputs, as gradcheck wants it."""

    def function(*inputs):
        arguments = dict(zip(names, inputs, strict=True))
        if "second_carry" in arguments:
            arguments["carry"] = arguments["carry"], arguments.pop("second_carry")
        if op in ("td_lambda_returns", "n_step_returns"):
            arguments.setdefault("values", None)
        if carries:
            arguments["return_carry"] = True
        return tuple(flat(getattr(rlt, op)(**constants, **arguments, differentiable=True, **changes)))

    return function


def check(backend, function, inputs, twice=False):
    # The gradient of a gather adds in no fixed order on a GPU.
    options = {"fast_mode": backend.slow, "nondet_tol": 1e-10 if backend.device == "cuda" else 0.0}
    assert torch.autograd.gradcheck(function, inputs, **options)
    if twice:
        assert torch.autograd.gradgradcheck(function, inputs, **options)


@on_backends("window", list(WINDOWS), "gaps, carry")
@pytest.mark.parametrize("op", BACKWARD_OPS, ids=repr)
def test_finite_differences(op, window, backend):
    constants, inputs = call_of(op.name, window, backend.device)
    check(backend, of_inputs(op.name, constants, list(inputs), op.carries), tuple(inputs.values()))


@on_backends("op", ["gae", "vtrace", "n_step_returns"], "gae")
def test_second_derivatives(op, backend):
    window = "plain" if backend.slow else "tensor factors"
    constants, inputs = call_of(op, window, backend.device)
    check(backend, of_inputs(op, constants, list(inputs), carries=False), tuple(inputs.values()), twice=True)


def test_vtrace_of_log_probs(backend):
    constants, inputs = call_of("vtrace", "truncated", backend.device)
    del inputs["log_rhos"]
    for k, name in enumerate(("target_log_probs", "behavior_log_probs")):
        inputs[name] = (0.5 * normal(2, 6, seed=20 + k)).to(backend.device).requires_grad_()
    for k, name in enumerate(("rho_bar", "pg_rho_bar")):
        inputs[name] = (0.8 + 0.1 * normal(2, 1, seed=22 + k)).to(backend.device).requires_grad_()
    check(backend, of_inputs("vtrace", constants, list(inputs), True), tuple(inputs.values()))


@on_backends("variant", list(itertools.product(TRACES, ["none", "log_rhos", "taken", "all"])), ("tree_backup", "all"))
def test_retrace_forms(variant, backend):
    trace, form = variant
    constants, inputs = call_of("retrace", "gaps", backend.device)
    del inputs["log_rhos"], inputs["expected_next_q"]
    inputs |= {"next_q_values": normal(2, 6, 3, seed=1), "next_policy_probs": normal(2, 6, 3, seed=2).softmax(-1)}
    inputs |= {"lambda_": torch.tensor(0.8, **DOUBLE)}
    if form == "log_rhos":
        inputs["log_rhos"] = 0.5 * normal(2, 6, seed=3)
    if form in ("taken", "all"):
        shape = (2, 6, 3) if form == "all" else (2, 6)
        for k, name in enumerate(("policy_probs", "behavior_probs")):
            inputs[name] = 0.2 + torch.rand(shape, **DOUBLE, generator=torch.Generator().manual_seed(k))
    if form == "all":
        constants["actions"] = torch.tensor([[-7, 1, 2, 0, 0, 99], [2, 1, -1, 7, 0, 1]])
        constants["actions"] = constants["actions"].to(backend.device)
    if trace == "tree_backup" and "policy_probs" not in inputs:
        inputs["policy_probs"] = 0.5 + 0.1 * normal(2, 6, seed=4)
    inputs = {k: x.detach().to(backend.device).requires_grad_() for k, x in inputs.items()}
    function = of_inputs("retrace", constants | {"trace": trace}, list(inputs), True)
    check(backend, function, tuple(inputs.values()))


FORWARD_OPS = ["accumulating", "replacing", "cumsum"]


@on_backends(
    "variant",
    list(itertools.product(FORWARD_OPS, ["end", "start"], ["", "features"])),
    ("accumulating", "end", "features"),
)
def test_forward_ops(variant, backend):
    op, flags_at, features = variant
    features = (2,) if features else ()
    x = normal(2, 6, *features, seed=1)
    if op == "replacing":
        x = torch.where(x > 0, x + 0.1, 0.0)
    initial, gamma = normal(2, *features, seed=2), 0.5 + 0.1 * normal(2, 1, seed=3)
    done, valid = GAP_ENDS.to(backend.device), VALID.to(backend.device)
    x, initial, gamma = (y.to(backend.device).requires_grad_() for y in (x, initial, gamma))
    taken = x.detach() != 0  # a trace is not continuous where a feature appears

    def function(x, initial, gamma):
        options = dict(initial=initial, valid=valid, flags_at=flags_at, return_final=True, differentiable=True)
        if op == "cumsum":
            return rlt.episodic_cumsum(x, done, **options)
        if op == "replacing":
            x = torch.where(taken, x, 0.0)
        return rlt.eligibility_traces(x, done, gamma=gamma, lambda_=0.9, kind=op, **options)

    inputs = (x, initial) if op == "cumsum" else (x, initial, gamma)
    check(backend, lambda x, initial, gamma=None: function(x, initial, gamma), inputs)


def test_replacing_traces_keep_float64(backend):
    """Their decay is a number or 0 by the step, and has the precision of the rest."""
    x = torch.where(normal(2, 9) > 1, 1.0, 0.0).to(**DOUBLE, device=backend.device)
    options = dict(gamma=0.99, lambda_=0.93, kind="replacing")
    wanted = rlt.eligibility_traces(x, torch.zeros_like(x), **options)
    z = rlt.eligibility_traces(x.requires_grad_(), torch.zeros_like(x), **options, differentiable=True)
    torch.testing.assert_close(z, wanted, rtol=1e-15, atol=0)


@on_backends("variant", list(itertools.product(["backward", "forward"], ["", "initial"])), ("backward", "initial"))
def test_affine_scan(variant, backend):
    """A factor of exactly zero too: its own derivative is that of the product."""
    reverse, with_initial = variant[0] == "backward", bool(variant[1])
    alpha, beta, initial = normal(2, 4, 2, seed=1), normal(2, 4, 2, seed=2), normal(2, 2, seed=3)
    beta[0, 2, 1] = beta[1, 0, 0] = 0.0
    alpha, beta, initial = (x.to(backend.device).requires_grad_() for x in (alpha, beta, initial))

    def function(alpha, beta, initial=None):
        return rlt.affine_scan(alpha, beta, initial=initial, reverse=reverse, time_dim=1, differentiable=True)

    check(backend, function, (alpha, beta, initial) if with_initial else (alpha, beta), twice=True)
    scalar = torch.tensor(0.7, **DOUBLE, device=backend.device, requires_grad=True)
    check(backend, function, (alpha, scalar))


@pytest.mark.parametrize("time_dim", [0, 1])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("n_steps", [1, 2, 37])
def test_gradient_of_a_scan_is_one_kernel(n_steps, reverse, time_dim, backend, monkeypatch):
    """And selects as the expressions do, which are used where a gradient is differentiated again."""
    generator = torch.Generator().manual_seed(n_steps)

    def drawn(*shape, special):
        x = torch.randn(shape, generator=generator)
        which = torch.randint(len(special), shape, generator=generator)
        x = torch.where(torch.rand(shape, generator=generator) < 0.2, torch.tensor(special)[which], x)
        return x.to(backend.device)

    shape = (n_steps, 6) if time_dim == 0 else (6, n_steps)
    alpha, initial = (drawn(*size, special=[0.0, NAN, INF]) for size in (shape, (6,)))
    beta, grad = (drawn(*shape, special=[0.0, 0.0, -0.0, NAN]) for _ in range(2))
    wanted = [x.requires_grad_() for x in (alpha, beta, initial)]
    for leaves in (wanted, wanted[:2], wanted[:1], [alpha, initial], [beta]):
        with_initial = any(x is initial for x in leaves)
        y = rlt.affine_scan(
            alpha,
            beta,
            initial=initial if with_initial else None,
            reverse=reverse,
            time_dim=time_dim,
            differentiable=True,
        )
        expected = torch.autograd.grad(y, leaves, grad, create_graph=True)
        with monkeypatch.context() as context:
            context.setattr(_autograd._Product, "apply", None)  # the expressions cannot be formed
            found = torch.autograd.grad(y, leaves, grad)
        for x, want in zip(found, expected, strict=True):
            torch.testing.assert_close(x, want.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)


def test_kernels_of_the_gradient_of_a_scan(backend, monkeypatch):
    monkeypatch.setattr(_plan, "ENABLED", False)
    launched, run = [], _backend.run
    monkeypatch.setattr(_backend, "run", lambda problem: (launched.append(problem.algorithm.name), run(problem)))
    alpha, beta = (torch.randn(3, 20, device=backend.device, requires_grad=True) for _ in range(2))
    y = rlt.affine_scan(alpha, beta, differentiable=True)
    torch.autograd.grad(y.sum(), (alpha, beta))
    assert launched == ["affine_scan", "transposed_scan"]


# ----------------------------------------------------------------------------------------- plain loops, from the papers


def times(factor, x):
    """A zero factor does not read x; its own derivative is x where that is finite."""
    if factor != 0:
        return factor * x
    return factor * (x.detach() if x.isfinite() else torch.zeros_like(x))


def steps_of(row, closed):
    """[(t, the next valid step or T, cut, v')] of one row, last first; (the first flag stands before the first step,
    the value beyond it)."""
    n_steps = len(row["rewards"])
    ends, last_done = row["terminated"], row.get("last_done")
    if last_done is not None:
        ends = [*ends[1:], last_done]
    cuts = row.get("truncated", [0] * n_steps)
    valid = row.get("valid", [1] * n_steps)
    boot = row.get("next_values", row.get("bootstrap_values"))
    zero = torch.zeros((), **DOUBLE)

    def beyond(f):
        return zero if ends[f] != 0 else boot[f]

    flagged = [t for t in range(n_steps) if ends[t] != 0 or cuts[t] != 0]
    present = [t for t in range(n_steps) if valid[t] != 0]
    steps = []
    for t, then in zip(present, [*present, n_steps][1:], strict=True):
        between = [f for f in flagged if t <= f < then]
        cut = bool(between) or (closed and then == n_steps)
        if between:
            v = beyond(between[0])
        elif "next_values" in row:
            v = row["next_values"][t]
        else:
            v = row["values"][then] if then < n_steps and "values" in row else row.get("last_values", zero)
        steps.append((t, then, cut, v))
    first = present[0] if present else n_steps
    early = [f for f in flagged if f < first]
    return steps[::-1], (bool(early), beyond(early[0]) if early else None)


def clip(w, bar):
    return torch.as_tensor(bar, **DOUBLE) if w > bar else w


def gae_loop(row, steps, edge, options):
    a, results = {"edge": edge}, {}
    for t, then, cut, v in steps:
        delta = row["rewards"][t] + times(row["gamma"][t], v) - row["values"][t]
        later = a.get(then, a["edge"])
        a[t] = delta if cut else delta + times(row["gamma"][t] * row["lambda_"][t], later)
        results[t] = a[t], a[t] + row["values"][t]
    return results, (a,), (0.0,)


def td_lambda_loop(row, steps, edge, options):
    g, results = {"edge": edge}, {}
    for t, then, cut, v in steps:
        gamma, lambda_ = row["gamma"][t], row["lambda_"][t]
        mixed = times(gamma, v)
        if not cut:
            mixed = times(gamma * (1 - lambda_), v) + times(gamma * lambda_, g.get(then, g["edge"]))
        g[t] = row["rewards"][t] + mixed
        results[t] = (g[t],)
    return results, (g,), (None,)


def discounted_loop(row, steps, edge, options):
    g, results = {"edge": edge}, {}
    for t, then, cut, v in steps:
        g[t] = row["rewards"][t] + times(row["gamma"][t], v if cut else g.get(then, g["edge"]))
        results[t] = (g[t],)
    return results, (g,), (None,)


def n_step_loop(row, steps, edge, options):
    results, step_at = {}, {t: step for t, *step in steps}

    def value(t, n):
        then, cut, v = step_at[t]
        return row["rewards"][t] + times(row["gamma"][t], v if cut or n == 1 else value(then, n - 1))

    for t, *_ in steps:
        results[t] = (value(t, options["n"]),)
    return results, (), ()


def vtrace_loop(row, steps, edge, options):
    d, results = {"edge": edge}, {}
    bars = [options.get(name, 1.0) for name in ("rho_bar", "c_bar")]
    for t, then, cut, v in steps:
        gamma, reward, value = row["gamma"][t], row["rewards"][t], row["values"][t]
        log_ratio = (
            row["log_rhos"][t] if "log_rhos" in row else row["target_log_probs"][t] - row["behavior_log_probs"][t]
        )
        w = log_ratio.exp()
        rho, c, pg_rho = clip(w, bars[0]), times(row["lambda_"][t], clip(w, bars[1])), clip(w, options["pg_rho_bar"])
        later = d.get(then, d["edge"])
        d[t] = times(rho, reward + times(gamma, v) - value)
        if not cut:
            d[t] = d[t] + times(gamma * c, later)
        target_next = v if cut else later + (row["values"][then] if then in d else v)
        results[t] = value + d[t], pg_rho * (reward + times(gamma, target_next) - value)
    return results, (d,), (0.0,)


def retrace_loop(row, steps, edge, options):
    u, targets, results = {"edge": edge[0]}, {"edge": edge[1]}, {}
    for t, then, cut, v in steps:
        gamma, lambda_, reward, q = row["gamma"][t], row["lambda_"][t], row["rewards"][t], row["q_values"][t]
        if "log_rhos" in row:
            w = row["log_rhos"][t].exp()
        elif "behavior_probs" in row:
            w = row["policy_probs"][t] / row["behavior_probs"][t]
        else:
            w = torch.ones((), **DOUBLE)
        if options["trace"] == "retrace":
            c = times(lambda_, clip(w, options["c_bar"]))
        elif options["trace"] == "tree_backup":
            c = times(lambda_, row["policy_probs"][t])
        else:
            c = w if options["trace"] == "importance_sampling" else lambda_
        delta = reward + times(gamma, v) - q
        correction = delta if cut else delta + times(gamma, u.get(then, u["edge"]))
        x_next = v if cut else targets.get(then, targets["edge"])
        u[t], targets[t] = times(c, correction), q + correction
        results[t] = targets[t], clip(w, options["rho_bar"]) * (reward + times(gamma, x_next) - q)
    return results, (u, targets), (0.0, None)


LOOPS = {
    "gae": gae_loop,
    "td_lambda_returns": td_lambda_loop,
    "discounted_returns": discounted_loop,
    "n_step_returns": n_step_loop,
    "vtrace": vtrace_loop,
    "retrace": retrace_loop,
}
PER_ROW = ("last_values", "last_done")
OPTIONS = ("n", "rho_bar", "c_bar", "pg_rho_bar", "trace", "time_dim", "flags_at", "return_carry")


def by_loop(op, arguments):
    """(results, carries) of one op by its loop, each a tensor in the layout of the arguments."""
    arguments = {k: x for k, x in arguments.items() if x is not None}
    rewards, dim = arguments["rewards"], arguments["time_dim"] % arguments["rewards"].dim()
    options = {k: arguments.pop(k) for k in OPTIONS if k in arguments}
    carry = arguments.pop("carry", None)
    if "next_policy_probs" in arguments:
        p, q = arguments.pop("next_policy_probs"), arguments.pop("next_q_values")
        arguments["expected_next_q"] = (p * q).sum(-1)
    if "expected_next_q" in arguments:
        arguments["next_values"] = arguments.pop("expected_next_q")
    if "actions" in arguments:
        actions = arguments.pop("actions").unsqueeze(-1)
        for name in ("policy_probs", "behavior_probs"):
            arguments[name] = arguments[name].gather(-1, actions).squeeze(-1)
    for name in ("gamma", "lambda_"):
        if name in arguments:
            arguments[name] = torch.as_tensor(arguments[name], **DOUBLE).expand(rewards.shape)
    n_steps, batch = rewards.shape[dim], [size for d, size in enumerate(rewards.shape) if d != dim]
    rows = {k: x.reshape(-1) if k in PER_ROW else x.movedim(dim, -1).reshape(-1, n_steps) for k, x in arguments.items()}
    edges = [x.reshape(-1) for x in flatten(carry)] if carry is not None else []
    zero = torch.zeros((), **DOUBLE)
    results, carries = [], []
    for n in range(len(rows["rewards"])):
        row = {k: x[n] if k in PER_ROW else list(x[n]) for k, x in rows.items()}
        steps, (flag_first, value_first) = steps_of(row, closed=not edges)
        last = row.get("last_values", zero)
        edge = (
            [x[n] for x in edges]
            if edges
            else {"retrace": (zero, zero), "gae": (zero,), "vtrace": (zero,)}.get(op, (last,))
        )
        by_step, states, beyond = LOOPS[op](row, steps, edge if op == "retrace" else edge[0], options)
        width = 2 if op in ("gae", "vtrace", "retrace") else 1
        nothing = (zero,) * width
        results.append([torch.stack([by_step.get(t, nothing)[k] for t in range(n_steps)]) for k in range(width)])
        first = steps[-1][0] if steps else "edge"
        at_start = [
            (value_first if b is None else zero) if flag_first else s[first]
            for s, b in zip(states, beyond, strict=True)
        ]
        carries.append(at_start)
    results = [torch.stack(x).reshape(*batch, n_steps).movedim(-1, dim) for x in zip(*results, strict=True)]
    return results, [torch.stack(x).reshape(batch) for x in zip(*carries, strict=True)]


def weighted(tensors):
    """A scalar that depends on every element of every tensor, differently."""
    total = torch.zeros((), **DOUBLE)
    for k, x in enumerate(tensors):
        total = total + (x.cpu() * torch.linspace(1, 2 + k, x.numel(), **DOUBLE).reshape(x.shape)).sum()
    return total


@pytest.mark.parametrize("op", BACKWARD_OPS, ids=repr)
def test_gradients_of_plain_loops(op, backend):
    """Windows of any shape, layout and boundary; what is not read holds NaN, and its gradient is 0."""

    @settings(max_examples=3 if backend.slow else 60)
    @given(data=st.data())
    def compare(data):
        tensors, options, _ = data.draw(windows(max_steps=8, max_rows=3))
        arguments = op.arguments(data, tensors, options, torch.float64)
        arguments = {k: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for k, x in arguments.items()}
        if "carry" in arguments:
            arguments["carry"] = tuple(x.double() for x in flatten(arguments["carry"]))
            arguments["carry"] = arguments["carry"] if op.name == "retrace" else arguments["carry"][0]
        gradients = []
        for ours in (True, False):
            leaves = {}

            def leaf(name, x, ours=ours, leaves=leaves):
                if isinstance(x, tuple):
                    return tuple(leaf(f"{name}{k}", y) for k, y in enumerate(x))
                if not torch.is_tensor(x) or not x.is_floating_point() or name in ("terminated", "truncated", "valid"):
                    return x.to(backend.device) if torch.is_tensor(x) and ours else x
                leaves[name] = (x.to(backend.device) if ours else x).detach().requires_grad_(name != "last_done")
                return leaves[name]

            given = {name: leaf(name, x) for name, x in arguments.items()}
            if ours:
                kinds = {"return_carry": True} if op.carries else {}
                results = flat(getattr(rlt, op.name)(**given, **kinds, differentiable=True))
            else:
                results = [*itertools.chain(*by_loop(op.name, given))]
            total = weighted(results)
            wanted = [x for x in leaves.values() if x.requires_grad]
            grads = (
                torch.autograd.grad(total, wanted, allow_unused=True) if total.requires_grad else [None] * len(wanted)
            )
            grads = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, grads, strict=True)]
            names = [name for name, x in leaves.items() if x.requires_grad]
            gradients.append((total.detach(), dict(zip(names, grads, strict=True))))
        (total, ours), (expected, theirs) = gradients
        torch.testing.assert_close(total, expected, rtol=1e-11, atol=1e-11)
        for name, grad in theirs.items():
            assert_close(ours[name], grad, max_error=1e-11, name=name)
            assert not ours[name].cpu()[grad == 0].any(), name

    compare()


# ----------------------------------------------------------------------------------------- values, dtypes, what is read


@pytest.mark.parametrize("op", BACKWARD_OPS, ids=repr)
def test_values_are_those_of_the_ordinary_call(op, backend):
    @settings(max_examples=3 if backend.slow else 30)
    @given(data=st.data())
    def compare(data):
        tensors, options, dtype = data.draw(windows(device=backend.device, max_steps=12, max_rows=3))
        arguments = op.arguments(data, tensors, options, dtype)
        if op.carries:
            arguments["return_carry"] = True
        function = getattr(rlt, op.name)
        ours, expected = flat(function(**arguments, differentiable=True)), flat(function(**arguments))
        for k, (x, want) in enumerate(zip(ours, expected, strict=True)):
            assert x.shape == want.shape
            assert_result(x, want, dtype, f"result {k}")

    compare()


@pytest.mark.parametrize("op", FORWARD_OPS)
def test_values_of_forward_ops_are_those_of_the_ordinary_call(op, backend):
    @settings(max_examples=3 if backend.slow else 30)
    @given(data=st.data())
    def compare(data):
        tensors, options, dtype = data.draw(windows(device=backend.device, max_steps=12, max_rows=3))
        x, done = tensors["rewards"], tensors["terminated"]
        arguments = {"time_dim": options["time_dim"], "flags_at": options.get("flags_at", "end"), "return_final": True}
        if data.draw(st.booleans()):
            x = torch.stack([x, 2 * x], dim=-1)
        if data.draw(st.booleans()):
            arguments["initial"] = torch.ones_like(x.select(options["time_dim"] % done.dim(), 0))
        arguments["valid"] = tensors.get("valid")
        if op != "cumsum":
            arguments |= {"kind": op, "gamma": options["gamma"], "lambda_": options["lambda_"]}
        function = rlt.episodic_cumsum if op == "cumsum" else rlt.eligibility_traces
        for y, want in zip(
            function(x, done, **arguments, differentiable=True), function(x, done, **arguments), strict=True
        ):
            assert y.shape == want.shape
            assert_result(y, want, dtype)

    compare()


def small_calls(device, dtype=torch.float32, n_rows=2, n_steps=3):
    """{name: (function, tensors that may require a gradient, other arguments)} of every op."""

    def x(*shape):
        return torch.linspace(-1, 1, n_rows * n_steps, dtype=dtype, device=device).reshape(n_rows, n_steps)

    def last():
        return torch.ones(n_rows, dtype=dtype, device=device)

    done = {"terminated": torch.zeros(n_rows, n_steps, dtype=torch.bool, device=device)}
    forward = {"done": done["terminated"]}
    base, edge = {"rewards": x(), "values": x()}, {"last_values": last()}
    return {
        "gae": (rlt.gae, base | edge, done),
        "td_lambda_returns": (rlt.td_lambda_returns, base | edge, done),
        "discounted_returns": (rlt.discounted_returns, {"rewards": x()} | edge, done),
        "n_step_returns": (rlt.n_step_returns, base | edge, done | {"n": 2}),
        "vtrace": (rlt.vtrace, base | edge | {"log_rhos": x()}, done),
        "retrace": (
            rlt.retrace,
            {"rewards": x(), "q_values": x(), "expected_next_q": x(), "log_rhos": x()},
            done,
        ),
        "eligibility_traces": (rlt.eligibility_traces, {"x": x(), "initial": last()}, forward),
        "episodic_cumsum": (rlt.episodic_cumsum, {"x": x(), "initial": last()}, forward),
        "affine_scan": (rlt.affine_scan, {"alpha": x(), "beta": x(), "initial": last()}, {}),
    }


ALL_OPS = list(small_calls("cpu"))


@on_backends("op", ALL_OPS, "retrace")
def test_no_graph_by_default(op, backend):
    function, inputs, given = small_calls(backend.device)[op]
    inputs = {k: x.requires_grad_() for k, x in inputs.items()}
    assert not any(x.requires_grad for x in flat(function(**inputs, **given)))
    assert all(x.requires_grad for x in flat(function(**inputs, **given, differentiable=True)))
    with torch.no_grad():
        assert not any(x.requires_grad for x in flat(function(**inputs, **given, differentiable=True)))


@pytest.mark.parametrize("op", ALL_OPS)
def test_out_is_an_error(op):
    function, inputs, given = small_calls("cpu")[op]
    out = tuple(torch.empty(2, 3) for _ in flat(function(**inputs, **given)))
    message = (
        f"{op}: out was given with differentiable=True, but results that carry a graph are new tensors; pass out=None, "
        "or differentiable=False for results without a graph"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        function(**inputs, **given, out=out if len(out) > 1 else out[0], differentiable=True)


def test_arguments_are_checked_as_ever():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="gae: the window's edge needs a value"):
        rlt.gae(x, x, x, differentiable=True)
    with pytest.raises(ValueError, match=re.escape("gae: carry has shape [3]")):
        rlt.gae(x, x, x, last_values=None, carry=torch.ones(3), differentiable=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@on_backends("op", ALL_OPS, "vtrace")
def test_dtypes(op, dtype, backend):
    """Results and gradients have the dtypes of the ordinary results and of the inputs; the rounding comes last."""
    function, inputs, given = small_calls(backend.device, dtype)[op]
    exact = {k: x.detach().double().requires_grad_() for k, x in inputs.items()}
    inputs = {k: x.requires_grad_() for k, x in inputs.items()}
    results, expected = flat(function(**inputs, **given, differentiable=True)), flat(function(**inputs, **given))
    doubles = flat(function(**exact, **given, differentiable=True))
    for x, want, double in zip(results, expected, doubles, strict=True):
        assert_result(x, want, dtype)
        assert_result(x, double, dtype)
    sum(x.float().sum() for x in results).backward()
    sum(x.sum() for x in doubles).backward()
    for name, x in inputs.items():
        assert_result(x.grad, exact[name].grad, dtype, name)


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0), (0, 1), (2, 1)], ids=str)
@on_backends("op", ALL_OPS, "n_step_returns")
def test_empty_and_single_steps(op, shape, backend):
    function, inputs, given = small_calls(backend.device, torch.float64, *shape)[op]
    inputs = {k: x.requires_grad_() for k, x in inputs.items()}
    results, expected = flat(function(**inputs, **given, differentiable=True)), flat(function(**inputs, **given))
    for x, want in zip(results, expected, strict=True):
        assert x.shape == want.shape
        assert x.dtype == want.dtype
        torch.testing.assert_close(x, want)
    grads = torch.autograd.grad(weighted(results), list(inputs.values()), allow_unused=True, create_graph=True)
    assert all(g is None or g.isfinite().all() for g in grads)
    if 0 in shape:  # no element depends on anything, but whoever asks for a gradient gets one
        assert [None if g is None else g.shape for g in grads] == [x.shape for x in inputs.values()]
        assert all(g.eq(0).all() for g in grads)
    if shape == (2, 1):
        assert torch.autograd.gradgradcheck(
            lambda *x: function(**dict(zip(inputs, x, strict=True)), **given, differentiable=True),
            tuple(inputs.values()), fast_mode=backend.slow,
        )  # fmt: skip


def test_carry_of_no_steps(backend):
    x = torch.zeros(2, 0, device=backend.device)
    last, carry = (torch.ones(2, device=backend.device, requires_grad=True) for _ in range(2))
    _, out = rlt.discounted_returns(x, x, last_values=last, return_carry=True, differentiable=True)
    assert torch.autograd.grad(out.sum(), last)[0].tolist() == [1.0, 1.0]
    _, out = rlt.gae(x, x, x, last_values=last, carry=carry, return_carry=True, differentiable=True)
    assert torch.autograd.grad(out.sum(), carry)[0].tolist() == [1.0, 1.0]


def test_unread_entries_have_no_gradient(backend):
    """NaN and inf on rows that are no transition, in values of a terminal state, of a step that was not truncated, of
    an edge that is cut: each has a gradient of exactly 0, and nobody else sees them."""
    device = backend.device
    ends, cuts = flags("0100000", "0000001").to(device), flags("0001000", "0000000").to(device)
    valid = flags("1111011", "1101111").to(device)
    read = {
        "rewards": valid,
        # V of a step is its own and that of the step before; both rows are read wherever they are valid.
        "values": valid,
        "bootstrap_values": flags("0001000", "0000000").to(device),
        "last_values": torch.tensor([True, False], device=device),
        "log_rhos": valid,
    }
    bad = [NAN, INF, -INF]
    inputs = {}
    for k, (name, mask) in enumerate(read.items()):
        x = normal(2, seed=k) if mask.dim() == 1 else normal(2, 7, seed=k)
        noise = torch.tensor(bad, **DOUBLE)[torch.arange(x.numel()) % 3].reshape(x.shape)
        inputs[name] = torch.where(mask, x.to(device), noise.to(device)).requires_grad_()
    gamma = torch.tensor(0.9, **DOUBLE, device=device, requires_grad=True)
    given = {"terminated": ends, "truncated": cuts, "valid": valid, "gamma": gamma}

    def grads_of(function, *names, **more):
        chosen = {name: inputs[name] for name in names}
        result = function(**chosen, **given, **more, return_carry=True, differentiable=True)
        grads = torch.autograd.grad(weighted(flat(result)), [*chosen.values(), gamma])
        assert grads[-1].isfinite()
        return dict(zip(names, grads, strict=False))

    everything = ("rewards", "values", "bootstrap_values", "last_values")
    for grads in (
        grads_of(rlt.gae, *everything),
        grads_of(rlt.td_lambda_returns, *everything),
        grads_of(rlt.discounted_returns, "rewards", "bootstrap_values", "last_values"),
        grads_of(rlt.vtrace, *everything, "log_rhos", rho_bar=INF, c_bar=INF),
    ):
        for name, grad in grads.items():
            assert grad.isfinite().all(), name
            assert (grad[~read[name]] == 0).all(), name
            assert name == "values" or grad[read[name]].all(), name


def test_a_factor_of_zero_reads_nothing(backend):
    """Its own derivative is that of the product where that is finite, else 0."""
    device = backend.device
    x = torch.ones(1, 4, **DOUBLE, device=device)
    r = torch.tensor([[1.0, 1.0, NAN, 1.0]], **DOUBLE, device=device, requires_grad=True)
    v = torch.tensor([[1.0, 2.0, INF, 1.0]], **DOUBLE, device=device, requires_grad=True)
    gamma = torch.tensor([[0.5, 0.0, 0.5, 0.0]], **DOUBLE, device=device, requires_grad=True)
    last = torch.tensor([3.0], **DOUBLE, device=device, requires_grad=True)
    a = rlt.gae(r, v, 0 * x, last_values=last, gamma=gamma, lambda_=1.0, differentiable=True).advantages
    # A[0] = r0 + γ0 V1 - V0 + γ0 A[1],  A[1] = r1 - V1,  A[3] = r3 + γ3 last - V3
    grads = torch.autograd.grad(a[0, 0] + a[0, 1] + a[0, 3], (r, v, gamma, last))
    expected = [[[1.0, 1.5, 0.0, 1.0]], [[-1.0, -1.0, 0.0, -1.0]], [[1.0, 0.0, 0.0, 3.0]], [0.0]]
    for grad, want in zip(grads, expected, strict=True):
        assert grad.tolist() == want


def test_a_gradient_of_nan_does_not_pass_a_zero(backend):
    """What a loss sends back reaches only what was read, NaN too."""
    device = backend.device
    ones = torch.ones(1, 3, **DOUBLE, device=device)
    last = torch.tensor([3.0], **DOUBLE, device=device, requires_grad=True)
    alpha = ones.clone().requires_grad_()
    beta = torch.tensor([[0.5, 0.0, 0.0]], **DOUBLE, device=device)
    y = rlt.affine_scan(alpha, beta, initial=last, differentiable=True)
    # y[0] reads α[0] and α[1], y[1] and y[2] their own
    sent = torch.tensor([[1.0, NAN, NAN], [NAN, 1.0, 1.0]], **DOUBLE, device=device)
    for row, reached in zip(sent, ([False, True, True], [True, True, False]), strict=True):
        of_alpha, of_last = torch.autograd.grad(y, (alpha, last), row[None], retain_graph=True)
        assert of_alpha[0].isnan().tolist() == reached
        assert of_last.tolist() == [0.0]

    rewards, values = (ones.clone().requires_grad_() for _ in range(2))
    for gamma in (0.0, torch.zeros((), device=device)):
        result = rlt.gae(rewards, values, 0 * ones, last_values=last, gamma=gamma, differentiable=True)
        grads = torch.autograd.grad(result.advantages, (last, rewards), torch.tensor([[1.0, NAN, NAN]]).to(ones))
        assert grads[0].tolist() == [0.0]
        assert grads[1].isnan().tolist() == [[False, True, True]]
    log_rhos = torch.tensor([[0.0, -INF, 0.0]], **DOUBLE, device=device)
    result = rlt.vtrace(rewards, values, 0 * ones, log_rhos=log_rhos, last_values=last, differentiable=True)
    grads = torch.autograd.grad(result, (last, rewards), [torch.tensor([[1.0, NAN, 1.0]]).to(ones)] * 2)
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[1][0, 1] == 0  # a ratio of zero reads no reward


def test_clipped_ratios(backend):
    """Where a bar clips the gradient is the bar's; a ratio that overflows is clipped like any other."""
    device = backend.device
    x = torch.ones(1, 3, **DOUBLE, device=device)
    log_rhos = torch.tensor([[5000.0, -0.5, 0.5]], **DOUBLE, device=device, requires_grad=True)
    bar = torch.tensor(0.9, **DOUBLE, device=device, requires_grad=True)
    options = dict(rho_bar=bar, c_bar=bar, gamma=0.5, last_values=None, differentiable=True)
    result = rlt.vtrace(x, 0 * x, 0 * x, log_rhos=log_rhos, **options)
    ratio, of_bar = torch.autograd.grad(result.targets.sum() + result.advantages.sum(), (log_rhos, bar))
    assert ratio[0, 0] == 0
    assert ratio[0, 2] == 0
    assert ratio[0, 1] > 0
    assert of_bar > 0
    mu = torch.tensor([[0.0, 0.5, 0.5]], **DOUBLE, device=device, requires_grad=True)
    pi = torch.tensor([[0.5, 0.2, 0.9]], **DOUBLE, device=device, requires_grad=True)
    result = rlt.retrace(
        x, 0 * x, 0 * x, expected_next_q=x, policy_probs=pi, behavior_probs=mu, gamma=0.5, differentiable=True
    )
    for grad in torch.autograd.grad(result.targets.sum() + result.advantages.sum(), (pi, mu)):
        assert grad.isfinite().all()
        assert (grad[0, [0, 2]] == 0).all()
        assert grad[0, 1] != 0


def test_actions_of_probability_zero_are_not_read(backend):
    device = backend.device
    q = torch.tensor([[[1.0, NAN, 3.0], [INF, 2.0, -INF]]], device=device, requires_grad=True)
    p = torch.tensor([[[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]], device=device, requires_grad=True)
    x = torch.zeros(1, 2, device=device)
    result = rlt.retrace(x, x, x, next_q_values=q, next_policy_probs=p, gamma=1.0, differentiable=True)
    of_q, of_p = torch.autograd.grad(result.targets.sum(), (q, p))
    assert of_q.tolist() == [[[0.5, 0.0, 0.5], [0.0, 2.0, 0.0]]]
    assert of_p.tolist() == [[[1.0, 0.0, 3.0], [0.0, 4.0, 0.0]]]


def test_a_bad_episode_stays_alone(backend):
    """A loss over one episode has the gradient that it would have without NaN in another, of shared factors too."""
    x = normal(2, 6, seed=1).to(backend.device)
    ends = flags("001000", "000000").to(backend.device)

    def grads_of(bad):
        r = x.clone()
        r[0, 4] = r[1, 2] = bad
        r.requires_grad_()
        factors = [torch.tensor(y, **DOUBLE, device=x.device, requires_grad=True) for y in (0.9, 0.8)]
        options = dict(log_rhos=0.1 * x, last_values=None, differentiable=True)
        result = rlt.vtrace(r, x, ends, gamma=factors[0], lambda_=factors[1], **options)
        return torch.autograd.grad(result.targets[0, :3].sum() + result.advantages[0, :3].sum(), (r, *factors))

    for clean, dirty in zip(grads_of(1.0), grads_of(NAN), strict=True):
        assert torch.equal(clean, dirty)


# --------------------------------------------------------------------------------------------------- chains, backends


def test_chained_windows_have_the_gradient_of_one(backend):
    rewards, values, last = (x.to(backend.device) for x in (normal(2, 9, seed=1), normal(2, 9, seed=2), normal(2)))
    ends = flags("001000000", "000010001").to(backend.device)
    inputs = [x.requires_grad_() for x in (rewards, values, last)]
    options = dict(log_rhos=0.1 * rewards, gamma=0.9, differentiable=True)
    whole = rlt.vtrace(rewards, values, ends, last_values=last, **options)
    early, late = (slice(None), slice(0, 4)), (slice(None), slice(4, None))
    options["log_rhos"] = 0.1 * rewards[late]
    second, carry = rlt.vtrace(rewards[late], values[late], ends[late], last_values=last, return_carry=True, **options)
    options["log_rhos"] = 0.1 * rewards[early]
    first = rlt.vtrace(rewards[early], values[early], ends[early], last_values=values[:, 4], carry=carry, **options)
    parts = [torch.cat(pair, dim=1) for pair in zip(first, second, strict=True)]
    for ours, want in zip(*(torch.autograd.grad(weighted(y), inputs) for y in (parts, whole)), strict=True):
        assert_close(ours, want, max_error=1e-13)


def test_the_carry_is_no_view_of_a_result(backend):
    x = torch.ones(2, 3, device=backend.device, requires_grad=True)
    returns, carry = rlt.discounted_returns(x, 0 * x, last_values=None, return_carry=True, differentiable=True)
    before = returns.detach().clone()
    carry.mul_(2)
    assert torch.equal(returns, before)
    returns.sum().backward()


def test_backward_runs_on_the_backend_of_the_forward(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(2, 3, device=device, requires_grad=True)
    with rlt.backend("triton"):
        y = rlt.affine_scan(x, 0.5, differentiable=True)
    monkeypatch.setattr(_cpu, "run", None)
    y.sum().backward()
    assert x.grad.tolist() == [[1.0, 1.5, 1.75]] * 2
