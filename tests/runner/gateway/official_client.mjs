// The official client in TypeScript: starts a server, calls a tool with progress, waits for a line, and calls again.
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [sdk, command, ...args] = process.argv.slice(2);
const { Client } = await import(pathToFileURL(`${sdk}/dist/esm/client/index.js`));
const { StdioClientTransport } = await import(pathToFileURL(`${sdk}/dist/esm/client/stdio.js`));

const client = new Client({ name: "typescript", version: "1" }, { capabilities: {} });
await client.connect(new StdioClientTransport({ command, args, env: process.env, stderr: "inherit" }));
const text = (result) => result.content[0].text;
const tools = (await client.listTools()).tools.map((tool) => tool.name);
const who = JSON.parse(text(await client.callTool({ name: "teller__who", arguments: {} })));
console.log(JSON.stringify({ tools, token: who.token }));
for await (const word of createInterface({ input: process.stdin })) {
  const progress = [];
  const told = text(
    await client.callTool({ name: "teller__tell", arguments: { word } }, undefined, {
      onprogress: (step) => progress.push(step.message),
    }),
  );
  console.log(JSON.stringify({ told, progress }));
}
await client.close();
