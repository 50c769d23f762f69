"""What uses the core and is used by none of it: training, planning, Ray Serve, NxD Inference.

Imported as `tandem.workshops`.
"""

if __name__ != "tandem.workshops":
    raise ImportError("this package is imported as tandem.workshops")
