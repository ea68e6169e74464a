"""Augmentation: of training batches alone, each picture by itself, drawn from torch's random state."""

import torch

from flwr_regs.experiments.data import augment

PICTURES = torch.rand(20, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_a_crop_is_a_part_of_its_picture_flipped_or_not() -> None:
    torch.manual_seed(0)
    x = 1 + torch.arange(32.0 * 32).reshape(1, 1, 32, 32).expand(200, 2, 32, 32)
    crops = augment.AUGMENTATIONS["crop-flip"].train(x)
    assert crops.shape == x.shape
    assert torch.equal(crops[:, 0], crops[:, 1])  # the channels together
    steps = {float((row[row > 0][1:] - row[row > 0][:-1]).unique()) for row in crops[:, 0, 16]}
    assert steps == {1.0, -1.0}
    assert len(crops[:, 0, 16, 16].unique()) > 60  # of 162 places, of two pictures each


def test_the_middle_of_a_picture_is_standardised_by_itself() -> None:
    x = PICTURES[:3] * 255
    part = x[:, :, 4:28, 4:28].flatten(1)
    want = (part - part.mean(1, keepdim=True)) / part.std(1, correction=0, keepdim=True)
    torch.testing.assert_close(augment.AUGMENTATIONS["crop-24"].test(x).flatten(1), want)
    dark = torch.zeros(1, 3, 4, 4)  # hardly any deviation: 1 / sqrt(n) instead
    dark[0, 0, 0, 0] = 0.048
    torch.testing.assert_close(augment.by_picture(dark), (dark - 0.001) * 48**0.5)


def test_equal_random_states_give_equal_batches_within_the_pictures_values() -> None:
    for name in augment.AUGMENTATIONS:
        data = augment.Augmented(name, PICTURES, torch.arange(20))
        batches = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            inputs, labels = data[[2, 5, 5]]
            assert labels.tolist() == [2, 5, 5]
            assert name == "crop-24" or (inputs.min() >= 0 and inputs.max() <= 1)
            batches.append(inputs)
        assert torch.equal(batches[0], batches[1])
        for one, other in ((batches[0], batches[2]), (batches[0][1], batches[0][2])):
            assert torch.equal(one, other) == (name == "")
