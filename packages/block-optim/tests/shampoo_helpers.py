"""Training loose parameters with Shampoo and SOAP on lists of gradients, and both written plainly by their papers.

arXiv 1802.09568 (Shampoo), 2309.06497 (blocks, exponential averages, grafting) and 2409.11321 (SOAP): one dense fp64
matrix at a time, without batching, and without a schedule except a block's turn in every f-th step.
"""

import torch


def gradients(shape, count=14, seed=0):
    """Correlated gradients, so that factors have structure."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(shape[-1], shape[-1], generator=generator) / shape[-1] ** 0.5
    mix += 0.3 * torch.eye(shape[-1])
    return [torch.randn(shape, generator=generator) @ mix for _ in range(count)]


def train(params, grads, optimizer):
    """Step through lists of gradients, one list for each parameter."""
    params = list(params)
    for step in zip(*grads, strict=True):
        for param, grad in zip(params, step, strict=True):
            param.grad = None if grad is None else grad.clone()
        optimizer.step()


def parameter(shape, seed=7):
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def numbered_blocks(weight, max_dim):
    """The shape of each block of a matrix, with its number among the blocks of that shape."""
    numbers: dict[torch.Size, int] = {}
    for block in blocks_of(weight, max_dim):
        numbers[block.shape] = numbers.get(block.shape, -1) + 1
        yield block.shape, numbers[block.shape]


def close(found, wanted, tolerance=2e-4):
    assert float((found.double() - wanted).norm() / wanted.norm()) < tolerance


def power(matrix, exponent, epsilon):
    """(A + epsilon ||A||_F I)^exponent; the identity for a zero matrix."""
    size = matrix.norm()
    if size < 1e-30:
        return torch.eye(len(matrix), dtype=matrix.dtype)
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * (values.clamp(min=0) + epsilon * size).pow(exponent)) @ vectors.mT


def graft_direction(method, m, v, t, beta2, eps):
    if method == "rmsprop":
        return m / (v.sqrt() + eps)
    return m / ((v / (1 - beta2**t)).sqrt() + eps)


class ShampooBlock:
    """One block's sequence of directions; its roots are computed in steps that are `number` modulo `frequency`."""

    def __init__(self, rows, cols, *, betas, epsilon, eps, frequency, grafting, number=0):
        self.betas, self.epsilon, self.eps = betas, epsilon, eps
        self.frequency, self.grafting, self.number = frequency, grafting, number
        self.left, self.right = torch.zeros(rows, rows).double(), torch.zeros(cols, cols).double()
        self.left_root, self.right_root = torch.eye(rows).double(), torch.eye(cols).double()
        self.m, self.v = torch.zeros(rows, cols).double(), torch.zeros(rows, cols).double()
        self.t = 0

    def direction(self, g):
        b1, b2 = self.betas
        self.t += 1
        t = self.t
        left, right = g @ g.mT, g.mT @ g
        if b2 < 1:
            self.left = b2 * self.left + (1 - b2) * left
            self.right = b2 * self.right + (1 - b2) * right
        else:
            self.left, self.right = self.left + left, self.right + right
        if (t - self.number) % self.frequency == 0:
            correction = 1 - b2**t if b2 < 1 else 1.0
            self.left_root = power(self.left / correction, -0.25, self.epsilon)
            self.right_root = power(self.right / correction, -0.25, self.epsilon)
        self.m = b1 * self.m + (1 - b1) * g
        beta_v = b2 if b2 < 1 else 0.999
        self.v = beta_v * self.v + (1 - beta_v) * g * g
        m = self.m / (1 - b1**t)
        graft = graft_direction(self.grafting, m, self.v, t, beta_v, self.eps)
        if t < self.frequency:
            return torch.zeros_like(g) if self.grafting == "none" else graft
        found = self.left_root @ m @ self.right_root
        return found if self.grafting == "none" else found * graft.norm() / found.norm()


def blocks_of(matrix, max_dim):
    """Row by row, the blocks of a matrix: views."""
    return [part for strip in matrix.split(max_dim, 0) for part in strip.split(max_dim, 1)]


class SoapMatrix:
    """SOAP on one matrix: the paper's algorithm, momentum kept in the original space."""

    def __init__(self, rows, cols, *, betas, shampoo_beta, eps, frequency, number=0):
        self.betas, self.shampoo_beta, self.eps = betas, shampoo_beta, eps
        self.frequency, self.number = frequency, number
        self.left, self.right = torch.zeros(rows, rows).double(), torch.zeros(cols, cols).double()
        self.started = False
        self.q_left, self.q_right = torch.eye(rows).double(), torch.eye(cols).double()
        self.m, self.v = torch.zeros(rows, cols).double(), torch.zeros(rows, cols).double()
        self.t = 0

    def direction(self, g):
        """None for the first gradient, which only makes the basis."""
        if not self.started:
            self.started = True
            self._accumulate(g)
            self.q_left = torch.linalg.eigh(self.left)[1].flip(1)
            self.q_right = torch.linalg.eigh(self.right)[1].flip(1)
            return None
        self.t += 1
        b1, b2 = self.betas
        self.m = b1 * self.m + (1 - b1) * g
        rotated = self.q_left.mT @ g @ self.q_right
        self.v = b2 * self.v + (1 - b2) * rotated**2
        m = self.q_left.mT @ self.m @ self.q_right
        step = m / (self.v.sqrt() + self.eps) * (1 - b2**self.t) ** 0.5 / (1 - b1**self.t)
        found = self.q_left @ step @ self.q_right.mT
        self._accumulate(g)
        if (self.t - self.number) % self.frequency == 0:
            self.q_left, order = self._refreshed(self.left, self.q_left)
            self.v = self.v[order]
            self.q_right, order = self._refreshed(self.right, self.q_right)
            self.v = self.v[:, order]
        return found

    def _accumulate(self, g):
        beta = self.shampoo_beta
        self.left = beta * self.left + (1 - beta) * g @ g.mT
        self.right = beta * self.right + (1 - beta) * g.mT @ g

    def _refreshed(self, factor, basis):
        moved = factor @ basis
        order = (basis * moved).sum(0).argsort(descending=True)
        return torch.linalg.qr(moved[:, order])[0], order
