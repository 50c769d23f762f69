"""Sessions of rounds and of proposals: table, leases, checkout."""
