"""${state_dir} and ${plugin_dir} in a plugin's arguments and variables.

A server's database or cache has a place that lasts, which nobody knows before the launch.
"""

from __future__ import annotations

import os

from runner.outcome import EXEC_REFUSED, Failure, Outcome
from runner.plugin import Plugin
from sandbox.spec import ARGUMENT_LIMIT, PLUGIN_DIR_TOKEN, STATE_DIR_TOKEN, EnvRequest


class Placeholders:
    """${state_dir} and ${plugin_dir} in a plugin's arguments and variables, replaced."""

    def __init__(self, plugin: Plugin, state_dir: str | None) -> None:
        self._words = {PLUGIN_DIR_TOKEN: plugin.root or os.path.dirname(plugin.manifest)}
        if state_dir is not None:
            self._words[STATE_DIR_TOKEN] = state_dir

    def text(self, text: str) -> str:
        for token, value in self._words.items():
            if token in text:
                text = text.replace(token, value)
        # A manifest may repeat a token as often as fits into an argument, and a folder's name is longer.
        if len(os.fsencode(text)) > ARGUMENT_LIMIT:
            outcome = Outcome(
                "manifest_invalid",
                "manifest",
                f"an argument or variable has over {ARGUMENT_LIMIT} bytes once its folders are filled in",
                "argument_too_long",
                "name them less often",
            )
            raise Failure(outcome, EXEC_REFUSED)
        return text

    def request(self, request: EnvRequest) -> EnvRequest:
        return request if request.value is None else request._replace(value=self.text(request.value))
