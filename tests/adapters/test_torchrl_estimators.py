"""TorchRL's estimator classes and losses with our computation, next to TorchRL's own; Retrace next to its equation."""

import contextlib
import copy
import pickle
import warnings

import pytest
import torch

pytest.importorskip("torchrl", reason="TorchRL is not installed")

from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.nn import ProbabilisticTensorDictModule as Sampler
from tensordict.nn import ProbabilisticTensorDictSequential as Policy
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import MaskedCategorical, OneHotCategorical, OneHotOrdinal, Ordinal, QValueActor
from torchrl.modules.distributions.continuous import Delta
from torchrl.modules.distributions.discrete import MaskedOneHotCategorical
from torchrl.objectives import A2CLoss, ClipPPOLoss, DQNLoss, ReinforceLoss
from torchrl.objectives.utils import ValueEstimators, get_value_estimator_entry
from torchrl.objectives.value import advantages as stock

from rl_triton.adapters import status, torchrl

N_ACTIONS = 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu_only)]


@pytest.fixture(autouse=True)
def stock_afterwards():
    yield
    torchrl.unpatch()
    torchrl.unregister()
    assert all(get_value_estimator_entry(key).cls.__module__ == stock.__name__ for key in ValueEstimators)


def served(*, under):
    """Calls served and fallen back, of the classes ("_estimators") or of TorchRL's modules ("advantages")."""
    entries = [entry for label, entry in status().items() if f".{under}." in label]
    return sum(entry["served"] for entry in entries), sum(sum(entry["fallen_back"].values()) for entry in entries)


def value_net(out_features=1):
    torch.manual_seed(0)
    return TensorDictModule(nn.Linear(4, out_features), in_keys=["observation"], out_keys=["state_value"])


def actor(distribution=OneHotCategorical, key="action", in_keys=("logits",)):
    torch.manual_seed(1)
    logits = TensorDictModule(nn.Linear(4, N_ACTIONS), in_keys=["observation"], out_keys=["logits"])
    in_keys = in_keys if isinstance(in_keys, dict) else list(in_keys)
    sampler = Sampler(in_keys=in_keys, out_keys=[key], distribution_class=distribution, return_log_prob=True)
    return Policy(logits, sampler)


def make_data(batch=(3, 8), *, seed=0, device="cpu", one_hot=True, names=None):
    generator = torch.Generator().manual_seed(seed)

    def floats(*shape):
        return torch.randn(*batch, *shape, generator=generator)

    terminated = torch.rand(*batch, 1, generator=generator) < 0.15
    done = terminated | (torch.rand(*batch, 1, generator=generator) < 0.2)
    action = torch.randint(N_ACTIONS, batch, generator=generator)
    following = {"observation": floats(4), "reward": floats(1), "done": done, "terminated": terminated}
    return TensorDict(
        {
            "observation": floats(4),
            "action": nn.functional.one_hot(action, N_ACTIONS) if one_hot else action,
            "action_log_prob": floats() * 0.3 - 1.1,
            "next": following,
        },
        batch,
        names=names,
        device=device,
    )


NUMBERS = {"gamma": 0.9, "lmbda": 0.8}
CASES = [
    ("GAE", NUMBERS),
    ("GAE", NUMBERS | {"vectorized": True}),
    ("GAE", NUMBERS | {"average_gae": True, "shifted": True}),
    ("GAE", NUMBERS | {"differentiable": True, "deactivate_vmap": True}),
    ("GAE", {"gamma": torch.tensor(0.9), "lmbda": torch.tensor(0.8), "time_dim": -1}),
    ("GAE", {"gamma": 1, "lmbda": 1}),
    ("TDLambdaEstimator", NUMBERS),
    ("TDLambdaEstimator", NUMBERS | {"vectorized": False, "average_rewards": True}),
    ("TD1Estimator", {"gamma": 0.9}),
    ("VTrace", {"gamma": 0.9, "rho_thresh": 1.2, "average_adv": True}),
]


