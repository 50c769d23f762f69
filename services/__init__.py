"""The servers: three gRPC services and the processes that run them. Imported as `tandem.services`."""

if __name__ != "tandem.services":
    raise ImportError("this package is imported as tandem.services")
