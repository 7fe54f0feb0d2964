"""Plans, agreement and transports: how payloads get from each replica to all others."""
