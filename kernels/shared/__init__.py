"""What several operators are made of."""
