"""What hardware and software is here: devices, cores, packages, the instance; and what clashes."""
