"""Mistakes that the tests must notice: `make mutants` makes each in a copy of the tree and runs the tests named."""
