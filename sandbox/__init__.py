"""The cage: knows Linux, knows no plugin."""

# The directory that holds runner/, sandbox/ and policies/: our own code, which no plugin may write.
CODE_ROOT: str = __path__[0].rpartition("/")[0]
