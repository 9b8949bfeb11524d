"""Run by torch.distributed.run on two processes: losses of label smoothing by Trainer, and by TileLoss, as JSON."""

import copy
import json
import sys
from pathlib import Path

import torch.distributed

from test_transformers_trainer import SMOOTHING, logged, train
from tileloss.integrations.transformers import make_compute_loss_func, patch
from transformers_models import build

folder = Path(sys.argv[1])
unpatched = build("llama")
patched = patch(copy.deepcopy(unpatched))
own = logged(train(unpatched, folder, label_smoothing_factor=SMOOTHING))
ours = logged(train(patched, folder, make_compute_loss_func(patched, label_smoothing=SMOOTHING)))
if torch.distributed.get_rank() == 0:
    print(json.dumps([own, ours]))
torch.distributed.destroy_process_group()
