"""What several tests share: small models, databases, clocks and the cast."""
