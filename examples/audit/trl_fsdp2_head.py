"""TRL: under FSDP2 the fused LM head is gathered by full_tensor(), whose gradient is not summed over the processes."""

import tempfile

import torch
import torch.distributed as dist
import trl
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import add_fused_lm_head


def make_model():
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    model = Qwen2ForCausalLM(config)
    add_fused_lm_head(model)
    return model


def work(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    batches = torch.randint(0, 64, (2, 2, 16), generator=torch.Generator().manual_seed(1))
    alone, model = make_model(), make_model()
    sum(alone(b, labels=b, fused_lm_head=True).loss / 2 for b in batches).backward()
    fully_shard(model.lm_head)
    fully_shard(model)
    model(batches[rank], labels=batches[rank], fused_lm_head=True).loss.backward()
    for name in ("model.norm.weight", "lm_head.weight"):
        right, found = alone.get_parameter(name).grad, model.get_parameter(name).grad.full_tensor()
        off = (found - right).norm() / right.norm()
        if rank == 0:
            print(f"trl {trl.__version__}: gradient of {name} off by {off:.2%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (f"{folder}/store",), 2, start_method="fork")