def pair(name, options):
    network = value_net()
    options = options | {"value_network": network} | ({"actor_network": actor()} if name == "VTrace" else {})
    return getattr(torchrl, name)(**options), getattr(stock, name)(**options)


def same(a, b, keys=("advantage", "value_target"), bound=2e-5):
    for key in keys:
        torch.testing.assert_close(a[key], b[key], rtol=bound, atol=bound)


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_classes(name, options, device):
    """The same keys and numbers, each call served; copies, pickles and tensors in place of a tensordict too."""
    ours, theirs = pair(name, options)
    ours, theirs = ours.to(device), theirs.to(device)
    for network in {
        id(x): x for x in (ours.value_network, getattr(ours, "actor_network", None)) if x is not None
    }.values():
        network.to(device)
    assert isinstance(ours, type(theirs))
    assert ours.in_keys == theirs.in_keys
    assert ours.out_keys == theirs.out_keys
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    before = served(under="_estimators")
    expected = theirs(make_data(device=device))
    result = ours(make_data(device=device))
    assert set(result.keys(True)) == set(expected.keys(True))
    same(result, expected)
    assert served(under="_estimators") == (before[0] + 1, before[1])
    same(copy.deepcopy(ours)(make_data(device=device)), expected)
    same(pickle.loads(pickle.dumps(ours))(make_data(device=device)), expected)
    if not options.get("shifted") and name != "VTrace":
        d = make_data(device=device)
        plain = ours(
            observation=d["observation"],
            next_observation=d["next", "observation"],
            next_reward=d["next", "reward"],
            next_done=d["next", "done"],
            next_terminated=d["next", "terminated"],
        )
        same(dict(zip(ours.out_keys, plain, strict=True)), expected)
    if name != "VTrace":
        result, expected = (x.value_estimate(make_data(device=device)) for x in (ours, theirs))
        torch.testing.assert_close(result, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_patched_classes(name, options):
    """TorchRL's classes, instances that exist already included, follow the patch."""
    _, theirs = pair(name, options)
    expected = theirs(make_data())
    before = served(under="advantages")
    with torchrl.patched():
        same(theirs(make_data()), expected)
    assert served(under="advantages") == (before[0] + 1, before[1])
    theirs(make_data())
    assert served(under="advantages") == (before[0] + 1, before[1])


@pytest.mark.parametrize("batch", [(3, 8), (3, 3), (1, 4), (4, 1), (8,)], ids=str)
@pytest.mark.parametrize(("name", "options"), [case for case in CASES if not case[1].get("shifted")])
def test_entries_of_other_shapes(name, options, batch):
    """What TorchRL's class makes of them, an error or not, ours does."""

    def outcome(estimator, data):
        try:
            return estimator(data)
        except Exception as error:
            return error

    ours, theirs = pair(name, options)
    for key in ("done", "terminated", "reward", "state_value", "action_log_prob", "steps_to_next_obs"):
        for extra in ((), (1,), (2,), (1, 1)):
            data = make_data(batch)
            x = torch.randn(*batch, *extra)
            if key == "steps_to_next_obs":
                data[key] = torch.full(x.shape, 2)
            elif key in ("action_log_prob", "state_value"):
                data[key] = x
            else:  # no step is terminal and not done
                data["next", key] = x if key == "reward" else torch.full(x.shape, key == "done")
            result, expected = outcome(ours, data.clone()), outcome(theirs, data.clone())
            assert isinstance(result, Exception) == isinstance(expected, Exception), (key, extra)
            if isinstance(expected, Exception):
                assert (type(result), str(result)) == (type(expected), str(expected))
            else:
                same(result, expected, bound=1e-4)


def test_multi_step_data():
    """γ to the power of the number of steps: a γ per step, which costs TorchRL a [B, T, T] matrix."""
    for name, options in CASES:
        ours, theirs = pair(name, options)
        a, b = make_data(), make_data()
        for data in (a, b):
            data["steps_to_next_obs"] = torch.randint(1, 4, (3, 8, 1), generator=torch.Generator().manual_seed(5))
        same(ours(a), theirs(b), bound=1e-4)


def test_multi_agent():
    def data():
        d = make_data()
        d["state_value"], d["next", "state_value"] = torch.arange(144.0).sin().reshape(2, 3, 8, 3, 1)
        return d

    for options in ({}, {"average_gae": True}, {"vectorized": True}):
        options = NUMBERS | options | {"value_network": None}
        ours, theirs = torchrl.MultiAgentGAE(**options), stock.MultiAgentGAE(**options)
        assert isinstance(ours, torchrl.GAE)
        before = served(under="_estimators")
        result = ours(data())
        assert result["advantage"].shape == (3, 8, 3, 1)
        same(result, theirs(data()))
        assert served(under="_estimators") == (before[0] + 1, before[1])


@pytest.mark.parametrize("layout", ["lazy stack", "nested batch", "time first", "memory mapped"])
def test_tensordicts(layout, tmp_path):
    def data():
        d = make_data(batch=(2, 3, 8) if layout == "nested batch" else (3, 8))
        if layout == "lazy stack":
            return LazyStackedTensorDict.lazy_stack([make_data(batch=(8,), seed=i) for i in range(3)], 0)
        if layout == "time first":
            return make_data(batch=(8, 3), names=["time", None])
        return d.memmap(tmp_path / str(len(list(tmp_path.iterdir())))).clone() if layout == "memory mapped" else d

    for name, options in CASES:
        if options.get("shifted"):
            continue
        ours, theirs = pair(name, options)
        before = served(under="_estimators")
        same(ours(data()), theirs(data()))
        assert served(under="_estimators") == (before[0] + 1, before[1])


def test_gradients_reach_the_critic():
    ours, theirs = pair("TDLambdaEstimator", NUMBERS | {"differentiable": True})
    data = make_data()
    value = torch.randn(3, 8, 1, requires_grad=True)
    grads = []
    for estimator in (ours, theirs):
        with torch.enable_grad():
            target = estimator.value_estimate(data.clone(), next_value=value.clone())
        grads.append(torch.autograd.grad(target.square().sum(), value)[0] if target.requires_grad else None)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------- losses and the registry


def make_loss(loss_class):
    if loss_class is ReinforceLoss:
        return loss_class(actor(), critic_network=value_net())
    return loss_class(actor(), value_net())


@pytest.mark.parametrize("loss_class", [ClipPPOLoss, A2CLoss, ReinforceLoss])
def test_losses_follow_the_patch(loss_class):
    """The estimator that a loss makes for itself, gradients included."""
    loss = make_loss(loss_class)
    outcomes = []
    for context in (contextlib.nullcontext(), torchrl.patched()):
        loss.zero_grad()
        with context:
            before = served(under="advantages")
            out = loss(make_data())
            total = sum(x for key, x in out.items() if key.startswith("loss_"))
            total.backward()
            calls = served(under="advantages")
        outcomes.append([total.detach(), *(p.grad.clone() for p in loss.parameters() if p.grad is not None)])
    assert calls == (before[0] + 1, before[1])
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss_class", [ClipPPOLoss, A2CLoss, ReinforceLoss])
def test_the_registry_builds_our_classes(loss_class):
    """By default, by enum, by name; with TorchRL's defaults, and the loss's own keys."""
    expected = make_loss(loss_class)
    expected.make_value_estimator()
    loss = make_loss(loss_class)
    loss.set_keys(advantage="my_advantage", value_target="my_target")
    with torchrl.registered():
        loss.make_value_estimator()
        assert type(loss.value_estimator) is torchrl.GAE
        for value_type, cls in ((ValueEstimators.TDLambda, "TDLambdaEstimator"), ("gae", "GAE"), ("VTrace", "VTrace")):
            loss.make_value_estimator(value_type)
            assert type(loss.value_estimator) is getattr(torchrl, cls)
        loss.make_value_estimator(ValueEstimators.TD1, gamma=0.5)
        assert type(loss.value_estimator) is torchrl.TD1Estimator
        assert loss.value_estimator.gamma == 0.5
        loss.make_value_estimator(ValueEstimators.GAE)
        ours = loss.value_estimator
    theirs = expected.value_estimator
    assert (ours.gamma, ours.lmbda, ours.differentiable) == (theirs.gamma, theirs.lmbda, theirs.differentiable)
    assert (ours.tensor_keys.advantage, ours.tensor_keys.value_target) == ("my_advantage", "my_target")
    before = served(under="_estimators")
    out, reference = loss(make_data()), expected(make_data())
    assert served(under="_estimators") == (before[0] + 1, before[1])
    same(out, reference, [key for key in out.keys(True) if key.startswith("loss_")])
    loss.make_value_estimator(ValueEstimators.GAE)
    assert type(loss.value_estimator) is stock.GAE


def test_registry_entries_come_back():
    before = {key: get_value_estimator_entry(key) for key in ValueEstimators}
    torchrl.register()
    torchrl.register()
    with torchrl.registered():
        assert get_value_estimator_entry(ValueEstimators.GAE).cls is torchrl.GAE
    assert get_value_estimator_entry(ValueEstimators.GAE).cls is torchrl.GAE
    assert get_value_estimator_entry(ValueEstimators.TD0).cls is stock.TD0Estimator
    torchrl.unregister()
    torchrl.unregister()
    for key, entry in before.items():
        now = get_value_estimator_entry(key)
        assert (now.cls, now.default_kwargs) == (entry.cls, entry.default_kwargs)


def test_an_entry_of_somebody_else_is_left_in_place():
    from torchrl.objectives.utils import register_value_estimator

    class Other(stock.GAE):
        pass

    entry = get_value_estimator_entry(ValueEstimators.GAE)
    try:
        torchrl.register()
        register_value_estimator(ValueEstimators.GAE, default_kwargs={})(Other)
        with pytest.warns(UserWarning, match="was registered again after rl_triton did"):
            torchrl.unregister()
        assert get_value_estimator_entry(ValueEstimators.GAE).cls is Other
    finally:
        register_value_estimator(ValueEstimators.GAE, default_kwargs=entry.default_kwargs)(entry.cls)


def test_classes_and_instances_in_make_value_estimator():
    loss = make_loss(ClipPPOLoss)
    loss.make_value_estimator(torchrl.GAE, gamma=0.9, lmbda=0.8, value_network=loss.critic_network)
    assert type(loss.value_estimator) is torchrl.GAE
    loss.make_value_estimator(torchrl.GAE.for_loss(loss, gamma=0.9, lmbda=0.8))
    assert type(loss.value_estimator) is torchrl.GAE


def test_compiled_loss():
    """Graph breaks come from TorchRL's own code; the numbers are the same, whoever computes them."""
    loss = make_loss(A2CLoss)
    loss.make_value_estimator(ValueEstimators.GAE)
    data = make_data(batch=(2, 4))
    expected = loss(data.clone())
    with torchrl.patched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = torch.compile(loss, backend="eager")(data.clone())
    same(out, expected, [key for key in expected.keys(True) if key.startswith("loss_")])


# ------------------------------------------------------------------------------------------------------------- Retrace


def q_net():
    torch.manual_seed(2)
    return TensorDictModule(nn.Linear(4, N_ACTIONS), in_keys=["observation"], out_keys=["action_value"])


def retrace_by_the_book(data, q, next_q, probs, next_probs, log_pi, gamma, lmbda, c_bar, rho_bar):
    """Munos et al. 2016, eq. 3, as a sum over the future: Q + Σ_k γ^k c[t+1] ... c[t+k] δ[t+k], in float64."""
    n_rows, n_steps = data.shape
    action = data["action"].argmax(-1)
    targets, advantages = torch.zeros(2, n_rows, n_steps, 1, dtype=torch.float64)
    for n in range(n_rows):
        r = data["next", "reward"][n, :, 0].double()
        done, terminated = data["next", "done"][n, :, 0], data["next", "terminated"][n, :, 0]
        own = q[n].double().gather(-1, action[n, :, None])[:, 0]
        expected = (next_q[n].double() * next_probs[n].double()).sum(-1).masked_fill(terminated, 0.0)
        w = (log_pi[n].double() - data["action_log_prob"][n].double()).exp()
        delta = r + gamma * expected - own
        for t in range(n_steps):
            total, weight = own[t].clone(), 1.0
            for k in range(t, n_steps):
                if k > t:
                    if done[k - 1]:
                        break
                    weight *= gamma * lmbda * min(c_bar, w[k])
                total += weight * delta[k]
            targets[n, t, 0] = total
        for t in range(n_steps):
            edge = t == n_steps - 1 or done[t]
            ahead = expected[t] if edge else targets[n, t + 1, 0]
            advantages[n, t, 0] = min(rho_bar, w[t]) * (r[t] + gamma * ahead - own[t])
    return {"value_target": targets, "advantage": advantages}


def book_inputs(data):
    policy, critic = actor(), q_net()
    with torch.no_grad():
        distributions = [policy.get_dist(x.clone()) for x in (data, data["next"])]
        return (
            critic(data.clone())["action_value"],
            critic(data["next"].clone())["action_value"],
            *(d.probs for d in distributions),
            distributions[0].log_prob(data["action"]),
        )


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize(
    "options", [{"gamma": 0.9}, {"gamma": 0.9, "lmbda": 0.7, "c_thresh": 0.8, "rho_thresh": 1.3}, {"gamma": 1}]
)
def test_retrace(options, one_hot):
    policy = actor(OneHotCategorical if one_hot else torch.distributions.Categorical)
    estimator = torchrl.Retrace(**options, value_network=q_net(), actor_network=policy)
    data, reference = make_data(one_hot=one_hot), make_data()
    out = estimator(data)
    numbers = {"lmbda": 1.0, "c_thresh": 1.0, "rho_thresh": 1.0} | options
    expected = retrace_by_the_book(
        reference,
        *book_inputs(reference),
        numbers["gamma"],
        numbers["lmbda"],
        numbers["c_thresh"],
        numbers["rho_thresh"],
    )
    same({key: out[key].double() for key in expected}, expected)
    assert out["advantage"].dtype == torch.float32
    assert not out["value_target"].requires_grad
    torch.testing.assert_close(estimator.value_estimate(make_data(one_hot=one_hot)), out["value_target"])
    by_tensors = estimator(
        **{"_".join(k) if isinstance(k, tuple) else k: make_data(one_hot=one_hot)[k] for k in estimator.in_keys}
    )
    same(dict(zip(estimator.out_keys, by_tensors, strict=True)), out)


def ordinal_logits(scores):
    """Tang & Agrawal 2020, eq. 4."""
    upper, lower = nn.functional.logsigmoid(scores), nn.functional.logsigmoid(-scores)
    return torch.stack([upper[..., : i + 1].sum(-1) + lower[..., i + 1 :].sum(-1) for i in range(N_ACTIONS)], -1)


DISTRIBUTIONS = {
    torch.distributions.Categorical: ["logits"],
    torch.distributions.OneHotCategorical: ["logits"],
    OneHotCategorical: ["logits"],
    MaskedCategorical: ["logits", "mask"],
    MaskedOneHotCategorical: ["logits", "mask"],
    Ordinal: {"scores": "logits"},
    OneHotOrdinal: {"scores": "logits"},
}
ENCODINGS = {
    "[...]": lambda index: index,
    "[..., 1]": lambda index: index.unsqueeze(-1).int(),
    "one-hot": lambda index: nn.functional.one_hot(index, N_ACTIONS),
    "bool": lambda index: nn.functional.one_hot(index, N_ACTIONS).bool(),
    "reparametrized": lambda index: nn.functional.one_hot(index, N_ACTIONS) * 0.9999999,
}


@pytest.mark.parametrize("batch", [(8,), (1, 8), (3, 3), (3, 8)], ids=str)  # in some of them wrong shapes broadcast
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda x: f"{x.__module__.split('.')[0]}-{x.__name__}")
def test_retrace_reads_every_encoding_of_actions(distribution, encoding, batch):
    """Whichever one the policy's distribution is made for."""
    data = make_data(batch)
    index = data["action"].argmax(-1)
    for part, action in ((data, index), (data["next"], torch.zeros_like(index))):
        part["mask"] = (torch.rand(*batch, N_ACTIONS) < 0.6).scatter(-1, action.unsqueeze(-1), True)
    policy, critic = actor(distribution, in_keys=DISTRIBUTIONS[distribution]), q_net()

    def log_probabilities(part):
        with torch.no_grad():
            logits = policy[0](part.select("observation"))["logits"].double()
        if "Ordinal" in distribution.__name__:
            logits = ordinal_logits(logits)
        elif "Masked" in distribution.__name__:
            logits = logits.masked_fill(~part["mask"], -torch.inf)
        return logits.log_softmax(-1)

    log_pi, next_log_pi = log_probabilities(data), log_probabilities(data["next"])
    with torch.no_grad():
        q, next_q = (critic(part.select("observation"))["action_value"] for part in (data, data["next"]))
    chosen = log_pi.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    rows = [x.reshape(-1, *x.shape[len(batch) - 1 :]) for x in (q, next_q, log_pi.exp(), next_log_pi.exp(), chosen)]
    expected = retrace_by_the_book(data.reshape(-1, batch[-1]), *rows, 0.9, 0.8, 1.0, 1.3)
    data["action"] = ENCODINGS[encoding](index)
    options = {"gamma": 0.9, "lmbda": 0.8, "rho_thresh": 1.3}
    out = torchrl.Retrace(**options, value_network=critic, actor_network=policy)(data)
    same({key: out[key].double() for key in expected}, {key: x.reshape(*batch, 1) for key, x in expected.items()})


