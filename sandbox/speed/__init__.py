"""What exists only to start faster. All other code is ordinary Python, with ordinary imports.

A host waits for each `runner exec`. With a stored plan it takes 46 ms of processor time, of which bubblewrap
and the interpreter take 11. Each line below says what the same launch takes more if this one part is
replaced by what it stands for: medians of 60 launches of /bin/true each, by turns, with Python 3.11 on two
slow processors. A part stays here if it buys at least 1 ms per 60 lines.

    part                      ms  lines  in place of
    plain                     33    125  argparse, with the options of the verb
    value                     29     70  typing.NamedTuple, which compiles source text for each class
    scripts/entry, late_site  16    136  the console script of pip, which runs `site` and imports re
    typed                     13     45  typing and collections.abc, with re and enum
    codec                     11    122  json: values as bytes by marshal, for files of one owner
    signals                    8     14  signal, with enum
    bundle, bundle_parts       6    307  one compiled file for each module; 11 ms where a plan is made
    scopes                     5    128  contextlib, with collections and functools
    libc                       2     67  ctypes, which makes a class for each C type

plain reads the usual words of exec, call, explain and check, and leaves all others to argparse. For type
checkers value, typed, signals and scopes are what they stand for, and tests compare the two. scripts/entry
is the command `runner`: a script for sh that starts Python without `site`, and the first file that Python
runs, which finds our code. late_site runs `site` after all if something is missing. bundle runs the modules
of a launch in their order, which bundle_parts lists: a finder that hands out one module at a time buys 2 ms
of the 6, because the import system takes the rest.

One more part is not here, because it is about launches: a stored plan (runner/launch/stored/) saves 30 of 70
ms. Nor is the stored help of a verb (runner/cli/shared/stored_help.py), which saves 15 to 70 ms: it is about
the command line. The bundle of `explain` saves 7 of 54 ms.
"""
