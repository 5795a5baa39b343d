"""How much less a sample teaches in a larger batch.

Where each worker brings a batch of its own, more workers make the batch larger. With the batch M a
sample teaches (φ + M₀) / (φ + M) of what it teaches in the batch M₀ (Pollux, Qiao et al., OSDI
2021); φ is the gradient noise scale: the variance of one sample's gradient over the square of the
mean gradient. Here batches are counted in those of one worker, so M is the number of workers, and
M₀ is 1.

The estimate of both follows from the squared norms of each worker's gradient and of their mean (the
appendix of McCandlish et al., An Empirical Model of Large-Batch Training, 2018). Pure.
"""

from collections.abc import Sequence
from statistics import fmean

from elastic_driver.words.progress import GradientNorms

LEAST, MOST = 1e-6, 1e6  # batches; beyond these no size of a job makes a difference


def noise_scale(norms: Sequence[GradientNorms]) -> float | None:
    """Return φ in batches of one worker, by the norms of all workers; None: they do not tell."""
    size = len(norms)
    if size < 2:
        return None
    own, mean = fmean(n.own for n in norms), fmean(n.mean for n in norms)
    variance = (own - mean) * size / (size - 1)
    signal = (size * mean - own) / (size - 1)
    if own <= 0 or variance < 0:
        return None
    return MOST if signal <= variance / MOST else max(LEAST, variance / signal)


def efficiency(noise: float, size: int) -> float:
    """Return what a sample teaches with this many workers, against one worker."""
    return (noise + 1) / (noise + size)
