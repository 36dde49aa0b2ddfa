"""How many dimensions representations use (MAE-LM §3): effective rank by layer, of real tokens and of [MASK].

A layer's representations X [n, d] have singular values σ_1 >= σ_2 >= ...; with p = σ / Σσ and λ = σ²

    effective rank r_τ     the fewest σ whose sum reaches τ of the total (τ = 0.9; MAE-LM, definition in §3)
    entropy rank           exp(-Σ p log p)                            (Roy & Vetterli, 2007)
    participation ratio    (Σλ)² / Σλ²
    stable rank            Σλ / λ_1

Nothing of n rows is held: a d x d moment matrix, float32 products added into float64, has the σ as square roots of its
eigenvalues. What lies below the rounding of those products (λ < 10^-7 λ_1) counts as zero.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from unmask.data.packing import sequences
from unmask.devices import device
from unmask.errors import UserError
from unmask.modeling.stock import Encoder

ROUNDING = 1e-7
GROUPS = 40  # of sequences, for the bootstrap
RESAMPLES = 1000
MASK_RATIO = 0.15


def effective_rank(matrix: Tensor | np.ndarray, tau: float = 0.9) -> int:
    """r_τ of a matrix [n, d]: the fewest singular values whose sum reaches τ of their total; 0 for a zero matrix."""
    array = matrix.detach().double().cpu().numpy() if isinstance(matrix, Tensor) else np.asarray(matrix, np.float64)
    return rank_at(np.linalg.svd(array, compute_uv=False), tau)


def rank_at(singular_values: np.ndarray, tau: float = 0.9) -> int:
    """r_τ from singular values, in any order. Raises `ValueError` for a τ outside (0, 1]."""
    if not 0 < tau <= 1:
        raise ValueError(f"tau is {tau}, but must lie in (0, 1].")
    total = singular_values.sum()
    if total == 0:
        return 0
    summed = np.cumsum(np.sort(singular_values)[::-1])
    return int(np.searchsorted(summed, tau * total * (1 - 1e-12)) + 1)


class Measures(NamedTuple):
    """The four ranks of one spectrum."""

    effective_rank: float
    entropy_rank: float
    participation_ratio: float
    stable_rank: float


def measures(singular_values: np.ndarray, tau: float = 0.9) -> Measures:
    """All four from singular values; zeros for a zero matrix."""
    positive = singular_values[singular_values > 0]
    if not len(positive):
        return Measures(0, 0.0, 0.0, 0.0)
    share, power = positive / positive.sum(), positive**2
    entropy = float(np.exp(-(share * np.log(share)).sum()))
    ratio = float(power.sum() ** 2 / (power**2).sum())
    return Measures(rank_at(singular_values, tau), entropy, ratio, float(power.sum() / power.max()))


def spectrum(moment: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Singular values [d] of X, descending, and their directions [d, d] (columns), from its moment matrix XᵀX."""
    eigenvalues, vectors = np.linalg.eigh(moment)
    eigenvalues, vectors = eigenvalues[::-1], vectors[:, ::-1]
    real = eigenvalues > ROUNDING * max(eigenvalues[0], 0.0)
    return np.sqrt(np.where(real, eigenvalues, 0.0)), vectors


def singular_values(moment: np.ndarray) -> np.ndarray:
    """The singular values [d] of X from its moment matrix XᵀX [d, d], descending."""
    return spectrum(moment)[0]


