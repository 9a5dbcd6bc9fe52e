"""The command that puts the call into a script, on scripts of our own that are built as CleanRL's are."""

import difflib
import subprocess
import sys
import types

import pytest
import torch

pytest.importorskip("libcst", reason="needs the extra `cleanrl`")

from rl_triton.adapters.cleanrl._command import main
from rl_triton.adapters.cleanrl._rewrite import Refused, rewrite

HEADER = '''\
# A script, with things that a formatter would touch:   this    , and that
"""docstring"""
import  types
import torch   # noqa

class Args : pass


args = args_of_the_test
device = "cpu"
rewards = torch.zeros((args.num_steps, args.num_envs)).to(device)
curiosity = torch.zeros((args.num_steps, args.num_envs)).to(device)
rewards.copy_(given["rewards"]); curiosity.copy_(given["curiosity"])
values, dones, int_values = given["values"], given["dones"], given["int_values"]
next_value, int_next_value, next_done = given["next_value"], given["int_next_value"], given["next_done"]
for iteration in range(2) :
    for t in range(3):
        print(t)
    # bootstrap
    with torch.no_grad():
'''
GAE = """\

        # a comment before it
        advantages = torch.zeros_like(rewards).to(device)
        running = 0
        for t in reversed(range(args.num_steps)):
            if t == args.num_steps - 1:
                alive = 1.0 - next_done  # a comment in it
                ahead = next_value
            else:
                alive = 1.0 - dones[t + 1]
                ahead = values[t + 1]
            error = rewards[t] + args.gamma * ahead * alive - values[t]
            advantages[t] = running = error + args.gamma * args.gae_lambda * alive * running
        returns = advantages + values
"""
RND = """\
        advantages = torch.zeros_like(rewards, device=device)
        int_advantages = torch.zeros_like(curiosity, device=device)
        running = 0
        int_running = 0
        for t in reversed(range(args.num_steps)):
            if t == args.num_steps - 1:
                alive = 1.0 - next_done
                int_alive = 1.0
                ahead = next_value
                int_ahead = int_next_value
            else:
                alive = 1.0 - dones[t + 1]
                int_alive = 1.0
                ahead = values[t + 1]
                int_ahead = int_values[t + 1]
            error = rewards[t] + args.gamma * ahead * alive - values[t]
            int_error = curiosity[t] + args.int_gamma * int_ahead * int_alive - int_values[t]
            advantages[t] = running = error + args.gamma * args.gae_lambda * alive * running
            int_advantages[t] = int_running = (
                int_error + args.int_gamma * args.gae_lambda * int_alive * int_running
            )
        returns = advantages + values
        int_returns = int_advantages + int_values
"""
Q_LAMBDA = """\
        returns = torch.zeros_like(rewards).to(device)
        for t in reversed(range(args.num_steps)):
            if t == args.num_steps - 1:
                value, _ = torch.max(network(next_value), dim=-1)
                alive = 1.0 - next_done
                returns[t] = rewards[t] + args.gamma * value * alive
            else:
                alive = 1.0 - dones[t + 1]
                value = values[t + 1]
                returns[t] = (
                    rewards[t]
                    + args.gamma * (args.gae_lambda * returns[t + 1] + (1 - args.gae_lambda) * value) * alive
                )
"""
FOOTER = """\

    total = ( returns.sum( ) )   # kept
"""
LOOPS = {"compute_gae": GAE, "compute_gae_rnd": RND, "compute_q_lambda": Q_LAMBDA}
RESULTS = ("advantages", "int_advantages", "returns", "int_returns", "total")


def script(loop):
    return HEADER + loop + FOOTER


def run(source, seed):
    generator = torch.Generator().manual_seed(seed)
    T, N = 1 + seed, 1 + seed % 4

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    given = {name: normal(T, N) for name in ("rewards", "curiosity", "values", "int_values")}
    given |= {name: normal(1, N) for name in ("next_value", "int_next_value")}
    given["dones"] = (torch.rand(T, N, generator=generator) < 0.2).float()
    given["next_done"] = (torch.rand(N, generator=generator) < 0.4).float()
    args = types.SimpleNamespace(num_steps=T, num_envs=N, gamma=0.99, int_gamma=0.9, gae_lambda=0.95)
    namespace = dict(args_of_the_test=args, given=given, network=lambda x: torch.stack([x[0], -x[0]], dim=-1))
    exec(compile(source, "script", "exec"), namespace)
    return {name: namespace[name] for name in RESULTS if name in namespace}


