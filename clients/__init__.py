"""Everything that calls: channels, the generation client, the remote verifier."""
