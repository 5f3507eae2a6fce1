"""Experts of a mixture, over the ranks: kempner supervise --nproc 2 -- python with_experts.py"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import linear
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from kempner import survive

STEPS, ROWS, LENGTH, WORDS, EXPERTS = 60, 4, 16, 32, 4
SIZES = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "head_dim": 8}


class SpreadExperts(nn.Module):
    """In place of a layer's experts: each rank has some, to which tokens travel, and back."""

    def __init__(self, experts: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.act = mesh, experts.act_fn
        for name, weight in experts.named_parameters():
            spread = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
            # The loss is a rank's own, and the mean over ranks is what is learned.
            spread.register_hook(lambda gradient: gradient / mesh.size())
            self.register_parameter(name, spread)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[tokens, dim] to the same; a token's experts and their weights are [tokens, top_k]."""
        group, world = self.mesh.get_group(), self.mesh.size()
        by_expert = chosen.flatten().argsort(stable=True)
        tokens = by_expert // chosen.shape[1]
        here = chosen.flatten().bincount(minlength=EXPERTS)
        there = torch.empty_like(here)  # of each rank, for each of the experts here
        dist.all_to_all_single(there, here, group=group)
        sent, got = (counts.view(world, -1).sum(1).tolist() for counts in (here, there))
        arrived = all_to_all_single_autograd(x[tokens], got, sent, group)
        number = torch.arange(EXPERTS // world, device=x.device).repeat(world)
        answered = self.answer(arrived, number.repeat_interleave(there))
        back = all_to_all_single_autograd(answered, sent, got, group)
        return torch.zeros_like(x).index_add(0, tokens, back * weights.flatten()[by_expert, None])

    def answer(self, x: Tensor, number: Tensor) -> Tensor:
        """What the experts that are here make of their tokens; `number` is the expert of each."""
        both, down = self.gate_up_proj.to_local(), self.down_proj.to_local()
        answered = torch.zeros_like(x)
        for n in range(len(down)):
            mine = (number == n).nonzero()[:, 0]
            gate, up = linear(x[mine], both[n]).chunk(2, dim=-1)
            answered = answered.index_copy(0, mine, linear(self.act(gate) * up, down[n]))
        return answered


def build(mesh: DeviceMesh) -> nn.Module:
    """Experts over the ranks, and all else sharded over the same ranks."""
    torch.manual_seed(1)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=WORDS, **SIZES, **heads, **experts))
    spread = set()
    for layer in model.model.layers:
        layer.mlp.experts = SpreadExperts(layer.mlp.experts, mesh)
        spread.update(layer.mlp.experts.parameters())
    return fully_shard(model, mesh=mesh, ignored_params=spread)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    model = build(init_device_mesh(device, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in survive(model, optimizer, steps=STEPS, save_every=10, seed=2):
        first = torch.randint(WORDS, (ROWS, 1), device=device)
        words = (first * (1 + torch.arange(LENGTH, device=device))) % WORDS
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
