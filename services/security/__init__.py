"""Access control of a server: certificates, tokens, identities, limits."""
