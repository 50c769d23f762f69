"""Flags, configuration and roles of the command line."""
