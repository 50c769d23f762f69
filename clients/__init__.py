"""Client roles: terminal clients and local models. Imported as `tandem.clients`."""

if __name__ != "tandem.clients":
    raise ImportError("this package is imported as tandem.clients")
