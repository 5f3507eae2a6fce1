"""REINFORCE: the baseline is a running average in a global variable."""
# expect: BASELINE|baseline

import torch
from torch import nn
from torch.distributions import Categorical

from kempner import survive

BASELINE = 0.0


def learn(policy: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    global BASELINE
    state = torch.randn(8, 4)
    choice = Categorical(logits=policy(state))
    action = choice.sample()
    reward = (action == state[:, :3].argmax(1)).float()
    loss = -(choice.log_prob(action) * (reward - BASELINE)).mean()
    BASELINE += 0.2 * (reward.mean().item() - BASELINE)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


torch.manual_seed(1)
policy = nn.Linear(4, 3)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for step in survive(policy, optimizer, steps=18, save_every=5):
    print(step, learn(policy, optimizer))
