"""runner recite: a verb that comes with the toy's contract."""

import sys

from runner.manifest.load import load

NAME = "recite"
EXAMPLE = "runner recite ./my-toy"


def add_arguments(parser):
    parser.add_argument("manifest", metavar="MANIFEST")
    parser.add_argument("--loud", action="store_true", help="in capital letters")


def run(args):
    plugin = load(args.manifest, contract="toy").plugin
    if plugin is None:
        sys.stderr.write("runner recite: this is no toy; runner check says why\n")
        return 20
    text = " ".join(dict(plugin.exports)["tools"])
    sys.stdout.write((text.upper() if args.loud else text) + "\n")
    return 0
