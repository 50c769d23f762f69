"""The client roles: terminal clients, and roles that run models locally. Imported as `tandem.clients`."""

if __name__ != "tandem.clients":
    raise ImportError("this package is imported as tandem.clients")
