"""Who may call a server: certificates, tokens, identities, limits."""
