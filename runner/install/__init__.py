"""Packages that are fetched once and run from a store: what `runner install` does in place of npx and uvx."""
