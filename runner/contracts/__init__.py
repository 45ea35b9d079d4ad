"""One folder per plugin contract, found by looking: a new contract is a new folder and nothing else.

Each package says, cheaply, how its manifests are recognised:

    NAME                    what --contract takes
    FORMAT                  "toml" or "json"
    FILE_NAMES              in order of preference
    SIGN                    what a document of another name is recognised by, for people
    IN_SUBDIRECTORY         whether a directory holding exactly one directory is looked into
    recognises(document)    whether a parsed document of unknown name is one of these
    OPERATORS_OWN_COMMAND   whether the command line is written by who runs the plugin (an MCP configuration)
                            and not by who wrote it: only then are the files it names shown unasked
    switches(environ)       what the operator says through the contract's own variables

and its `manifest` module, imported only when there is something to read, does the reading:

    read(document, *, home)          ->  (Plugin | None, diagnostics), from the text alone
    json_schema()                    ->  for editors

and, where a manifest may hold several plugins,

    servers(document)                ->  names to choose from
    read(document, *, server, home)      instead of the one above

and, where a manifest makes promises about files beside it,

    on_disk(document, plugin)        ->  diagnostics; asked by `runner check` only
"""
