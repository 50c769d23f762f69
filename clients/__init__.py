"""Everything that calls a server: the terminal and local roles. Imported as `tandem.clients`."""

if __name__ != "tandem.clients":
    raise ImportError("this package is imported as tandem.clients")
