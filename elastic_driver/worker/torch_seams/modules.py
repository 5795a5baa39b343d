"""Modules: what one holds itself, without its submodules.

A scripted module has objects of its own in place of the dictionaries.
"""

from operator import attrgetter

from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

parameters_of = attrgetter("_parameters")  # name → parameter or None
buffers_of = attrgetter("_buffers")  # name → tensor or None
children_of = attrgetter("_modules")  # name → module or None
unsaved_buffers_of = attrgetter("_non_persistent_buffers_set")  # names that no state_dict has

BatchNorm = _BatchNorm  # the base of those that normalise over the batch
WithStatistics = _NormBase  # the base of those, and of instance normalisations
