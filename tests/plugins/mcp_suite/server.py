#!/usr/bin/python3 -I
"""An MCP server with the tools, prompts and resources that MCP's own conformance suite asks of a server."""

import json
import sys
import threading
import time

IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
SOUND = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQAAAAA="
CAPABILITIES = {
    "tools": {},
    "prompts": {},
    "resources": {"subscribe": True},
    "logging": {},
    "completions": {},
}
SHAPES = {  # of what its person is asked
    "test_elicitation": {
        "username": {"type": "string", "description": "User's response"},
        "email": {"type": "string", "description": "User's email address"},
    },
    "test_elicitation_sep1034_defaults": {
        "name": {"type": "string", "default": "John Doe"},
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
        "verified": {"type": "boolean", "default": True},
    },
    "test_elicitation_sep1330_enums": {
        "untitledSingle": {"type": "string", "enum": ["option1", "option2", "option3"]},
        "titledSingle": {
            "type": "string",
            "oneOf": [{"const": f"value{each}", "title": f"{each}. option"} for each in (1, 2, 3)],
        },
        "legacyEnum": {
            "type": "string",
            "enum": ["opt1", "opt2", "opt3"],
            "enumNames": ["Option One", "Option Two", "Option Three"],
        },
        "untitledMulti": {
            "type": "array",
            "items": {"type": "string", "enum": ["option1", "option2", "option3"]},
        },
        "titledMulti": {
            "type": "array",
            "items": {"anyOf": [{"const": f"value{each}", "title": f"{each}. choice"} for each in (1, 2, 3)]},
        },
    },
}
ADDRESS = {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {"address": ADDRESS},
    "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"}},
    "additionalProperties": False,
}
TOOLS = (
    *("test_simple_text", "test_image_content", "test_audio_content", "test_embedded_resource"),
    *("test_multiple_content_types", "test_tool_with_logging", "test_tool_with_progress"),
    *("test_error_handling", "test_sampling", "test_reconnection", *SHAPES, "json_schema_2020_12_tool"),
)
PROMPTS = {
    "test_simple_prompt": (),
    "test_prompt_with_arguments": ("arg1", "arg2"),
    "test_prompt_with_embedded_resource": ("resourceUri",),
    "test_prompt_with_image": (),
}
writing = threading.Lock()
waiting = {}  # id of a request of ours -> [Event, answer]


def send(message):
    with writing:
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        sys.stdout.flush()


def ask(method, params):
    number = f"q{id(params)}"
    slot = waiting[number] = [threading.Event(), None]
    send({"id": number, "method": method, "params": params})
    slot[0].wait()
    if "error" in slot[1]:
        raise LookupError(slot[1]["error"]["message"])
    return slot[1]["result"]


def text(said):
    return {"type": "text", "text": said}


def image():
    return {"type": "image", "data": IMAGE, "mimeType": "image/png"}


def resource(uri, kind, said):
    return {"type": "resource", "resource": {"uri": uri, "mimeType": kind, "text": said}}


def call(name, given, token):
    if name == "test_image_content":
        return [image()]
    if name == "test_audio_content":
        return [{"type": "audio", "data": SOUND, "mimeType": "audio/wav"}]
    if name == "test_embedded_resource":
        said = "This is an embedded resource content."
        return [resource("test://embedded-resource", "text/plain", said)]
    if name == "test_multiple_content_types":
        data = json.dumps({"test": "data", "value": 123})
        mixed = resource("test://mixed-content-resource", "application/json", data)
        return [text("Multiple content types test:"), image(), mixed]
    if name == "test_tool_with_logging":
        for said in ("Tool execution started", "Tool processing data", "Tool execution completed"):
            send({"method": "notifications/message", "params": {"level": "info", "data": said}})
    if name == "test_tool_with_progress" and token is not None:
        for step in (0, 50, 100):
            params = {"progressToken": token, "progress": step, "total": 100}
            send({"method": "notifications/progress", "params": params})
            time.sleep(0.05)  # as the suite asks: its client drops progress that comes with the answer
    if name == "test_error_handling":
        raise LookupError("This tool intentionally returns an error for testing")
    if name == "test_sampling":
        message = {"role": "user", "content": text(given["prompt"])}
        said = ask("sampling/createMessage", {"messages": [message], "maxTokens": 100})
        return [text(f"LLM response: {said['content']['text']}")]
    if name in SHAPES:
        schema = {"type": "object", "properties": SHAPES[name], "required": []}
        said = ask("elicitation/create", {"message": given.get("message", name), "requestedSchema": schema})
        return [text(f"Elicitation completed: action={said['action']}, content={said.get('content')}")]
    return [text("This is a simple text response for testing.")]


