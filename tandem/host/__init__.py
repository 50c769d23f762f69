"""The machine: devices, cores, memory, packages, and packages that clash."""
