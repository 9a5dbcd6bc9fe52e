"""Stable-Baselines3: advantages and returns of every on-policy algorithm, by one patch.

`RolloutBuffer.compute_returns_and_advantage` is the one function behind A2C, PPO, TRPO, RecurrentPPO and MaskablePPO,
and no class in Stable-Baselines3 or sb3-contrib overrides it. It reads `episode_starts` (row t starts an episode, so
row t-1 ended one) and the flags of the last step; a time limit is already folded into the rewards by the collector. So
the translation is `rl_triton.gae` with `flags_at="start"` and nothing else.

The buffer's arrays stay numpy. On the CPU the results have Stable-Baselines3's bits (a zero may differ in its sign):
those of 2.4 and later, and those of the versions before, which carry float64. Calls that the library does not serve
run Stable-Baselines3's own code and are counted with the reason in `rl_triton.adapters.status()`.

Buffer classes for `rollout_buffer_class=` and `replay_buffer_class=` are in `rl_triton.adapters.sb3.buffers`,
`rl_triton.adapters.sb3.contrib_buffers` and `rl_triton.adapters.sb3.replay`.
"""

from rl_triton.adapters.sb3._behaviour import TESTED_VERSIONS
from rl_triton.adapters.sb3._patch import is_patched, patch, patched, unpatch
from rl_triton.adapters.sb3._recompute import recompute_advantages

__all__ = ["TESTED_VERSIONS", "is_patched", "patch", "patched", "recompute_advantages", "unpatch"]
