"""Batch normalisation over the batches of all ranks, on any device."""

import torch

from elastic_driver.horovod.common.basics import size
from elastic_driver.horovod.torch.reductions import Sum, allreduce
from elastic_driver.worker.torch_seams import BatchNorm


class SyncBatchNorm(BatchNorm):
    """Normalises with mean and variance of the batches of all ranks while it trains.

    Arguments, parameters and buffers are those of `torch.nn.BatchNorm2d`; the input has two
    dimensions or more. Batches of the ranks may have different lengths. The gradients of weight
    and bias are this rank's, for `DistributedOptimizer` to reduce.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Return the normalised input."""
        self.check_shape(input)
        over_ranks = (self.training or self.running_mean is None) and size() > 1
        if not over_ranks:
            return super().forward(input)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        mean, variance, count = self._statistics(input)
        if self.training and self.running_mean is not None:
            self._update(mean.detach(), variance.detach(), count)
        return self._normalised(input, mean, variance)

    def _statistics(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Return mean and variance of each channel over all ranks, and the number of values.

        Each rank sums distances from its own running mean, which is close to the values, and sends
        the sums of the values themselves in double precision: so the difference of squares keeps
        its precision, and running means may differ from rank to rank.
        """
        channels = batch.transpose(0, 1).flatten(1).float()
        zero = channels.new_zeros(len(channels))
        shift = zero if self.running_mean is None else self.running_mean.float()
        distance = channels - shift[:, None]
        count, near = distance.shape[1], shift.double()
        sums, squares = distance.sum(1).double(), distance.square().sum(1).double()
        of_values = sums + count * near
        of_squares = squares + 2 * near * sums + count * near.square()
        total = allreduce(torch.cat([of_values, of_squares, near.new_tensor([count])]), op=Sum)
        number = float(total[-1].detach())
        mean, mean_square = total[:-1].view(2, -1) / number
        variance = (mean_square - mean.square()).clamp(min=0)
        return mean.float(), variance.float(), number

    def _update(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        """Move the running statistics towards those of this step."""
        momentum = self.momentum
        weight = 1.0 / float(self.num_batches_tracked) if momentum is None else momentum
        unbiased = variance * (count / max(count - 1, 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)

    def _normalised(
        self, batch: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
    ) -> torch.Tensor:
        shape = (1, -1, *[1] * (batch.dim() - 2))
        scale = torch.rsqrt(variance + self.eps)
        result = (batch.float() - mean.view(shape)) * scale.view(shape)
        if self.weight is not None:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(batch.dtype)
