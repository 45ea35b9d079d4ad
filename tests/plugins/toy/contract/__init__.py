"""A contract of a few lines: one folder is all a contract needs. See tests/runner/contracts/test_toy.py.

The plugin says {"hello": ID}. Then it answers each {"id": N, "do": TOOL, "with": INPUT} with
{"id": N, "did": VALUE}.
"""

from runner.contracts.contract import Contract, ContractOption, ContractVerb, Example, Listing


class ToyContract(Contract):
    name = "toy"
    about = "a toy that says hello, and then what it did"
    format = "json"
    file_names = ("toy.json",)
    sign = "a toy key"
    no_command_hint = 'give it a command: "run": ["./toy"]'
    calls = dict.fromkeys(("tool", "trick"), ())
    lists = (Listing("tools"), Listing("tricks", declared=True))
    takes = ("secret_files",)
    example = Example("say", '"boo"')
    verbs = (
        ContractVerb(
            "recite", "runner.contracts.toy.verb_recite", "print the tools of a toy without starting it"
        ),
    )
    options = (ContractOption("--saying", "FILE", "a JSON file with the word a toy says", names_file=True),)

    def recognises(self, document):
        return "toy" in document.data

    def read(self, document, *, server, home, options, config):
        from runner.contracts.toy.manifest import read

        return read(document, options.get("saying"))


CONTRACT = ToyContract()
