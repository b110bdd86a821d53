"""A small random Llama whose layers are streamed from host memory, from a plain script.

    python examples/slide.py
    torchrun --standalone --nproc-per-node 2 examples/slide.py

Host memory holds the model and the optimizer, once for all ranks; the device holds two layers.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import shardlab

VOCABULARY, LENGTH = 100, 64


def main() -> None:
    if "RANK" in os.environ:  # by torchrun; otherwise this process is alone
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config)
    strategy = {"activation_checkpointing": "full"}  # as under `strategies` in params.yaml
    sliding = shardlab.SlideFSDP(model, strategy, learning_rate=3e-3, clip=1.0)

    rank = dist.get_rank()
    batches = torch.Generator().manual_seed(rank)
    for step in range(20):
        # the next number, as a text that can be learned
        first = torch.randint(VOCABULARY, (8, 1), generator=batches)
        tokens = (first + torch.arange(LENGTH)) % VOCABULARY
        sliding.learning_rate = 3e-3 * min(1, (step + 1) / 5)
        output = sliding(input_ids=tokens, labels=tokens)
        if rank == 0:
            print(f"step {step}: loss {output.loss.item():.3f}, norm {sliding.gradient_norm:.3f}")

    folder = Path(tempfile.gettempdir(), f"slide-example-{os.getppid()}")
    sliding.save(folder)  # parameters and optimizer states, for load
    sliding.load(folder)
    weights = sliding.state_dict()  # of rank 0: whole, in float32, by the names of the model
    if rank == 0:
        print(f"{sum(tensor.numel() for tensor in weights.values()):,} numbers saved in {folder}")
        shutil.rmtree(folder)  # this is an example
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