@pytest.mark.parametrize(
    ("distribution", "error", "message"),
    [
        (lambda logits: torch.distributions.Normal(logits, 1.0), TypeError, "a Normal, but a Categorical or OneHot"),
        (lambda logits: Delta(logits), TypeError, "a Delta, but a Categorical or OneHot"),
        (lambda logits: torch.distributions.Bernoulli(logits=logits), TypeError, "a Bernoulli, but"),
        (
            lambda logits: torch.distributions.RelaxedOneHotCategorical(torch.tensor(1.0), logits=logits),
            TypeError,
            "a RelaxedOneHotCategorical, but",
        ),
        (
            lambda logits: torch.distributions.Independent(torch.distributions.Categorical(logits=logits), 1),
            TypeError,
            "a Independent, but",
        ),
        (
            lambda logits: MaskedCategorical(logits=logits, indices=torch.tensor([2, 0, 1]).expand(logits.shape)),
            ValueError,
            "a MaskedCategorical of indices, but .* pass it a bool mask in place of indices",
        ),
        (
            lambda logits: OneHotCategorical(logits=logits[..., 1:]),
            ValueError,
            r"\[3, 8, 2\], but one per action value",
        ),
        (lambda logits: OneHotCategorical(logits=logits[0, 0]), ValueError, r"shape \[3\], but one per action value"),
    ],
)
@pytest.mark.parametrize("encoding", ["[...]", "[..., 1]", "one-hot"])
def test_retrace_refuses_policies_of_other_actions(distribution, error, message, encoding):
    data = make_data()
    data["action"] = ENCODINGS[encoding](data["action"].argmax(-1))
    estimator = torchrl.Retrace(gamma=0.9, value_network=q_net(), actor_network=actor(distribution))
    with pytest.raises(error, match=message):
        estimator(data)


