"""The command line: flags, configuration, roles."""
