"""REINFORCE, with its baseline in a registered tensor."""

import torch
from torch import nn
from torch.distributions import Categorical

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    policy, baseline = nn.Linear(4, 3), torch.zeros(())
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for step in survive(policy, optimizer, steps=18, save_every=5, state={"baseline": baseline}):
        state = torch.randn(8, 4)
        choice = Categorical(logits=policy(state))
        action = choice.sample()
        reward = (action == state[:, :3].argmax(1)).float()
        loss = -(choice.log_prob(action) * (reward - baseline)).mean()
        baseline += 0.2 * (reward.mean() - baseline)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


main()
