"""The names of an optimizer's parameters, and the groups that are reduced together."""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from elastic_driver.horovod.common.exceptions import HorovodUsageError
from elastic_driver.horovod.common.util import split_list
from elastic_driver.words import counted

Parameters = Iterable[tuple[str, torch.Tensor]]
Groups = int | Sequence[Sequence[torch.Tensor]] | None


class ParameterNames:
    """The names of an optimizer's parameters, also of those that are added later.

    All ranks give the same ones. A parameter that the script has not named has its place as name.
    """

    def __init__(
        self, param_groups: Sequence[dict[str, Any]], named_parameters: Parameters | None
    ) -> None:
        """Take names from the script.

        Args:
            param_groups: of the optimizer.
            named_parameters: pairs, of parameters outside of the optimizer, too; None for none.

        Raises HorovodUsageError for names that are not unique, or missing.
        """
        self._known: dict[torch.Tensor, str] = {}
        if named_parameters is None:
            return
        pairs = list(named_parameters)
        if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
            raise HorovodUsageError("named_parameters are pairs: give model.named_parameters()")
        counts = Counter(name for name, _ in pairs)
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise HorovodUsageError(
                f"named_parameters have names more than once: {', '.join(twice)}"
            )
        self._known = {p: name for name, p in pairs}
        missing = sum(p not in self._known for group in param_groups for p in group["params"])
        if missing:
            lacks = counted(missing, "parameter")
            raise HorovodUsageError(f"named_parameters lack {lacks} of the optimizer")

    def of(self, param_groups: Sequence[dict[str, Any]]) -> dict[torch.Tensor, str]:
        """Return the name of each parameter of these groups."""
        return {
            p: self._known.get(p) or f"parameter.{number}.{index}"
            for number, group in enumerate(param_groups)
            for index, p in enumerate(group["params"])
        }


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
