"""Everything that listens: the three gRPC services and their processes. Imported as `tandem.services`."""

if __name__ != "tandem.services":
    raise ImportError("this package is imported as tandem.services")