def prompt(name, given):
    parts = [text("This is a simple prompt for testing.")]
    if name == "test_prompt_with_arguments":
        parts = [text(f"Prompt with arguments: arg1='{given['arg1']}', arg2='{given['arg2']}'")]
    elif name == "test_prompt_with_embedded_resource":
        said = resource(given["resourceUri"], "text/plain", "Embedded resource content for testing.")
        parts = [said, text("Please process the embedded resource above.")]
    elif name == "test_prompt_with_image":
        parts = [image(), text("Please analyze the image above.")]
    return {"messages": [{"role": "user", "content": part} for part in parts]}


def read(uri):
    if uri == "test://static-binary":
        return {"uri": uri, "mimeType": "image/png", "blob": IMAGE}
    if uri.startswith("test://template/"):
        number = uri.split("/")[3]
        said = json.dumps({"id": number, "templateTest": True, "data": f"Data for ID: {number}"})
        return {"uri": uri, "mimeType": "application/json", "text": said}
    said = "This is the content of the static text resource."
    return {"uri": uri, "mimeType": "text/plain", "text": said}


def result(method, params):
    if method == "initialize":
        about = {"name": "suite", "version": "1"}
        return {"protocolVersion": "2025-11-25", "capabilities": CAPABILITIES, "serverInfo": about}
    if method == "tools/list":
        schemas = {"json_schema_2020_12_tool": SCHEMA}
        usual = {"type": "object"}
        return {
            "tools": [
                {"name": name, "description": f"Tests {name}.", "inputSchema": schemas.get(name, usual)}
                for name in TOOLS
            ]
        }
    if method == "prompts/list":
        return {
            "prompts": [
                {
                    "name": name,
                    "description": f"Tests {name}.",
                    "arguments": [{"name": each, "required": True} for each in given],
                }
                for name, given in PROMPTS.items()
            ]
        }
    if method == "resources/list":
        names = ("static-text", "static-binary", "watched-resource")
        return {"resources": [{"uri": f"test://{name}", "name": name, "description": name} for name in names]}
    if method == "resources/templates/list":
        return {"resourceTemplates": [{"uriTemplate": "test://template/{id}/data", "name": "template"}]}
    if method == "tools/call":
        token = params.get("_meta", {}).get("progressToken")
        try:
            return {"content": call(params["name"], params.get("arguments") or {}, token)}
        except LookupError as error:
            return {"content": [text(str(error))], "isError": True}
    if method == "prompts/get":
        return prompt(params["name"], params.get("arguments") or {})
    if method == "resources/read":
        return {"contents": [read(params["uri"])]}
    if method == "completion/complete":
        return {"completion": {"values": ["paris", "park", "party"], "total": 3, "hasMore": False}}
    return {}


def serve(message):
    send({"id": message["id"], "result": result(message["method"], message.get("params") or {})})


for line in sys.stdin:
    message = json.loads(line)
    if "method" not in message:
        slot = waiting.pop(message["id"])
        slot[1] = message
        slot[0].set()
    elif "id" in message:
        threading.Thread(target=serve, args=(message,), daemon=True).start()
