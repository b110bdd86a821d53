"""Lightning Fabric with FSDP2: a small perceptron on two ranks, its communication compressed.

    torchrun --standalone --nproc-per-node 2 examples/fabric_fsdp2.py
    torchrun --standalone --nproc-per-node 2 examples/fabric_fsdp2.py --logs FOLDER

The lines that end with `# <- shardlab` are all that compression takes. With a folder TensorBoard
shows the loss, and what was sent; any other logger of Fabric takes its place.
"""

import argparse
import json

import torch
from lightning_fabric import Fabric
from lightning_fabric.loggers import TensorBoardLogger
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardlab  # <- shardlab


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--logs", help="folder for TensorBoard")
    logs = parser.parse_args().logs
    strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    loggers = [TensorBoardLogger(logs, "fabric")] if logs else []
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, loggers=loggers)
    fabric.launch()
    fabric.seed_everything(0)
    model = fabric.setup_module(
        nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)
        )
    )
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))
    gradients = {"codec": "int8:group=64", "error_feedback": True}  # <- shardlab
    handle = shardlab.attach(model, gradients, weights="int8")  # <- shardlab

    batches = torch.Generator().manual_seed(fabric.global_rank)
    for step in range(20):
        x = torch.randn(32, 64, generator=batches)
        loss = (model(x) - x.flip(1)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fabric.print(f"step {step}: loss {loss.item():.3f}")
        fabric.log("loss", loss.item(), step=step)
        fabric.log_dict(handle.metrics(), step=step)  # <- shardlab

    fabric.print(json.dumps(handle.ledger.summary()))  # <- shardlab


if __name__ == "__main__":
    main()
