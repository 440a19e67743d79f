"""A training loop of one's own: any loss, optimiser and scheduler of torch, here on handwritten digits as graphs."""

import torch

from spin_fast import SPIN, PowerFeatures, datasets

torch.manual_seed(0)
graphs = datasets.load("digits")
split = datasets.find("digits").split(graphs.y)
features = PowerFeatures.from_graphs(graphs, num_hops=2)  # all message passing, once

model = SPIN(graphs.num_features, 32, 10, num_hops=2, attention=False)
model.calibrate(features[split.train])
model.operator = features.operator  # for predictions straight from graphs, and in checkpoints
model.node_features = features.node_features  # likewise: what had transformed the graphs, None here
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, epochs=8, steps_per_epoch=1)
criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)


def accuracy(ids: torch.Tensor) -> float:
    model.eval()
    with torch.inference_mode():
        return (model(features[ids]).argmax(1) == graphs.y[ids]).double().mean().item()


for epoch in range(8):
    model.train()
    for ids in split.train[torch.randperm(len(split.train))].split(32):
        batch = features[ids]  # nothing is copied: a batch is a list of graph ids
        optimizer.zero_grad()
        loss = criterion(model(batch), batch.y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    scheduler.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}, validation accuracy {accuracy(split.validation):.1%}")
print(f"test accuracy: {accuracy(split.test):.1%}")
