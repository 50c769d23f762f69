"""What both ends of a connection share: messages, channels, credentials, errors, tracing, remote peers."""
