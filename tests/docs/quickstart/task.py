"""The model, the data and the loops of an app like Flower's PyTorch quickstart; images made up."""

import torch
from torch import nn
from torch.utils.data import DataLoader


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


def load_data(partition_id, num_partitions=2, batch_size=8):
    drawn = torch.Generator().manual_seed(partition_id)
    images = torch.randn(40 + 8 * partition_id, 3, 4, 4, generator=drawn)
    labels = images.mean((2, 3)).argmax(1)
    rows = [{"img": x, "label": int(y)} for x, y in zip(images, labels, strict=True)]
    trainloader = DataLoader(rows[8:], batch_size=batch_size, shuffle=True, generator=drawn)
    return trainloader, DataLoader(rows[:8], batch_size=batch_size)


def test_data():
    return load_data(99)[1]


def train(net, trainloader, epochs, lr, device):
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for batch in trainloader:
            images, labels = batch["img"].to(device), batch["label"].to(device)
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
    return loss.item()


def test(net, testloader, device):
    loss, correct = 0.0, 0
    with torch.no_grad():
        for batch in testloader:
            output = net(batch["img"].to(device))
            loss += float(nn.functional.cross_entropy(output, batch["label"].to(device)))
            correct += int((output.argmax(1) == batch["label"]).sum())
    return loss / len(testloader), correct / len(testloader.dataset)