@pytest.mark.parametrize("batch", [(3, 8), (3, 1), (8,)], ids=str)
def test_retrace_takes_flags_and_log_probabilities_with_and_without_their_last_axis(batch):
    estimator = torchrl.Retrace(gamma=0.9, value_network=q_net(), actor_network=actor())
    expected = estimator(make_data(batch))
    data = make_data(batch)
    data["action_log_prob"] = data["action_log_prob"].unsqueeze(-1)
    data["steps_to_next_obs"] = torch.ones(batch, dtype=torch.int64)
    for key in ("done", "terminated"):
        data["next", key] = data["next", key].squeeze(-1)
    same(estimator(data), expected)


def test_retrace_without_a_critic_of_its_own():
    data = make_data()
    q, next_q, *_ = book_inputs(data)
    expected = torchrl.Retrace(gamma=0.9, value_network=q_net(), actor_network=actor())(data.clone())
    estimator = torchrl.Retrace(gamma=0.9, value_network=None, actor_network=actor())
    with pytest.raises(ValueError, match="value_network is None, so 'action_value' must be in the data"):
        estimator(data.clone())
    data["action_value"], data["next", "action_value"] = q, next_q
    same(estimator(data), expected)


def test_retrace_follows_keys_time_axis_and_gradients():
    estimator = torchrl.Retrace(gamma=0.9, value_network=q_net(), actor_network=actor(), differentiable=True)
    expected = estimator(make_data())
    assert expected["value_target"].requires_grad is False  # networks are held out, as in TorchRL's estimators
    estimator.set_keys(advantage="a", value_target="v", sample_log_prob="mu", action="act")
    renamed = make_data().rename_key_("action_log_prob", "mu").rename_key_("action", "act")
    out = estimator(renamed)
    same({"advantage": out["a"], "value_target": out["v"]}, expected)
    transposed = make_data().transpose(0, 1).contiguous()
    transposed.names = ["time", None]
    estimator = torchrl.Retrace(gamma=0.9, value_network=q_net(), actor_network=actor())
    torch.testing.assert_close(estimator(transposed)["value_target"].transpose(0, 1), expected["value_target"])