@dataclass
class Moments:
    """Σ x xᵀ, Σ x and the count of rows x [d], in groups that a bootstrap draws from."""

    size: int
    groups: list[tuple[np.ndarray, np.ndarray, int]] = field(default_factory=list)
    """Of each finished group: Σ x xᵀ as its upper triangle in float32, Σ x, and the count."""
    total: np.ndarray = field(init=False)
    """[d, d] float64, of all finished groups."""

    def __post_init__(self) -> None:
        self.total = np.zeros((self.size, self.size))
        self._start_group()

    def _start_group(self) -> None:
        self._moment, self._sum, self._count = np.zeros((self.size, self.size)), np.zeros(self.size), 0

    @property
    def count(self) -> int:
        return sum(count for _, _, count in self.groups)

    def add(self, rows: Tensor) -> None:
        """Adds rows [n, d] of any floating type to the group at hand."""
        rows = rows.float()
        self._moment += (rows.T @ rows).cpu().numpy()
        self._sum += rows.sum(0, dtype=torch.float64).cpu().numpy()
        self._count += len(rows)

    def end_group(self) -> None:
        """What was added since the last call becomes a group."""
        self.total += self._moment
        triangle = self._moment[np.triu_indices(self.size)].astype(np.float32)
        self.groups.append((triangle, self._sum, self._count))
        self._start_group()

    def moment(self, centred: bool = False) -> np.ndarray:
        """Σ x xᵀ [d, d], about the mean if centred."""
        summed = np.sum([part[1] for part in self.groups], axis=0)
        return self.total - np.outer(summed, summed) / self.count if centred else self.total

    def resampled(self, vectors: np.ndarray, resamples: int, seed: int = 0, centred: bool = False) -> np.ndarray:
        """Singular values [resamples, d] of groups drawn with replacement, to first order.

        vectors: eigenvectors [d, d] of the whole; the moments of a draw along them stand for its eigenvalues, which
        spares an eigendecomposition for each draw.
        """
        whole, upper = np.zeros((self.size, self.size)), np.triu_indices(self.size)
        along = np.empty((len(self.groups), self.size))
        for row, (triangle, _, _) in zip(along, self.groups, strict=True):
            whole[upper] = triangle
            row[:] = 2 * ((whole @ vectors) * vectors).sum(0) - whole.diagonal() @ vectors**2
        rng, n = np.random.default_rng(seed), len(self.groups)
        weights = np.stack([np.bincount(rng.integers(n, size=n), minlength=n) for _ in range(resamples)])
        values = weights @ along
        if centred:
            sums = weights @ (np.stack([part[1] for part in self.groups]) @ vectors)
            values -= sums**2 / (weights @ np.array([part[2] for part in self.groups]))[:, None]
        return np.sqrt(np.clip(values, 0, None))


def joined(first: Moments, second: Moments) -> Moments:
    """Both together, group by group."""
    both = Moments(
        first.size, [(a + d, b + e, c + f) for (a, b, c), (d, e, f) in zip(first.groups, second.groups, strict=True)]
    )
    both.total = first.total + second.total
    return both


class Overlap(NamedTuple):
    """How the subspace of [MASK] lies to that of real tokens, each spanned by its first r_τ directions."""

    unused_variance: float
    """Share of the [MASK] representations' variance (about zero) outside the real tokens' subspace."""
    angles: list[float]
    """Principal angles in degrees, ascending."""


def overlap(mask: np.ndarray, real: np.ndarray, tau: float = 0.9) -> Overlap:
    """From the moment matrices [d, d] of both."""
    bases = []
    for moment in (mask, real):
        values, vectors = np.linalg.eigh(moment)
        rank = rank_at(np.sqrt(np.clip(values, 0, None)), tau)
        bases.append(vectors[:, ::-1][:, :rank])
    inside = np.trace(bases[1].T @ mask @ bases[1]) / np.trace(mask)
    cosines = np.linalg.svd(bases[0].T @ bases[1], compute_uv=False)
    return Overlap(float(np.clip(1 - inside, 0, 1)), np.degrees(np.arccos(np.clip(cosines, -1, 1))).tolist())


KINDS = ("plain", "real", "mask", "all")
"""Real tokens of the text without [MASK]; with 15% [MASK]: its real tokens, its [MASK]s, both."""


@dataclass
class RankAnalysis:
    """By layer (0: embeddings) and kind: the measures, their standard error over groups, and the overlap."""

    model: str
    tokens: int
    tau: float
    centred: bool
    layers: list[dict[str, Any]]


def verdict(found: RankAnalysis) -> str:
    """What MAE-LM's theory (§3) says of the model at hand, in a sentence."""
    mask, plain = ([row[kind]["effective_rank"] for row in found.layers] for kind in ("mask", "plain"))
    grows = all(later >= earlier for earlier, later in itertools.pairwise(mask)) and mask[-1] > mask[0]
    least = int(np.argmin(plain))
    how = "growing with depth" if grows else "not growing at every layer"
    return (
        f"{found.model}: the rank of [MASK] goes from {mask[0]} at the embeddings to {mask[-1]} in the last layer, "
        f"{how} as the theory says; real tokens leave the most dimensions unused in layer {least}: {plain[least]} of "
        f"{found.layers[least]['size']}."
    )


