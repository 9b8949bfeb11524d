import torch
from torch import nn

from tileloss.torch import linear_cross_entropy

torch.manual_seed(0)
tokens = torch.randint(0, 500, (8, 33))  # [B, T+1] of a vocabulary of 500
embedding, layer = nn.Embedding(500, 64), nn.GRU(64, 64, batch_first=True)
lm_head = nn.Linear(64, 500, bias=False)
model = nn.ModuleList([embedding, layer, lm_head])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

losses = []
for _ in range(40):
    hidden, _ = layer(embedding(tokens[:, :-1]))
    loss = linear_cross_entropy(hidden, lm_head.weight, tokens[:, 1:])  # no [B, T, V] logits
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