@pytest.mark.parametrize(("function", "loop"), LOOPS.items())
def test_numbers_are_the_same_before_and_after(function, loop, capsys):
    source = script(loop)
    rewritten = rewrite(source.encode()).source.decode()
    assert "reversed" in source
    assert "reversed" not in rewritten
    assert f"{function}(" in rewritten
    for seed in range(12):
        before, after = run(source, seed), run(rewritten, seed)
        assert before.keys() == after.keys()
        for name in before:
            torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(("function", "loop"), LOOPS.items())
def test_everything_else_is_kept_byte_for_byte(function, loop, newline):
    source = script(loop).replace("\n", newline).encode()
    before, after = source.splitlines(keepends=True), rewrite(source).source.splitlines(keepends=True)
    changes = [c for c in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes() if c[0] != "equal"]
    imported = f"from rl_triton.adapters.cleanrl import {function}{newline}".encode()
    assert changes[0][0] == "insert"
    assert after[changes[0][3] : changes[0][4]] == [imported]
    assert before[changes[0][1] - 1].startswith(b"import torch")
    where = [i for i, line in enumerate(before) if b"zeros_like" in line]
    removed = [i for _, first, last, *_ in changes[1:] for i in range(first, last)]
    assert min(removed) == where[0]
    assert before[max(removed) + 1 :] == after[len(after) - len(before) + max(removed) + 1 :]
    assert before[: where[0]] == [line for line in after[: where[0] + 1] if line != imported]
    assert all(line.endswith(newline.encode()) for line in after)


def test_the_call_reads_as_one_would_write_it():
    rewritten = rewrite(script(GAE).encode()).source.decode()
    assert (
        "        # a comment before it\n"
        "        advantages, returns = compute_gae(rewards, values, dones, next_value, next_done, args.gamma, "
        "args.gae_lambda)\n"
    ) in rewritten
    long = script(GAE).replace("args.gae_lambda", "args.the_lambda_of_generalised_advantage_estimation")
    assert (
        "        advantages, returns = compute_gae(\n"
        "            rewards, values, dones, next_value, next_done, args.gamma, args.the_lambda_of_generalised_"
        "advantage_estimation\n"
        "        )\n"
    ) in rewrite(long.encode()).source.decode()


