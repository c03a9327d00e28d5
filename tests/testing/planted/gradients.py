"""The honest backward pass on top of the forward's methods, recomputing P tile by tile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.testing.planted.kernel import Kernel, finite


class Gradients(NamedTuple):
    """dq (Sq, Hq, d), dk (Sk, Hk, d), dv (Sk, Hk, dv), dsink (Hq,) or None, in the work type."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsink: np.ndarray | None


class Saved(NamedTuple):
    """dout, out (Hq, Sq, dv); lse, dlse (Hq, Sq); all in the work type."""

    dout: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    dlse: np.ndarray


class GradientKernel(Kernel):
    """dV = P^T dO; dS = P (dO V^T - D) through the modification; dQ = scale dS K; dK alike."""

    def row_dot(self, saved: Saved) -> np.ndarray:
        """D = rowsum(dO O) - dLSE, (Hq, Sq)."""
        return (saved.dout * saved.out).sum(axis=-1) - saved.dlse

    def probabilities(self, scores: np.ndarray, lse: np.ndarray) -> np.ndarray:
        """exp(S - LSE), normalised."""
        return np.exp(scores - finite(lse)[..., None])

    def dropout_of_dv(self, cols: slice) -> np.ndarray:
        """Dropout's factor of P in dV."""
        return self.dropout(cols)

    def dropout_of_dp(self, cols: slice) -> np.ndarray:
        """Dropout's factor of dP."""
        return self.dropout(cols)

    def chain(self, grad: np.ndarray, scaled: np.ndarray, cols: slice) -> np.ndarray:
        """From the gradient of the modified scores to that of the scaled ones."""
        cap, derivative = self.softcap(), self.options.score_mod_bwd
        if cap:
            grad = grad * (1 - np.tanh(scaled / self.work.type(cap)) ** 2)
        if self.score_mod() is not None and derivative is not None:
            grad = derivative(grad, scaled, *self.score_grid(cols), self.options.aux_tensors)
        return np.asarray(grad, self.work)

    def fold_dk(self, x: np.ndarray) -> np.ndarray:
        """(Hq, keys, d) -> (Hk, keys, d): the sum over each group."""
        return x.reshape(self.heads_k, self.group, *x.shape[1:]).sum(axis=1)

    def fold_dv(self, x: np.ndarray) -> np.ndarray:
        """As `fold_dk`."""
        return x.reshape(self.heads_k, self.group, *x.shape[1:]).sum(axis=1)

    def scale_of_dq(self) -> float:
        """The factor of dS K."""
        return self.scale()

    def scale_of_dk(self) -> float:
        """The factor of dS^T Q."""
        return self.scale()

    def add_dq(self, dq: np.ndarray, part: np.ndarray) -> np.ndarray:
        """dQ with the share of a tile of keys."""
        return dq + part

    def sink_gradient(self, saved: Saved, row_dot: np.ndarray) -> np.ndarray | None:
        """-sum over the rows of the sink's probability times D; a row of nothing is the sink's."""
        sink = self.sink()
        if sink is None:
            return None
        weight = np.where(np.isneginf(saved.lse), 1, np.exp(sink - finite(saved.lse)))
        return -(weight * row_dot).sum(axis=-1)

    def gradient_tiles(self) -> list[slice]:
        """The tiles of keys that the backward pass visits."""
        return self.tiles()

    def ds_and_p(
        self, saved: Saved, row_dot: np.ndarray, cols: slice, operands: tuple[np.ndarray, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        """dS of the scaled scores, and P, of a tile."""
        keep, k, v = operands
        scaled = self.scaled(k)
        scores = np.where(keep, self.bent(scaled, cols), self.work.type(-np.inf))
        p = self.probabilities(scores, saved.lse)
        dp = (saved.dout @ v.transpose(0, 2, 1)) * self.dropout_of_dp(cols)
        grad = np.where(keep, self.chain(p * (dp - row_dot[..., None]), scaled, cols), 0)
        return self.rounded_p(grad.astype(self.work)), p

    def backward(
        self, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, dlse: np.ndarray
    ) -> Gradients:
        """From dout, out (Sq, Hq, dv) and lse, dlse (Hq, Sq)."""
        self.is_backward = True
        heads_first = (x.transpose(1, 0, 2).astype(self.work) for x in (dout, out))
        saved = Saved(*heads_first, lse.astype(self.work), dlse.astype(self.work))
        row_dot = self.row_dot(saved)
        dq = np.zeros(self.q.shape, self.work)
        dk, dv = (np.zeros(x.shape, self.work) for x in (self.k, self.v))
        for cols in self.gradient_tiles():
            keep = self.keep(cols)
            k, v = self.keys_and_values(cols, keep)
            ds, p = self.ds_and_p(saved, row_dot, cols, (keep, k, v))
            dropped = self.rounded_p(p) * self.dropout_of_dv(cols)
            dv[:, cols] = self.fold_dv(dropped.transpose(0, 2, 1) @ saved.dout)
            dk[:, cols] = self.fold_dk(ds.transpose(0, 2, 1) @ self.wide_q)
            dq = self.add_dq(dq, ds @ k * self.work.type(self.scale_of_dq()))
        dk *= self.work.type(self.scale_of_dk())
        arrays = (x.transpose(1, 0, 2) for x in (dq, dk, dv))
        return Gradients(*arrays, self.sink_gradient(saved, row_dot))
