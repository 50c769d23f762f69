"""Tools on top of the core, imported as `tandem.workshops`: planning and Ray Serve."""

if __name__ != "tandem.workshops":
    raise ImportError("this package is imported as tandem.workshops")
