"""gRPC services and their server processes. Imported as `tandem.services`."""

if __name__ != "tandem.services":
    raise ImportError("this package is imported as tandem.services")
