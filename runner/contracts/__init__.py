"""One folder per plugin contract. contract.py says what a folder offers, registry.py finds them."""
