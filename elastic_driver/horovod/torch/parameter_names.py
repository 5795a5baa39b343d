"""The names of an optimizer's parameters, and the groups that are reduced together."""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from elastic_driver.horovod.common.exceptions import HorovodUsageError
from elastic_driver.horovod.common.util import split_list

Parameters = Iterable[tuple[str, torch.Tensor]]
Groups = int | Sequence[Sequence[torch.Tensor]] | None


def names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Parameters | None
) -> dict[torch.Tensor, str]:
    """Return the name of each parameter of the optimizer.

    Raises HorovodUsageError for names that are not unique, or missing.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if named_parameters is None:
        return {
            p: f"parameter.{number}.{index}"
            for number, group in enumerate(optimizer.param_groups)
            for index, p in enumerate(group["params"])
        }
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise HorovodUsageError("named_parameters are pairs: give model.named_parameters()")
    counts = Counter(name for name, _ in pairs)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise HorovodUsageError(f"named_parameters have names more than once: {', '.join(twice)}")
    known = {p: name for name, p in pairs}
    missing = sum(p not in known for p in parameters)
    if missing:
        raise HorovodUsageError(f"named_parameters lack {missing} parameters of the optimizer")
    return {p: known[p] for p in parameters}


def groups_of(
    groups: Groups, num_groups: int, names: dict[torch.Tensor, str]
) -> list[list[torch.Tensor]]:
    """Return the groups as lists of parameters; raises HorovodUsageError for wrong ones.

    `num_groups` is the older form; it counts where there is no other, and warns the script.
    """
    if num_groups:
        warnings.warn("num_groups is the older form of groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None or groups == 0:
        return []
    if isinstance(groups, int):
        if groups < 0:
            raise HorovodUsageError(f"groups={groups}: give a number from 0 on, or lists")
        wanted = [p for p in names if p.requires_grad]
        return [part for part in split_list(wanted, min(groups, len(wanted))) if part]
    lists = [list(group) for group in groups]
    members = [id(p) for group in lists for p in group]
    if len(set(members)) != len(members):
        raise HorovodUsageError("groups have a parameter in common")
    if any(p not in names for group in lists for p in group):
        raise HorovodUsageError("groups have a parameter that the optimizer does not have")
    return lists
