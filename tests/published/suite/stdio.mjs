// Each client of the suite starts the command in RUNNER_SUITE_COMMAND, a JSON list, and speaks with it on stdio.
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { public_uris } from "./preload.mjs";

const [command, ...args] = JSON.parse(process.env.RUNNER_SUITE_COMMAND);

export class StreamableHTTPClientTransport extends StdioClientTransport {
  constructor() {
    super({ command, args, env: process.env, stderr: "inherit" });
  }

  send(message) {
    return super.send(JSON.parse(public_uris(JSON.stringify(message))));
  }
}
