"""Sessions: their table, checkout, leases, and those of proposals."""
