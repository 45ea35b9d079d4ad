// What the suite imports, replaced: see preload.mjs.
const changed = { fs: "./files.mjs" };
if (process.env.RUNNER_SUITE_COMMAND) {
  changed["@modelcontextprotocol/sdk/client/streamableHttp.js"] = "./stdio.mjs";
}

export async function resolve(specifier, context, next) {
  const changes = context.parentURL?.includes("/conformance/dist/") && specifier in changed;
  return changes
    ? { url: new URL(changed[specifier], import.meta.url).href, shortCircuit: true }
    : next(specifier, context);
}
