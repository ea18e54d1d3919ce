"""An agent that has to remember: policy gradients in a loop of one's own, with a carried memory.

    python examples/recall_agent.py
    python examples/recall_agent.py --mem-len 0      # without memory: chance

In each of eight environments an episode shows a cue at its first step, then noise, and asks at its
last step for the cue: the reward is 1 for the right answer of four. Episodes are longer than the
windows that the agent learns from, so only the memory knows the cue. Chance is 0.25.

Only names of `txl_dist.__all__` are used. The model takes vectors and has no vocabulary; encoder
and policy head are the caller's.
"""

import argparse
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from txl_dist import Memory, ModelConfig, TransformerXL

# Shapes: B environments, T steps of a window, O observation, D width, A actions

NUM_ENVIRONMENTS, NUM_CUES = 8, 4
WINDOW = 6
"""Steps that one update learns from."""
EPISODE_STEPS = (8, 14)
"""Shortest and longest episode, all longer than a window."""
WIDTH = 32
OBSERVATION = NUM_CUES + 2  # the cue, whether the answer is asked for, and noise
LR, ENTROPY_BONUS, CLIPPING = 3e-3, 0.1, 1.0


@dataclass
class RecallEnvironment:
    """observe() -> (observation, whether it is the first of an episode); act(a) -> reward."""

    generator: torch.Generator
    step: int = 0
    length: int = 0
    cue: int = 0
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=40))
    """Of the last episodes."""

    def observe(self) -> tuple[Tensor, bool]:
        if self.step == 0:
            low, high = EPISODE_STEPS
            self.length = self._draw(low, high + 1)
            self.cue = self._draw(0, NUM_CUES)
        observation = torch.zeros(OBSERVATION)
        if self.step == 0:
            observation[self.cue] = 1
        observation[NUM_CUES] = self.is_asked
        observation[NUM_CUES + 1] = torch.randn((), generator=self.generator)
        return observation, self.step == 0

    @property
    def is_asked(self) -> bool:
        return self.step == self.length - 1

    def act(self, action: int) -> float:
        reward = float(self.is_asked and action == self.cue)
        if self.is_asked:
            self.rewards.append(reward)
        self.step = 0 if self.is_asked else self.step + 1
        return reward

    def _draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.generator))


class Agent(nn.Module):
    """read(observations, memory) -> (logits of the actions [B, T, A], the next memory)."""

    def __init__(self, mem_len: int, seed: int) -> None:
        super().__init__()
        config = ModelConfig(
            vocab_size=None, n_layer=2, d_model=WIDTH, n_head=2, d_head=16, d_inner=64,
            mem_len=mem_len, distance_encoding="rotary", pre_lnorm=True, init_std=0.1,
        )  # fmt: skip
        torch.manual_seed(seed)
        self.encoder = nn.Linear(OBSERVATION, WIDTH)
        self.model = TransformerXL(config, seed=seed)
        self.policy = nn.Linear(WIDTH, NUM_CUES)

    def read(
        self, observed_BTO: Tensor, starts_BT: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        vectors_BTD = self.encoder(observed_BTO)
        output_BTD, memory = memory.read(self.model, vectors_BTD, starts=starts_BT)
        return self.policy(output_BTD), memory


@dataclass
class Window:
    """What the agent saw, did and got in T steps of all environments, [B, T] each."""

    observed: list[Tensor] = field(default_factory=list)
    starts: list[Tensor] = field(default_factory=list)
    actions: list[Tensor] = field(default_factory=list)
    rewards: list[Tensor] = field(default_factory=list)
    asked: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def act(
    agent: Agent, environments: list[RecallEnvironment], memory: Memory, generator: torch.Generator
) -> Window:
    """Act for a window, one step at a time. Every step continues the memory."""
    window = Window()
    for _ in range(WINDOW):
        observations, is_first = zip(*(each.observe() for each in environments), strict=True)
        observed_B1O, starts_B1 = (
            torch.stack(observations)[:, None],
            torch.tensor(is_first)[:, None],
        )
        logits_B1A, memory = agent.read(observed_B1O, starts_B1, memory)
        action_B = torch.multinomial(logits_B1A[:, 0].softmax(-1), 1, generator=generator)[:, 0]
        window.asked.append(torch.tensor([each.is_asked for each in environments]))
        rewards = [each.act(int(a)) for each, a in zip(environments, action_B, strict=True)]
        window.observed.append(observed_B1O[:, 0])
        window.starts.append(starts_B1[:, 0])
        window.actions.append(action_B)
        window.rewards.append(torch.tensor(rewards))
    return window


def train(mem_len: int, *, num_windows: int, seed: int = 0) -> float:
    """Train an agent; returns the mean reward of the last 320 episodes."""
    generator = torch.Generator().manual_seed(seed)
    environments = [
        RecallEnvironment(torch.Generator().manual_seed(1000 * seed + number))
        for number in range(NUM_ENVIRONMENTS)
    ]
    agent = Agent(mem_len, seed)
    optimizer = torch.optim.AdamW(agent.parameters(), lr=LR, weight_decay=0.0)
    memory = Memory.empty(agent.model, NUM_ENVIRONMENTS)
    baseline = 1 / NUM_CUES
    for number in range(1, num_windows + 1):
        window = act(agent, environments, memory, generator)
        # The whole window in one call, from the memory before it: the same numbers, with gradients.
        # The memory after it is of the weights before the update, as in training on text.
        logits_BTA, memory = agent.read(
            torch.stack(window.observed, 1), torch.stack(window.starts, 1), memory
        )
        asked_BT, reward_BT = torch.stack(window.asked, 1), torch.stack(window.rewards, 1)
        action_N, reward_N = torch.stack(window.actions, 1)[asked_BT], reward_BT[asked_BT]
        if len(reward_N):
            policy = torch.distributions.Categorical(logits=logits_BTA[asked_BT])
            advantage_N = reward_N - baseline
            loss = -(advantage_N * policy.log_prob(action_N)).mean()
            loss = loss - ENTROPY_BONUS * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), CLIPPING)
            optimizer.step()
            baseline += 0.05 * (float(reward_N.mean()) - baseline)
        if number % 100 == 0:
            print(f"window {number} | mean reward {mean_reward(environments):.2f}", flush=True)
    return mean_reward(environments)


def mean_reward(environments: list[RecallEnvironment]) -> float:
    """Of the last episodes of all environments."""
    rewards = [reward for each in environments for reward in each.rewards]
    return sum(rewards) / max(1, len(rewards))


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mem-len", type=int, default=16, help="0: without memory")
    parser.add_argument("--windows", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    reward = train(arguments.mem_len, num_windows=arguments.windows, seed=arguments.seed)
    print(f"mean reward of the last episodes: {reward:.2f} (chance {1 / NUM_CUES})")


if __name__ == "__main__":
    main()
