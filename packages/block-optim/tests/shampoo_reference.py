"""Shampoo, KL-Shampoo and SOAP written plainly from their papers' equations, one dense fp64 matrix at a time.

arXiv 1802.09568 (Shampoo), 2309.06497 (blocks, exponential averages, grafting, momentum), 2409.11321 (SOAP) and
2509.03378 (KL-Shampoo). Nothing is shared with the package: no batching, no packing, no schedule but "every f steps".
"""

import torch


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
    """One block's sequence of directions."""

    def __init__(
        self,
        rows,
        cols,
        *,
        betas,
        epsilon,
        eps,
        frequency,
        start,
        grafting,
        kl=False,
        exponent=None,
        phase=None,
    ):
        self.betas, self.epsilon, self.eps = betas, epsilon, eps
        self.frequency, self.start, self.grafting, self.kl = frequency, start, grafting, kl
        self.exponent = exponent if exponent is not None else (0.5 if kl else 0.25)
        self.phase = phase  # None: turns at start, start + frequency ...; else in steps that are phase modulo frequency
        self.left, self.right = torch.zeros(rows, rows).double(), torch.zeros(cols, cols).double()
        self.left_root, self.right_root = torch.eye(rows).double(), torch.eye(cols).double()
        self.m, self.v = torch.zeros(rows, cols).double(), torch.zeros(rows, cols).double()
        self.t, self.rooted = 0, False

    def direction(self, g):
        b1, b2 = self.betas
        self.t += 1
        t = self.t
        left, right = self._statistics(g)
        if b2 < 1:
            self.left = b2 * self.left + (1 - b2) * left
            self.right = b2 * self.right + (1 - b2) * right
        else:
            self.left, self.right = self.left + left, self.right + right
        if self._turn(t):
            correction = 1 - b2**t if b2 < 1 else 1.0
            self.left_root = power(self.left / correction, -self.exponent, self.epsilon)
            self.right_root = power(self.right / correction, -self.exponent, self.epsilon)
            self.rooted = True
        self.m = b1 * self.m + (1 - b1) * g
        beta_v = b2 if b2 < 1 else 0.999
        self.v = beta_v * self.v + (1 - beta_v) * g * g
        m = self.m / (1 - b1**t)
        graft = graft_direction(self.grafting, m, self.v, t, beta_v, self.eps)
        if t < self.start:
            return torch.zeros_like(g) if self.grafting == "none" else graft
        found = self.left_root @ m @ self.right_root
        return found if self.grafting == "none" else found * graft.norm() / found.norm()

    def _turn(self, t):
        if self.phase is None:
            return t >= self.start and (t - self.start) % self.frequency == 0
        mine = [
            s
            for s in range(self.start - self.frequency + 1, self.start + 1)
            if (s - self.phase) % self.frequency == 0
        ]
        first = mine[0] if mine[0] >= 1 else self.start
        return t == first or (t > first and (t - self.phase) % self.frequency == 0)

    def _statistics(self, g):
        if not self.kl:
            return g @ g.mT, g.mT @ g
        rows, cols = g.shape
        if not self.rooted:  # both factors isotropic, of one size, with the right product
            scale = 1 / g.pow(2).mean().sqrt()
            return scale * g @ g.mT / cols, scale * g.mT @ g / rows
        inverse_right, inverse_left = self.right_root @ self.right_root, self.left_root @ self.left_root
        return g @ inverse_right @ g.mT / cols, g.mT @ inverse_left @ g / rows


def blocks_of(matrix, max_dim):
    """Row by row, the blocks of a matrix: views."""
    return [part for strip in matrix.split(max_dim, 0) for part in strip.split(max_dim, 1)]


class MomentumRule:
    """W <- W - lr D with decoupled weight decay and momentum, as the reference implementation orders them."""

    def __init__(self, lr, weight_decay=0.0, momentum=0.0, dampening=0.0, nesterov=False):
        self.lr, self.decay, self.mu, self.damp, self.nesterov = (
            lr,
            weight_decay,
            momentum,
            dampening,
            nesterov,
        )
        self.buffer = None

    def apply(self, weight, direction):
        direction = direction + self.decay * weight
        if self.mu:
            self.buffer = torch.zeros_like(weight) if self.buffer is None else self.buffer
            self.buffer = self.mu * self.buffer + (1 - self.damp) * direction
            direction = (1 - self.damp) * direction + self.mu * self.buffer if self.nesterov else self.buffer
        return weight - self.lr * direction


class SoapMatrix:
    """SOAP on one matrix: the paper's algorithm, momentum kept in the original space."""

    def __init__(self, rows, cols, *, betas, shampoo_beta, eps, frequency, offset=0):
        self.betas, self.shampoo_beta, self.eps = betas, shampoo_beta, eps
        self.frequency, self.offset = frequency, offset
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
        if (self.t + self.offset) % self.frequency == 0:
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