def analyse(
    encoder: Encoder,
    texts: Iterable[str],
    *,
    tau: float = 0.9,
    centred: bool = False,
    max_tokens: int = 200_000,
    max_length: int = 128,
    batch_size: int = 32,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> RankAnalysis:
    """Ranks of every layer of an encoder on a text, once as it is and once with 15% of its tokens as [MASK].

    Boundary tokens count as real ones. Raises `UserError` for an encoder without a [MASK] or hidden states, a text that
    is too short, and activations that are not finite, by layer.
    """
    if encoder.tokenizer.mask_token_id is None:
        raise UserError(f"'{encoder.name}' has a tokenizer without [MASK], so there is nothing to compare with.")
    model = encoder.load(AutoModel).eval().to(device())
    length = encoder.max_length(max_length)
    rows = list(sequences(texts, encoder.tokenizer, length, -(-max_tokens // length)))
    batches = [np.stack(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
    size = max(1, -(-len(batches) // GROUPS))
    found: list[dict[str, Moments]] = []
    rng = np.random.default_rng(seed)
    special = np.isin(np.arange(max(len(encoder.tokenizer), 1)), encoder.tokenizer.all_special_ids)
    for number, ids in enumerate(batches):
        masked = np.zeros(ids.shape, dtype=bool)
        for row, chosen in zip(ids, masked, strict=True):
            candidates = np.flatnonzero(~special[row])
            chosen[rng.permutation(candidates)[: max(1, round(MASK_RATIO * len(candidates)))]] = True
        at_mask = torch.from_numpy(masked).to(model.device)
        for kind_input in ("plain", "masked"):
            inputs = ids if kind_input == "plain" else np.where(masked, encoder.tokenizer.mask_token_id, ids)
            for layer, hidden in enumerate(hidden_states(model, inputs, encoder.name)):
                if layer == len(found):
                    found.append({kind: Moments(hidden.shape[-1]) for kind in KINDS[:3]})
                if kind_input == "plain":
                    found[layer]["plain"].add(hidden.flatten(0, 1))
                else:
                    found[layer]["real"].add(hidden[~at_mask])
                    found[layer]["mask"].add(hidden[at_mask])
        if number % size == size - 1 or number == len(batches) - 1:
            for moments in found:
                for each in moments.values():
                    each.end_group()
    tokens = sum(ids.size for ids in batches)
    layers = [_summary(moments, tau, centred, resamples) for moments in found]
    return RankAnalysis(encoder.name, tokens, tau, centred, layers)


@torch.no_grad()
def hidden_states(model: PreTrainedModel, ids: np.ndarray, name: str) -> Sequence[Tensor]:
    """Hidden states [B, L, d] of the embeddings and of each layer, the last one as the model gives it.

    Raises `UserError` for a model that gives none, or that are not finite.
    """
    batch = torch.from_numpy(ids).to(model.device)
    output = model(input_ids=batch, attention_mask=torch.ones_like(batch), output_hidden_states=True)
    layers = getattr(output, "hidden_states", None)
    if layers is None:
        raise UserError(f"{type(model).__name__} ('{name}') gives no hidden states: choose an encoder that does.")
    layers = [*layers[:-1], output.last_hidden_state]
    for layer, hidden in enumerate(layers):
        if not torch.isfinite(hidden).all():
            raise UserError(f"'{name}': the activations of layer {layer} are not finite: check its weights.")
    return layers


def _summary(moments: dict[str, Moments], tau: float, centred: bool, resamples: int) -> dict[str, Any]:
    row: dict[str, Any] = {"size": moments["real"].size}
    for kind, each in {**moments, "all": joined(moments["real"], moments["mask"])}.items():
        values, vectors = spectrum(each.moment(centred))
        drawn = []
        if len(each.groups) > 1 and resamples:
            drawn = [rank_at(draw, tau) for draw in each.resampled(vectors, resamples, centred=centred)]
        error = float(np.std(drawn, ddof=1)) if len(drawn) > 1 else float("nan")
        own = measures(values, tau)._asdict()
        row[kind] = {**own, "standard_error": error, "tokens": each.count, "spectrum": values.tolist()}
    row["overlap"] = overlap(moments["mask"].total, moments["real"].total, tau)._asdict()
    return row
