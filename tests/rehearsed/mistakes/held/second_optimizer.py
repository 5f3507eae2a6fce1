"""A GAN whose discriminator and its optimizer are not registered."""
# expect: critic|discriminator|d_optimizer

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

from kempner import survive


def main() -> None:
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
    critic = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
    d_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
    for step in survive(generator, g_optimizer, steps=16, save_every=4):
        real, fake = torch.randn(16, 1) + 3, generator(torch.randn(16, 2))
        d_loss = cross_entropy(critic(real), ones) + cross_entropy(critic(fake.detach()), zeros)
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        g_loss = cross_entropy(critic(fake), ones)
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        print(step, d_loss.item(), g_loss.item())


main()