def test_retrace_in_a_dqn_loss():
    torch.manual_seed(2)
    network = QValueActor(TensorDictSequential(q_net()), in_keys=["observation"], spec=None, action_space="one_hot")
    loss = DQNLoss(network, action_space="one-hot", delay_value=True)
    estimator = torchrl.Retrace(gamma=0.9, lmbda=0.9, value_network=network, actor_network=actor())
    loss.make_value_estimator(estimator)
    loss.set_keys(reward="r")
    data = make_data()
    data["next"].rename_key_("reward", "r")
    loss(data)["loss"].backward()
    assert all(p.grad is not None for p in loss.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.exclude("action_log_prob"), "'action_log_prob', log μ"),
        (lambda d: d.set("action", torch.zeros(3, 8, 2)), r"action has shape \[3, 8, 2\]"),
        (lambda d: d.set("action", torch.zeros(3, 8)), r"action has shape \[3, 8\] and dtype torch.float32"),
        (lambda d: d.set(("next", "reward"), torch.zeros(3, 8)), r"needed"),
        (lambda d: d.set(("next", "done"), torch.zeros(3, 8, 2).bool()), r"\('next', 'done'\) has shape \[3, 8, 2\]"),
        (lambda d: d.set(("next", "terminated"), torch.zeros(3, 8, 3).bool()), r"\('next', 'terminated'\) has shape"),
        (lambda d: d.set("action_log_prob", torch.zeros(3, 8, 3)), r"'action_log_prob' has shape \[3, 8, 3\], but one"),
        (lambda d: d.set("steps_to_next_obs", torch.ones(3, 8, 2)), r"'steps_to_next_obs' has shape \[3, 8, 2\]"),
    ],
)
def test_retrace_says_what_is_wrong(change, message):
    estimator = torchrl.Retrace(gamma=0.9, value_network=q_net(), actor_network=actor())
    with pytest.raises(ValueError, match=message):
        estimator(change(make_data()))
    with pytest.raises(ValueError, match=r"'next_value' has shape \[8\], but one number per step"):
        estimator.value_estimate(make_data(), next_value=torch.zeros(8))
    stored = torchrl.Retrace(gamma=0.9, value_network=None, actor_network=actor())
    with pytest.raises(ValueError, match=r"'action_value' has shape \[3, 8, 1, 3\], but .* \[3, 8, n_actions\]"):
        stored(make_data().set("action_value", torch.zeros(3, 8, 1, 3)))
    with pytest.raises(ValueError, match="gamma must be a single number"):
        torchrl.Retrace(gamma=torch.ones(3), value_network=q_net(), actor_network=actor())
