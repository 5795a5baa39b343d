"""The parts of Horovod's API that know no framework: the world, process sets, exceptions."""
