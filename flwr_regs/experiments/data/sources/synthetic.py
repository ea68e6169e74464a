"""Data sets made from a seed: Li et al.'s synthetic(alpha, beta), and quadratic problems."""

from __future__ import annotations

import numpy as np

from flwr_regs.experiments.data.sources import data_files as files
from flwr_regs.experiments.data.sources.data_files import Parts

INPUTS, CLASSES = 60, 10
TRAINED = 0.9


def synthetic(_: str, alpha: float, beta: float, clients: int, seed: int, iid: bool) -> Parts:
    """Return Synthetic(alpha, beta) of FedProx (Li et al. 2020, Sec. 5.1 and App. C.1); groups are clients.

    Client k has a linear model y = argmax(softmax(W x + b)), of 60 inputs and 10 classes. W and b have
    entries from N(u_k, 1), u_k from N(0, alpha). Its inputs come from N(v_k, S), S diagonal with S_jj =
    j^-1.2, the entries of v_k from N(B_k, 1), B_k from N(0, beta). It has 50 examples and as many more as a
    log-normal draw with mean 4 and deviation 2 says. The last tenth of them is for testing.

    As in the paper's code, `alpha` and `beta` are standard deviations. With `iid`, all clients have one
    model, with entries from N(0, 1), and inputs with mean 0.
    """
    if clients < 1 or min(alpha, beta) < 0:
        given = f"{clients}, {alpha}, {beta}"
        raise ValueError(f"synthetic needs clients >= 1, alpha >= 0 and beta >= 0, not {given}")
    rng = np.random.default_rng(seed)
    sizes = rng.lognormal(4, 2, clients).astype(int) + 50
    shift, centre = rng.normal(0, alpha, clients), rng.normal(0, beta, clients)
    spread = np.sqrt(np.arange(1, INPUTS + 1) ** -1.2)
    if iid:
        shift = np.zeros(clients)  # of the one model, which is drawn for the first client
    train, test = {}, {}
    for k in range(clients):
        mean = np.zeros(INPUTS) if iid else rng.normal(centre[k], 1, INPUTS)
        if k == 0 or not iid:
            weights = rng.normal(shift[k], 1, (INPUTS, CLASSES))
            bias = rng.normal(shift[k], 1, CLASSES)
        x = rng.normal(mean, spread, (sizes[k], INPUTS))
        y = (x @ weights + bias).argmax(axis=1)
        halves = (files.cut(of, TRAINED) for of in (x.astype(np.float32), y))
        train[k], test[k] = zip(*halves, strict=True)
    return files.by_group(train, test)


def quadratics(
    data_dir: str, clients: int, dimension: int, spread: float, curvature: float, seed: int
) -> Parts:
    """Return F_i(x) = 1/2 |A_i^(1/2) (x - c_i)|^2 of each client i as data with a loss; groups are clients.

    The Field Guide's first toy problem (Wang et al. 2021, Sec. 4.3.1). Client i has `dimension` examples
    (a_j, b_j): a_j is column j of the root of (dimension · A_i), and b_j = a_j · c_i. The mean of 1/2 (a_j
    · x - b_j)^2 over them is F_i(x), and equal clients weigh equally. An input is (a_j, b_j), float32
    ``(dimension + 1,)``; the labels are 0 and without meaning, and so is the accuracy. The loss is
    ``half-square`` of the output of `flwr_regs.experiments.models.layers.Quadratic`. Test data are
    the training data: the test loss is F(x), the mean of all F_i.

    Parameters
    ----------
    spread : float
        The deviation of the entries of c_i, which are from N(0, spread).
    curvature : float
        How A_i differ: their eigenvalues are from 1 to 1 + `curvature`, in directions that are random for
        each client. 0: all are the identity.
    """
    if clients < 1 or dimension < 1 or min(spread, curvature) < 0:
        raise ValueError("quadratics needs clients and dimension >= 1, spread and curvature >= 0")
    rng = np.random.default_rng(seed)
    problems = {}
    for client in range(clients):
        axes, _ = np.linalg.qr(rng.normal(size=(dimension, dimension)))
        values = 1 + curvature * rng.random(dimension)
        root = (axes * np.sqrt(values)) @ axes.T  # symmetric: its columns are its rows
        optimum = rng.normal(0, spread, dimension)
        a = np.sqrt(dimension) * root
        rows = np.column_stack([a, a @ optimum]).astype(np.float32)
        problems[client] = rows, np.zeros(dimension, np.int64)
    return {**files.by_group(problems, problems), "loss": "half-square"}
