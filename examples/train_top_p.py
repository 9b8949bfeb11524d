import copy

import torch
from torch import nn

from tileloss.torch import allowed_from, linear_logprobs, linear_policy_loss

V, H, B, T, TOP_P = 500, 64, 32, 16, 0.8
torch.manual_seed(0)
model = nn.ModuleList(
    [nn.Embedding(V, H), nn.GRU(H, H, batch_first=True), nn.Linear(H, V, bias=False)]
)
nn.init.normal_(model[2].weight, std=3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


@torch.no_grad()
def sample():
    """Tokens [B, T+1], their log-probabilities among those that top-p kept, and which it kept, row after row."""
    engine, state = (
        copy.deepcopy(model).bfloat16(),
        None,
    )  # as an inference engine, not quite the trainer's numbers
    tokens, logps, kept = [torch.zeros(B, dtype=torch.long)], [], []
    for _ in range(T):
        hidden, state = engine[1](engine[0](tokens[-1][:, None]), state)
        p, ids = engine[2](hidden[:, 0]).float().softmax(-1).sort(descending=True)
        p = p.masked_fill(p.cumsum(-1) - p >= TOP_P, 0)
        p /= p.sum(-1, keepdim=True)
        choice = p.multinomial(1)
        tokens.append(ids.gather(1, choice)[:, 0])
        logps.append(p.gather(1, choice)[:, 0].log())
        kept.append([of_row[:count] for of_row, count in zip(ids, (p > 0).sum(-1), strict=True)])
    rows = [kept[t][b] for b in range(B) for t in range(T)]
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return torch.stack(tokens, 1), torch.stack(logps, 1), torch.cat(rows), offsets


def outside(logp, old_logp):
    ratio = (logp - old_logp).exp()
    return 100 * ((ratio < 0.9) | (ratio > 1.1)).float().mean().item()


rewards = []
for step in range(20):
    tokens, old_logp, kept, offsets = sample()
    allowed = allowed_from(kept, offsets, V)
    labels = tokens[:, 1:]
    reward = (labels % 2 == 0).float().mean(1)  # even tokens are wanted
    hidden, _ = model[1](model[0](tokens[:, :-1]))
    head = model[2].weight
    if step == 0:
        with torch.no_grad():
            whole, among = (
                linear_logprobs(hidden, head, labels, allowed=a).logp for a in (None, allowed)
            )
        print(
            f"ratios outside [0.9, 1.1]: {outside(whole, old_logp):.0f} % without allowed, {outside(among, old_logp):.0f} % with"
        )
    loss = linear_policy_loss(
        hidden, head, labels, reward - reward.mean(), old_logp=old_logp, allowed=allowed
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    rewards.append(reward.mean().item())
print(f"even tokens {100 * rewards[0]:.0f} % -> {100 * rewards[-1]:.0f} %")
