"""One line out for each line in."""

from runner.protocol import frames, wire
from runner.protocol.dialect import (
    CallRefused,
    Dialect,
    Identity,
    Message,
    Ready,
    Refusal,
    Reply,
    Send,
    ShutdownSteps,
    Violation,
)

LINE_LIMIT = 1 << 16


def make(setting):
    return ToyDialect(setting)


class ToyDialect(Dialect):
    handshake_seconds = 5.0
    counters = {}  # noqa: RUF012 -- it counts nothing

    def __init__(self, setting):
        self._setting = setting
        self._waiting = {}

    def framer(self):
        return frames.LineFramer(LINE_LIMIT)

    def read(self, raw):
        value, cause, detail, weight = wire.message(raw)
        return Message(value, cause or "", detail, raw[:80], weight)

    def opening(self):
        return ()

    def feed(self, message):
        said = message.value
        if message.fault or not isinstance(said, dict):
            return (Violation("malformed_response", f"a line that is no object: {message.detail}", "toy"),)
        if "hello" in said:
            details = {"options": dict(self._setting.options)}
            return (Ready(Identity(str(said["hello"]), "1", "toy", details=details)),)
        token = self._waiting.pop(said.get("id"), None)
        return () if token is None else (Reply(token, said.get("did")),)

    def seconds(self, call):
        return 5.0

    def call(self, token, call):
        tools = dict(self._setting.plugin.exports)["tools"]
        if call.kind == "list":
            return (Reply(token, [{"name": name} for name in tools]),)
        if call.name not in tools:
            raise CallRefused(Refusal(token, "no", f"the toy cannot {call.name}", "not_found"))
        self._waiting[token] = token
        # The option reaches the dialect too, which sends the file's name to the plugin.
        said = {
            "id": token,
            "do": call.name,
            "with": call.input,
            "binding": self._setting.options.get("saying"),
        }
        return (Send(frames.line(wire.encode(said))),)

    def cancel(self, token, reason):
        self._waiting.pop(token, None)
        return ()

    def notify(self, method, params):
        raise CallRefused(Refusal(0, "no", "a toy is told nothing", "not_found"))

    def answer(self, ticket, answer):
        return ()

    def shutdown_steps(self):
        return ShutdownSteps()