REFUSALS = {
    "another equation": ("- values[t]\n", "+ values[t]\n", "`rewards[t] + args.gamma * ahead * alive + values[t]` is"),
    "flags of the step itself": ("dones[t + 1]", "dones[t]", "`t` is not what the loops that we know have there"),
    "terminations only": ("1.0 - next_done", "1.0 - terminations[t]", "`terminations[t]` is not what"),
    "one line more": ("            error =", "            rewards[t] += 1\n            error =", "is not what"),
    "one line less": ("        returns = advantages + values\n", "", "is not what"),
    "a loop with an else": (
        "        returns =",
        "        else:\n            pass\n        returns =",
        "for t in reversed(range(args.num_steps)): ...` is not",
    ),
    "two roles for one name": ("running", "error", "`error` is not what"),
    "two different flags": ("dones[t + 1]", "next_done[t + 1]", "`next_done` is not what"),
    "a function as a value": ("ahead = next_value", "ahead = agent.value(x)", "`agent.value(x)` is not what"),
    "a scale that changes": ("args.gamma *", "args.gamma[t] *", "is not what"),
    "fewer steps than rows": ("range(args.num_steps)", "range(args.num_steps - 1)", "is not what"),
    "rows of unknown number": (
        "rewards = torch.zeros((args.num_steps,", "rewards = torch.zeros((args.buffer_size,",
        "nothing in the script shows that `rewards` has as many rows",
    ),
    "rows counted from the steps": (
        "for iteration", "rewards = torch.zeros(args.num_steps + 1, args.num_envs)\nfor iteration",
        "nothing in the script shows that `rewards` has as many rows",
    ),
    "flags of a row more": (
        "for iteration", "dones = torch.zeros((args.num_steps + 1, args.num_envs)).to(device)\nfor iteration",
        "`dones` is made with another number of rows; make it with as many, and leave",
    ),
    "values of a row more": (
        "for iteration", "values = torch.zeros(1 + args.num_steps, args.num_envs)\nfor iteration",
        "`values` is made with another number of rows",
    ),
    "rows that change": (
        "for iteration in range(2) :", "rewards = rewards[1:]\nfor iteration in range(2) :",
        "nothing in the script shows that `rewards` has as many rows",
    ),
    "an attribute in place of a variable": ("running", "args.running", "the loop sets `args.running`, which others"),
    "what the loop leaves behind is read": ("total =", "total = error +", "reads `error`, which the loop leaves"),
    "gradients": ("with torch.no_grad():", "with torch.enable_grad():", "the loop is not under torch.no_grad()"),
    "a name that is taken": ("class Args :", "def compute_gae(): pass\nclass Args :", "is called compute_gae"),
    "JAX": ("import torch ", "import jax\nimport torch ", "it computes in JAX"),
    "no Python": ("class Args : pass", "class Args", "not Python that LibCST can read"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(old, new, reason):
    source = script(GAE)
    assert old in source
    if old == "import torch ":  # a loop that would be ours otherwise is rewritten whatever else is imported
        source = source.replace("advantages + values", "advantages - values")
    with pytest.raises(Refused) as refusal:
        rewrite(source.replace(old, new).encode())
    assert reason in str(refusal.value)


def test_elements_counted_from_the_steps_are_no_rows():
    made = "values = torch.zeros(args.num_steps * args.num_envs).reshape(args.num_steps, -1)\nfor iteration"
    source = script(LOOPS["compute_gae"]).replace("for iteration", made, 1)
    assert "compute_gae(" in rewrite(source.encode()).source.decode()


def test_refuses_what_has_no_loop_or_is_done():
    with pytest.raises(Refused, match="it has no loop"):
        rewrite(b"import torch\n")
    done = rewrite(script(GAE).encode()).source
    with pytest.raises(Refused, match="it uses rl_triton.adapters.cleanrl already"):
        rewrite(done)


def test_other_loops_are_left_alone_and_named():
    other = "    for k in reversed(range(3)):\n        print(k)\n"
    result = rewrite((script(GAE) + other).encode())
    assert result.source.decode().endswith(other)
    assert [note.split(": ")[0] for note in result.notes] == ["line 25", "left alone"]


def test_several_loops():
    """In one block, in another, and in one inside of that."""
    inner = "    if True:\n        with torch.no_grad():\n" + GAE.replace("\n        ", "\n            ")
    source = script(GAE + RND) + inner + "    with torch.no_grad():\n" + Q_LAMBDA
    result = rewrite(source.encode())
    text = result.source.decode()
    assert len(result.notes) == 4
    assert "reversed" not in text
    assert "from rl_triton.adapters.cleanrl import compute_gae, compute_gae_rnd, compute_q_lambda\n" in text
    for seed in (3, 4):
        before, after = run(source, seed), run(text, seed)
        for name in before:
            torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-5)


def test_names_of_other_scopes_do_not_count():
    inner = "def f(error, t):\n    running = error + t\n    return [running for alive in range(3) if alive]\n"
    rewrite((inner + script(GAE)).encode())


def test_command(tmp_path, capsysbinary):
    path = tmp_path / "script.py"
    source, wanted = script(GAE).encode(), rewrite(script(GAE).encode()).source
    path.write_bytes(source)

    assert main([str(path)]) == 0
    assert capsysbinary.readouterr().out == wanted
    assert main([str(path), "--diff"]) == 0
    diff = capsysbinary.readouterr().out.decode()
    assert "+from rl_triton.adapters.cleanrl import compute_gae\n" in diff
    assert "-        returns = advantages + values\n" in diff
    assert path.read_bytes() == source
    assert main([str(path), "--write"]) == 0
    assert path.read_bytes() == wanted
    assert main([str(path), "--write"]) == 1
    assert b"refused: it uses rl_triton.adapters.cleanrl already" in capsysbinary.readouterr().err
    assert path.read_bytes() == wanted
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "none.py")])
    assert stop.value.code == 2


def test_module_runs_as_a_command(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(script(GAE))
    command = [sys.executable, "-m", "rl_triton.adapters.cleanrl", str(path), "--diff"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "+        advantages, returns = compute_gae(" in result.stdout


def test_without_libcst():
    code = (
        "import sys; sys.modules['libcst'] = sys.modules['gymnasium'] = None\n"
        "import rl_triton.adapters.gymnasium\n"
        "from rl_triton.adapters.cleanrl import compute_gae\n"
        "from rl_triton.adapters.cleanrl._command import main\n"
        "main([sys.argv[1]])"
    )
    result = subprocess.run([sys.executable, "-c", code, __file__], capture_output=True, text=True)
    assert "ImportError: rewriting CleanRL scripts needs LibCST: pip install 'rl-triton[cleanrl]'" in result.stderr
